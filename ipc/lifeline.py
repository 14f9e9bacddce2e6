"""Lifelines: the second socket between two processes, for what ZeroMQ cannot carry.

A lifeline (unix, SEQPACKET) tells who the peer is (from the kernel), ends when the peer dies, and carries descriptors::

    daemon -> peer, once   msgpack map {"token": 16 bytes, "start_id": 16 bytes}
                           or {"code": text, "message": text} and the end: the daemon does not serve this user
    both ways, later       tag u64 little-endian, and one descriptor beside it (SCM_RIGHTS)

A descriptor is sent before the ZeroMQ message that names its tag, so who reads that message finds it by `drain` and
`take`, or by `fetch` alone.
Whatever breaks these rules ends the lifeline. No call here waits unless it takes a `timeout_s`.
"""

import array
import contextlib
import enum
import errno
import os
import resource
import secrets
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

import msgpack

from ipc.connecting import connect_within
from ipc.credentials import Credentials, credentials_of
from ipc.rundir import GROUP_REACH, Reach, check_socket_path, owner_only, set_reach

TOKEN_BYTES: Final = 16
# Descriptors of an untrusted peer that wait to be taken, per lifeline. A registration needs one a stage.
MAX_STASHED: Final = 64
# Packets read by one `drain`, so that a peer that floods its lifeline cannot hold the loop.
MAX_DRAINED: Final = 2 * MAX_STASHED
BACKLOG: Final = 128
_TAG: Final = struct.Struct("<Q")
_TOKEN_PACKET_LIMIT_BYTES: Final = 4096
_MESSAGE_LIMIT: Final = 1000  # characters of a refusal: at most four bytes each, within the packet's limit
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
# CMSG_LEN, not CMSG_SPACE: the padding of the latter would let a second descriptor in.
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(_DESCRIPTOR_BYTES)


class LifelineError(OSError):
    """A lifeline that could not be used: no daemon, no answer in time, or the peer does not read."""


