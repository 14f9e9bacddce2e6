"""Slices between a GPU's rows and page-locked shuttles.

Two slots of staging, and streams so that the link never waits for a kernel::

    digest    work stream:  | digest rows (k+1) |
    capture   work stream:  | digest rows, gather, digest staging (k+1) |
              copy stream:  |        staging -> shuttle (k)             |
    restore   copy stream:  |        shuttle -> staging (k+1)           |
              check stream: | digest staging (k) |
              work stream:                       | scatter (k) |

Streams wait only for events of this process. The host waits for a slice's sums before anything that depends on them.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from shm.gpu_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, GpuError, GpuRuntime
from workers.cuda_memory import Counts, Move, SlotMemory, translated
from workers.cuda_pool import CudaPool
from workers.device import ChunkDamaged, CopyTimes, DeviceFailure, LaneKind, SliceWork, SourceDiffers
from workers.digest import MLH, Digester, Words
from workers.gpu_kernels import LoadedSlice, SliceKernels
from workers.shuttle_map import ShuttleMap
from workers.slice_table import SliceTable, StagedChunk, slice_table

# Copies never cross the border of two registrations (see `CudaDevice.add_shuttle`).
LOCK_STEP_BYTES: Final = 64 * 1024 * 1024
# A small slice is over sooner than a sleeping thread wakes up.
_SPIN_S: Final = 0.0003


class _Slot:
    """One slice under way, its memory and its events."""

    def __init__(self, runtime: GpuRuntime, counts: Counts, staging_bytes: int, move: Move) -> None:
        self.memory = SlotMemory(runtime, counts, staging_bytes, move)
        self.summed = runtime.event_create()
        self.copied = runtime.event_create()
        self.written = runtime.event_create()
        counts.events += 3
        self.work: SliceWork | None = None
        self.loaded: LoadedSlice | None = None
        self.reads_table = False

    def close(self, runtime: GpuRuntime, counts: Counts) -> None:
        for event in (self.summed, self.copied, self.written):
            runtime.event_destroy(event)
        counts.events -= 3
        self.memory.close()


class CudaCopier:
    """See `workers.device.Copier`."""

    before_copy: Callable[[SliceWork], None] | None = None

    def __init__(
        self,
        runtime: GpuRuntime,
        counts: Counts,
        kernels: SliceKernels,
        shuttles: ShuttleMap,
        digester: Digester,
        *,
        lane: LaneKind,
        staging_bytes: int,
    ) -> None:
        self._runtime = runtime
        self._counts = counts
        self._kernels = kernels
        self._shuttles = shuttles
        self._digester = digester
        self._copies_behind = lane is LaneKind.CAPTURE
        self._copy = runtime.stream_create(urgent=True)
        self._check = runtime.stream_create(urgent=True)
        self._work = runtime.stream_create(urgent=True) if lane is LaneKind.RESTORE else self._check
        self._streams = tuple({self._copy, self._check, self._work})
        counts.streams += len(self._streams)
        move = kernels.move
        self._slots = (_Slot(runtime, counts, staging_bytes, move), _Slot(runtime, counts, staging_bytes, move))
        self._digest_s = 0.0
        self._copy_s = 0.0
        self._exact = False

    @property
    def times(self) -> CopyTimes:
        """See `Copier`; the host's waiting for sums counts as digest, all other waiting as copy."""
        return CopyTimes(self._digest_s, self._copy_s)

    def measure(self, *, exact: bool) -> None:
        """See `Copier`."""
        self._exact = exact

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return self._copies_behind

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry, runtime = self._slots[slot], self._runtime
            loaded = self._begin_source(entry, work)
            if self.before_copy is not None:
                runtime.stream_synchronize(self._work)
                self.before_copy(work)
            self._kernels.gather(loaded, self._work)
            self._sum_staging(entry, loaded, self._work)

    def _begin_source(self, entry: _Slot, work: SliceWork, *, staged: bool = True) -> LoadedSlice:
        """Start to digest the rows of a slice; of one that is not `staged` nothing more will be done."""
        runtime = self._runtime
        if entry.reads_table:
            # The table of the slot's last copy may not have left the host yet.
            runtime.event_synchronize(entry.copied)
            entry.reads_table = False
        table = self._table(entry, work, staged=staged)
        # The slot's last slice may still be on its way out of staging.
        runtime.stream_wait_event(self._work, entry.copied)
        loaded = entry.loaded = self._load(entry, work, table, self._work)
        self._kernels.digest_rows(loaded, entry.memory.source_sums, self._work)
        return loaded

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            self._begin_source(entry, work, staged=False)
            entry.memory.fetch_sums(self._work)
            self._runtime.event_record(entry.summed, self._work)

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            entry.loaded = None
            return _digests(self._digester, loaded.table, entry.memory.sums[0])

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            source, staged = entry.memory.sums
            if not np.array_equal(source, staged):
                raise SourceDiffers(_first_difference(loaded.table, source, staged))
            for host, device, size in self._runs(loaded):
                self._runtime.memcpy_async(host, device, size, DEVICE_TO_HOST, self._copy)
            self._runtime.event_record(entry.copied, self._copy)
            entry.loaded = None
            return _digests(self._digester, loaded.table, staged)

    def complete_copy(self, slot: int, target: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            source, staged = entry.memory.sums
            if not np.array_equal(source, staged):
                raise SourceDiffers(_first_difference(loaded.table, source, staged))
            # Same chunks, other rows: the table takes no more room, and nothing reads the old one any more.
            again = self._load(entry, target, slice_table(target, target.pool.layout), self._work)
            self._kernels.scatter(again, self._work)
            self._runtime.event_record(entry.copied, self._work)
            entry.reads_table = True
            entry.loaded = None

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry, runtime = self._slots[slot], self._runtime
            table = self._table(entry, work)
            # The slot's last scatter may still read its staging and its tables.
            runtime.stream_wait_event(self._copy, entry.written)
            runtime.stream_wait_event(self._check, entry.written)
            entry.work = work
            loaded = entry.loaded = self._load(entry, work, table, self._check)
            for host, device, size in self._runs(loaded):
                runtime.memcpy_async(device, host, size, HOST_TO_DEVICE, self._copy)
            runtime.event_record(entry.copied, self._copy)
            runtime.stream_wait_event(self._check, entry.copied)
            self._sum_staging(entry, loaded, self._check)

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            digests = _digests(self._digester, loaded.table, entry.memory.sums[1])
        for chunk, digest in zip(loaded.table.staged, digests, strict=True):
            expected = chunk.work.digest
            if chunk.work.algorithm != MLH:
                expected = self._proven_on_cpu(chunk)
            if digest != expected:
                raise ChunkDamaged(chunk.work.number)

    def _proven_on_cpu(self, chunk: StagedChunk) -> bytes:
        """Check a chunk of another algorithm on a private host copy; what that copy's own digest is, staging's must be.

        Raises:
            ChunkDamaged: the copy does not have the chunk's digest.
        """
        private = np.concatenate(self._shuttles.views(chunk.work.place))
        try:
            found = self._digester.digest(chunk.work.algorithm, private)
        except ValueError as exc:
            raise DeviceFailure("bad_request", str(exc)) from exc
        if found != chunk.work.digest:
            raise ChunkDamaged(chunk.work.number)
        return self._digester.digest(MLH, private)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded, entry.loaded = entry.loaded, None
            work, entry.work = entry.work, None
            assert loaded is not None, "a slot is verified before it is scattered"
            assert work is not None
            if self.before_copy is not None:
                self._runtime.stream_synchronize(self._work)
                self.before_copy(work)
            self._kernels.scatter(loaded, self._work)
            self._runtime.event_record(entry.written, self._work)

    def drain(self) -> None:
        """See `Copier`."""
        start_s = time.perf_counter()
        failures: list[GpuError] = []
        try:
            for stream in self._streams:
                # One that failed says nothing about the others: they may still read rows and write shuttles.
                try:
                    self._runtime.stream_synchronize(stream)
                except GpuError as exc:
                    failures.append(exc)
            with translated():
                if failures:
                    raise failures[0]
        finally:
            for entry in self._slots:
                entry.loaded = entry.work = None
            self._copy_s += time.perf_counter() - start_s

    def close(self) -> None:
        """Free everything of this lane."""
        for entry in self._slots:
            entry.close(self._runtime, self._counts)
        for stream in self._streams:
            self._runtime.stream_destroy(stream)
        self._counts.streams -= len(self._streams)

    def _table(self, entry: _Slot, work: SliceWork, *, staged: bool = True) -> SliceTable:
        table = slice_table(work, work.pool.layout)
        if not staged:
            table = table._replace(staging_bytes=0)
        if not entry.memory.fits(table):
            for stream in self._streams:
                self._runtime.stream_synchronize(stream)
            entry.memory.grow(table)
        return table

    def _load(self, entry: _Slot, work: SliceWork, table: SliceTable, stream: int) -> LoadedSlice:
        pool = work.pool
        if not isinstance(pool, CudaPool):
            raise DeviceFailure("internal", f"a {type(pool).__name__} met a GPU")
        return LoadedSlice.of(pool, entry.memory, table, stream)

    def _sum_staging(self, entry: _Slot, loaded: LoadedSlice, stream: int) -> None:
        self._kernels.digest_staging(loaded, entry.memory.staging_sums, stream)
        entry.memory.fetch_sums(stream)
        self._runtime.event_record(entry.summed, stream)

    def _await_sums(self, entry: _Slot) -> LoadedSlice:
        assert entry.loaded is not None, "a slot is begun before it is completed"
        start_s = time.perf_counter()
        while not self._runtime.event_done(entry.summed):
            if time.perf_counter() - start_s > _SPIN_S:
                self._runtime.event_synchronize(entry.summed)
                break
        self._digest_s += time.perf_counter() - start_s
        return entry.loaded

    def _runs(self, loaded: LoadedSlice) -> Iterator[tuple[int, int, int]]:
        """(host address, staging address, bytes) of every copy of a slice: neighbours joined, cut at registrations."""
        base = offset = staging = size = 0
        for chunk in loaded.table.staged:
            at = loaded.staging + chunk.staging_bytes
            for run_base, run_offset, run_bytes in self._shuttles.runs(chunk.work.place):
                if run_base == base and run_offset == offset + size and at == staging + size:
                    size += run_bytes
                else:
                    yield from _cut(base, offset, staging, size)
                    base, offset, staging, size = run_base, run_offset, at, run_bytes
                at += run_bytes
        yield from _cut(base, offset, staging, size)


def _cut(base: int, offset: int, staging: int, size: int) -> Iterator[tuple[int, int, int]]:
    while size:
        take = min(size, LOCK_STEP_BYTES - offset % LOCK_STEP_BYTES)
        yield base + offset, staging, take
        offset, staging, size = offset + take, staging + take, size - take


def _first_difference(table: SliceTable, source: Words, staged: Words) -> int:
    for chunk in table.staged:
        blocks = slice(chunk.first_block, chunk.first_block + chunk.block_count)
        if not np.array_equal(source[blocks], staged[blocks]):
            return chunk.work.number
    return -1


def _digests(digester: Digester, table: SliceTable, sums: Words) -> list[bytes]:
    """Digests of a slice's chunks in order; neighbours of one length are finished together."""
    found: list[bytes] = []
    at = 0
    while at < len(table.staged):
        first = table.staged[at]
        end = at + 1
        while end < len(table.staged) and table.staged[end].work.span.length_bytes == first.work.span.length_bytes:
            end += 1
        blocks = sums[first.first_block : first.first_block + (end - at) * first.block_count]
        shaped = blocks.reshape(end - at, first.block_count, -1)
        found += digester.mlh.finish_many(shaped, first.work.span.length_bytes)
        at = end
    return found
