"""The DEALER end: one connection to the daemon.

A link does not reconnect by itself: behind a connection lost there may be another daemon, which wants a handshake of
its own. That the daemon has gone is told by the lifeline; the link then only stops taking frames.
"""

import math
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zmq

from ipc.rundir import check_socket_path
from ipc.stream import LinkError
from ipc.wire import receive_all, send_now

LINGER_MS: Final = 200
HIGH_WATER_COUNT: Final = 64

__all__ = ["Link", "LinkError", "ZmqContext"]

ZmqContext = zmq.Context[zmq.Socket[bytes]]


class Link:
    """A connected DEALER socket. For one thread."""

    def __init__(self, socket: zmq.Socket[bytes], context: ZmqContext | None, max_message_bytes: int) -> None:
        self._socket = socket
        self._own_context = context
        self._max_message_bytes = max_message_bytes

    @classmethod
    def connect(
        cls,
        path: Path,
        identity: bytes = b"",
        *,
        max_message_bytes: int,
        timeout_s: float,
        high_water_count: int = HIGH_WATER_COUNT,
        linger_ms: int = LINGER_MS,
        context: ZmqContext | None = None,
    ) -> Self:
        """Connect to the ROUTER at `path`. Without an `identity` the ROUTER makes one up. A `context` that is passed in
        stays the caller's.

        Raises:
            LinkError: no connection within `timeout_s`.
            RunDirError: no unix socket can have this path.
        """
        check_socket_path(path)
        used = ZmqContext() if context is None else context
        own = used if context is None else None
        socket = used.socket(zmq.DEALER)
        link = cls(socket, own, max_message_bytes)
        try:
            socket.set(zmq.LINGER, linger_ms)
            socket.set(zmq.MAXMSGSIZE, max_message_bytes)
            socket.set(zmq.SNDHWM, high_water_count)
            socket.set(zmq.RCVHWM, high_water_count)
            # Frames are taken only while there is a connection, not kept for a later one.
            socket.set(zmq.IMMEDIATE, 1)
            socket.set(zmq.RECONNECT_IVL, -1)
            if identity:
                socket.set(zmq.IDENTITY, identity)
            socket.connect(f"ipc://{path}")
            if not socket.poll(_milliseconds(timeout_s), zmq.POLLOUT):
                raise LinkError(f"nobody answers at {path} within {timeout_s} s")
        except BaseException:
            socket.set(zmq.LINGER, 0)
            link.close()
            raise
        return link

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a `zmq.Poller`; read and written only through this object."""
        return self._socket

    def fileno(self) -> int:
        """ZeroMQ's own descriptor. It is edge-triggered: whoever polls it must call `recv_all` until it gives less
        than its limit, also after each send, before polling again.
        """
        return self._socket.fileno()

    def send(self, frame: bytes, timeout_s: float = 0.0) -> None:
        """Hand over one frame.

        Raises:
            LinkError: too large, or not taken within `timeout_s` (the daemon has gone, or does not read).
        """
        if len(frame) > self._max_message_bytes:
            raise LinkError(f"a frame of {len(frame)} bytes is above the limit of {self._max_message_bytes}")
        try:
            send_now(self._socket, frame)
        except zmq.Again:
            if not self._socket.poll(_milliseconds(timeout_s), zmq.POLLOUT):
                raise LinkError(f"the frame was not taken within {timeout_s} s") from None
            try:
                send_now(self._socket, frame)
            except zmq.ZMQError as exc:
                raise LinkError(f"the frame was not taken: {exc}") from exc
        except zmq.ZMQError as exc:
            raise LinkError(f"the link is not usable: {exc}") from exc

    def recv(self, timeout_s: float) -> bytes | None:
        """The next frame, or None when none came within `timeout_s`.

        Raises:
            LinkError: the message has more than one frame, or the link is closed.
        """
        frames = self.recv_all(1)
        if not frames and timeout_s > 0 and self._poll_in(timeout_s):
            frames = self.recv_all(1)
        return frames[0] if frames else None

    def recv_all(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that are there now.

        Raises:
            LinkError: as in `recv`.
        """
        try:
            messages = receive_all(self._socket, limit)
        except zmq.ZMQError as exc:
            raise LinkError(f"the link is not usable: {exc}") from exc
        for frames in messages:
            if len(frames) != 1:
                raise LinkError(f"a message of {len(frames)} frames, expected 1")
        return [frames[0] for frames in messages]

    def close(self) -> None:
        """Close the socket; frames handed over still leave within the linger."""
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

    def _poll_in(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(_milliseconds(timeout_s), zmq.POLLIN))


def _milliseconds(timeout_s: float) -> int:
    """Rounded up: a wait of 0.4 ms must not become a poll."""
    return max(0, math.ceil(timeout_s * 1000))
