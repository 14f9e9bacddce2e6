"""Pools of a GPU: allocations of engines, opened once each and shared by the pools that lie in them."""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ipc.messages import CudaIpcPool
from shm.gpu_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, GpuError, GpuRuntime
from shm.layout import StageLayout
from workers.cuda_memory import Counts, DeviceMemory, translated
from workers.device import PoolRefused
from workers.slice_table import group_shapes, plane_table, vector_width


@dataclass(slots=True)
class _Allocation:
    """An opened allocation. Where the driver does not tell its size, that of the first claim stands in for it."""

    address: int
    size_bytes: int
    users: int


class AllocationBook:
    """Opened allocations by handle, with how many pools use each. For the thread that opens pools."""

    def __init__(self, runtime: GpuRuntime, counts: Counts) -> None:
        self._runtime = runtime
        self._counts = counts
        self._open: dict[bytes, _Allocation] = {}

    def open(self, pool: CudaIpcPool) -> int:
        """Address of the allocation here.

        Raises:
            PoolRefused: the handle cannot be opened, the allocation is smaller than it was said to be, or the pool does
                not lie in it.
        """
        known = self._open.get(pool.handle)
        if known is None:
            known = self._open_new(pool)
        known.users += 1
        try:
            _check_claim(pool, known.size_bytes)
        except PoolRefused:
            self.release(pool.handle)
            raise
        return known.address

    def _open_new(self, pool: CudaIpcPool) -> _Allocation:
        try:
            address = self._runtime.ipc_open_mem(pool.handle)
        except ValueError as exc:
            raise PoolRefused("unshareable", str(exc)) from exc
        except GpuError as exc:
            raise PoolRefused("device_error" if exc.sticky else "unshareable", str(exc)) from exc
        self._counts.mappings += 1
        size_bytes = pool.allocation_bytes
        # Some drivers do not tell the range of a mapping; the probe then is the only proof.
        with contextlib.suppress(GpuError):
            size_bytes = self._runtime.allocation_of(address)[1]
        made = self._open[pool.handle] = _Allocation(address, size_bytes, 0)
        return made

    def release(self, handle: bytes) -> None:
        """One pool less; the last one unmaps."""
        allocation = self._open[handle]
        allocation.users -= 1
        if allocation.users:
            return
        del self._open[handle]
        self._counts.mappings -= 1
        # The engine may be gone and the context with it: then there is nothing left to unmap.
        with contextlib.suppress(GpuError):
            self._runtime.ipc_close_mem(allocation.address)


def _check_claim(pool: CudaIpcPool, size_bytes: int) -> None:
    """Compare what an engine says of its allocation with the allocation's size.

    Raises:
        PoolRefused: a byte of the pool may lie outside.
    """
    if pool.allocation_bytes > size_bytes:
        raise PoolRefused("unshareable", f"the allocation has {size_bytes} bytes, not {pool.allocation_bytes}")
    if pool.offset_bytes < 0 or pool.offset_bytes + pool.pool_bytes > size_bytes:
        raise PoolRefused("bad_layout", f"the pool does not lie in its allocation of {size_bytes} bytes")


class PoolMemory(NamedTuple):
    """Where a pool lies on the device. `release` gives the memory back."""

    address: int
    size_bytes: int
    release: Callable[[], None]


class CudaPool:
    """A pool on the device: its memory, its plane table, and the engine's event."""

    def __init__(
        self, runtime: GpuRuntime, counts: Counts, memory: PoolMemory, layout: StageLayout, *, event: int, stream: int
    ) -> None:
        self._runtime = runtime
        self._counts = counts
        self._memory = memory
        self._layout = layout
        self._event = event
        self._stream = stream
        self._closed = False
        table = plane_table(layout, memory.address)
        self.width = vector_width(table)
        self.shapes = group_shapes(layout)
        self._planes = DeviceMemory(runtime, counts, table.nbytes)
        try:
            runtime.memcpy_async(self._planes.address, int(table.ctypes.data), table.nbytes, HOST_TO_DEVICE, stream)
            runtime.stream_synchronize(stream)
        except BaseException:
            with contextlib.suppress(GpuError):
                self._planes.close()
            raise
        counts.pools += 1
        counts.events += 1 if event else 0

    @property
    def layout(self) -> StageLayout:
        """See `DevicePool`."""
        return self._layout

    @property
    def in_host_memory(self) -> bool:
        """See `DevicePool`."""
        return False

    @property
    def address(self) -> int:
        """Device address of the pool's first byte."""
        return self._memory.address

    @property
    def size_bytes(self) -> int:
        """Length of the pool."""
        return self._memory.size_bytes

    @property
    def planes(self) -> int:
        """Device address of the plane table."""
        return self._planes.address

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See `DevicePool`."""
        room = ctypes.create_string_buffer(max(1, length_bytes))
        with translated():
            self._runtime.memcpy_async(
                ctypes.addressof(room), self.address + offset_bytes, length_bytes, DEVICE_TO_HOST, self._stream
            )
            self._runtime.stream_synchronize(self._stream)
        return room.raw[:length_bytes]

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Write bytes into the pool and wait for it (self test and faults only)."""
        room = ctypes.create_string_buffer(data, len(data))
        with translated():
            self._runtime.memcpy_async(
                self.address + offset_bytes, ctypes.addressof(room), len(data), HOST_TO_DEVICE, self._stream
            )
            self._runtime.stream_synchronize(self._stream)

    def event_reached(self) -> bool:
        """See `DevicePool`."""
        if not self._event:
            return True
        with translated():
            return self._runtime.event_done(self._event)

    def flip_byte(self, offset_bytes: int) -> None:
        """See `DevicePool`."""
        self.write(offset_bytes, bytes([self.read(offset_bytes, 1)[0] ^ 0xFF]))

    def close(self) -> None:
        """See `DevicePool`."""
        if self._closed:
            return
        self._closed = True
        self._counts.pools -= 1
        if self._event:
            self._counts.events -= 1
            with contextlib.suppress(GpuError):
                self._runtime.event_destroy(self._event)
        with contextlib.suppress(GpuError):
            self._planes.close()
        self._memory.release()
