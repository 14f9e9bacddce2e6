"""The digest key: 32 random bytes, made once per host, that every digest of its images depends on."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

KEY_BYTES: Final = 32
KEY_NAME: Final = "digest.key"


class KeyFileError(OSError):
    """A digest key that cannot be used: names the file, what is wrong and what was expected."""


def load_digest_key(state_dir: Path) -> bytes:
    """Read ``<state_dir>/digest.key``; make it (and the directory, 0700) where there is none.

    Several instances may share a state directory and start at once: one key wins, all of them use it.

    Raises:
        KeyFileError: the directory or the file belongs to somebody else, others may get at it, or its size is wrong.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise KeyFileError(f"the state directory {state_dir} cannot be used: {exc.strerror}") from exc
    try:
        _check_directory(state_dir, os.fstat(descriptor))
        key = _read(state_dir, descriptor)
        if not key:
            _make(descriptor)
            key = _read(state_dir, descriptor)
        return key
    except KeyFileError:
        raise
    except OSError as exc:
        raise KeyFileError(f"{state_dir / KEY_NAME}: {exc.strerror}") from exc
    finally:
        os.close(descriptor)


def _check_directory(state_dir: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"the state directory {state_dir} belongs to uid {status.st_uid}, expected {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError(
            f"the state directory {state_dir} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it"
        )


def _read(state_dir: Path, directory: int) -> bytes:
    """The key; no bytes where there is no file."""
    path = state_dir / KEY_NAME
    try:
        descriptor = os.open(KEY_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise KeyFileError(f"{path} is no plain file of uid {os.geteuid()}")
        if status.st_mode & 0o077:
            raise KeyFileError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, expected 0600")
        if status.st_size != KEY_BYTES:
            raise KeyFileError(
                f"{path} has {status.st_size} bytes, expected {KEY_BYTES}; images made with the key are lost"
            )
        key = os.read(descriptor, KEY_BYTES)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"{path}: read {len(key)} bytes, expected {KEY_BYTES}")
    return key


def _make(directory: int) -> None:
    """Write a fresh key beside and give it its name by a link, which, unlike a rename, never replaces another's."""
    temporary = f".{KEY_NAME}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        try:
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, KEY_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.unlink(temporary, dir_fd=directory)
    os.fsync(directory)
