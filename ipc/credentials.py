"""Who is at the other end of a unix socket, as the kernel vouches for it."""

import array
import ctypes
import errno
import os
import socket
import struct
from typing import Final, NamedTuple

from shm.process import start_ticks

SO_PEERGROUPS: Final = 59  # since Linux 4.13; the socket module has no name for it
_CREDENTIALS: Final = struct.Struct("=iII")
# The longest buffer that `socket.getsockopt` takes: 256 groups. Whoever is in more is asked for through libc.
_FEW_GROUPS_BYTES: Final = 1024
_ALL_GROUPS_BYTES: Final = 65536 * 4


class Credentials(NamedTuple):
    """The process at the other end when it connected (or, seen from there, began to listen).

    pid 0: it lives in a pid namespace that cannot be seen from here. `start_ticks` 0: not known, nothing can be proved.
    `groups` are the supplementary ones; `gid` need not be among them.
    """

    pid: int
    uid: int
    gid: int
    start_ticks: int
    groups: tuple[int, ...] = ()


def credentials_of(connection: socket.socket) -> Credentials:
    """The peer of a connected unix socket.

    Raises:
        OSError: it is none.
    """
    pid, uid, gid = _peer(connection)
    try:
        ticks = start_ticks(pid) if pid > 0 else 0
    except OSError:
        ticks = 0  # it has ended, or /proc hides it; the end of file tells which
    return Credentials(pid, uid, gid, ticks, _groups(connection))


def connection_behind(descriptor: int) -> socket.socket | None:
    """A copy of a unix socket that is not ours, to be closed; None where the descriptor is none (any more)."""
    try:
        copy = os.dup(descriptor)  # the other one may be closed at any time
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if connection.family == socket.AF_UNIX:
        return connection
    connection.close()
    return None


def process_of(connection: socket.socket) -> tuple[int, int] | None:
    """Pid and uid of the peer of a unix socket; None where it has none."""
    try:
        pid, uid, _ = _peer(connection)
    except (OSError, struct.error):
        return None
    return pid, uid


def process_behind(descriptor: int) -> tuple[int, int] | None:
    """`process_of` the unix socket behind a descriptor, which may be none any more."""
    connection = connection_behind(descriptor)
    if connection is None:
        return None
    with connection:
        return process_of(connection)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return pid, uid, gid


def _groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _FEW_GROUPS_BYTES)
    except OSError as exc:
        packed = _many_groups(connection) if exc.errno == errno.ERANGE else b""
    return tuple(array.array("I", packed))


def _many_groups(connection: socket.socket) -> bytes:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_ALL_GROUPS_BYTES)
    length = ctypes.c_uint32(_ALL_GROUPS_BYTES)
    if libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, buffer, ctypes.byref(length)) != 0:
        return b""
    return buffer.raw[: length.value]
