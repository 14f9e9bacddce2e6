"""The supervisor's end of the workers' streams (see `ipc.stream`): many peers, and none that can hold up the others.

A frame for a peer whose socket is full waits in a queue of its own, bounded in count and bytes, and leaves as soon as
there is room: the descriptor that the loop polls tells of that too, at `recv_all`.
"""

import contextlib
import errno
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ipc.rundir import OWNER_REACH, Reach, check_socket_path, owner_only, prepare_directory, set_reach
from ipc.server import QUEUE_BYTES, QUEUE_COUNT, Incoming, Sent
from ipc.stream import HEAD, READ_BYTES, FrameReader

BACKLOG: Final = 128
# Of one peer in a row, before the others have their turn.
READS: Final = 16
IDENTITY_BYTES: Final = 256
# Descriptors that are left for others, whoever connects.
SPARE_FILES: Final = 16
# Peers that have not said their name: a worker does so at once.
NAMELESS: Final = 16
_NAME_BYTES: Final = HEAD.size + IDENTITY_BYTES


class _Peer:
    """One connection. What it says first is its `identity`."""

    __slots__ = ("connection", "held_bytes", "identity", "queue", "reader", "sent_bytes")

    def __init__(self, connection: socket.socket, limit_bytes: int) -> None:
        self.connection = connection
        self.identity = b""
        self.reader = FrameReader(limit_bytes)
        self.queue: deque[bytes] = deque()
        self.sent_bytes = 0  # of the first frame that waits
        self.held_bytes = 0


