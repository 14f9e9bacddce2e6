"""Shared mappings that begin where a huge page may begin.

A mapping of 4 KiB pages, page-locked by a GPU's driver, costs the kernel 0.03 to 0.06 s a GiB when its process ends (32
GiB: 1 to 2 s in which nobody may take the device over); one of 2 MiB pages costs next to nothing, and is entered and
page-locked in a fifth of the time.
Python's own `mmap` does not say where it maps, so this one asks the kernel itself.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

# Through ctypes, which lets other threads run meanwhile: a step of these takes milliseconds.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class SharedMapping:
    """The first `size_bytes` of a file, mapped to read and write; the descriptor may be closed afterwards.

    `view` is all of it. It is unmapped when `close` was called (or the mapping was dropped) and nobody holds a slice of
    the view any more.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address: Final = address
        self.size_bytes: Final = size_bytes
        buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
        # Views hold the buffer, and the buffer's end is the mapping's.
        weakref.finalize(buffer, _libc.munmap, address, size_bytes).atexit = False
        self.view = memoryview(buffer).cast("B")

    @classmethod
    def of(cls, descriptor: int, size_bytes: int) -> "SharedMapping":
        """Map a file.

        Raises:
            OSError: the kernel refused (address space, number of mappings).
        """
        # A hole that is large enough for any beginning, in whose middle the file is put; what is left over goes back.
        room_bytes = size_bytes + HUGE_PAGE_BYTES
        room = _map(None, room_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        address = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            _map(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            _libc.munmap(room, room_bytes)
            raise
        page_end = address + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for start, end in ((room, address), (page_end, room + room_bytes)):
            if end > start:
                _libc.munmap(start, end - start)
        return cls(address, size_bytes)

    def populate(self, step_bytes: int, on_step: Callable[[], bool] = lambda: True) -> str:
        """Enter every page into this process's page table, up to the step after which `on_step` says False; why that
        cannot be done ("": it was, or the kernel is older than 5.14 and the first use does it).
        """
        for start in range(0, self.size_bytes, step_bytes):
            length = min(step_bytes, self.size_bytes - start)
            if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                return "" if code == errno.EINVAL else os.strerror(code)
            if not on_step():
                break
        return ""

    def collapse(self, step_bytes: int, on_step: Callable[[], bool] = lambda: True) -> int:
        """Have the kernel (6.1 and newer) put the file's pages together to huge ones, whatever its settings say; how
        many bytes were. `step_bytes` is a multiple of `HUGE_PAGE_BYTES`; `on_step` may say False to stop.

        Every page must be there already, and none may be page-locked yet. A step that fails (no huge page is to be had)
        ends the attempt: the rest stays as it is. It costs 0.4 s a GiB on a host with memory to spare.
        """
        done = 0
        whole = self.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for start in range(0, whole, step_bytes):
            length = min(step_bytes, whole - start)
            if _libc.madvise(self.address + start, length, _MADV_COLLAPSE):
                break
            done += length
            if not on_step():
                break
        return done

    def close(self) -> None:
        """Let go; see the class. Idempotent."""
        view, self.view = self.view, memoryview(b"")
        with contextlib.suppress(BufferError):  # an array of all of it lives on, and holds the buffer
            view.release()


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
