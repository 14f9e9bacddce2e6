"""A pool in host memory: a memfd of an engine, mapped here."""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ipc.messages import Stage
from shm.layout import LayoutError, StageLayout, check_layout
from shm.memfd import PoolError, map_pool
from workers.device import DeviceFailure, PoolRefused, check_probe
from workers.digest import Bytes
from workers.pieces import PoolView

# What a thread maps at once; a pool that is to be closed meanwhile waits for so many (some milliseconds).
_STEP_BYTES: Final = 16 * 1024 * 1024
# MADV_POPULATE_READ: fault pages in that are there. Linux 5.14; older ones refuse it.
_POPULATE_READ: Final = 22
# Of a pool that is not reserved as a whole. An engine may have written every other page of it, and who opens pools has
# those of others to open too.
_MOST_PARTS: Final = 4096
# What the kernel counts a file's memory in.
_BLOCK_BYTES: Final = 512
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class CpuPool:
    """A mapped memfd. `view` cuts it into pieces. `reserved` are the byte ranges whose memory is the engine's already,
    the last one first.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: StageLayout,
        on_close: Callable[[], None],
        reserved: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._mapping = mapping
        self._layout = layout
        self._on_close = on_close
        self._memory: Bytes | None = np.frombuffer(mapping, np.uint8)
        self._view: PoolView | None = PoolView(self._memory, layout)
        self._unmapped = list(reserved)
        self._mapping_lock = threading.Lock()

    @property
    def layout(self) -> StageLayout:
        """See `DevicePool`."""
        return self._layout

    @property
    def in_host_memory(self) -> bool:
        """See `DevicePool`."""
        return True

    @property
    def view(self) -> PoolView:
        """The planes."""
        if self._view is None:
            raise DeviceFailure("internal", "the pool is closed")
        return self._view

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See `DevicePool`."""
        return bytes(self._mapping[offset_bytes : offset_bytes + length_bytes])

    def event_reached(self) -> bool:
        """See `DevicePool`: host writes are done when the message arrives."""
        return True

    def flip_byte(self, offset_bytes: int) -> None:
        """See `DevicePool`."""
        self._mapping[offset_bytes] ^= 0xFF

    def map_some(self) -> bool:
        """Map the next pages that are reserved into this process, so that no copy stops at them (a restore over rows
        that are not mapped takes twice its time); whether there are more. Any thread may call.

        What the engine has not reserved is left alone: it would become memory because we looked.
        """
        with self._mapping_lock:
            if self._memory is None or not self._unmapped:
                return False
            start, end = self._unmapped.pop()
            stop = min(end, start + _STEP_BYTES)
            if _libc.madvise(self._memory.ctypes.data + start, stop - start, _POPULATE_READ):
                # Only time is lost: the pages come when they are first read.
                self._unmapped.clear()
            elif stop < end:
                self._unmapped.append((stop, end))
            return bool(self._unmapped)

    def close(self) -> None:
        """See `DevicePool`."""
        with self._mapping_lock:
            if self._memory is None:
                return
            self._memory = self._view = None
        # A view that someone still holds would be unmapped under his feet: then the mapping goes with the view.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        self._on_close()


def open_host_pool(stage: Stage, descriptor: int, on_close: Callable[[], None]) -> CpuPool:
    """Map a memfd and prove it by the stage's probe. `on_close` is called when a pool that was returned is closed.

    Raises:
        PoolRefused: it cannot be used.
    """
    wanted = stage.pool.pool_bytes
    try:
        check_layout(stage.layout, wanted)
    except LayoutError as exc:
        raise PoolRefused("bad_layout", str(exc)) from exc
    try:
        mapping = map_pool(descriptor, wanted)
    except PoolError as exc:
        raise PoolRefused("unshareable", str(exc)) from exc
    proven = False
    pool = CpuPool(mapping, stage.layout, lambda: on_close() if proven else None, _reserved(descriptor, wanted))
    try:
        check_probe(pool, stage)
    except PoolRefused:
        pool.close()
        raise
    proven = True
    return pool


def _reserved(descriptor: int, size_bytes: int) -> list[tuple[int, int]]:
    """The parts of a memfd that have memory, the last one first. Where not all of it has, those that were written, as
    long as they are few.
    """
    if os.fstat(descriptor).st_blocks * _BLOCK_BYTES >= size_bytes:
        return [(0, size_bytes)]
    # Opened anew: a seek moves the place in the file that the engine has in common with what it sent.
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # only time is lost
        return []
    parts: list[tuple[int, int]] = []
    at = 0
    try:
        while at < size_bytes and len(parts) < _MOST_PARTS:
            start = os.lseek(own, at, os.SEEK_DATA)
            at = os.lseek(own, start, os.SEEK_HOLE)
            if start < size_bytes:
                parts.append((start, min(at, size_bytes)))
    except OSError:  # there is nothing more
        pass
    finally:
        os.close(own)
    return parts[::-1]
