"""Put and get: images of named parts that travel through an exchange, a segment of this client's own.

The exchange is a memfd that one worker has mapped, and nobody else. A part is copied into free rows of it and sent off;
`Put.add` then returns, and the worker copies while the caller goes on. Larger parts travel in pieces. A get asks ahead:
the next pieces are on their way while one is copied out.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    GetBegin,
    Parts,
    PutBegin,
    PutBegun,
    Request,
    StatsReply,
)
from shm.layout import Plane, StageLayout, one_group
from stratad._arguments import TokensLike, pack_tokens
from stratad._calls import Call
from stratad._engine import Engine, Match
from stratad._gets import Get
from stratad._puts import Put
from stratad._registration import Session
from stratad._room import Room
from stratad._stages import CpuExport
from stratad.errors import StratadError, UsageError
from stratad.pools import CpuPool

if TYPE_CHECKING:
    from stratad.client import Client

EXCHANGE_BYTES: Final = 64 << 20
# So many pieces fit: one is filled while the worker copies others.
_PIECES: Final = 4

ReplyT = TypeVar("ReplyT")


def allocate_exchange(exchange_bytes: int, chunk_rows: int) -> CpuPool:
    """The memory of an exchange: whole rows, at least two chunks of them.

    Raises:
        UsageError: too few bytes.
        NoSpace: the memory cannot be had.
    """
    least = 2 * chunk_rows * EXCHANGE_ROW_BYTES
    if exchange_bytes < least:
        raise UsageError("bad_value", f"an exchange needs at least {least} bytes, got {exchange_bytes}")
    return CpuPool.allocate(exchange_bytes // EXCHANGE_ROW_BYTES * EXCHANGE_ROW_BYTES, "stratad-exchange")


def export_exchange(device: str, pool: CpuPool, chunk_rows: int) -> CpuExport:
    """The one stage of an exchange."""
    plane = Plane(0, EXCHANGE_ROW_BYTES, EXCHANGE_ROW_BYTES, pool.nbytes // EXCHANGE_ROW_BYTES)
    return CpuExport(device, StageLayout(one_group([plane]), chunk_tokens=chunk_rows), pool)


def resolve_device(device: str, stats: Callable[[], StatsReply]) -> str:
    """The daemon's name of a device, which may be given by the name of its worker.

    Raises:
        UsageError: nobody serves it (code ``foreign_device``).
    """
    if device.startswith("cpu:"):  # worker and device have one name
        return device
    workers = stats().workers
    for worker in workers:
        if device in (worker.device, worker.worker):
            return worker.device
    known = ", ".join(f"{worker.worker} ({worker.device})" for worker in workers)
    raise UsageError("foreign_device", f"no worker serves device {device!r}; there are {known}")


class Exchange:
    """An open exchange; made by `stratad.client.Client.exchange`. Thread-safe; stays valid over restarts of the daemon,
    which end its puts and gets.
    """

    def __init__(self, client: "Client", engine: Engine, pool: CpuPool) -> None:
        self.nbytes: Final = pool.nbytes
        self.client: Final = client
        self.engine: Final = engine
        self.pool: Final = pool
        self.room: Final = Room(pool.nbytes // EXCHANGE_ROW_BYTES)
        step = engine.layouts[0].chunk_tokens
        self._piece_rows: Final = max(step, pool.nbytes // EXCHANGE_ROW_BYTES // _PIECES // step * step)

    def put(self, conversation: str, tokens: TokensLike | None = None, *, deadline_s: float | None = None) -> Put:
        """Begin an image of `conversation`. With `tokens` the image is found by them, as a whole only (`lookup`);
        without, by its name alone. `deadline_s` is the begin's, and that of every part.

        Raises:
            NoSpace: no room for one more image.
            Busy: too many puts are open (code ``too_many``).
        """
        packed = b"" if tokens is None else pack_tokens(tokens)
        session, begun = self._begin(
            "put_begin",
            lambda seq, engine_id: PutBegin(seq, engine_id, conversation, packed),
            PutBegun,
            deadline_s,
        )
        return Put(self, conversation, begun.put_id, session, deadline_s)

    def get(self, conversation: str = "", *, image_id: int = 0, deadline_s: float | None = None) -> Get:
        """Hold an image that was put, to read its parts; it stays until the get is closed, even if it is dropped.

        Raises:
            UsageError: no such image, or one of another device or fingerprint.
            Damaged: a part of it is known to be damaged.
        """
        if (not conversation) == (image_id == 0):
            raise UsageError("bad_value", "give either conversation or image_id")
        session, parts = self._begin(
            "get_begin", lambda seq, engine_id: GetBegin(seq, engine_id, conversation, image_id), Parts, deadline_s
        )
        return Get(self, parts, session, deadline_s)

    def lookup(self, tokens: TokensLike, *, deadline_s: float | None = None) -> Match | None:
        """The image put with the longest sequence of tokens that `tokens` begin with; None for a miss."""
        return self.engine.lookup(tokens, deadline_s=deadline_s)

    def close(self, *, deadline_s: float | None = None) -> None:
        """Close the exchange and give its memory back; open puts are given up, gets let go. Idempotent.

        Raises:
            Busy: a worker may still have it mapped (code ``rows_busy``).
        """
        self.engine.unregister(deadline_s=deadline_s)
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # its own error matters more; the client's end closes what is left
            with contextlib.suppress(StratadError):
                self.close()

    # --- for puts and gets -------------------------------------------------------------------------------------------

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """How a part of so many bytes travels: (first row, rows) of every piece."""
        rows = -(-nbytes // EXCHANGE_ROW_BYTES)
        for first in range(0, rows, self._piece_rows):
            yield first, min(self._piece_rows, rows - first)

    def ask(
        self, name: str, build: Callable[[int], Request], expected: type[ReplyT], session: Session, until_s: float
    ) -> ReplyT:
        """One request of a session and its answer.

        Raises:
            Lost: the session is over.
        """
        registration = self.engine.registration
        self.client.pump.poll()
        registration.check_session(session)

        def in_session(_: object, seq: int) -> Request:
            registration.check_session(session)
            return build(seq)

        return self.client.wait(Call(name, in_session, expected, until_s, owner=registration), expected)

    def _begin(
        self, name: str, build: Callable[[int, int], Request], expected: type[ReplyT], deadline_s: float | None
    ) -> tuple[Session, ReplyT]:
        registration = self.engine.registration
        registration.check_open()
        sessions: list[Session | None] = [None]

        def in_any(_: object, seq: int) -> Request:
            sessions[0] = registration.session
            return build(seq, registration.engine_id)

        # What a lost daemon began has ended with it, so this may be sent again.
        call = Call(name, in_any, expected, self.client.until_s(deadline_s), owner=registration, retry=True)
        reply = self.client.wait(call, expected)
        assert sessions[0] is not None, "only a registered engine's calls are sent"
        return sessions[0], reply
