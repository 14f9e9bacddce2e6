"""Tickets: one capture, restore, slot copy or piece of a part in flight, and whether workers may still touch its rows.

    capture             sent -> accepted -> source_free -> published | failed
    restore, take       sent -> accepted ----------------> restored  | failed
    slot_to             sent -> accepted -> source_free -> copied    | failed
    slot_from, _direct  sent -> accepted ----------------> copied    | failed
    put_part            sent -> accepted -> source_free -> stored    | failed
    get_part            sent -> accepted ----------------> loaded    | failed
    mark                sent -> accepted ----------------> declared  | failed

A deadline or a lost connection ends the caller's waiting, never the operation. `rows_busy` stays true until a final
reply came, or every worker process that served the operation is proven gone, or the daemon, asked again, no longer
knows the operation.

The daemon holds the image of a take for its engine until the engine acknowledges it, which `result` does, or releases
it. A take whose caller gave it up, by `cancel` or by running into its own deadline, and then waits in no `result` when
its rows are restored after all, is released: the image stays, and may be taken again.
"""

import math
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from ipc.messages import Captured, Copied, Marked, PartLoaded, PartStored, Restored
from stratad._calls import ACCEPTED, FINAL, QUEUED, SENT, SOURCE_FREE, Call
from stratad._proofs import WorkerProof, wait_for_end
from stratad._pump import Pump
from stratad._registration import Session
from stratad._rows import RowUse
from stratad.errors import Cancelled, DeadlineExceeded, StratadError

if TYPE_CHECKING:
    from stratad._connection import Connection

ResultT_co = TypeVar(
    "ResultT_co", bound=Captured | Restored | Copied | Marked | PartStored | PartLoaded, covariant=True
)

_ENDS: Final = {
    "capture": "published",
    "restore": "restored",
    "take": "restored",
    "put_part": "stored",
    "get_part": "loaded",
    "mark": "declared",
}
# Captures, of which the rows are free before the end.
_FREED_EARLY: Final = ("capture", "slot_to", "put_part")
_STATES: Final = {QUEUED: "sent", SENT: "sent", ACCEPTED: "accepted", SOURCE_FREE: "source_free"}
# No process of the daemon outlives its supervisor by more than this.
OUTLIVES_S: Final = 1.0
# How often a wait looks whether the daemon has answered while it also waits for processes to end.
_LOOK_S: Final = 0.05


