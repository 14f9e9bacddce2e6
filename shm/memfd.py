"""Pools of `cpu` devices: memfds whose size can no longer change.

Without the seal an engine could shrink its pool under a worker, whose next access would be a SIGBUS.
"""

import fcntl
import mmap
import os
from typing import Final

from shm.headroom import memory_headroom

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolError(ValueError):
    """A descriptor that is no usable pool: says what it is and what was expected."""


def create_pool(name: str, size_bytes: int) -> int:
    """A memfd of `size_bytes`, reserved and sealed; close-on-exec, the caller owns it. `name` shows in /proc only.

    Raises:
        PoolError: no memory for it, or no size.
    """
    if size_bytes <= 0:
        raise PoolError(f"a pool needs at least one byte, got {size_bytes}")
    # A memfd has no tmpfs size to run into: reserving more than there is would end with the OOM killer.
    room = memory_headroom()
    if size_bytes > room.free_bytes:
        raise PoolError(f"a pool needs {size_bytes} bytes, {room.free_bytes} are free under {room.limited_by}")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as exc:
        os.close(descriptor)
        raise PoolError(f"a pool of {size_bytes} bytes cannot be reserved: {exc.strerror}") from exc
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_pool(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map the first `size_bytes` of a pool that another process made; the descriptor may be closed afterwards.

    Raises:
        PoolError: it is no memfd, is not sealed against shrinking, is shorter than promised, or cannot be written.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise PoolError("the descriptor is no memfd, expected one that is sealed against shrinking") from exc
    if not seals & fcntl.F_SEAL_SHRINK:
        raise PoolError("the memfd is not sealed against shrinking (F_SEAL_SHRINK)")
    status = os.fstat(descriptor)
    if size_bytes <= 0 or status.st_size < size_bytes:
        raise PoolError(f"the memfd has {status.st_size} bytes, expected at least {size_bytes}, and that above 0")
    try:
        return mmap.mmap(descriptor, size_bytes)
    except OSError as exc:
        raise PoolError(f"the memfd cannot be mapped to read and write: {exc.strerror}") from exc
