"""A get: a held image, whose parts are copied out of an exchange one after the other, the next ones asked for ahead."""

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from ipc.messages import EXCHANGE_ROW_BYTES, Done, GetEnd, GetPart, PartLoaded, Parts, Request
from shm.rows import RowRuns, pack_rows
from stratad._buffers import BufferLike, byte_view
from stratad._registration import Session
from stratad._room import Transfer
from stratad.errors import StratadError, UsageError

if TYPE_CHECKING:
    from stratad._exchange import Exchange

# Pieces that a get has on their way at once.
_WINDOW: Final = 3


class PartNote(NamedTuple):
    """What an image says of a part: its bytes, and what was noted when it was put."""

    nbytes: int
    meta: str


class Get:
    """A held image whose parts can be read, in any order and any number of times. Made by `Exchange.get`. Thread-safe.

    Attributes:
        image_id: the image.
        tokens: the tokens it was put with, packed as u32; empty if there were none.
        parts: every part by name, in the order in which they were put.
    """

    def __init__(self, exchange: "Exchange", parts: Parts, session: Session, deadline_s: float | None) -> None:
        self.image_id: Final = parts.image_id
        self.tokens: Final = parts.tokens
        self.parts: Final[Mapping[str, PartNote]] = MappingProxyType(
            {part.name: PartNote(part.nbytes, part.meta) for part in parts.parts}
        )
        self._numbers: Final = {part.name: number for number, part in enumerate(parts.parts)}
        self._sizes: Final = [part.nbytes for part in parts.parts]
        self._exchange = exchange
        self._get_id = parts.get_id
        self._session = session
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._ahead: tuple[int, Transfer] | None = None
        self._ended = False

    def read(self, name: str) -> bytearray:
        """The bytes of a part, verified.

        Raises:
            UsageError: no such part (code ``unknown_part``), or the get is closed.
            Damaged: the part's bytes changed.
        """
        buffer = bytearray(self._sizes[self._number(name)])
        self._read(self._number(name), memoryview(buffer))
        return buffer

    def read_into(self, name: str, buffer: BufferLike) -> None:
        """Read a part into writable, contiguous memory of exactly its size.

        Every piece is verified before a byte of it is written to `buffer`; after a failure the pieces before it, of a
        part of several, have been.

        Raises:
            UsageError: no such part, a buffer of another size or that cannot be written, or the get is closed.
            Damaged: the part's bytes changed.
        """
        number = self._number(name)
        view = byte_view(buffer, f"the buffer for part {name!r}", writable=bool(self._sizes[number]))
        if view.nbytes != self._sizes[number]:
            raise UsageError("bad_value", f"part {name!r} has {self._sizes[number]} bytes, the buffer {view.nbytes}")
        self._read(number, view)

    def close(self) -> None:
        """Let the image go. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._drop_ahead()
            # The hold ends with the session anyhow, so nothing that goes wrong here needs to be known.
            with contextlib.suppress(StratadError):
                until_s = self._exchange.client.until_s(self._deadline_s)
                engine_id, get_id = self._session.engine_id, self._get_id
                self._exchange.ask("get_end", lambda seq: GetEnd(seq, engine_id, get_id), Done, self._session, until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            raise UsageError("unknown_part", f"image {self.image_id} has no part {name!r}")
        return number

    def _read(self, number: int, view: memoryview) -> None:
        room = self._exchange.room
        with self._lock:
            if self._ended:
                raise UsageError("unknown_get", "the get is closed")
            self._exchange.engine.registration.check_open()
            if not view.nbytes:  # such a part does not travel
                return
            pieces = deque(self._exchange.pieces(view.nbytes))
            under_way: deque[tuple[int, Transfer]] = deque()
            ahead = self._take_ahead(number)
            if ahead is not None:
                under_way.append((pieces.popleft()[0], ahead))
            try:
                while pieces or under_way:
                    self._ask_ahead(number, pieces, under_way)
                    first_row, transfer = under_way[0]
                    error = transfer.wait()
                    if error is None:
                        _drain(self._exchange.pool.buffer, transfer.rows, view[first_row * EXCHANGE_ROW_BYTES :])
                    under_way.popleft()
                    room.end(transfer, error)
                    if error is not None and transfer is ahead:  # what stopped it then may be over
                        pieces.appendleft(next(self._exchange.pieces(view.nbytes)))
                    elif error is not None:
                        raise error.with_traceback(None)
            finally:
                for _, transfer in under_way:
                    room.settle(transfer)

    def _ask_ahead(self, number: int, pieces: deque[tuple[int, int]], under_way: deque[tuple[int, Transfer]]) -> None:
        """Keep some pieces of this part on their way, and with them the first one of the next."""
        room = self._exchange.room
        while pieces and len(under_way) < _WINDOW:
            first_row, count = pieces[0]
            until_s = self._exchange.client.until_s(self._deadline_s)
            # Whoever has a piece to go on with does not wait for room.
            rows = room.try_take(count) if under_way else room.take(count, until_s)
            if rows is None:
                return
            pieces.popleft()
            under_way.append((first_row, self._request(number, rows, first_row, spare=False)))
        after = next((n for n in range(number + 1, len(self._sizes)) if self._sizes[n]), None)
        if after is not None and self._ahead is None and len(under_way) < _WINDOW and not pieces:
            _, count = next(self._exchange.pieces(self._sizes[after]))
            rows = room.try_take(count)
            if rows is not None:
                self._ahead = (after, self._request(after, rows, 0, spare=True))

    def _request(self, part: int, rows: RowRuns, first_row: int, *, spare: bool) -> Transfer:
        exchange, session = self._exchange, self._session

        def build(seq: int, left_s: float) -> Request:
            return GetPart(seq, session.engine_id, self._get_id, part, pack_rows(rows), first_row, left_s)

        try:
            ticket = exchange.engine.operations.part(
                build, PartLoaded, rows, session=session, deadline_s=self._deadline_s
            )
        except BaseException:
            exchange.room.give(rows)
            raise
        return exchange.room.begin(rows, ticket, _ignore, spare=spare)

    def _take_ahead(self, number: int) -> Transfer | None:
        """The piece that was asked for ahead, if it is of this part and still ours."""
        if self._ahead is None:
            return None
        part, transfer = self._ahead
        if part != number:
            self._drop_ahead()
            return None
        self._ahead = None
        return transfer if self._exchange.room.claim(transfer) else None

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            (_, transfer), self._ahead = self._ahead, None
            if self._exchange.room.claim(transfer):
                self._exchange.room.settle(transfer)


def _ignore(_: StratadError | None) -> None:
    """The reader has seen how it ended."""


def _drain(exchange: memoryview, rows: RowRuns, target: memoryview) -> None:
    """Copy rows to the beginning of `target`, as far as that goes."""
    at = 0
    for first, count in rows:
        start = first * EXCHANGE_ROW_BYTES
        size = min(count * EXCHANGE_ROW_BYTES, target.nbytes - at)
        target[at : at + size] = exchange[start : start + size]
        at += size
