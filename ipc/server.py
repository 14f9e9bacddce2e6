"""The ROUTER end: one socket, many peers, and no peer that can hold up the others.

A frame for a peer whose pipe is full waits in a queue of its own, bounded in count and bytes; a peer that does not read
fills only that. ZeroMQ does not say when one peer of many becomes writable, so while `pending_count` is above zero the
loop calls `flush` at each turn and does not wait longer than `FLUSH_S` between two turns.
"""

import enum
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from ipc.arrivals import Arrivals
from ipc.codec import BadFrame
from ipc.rundir import GROUP_REACH, Reach, check_socket_path, owner_only, prepare_directory, set_reach
from ipc.wire import readable, receive_all, send_to_now

FLUSH_S: Final = 0.005
# Long enough for a last reply to leave, short enough for a stop; without a bound a dead peer would hang the end.
LINGER_MS: Final = 200
# Messages in ZeroMQ's own pipes, per peer and direction; times the largest message it is what one peer can pile up.
HIGH_WATER_COUNT: Final = 64
# Messages of one peer that wait to be read: each may be as long as a message can be.
RECEIVE_COUNT: Final = 8
QUEUE_COUNT: Final = 1024
QUEUE_BYTES: Final = 64 * 1024 * 1024
# Of all peers. Above it those that have more than their share are refused first.
TOTAL_BYTES: Final = 256 * 1024 * 1024

ZmqContext = zmq.Context[zmq.Socket[bytes]]


class Sent(enum.Enum):
    """What became of a frame."""

    SENT = "sent"
    QUEUED = "queued"
    FULL = "full"  # refused: the peer does not read; what was queued before stays queued
    TOO_LARGE = "too_large"  # refused: above max_message_bytes
    UNREACHABLE = "unreachable"  # the peer has gone; its queue is dropped


class Incoming(NamedTuple):
    """A message from a peer. `frame_count` counts the frames after the identity: anything but 1 is no message of ours,
    and `frame` is then empty. `descriptor` is ZeroMQ's own of the connection that it came over (-1: not known); by now
    it may be closed, or another's.
    """

    peer: bytes
    frame: bytes
    frame_count: int
    descriptor: int = -1


def one_frame(incoming: Incoming) -> bytes:
    """The frame of a message.

    Raises:
        BadFrame: it has none or more than one.
    """
    if incoming.frame_count != 1:
        raise BadFrame("bad_frame", f"a message has one frame after the identity, got {incoming.frame_count}")
    return incoming.frame


@dataclass(slots=True)
class _Queue:
    """What waits for one peer. `still_since_s`: since when nothing of it has left, once that was asked."""

    frames: deque[bytes] = field(default_factory=deque)
    held_bytes: int = 0
    still_since_s: float | None = None


