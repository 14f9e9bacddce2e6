"""The run directory: what must be true of a folder and a path before a socket is bound there."""

import os
import stat
from pathlib import Path
from typing import Final

# sun_path holds 108 bytes, the last of them zero.
SOCKET_PATH_LIMIT_BYTES: Final = 107
DIRECTORY_MODE: Final = 0o750
# The directory decides who gets this far; connecting needs the right to write.
SOCKET_MODE: Final = 0o660


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
    """Make `directory` (and one parent) with mode 0750 whatever the umask, or check that what is there can be trusted.

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
                os.fchmod(descriptor, DIRECTORY_MODE)
            _check_trust(folder, os.fstat(descriptor), strict=strict)
        finally:
            os.close(descriptor)


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
