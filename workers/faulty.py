"""A device that fails on order, for tests: `WorkerSpec.faults` maps the name of a fault to when it strikes.

===================== ====================================================================================
fault                 what happens
===================== ====================================================================================
``copy_error``        the copy fails with ``device_error``
``copy_oom``          the copy fails with ``out_of_memory``
``copy_sticky``       the copy fails and the device is of no more use
``copy_stall``        the copy never ends
``copy_kill``         the process kills itself in the middle of the copy
``flip_source``       a byte of the pool's first captured row changes between digest and copy
``event_stuck``       the engine's event is never reached (any value)
``drain_error``       what the copy left running cannot be waited for
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

A copy is one slice of one lane, counted from 1 since the start. ``3`` strikes once, ``3+`` from then on, ``3%`` every
third one. With ``capture.`` or ``restore.`` before its name a fault concerns that lane alone, else both (each with its
own count).
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn

from ipc.messages import Stage
from shm.layout import StageLayout
from workers.device import Copier, CopyTimes, Device, DeviceFailure, DevicePool, LaneKind, PoolRefused, SliceWork

FAULTS: Final = frozenset(
    {
        "copy_error",
        "copy_oom",
        "copy_sticky",
        "copy_stall",
        "copy_kill",
        "copy_exit",
        "flip_source",
        "drain_error",
        "event_stuck",
        "shuttle_error",
        "pool_error",
        "boot_error",
        "boot_oom",
        "boot_stall",
        "shuttle_kill",
        "shuttle_stall",
        "pool_close_stall",
        "leak_bytes",
        "slow_copy_s",
        "slow_pool_s",
    }
)


class _Faults:
    """The faults of one lane and how many copies it has begun."""

    def __init__(self, orders: dict[str, str], lane: LaneKind) -> None:
        self._orders: dict[str, str] = {}
        for name, when in orders.items():
            prefix, _, rest = name.rpartition(".")
            if prefix in ("", lane.value):
                self._orders[rest] = when
        self.copies = 0
        self._leaked = b""

    def leak(self) -> None:
        """Leak, once."""
        if not self._leaked:
            self._leaked = b"\1" * int(self._orders.get("leak_bytes", "0"))  # zeros would not be touched

    def strikes(self, fault: str, copy: int) -> bool:
        """Whether the fault strikes this copy."""
        when = self._orders.get(fault)
        if when is None:
            return False
        if when.endswith("+"):
            return copy >= int(when[:-1])
        if when.endswith("%"):
            return copy % int(when[:-1]) == 0
        return copy == int(when)

    @property
    def slow_copy_s(self) -> float:
        """Seconds that every slice takes more."""
        return float(self._orders.get("slow_copy_s", "0"))


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

    def __init__(self, inner: Copier, faults: _Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._begun = 0
        self._under_way: list[tuple[SliceWork, int]] = []
        self._flipped_copy = 0
        inner.before_copy = self._between

    before_copy: Callable[[SliceWork], None] | None = None

    @property
    def times(self) -> CopyTimes:
        """See `Copier`."""
        return self._inner.times

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return self._inner.copies_behind

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._inner.begin_capture(slot, self._begin(work))

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        self._strike()
        return self._inner.complete_capture(slot)

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`. Counts as a copy, and can be killed like one."""
        self._inner.begin_digest(slot, self._begin(work))

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        self._strike()
        if self._faults.strikes("copy_kill", self._faults.copies):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.complete_digest(slot)

    def complete_copy(self, slot: int, target: SliceWork) -> None:
        """See `Copier`."""
        self._strike()
        self._inner.complete_copy(slot, _bare(target))

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._inner.begin_restore(slot, self._begin(work))

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._inner.verify_restore(slot)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._strike()
        self._inner.scatter_restore(slot)

    def drain(self) -> None:
        """See `Copier`."""
        self._under_way.clear()
        self._begun = self._faults.copies
        self._inner.drain()
        if self._faults.strikes("drain_error", self._faults.copies):
            raise DeviceFailure("device_error", "ordered failure of a wait")

    def _begin(self, work: SliceWork) -> SliceWork:
        bare = _bare(work)
        self._begun += 1
        self._under_way = [*self._under_way[-1:], (bare, self._begun)]
        return bare

    def _strike(self) -> None:
        faults = self._faults
        faults.copies += 1
        faults.leak()
        if faults.slow_copy_s:
            time.sleep(faults.slow_copy_s)
        if faults.strikes("copy_error", faults.copies):
            raise DeviceFailure("device_error", "ordered failure of a copy")
        if faults.strikes("copy_oom", faults.copies):
            raise DeviceFailure("out_of_memory", "ordered lack of memory")
        if faults.strikes("copy_sticky", faults.copies):
            raise DeviceFailure("device_error", "ordered loss of the device", sticky=True)
        if faults.strikes("copy_stall", faults.copies):
            _stall()
        if faults.strikes("copy_exit", faults.copies):
            os._exit(1)

    def _between(self, work: SliceWork) -> None:
        copy = next(number for begun, number in self._under_way if begun is work)
        if self._faults.strikes("copy_kill", copy):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._faults.strikes("flip_source", copy) and self._flipped_copy != copy:
            self._flipped_copy = copy
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
    """A device whose copies, pools and shuttles fail on order.

    Raises:
        ValueError: an unknown fault.
    """

    def __init__(self, inner: Device, orders: dict[str, str]) -> None:
        unknown = {name.rpartition(".")[2] for name in orders} - FAULTS
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}, known are {sorted(FAULTS)}")
        self._inner = inner
        self._orders = orders

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

    def bind_thread(self) -> None:
        """See `Device`."""
        self._inner.bind_thread()

    def self_test(self) -> None:
        """See `Device`."""
        if "boot_stall" in self._orders:
            _stall()
        if "boot_oom" in self._orders:
            wanted_bytes = int(self._orders["boot_oom"])
            text = "ordered lack of device memory"
            raise DeviceFailure("out_of_memory", text, wanted_bytes=wanted_bytes, free_bytes=1 << 20)
        if "boot_error" in self._orders:
            raise DeviceFailure("device_error", "ordered failure of the self test")
        self._inner.self_test()

    def open_pool(self, stage: Stage, descriptor: int) -> FaultyPool:
        """See `Device`."""
        time.sleep(float(self._orders.get("slow_pool_s", "0")))
        if "pool_error" in self._orders:
            raise PoolRefused(self._orders["pool_error"], "ordered failure of a pool")
        return FaultyPool(
            self._inner.open_pool(stage, descriptor),
            stuck="event_stuck" in self._orders,
            stays="pool_close_stall" in self._orders,
        )

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """See `Device`."""
        if self._orders.get("shuttle_error") == str(index):
            raise DeviceFailure("device_error", f"ordered failure of shuttle {index}")
        if self._orders.get("shuttle_kill") == str(index):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._orders.get("shuttle_stall") == str(index):
            _stall()
        return self._inner.add_shuttle(index, memory)

    def copier(self, lane: LaneKind) -> FaultyCopier:
        """See `Device`."""
        return FaultyCopier(self._inner.copier(lane), _Faults(self._orders, lane))

    def resources(self) -> dict[str, int]:
        """See `Device`."""
        return self._inner.resources()

    def close(self) -> None:
        """See `Device`."""
        self._inner.close()