class RouterServer:
    """A bound ROUTER socket with its queues. For one thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        context: ZmqContext | None,
        path: Path,
        *,
        max_message_bytes: int,
        queue_count: int,
        queue_bytes: int,
        total_bytes: int,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.arrivals: Final = arrivals
        self._socket = socket
        self._fileno = socket.fileno()
        self._touched = True  # sent or read since `readable` was asked: its descriptor may have told of something then
        self._own_context = context
        self._path = path
        self._max_message_bytes = max_message_bytes
        self._queue_count = queue_count
        self._queue_bytes = queue_bytes
        self._queues: dict[bytes, _Queue] = {}
        self._total_bytes = total_bytes
        self._pending_bytes = 0

    @classmethod
    def bind(
        cls,
        path: Path,
        *,
        max_message_bytes: int,
        high_water_count: int = HIGH_WATER_COUNT,
        queue_count: int = QUEUE_COUNT,
        queue_bytes: int = QUEUE_BYTES,
        total_bytes: int = TOTAL_BYTES,
        linger_ms: int = LINGER_MS,
        reach: Reach = GROUP_REACH,
        context: ZmqContext | None = None,
        tell_arrivals: bool = False,
    ) -> Self:
        """Listen at `path`; its directory is made or checked first (see `ipc.rundir`).

        `reach` says who may connect. With `tell_arrivals` there are `arrivals`, which must be read. The caller holds
        the instance lock: ZeroMQ takes over whatever socket lies at the path. A `context` that is passed in stays the
        caller's.

        Raises:
            RunDirError: the path or its directory cannot be used.
            zmq.ZMQError: the socket cannot be bound.
        """
        check_socket_path(path)
        prepare_directory(path.parent)
        used = ZmqContext() if context is None else context
        own = used if context is None else None
        socket = used.socket(zmq.ROUTER)
        arrivals: Arrivals | None = None
        try:
            if tell_arrivals:
                arrivals = Arrivals.open(socket, path)
            socket.set(zmq.LINGER, linger_ms)
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.MAXMSGSIZE, max_message_bytes)
            socket.set(zmq.SNDHWM, high_water_count)
            socket.set(zmq.RCVHWM, RECEIVE_COUNT)
            with owner_only():  # between the two nobody else gets in
                socket.bind(f"ipc://{path}")
            set_reach(path, reach)
        except BaseException:
            if arrivals is not None:
                arrivals.close()
            socket.close(0)
            if own is not None:
                own.term()
            raise
        return cls(
            socket,
            own,
            path,
            max_message_bytes=max_message_bytes,
            queue_count=queue_count,
            queue_bytes=queue_bytes,
            total_bytes=total_bytes,
            arrivals=arrivals,
        )

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a `zmq.Poller`; read and written only through this object."""
        return self._socket

    def fileno(self) -> int:
        """ZeroMQ's own descriptor. It is edge-triggered: whoever polls it must call `recv_all` until it gives less
        than its limit, also after each send, before polling again.
        """
        return self._fileno

    @property
    def readable(self) -> bool:
        """Whether `recv_all` would find something of which `fileno` does not tell; to be asked before each wait for
        that, after the last send.
        """
        if not self._touched:
            return False
        self._touched = False
        return readable(self._socket)

    @property
    def pending_count(self) -> int:
        """Frames that wait in the queues."""
        return sum(len(queue.frames) for queue in self._queues.values()) if self._queues else 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait in the queues."""
        return self._pending_bytes

    def queued_count(self, peer: bytes) -> int:
        """Frames that wait in the queue of a peer."""
        queue = self._queues.get(peer)
        return 0 if queue is None else len(queue.frames)

    def recv_all(self, limit: int) -> list[Incoming]:
        """Up to `limit` messages that are there now."""
        self._touched = True
        found: list[Incoming] = []
        sources: list[int] = []
        for number, (peer, *frames) in enumerate(receive_all(self._socket, limit, sources)):
            found.append(Incoming(peer, frames[0] if len(frames) == 1 else b"", len(frames), sources[number]))
        return found

    def send(self, peer: bytes, frame: bytes) -> Sent:
        """Send or queue one frame; frames of one peer keep their order. Never waits, never raises for a peer's sake."""
        if len(frame) > self._max_message_bytes:
            return Sent.TOO_LARGE
        queue = self._queues.get(peer)
        if queue is None:
            result = self._try_send(peer, frame)
            if result is not Sent.QUEUED:
                return result
            queue = self._queues[peer] = _Queue()
        held_bytes = queue.held_bytes + len(frame)
        if len(queue.frames) >= self._queue_count or held_bytes > self._queue_bytes:
            return Sent.FULL
        # Whoever has less than his share may go on: so all together stay near the total, and the fattest are refused.
        if self._pending_bytes + len(frame) > self._total_bytes and held_bytes * len(self._queues) > self._total_bytes:
            return Sent.FULL
        queue.frames.append(frame)
        queue.held_bytes = held_bytes
        self._pending_bytes += len(frame)
        return Sent.QUEUED

    def flush(self) -> list[bytes]:
        """Send from the queues what the peers now take; returns the peers that turned out to be gone.

        ZeroMQ lets go of a dead peer only once `recv_all` has read to the end of what came from it.
        """
        gone: list[bytes] = []
        for peer in list(self._queues):
            queue = self._queues[peer]
            while queue.frames:
                result = self._try_send(peer, queue.frames[0])
                if result is not Sent.SENT:
                    break
                sent_bytes = len(queue.frames.popleft())
                queue.held_bytes -= sent_bytes
                self._pending_bytes -= sent_bytes
                queue.still_since_s = None
            else:
                result = Sent.SENT
            if result is Sent.UNREACHABLE:
                gone.append(peer)
            if result is not Sent.QUEUED:
                self.forget(peer)
        return gone

    def unread(self, now_s: float, limit_s: float) -> list[bytes]:
        """Peers for whom frames wait of which none has left for `limit_s`: they do not read. To be asked at each turn
        while frames are pending; time counts from the first question.
        """
        found: list[bytes] = []
        for peer, queue in self._queues.items():
            if queue.still_since_s is None:
                queue.still_since_s = now_s
            elif now_s - queue.still_since_s >= limit_s:
                found.append(peer)
        return found

    def forget(self, peer: bytes) -> None:
        """Drop what is queued for a peer."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._pending_bytes -= queue.held_bytes

    def close(self) -> None:
        """Close the socket and remove its name, still under the instance lock. What ZeroMQ has taken over leaves within
        the linger, the queues are dropped.
        """
        if not self._socket.closed:
            self._path.unlink(missing_ok=True)
        self._queues.clear()
        self._pending_bytes = 0
        if self.arrivals is not None:
            self.arrivals.close()
        self._socket.close()
        if self._own_context is not None:
            self._own_context.term()
            self._own_context = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_send(self, peer: bytes, frame: bytes) -> Sent:
        """SENT, QUEUED (the pipe is full: it should be queued) or UNREACHABLE."""
        self._touched = True
        try:
            send_to_now(self._socket, peer, frame)
        except zmq.Again:
            return Sent.QUEUED
        except zmq.ZMQError as exc:
            # EHOSTUNREACH as a rule; whatever else it is, this peer does not get the frame and the loop goes on.
            if exc.errno in (zmq.ETERM, zmq.ENOTSOCK):
                raise
            return Sent.UNREACHABLE
        return Sent.SENT
