"""Slices between a GPU's rows and page-locked shuttles.

Two slots of staging, and streams so that the link never waits for a kernel::

    digest    work stream:  | digest rows (k+1) |
    capture   work stream:  | digest rows, gather, digest staging (k+1) |
              copy stream:  |        staging -> shuttle (k)             |
    restore   copy stream:  |        shuttle -> staging (k+1)           |
              check stream: | digest staging (k) |
              work stream:                       | scatter (k) |
    copy      work stream:  | rows -> rows, looking at each source again (k+1) |

On the *engine* path (see `workers.cuda_engine`) the copy engines move rows and no kernel does. A capture then stages
nothing: the copy lies between two digests of the rows. A restore still goes through staging, since rows never get a
byte that was not verified; the copy engines then take it from there to the rows::

    capture   work stream:  | digest rows (k+1) |
              copy stream:                      | rows -> shuttle (k+1) |
              check stream:                                             | digest rows (k+1) |

A copy from rows to rows digests nothing: what it wrote is what it had read, in registers. To see an engine that writes
meanwhile it reads each source again right after it has written the target, while the source is in the cache, and
compares. That sees changes within microseconds of the copy of each row. A digest before the copy would see those of a
slice's time, and cost another half of the copy's, since memory is what both wait for; neither sees what changes before
the slice or after it.

Streams wait only for events of this process. The host waits for a slice's sums before anything that depends on them.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from shm.extent import ChunkPlace
from shm.gpu_runtime import ANY_DIRECTION, DEVICE_TO_HOST, HOST_TO_DEVICE, GpuError, GpuRuntime
from workers.cuda_clock import DeviceClock, Step
from workers.cuda_engine import Piece, Strip, enqueue, strips_on_path, unstaged_strips
from workers.cuda_memory import Counts, SlotMemory, translated
from workers.cuda_pool import CudaPool
from workers.device import ChunkDamaged, CopyPath, CopyTimes, DeviceFailure, LaneKind, SliceWork, SourceDiffers
from workers.digest import BLOCK_BYTES, MLH, Digester, Words
from workers.gpu_kernels import LoadedSlice, SliceKernels
from workers.jobs import ChunkWork
from workers.kernel_source import COMPARE, COPY
from workers.shuttle_map import ShuttleMap
from workers.slice_table import SliceTable, slice_table

# Copies never cross the border of two registrations (see `CudaDevice.add_shuttle`).
LOCK_STEP_BYTES: Final = 64 * 1024 * 1024
# A small slice is over sooner than a sleeping thread wakes up.
_SPIN_S: Final = 0.0003


class _Slot:
    """One slice under way, its memory and its events. `strips` are set while it goes by the copy engines."""

    def __init__(self, runtime: GpuRuntime, counts: Counts, staging_bytes: int, kernels: SliceKernels) -> None:
        self.memory = SlotMemory(runtime, counts, staging_bytes, kernels)
        self.summed = runtime.event_create()
        self.copied = runtime.event_create()
        self.written = runtime.event_create()
        counts.events += 3
        self.work: SliceWork | None = None
        self.loaded: LoadedSlice | None = None
        self.strips: list[list[Strip]] | None = None

    def let_go(self) -> None:
        """Forget the slice."""
        self.work = self.loaded = self.strips = None

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
        path: CopyPath = CopyPath.AUTO,
        urgent: bool = True,
    ) -> None:
        self._runtime = runtime
        self._counts = counts
        self._kernels = kernels
        self._shuttles = shuttles
        self._digester = digester
        self._path = path
        self._copies_behind = lane is LaneKind.CAPTURE
        self._copy, self._check, self._work = (runtime.stream_create(urgent=urgent) for _ in range(3))
        self._streams = (self._copy, self._check, self._work)
        counts.streams += len(self._streams)
        self._slots = tuple(_Slot(runtime, counts, staging_bytes, kernels) for _ in range(2))
        self._clock = DeviceClock(runtime, counts)
        self._digest_s = 0.0
        self._copy_s = 0.0

    @property
    def times(self) -> CopyTimes:
        """See `Copier`; where nobody asked for exact times, the host's waiting for sums counts as digest, all other
        waiting as copy.
        """
        spent_s = self._clock.spent_s
        gather_s, verify_s = spent_s[Step.GATHER], spent_s[Step.VERIFY]
        return CopyTimes(
            self._digest_s + spent_s[Step.DIGEST] + verify_s,
            self._copy_s + spent_s[Step.LINK] + gather_s,
            gather_s,
            verify_s,
        )

    def measure(self, *, exact: bool) -> None:
        """See `Copier`."""
        self._clock.exact = exact

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return self._copies_behind

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry, runtime = self._slots[slot], self._runtime
            entry.strips = unstaged_strips(self._path, work, _pool(work).address, entry.memory.staging.size_bytes)
            loaded = self._begin_source(entry, work, staged=entry.strips is None)
            if self.before_copy is not None:
                runtime.stream_synchronize(self._work)
                self.before_copy(work)
            if entry.strips is None:
                with self._clock.span(Step.GATHER, self._work):
                    self._kernels.gather(loaded, self._work)
                self._sum_staging(entry, loaded, self._work)
                return
            runtime.event_record(entry.written, self._work)
            runtime.stream_wait_event(self._copy, entry.written)
            with self._clock.span(Step.LINK, self._copy):
                for strips, chunk in zip(entry.strips, work.chunks, strict=True):
                    enqueue(runtime, strips, self._pieces(chunk.place), DEVICE_TO_HOST, self._copy, gather=True)
            runtime.event_record(entry.copied, self._copy)
            runtime.stream_wait_event(self._check, entry.copied)
            with self._clock.span(Step.VERIFY, self._check):
                self._kernels.digest_rows(loaded, entry.memory.copy_sums, self._check)
            self._fetch_sums(entry, self._check)

    def _begin_source(self, entry: _Slot, work: SliceWork, *, staged: bool) -> LoadedSlice:
        """Start to digest the rows of a slice."""
        table = self._table(entry, work, staged=staged)
        # The slot's last slice may still be on its way out of staging.
        self._runtime.stream_wait_event(self._work, entry.copied)
        loaded = entry.loaded = self._load(entry, work, table, self._work)
        with self._clock.span(Step.DIGEST, self._work):
            self._kernels.digest_rows(loaded, entry.memory.source_sums, self._work)
        return loaded

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            self._begin_source(entry, work, staged=False)
            self._fetch_sums(entry, self._work)

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            digests = _digests(self._digester, loaded.table, entry.memory.sums[0])
            entry.let_go()
            return digests

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            source, copy = entry.memory.sums
            if not np.array_equal(source, copy):
                raise SourceDiffers(_first_difference(loaded.table, source, copy))
            if entry.strips is None:
                with self._clock.span(Step.LINK, self._copy):
                    for host, device, size in self._runs(loaded):
                        self._runtime.memcpy_async(host, device, size, DEVICE_TO_HOST, self._copy)
                self._runtime.event_record(entry.copied, self._copy)
            digests = _digests(self._digester, loaded.table, source)
            entry.let_go()
            return digests

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            table = self._table(entry, work, staged=False, target=target)
            loaded = entry.loaded = self._load(entry, work, table, self._work)
            differs = entry.memory.source_sums
            with self._clock.span(Step.GATHER, self._work):
                if self.before_copy is None:
                    self._kernels.copy_rows(loaded, differs, COPY | COMPARE, self._work)
                else:
                    self._kernels.copy_rows(loaded, differs, COPY, self._work)
                    self._runtime.stream_synchronize(self._work)
                    self.before_copy(work)
                    self._kernels.copy_rows(loaded, differs, COMPARE, self._work)
            self._fetch_sums(entry, self._work)

    def complete_copy(self, slot: int) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded = self._await_sums(entry)
            differs = entry.memory.sums[0]
            entry.let_go()
            if differs.any():
                raise SourceDiffers(_first_difference(loaded.table, differs, np.zeros_like(differs)))

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        with translated():
            entry, runtime = self._slots[slot], self._runtime
            table = self._table(entry, work, staged=True)
            # The slot's last scatter may still read its staging and its tables.
            runtime.stream_wait_event(self._copy, entry.written)
            runtime.stream_wait_event(self._check, entry.written)
            entry.work, entry.strips = work, strips_on_path(self._path, work, _pool(work).address)
            loaded = entry.loaded = self._load(entry, work, table, self._check)
            with self._clock.span(Step.LINK, self._copy):
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
        for chunk, digest in zip(loaded.table.works, digests, strict=True):
            expected = chunk.digest
            if chunk.algorithm != MLH:
                expected = self._proven_on_cpu(chunk)
            if digest != expected:
                raise ChunkDamaged(chunk.number)

    def _proven_on_cpu(self, chunk: ChunkWork) -> bytes:
        """Check a chunk of another algorithm on a private host copy; what that copy's own digest is, staging's must be.

        Raises:
            ChunkDamaged: the copy does not have the chunk's digest.
        """
        private = np.concatenate(self._shuttles.views(chunk.place))
        try:
            found = self._digester.digest(chunk.algorithm, private)
        except ValueError as exc:
            raise DeviceFailure("bad_request", str(exc)) from exc
        if found != chunk.digest:
            raise ChunkDamaged(chunk.number)
        return self._digester.digest(MLH, private)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        with translated():
            entry = self._slots[slot]
            loaded, work, strips = entry.loaded, entry.work, entry.strips
            entry.let_go()
            assert loaded is not None, "a slot is verified before it is scattered"
            assert work is not None
            if self.before_copy is not None:
                self._runtime.stream_synchronize(self._work)
                self.before_copy(work)
            with self._clock.span(Step.GATHER, self._work):
                if strips is None:
                    self._kernels.scatter(loaded, self._work)
                else:
                    self._scatter_strips(loaded, strips)
            self._runtime.event_record(entry.written, self._work)

    def _scatter_strips(self, loaded: LoadedSlice, strips: list[list[Strip]]) -> None:
        table = loaded.table
        for start, work, chunk in zip(table.starts, table.works, strips, strict=True):
            pieces = [Piece(0, work.span.length_bytes, loaded.staging + start)]
            enqueue(self._runtime, chunk, pieces, ANY_DIRECTION, self._work, gather=False)

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
                    self._clock.forget()
                    raise failures[0]
                self._clock.read()
        finally:
            for entry in self._slots:
                entry.let_go()
            if not self._clock.exact:
                self._copy_s += time.perf_counter() - start_s

    def close(self) -> None:
        """Free everything of this lane."""
        self._clock.close()
        for entry in self._slots:
            entry.close(self._runtime, self._counts)
        for stream in self._streams:
            self._runtime.stream_destroy(stream)
        self._counts.streams -= len(self._streams)

    def _table(self, entry: _Slot, work: SliceWork, *, staged: bool, target: SliceWork | None = None) -> SliceTable:
        table = slice_table(work, _pool(work).shapes, target)
        if not entry.memory.fits(table, staged=staged):
            for stream in self._streams:
                self._runtime.stream_synchronize(stream)
            entry.memory.grow(table, staged=staged)
        return table

    def _load(self, entry: _Slot, work: SliceWork, table: SliceTable, stream: int) -> LoadedSlice:
        return LoadedSlice.of(_pool(work), entry.memory, table, stream)

    def _sum_staging(self, entry: _Slot, loaded: LoadedSlice, stream: int) -> None:
        with self._clock.span(Step.VERIFY, stream):
            self._kernels.digest_staging(loaded, entry.memory.copy_sums, stream)
        self._fetch_sums(entry, stream)

    def _fetch_sums(self, entry: _Slot, stream: int) -> None:
        entry.memory.fetch_sums(stream)
        self._runtime.event_record(entry.summed, stream)

    def _await_sums(self, entry: _Slot) -> LoadedSlice:
        assert entry.loaded is not None, "a slot is begun before it is completed"
        start_s = time.perf_counter()
        while not self._runtime.event_done(entry.summed):
            if time.perf_counter() - start_s > _SPIN_S:
                self._runtime.event_synchronize(entry.summed)
                break
        if not self._clock.exact:
            self._digest_s += time.perf_counter() - start_s
        return entry.loaded

    def _runs(self, loaded: LoadedSlice) -> Iterator[tuple[int, int, int]]:
        """(host address, staging address, bytes) of every copy of a slice: neighbours joined, cut at registrations."""
        base = offset = staging = size = 0
        for chunk, start in zip(loaded.table.works, loaded.table.starts, strict=True):
            at = loaded.staging + start
            for run_base, run_offset, run_bytes in self._shuttles.runs(chunk.place):
                if run_base == base and run_offset == offset + size and at == staging + size:
                    size += run_bytes
                else:
                    yield from _cut(base, offset, staging, size)
                    base, offset, staging, size = run_base, run_offset, at, run_bytes
                at += run_bytes
        yield from _cut(base, offset, staging, size)

    def _pieces(self, place: ChunkPlace) -> list[Piece]:
        """Where a chunk's bytes lie in shuttles, cut at registrations."""
        pieces: list[Piece] = []
        at = 0
        for base, offset, size in self._shuttles.runs(place):
            for host, start, length in _cut(base, offset, at, size):
                pieces.append(Piece(start, start + length, host))
            at += size
        return pieces


