"""An engine as its own process sees it: registered stages, marks, operations and the rows they fence."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args, overload

from ipc.messages import Captured, Copied, Done, Found, Lookup, Mark, Marked, Restored, SlotDrop, WorkerProcess
from stratad._arguments import TokensLike, pack_tokens
from stratad._calls import FINAL, Call
from stratad._fences import AnyTicket, Fences, rows_busy
from stratad._operations import ImageWanted, Operations, SlotSource, check_slot
from stratad._proofs import wait_for_end
from stratad._registration import Registration
from stratad._rows import Checkpoints, RowsGiven, StageRowsLike
from stratad._stages import StageExport
from stratad.errors import Busy, Lost, StratadError, UsageError
from stratad.tickets import Ticket

if TYPE_CHECKING:
    from stratad.client import Client

# How often a wait for the end of workers looks again.
_LOOK_S: Final = 0.05

MarkName = Literal["clean", "dirty", "poisoned"]


@dataclass(frozen=True)
class Match:
    """The longest published prefix that `Engine.lookup` found: the image can be restored to the first `tokens` of the
    asked ones.
    """

    image_id: int
    conversation: str
    tokens: int
    image_tokens: int


class _StageHold:
    """Why a pool of a stage must stay open."""

    def __init__(self, engine: "Engine", stage: int) -> None:
        self._engine = engine
        self._stage = stage

    def reason(self) -> StratadError | None:
        return self._engine.why_stage_held(self._stage)


class Engine:
    """A registered engine. Made by `Client.register`; stays valid over restarts of the daemon. Thread-safe.

    Rows are those of one operation in token order (see `stratad._arguments.parse_rows`): `rows` for all stages alike,
    or `rows_by_stage` with one entry a stage; a stage with several row groups takes `GroupRows`. Of a group with a
    window they are the rows of the tokens that the window holds (`RowGroup.first_token`). `slot` is the engine's own
    number of a slot, 0 to 65535. `deadline_s` None means the client's default.
    """

    def __init__(
        self,
        client: "Client",
        name: str,
        namespace: str,
        fingerprint: Mapping[str, str],
        exports: tuple[StageExport, ...],
        *,
        exchange: bool = False,
    ) -> None:
        self.name: Final = name
        self.namespace: Final = namespace
        self.layouts: Final = tuple(export.layout for export in exports)
        self.registration: Final = Registration(
            client.pump,
            namespace=namespace,
            name=name,
            fingerprint=fingerprint,
            exports=exports,
            deadline_s=client.default_deadline_s,
            exchange=exchange,
        )
        self._client = client
        self._pump = client.pump
        self._fences = Fences(client.pump, self.layouts)
        self.operations: Final = Operations(client, self.registration, self.layouts, self._fences)
        self.registration.on_first = self.registered_first
        self.registration.on_unmapped = self._unmapped
        self.registration.needed_proofs = self._fences.proofs
        self._holds = tuple(_StageHold(self, stage) for stage in range(len(exports)))

    # --- operations --------------------------------------------------------------------------------------------------

    def capture(
        self,
        conversation: str,
        tokens: TokensLike,
        rows: StageRowsLike | None = None,
        slot: int = 0,
        *,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        checkpoints: Checkpoints = (),
        deadline_s: float | None = None,
    ) -> Ticket[Captured]:
        """Start to capture `tokens` out of the rows into an image of `conversation`; returns at once.

        The copy is ordered after all work that is on the stages' current streams now; that work is waited for only
        where the GPU runtime shares no events, or shares none with the daemon because that runs as another user. The
        rows must not be written until the ticket is source free.
        Where stages have states, `checkpoints` are the positions, ascending, at which the image is to hold them, each
        with the state slot where that state lies: ``(token position, state slot)``.

        Raises:
            UsageError: the arguments contradict each other or the registration.
            Busy: a row is still written by an operation of this engine (code ``rows_busy``).
        """
        given = RowsGiven(rows, rows_by_stage)
        return self.operations.capture(
            conversation, tokens, given, slot, checkpoints=checkpoints, deadline_s=deadline_s
        )

    def restore(
        self,
        conversation: str = "",
        rows: StageRowsLike | None = None,
        slot: int = 0,
        *,
        image_id: int = 0,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        tokens: int = -1,
        resident_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Ticket[Restored]:
        """Start to restore the first `tokens` tokens (-1: all) of an image into the rows; returns at once.

        The image is named by its conversation or by `image_id`. The rows are as many as `tokens` need; for all tokens
        there may be more, of which the first are used. States go to state slot `slot`; they must be there at `tokens`,
        and no window may have passed what so many tokens need (code ``no_checkpoint``). The rows are undefined until
        the result is there, and after a failure those that the error's stages name.

        `resident_tokens`: the rows of so many first tokens may still hold the image's bytes, since they held them once.
        A daemon whose `shuttle.reuse` is ``verified`` then digests them and copies only what is not there (the
        outcomes' `skipped_bytes` say how much was); a number that is wrong costs time, never a wrong byte.

        Raises:
            UsageError: the arguments contradict each other or the registration.
            Busy: a row is still in use by an operation of this engine (code ``rows_busy``).
        """
        image = ImageWanted(conversation, image_id, tokens, take=False, resident_tokens=resident_tokens)
        return self.operations.restore(image, RowsGiven(rows, rows_by_stage), slot, deadline_s)

    def take(
        self,
        conversation: str = "",
        rows: StageRowsLike | None = None,
        slot: int = 0,
        *,
        image_id: int = 0,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        tokens: int = -1,
        resident_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Ticket[Restored]:
        """Like `restore`, and the image is given up once the ticket's `result` was asked for and is there.

        Until then the image is held for this engine: nobody else can take it. A ticket whose result nobody will ask
        for must be cancelled; see `Ticket.cancel`.
        """
        image = ImageWanted(conversation, image_id, tokens, take=True, resident_tokens=resident_tokens)
        return self.operations.restore(image, RowsGiven(rows, rows_by_stage), slot, deadline_s)

    def slot_direct(
        self,
        tokens: int,
        rows: StageRowsLike | None,
        target_rows: StageRowsLike | None,
        *,
        slot: int,
        target_slot: int,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        target_rows_by_stage: Sequence[StageRowsLike] | None = None,
        deadline_s: float | None = None,
    ) -> Ticket[Copied]:
        """Start to copy `tokens` tokens from rows to other rows of this engine, on the devices; returns at once.

        Where stages have states, the one in state slot `slot` is at `tokens` and goes to state slot `target_slot`. The
        source is only read, whatever happens; after a failure the error's stages name the target rows that are
        undefined.

        Raises:
            UsageError: the arguments contradict each other or the registration.
            Busy: a row is still in use by an operation of this engine (code ``rows_busy``).
        """
        source, target = RowsGiven(rows, rows_by_stage), RowsGiven(target_rows, target_rows_by_stage)
        return self.operations.slot_direct(tokens, source, target, (slot, target_slot), deadline_s)

    def slot_to(
        self,
        tokens: int,
        rows: StageRowsLike | None = None,
        slot: int = 0,
        *,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        deadline_s: float | None = None,
    ) -> Ticket[Captured]:
        """First half of a slot copy through the daemon's memory: start to copy the rows, always all of them, into the
        *transit image* of `slot`, with the state in state slot `slot` where stages have states. Nobody else sees it, it
        is never evicted, and it ends with this engine, with the next `slot_to` of the slot, or when a `slot_from` has
        copied it.

        Raises:
            UsageError: the arguments contradict each other or the registration.
            Busy: a row is still written by an operation of this engine (code ``rows_busy``).
        """
        return self.operations.slot_to(tokens, RowsGiven(rows, rows_by_stage), slot, deadline_s)

    def slot_from(
        self,
        source_slot: int,
        rows: StageRowsLike | None = None,
        slot: int = 0,
        *,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        keep: bool = False,
        resident_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Ticket[Restored]:
        """Second half: start to copy the transit image of `source_slot` into the rows, verified as in a restore. With
        `keep` the transit image stays; after a failure it always does. `resident_tokens` as in `restore`.

        Raises:
            UsageError: the arguments contradict each other or the registration; no transit image (``unknown_image``).
            Busy: a row is still in use by an operation of this engine (code ``rows_busy``).
        """
        source = SlotSource(source_slot, keep=keep, resident_tokens=resident_tokens)
        return self.operations.slot_from(source, RowsGiven(rows, rows_by_stage), slot, deadline_s)

    def slot_drop(self, slot: int, *, deadline_s: float | None = None) -> None:
        """Give up the transit image of a slot.

        Raises:
            UsageError: it has none (code ``unknown_image``).
        """
        self._client.wait(self._slot_drop_call(slot, deadline_s), Done)

    async def slot_drop_async(self, slot: int, *, deadline_s: float | None = None) -> None:
        """`slot_drop` for coroutines."""
        await self._client.wait_async(self._slot_drop_call(slot, deadline_s), Done)

    def lookup(self, tokens: TokensLike, *, deadline_s: float | None = None) -> Match | None:
        """The longest published prefix of `tokens` in this engine's namespace and fingerprint; None for a miss."""
        return _match(self._client.wait(self._lookup_call(tokens, deadline_s), Found))

    async def lookup_async(self, tokens: TokensLike, *, deadline_s: float | None = None) -> Match | None:
        """`lookup` for coroutines."""
        return _match(await self._client.wait_async(self._lookup_call(tokens, deadline_s), Found))

    @overload
    def mark(self, slot: int, mark: MarkName, *, deadline_s: float | None = None) -> None: ...

    @overload
    def mark(
        self,
        slot: int,
        mark: Literal["clean"],
        *,
        conversation: str,
        tokens: TokensLike,
        rows: StageRowsLike | None = None,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        deadline_s: float | None = None,
    ) -> Ticket[Marked]: ...

    def mark(
        self,
        slot: int,
        mark: MarkName,
        *,
        conversation: str = "",
        tokens: TokensLike | None = None,
        rows: StageRowsLike | None = None,
        rows_by_stage: Sequence[StageRowsLike] | None = None,
        deadline_s: float | None = None,
    ) -> Ticket[Marked] | None:
        """Mark a slot; a poisoned one is never captured. A mark outlives the daemon: it is sent again to the next.

        With a `conversation` a clean slot's contents are declared: its rows hold these tokens, complete, and state slot
        `slot` the states at their end. That starts an operation, ordered like a capture, which digests the rows (of a
        slot that was marked before: what is new); the rows must not be written until the ticket has ended. If this
        process then dies without a goodbye, the daemon publishes the conversation as far as the rows still have the
        declared bytes. It ends with any other mark of the slot, with whatever the daemon copies into the rows, and with
        the daemon: mark again, after each turn.

        Raises:
            UsageError: no such mark or slot; the arguments contradict each other or the registration.
            Busy: a row is still written by an operation of this engine (code ``rows_busy``).
        """
        if tokens is not None or conversation:
            if mark != "clean" or tokens is None or not conversation:
                raise UsageError("bad_value", "the contents of a clean slot are a conversation and its tokens")
            given = RowsGiven(rows, rows_by_stage)
            return self.operations.mark(conversation, tokens, given, slot, deadline_s)
        if rows is not None or rows_by_stage is not None:
            raise UsageError("bad_value", "rows were given, but no conversation and no tokens")
        call, undo = self._mark_call(slot, mark, deadline_s)
        try:
            self._client.wait(call, Done)
        except UsageError:
            undo()
            raise
        return None

    async def mark_async(self, slot: int, mark: MarkName, *, deadline_s: float | None = None) -> None:
        """`mark` for coroutines."""
        call, undo = self._mark_call(slot, mark, deadline_s)
        try:
            await self._client.wait_async(call, Done)
        except UsageError:
            undo()
            raise

    def unregister(self, *, deadline_s: float | None = None) -> None:
        """Wait for operations that may touch the rows, have the daemon unmap the pools, then let go of their memory.
        Images stay. Idempotent. Where the daemon is lost, the end of its workers is waited for in place of its answer.

        Raises:
            Busy: rows were still in use at the deadline: the engine stays registered. Or the workers of a lost daemon
                are not proven gone: the memory stays until they are (both with code ``rows_busy``).
            DeadlineExceeded: no answer in time: the memory stays until it comes.
        """
        self._client.check_process()
        until_s = self._client.until_s(deadline_s)
        for ticket in self.tickets:
            if not ticket.wait_rows_free(max(until_s - time.monotonic(), 0.0)):
                raise rows_busy(ticket, "unregister")
        with self._pump.lock:
            busy = self._fences.busy()
            if busy:  # another thread began it meanwhile
                raise rows_busy(busy[0], "unregister")
            closed = self.registration.closed
            # First: while it is in flight nothing is let go.
            asked = self.registration.unregister(until_s)
            if not closed:
                self._forget()
        if asked is not None:
            self._wait_for(asked, until_s)
            if asked.error is not None and not isinstance(asked.error, Lost):
                raise asked.error.with_traceback(None)
        self._wait_unmapped(until_s)

    async def unregister_async(self, *, deadline_s: float | None = None) -> None:
        """`unregister` for coroutines, in a thread of its own."""
        import asyncio  # noqa: PLC0415 - blocking callers need not pay for it

        await asyncio.to_thread(self.unregister, deadline_s=deadline_s)

    @property
    def tickets(self) -> tuple[AnyTicket, ...]:
        """Tickets whose rows are busy."""
        self._pump.poll()
        with self._pump.lock:
            return tuple(self._fences.busy())

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """The processes that serve the stages now."""
        with self._pump.lock:
            return tuple(worker.process for worker in self.registration.workers)

    # --- for the client and the pools, under the pump's lock ---------------------------------------------------------

    def registered_first(self) -> None:
        """The first registration succeeded: from now on the pools ask before they are closed."""
        for stage, export in enumerate(self.registration.exports):
            export.attach(self._holds[stage])
        self._client.remember(self)

    def why_stage_held(self, stage: int) -> StratadError | None:
        """Why the memory of a stage must stay, or None."""
        self._pump.poll()
        with self._pump.lock:
            busy = self._fences.on_stage(stage)
            if busy is not None:
                return rows_busy(busy, "close the pool")
            if not self.registration.closed:
                return UsageError("bad_value", f"the pool is registered with engine {self.name!r}: unregister first")
            if self.registration.mapped_on(stage):
                return self._still_mapped("close the pool")
            self.still_fenced()
            return None

    def release(self) -> None:
        """Forget the registration. Rows that are busy, and workers that have it mapped, keep their stage's memory and
        what proves the end.
        """
        if not self.registration.closed:
            self.registration.close()
            self._forget()

    def still_fenced(self) -> bool:
        """Whether any memory must stay; lets go of that of stages where none must, once released."""
        if self.registration.closed:
            for stage, export in enumerate(self.registration.exports):
                if self._fences.on_stage(stage) is None and not self.registration.mapped_on(stage):
                    export.close(self._holds[stage])
            self.registration.prune_proofs()
        return bool(self._fences.busy()) or self.registration.mapped

    def let_go(self) -> None:
        """Let go of what must no longer stay. Takes the pump's lock."""
        with self._pump.lock:
            self._unmapped()

    def link_opened(self) -> None:
        """There is a new connection: register again on it."""
        self.registration.link_opened()

    def workers_changed(self, workers: Sequence[WorkerProcess]) -> bool:
        """Workers were started again; False: these cannot be this engine's."""
        ours = self.registration.workers_changed(workers)
        self._fences.workers_changed(self.registration.engine_id, self.registration.workers)
        self.registration.prune_proofs()
        return ours

    def unresolved(self, start_id: bytes) -> bool:
        """Whether a lost operation may still run in the living daemon `start_id`."""
        return self._fences.unresolved(start_id)

    def disown(self, start_id: bytes, engine_ids_in_flight: set[int]) -> None:
        """Pass on which engines have operations in flight in the daemon `start_id`."""
        self._fences.disown(start_id, engine_ids_in_flight)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._client.forget(self)
        self.still_fenced()

    def _unmapped(self) -> None:
        """What decides whether the stages are mapped may have changed."""
        if not self.still_fenced():
            self._client.unfence(self)

    def _wait_unmapped(self, until_s: float) -> None:
        """Wait until no worker has the stages mapped; see `unregister`."""
        while True:
            with self._pump.lock:
                if not self.registration.mapped:
                    self._unmapped()
                    return
                call, workers = self.registration.ending, self.registration.workers
            left_s = until_s - time.monotonic()
            if call is not None:
                self._wait_for(call, until_s)
            elif left_s <= 0 or not all(worker.provable for worker in workers):
                raise self._still_mapped("unregister")
            else:
                wait_for_end(workers, min(left_s, _LOOK_S))

    def _wait_for(self, call: Call, until_s: float) -> None:
        if not self._pump.wait(call, FINAL, until_s):
            raise self._pump.deadline_error(call)

    def _still_mapped(self, name: str) -> Busy:
        pids = sorted({worker.process.pid for worker in self.registration.workers if not worker.gone()})
        who = f"processes {pids}, not proven gone," if pids else "a worker"
        return Busy("rows_busy", f"{name}: {who} may still have the memory of engine {self.name!r} mapped")

    def _slot_drop_call(self, slot: int, deadline_s: float | None) -> Call:
        check_slot(slot)
        self.registration.check_open()
        return Call(
            "slot_drop",
            lambda _, seq: SlotDrop(seq, self.registration.engine_id, slot),
            Done,
            self._client.until_s(deadline_s),
            owner=self.registration,
        )

    def _lookup_call(self, tokens: TokensLike, deadline_s: float | None) -> Call:
        packed = pack_tokens(tokens)
        self.registration.check_open()
        return Call(
            "lookup",
            lambda _, seq: Lookup(seq, self.registration.engine_id, packed),
            Found,
            self._client.until_s(deadline_s),
            owner=self.registration,
            retry=True,
        )

    def _mark_call(self, slot: int, mark: MarkName, deadline_s: float | None) -> tuple[Call, Callable[[], None]]:
        if mark not in get_args(MarkName):
            raise UsageError("bad_value", f"mark must be one of {', '.join(get_args(MarkName))}, got {mark!r}")
        check_slot(slot)
        self.registration.check_open()
        with self._pump.lock:
            # Remembered before it is sent: a poisoned slot must not come back clean because the daemon died in between.
            before = self.registration.marks.get(slot)
            self.registration.marks.set(slot, mark)

        def undo() -> None:
            with self._pump.lock:
                self.registration.marks.set(slot, before)

        call = Call(
            "mark",
            lambda _, seq: Mark(seq, self.registration.engine_id, slot, mark),
            Done,
            self._client.until_s(deadline_s),
            owner=self.registration,
        )
        return call, undo


def _match(found: Found) -> Match | None:
    if found.match == "miss":
        return None
    return Match(found.image_id, found.conversation, found.tokens, found.image_tokens)
