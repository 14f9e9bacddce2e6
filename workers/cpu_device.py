"""The `cpu` device: pools are memfds of the engine, copies are numpy's, digests XXH3.

Every group of pieces is digested at its source, copied, and digested at its destination before the next one is
touched: it stays in the processor's cache, and copy plus both digests run at some 0.6 of a plain copy (whole passes one
after the other: half of that).
"""

import contextlib
import mmap
import platform
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from ipc.messages import CudaIpcPool, Stage
from shm.layout import LayoutError, StageLayout, check_layout
from shm.memfd import PoolError, map_pool
from workers.device import (
    HOST_SLICE_BYTES,
    ChunkDamaged,
    CopyTimes,
    DeviceFailure,
    DevicePool,
    LaneKind,
    PoolRefused,
    SliceWork,
    SourceDiffers,
    check_probe,
)
from workers.digest import XXH3, Bytes, Digester, Hasher
from workers.jobs import ChunkWork
from workers.limiter import LinkLimiter
from workers.pieces import PIECE_BYTES, Piece, PoolView, grouped
from workers.rowmap import RowMap
from workers.shuttle_map import ShuttleMap, parts

_SLICE_ROWS: Final = 1 << 20
# Hashing a piece costs a call; below this one gather and one hash of many are cheaper.
_SMALL_BYTES: Final = 4096
# XXH3-128 of nothing with seed 0, from the algorithm's own test vectors.
_XXH3_OF_NOTHING: Final = bytes.fromhex("99aa06d3014798d86001c324468d497f")


class CpuPool:
    """A mapped memfd. `view` cuts it into pieces."""

    def __init__(self, mapping: mmap.mmap, layout: StageLayout, on_close: Callable[[], None]) -> None:
        self._mapping = mapping
        self._layout = layout
        self._on_close = on_close
        self._memory: Bytes | None = np.frombuffer(mapping, np.uint8)
        self._view: PoolView | None = PoolView(self._memory, layout)

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

    def close(self) -> None:
        """See `DevicePool`."""
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
    pool = CpuPool(mapping, stage.layout, lambda: on_close() if proven else None)
    try:
        check_probe(pool, stage)
    except PoolRefused:
        pool.close()
        raise
    proven = True
    return pool


class _Slot:
    """One slice under way."""

    __slots__ = ("staging", "target", "work")

    def __init__(self) -> None:
        self.work: SliceWork | None = None
        self.target: SliceWork | None = None
        self.staging: list[Bytes] = []


