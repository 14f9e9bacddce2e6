"""The operations of an engine: from a caller's arguments to a request that is sent, and the ticket for its end."""

import contextlib
import operator
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ipc.messages import (
    SLOT_LIMIT,
    Acknowledge,
    Cancel,
    Capture,
    Captured,
    Copied,
    Done,
    Mark,
    Marked,
    PartLoaded,
    PartStored,
    Release,
    Request,
    Restore,
    Restored,
    SlotDirect,
    SlotFrom,
    SlotTo,
)
from shm.layout import StageLayout, interned
from shm.rows import ROW_LIMIT, RowRuns, pack_numbers
from stratad._arguments import U32_LIMIT, TokensLike, pack_tokens
from stratad._calls import Call
from stratad._fences import Fences
from stratad._registration import Registration, Session
from stratad._rows import Checkpoints, RowsGiven, RowUse, StageRows, check_checkpoints, stage_rows
from stratad.errors import Lost, UsageError
from stratad.tickets import Ticket

if TYPE_CHECKING:
    from stratad._connection import Connection
    from stratad.client import Client

# What reads rows only and replaces what it made before: to send it again on a new connection does no harm.
_REPEATABLE: Final = ("capture", "slot_to", "mark")

ResultT = TypeVar("ResultT", bound=Captured | Restored | Copied | Marked | PartStored | PartLoaded)
PartT = TypeVar("PartT", bound=PartStored | PartLoaded)


class ImageWanted(NamedTuple):
    """Which image a restore names, how many of its tokens (-1: all), and how many of these may be in their rows."""

    conversation: str
    image_id: int
    tokens: int
    take: bool
    resident_tokens: int = 0


class SlotSource(NamedTuple):
    """Whose transit image is copied, and how many of its tokens may be in the rows already."""

    slot: int
    keep: bool
    resident_tokens: int = 0


class _Reading(NamedTuple):
    """Checked rows that an operation reads, and the positions of their states."""

    use: RowUse
    positions: bytes
    slots: tuple[int, ...]