def _pool(work: SliceWork) -> CudaPool:
    if not isinstance(work.pool, CudaPool):
        raise DeviceFailure("internal", f"a {type(work.pool).__name__} met a GPU")
    return work.pool


def _cut(base: int, offset: int, staging: int, size: int) -> Iterator[tuple[int, int, int]]:
    while size:
        take = min(size, LOCK_STEP_BYTES - offset % LOCK_STEP_BYTES)
        yield base + offset, staging, take
        offset, staging, size = offset + take, staging + take, size - take


def _first_difference(table: SliceTable, source: Words, copy: Words) -> int:
    """Number of the chunk that holds the first block whose sums differ."""
    block = int(np.flatnonzero((source != copy).any(axis=1))[0])
    chunk = int(np.searchsorted(table.chunks["first_block"], block, side="right")) - 1
    return table.works[chunk].number


def _digests(digester: Digester, table: SliceTable, sums: Words) -> list[bytes]:
    """Digests of a slice's chunks in order; neighbours of one length are finished together."""
    found: list[bytes] = []
    block = 0
    for length, group in itertools.groupby(table.works, _length):
        count, blocks = sum(1 for _ in group), -(-length // BLOCK_BYTES)
        shaped = sums[block : block + count * blocks].reshape(count, blocks, -1)
        found += digester.mlh.finish_many(shaped, length)
        block += count * blocks
    return found


def _length(chunk: ChunkWork) -> int:
    return chunk.span.length_bytes
