"""The run directory: what must be true of a folder and a path before a socket is bound there, and who may get in."""

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

# sun_path holds 108 bytes, the last of them zero.
SOCKET_PATH_LIMIT_BYTES: Final = 107
DIRECTORY_MODE: Final = 0o750
# Of a parent that we make: it holds nothing but directories of instances, each of which is guarded by itself.
PARENT_MODE: Final = 0o711
_ACL_NAME: Final = "system.posix_acl_access"
_ACL_VERSION: Final = struct.pack("<I", 2)
_ACL_ENTRY: Final = struct.Struct("<HHI")  # tag, permissions, id
_NO_ID: Final = 0xFFFFFFFF
_READ_WRITE: Final = 6


class Reach(NamedTuple):
    """Who may connect to a socket by its file permissions (connecting needs the right to write).

    `gid` -1 leaves the group as it is. `uids` and `gids` are let in beside owner and group, by an access control list.
    """

    mode: int
    gid: int = -1
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()


OWNER_REACH: Final = Reach(0o600)
# The directory decides who gets this far.
GROUP_REACH: Final = Reach(0o660)


class RunDirError(OSError):
    """A run directory or socket path that cannot be used: names the path, what is wrong and what was expected."""


def check_socket_path(path: Path) -> None:
    """Refuse a path that no unix socket can have.

    Raises:
        RunDirError: relative, or longer than the kernel allows.
    """
    length_bytes = len(os.fsencode(path))
    if length_bytes > SOCKET_PATH_LIMIT_BYTES:
        raise RunDirError(
            f"the socket path {path} has {length_bytes} bytes, the limit is {SOCKET_PATH_LIMIT_BYTES}: "
            "choose a shorter run directory"
        )
    if not path.is_absolute():
        raise RunDirError(f"the socket path {path} must be absolute")


def prepare_directory(directory: Path) -> None:
    """Make `directory` (0750, and one parent, 0711) whatever the umask, or check that what is there can be trusted.

    Raises:
        RunDirError: it is a symlink or no directory, belongs to another user, or others may write to it.
    """
    for folder, strict in ((directory.parent, False), (directory, True)):
        try:
            folder.mkdir(mode=0o700)
            made = True
        except FileExistsError:
            made = False
        except OSError as exc:
            raise RunDirError(f"the run directory {folder} cannot be made: {exc.strerror}") from exc
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise RunDirError(f"the run directory {folder} is no directory of ours: {exc.strerror}") from exc
        try:
            if made:
                os.fchmod(descriptor, DIRECTORY_MODE if strict else PARENT_MODE)
            _check_trust(folder, os.fstat(descriptor), strict=strict)
        finally:
            os.close(descriptor)


def open_directory(directory: Path, mode: int, gid: int = -1) -> None:
    """Give the prepared `directory` its mode and (unless -1) its group, where they are others.

    Raises:
        RunDirError: the group is not ours to give.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if gid not in (-1, status.st_gid):
            _give_to_group(descriptor, directory, gid)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


@contextmanager
def owner_only() -> Iterator[None]:
    """Whatever the umask was: what is made in this block is its owner's alone, until `set_reach` opens it."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def set_reach(path: Path, reach: Reach) -> bool:
    """Let those in `reach` connect to a socket; False where the file system has no access control lists: then anybody
    may connect, and only the kernel's credentials tell who it is.

    Raises:
        RunDirError: the group is not ours to give.
    """
    if reach.gid != -1:
        _give_to_group(path, path, reach.gid)
    path.chmod(reach.mode)
    if not (reach.uids or reach.gids):
        return True
    try:
        os.setxattr(path, _ACL_NAME, _access_list(reach.uids, reach.gids))
    except OSError as exc:
        if exc.errno != errno.ENOTSUP:
            raise
        path.chmod(0o666)
        return False
    return True


def _access_list(uids: Iterable[int], gids: Iterable[int]) -> bytes:
    """An access control list as the kernel reads it: owner, users, group, groups, mask, others, ids in order."""
    entries = [(0x01, _READ_WRITE, _NO_ID)]
    entries += [(0x02, _READ_WRITE, uid) for uid in sorted(uids)]
    entries += [(0x04, 0, _NO_ID)]
    entries += [(0x08, _READ_WRITE, gid) for gid in sorted(gids)]
    entries += [(0x10, _READ_WRITE, _NO_ID), (0x20, 0, _NO_ID)]
    return _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)


def _give_to_group(target: int | Path, name: Path, gid: int) -> None:
    try:
        os.chown(target, -1, gid)
    except OSError as exc:
        raise RunDirError(f"{name} cannot be given to group {gid}: {exc.strerror}") from exc


def _check_trust(folder: Path, status: os.stat_result, *, strict: bool) -> None:
    """`strict` is for the directory itself; its parent may also belong to root, or be sticky: then nobody else can
    replace what is ours in it.
    """
    owners = {os.geteuid()} if strict else {os.geteuid(), 0}
    if status.st_uid not in owners:
        expected = " or ".join(str(uid) for uid in sorted(owners))
        raise RunDirError(f"the run directory {folder} belongs to uid {status.st_uid}, expected {expected}")
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and (strict or not status.st_mode & stat.S_ISVTX):
        raise RunDirError(
            f"the run directory {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it, "
            f"expected {DIRECTORY_MODE:04o}"
        )