class Operations:
    """Starts the operations of one engine. Every method returns at once with a ticket; see `stratad.client.Engine` for
    what they mean.
    """

    def __init__(
        self, client: "Client", registration: Registration, layouts: tuple[StageLayout, ...], fences: Fences
    ) -> None:
        self._client = client
        self._pump = client.pump
        self._registration: Final = registration
        self._layouts = interned(layouts)
        self._fences = fences

    def capture(
        self,
        conversation: str,
        tokens: TokensLike,
        given: RowsGiven,
        slot: int,
        *,
        checkpoints: Checkpoints,
        deadline_s: float | None,
    ) -> Ticket[Captured]:
        """Capture rows into an image."""
        packed = pack_tokens(tokens)
        reading = self._reading(given, len(packed) // 4, slot, checkpoints)
        self._order()

        def build(seq: int, left_s: float) -> Request:
            engine_id, rows, ordered = self._registration.engine_id, reading.use.packed, self._ordered()
            return Capture(seq, engine_id, conversation, packed, rows, slot, ordered, reading.positions, left_s)

        return self._start("capture", build, Captured, (reading.use,), slot, deadline_s)

    def mark(
        self, conversation: str, tokens: TokensLike, given: RowsGiven, slot: int, deadline_s: float | None
    ) -> Ticket[Marked]:
        """Declare what rows hold."""
        packed = pack_tokens(tokens)
        count = len(packed) // 4
        reading = self._reading(given, count, slot, self._state_at(count, slot))
        self._order()
        marks = self._registration.marks
        before = marks.turn(slot)

        def build(seq: int, left_s: float) -> Request:
            engine_id, rows, ordered = self._registration.engine_id, reading.use.packed, self._ordered()
            return Mark(seq, engine_id, slot, "clean", conversation, packed, rows, ordered, left_s)

        def declared() -> None:
            if marks.turn(slot) == before:
                marks.set(slot, "clean")

        return self._start("mark", build, Marked, (reading.use,), slot, deadline_s, on_success=declared)

    def restore(self, image: ImageWanted, given: RowsGiven, slot: int, deadline_s: float | None) -> Ticket[Restored]:
        """Restore an image into rows, or take it."""
        if (not image.conversation) == (image.image_id == 0):
            raise UsageError("bad_value", "give either conversation or image_id")
        if image.tokens < -1 or image.tokens == 0:
            raise UsageError("bad_tokens", f"tokens must be -1 (all) or above 0, got {image.tokens}")
        check_resident(image.resident_tokens)
        use = self._writing(given, image.tokens, (slot,), slot)
        self._order()

        def build(seq: int, left_s: float) -> Request:
            engine_id, rows, ordered = self._registration.engine_id, use.packed, self._ordered()
            conversation, image_id, tokens, take, resident = image
            return Restore(seq, engine_id, conversation, rows, slot, ordered, image_id, tokens, take, left_s, resident)

        kind = "take" if image.take else "restore"
        return self._start(kind, build, Restored, (use,), slot, deadline_s)

    def slot_direct(
        self, tokens: int, source: RowsGiven, target: RowsGiven, slots: tuple[int, int], deadline_s: float | None
    ) -> Ticket[Copied]:
        """Copy rows to rows on the devices; `slots` are those of source and target."""
        slot, target_slot = slots
        reading = self._reading(source, _counted(tokens), slot, self._state_at(tokens, slot))
        use = self._writing(target, tokens, (target_slot,), target_slot)
        self._order()

        def build(seq: int, left_s: float) -> Request:
            engine_id, ordered = self._registration.engine_id, self._ordered()
            rows, target_rows = reading.use.packed, use.packed
            return SlotDirect(seq, engine_id, tokens, rows, target_rows, slot, target_slot, ordered, left_s)

        uses = (reading.use, use)
        return self._start("slot_direct", build, Copied, uses, target_slot, deadline_s)

    def slot_to(self, tokens: int, given: RowsGiven, slot: int, deadline_s: float | None) -> Ticket[Captured]:
        """Copy rows into the slot's transit image."""
        reading = self._reading(given, _counted(tokens), slot, self._state_at(tokens, slot))
        self._order()

        def build(seq: int, left_s: float) -> Request:
            engine_id, rows, ordered = self._registration.engine_id, reading.use.packed, self._ordered()
            return SlotTo(seq, engine_id, tokens, rows, slot, ordered, left_s)

        return self._start("slot_to", build, Captured, (reading.use,), slot, deadline_s)

    def slot_from(self, source: SlotSource, given: RowsGiven, slot: int, deadline_s: float | None) -> Ticket[Restored]:
        """Copy a slot's transit image into rows."""
        source_slot, keep, resident = source
        check_slot(source_slot)
        check_resident(resident)
        use = self._writing(given, -1, (slot,), slot)
        self._order()

        def build(seq: int, left_s: float) -> Request:
            engine_id, rows, ordered = self._registration.engine_id, use.packed, self._ordered()
            return SlotFrom(seq, engine_id, source_slot, rows, slot, ordered, keep, left_s, resident)

        return self._start("slot_from", build, Restored, (use,), slot, deadline_s)

    def part(
        self,
        build: Callable[[int, float], Request],
        expected: type[PartT],
        runs: RowRuns,
        *,
        session: Session,
        deadline_s: float | None,
    ) -> Ticket[PartT]:
        """Move a piece of a part between the rows of an exchange and the daemon, in the session that began it."""
        self._client.check_process()
        self._pump.poll()
        self._registration.check_session(session)  # without a wait for a daemon that knows nothing of it
        writes = expected is PartLoaded
        use = RowUse((StageRows(self._layouts[0], (runs,)),), writes=writes)

        def in_session(seq: int, left_s: float) -> Request:
            self._registration.check_session(session)
            return build(seq, left_s)

        kind = "get_part" if writes else "put_part"
        return self._start(kind, in_session, expected, (use,), 0, deadline_s, bound=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _reading(self, given: RowsGiven, tokens: int, slot: int, checkpoints: Checkpoints) -> _Reading:
        self._client.check_process()
        check_slot(slot)
        positions = check_checkpoints(self._layouts, checkpoints, tokens)
        slots = tuple(state_slot for _, state_slot in checkpoints)
        rows = stage_rows(self._layouts, given, tokens, slots)
        return _Reading(RowUse(rows, writes=False), pack_numbers(positions), slots)

    def _state_at(self, tokens: int, slot: int) -> Checkpoints:
        """The one checkpoint of a slot copy, where stages have states."""
        return ((tokens, slot),) if any(layout.states for layout in self._layouts) else ()

    def _writing(self, given: RowsGiven, tokens: int, slots: Sequence[int], slot: int) -> RowUse:
        self._client.check_process()
        check_slot(slot)
        return RowUse(stage_rows(self._layouts, given, tokens, slots), writes=True)

    def _order(self) -> None:
        """Order the operation after what is on the current streams."""
        for export in self._registration.exports:
            export.order()

    def _ordered(self) -> str:
        """How the daemon can see that. Asked when a request is made: the daemon may be another one than it was when
        the operation was ordered, and one that cannot ask our events.
        """
        return "event" if any(export.ordered == "event" for export in self._registration.exports) else "host"

    def _start(  # noqa: PLR0917 - all of them make the one request
        self,
        kind: str,
        build: Callable[[int, float], Request],
        expected: type[ResultT],
        uses: tuple[RowUse, ...],
        slot: int,
        deadline_s: float | None,
        *,
        bound: bool = False,
        on_success: Callable[[], None] | None = None,
    ) -> Ticket[ResultT]:
        registration = self._registration

        def send(link: "Connection", seq: int) -> Request:
            ticket.sent_by(link, registration.engine_id, registration.workers)
            return build(seq, call.remaining_s())

        until_s = self._client.until_s(deadline_s)
        retry = kind in _REPEATABLE
        call: Call = Call(kind, send, expected, until_s, owner=registration, retry=retry, bound=bound)
        take = kind == "take"
        ticket: Ticket[ResultT] = Ticket(
            kind,
            self._pump,
            call,
            uses=uses,
            slot=slot,
            cancel=self._send_cancel,
            acknowledge=self._send_acknowledge if take else None,
            release=self._send_release if take else None,
            on_success=on_success,
        )
        with self._pump.lock:
            registration.check_open()
            self._fences.add(ticket, kind)
            self._pump.submit(call)
        self._client.ask_about_lost()
        return ticket

    def _send_acknowledge(self, session: Session, image_id: int, until_s: float) -> Call:
        def build(_: "Connection", seq: int) -> Request:
            if self._registration.session != session:
                raise Lost("lost", "acknowledge: the daemon that gave the image has gone; the image may still be there")
            return Acknowledge(seq, session.engine_id, image_id)

        call = Call("acknowledge", build, Done, until_s, owner=self._registration)
        self._pump.submit(call)
        return call

    def _send_release(self, start_id: bytes, engine_id: int, image_id: int) -> None:
        link = self._pump.link
        # Other than on the take's own connection there is nothing to release: the daemon did so when that ended.
        if link is not None and link.welcome.start_id == start_id and self._registration.engine_id == engine_id:
            call = Call("release", lambda _, seq: Release(seq, engine_id, image_id), Done, time.monotonic())
            with contextlib.suppress(UsageError):  # the client is being closed, which releases as well
                self._pump.submit(call)

    def _send_cancel(self, target_seq: int) -> None:
        self._pump.submit(Call("cancel", lambda _, seq: Cancel(seq, target_seq), Done, time.monotonic()))


def check_slot(slot: int) -> None:
    """Refuse a slot that could not be marked.

    Raises:
        UsageError: ``bad_value``.
    """
    if not 0 <= slot < SLOT_LIMIT:
        raise UsageError("bad_value", f"a slot must be 0 to {SLOT_LIMIT - 1}, got {slot}")


def check_resident(tokens: int) -> None:
    """Refuse a number of tokens that cannot be in rows.

    Raises:
        UsageError: ``bad_tokens``.
    """
    if not 0 <= tokens < ROW_LIMIT:
        raise UsageError("bad_tokens", f"resident_tokens must be 0 to {ROW_LIMIT - 1}, got {tokens}")


def _counted(tokens: int) -> int:
    """How many tokens a slot copy moves: a number, where a capture names them."""
    try:
        count = operator.index(tokens)
    except TypeError as exc:
        raise UsageError("bad_tokens", f"tokens is how many there are, an int, got {type(tokens).__name__}") from exc
    if not 0 < count < U32_LIMIT:
        raise UsageError("bad_tokens", f"tokens must be 1 to {U32_LIMIT - 1}, got {count}")
    return count
