"""Makes shuttles: create or attach, reserve, map, enter the pages, page-lock. Slow, so on a thread of its own."""

import logging
import time
from collections.abc import Callable
from typing import Final

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.header import ShuttleHeader, split_segment_name
from shm.process import boot_id
from shm.shuttle import Shuttle, ShuttleError, unlink
from workers.device import Device, DeviceFailure

_log: Final = logging.getLogger(__name__)
# Pages are entered and put together in steps, so that a stopping worker does not wait for a whole GiB.
_STEP_BYTES: Final = 64 * 1024 * 1024
# Of one shuttle, where memory is fragmented: an order has a deadline, and the arena grows meanwhile.
_COLLAPSE_S: Final = 10.0


class ShuttleMaker:
    """Owns the mappings of this worker's shuttles. All methods but `close` run on the maker's thread. With `huge_pages`
    those that it creates are put into huge pages, as far as the kernel has any (see `shm.mapping`).
    """

    def __init__(self, device: Device, stopped: Callable[[], bool], *, huge_pages: bool = False) -> None:
        self._device = device
        self._stopped = stopped
        self._huge_pages = huge_pages
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
            huge_bytes = self._enter_pages(order, shuttle)
            locked = self._device.add_shuttle(order.index, shuttle.view)
        except DeviceFailure as exc:
            _undo(order, shuttle)
            return ShuttleFailed(order.index, exc.code, exc.message, order.shuttle_bytes, 0)
        except BaseException:
            _undo(order, shuttle)
            raise
        self._shuttles[order.index] = shuttle
        made_s = time.monotonic() - start_s
        _log.info(
            "shuttle ready shuttle=%d bytes=%d huge_bytes=%d make_s=%.3f",
            order.index,
            order.shuttle_bytes,
            huge_bytes,
            made_s,
        )
        return ShuttleReady(order.index, locked, made_s)

    def _open(self, order: MakeShuttle, header: ShuttleHeader) -> Shuttle:
        if order.adopt:
            return Shuttle.attach(header)
        return Shuttle.create(header, on_step=lambda _reserved_bytes: not self._stopped())

    def _enter_pages(self, order: MakeShuttle, shuttle: Shuttle) -> int:
        """Enter every page into this process's page table (the first job should not pay 0.1 us a page), after putting
        those of a new shuttle together; how many bytes that were.
        """
        mapping = shuttle.mapping

        def go_on() -> bool:
            return not self._stopped()

        huge_bytes = 0
        if self._huge_pages and not order.adopt:
            end_s = time.monotonic() + _COLLAPSE_S
            huge_bytes = mapping.collapse(_STEP_BYTES, lambda: go_on() and time.monotonic() < end_s)
        problem = mapping.populate(_STEP_BYTES, go_on)
        if problem:
            _log.warning("pages not entered segment=%s error=%s", order.segment, problem)
        return huge_bytes

    def close(self) -> None:
        """Unmap every shuttle; the names stay for the supervisor."""
        while self._shuttles:
            self._shuttles.popitem()[1].close()


def _undo(order: MakeShuttle, shuttle: Shuttle) -> None:
    """Unmap; the name goes too unless a former worker made it."""
    shuttle.close()
    if not order.adopt:
        unlink(order.segment)