class LifelineRefused(LifelineError):
    """The daemon does not serve this user; `code` and `message` are its own words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(errno.EACCES, message)
        self.code = code
        self.message = message


class Life(enum.Enum):
    """Whether the peer still holds its end."""

    OPEN = "open"
    ENDED = "ended"


class Refused(NamedTuple):
    """A peer that was not admitted: it was told why, and its connection is closed."""

    peer: Credentials
    message: str


class Lifeline:
    """One end of a lifeline. Owns its socket and every descriptor that came and was not taken.

    `token` and `start_id` are those of the first packet. Of the descriptors that wait to be taken it keeps at most
    `stash_limit`, and none that would leave fewer than `spare` to this process; those beyond are closed and counted in
    `refused_count`.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: Credentials,
        token: bytes,
        start_id: bytes,
        stash_limit: int = MAX_STASHED,
        *,
        spare: int = 0,
    ) -> None:
        self.peer: Final = peer
        self.token: Final = token
        self.start_id: Final = start_id
        self.refused_count = 0
        self._socket = connection
        self._stash_limit = stash_limit
        self._spare = spare
        self._stashed: dict[int, int] = {}
        self._life = Life.OPEN

    @classmethod
    def connect(cls, path: Path, timeout_s: float, stash_limit: int = MAX_STASHED) -> Self:
        """Connect to the daemon that listens at `path` and read its token.

        `stash_limit`: see `Lifeline`; who trusts the daemon may keep more than `MAX_STASHED`.

        Raises:
            LifelineRefused: the daemon does not serve this user.
            LifelineError: nobody listens, the token did not come within `timeout_s`, or it is none.
        """
        check_socket_path(path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connect_within(connection, path, timeout_s)
            if not _wait(connection, select.POLLIN, timeout_s):
                raise LifelineError(errno.ETIMEDOUT, f"no token within {timeout_s:.1f} s")
            packet = connection.recv(_TOKEN_PACKET_LIMIT_BYTES)
            if not packet:  # who comes again may be served
                raise LifelineError(
                    errno.ECONNRESET, "the daemon closed the lifeline at once: it is ending, or has no descriptor left"
                )
            token, start_id = _parse_token_packet(packet)
            return cls(connection, credentials_of(connection), token, start_id, stash_limit)
        except BaseException as exc:
            connection.close()
            if isinstance(exc, OSError) and not isinstance(exc, LifelineError):
                raise LifelineError(exc.errno, f"no lifeline at {path}: {exc.strerror}") from exc
            raise

    def fileno(self) -> int:
        """For a poller: readable when something came or the peer has gone; -1 once closed."""
        return self._socket.fileno()

    def drain(self) -> Life:
        """Take in every packet that is there (at most `MAX_DRAINED`: then the descriptor stays readable)."""
        for _ in range(MAX_DRAINED):
            if not self._read_packet():
                break
        return self._life

    @property
    def full(self) -> bool:
        """Whether no more descriptors can be kept until one is taken."""
        return len(self._stashed) >= self._stash_limit

    def read_on(self, tag: int = -1) -> Life:
        """`drain` that loses nothing: takes in packets until the one under `tag` has come or no more can be kept, and
        leaves the rest in the socket.
        """
        for _ in range(MAX_DRAINED):
            if tag in self._stashed or self.full or not self._read_packet():
                break
        return self._life

    def take(self, tag: int) -> int:
        """The descriptor that came under `tag`; the caller owns it from now on.

        Raises:
            KeyError: none came under this tag.
        """
        return self._stashed.pop(tag)

    def fetch(self, tag: int) -> int:
        """`take`, after reading on until the descriptor has come or nothing more is there.

        Reads without a bound, so for peers that are trusted not to flood.

        Raises:
            KeyError: none came under this tag.
        """
        while tag not in self._stashed and self._read_packet():
            pass
        return self.take(tag)

    def send_descriptor(self, tag: int, descriptor: int, timeout_s: float = 0.0) -> None:
        """Send a copy of `descriptor` under `tag`; the caller keeps (and may close) its own.

        Raises:
            LifelineError: the peer has gone, or has not made room within `timeout_s`.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        for may_wait in (True, False):
            try:
                self._socket.sendmsg([_TAG.pack(tag)], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError as exc:
                if may_wait and _wait(self._socket, select.POLLOUT, timeout_s):
                    continue
                raise LifelineError(errno.EAGAIN, f"process {self.peer.pid} does not read its lifeline") from exc
            except OSError as exc:
                raise LifelineError(exc.errno, f"the lifeline cannot carry a descriptor: {exc.strerror}") from exc

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        self._life = Life.ENDED
        self._socket.close()
        while self._stashed:
            os.close(self._stashed.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_packet(self) -> bool:
        """Take in one packet; False where none is there or the lifeline has ended."""
        if self._life is Life.ENDED:
            return False
        try:
            packet, ancillary, flags, _ = self._socket.recvmsg(_TAG.size + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # ECONNRESET: the peer died with packets of ours unread
            self._life = Life.ENDED
            return False
        self._take_in(packet, ancillary, flags)
        return True

    def _take_in(self, packet: bytes, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        descriptors = _descriptors(ancillary)
        cut = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if len(packet) == _TAG.size and len(descriptors) == 1 and not cut:
            (tag,) = _TAG.unpack(packet)
            room = len(self._stashed) < self._stash_limit and _leaves(descriptors[0], self._spare)
            if room and tag not in self._stashed:
                self._stashed[tag] = descriptors[0]
                return
            self.refused_count += 1
        elif len(packet) == _TAG.size and flags & socket.MSG_CTRUNC:
            # More than one came, or we have no free descriptor: nothing is stashed, so the message that names the tag
            # fails.
            self.refused_count += 1
        else:
            self._life = Life.ENDED  # no bytes at all (end of file), or what no peer of ours sends
        for descriptor in descriptors:
            os.close(descriptor)


class LifelineServer:
    """The daemon's listening socket. The caller holds the instance lock: whatever lies at the path is stale."""

    def __init__(self, listener: socket.socket, path: Path, spare: int) -> None:
        self._listener = listener
        self._path = path
        self._spare = spare  # a descriptor to give up when there are no others, see `_refuse_one`

    @classmethod
    def listen(cls, path: Path, reach: Reach = GROUP_REACH) -> Self:
        """Listen at `path`, whose directory was prepared before (see `ipc.rundir`).

        The name appears only when the socket has its final mode and listens, so who finds it can connect.

        Raises:
            RunDirError: no unix socket can have this path.
            OSError: the path cannot be bound.
        """
        check_socket_path(path)
        unnamed = path.with_suffix(".new")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            unnamed.unlink(missing_ok=True)
            with owner_only():
                listener.bind(os.fspath(unnamed))
            set_reach(unnamed, reach)
            listener.listen(BACKLOG)
            unnamed.rename(path)
            return cls(listener, path, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            listener.close()
            unnamed.unlink(missing_ok=True)
            raise

    def fileno(self) -> int:
        """For a poller: readable when somebody waits to be accepted; -1 once closed."""
        return self._listener.fileno()

    def accept(self, start_id: bytes) -> Lifeline | None:
        """Accept one peer, whoever it is, give it a fresh token and `start_id`; None when nobody waits."""
        accepted = self.admit(start_id, lambda _: "")
        assert not isinstance(accepted, Refused)
        return accepted

    def admit(
        self, start_id: bytes, why_not: Callable[[Credentials], str], spare: Callable[[int], int] = lambda _: 0
    ) -> Lifeline | Refused | None:
        """`accept` if `why_not` finds no reason against the peer (an empty text).

        A peer that is refused gets the reason for an answer, under the code ``not_permitted``, and costs nothing beyond
        this call. One that would leave fewer than ``spare(its pid)`` descriptors is turned away without a word, as are
        all once none is left.
        """
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionAbortedError:
                continue
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not self._refuse_one():
                    return None
                continue
            try:
                connection.setblocking(False)
                peer = credentials_of(connection)
                if message := why_not(peer):
                    with connection, contextlib.suppress(OSError):
                        connection.send(_refusal_packet(message), socket.MSG_NOSIGNAL)
                    return Refused(peer, message)
                least = spare(peer.pid)
                if not _leaves(connection.fileno(), least):
                    connection.close()
                    continue
                token = secrets.token_bytes(TOKEN_BYTES)
                lifeline = Lifeline(connection, peer, token, start_id, spare=least)
                connection.send(_token_packet(token, start_id), socket.MSG_NOSIGNAL)
                return lifeline
            except OSError:
                connection.close()  # it has gone again

    def close(self) -> None:
        """Stop listening and remove the socket's name. Accepted lifelines go on."""
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_one(self) -> bool:
        """Out of descriptors: close the first in line, or the listener would stay readable and the loop would spin.

        False when nobody was in line (the kernel looks for a free descriptor before it looks for a peer).
        """
        if self._spare < 0:
            return False
        os.close(self._spare)
        refused = False
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
            refused = True
        try:
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1
        return refused


def _leaves(descriptor: int, spare: int) -> bool:
    """Whether so many are left behind a descriptor that has just been made: the kernel hands out the lowest number."""
    return not spare or descriptor + spare < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
    return found.tolist()


def _token_packet(token: bytes, start_id: bytes) -> bytes:
    return cast("bytes", msgpack.packb({"token": token, "start_id": start_id}))


def _refusal_packet(message: str) -> bytes:
    return cast("bytes", msgpack.packb({"code": "not_permitted", "message": message[:_MESSAGE_LIMIT]}))


def _parse_token_packet(packet: bytes) -> tuple[bytes, bytes]:
    try:
        fields = msgpack.unpackb(packet, raw=False, max_ext_len=0)
        if "code" in fields:
            raise LifelineRefused(str(fields["code"]), str(fields["message"]))
        token, start_id = fields["token"], fields["start_id"]
    except (ValueError, KeyError, TypeError) as exc:
        raise LifelineError(errno.EPROTO, "the first packet of the lifeline is no token") from exc
    if not (isinstance(token, bytes) and isinstance(start_id, bytes) and len(token) == len(start_id) == TOKEN_BYTES):
        raise LifelineError(errno.EPROTO, "the first packet of the lifeline is no token")
    return token, start_id


def _wait(connection: socket.socket, event: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(connection, event)
    return bool(poller.poll(max(timeout_s, 0.0) * 1000))
