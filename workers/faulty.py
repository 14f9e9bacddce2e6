"""A device that fails on order, for tests (see `workers.fault_orders` for when).

===================== ====================================================================================
fault                 what happens
===================== ====================================================================================
``slow_copy``         the copy takes `SLOW_S` more and ends well
``copy_error``        the copy fails with ``device_error``
``copy_exception``    something that nobody expects is raised in the middle of the copy
``copy_oom``          the copy fails with ``out_of_memory``
``copy_sticky``       the copy fails and the device is of no more use
``copy_stall``        the copy never ends
``copy_kill``         the process kills itself in the middle of the copy
``flip_source``       a byte of the slice's first row changes between digest and copy
``flip_shuttle``      a byte of the slice's first chunk changes in its shuttle before it is verified
``drain_error``       what the copy left running cannot be waited for
``event_stuck``       the engine's event is never reached (any value)
``copy_exit``         the process exits by itself in the middle of the copy, with status 1
``shuttle_error``     the shuttle with this index cannot be page-locked
``shuttle_kill``      the process kills itself while it page-locks the shuttle with this index
``shuttle_stall``     the page-lock of the shuttle with this index never ends
``pool_close_stall``  no pool's unmapping ever ends (any value)
``pool_error``        no pool can be opened (the value is the code)
``slow_pool_s``       every pool takes that many seconds more to open
``boot_error``        the self test fails (any value)
``boot_oom``          the self test finds too little device memory; it wanted that many bytes, of which 1 MiB are free
``boot_stall``        the self test never ends (any value)
``slow_copy_s``       every slice takes that many seconds more
``leak_bytes``        the first copy leaves that many touched bytes that nobody accounts for
===================== ====================================================================================

Armed at run time are: error (``copy_error``), exception, oom, kill, hang (``copy_stall``), slow (``slow_copy``) and
corrupt, which is ``flip_shuttle`` for what reads shuttles, else ``flip_source``.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn

from ipc.messages import Stage
from shm.layout import StageLayout
from workers.device import Copier, CopyTimes, Device, DeviceFailure, DevicePool, LaneKind, PoolRefused, SliceWork
from workers.fault_orders import FaultBook, Hit
from workers.jobs import ChunkWork
from workers.rowmap import RowMap
from workers.shuttle_map import ShuttleMap

# Long enough for somebody outside to see the operation in flight, and far below any deadline.
SLOW_S: Final = 0.3


class _Slice:
    """A slice under way and the orders that count it."""

    __slots__ = ("hits", "work")

    def __init__(self, work: SliceWork, hits: tuple[Hit, ...]) -> None:
        self.work = work
        self.hits = list(hits)


class FaultyPool:
    """A pool whose event may be stuck."""

    def __init__(self, inner: DevicePool, *, stuck: bool, stays: bool) -> None:
        self.inner = inner
        self._stuck = stuck
        self._stays = stays

    @property
    def layout(self) -> StageLayout:
        """See `DevicePool`."""
        return self.inner.layout

    @property
    def in_host_memory(self) -> bool:
        """See `DevicePool`."""
        return self.inner.in_host_memory

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See `DevicePool`."""
        return self.inner.read(offset_bytes, length_bytes)

    def event_reached(self) -> bool:
        """See `DevicePool`."""
        return not self._stuck and self.inner.event_reached()

    def flip_byte(self, offset_bytes: int) -> None:
        """See `DevicePool`."""
        self.inner.flip_byte(offset_bytes)

    def close(self) -> None:
        """See `DevicePool`."""
        if self._stays:
            _stall()
        self.inner.close()


