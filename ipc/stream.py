"""The worker's end of its connection to the supervisor, and the frames on it.

Between the daemon's own processes a frame travels over a plain unix stream, not over ZeroMQ: that hands every message
from the caller to a thread of its own, at both ends, and on a host with few cores the switches between them cost more
than all else that is done for a small operation (four workers: 0.45 ms of processor time, 0.2 ms of its latency).

::

    worker -> supervisor, once   a frame: the identity by which the supervisor knows it
    both ways, later             frames

    a frame:                     length u32 little-endian | so many bytes

The end of the stream comes after everything that was sent, whatever became of the sender.
"""

import select
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ipc.connecting import connect_within
from ipc.rundir import check_socket_path

HEAD: Final = struct.Struct("<I")
# Read at once: more than nearly all frames have.
READ_BYTES: Final = 64 * 1024


class LinkError(OSError):
    """A link that cannot be used: nobody listens, the daemon does not read, or it broke the wire."""


class FrameReader:
    """Cuts what comes over a stream into frames. What a peer can make it hold is one frame of the longest kind."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def take(self, received: bytes) -> list[bytes]:
        """The frames that are whole now.

        Raises:
            LinkError: a frame is longer than the limit; nothing that follows can be read.
        """
        length = len(received) - HEAD.size
        if not self._buffer and length >= 0 and HEAD.unpack_from(received)[0] == length:  # nearly always
            self._check(length)
            return [received[HEAD.size :]]
        buffer = self._buffer
        buffer += received
        frames: list[bytes] = []
        at = 0
        while len(buffer) - at >= HEAD.size:
            (length,) = HEAD.unpack_from(buffer, at)
            self._check(length)
            end = at + HEAD.size + length
            if end > len(buffer):
                break
            frames.append(bytes(buffer[at + HEAD.size : end]))
            at = end
        del buffer[:at]
        return frames

    @property
    def held_bytes(self) -> int:
        """What came of a frame that is not whole yet."""
        return len(self._buffer)

    def _check(self, length: int) -> None:
        if length > self._limit_bytes:
            raise LinkError(f"a frame of {length} bytes is above the limit of {self._limit_bytes}")


class StreamLink:
    """A connected stream. For one thread."""

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self._socket = connection
        self._max_message_bytes = max_message_bytes
        self._reader = FrameReader(max_message_bytes)
        self._frames: list[bytes] = []
        self._ended = False

    @classmethod
    def connect(cls, path: Path, identity: bytes, *, max_message_bytes: int, timeout_s: float) -> Self:
        """Connect to the `StreamServer` at `path` as `identity`.

        Raises:
            LinkError: no connection within `timeout_s`.
            RunDirError: no unix socket can have this path.
        """
        check_socket_path(path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connect_within(connection, path, timeout_s)
            link = cls(connection, max_message_bytes)
            link.send(identity, timeout_s)
        except OSError as exc:
            connection.close()
            if isinstance(exc, LinkError):
                raise
            raise LinkError(f"nobody answers at {path} within {timeout_s} s: {exc.strerror}") from exc
        return link

    def fileno(self) -> int:
        """For a poller: readable when something came or the supervisor has gone; -1 once closed."""
        return self._socket.fileno()

    def send(self, frame: bytes, timeout_s: float = 0.0) -> None:
        """Hand over one frame.

        Raises:
            LinkError: too large, or not taken whole within `timeout_s`: then the link is of no more use.
        """
        if len(frame) > self._max_message_bytes:
            raise LinkError(f"a frame of {len(frame)} bytes is above the limit of {self._max_message_bytes}")
        left = memoryview(HEAD.pack(len(frame)) + frame)
        until_s = 0.0
        try:
            while left:
                try:
                    left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    until_s = until_s or time.monotonic() + timeout_s
                    poller = select.poll()
                    poller.register(self._socket, select.POLLOUT)
                    if not poller.poll(max(until_s - time.monotonic(), 0.0) * 1000.0):
                        raise LinkError(f"the frame was not taken within {timeout_s} s") from None
        except OSError as exc:
            if isinstance(exc, LinkError):
                raise
            raise LinkError(f"the frame was not taken: {exc.strerror}") from exc

    @property
    def readable(self) -> bool:
        """Whether `recv_all` would find something of which no poller tells."""
        return bool(self._frames)

    def recv_all(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that are there now.

        Raises:
            LinkError: the supervisor has gone, and everything that it sent was read; or it broke the wire.
        """
        while len(self._frames) < limit and not self._ended:
            try:
                received = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as exc:
                raise LinkError(f"the link is not usable: {exc.strerror}") from exc
            self._ended = not received
            self._frames += self._reader.take(received)
            if len(received) < READ_BYTES:
                break  # that was all of it; the poller tells of more
        if not self._frames and self._ended:
            raise LinkError("the supervisor has gone")
        found, self._frames = self._frames[:limit], self._frames[limit:]
        return found

    def close(self) -> None:
        """Close the socket; what was handed over is still read."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
