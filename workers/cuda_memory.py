"""Device and page-locked memory of a GPU worker, allocated once and counted."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shm.gpu_runtime import OUT_OF_MEMORY, GpuError, GpuRuntime
from workers.device import DeviceFailure
from workers.digest import SUMS, Bytes, Words
from workers.slice_table import CHUNK, SliceTable

_PAGE_BYTES: Final = 4096
_TABLE_BYTES: Final = 1024 * 1024
_SUM_BLOCKS: Final = 8192
# Chunks are laid 16 bytes apart at most; this covers slices of many small ones without growing.
_SLACK_BYTES: Final = 1024 * 1024
_ALIGN_BYTES: Final = 16


@contextmanager
def translated() -> Iterator[None]:
    """Turn what the runtime (or torch) raises into `DeviceFailure`."""
    try:
        yield
    except GpuError as exc:
        code = "out_of_memory" if exc.code == OUT_OF_MEMORY else "device_error"
        raise DeviceFailure(code, str(exc), sticky=exc.sticky) from exc
    except RuntimeError as exc:
        # torch's own errors; an asynchronous one of the device says "CUDA error" or "HIP error" and is sticky.
        text = str(exc)
        no_memory = "out of memory" in text
        sticky = not no_memory and ("CUDA error" in text or "HIP error" in text)
        raise DeviceFailure("out_of_memory" if no_memory else "device_error", text, sticky=sticky) from exc


class Counts:
    """What a GPU worker holds."""

    def __init__(self) -> None:
        self.streams = 0
        self.events = 0
        self.registrations = 0
        self.device_bytes = 0
        self.staging_bytes = 0
        self.pools = 0
        self.mappings = 0


class PinnedMemory:
    """Page-locked host memory of our own. `array` is all of it."""

    def __init__(self, runtime: GpuRuntime, counts: Counts, size_bytes: int) -> None:
        self._runtime = runtime
        self._counts = counts
        self._mapping = mmap.mmap(-1, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        self.array: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self.array.ctypes.data)
        runtime.host_register(self.address, len(self.array))
        counts.registrations += 1

    def close(self) -> None:
        """Unlock it. The memory goes with the last view."""
        self._runtime.host_unregister(self.address)
        self._counts.registrations -= 1


class DeviceMemory:
    """Device memory of our own."""

    def __init__(self, runtime: GpuRuntime, counts: Counts, size_bytes: int) -> None:
        self._runtime = runtime
        self._counts = counts
        self.size_bytes = size_bytes
        self.address = runtime.malloc(size_bytes)
        counts.device_bytes += size_bytes

    def close(self) -> None:
        """Free it; waits for the device."""
        self._runtime.free(self.address)
        self._counts.device_bytes -= self.size_bytes


class Move(Protocol):
    """How tables and sums travel (see `SliceKernels.move`)."""

    def __call__(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        ...


class Mover(Protocol):
    """Who moves them (see `SliceKernels`)."""

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        ...

    def load(self, target: int, source: int, size_bytes: int, *, sums: int, sums_bytes: int, stream: int) -> None:
        """Enqueue a copy, and zeros to `sums`."""
        ...


class SlotMemory:
    """What one slice under way needs: staging, its tables, and its block sums (of the source, then of the copy)."""

    def __init__(self, runtime: GpuRuntime, counts: Counts, staging_bytes: int, mover: Mover) -> None:
        self._runtime = runtime
        self._counts = counts
        self._mover = mover
        self.staging = DeviceMemory(runtime, counts, staging_bytes + _SLACK_BYTES)
        counts.staging_bytes += self.staging.size_bytes
        self._table = DeviceMemory(runtime, counts, _TABLE_BYTES)
        self._table_host = PinnedMemory(runtime, counts, _TABLE_BYTES)
        self._sums = DeviceMemory(runtime, counts, _SUM_BLOCKS * SUMS * 8)
        self._sums_host = PinnedMemory(runtime, counts, _SUM_BLOCKS * SUMS * 8)
        self._blocks = 0

    @staticmethod
    def needed_bytes(staging_bytes: int) -> int:
        """Device memory that one takes."""
        return staging_bytes + _SLACK_BYTES + _TABLE_BYTES + _SUM_BLOCKS * SUMS * 8

    def fits(self, table: SliceTable, *, staged: bool) -> bool:
        """Whether `grow` has nothing to do."""
        return (
            (not staged or table.staging_bytes <= self.staging.size_bytes)
            and self._table_bytes(table) <= self._table.size_bytes
            and 2 * table.block_count * SUMS * 8 <= self._sums.size_bytes
        )

    @staticmethod
    def _table_bytes(table: SliceTable) -> int:
        return table.rows.nbytes + table.targets.nbytes + 2 * _ALIGN_BYTES + len(table.chunks) * CHUNK.itemsize

    def grow(self, table: SliceTable, *, staged: bool) -> None:
        """Make room for a larger slice than ever before, which is `staged` or not; the slot must be idle.

        Raises:
            GpuError: no memory; the slot is as it was.
        """
        if staged and table.staging_bytes > self.staging.size_bytes:
            larger = DeviceMemory(self._runtime, self._counts, table.staging_bytes + _SLACK_BYTES)
            self._counts.staging_bytes += larger.size_bytes - self.staging.size_bytes
            self.staging.close()
            self.staging = larger
        if self._table_bytes(table) > self._table.size_bytes:
            self._table, self._table_host = self._larger(self._table, self._table_host, self._table_bytes(table))
        sums_bytes = 2 * table.block_count * SUMS * 8
        if sums_bytes > self._sums.size_bytes:
            self._sums, self._sums_host = self._larger(self._sums, self._sums_host, sums_bytes)

    def _larger(self, device: DeviceMemory, host: PinnedMemory, size_bytes: int) -> tuple[DeviceMemory, PinnedMemory]:
        made = DeviceMemory(self._runtime, self._counts, 2 * size_bytes)
        try:
            pinned = PinnedMemory(self._runtime, self._counts, 2 * size_bytes)
        except GpuError:
            made.close()
            raise
        device.close()
        host.close()
        return made, pinned

    def load(self, table: SliceTable, stream: int) -> tuple[int, int, int]:
        """Enqueue the tables' way to the device and clear the sums; addresses of rows, targets and chunks there."""
        host, address = self._table_host.array, self._table.address
        starts: list[int] = []
        end = 0
        for part in (table.rows, table.targets, table.chunks):
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            end = start + part.nbytes
            host[start:end] = part.view(np.uint8)
            starts.append(address + start)
        size = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        self._blocks = table.block_count
        self._mover.load(
            address,
            self._table_host.address,
            size,
            sums=self._sums.address,
            sums_bytes=self._sums_bytes,
            stream=stream,
        )
        return starts[0], starts[1], starts[2]

    @property
    def _sums_bytes(self) -> int:
        """Of both sets together."""
        return 2 * self._blocks * SUMS * 8

    @property
    def source_sums(self) -> int:
        """Device address of the source's sums."""
        return self._sums.address

    @property
    def copy_sums(self) -> int:
        """Device address of the copy's sums."""
        return self._sums.address + self._blocks * SUMS * 8

    def fetch_sums(self, stream: int) -> None:
        """Enqueue both sets of sums' way to the host."""
        self._mover.move(self._sums_host.address, self._sums.address, self._sums_bytes, stream)

    @property
    def sums(self) -> tuple[Words, Words]:
        """Sums of source and copy, each (blocks, 4); to be read once they have come, valid until the next slice."""
        both: npt.NDArray[np.uint64] = self._sums_host.array[: self._sums_bytes].view(np.uint64)
        shaped = both.reshape(2, self._blocks, SUMS)
        return shaped[0], shaped[1]

    def close(self) -> None:
        """Free everything."""
        for memory in (self.staging, self._table, self._sums):
            memory.close()
        self._table_host.close()
        self._sums_host.close()
        self._counts.staging_bytes -= self.staging.size_bytes