class StreamServer:
    """A listening stream socket with its connections. For one thread."""

    def __init__(
        self, listener: socket.socket, epoll: select.epoll, path: Path, *, max_message_bytes: int, queue_count: int
    ) -> None:
        self._listener = listener
        self._epoll = epoll
        self._fileno = epoll.fileno()
        self._path = path
        self._max_message_bytes = max_message_bytes
        self._queue_count = queue_count
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._known: dict[bytes, _Peer] = {}  # by identity
        self._nameless: dict[int, _Peer] = {}  # by descriptor, in the order in which they came
        self._admits: Callable[[bytes], bool] = lambda _: True
        self._ready: deque[Incoming] = deque()
        self._waiting: set[_Peer] = set()  # those with a queue
        self._deaf = False  # nobody is let in: there was no descriptor for the last one

    @classmethod
    def bind(
        cls, path: Path, *, max_message_bytes: int, queue_count: int = QUEUE_COUNT, reach: Reach = OWNER_REACH
    ) -> Self:
        """Listen at `path`; its directory is made or checked first (see `ipc.rundir`).

        The caller holds the instance lock: whatever lies at the path is stale. The name appears only when the socket
        has its final mode and listens.

        Raises:
            RunDirError: the path or its directory cannot be used.
            OSError: it cannot be bound.
        """
        check_socket_path(path)
        prepare_directory(path.parent)
        unnamed = path.with_suffix(".new")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            unnamed.unlink(missing_ok=True)
            with owner_only():
                listener.bind(os.fspath(unnamed))
            set_reach(unnamed, reach)
            listener.listen(BACKLOG)
            unnamed.rename(path)
            epoll = select.epoll()
            epoll.register(listener.fileno(), select.EPOLLIN)
        except BaseException:
            listener.close()
            unnamed.unlink(missing_ok=True)
            raise
        return cls(listener, epoll, path, max_message_bytes=max_message_bytes, queue_count=queue_count)

    def admit_only(self, admits: Callable[[bytes], bool]) -> None:
        """From now on who is not admitted by its identity is hung up on: its frames would keep the others' waiting."""
        self._admits = admits

    def fileno(self) -> int:
        """For a poller: readable when `recv_all` has something to do."""
        return self._fileno

    @property
    def readable(self) -> bool:
        """Whether `recv_all` would find something of which `fileno` does not tell."""
        return bool(self._ready)

    @property
    def pending_count(self) -> int:
        """Frames that wait in the queues."""
        return sum(len(peer.queue) for peer in self._waiting) if self._waiting else 0

    def queued_count(self, peer: bytes) -> int:
        """Frames that wait in the queue of a peer."""
        found = self._known.get(peer)
        return 0 if found is None else len(found.queue)

    def recv_all(self, limit: int) -> list[Incoming]:
        """Up to `limit` messages that are there now, in order for each peer; who connects is let in, and what waits for
        peers that have room leaves.
        """
        if len(self._ready) < limit:
            self._listen_again()
            for descriptor, events in self._epoll.poll(0):
                peer = self._peers.get(descriptor)
                if peer is None:
                    if descriptor == self._listener.fileno():
                        self._accept()
                    continue
                if events & select.EPOLLOUT:
                    self._send_queue(peer)
                if events & ~select.EPOLLOUT:
                    self._read(peer)
        ready = self._ready
        return [ready.popleft() for _ in range(min(limit, len(ready)))]

    def send(self, peer: bytes, frame: bytes) -> Sent:
        """Send or queue one frame; frames of one peer keep their order. Never waits, never raises for a peer's sake."""
        length = len(frame)
        if length > self._max_message_bytes:
            return Sent.TOO_LARGE
        found = self._known.get(peer)
        if found is None:
            return Sent.UNREACHABLE
        whole = HEAD.pack(length) + frame
        sent_bytes = 0
        if not found.queue:
            try:
                sent_bytes = found.connection.send(whole, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError:  # it has gone; what it still said is read until its end
                return Sent.UNREACHABLE
            if sent_bytes == len(whole):
                return Sent.SENT
            self._waiting.add(found)
            self._epoll.modify(found.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
            found.sent_bytes = sent_bytes
        elif len(found.queue) >= self._queue_count or found.held_bytes + length > QUEUE_BYTES:
            return Sent.FULL
        found.queue.append(whole)
        found.held_bytes += length
        return Sent.QUEUED

    def reaches(self, peer: bytes) -> bool:
        """Whether something of this peer may not have been read yet: its stream has not ended, or was not read that
        far.
        """
        return peer in self._known or any(incoming.peer == peer for incoming in self._ready)

    def flush(self) -> list[bytes]:
        """Send from the queues what the peers now take; returns the peers that turned out to be gone."""
        return [peer.identity for peer in list(self._waiting) if not self._send_queue(peer)]

    def forget(self, peer: bytes) -> None:
        """Close the connection of a peer, and drop what waits for it or came from it."""
        found = self._known.get(peer)
        if found is not None:
            self._close(found)
        if self._ready:
            self._ready = deque(incoming for incoming in self._ready if incoming.peer != peer)

    def close(self) -> None:
        """Close everything and remove the socket's name, still under the instance lock; queues are dropped, and what
        was sent can still be read. Idempotent.
        """
        if self._listener.fileno() < 0:
            return
        self._path.unlink(missing_ok=True)
        for peer in list(self._peers.values()):
            self._close(peer)
        self._epoll.close()
        self._listener.close()
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._deaf = True  # or the loop would spin until somebody ends
            self._epoll.modify(self._listener.fileno(), 0)
            return
        connection.setblocking(False)
        if connection.fileno() + SPARE_FILES >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            connection.close()
            return
        self._make_room()
        peer = _Peer(connection, self._max_message_bytes)
        self._peers[connection.fileno()] = self._nameless[connection.fileno()] = peer
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _make_room(self) -> None:
        """Hang up on whoever has kept silent for longest, where there are `NAMELESS` of them."""
        if len(self._nameless) < NAMELESS:
            return
        eldest = next(iter(self._nameless.values()))
        self._read(eldest)  # it may have said its name meanwhile
        if not eldest.identity and eldest.connection.fileno() in self._peers:
            self._close(eldest)

    def _listen_again(self) -> None:
        if self._deaf:
            self._deaf = False
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)

    def _read(self, peer: _Peer) -> None:
        for _ in range(READS):
            try:
                # Of a stranger no more is kept than a name may have.
                wanted = READ_BYTES if peer.identity else _NAME_BYTES - peer.reader.held_bytes
                received = peer.connection.recv(wanted)
                frames = peer.reader.take(received)
            except BlockingIOError:
                return
            except OSError:  # it has gone with frames of ours unread, or it broke the wire
                self._close(peer)
                return
            if not received or (not peer.identity and not frames and peer.reader.held_bytes >= _NAME_BYTES):
                self._close(peer)
                return
            if not peer.identity and frames and not self._name(peer, frames.pop(0)):
                return
            for frame in frames:
                self._ready.append(Incoming(peer.identity, frame, 1))
            if len(received) < wanted:
                return

    def _name(self, peer: _Peer, identity: bytes) -> bool:
        """The first frame of a peer has come; False where it is closed for it."""
        # A second one of a name that is in use is not the worker that we started.
        if not 0 < len(identity) <= IDENTITY_BYTES or identity in self._known or not self._admits(identity):
            self._close(peer)
            return False
        del self._nameless[peer.connection.fileno()]
        peer.identity = identity
        self._known[identity] = peer
        return True

    def _send_queue(self, peer: _Peer) -> bool:
        """Send what waits, as far as there is room; False: the peer has gone."""
        queue = peer.queue
        try:
            while queue:
                whole = queue[0]
                peer.sent_bytes += peer.connection.send(memoryview(whole)[peer.sent_bytes :], socket.MSG_NOSIGNAL)
                if peer.sent_bytes < len(whole):
                    return True
                peer.sent_bytes = 0
                peer.held_bytes -= len(queue.popleft()) - HEAD.size
        except BlockingIOError:
            return True
        except OSError:  # what it still said is read until its end
            self._drop_queue(peer)
            return False
        self._drop_queue(peer)
        return True

    def _drop_queue(self, peer: _Peer) -> None:
        peer.queue.clear()
        peer.held_bytes = peer.sent_bytes = 0
        self._waiting.discard(peer)
        self._epoll.modify(peer.connection.fileno(), select.EPOLLIN)

    def _close(self, peer: _Peer) -> None:
        self._waiting.discard(peer)
        del self._peers[peer.connection.fileno()]
        self._nameless.pop(peer.connection.fileno(), None)
        if peer.identity:
            del self._known[peer.identity]
        with contextlib.suppress(OSError):
            self._epoll.unregister(peer.connection.fileno())
        peer.connection.close()
        self._listen_again()
