"""A put: an image in the making, whose parts are copied into an exchange one after the other."""

import contextlib
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    PART_META_CHARS,
    PART_NAME_CHARS,
    Captured,
    Done,
    PartStored,
    PutAbort,
    PutCommit,
    PutPart,
    Request,
)
from shm.rows import RowRuns, pack_rows
from stratad._buffers import BufferLike, byte_view, describe
from stratad._registration import Session
from stratad._room import Transfer
from stratad.errors import Cancelled, StratadError, UsageError

if TYPE_CHECKING:
    from stratad._exchange import Exchange

ReplyT = TypeVar("ReplyT")


class Put:
    """An image in the making. Made by `Exchange.put`. Thread-safe: parts may come from several threads.

    As a context manager it publishes at the end of the block, and gives up when the block raises.
    """

    def __init__(
        self, exchange: "Exchange", conversation: str, put_id: int, session: Session, deadline_s: float | None
    ) -> None:
        self.conversation: Final = conversation
        self._exchange = exchange
        self._put_id = put_id
        self._session = session
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._sent: list[Transfer] = []
        self._names: set[str] = set()
        self._failed: dict[str, StratadError] = {}
        self._ended = False
        self._result: Captured | None = None

    def add(self, name: str, data: BufferLike, meta: str | None = None) -> None:
        """Copy a part into the exchange and send it off: `data` may be changed as soon as this returns. Waits for room
        only. `meta` is a short note kept with the part; None: element type and shape, where `data` has them.

        A part may fail after `add` has returned. The next `add` of another part, or the commit, then raises its error,
        which names it in ``detail["part"]``: it may be added again, and what that `add` was called with was not added.
        One that the daemon stored after its deadline cannot (``duplicate_part``): then only an abort is left.

        Raises:
            UsageError: `data` is no buffer or not contiguous, the name is taken, the put has ended or its exchange is
                closed.
            StratadError: an earlier part failed; this one cannot be sent.
            Lost: the daemon is gone, and the put with it.
        """
        view = byte_view(data, f"part {name!r}")
        note = describe(data)[:PART_META_CHARS] if meta is None else meta
        if not name or len(name) > PART_NAME_CHARS or not name.isprintable() or len(note) > PART_META_CHARS:
            raise UsageError(
                "bad_value",
                f"a part's name has 1 to {PART_NAME_CHARS} printable characters and its note at most "
                f"{PART_META_CHARS}, got {name[:40]!r} and {len(note)}",
            )
        with self._lock:
            self._check_open()
            self._sweep()
            if name in self._names and name not in self._failed:
                raise UsageError("duplicate_part", f"part {name!r} was added before")
            if name in self._failed:
                # Whatever else has failed: of several parts, each must be let in again before the others are.
                self._settle_all()  # only then may the part begin anew
                del self._failed[name]
            else:
                self._raise_failure()
            self._names.add(name)
            try:
                self._send(name, view, note)
            except StratadError as exc:
                self._note(name, exc)
                self._raise_if_duplicate(name)
                raise
            except BaseException:  # an interrupt, say: without it a commit would publish what lacks the part
                self._note(name, Cancelled("cancelled", f"part {name!r} was not added: the call was interrupted"))
                raise

    def commit(self) -> Captured:
        """Wait for all parts and publish the image; it takes the place of the conversation's former one.

        Raises:
            StratadError: a part failed, named in ``detail["part"]``: nothing is published, the put goes on.
        """
        with self._lock:
            self._check_open()
            self._settle_all()
            self._raise_failure()
            answer = self._ask("put_commit", lambda seq: PutCommit(seq, self._engine_id, self._put_id), Captured)
            self._ended = True
            self._result = answer
            return answer

    def abort(self) -> None:
        """Give up: the daemon frees what was stored, and the conversation's former image stays. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            # It ends with its session anyhow, so nothing that goes wrong here needs to be known.
            with contextlib.suppress(StratadError):
                self._ask("put_abort", lambda seq: PutAbort(seq, self._engine_id, self._put_id), Done)
            self._settle_all()

    @property
    def result(self) -> Captured:
        """What was published.

        Raises:
            UsageError: the put was not committed.
        """
        if self._result is None:
            raise UsageError("unknown_put", f"the put of {self.conversation!r} was not committed")
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif not self._ended:
            try:
                self.commit()
            except BaseException:
                self.abort()
                raise

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _engine_id(self) -> int:
        return self._session.engine_id

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("unknown_put", f"the put of {self.conversation!r} has ended")
        self._exchange.engine.registration.check_open()

    def _raise_failure(self) -> None:
        if self._failed:
            name, error = next(iter(self._failed.items()))
            error.detail.setdefault("part", name)
            raise error.with_traceback(None)

    def _raise_if_duplicate(self, name: str) -> None:
        error = self._failed[name]
        if error.code == "duplicate_part":
            raise error

    def _sweep(self) -> None:
        """Take notice of what has ended already."""
        for transfer in self._sent:
            if not transfer.ended and transfer.ticket.done():
                self._exchange.room.settle(transfer)
        self._sent = [transfer for transfer in self._sent if not transfer.ended]

    def _settle_all(self) -> None:
        sent, self._sent = self._sent, []
        for transfer in sent:
            self._exchange.room.settle(transfer)

    def _send(self, name: str, view: memoryview, note: str) -> None:
        exchange = self._exchange
        if not view.nbytes:  # it has no rows to travel in
            part = functools.partial(self._part, name=name, nbytes=0, note=note, rows=(), first_row=0)
            self._ask("put_part", part, PartStored)
        for first_row, count in exchange.pieces(view.nbytes):
            rows = exchange.room.take(count, exchange.client.until_s(self._deadline_s))
            try:
                _fill(exchange.pool.buffer, rows, view[first_row * EXCHANGE_ROW_BYTES :])
                build = functools.partial(
                    self._part, name=name, nbytes=view.nbytes, note=note, rows=rows, first_row=first_row
                )
                ticket = exchange.engine.operations.part(
                    build, PartStored, rows, session=self._session, deadline_s=self._deadline_s
                )
            except BaseException:
                exchange.room.give(rows)
                raise
            self._sent.append(exchange.room.begin(rows, ticket, functools.partial(self._note, name), spare=False))
            if name in self._failed:
                self._raise_failure()

    def _note(self, name: str, error: StratadError | None) -> None:
        """A piece ended. Called by any thread, which may hold the lock of another put: so none is taken here."""
        if error is None:
            return
        if error.code == "duplicate_part":
            # No name is used twice here, so this part had failed for its caller only: by its deadline, say.
            error = UsageError(
                "duplicate_part",
                f"part {name!r} was stored after all by an earlier add, after that had failed, or it still is on its "
                "way; it cannot be added again: abort the put and begin anew",
            )
        self._failed.setdefault(name, error)

    def _part(
        self, seq: int, left_s: float = 0.0, *, name: str, nbytes: int, note: str, rows: RowRuns, first_row: int
    ) -> PutPart:
        packed = pack_rows(rows)
        return PutPart(seq, self._engine_id, self._put_id, name, nbytes, packed, note, first_row, left_s)

    def _ask(self, name: str, build: Callable[[int], Request], expected: type[ReplyT]) -> ReplyT:
        exchange = self._exchange
        until_s = exchange.client.until_s(self._deadline_s)
        return exchange.ask(name, build, expected, self._session, until_s)


def _fill(exchange: memoryview, rows: RowRuns, source: memoryview) -> None:
    """Copy the beginning of `source` into rows; what the last row has beyond it becomes zeros, so that equal parts are
    equal chunks and nothing of another part is stored.
    """
    at = 0
    for first, count in rows:
        start, size = first * EXCHANGE_ROW_BYTES, count * EXCHANGE_ROW_BYTES
        part = source[at : at + size]
        exchange[start : start + part.nbytes] = part
        if part.nbytes < size:
            exchange[start + part.nbytes : start + size] = bytes(size - part.nbytes)
        at += size