class CpuCopier:
    """Copies slices with numpy; see `workers.device.Copier`. All work happens in complete, verify and scatter."""

    before_copy: Callable[[SliceWork], None] | None = None

    def __init__(self, shuttles: ShuttleMap, digester: Digester, limiter: LinkLimiter, staging_bytes: int) -> None:
        self._shuttles = shuttles
        self._digester = digester
        self._limiter = limiter
        self._slots = (_Slot(), _Slot())
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        self._staging = np.empty(staging_bytes, np.uint8)
        self._digest_s = 0.0
        self._copy_s = 0.0

    @property
    def times(self) -> CopyTimes:
        """See `Copier`."""
        return CopyTimes(self._digest_s, self._copy_s)

    def measure(self, *, exact: bool) -> None:
        """See `Copier`; the host does the work itself, so its times are exact anyway."""

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return False

    @property
    def staging_bytes(self) -> int:
        """Private memory of this copier."""
        return len(self._staging) + len(self._scratch)

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._slots[slot].work = work

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        work = self._take(slot)
        return [self._capture(work, chunk) for chunk in work.chunks]

    def _take(self, slot: int) -> SliceWork:
        work, self._slots[slot].work = self._slots[slot].work, None
        assert work is not None, "a slot is begun before it is completed"
        return work

    def _capture(self, work: SliceWork, chunk: ChunkWork) -> bytes:
        target = self._shuttles.views(chunk.place)
        before, after = self._digester.hasher(XXH3), self._digester.hasher(XXH3)
        at = 0
        now_s = time.perf_counter()
        for group in grouped(_pool(work).view.pieces(chunk, work.rows)):
            size = sum(piece.size_bytes for piece in group)
            self._digest_source(group, size, before)
            if self.before_copy is not None:
                self.before_copy(work)
            start_s, now_s = now_s, time.perf_counter()
            self._digest_s += now_s - start_s
            outs = list(parts(target, at, at + size))
            if len(outs) == 1:
                _gather(group, outs[0])
            else:
                _gather(group, self._room(size))
                _spread(self._room(size), outs)
            self._limiter.moved(size, now_s)
            start_s, now_s = now_s, time.perf_counter()
            self._copy_s += now_s - start_s
            for out in outs:
                after.update(out)
            at += size
        self._digest_s += time.perf_counter() - now_s
        digest = before.digest()
        if at != chunk.span.length_bytes or digest != after.digest():
            raise SourceDiffers(chunk.number)
        return digest

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._slots[slot].work = work

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        work = self._take(slot)
        start_s = time.perf_counter()
        digests = [self._digest_chunk(work, chunk) for chunk in work.chunks]
        self._digest_s += time.perf_counter() - start_s
        return digests

    def _digest_chunk(self, work: SliceWork, chunk: ChunkWork) -> bytes:
        hasher = self._digester.hasher(XXH3)
        for group in grouped(_pool(work).view.pieces(chunk, work.rows)):
            self._digest_source(group, sum(piece.size_bytes for piece in group), hasher)
        return hasher.digest()

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """See `Copier`."""
        self._slots[slot].work = work
        self._slots[slot].target = target

    def complete_copy(self, slot: int) -> None:
        """See `Copier`."""
        target, self._slots[slot].target = self._slots[slot].target, None
        assert target is not None, "a slot is begun before it is completed"
        work = self._take(slot)
        staged = self._room_for_slice(work)
        for chunk, part in zip(work.chunks, staged, strict=True):
            self._stage_source(work, chunk, part)
        self._scatter(target, staged)

    def _stage_source(self, work: SliceWork, chunk: ChunkWork, staged: Bytes) -> None:
        """Copy a chunk of the pool to staging; both must have one digest."""
        view = _pool(work).view
        before, after = self._digester.hasher(XXH3), self._digester.hasher(XXH3)
        start_s = time.perf_counter()
        for group in grouped(view.pieces(chunk, work.rows)):
            self._digest_source(group, sum(piece.size_bytes for piece in group), before)
        if self.before_copy is not None:
            self.before_copy(work)
        copy_s = time.perf_counter()
        at = 0
        for group in grouped(view.pieces(chunk, work.rows)):
            end = at + sum(piece.size_bytes for piece in group)
            _gather(group, staged[at:end])
            at = end
        copied_s = time.perf_counter()
        after.update(staged)
        self._copy_s += copied_s - copy_s
        self._digest_s += time.perf_counter() - copied_s + copy_s - start_s
        if at != chunk.span.length_bytes or before.digest() != after.digest():
            raise SourceDiffers(chunk.number)

    def _digest_source(self, group: list[Piece], size_bytes: int, hasher: Hasher) -> None:
        flats = [piece.flat for piece in group if piece.flat is not None]
        if len(flats) == len(group) and len(flats) * _SMALL_BYTES <= size_bytes:
            for flat in flats:
                hasher.update(flat)
            return
        staged = self._room(size_bytes)
        _gather(group, staged)
        hasher.update(staged)

    def _room(self, size_bytes: int) -> Bytes:
        if size_bytes > len(self._scratch):
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._slots[slot].work = work

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        entry = self._slots[slot]
        work = entry.work
        assert work is not None, "a slot is begun before it is verified"
        entry.staging = self._room_for_slice(work)
        for chunk, staged in zip(work.chunks, entry.staging, strict=True):
            self._stage(chunk, staged)

    def _room_for_slice(self, work: SliceWork) -> list[Bytes]:
        """Staging for every chunk of a slice; that of the slice before is over."""
        lengths = [chunk.span.length_bytes for chunk in work.chunks]
        ends = list(accumulate(lengths, initial=0))
        if ends[-1] > len(self._staging):
            self._staging = np.empty(ends[-1], np.uint8)
        return [self._staging[start:end] for start, end in pairwise(ends)]

    def _stage(self, chunk: ChunkWork, staged: Bytes) -> None:
        hasher = self._digester.hasher(chunk.algorithm)
        at = 0
        now_s = time.perf_counter()
        for view in self._shuttles.views(chunk.place):
            for start in range(0, len(view), PIECE_BYTES):
                source = view[start : start + PIECE_BYTES]
                part = staged[at : at + len(source)]
                part[:] = source
                self._limiter.moved(len(source), now_s)
                start_s, now_s = now_s, time.perf_counter()
                self._copy_s += now_s - start_s
                hasher.update(part)
                start_s, now_s = now_s, time.perf_counter()
                self._digest_s += now_s - start_s
                at += len(source)
        if hasher.digest() != chunk.digest:
            raise ChunkDamaged(chunk.number)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        staging, self._slots[slot].staging = self._slots[slot].staging, []
        work = self._take(slot)
        if self.before_copy is not None:
            self.before_copy(work)
        self._scatter(work, staging)

    def _scatter(self, work: SliceWork, staging: list[Bytes]) -> None:
        start_s = time.perf_counter()
        for chunk, staged in zip(work.chunks, staging, strict=True):
            at = 0
            for piece in _pool(work).view.pieces(chunk, work.rows):
                piece.scatter(staged[at : at + piece.size_bytes])
                at += piece.size_bytes
        self._copy_s += time.perf_counter() - start_s

    def drain(self) -> None:
        """See `Copier`."""
        for entry in self._slots:
            entry.work = entry.target = None
            entry.staging = []
        self._limiter.settle()