class FaultyCopier:
    """A copier that fails on order."""

    before_copy: Callable[[SliceWork], None] | None = None

    def __init__(self, inner: Copier, lane: LaneKind, faults: FaultBook, shuttles: ShuttleMap) -> None:
        self._inner = inner
        self._lane = lane
        self._faults = faults
        self._shuttles = shuttles
        self._slices: dict[int, _Slice] = {}
        self._leaked = b""
        inner.before_copy = self._between

    @property
    def times(self) -> CopyTimes:
        """See `Copier`."""
        return self._inner.times

    def measure(self, *, exact: bool) -> None:
        """See `Copier`."""
        self._inner.measure(exact=exact)

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return self._inner.copies_behind

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._inner.begin_capture(slot, self._begin(slot, work).work)

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        self._strike(self._slices[slot])
        return self._inner.complete_capture(slot)

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`. Counts as a copy, and can be killed like one."""
        self._inner.begin_digest(slot, self._begin(slot, work).work)

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        begun = self._slices[slot]
        self._strike(begun)
        if self._takes(begun, "copy_kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.complete_digest(slot)

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """See `Copier`."""
        self._inner.begin_copy(slot, self._begin(slot, work).work, _bare(target))

    def complete_copy(self, slot: int) -> None:
        """See `Copier`."""
        self._strike(self._slices[slot])
        self._inner.complete_copy(slot)

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        begun = self._begin(slot, work)
        if self._takes(begun, "flip_shuttle"):
            self._shuttles.views(begun.work.chunks[0].place)[0][0] ^= 0xFF
        self._inner.begin_restore(slot, begun.work)

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._inner.verify_restore(slot)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._strike(self._slices[slot])
        self._inner.scatter_restore(slot)

    def drain(self) -> None:
        """See `Copier`."""
        self._slices.clear()
        self._faults.settle(self._lane)
        self._inner.drain()
        if self._faults.drain_fails(self._lane):
            raise DeviceFailure("device_error", "ordered failure of a wait")

    def _begin(self, slot: int, work: SliceWork) -> _Slice:
        begun = self._slices[slot] = _Slice(_bare(work), self._faults.begin(self._lane, work.op, work.stage))
        return begun

    def _takes(self, begun: _Slice, fault: str) -> bool:
        """Whether a fault strikes a slice now; the same order does so once a slice."""
        for hit in list(begun.hits):
            if hit.order.fault == fault and hit.order.strikes(hit.copy):
                begun.hits.remove(hit)
                hit.order.done = max(
                    hit.order.done, hit.copy
                )  # it may strike before the copy is completed, if it ever is
                self._faults.struck(hit.order)
                return True
        return False

    def _strike(self, begun: _Slice) -> None:
        for hit in begun.hits:
            hit.order.done = max(hit.order.done, hit.copy)
        if not self._leaked:  # once; zeros would not be touched
            self._leaked = b"\1" * int(self._faults.setting("leak_bytes", self._lane) or 0)
        slow_s = float(self._faults.setting("slow_copy_s", self._lane) or 0)
        if slow_s:
            time.sleep(slow_s)
        if self._takes(begun, "slow_copy"):
            time.sleep(SLOW_S)
        if self._takes(begun, "copy_error"):
            raise DeviceFailure("device_error", "ordered failure of a copy")
        if self._takes(begun, "copy_exception"):
            raise RuntimeError("ordered exception in a copy")
        if self._takes(begun, "copy_oom"):
            raise DeviceFailure("out_of_memory", "ordered lack of memory")
        if self._takes(begun, "copy_sticky"):
            raise DeviceFailure("device_error", "ordered loss of the device", sticky=True)
        if self._takes(begun, "copy_stall"):
            _stall()
        if self._takes(begun, "copy_exit"):
            os._exit(1)

    def _between(self, work: SliceWork) -> None:
        # Perhaps on a helper's thread, so beside the lane, whose job may have failed meanwhile.
        begun = next((one for one in list(self._slices.values()) if one.work is work), None)
        if begun is None:
            return
        if self._takes(begun, "copy_kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._takes(begun, "flip_source"):
            work.pool.flip_byte(first_byte(work))


def first_byte(work: SliceWork) -> int:
    """Offset in the pool of the first byte that a slice reads."""
    span = work.chunks[0].span
    plane = work.pool.layout.all_groups[span.group].planes[0]
    row = int(work.rows[span.group].index(span.first_row, span.first_row + 1)[0])
    return plane.offset_bytes + row * plane.row_stride_bytes


def _bare(work: SliceWork) -> SliceWork:
    pool = work.pool
    return work._replace(pool=pool.inner) if isinstance(pool, FaultyPool) else work


def _stall() -> NoReturn:
    while True:
        time.sleep(3600)


class FaultyDevice:
    """A device whose copies, pools and shuttles fail on order."""

    def __init__(self, inner: Device, faults: FaultBook) -> None:
        self._inner = inner
        self._faults = faults
        self._shuttles = ShuttleMap()

    @property
    def name(self) -> str:
        """See `Device`."""
        return self._inner.name

    @property
    def digest_algorithm(self) -> str:
        """See `Device`."""
        return self._inner.digest_algorithm

    @property
    def digest_path(self) -> str:
        """See `Device`."""
        return self._inner.digest_path

    @property
    def device_bytes(self) -> int:
        """See `Device`."""
        return self._inner.device_bytes

    @property
    def slice_bytes(self) -> int:
        """See `Device`."""
        return self._inner.slice_bytes

    @property
    def slice_rows(self) -> int:
        """See `Device`."""
        return self._inner.slice_rows

    @property
    def direct_slice_bytes(self) -> int:
        """See `Device`."""
        return self._inner.direct_slice_bytes

    @property
    def digest_slice_bytes(self) -> int:
        """See `Device`."""
        return self._inner.digest_slice_bytes

    @property
    def ramp_bytes(self) -> int:
        """See `Device`."""
        return self._inner.ramp_bytes

    def unstaged_bytes(self, pool: DevicePool, rows: tuple[RowMap, ...], chunk: ChunkWork) -> int:
        """See `Device`."""
        inner = pool.inner if isinstance(pool, FaultyPool) else pool
        return self._inner.unstaged_bytes(inner, rows, chunk)

    def bind_thread(self) -> None:
        """See `Device`."""
        self._inner.bind_thread()

    def self_test(self) -> None:
        """See `Device`."""
        if self._faults.setting("boot_stall") is not None:
            _stall()
        wanted = self._faults.setting("boot_oom")
        if wanted is not None:
            text = "ordered lack of device memory"
            raise DeviceFailure("out_of_memory", text, wanted_bytes=int(wanted), free_bytes=1 << 20)
        if self._faults.setting("boot_error") is not None:
            raise DeviceFailure("device_error", "ordered failure of the self test")
        self._inner.self_test()

    def open_pool(self, stage: Stage, descriptor: int) -> FaultyPool:
        """See `Device`."""
        time.sleep(float(self._faults.setting("slow_pool_s") or 0))
        code = self._faults.setting("pool_error")
        if code is not None:
            raise PoolRefused(code, "ordered failure of a pool")
        return FaultyPool(
            self._inner.open_pool(stage, descriptor),
            stuck=self._faults.setting("event_stuck") is not None,
            stays=self._faults.setting("pool_close_stall") is not None,
        )

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """See `Device`."""
        if self._faults.setting("shuttle_error") == str(index):
            raise DeviceFailure("device_error", f"ordered failure of shuttle {index}")
        if self._faults.setting("shuttle_kill") == str(index):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._faults.setting("shuttle_stall") == str(index):
            _stall()
        locked = self._inner.add_shuttle(index, memory)
        self._shuttles.add(index, memory)
        return locked

    def copier(self, lane: LaneKind) -> FaultyCopier:
        """See `Device`."""
        return FaultyCopier(self._inner.copier(lane), lane, self._faults, self._shuttles)

    def resources(self) -> dict[str, int]:
        """See `Device`."""
        return self._inner.resources()

    def close(self) -> None:
        """See `Device`."""
        self._shuttles.clear()
        self._inner.close()
