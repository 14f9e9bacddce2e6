"""One connection to the daemon: a ZeroMQ socket and a lifeline, opened by the handshake and never mended.

ZeroMQ's own reconnecting is off: a message meant for one daemon must not reach the next, which knows nothing of us.
"""

import errno
import select
import time
from typing import Final

from ipc.codec import BadFrame, decode, encode
from ipc.lifeline import Life, Lifeline, LifelineError, LifelineRefused
from ipc.link import Link, LinkError, ZmqContext
from ipc.messages import PROTOCOL_VERSION, Failed, Hello, Reply, Welcome
from ipc.rundir import RunDirError
from ipc.wire import readable
from stratad.errors import DeadlineExceeded, Lost, ProtocolError, UsageError, error_for
from stratad.paths import SocketPaths
from stratad.permission import barrier

# Requests that the daemon has not read yet. Beyond it a send fails instead of growing.
QUEUE_MESSAGES: Final = 1024
# The longest reply is the chunk list of one image: 128 Ki chunks of about 200 bytes.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
# There is room for more than all stages of an engine unless the daemon stands still, and a caller may be a coroutine.
DESCRIPTOR_TIMEOUT_S: Final = 0.1


class Connection:
    """An open connection. Not thread-safe: used under the pump's lock, except for polling `poller`.

    Attributes:
        welcome: what the daemon said about itself.
        poller: readable when frames may have come or the lifeline has something; for the leader alone.
        opened_s: monotonic time of opening.
        same_pids: whether the daemon's pids mean the same in this process's pid namespace.
        offered: tags and descriptors that the next frame names; they leave right before it, or not at all.
    """

    def __init__(self, link: Link, lifeline: Lifeline, welcome: Welcome, opened_s: float) -> None:
        self.welcome: Final = welcome
        self.opened_s: Final = opened_s
        self.max_message_bytes: Final = welcome.max_message_bytes
        self.lifeline_fd: Final = lifeline.fileno()
        self.same_pids: Final = lifeline.peer.pid > 0 and lifeline.peer.pid == welcome.pid
        self.poller: Final = select.poll()
        self.poller.register(link.fileno(), select.POLLIN)
        self.poller.register(self.lifeline_fd, select.POLLIN)
        self._link = link
        self._socket = link.socket
        self._lifeline = lifeline
        self.offered: list[tuple[int, int]] = []
        self._last_tag = 0

    @classmethod
    def open(cls, context: ZmqContext, paths: SocketPaths, name: str, until_s: float) -> "Connection":
        """Connect, take the token off the lifeline, say hello, hear the welcome; all before `until_s` (monotonic).

        Raises:
            Lost: nobody listens, or the daemon went away meanwhile.
            DeadlineExceeded: somebody listens but does not answer.
            UsageError: the path can be no socket's, or the daemon does not serve this user.
            ProtocolError: the daemon speaks another version.
        """
        try:
            lifeline = Lifeline.connect(paths.life, max(until_s - time.monotonic(), 0.001))
        except RunDirError as exc:
            raise UsageError("bad_value", str(exc)) from exc
        except LifelineError as exc:
            if isinstance(exc, LifelineRefused):
                raise error_for(exc.code, exc.message, detail={"asked_at": "the lifeline"}) from exc
            if exc.errno in (errno.EACCES, errno.EPERM):
                raise _barred(paths, str(exc.strerror)) from exc
            if exc.errno == errno.EPROTO:
                raise ProtocolError("bad_frame", str(exc.strerror)) from exc
            if exc.errno in (errno.ETIMEDOUT, errno.EAGAIN):
                raise DeadlineExceeded("deadline", str(exc.strerror)) from exc
            raise Lost("lost", str(exc.strerror)) from exc
        link = None
        try:
            link = Link.connect(
                paths.client,
                max_message_bytes=MAX_FRAME_BYTES,
                timeout_s=max(until_s - time.monotonic(), 0.001),
                high_water_count=QUEUE_MESSAGES,
                context=context,
            )
            link.send(encode(Hello(0, PROTOCOL_VERSION, lifeline.token, name)))
            return cls(link, lifeline, _await_welcome(link, lifeline, until_s), time.monotonic())
        except BaseException as exc:
            lifeline.close()
            if link is not None:
                link.close()
            if isinstance(exc, LinkError):
                raise Lost("lost", f"the daemon's socket cannot be used: {exc}") from exc
            raise

    def send(self, frame: bytes) -> bool:
        """Hand over the descriptors on offer, then the frame; False when the daemon does not read, or has gone.

        Raises:
            OSError: a descriptor may have gone without the frame that names it: the connection must be given up, or
                the daemon would keep that for nothing.
        """
        if self.offered:
            offered, self.offered = self.offered, []
            for tag, descriptor in offered:
                self._lifeline.send_descriptor(tag, descriptor, DESCRIPTOR_TIMEOUT_S)
            self._link.send(frame)
            return True
        try:
            self._link.send(frame)
        except LinkError:
            return False
        return True

    def receive(self) -> bytes | None:
        """One frame that has come, or None. Until it returned None, `poller` may sleep on what is there.

        Raises:
            LinkError: a message of several frames.
        """
        # Asking first costs less than half of being told by an exception that nothing is there.
        if not readable(self._socket):
            return None
        return self._link.recv(0.0)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether the daemon closed its end of the lifeline, by dying or on purpose; waits for that up to
        `within_s`.
        """
        if within_s > 0:
            poller = select.poll()
            poller.register(self.lifeline_fd, select.POLLIN)
            poller.poll(within_s * 1000.0)
        return self._lifeline.drain() is Life.ENDED

    def offer_descriptor(self, descriptor: int) -> int:
        """Have a copy of a descriptor travel with the next frame; returns the tag by which that frame names it.

        No tag is given twice, whatever became of the first.
        """
        self._last_tag += 1
        self.offered.append((self._last_tag, descriptor))
        return self._last_tag

    def close(self) -> None:
        """Close both sockets; frames handed over still leave within a short linger. Idempotent."""
        self._link.close()
        self._lifeline.close()

    def close_in_child(self) -> None:
        """Close the copy of the lifeline that a fork made; the ZeroMQ socket belongs to the parent's threads."""
        self._lifeline.close()


def _barred(paths: SocketPaths, reason: str) -> UsageError:
    """File permissions keep us from the daemon's sockets."""
    barred = barrier(paths.life)
    text = f"{barred.what}; {barred.fix}" if barred else reason
    return UsageError("not_permitted", text)


def _await_welcome(link: Link, lifeline: Lifeline, until_s: float) -> Welcome:
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    poller.register(lifeline.fileno(), select.POLLIN)
    while (frame := link.recv(0.0)) is None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("deadline", "the daemon did not welcome us in time")
        poller.poll(left_s * 1000.0)
        if lifeline.drain() is Life.ENDED and (frame := link.recv(0.01)) is None:
            raise Lost("lost", "the daemon went away during the handshake")
        if frame is not None:
            break
    try:
        reply: Reply = decode(frame, Reply)
    except BadFrame as exc:
        raise ProtocolError("bad_frame", f"the daemon's first frame is no reply: {exc.message}") from exc
    if isinstance(reply, Failed):
        raise error_for(reply.code, reply.message, detail=dict(reply.detail))
    if not isinstance(reply, Welcome):
        raise ProtocolError("bad_frame", f"the daemon began with {type(reply).__name__}, expected Welcome")
    if reply.version != PROTOCOL_VERSION:
        raise ProtocolError(
            "wrong_version", f"the daemon speaks version {reply.version}, this client {PROTOCOL_VERSION}"
        )
    return reply