def _gather(group: list[Piece], target: Bytes) -> None:
    if len(group) == 1:
        group[0].gather(target)
        return
    at = 0
    for piece in group:
        end = at + piece.size_bytes
        piece.gather(target[at:end])
        at = end


def _spread(source: Bytes, outs: list[Bytes]) -> None:
    at = 0
    for out in outs:
        out[:] = source[at : at + len(out)]
        at += len(out)


def _pool(work: SliceWork) -> CpuPool:
    pool = work.pool
    if not isinstance(pool, CpuPool):
        raise DeviceFailure("internal", f"a {type(pool).__name__} met the cpu device")
    return pool


class CpuDevice:
    """See `workers.device.Device`."""

    def __init__(self, digester: Digester, *, slice_bytes: int, link_bytes_per_s: float) -> None:
        self._digester = digester
        self._link_bytes_per_s = link_bytes_per_s
        self._shuttles = ShuttleMap()
        self._copiers: dict[LaneKind, CpuCopier] = {}
        self._pools = 0
        self.slice_bytes = min(slice_bytes, HOST_SLICE_BYTES)
        self.slice_rows = _SLICE_ROWS
        self.direct_slice_bytes = self.slice_bytes
        self.ramp_bytes = 0
        self.digest_slice_bytes = max(slice_bytes, HOST_SLICE_BYTES)
        self.name = platform.processor() or platform.machine()
        self.digest_algorithm = XXH3
        self.digest_path = "numpy"
        self.device_bytes = 0

    def unstaged_bytes(self, pool: DevicePool, rows: tuple[RowMap, ...], chunk: ChunkWork) -> int:
        """See `Device`."""
        return 0

    def bind_thread(self) -> None:
        """See `Device`."""

    def self_test(self) -> None:
        """See `Device`."""
        answer = Digester.plain_xxh3(b"")
        if answer != _XXH3_OF_NOTHING:
            raise DeviceFailure("internal", f"XXH3-128 of nothing is {answer.hex()}, not {_XXH3_OF_NOTHING.hex()}")
        row = np.arange(64, dtype=np.uint8)
        if self._digester.digest(XXH3, row) == self._digester.digest(XXH3, row[::-1].copy()):
            raise DeviceFailure("internal", "two different rows have one digest")

    def open_pool(self, stage: Stage, descriptor: int) -> CpuPool:
        """See `Device`."""
        if isinstance(stage.pool, CudaIpcPool):
            raise PoolRefused("foreign_device", "a GPU's pool was sent to a cpu worker")
        pool = open_host_pool(stage, descriptor, self._pool_closed)
        self._pools += 1
        return pool

    def _pool_closed(self) -> None:
        self._pools -= 1

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """See `Device`."""
        self._shuttles.add(index, memory)
        return False

    def copier(self, lane: LaneKind) -> CpuCopier:
        """See `Device`."""
        staging_bytes = self.slice_bytes if lane is LaneKind.RESTORE else 0
        made = CpuCopier(self._shuttles, self._digester, LinkLimiter(self._link_bytes_per_s), staging_bytes)
        self._copiers[lane] = made
        return made

    def resources(self) -> dict[str, int]:
        """See `Device`."""
        return {
            "streams": 0,
            "events": 0,
            "staging_bytes": sum(copier.staging_bytes for copier in self._copiers.values()),
            "registrations": 0,
            "pools": self._pools,
            "mappings": self._pools,
            "shuttles": len(self._shuttles),
        }

    def close(self) -> None:
        """See `Device`."""
        self._shuttles.clear()