class Ticket(Generic[ResultT_co]):
    """A capture (result `Captured`), a restore (`Restored`), a slot copy, a mark with contents (`Marked`) or a piece of
    a part in flight.

    Made by `Engine.capture`, `restore`, `take` and the slot copies, and by puts and gets. Nothing moves it on but its
    own methods and other calls of the client: there is no thread behind it. Any thread may use it, and ``await ticket``
    is `result` for coroutines.
    """

    def __init__(
        self,
        kind: str,
        pump: Pump,
        call: Call,
        *,
        uses: tuple[RowUse, ...],
        slot: int,
        cancel: Callable[[int], None],
        acknowledge: Callable[[Session, int, float], Call] | None = None,
        release: Callable[[bytes, int, int], None] | None = None,
        on_success: Callable[[], None] | None = None,
    ) -> None:
        """Takes have both `acknowledge(session, image_id, until_s)` and `release(start_id, engine_id, image_id)`.
        `on_success` is called under the lock.
        """
        self.kind: Final = kind
        self.slot: Final = slot
        self.uses: Final = uses
        self._pump = pump
        self._call = call
        self._send_cancel = cancel
        self._make_acknowledgement = acknowledge
        self._acknowledgement: Call | None = None
        self._send_release = release
        self._on_success = on_success
        self._cancelled = False
        # Of takes: nobody wants the image any more, callers that wait in `result`, the image was released.
        self._given_up = False
        self._wanted = 0
        self._released = False
        # Of the last sending: who may touch the rows, and what the daemon called us.
        self._workers: tuple[WorkerProof, ...] = ()
        self._start_id = b""
        self._engine_id = 0
        self._disowned = False
        self._not_before_s = 0.0
        call.on_final = self._ended

    # --- for callers -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``sent``, ``accepted``, ``source_free``, ``failed``, or how its kind ends well (see the module)."""
        self._pump.poll()
        call = self._call
        if call.level == FINAL:
            if call.error is not None:
                return "failed"
            return _ENDS.get(self.kind, "copied")
        return _STATES[call.level]

    @property
    def rows_busy(self) -> bool:
        """Whether a worker may still touch the rows: then they must not be used, nor their memory released."""
        self._pump.poll()
        with self._pump.lock:
            return self.busy_stage(None)

    def done(self) -> bool:
        """Whether the operation ended, well or not, as far as this process knows. Never waits."""
        self._pump.poll()
        return self._call.level == FINAL

    def cancel(self) -> None:
        """Ask the daemon to stop between two slices; `result` then raises `Cancelled` unless the end came first.

        A take of which no thread waits for the result is released if its rows are, or will be, restored nevertheless;
        `result` then raises `Cancelled` too, with ``detail["restored"]`` set to ``"true"``.
        """
        with self._pump.lock:
            self._given_up = True
            self._call.unwanted = True
            self._release_if_given_up()
            if not self._cancelled and self._call.level != FINAL:
                self._cancelled = True
                if self._call.level == QUEUED:
                    self._pump.end(
                        self._call, Cancelled("cancelled", f"{self._call.name}: cancelled before it was sent")
                    )
                else:
                    self._send_cancel(self._call.seq)

    def wait_source_free(self, deadline_s: float | None = None) -> None:
        """Wait until the rows are no longer read (captures) or the operation has ended.

        Only from then on may the engine write the rows. `deadline_s` counts from now; None: the operation's own.

        Raises:
            DeadlineExceeded: not in time; the rows stay busy. Past the operation's own deadline it is cancelled too.
            StratadError: the operation failed.
        """
        if not self._pump.wait(self._call, SOURCE_FREE, self._until_s(deadline_s)):
            raise self._expire()
        if self._call.level == FINAL and self._call.error is not None:
            raise self._call.error.with_traceback(None)

    def group_done(self, stage: int, group: int) -> bool:
        """Whether a layered restore has written all of a group of a stage, as far as this process knows. Never waits.

        Raises:
            StratadError: the restore failed: nothing of what it wrote may be used.
        """
        self._pump.poll()
        found = self._pump.group_call(self._call, stage, group)
        if self._call.level == FINAL and self._call.error is not None:
            raise self._call.error.with_traceback(None)
        return found.level == FINAL

    def wait_group(self, stage: int, group: int, deadline_s: float | None = None) -> None:
        """Wait until a layered restore has written all of a group of a stage (groups count row groups first, then
        state groups); any other ticket is waited for as a whole. `deadline_s` is that of `result`.

        Raises:
            DeadlineExceeded: not in time; the rows stay busy. Past the operation's own deadline it is cancelled too.
            StratadError: the restore failed: nothing of what it wrote may be used.
        """
        found = self._pump.group_call(self._call, stage, group)
        if not self._pump.wait(found, FINAL, self._until_s(deadline_s)):
            raise self._expire()
        if self._call.level == FINAL and self._call.error is not None:
            raise self._call.error.with_traceback(None)

    async def group_async(self, stage: int, group: int) -> None:
        """`wait_group` for coroutines, with the operation's own deadline."""
        found = self._pump.group_call(self._call, stage, group)
        if not await self._pump.wait_async(found, FINAL, self._until_s(None)):
            raise self._expire()
        if self._call.level == FINAL and self._call.error is not None:
            raise self._call.error.with_traceback(None)

    def result(self, deadline_s: float | None = None) -> ResultT_co:
        """Wait for the end; a take that was not released is then acknowledged, and the daemon's answer waited for.

        `deadline_s` counts from now; None: the operation's own deadline. The call may be repeated, also after a
        `DeadlineExceeded`.

        Raises:
            DeadlineExceeded: not in time; the rows stay busy. Past the operation's own deadline it is cancelled too.
            Lost: the daemon died; see `rows_busy`. For a take whose rows are restored but whose acknowledgement was
            lost,
                ``detail["restored"]`` is ``"true"`` and the image may be there still.
            Cancelled: it was cancelled; or it is a take that was released, see `cancel`.
            StratadError: the operation failed.
        """
        until_s = self._until_s(deadline_s)
        self._want(1)
        try:
            if not self._pump.wait(self._call, FINAL, until_s):
                raise self._expire()
            acknowledgement = self._acknowledge(until_s)
        finally:
            self._want(-1)
        if acknowledgement is not None and not self._pump.wait(acknowledgement, FINAL, until_s):
            raise self._pump.deadline_error(acknowledgement)
        return self._outcome()

    def __await__(self) -> Generator[object, None, ResultT_co]:
        """`result` for coroutines, with the operation's own deadline."""
        return self._result_async().__await__()

    async def source_free_async(self) -> None:
        """`wait_source_free` for coroutines, with the operation's own deadline."""
        if not await self._pump.wait_async(self._call, SOURCE_FREE, self._until_s(None)):
            raise self._expire()
        if self._call.level == FINAL and self._call.error is not None:
            raise self._call.error.with_traceback(None)

    def wait_rows_free(self, deadline_s: float) -> bool:
        """Wait until `rows_busy` is false; False when `deadline_s` (from now) came first."""
        until_s = time.monotonic() + deadline_s
        while self.rows_busy:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._call.level < FINAL:
                self._pump.wait(self._call, SOURCE_FREE, min(until_s, time.monotonic() + _LOOK_S))
            else:
                wait_for_end(self._workers, min(left_s, _LOOK_S))
        return True

    # --- for the engine, under the pump's lock -----------------------------------------------------------------------

    def sent_by(self, link: "Connection", engine_id: int, workers: tuple[WorkerProof, ...]) -> None:
        """The request goes out now on `link`; `workers` (one a stage) will serve it."""
        self._start_id = link.welcome.start_id
        self._engine_id = engine_id
        self._workers = workers
        self._disowned = False

    def workers_changed(self, engine_id: int, workers: tuple[WorkerProof, ...]) -> None:
        """The daemon may have the operation done by `workers` from now on; their predecessors are gone."""
        if self._call.level < FINAL and self._call.was_sent and self._engine_id == engine_id:
            self._workers = workers

    def disown(self, start_id: bytes, engine_ids_in_flight: set[int]) -> None:
        """The daemon `start_id` listed the engines that have operations in flight."""
        if self._call.lost and start_id == self._start_id and self._engine_id not in engine_ids_in_flight:
            self._disowned = True

    def unresolved(self, start_id: bytes) -> bool:
        """Whether only the daemon `start_id`, which knew the operation, could say that it ended."""
        return self._call.lost and self._start_id == start_id and self.busy_stage(None)

    def busy_stage(self, stage: int | None) -> bool:
        """Whether a worker may still touch the rows on `stage` (None: on any)."""
        call = self._call
        # A lost call never got the daemon's word: its workers are the only witnesses.
        if call.level == FINAL and (self._disowned or not call.lost):
            return False
        if self.kind in _FREED_EARLY and SOURCE_FREE in (call.level, call.reached):
            return False
        if call.level < FINAL:
            # Whoever waits no longer, and even a worker's death, ends nothing: the daemon may have kept the operation
            # for the worker's successor. Its final reply will come.
            return True
        if time.monotonic() < self._not_before_s:
            return True
        workers = self._workers if stage is None else self._workers[stage : stage + 1]
        return not all(worker.gone() for worker in workers)

    @property
    def workers(self) -> tuple[WorkerProof, ...]:
        """Proofs that this ticket still needs."""
        return self._workers

    @property
    def seq(self) -> int:
        """Number of the request."""
        return self._call.seq

    # --- inside ------------------------------------------------------------------------------------------------------

    def _ended(self, call: Call) -> None:
        if call.lost and any(worker.gone() for worker in self._workers):
            # Either the workers died with their daemon, or one was replaced and the news of it died with the daemon.
            # That unknown one ends as well, if only a little later.
            self._not_before_s = time.monotonic() + OUTLIVES_S
        self._release_if_given_up()
        if self._on_success is not None and call.error is None:
            self._on_success()

    def _want(self, change: int) -> None:
        """A caller begins (1) or ends (-1) to wait for the result of a take."""
        if self._send_release is not None:
            with self._pump.lock:
                self._wanted += change
                self._release_if_given_up()

    def _release_if_given_up(self) -> None:
        """Let go of an image that was taken for nobody. Under the lock."""
        reply = self._call.reply
        if (
            self._send_release is not None
            and self._given_up
            and not self._wanted
            and self._acknowledgement is None
            and not self._released
            and isinstance(reply, Restored)
        ):
            self._released = True
            self._send_release(self._start_id, self._engine_id, reply.image_id)

    async def _result_async(self) -> ResultT_co:
        until_s = self._until_s(None)
        self._want(1)
        try:
            if not await self._pump.wait_async(self._call, FINAL, until_s):
                raise self._expire()
            acknowledgement = self._acknowledge(until_s)
        finally:
            self._want(-1)
        if acknowledgement is not None and not await self._pump.wait_async(acknowledgement, FINAL, until_s):
            raise self._pump.deadline_error(acknowledgement)
        return self._outcome()

    def _until_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self._call.until_s
        if math.isnan(deadline_s):
            raise ValueError("deadline_s is NaN")
        return time.monotonic() + deadline_s

    def _expire(self) -> StratadError:
        """A wait ended without its event; past the operation's own deadline the operation is stopped as well."""
        call = self._call
        with self._pump.lock:
            past = time.monotonic() >= call.until_s
            if past and call.level > QUEUED:
                self.cancel()
            if call.level == FINAL:  # it came in the last moment: the next call of `result` says which end
                return DeadlineExceeded("deadline", f"{call.name}: no final reply in time")
            error = self._pump.deadline_error(call)
            if past:
                self._pump.abandon(call, keep=True)
            return error

    def _acknowledge(self, until_s: float) -> Call | None:
        if self._make_acknowledgement is None or self._call.error is not None:
            return None
        with self._pump.lock:
            if self._acknowledgement is None and not self._released:
                image_id = cast("Restored", self._call.reply).image_id
                # The rows are there; the acknowledgement may still be sent when the time of the restore is up.
                session = Session(self._start_id, self._engine_id)
                self._acknowledgement = self._make_acknowledgement(session, image_id, until_s)
            return self._acknowledgement

    def _outcome(self) -> ResultT_co:
        if self._call.error is not None:
            raise self._call.error.with_traceback(None)
        if self._released:
            text = f"{self._call.name}: given up before its end was known; the rows are restored, the image stays"
            raise Cancelled("cancelled", text, detail={"restored": "true"})
        acknowledgement = self._acknowledgement
        if acknowledgement is not None and acknowledgement.error is not None:
            error = acknowledgement.error
            error.detail["restored"] = "true"
            raise error.with_traceback(None)
        return cast("ResultT_co", self._call.reply)
