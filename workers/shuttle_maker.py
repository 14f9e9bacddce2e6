"""Makes shuttles: create or attach, reserve, map, enter the pages, page-lock. Slow, so on a thread of its own."""

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.header import ShuttleHeader, split_segment_name
from shm.process import boot_id
from shm.shuttle import Shuttle, ShuttleError, unlink
from workers.device import Device, DeviceFailure

_log: Final = logging.getLogger(__name__)
_MADV_POPULATE_WRITE: Final = 23
# Pages are entered in steps, so that a stopping worker does not wait for a whole GiB.
_STEP_BYTES: Final = 64 * 1024 * 1024
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class ShuttleMaker:
    """Owns the mappings of this worker's shuttles. All methods but `close` run on the maker's thread."""

    def __init__(self, device: Device, stopped: Callable[[], bool]) -> None:
        self._device = device
        self._stopped = stopped
        self._shuttles: dict[int, Shuttle] = {}

    def make(self, order: MakeShuttle) -> ShuttleReady | ShuttleFailed:
        """Carry out one order; every failure that can be foreseen is an answer, and no failure leaves anything."""
        start_s = time.monotonic()
        if order.index in self._shuttles:
            return ShuttleFailed(order.index, "exists", f"shuttle {order.index} is in use already", 0, 0)
        names = split_segment_name(order.segment)
        if names is None:
            return ShuttleFailed(order.index, "refused", f"{order.segment!r} is no shuttle's name", 0, 0)
        instance, worker, index = names
        header = ShuttleHeader(instance, worker, index, order.shuttle_bytes, boot_id())
        try:
            shuttle = self._open(order, header)
        except ShuttleError as exc:
            return ShuttleFailed(order.index, exc.fault.value, str(exc), exc.wanted_bytes, exc.free_bytes)
        except (ValueError, OSError) as exc:
            return ShuttleFailed(order.index, "refused", str(exc), order.shuttle_bytes, 0)
        try:
            _enter_pages(shuttle, order.shuttle_bytes)
            locked = self._device.add_shuttle(order.index, shuttle.view)
        except DeviceFailure as exc:
            _undo(order, shuttle)
            return ShuttleFailed(order.index, exc.code, exc.message, order.shuttle_bytes, 0)
        except BaseException:
            _undo(order, shuttle)
            raise
        self._shuttles[order.index] = shuttle
        made_s = time.monotonic() - start_s
        _log.info("shuttle ready shuttle=%d bytes=%d make_s=%.3f", order.index, order.shuttle_bytes, made_s)
        return ShuttleReady(order.index, locked, made_s)

    def _open(self, order: MakeShuttle, header: ShuttleHeader) -> Shuttle:
        if order.adopt:
            return Shuttle.attach(header)
        return Shuttle.create(header, on_step=lambda _reserved_bytes: not self._stopped())

    def close(self) -> None:
        """Unmap every shuttle; the names stay for the supervisor."""
        while self._shuttles:
            self._shuttles.popitem()[1].close()


def _undo(order: MakeShuttle, shuttle: Shuttle) -> None:
    """Unmap; the name goes too unless a former worker made it."""
    shuttle.close()
    if not order.adopt:
        unlink(order.segment)


def _enter_pages(shuttle: Shuttle, shuttle_bytes: int) -> None:
    """Enter every page into this process's page table: the first job should not pay 0.1 us a page.

    By ctypes, which lets other threads run meanwhile: mmap's own `madvise` holds the interpreter for the whole call.
    """
    address = shuttle.address
    for start in range(0, shuttle_bytes, _STEP_BYTES):
        if _libc.madvise(address + start, min(_STEP_BYTES, shuttle_bytes - start), _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            # EINVAL: a kernel before 5.14; then the first use enters the pages.
            if code != errno.EINVAL:
                _log.warning("pages not entered segment=%s error=%s", shuttle.header.segment, os.strerror(code))
            return
