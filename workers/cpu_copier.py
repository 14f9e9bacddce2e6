"""Copies of slices in host memory, by numpy; digests by XXH3.

A group of pieces is gathered to where it is to lie, then digested at its source, then where it was gathered to, before
the next one is touched: both digests read what is still in the processor's cache, and the copy reads and writes memory
at once. The source is read twice in all, so a change between the two is seen, whichever comes first.

The lane's second slice is left to a helper (see `workers.helper`) where this worker has a CPU for it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from workers.cpu_pool import CpuPool
from workers.device import ChunkDamaged, CopyTimes, DeviceFailure, SliceWork, SourceDiffers
from workers.digest import XXH3, Bytes, Digester, Hasher
from workers.helper import Helper, Share
from workers.jobs import ChunkWork
from workers.limiter import LinkLimiter
from workers.pieces import PIECE_BYTES, Piece, copy_to_cache, flats_of, grouped
from workers.shuttle_map import ShuttleMap, parts

# Below this, waking another thread takes longer than the slice.
SHARED_BYTES: Final = 256 * 1024


class _Slice(NamedTuple):
    """What came of a slice: its digests, or where its chunks are staged; and what it took."""

    digests: list[bytes]
    staged: list[Bytes]
    times: CopyTimes


class _Memory:
    """What one thread needs at a time: staging for a slice, and scratch for a group of pieces."""

    def __init__(self, staging_bytes: int) -> None:
        self._staging = np.empty(staging_bytes, np.uint8)
        self._scratch = np.empty(PIECE_BYTES, np.uint8)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return len(self._staging) + len(self._scratch)

    def scratch(self, size_bytes: int) -> Bytes:
        """Memory for one group of pieces."""
        if size_bytes > len(self._scratch):
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]

    def staging(self, work: SliceWork) -> list[Bytes]:
        """Memory for every chunk of a slice; that of the slice before is over."""
        ends = list(accumulate((chunk.span.length_bytes for chunk in work.chunks), initial=0))
        if ends[-1] > len(self._staging):
            self._staging = np.empty(ends[-1], np.uint8)
        return [self._staging[start:end] for start, end in pairwise(ends)]


class _Slot:
    """One slice under way. One thread at a time works in a slot: the lane's or the helper."""

    __slots__ = ("memory", "share", "staged", "target", "work")

    def __init__(self, memory: _Memory) -> None:
        self.memory = memory
        self.work: SliceWork | None = None
        self.target: SliceWork | None = None  # of a copy from rows to rows
        self.share: Share[_Slice] | None = None
        self.staged: list[Bytes] = []

    def take(self) -> SliceWork:
        """The slice, which is over."""
        work, self.work = self.work, None
        assert work is not None, "a slot is begun before it is completed"
        return work

    def drop(self) -> None:
        """Wait for whoever works here, and let go of the slice."""
        share, self.share = self.share, None
        if share is not None:
            share.give_up()
        self.work = self.target = None
        self.staged = []


class CpuCopier:
    """Copies slices with numpy; see `workers.device.Copier`. Without a helper all work happens in complete, verify and
    scatter. A slice of at least `shared_bytes` may be left to the helper.
    """

    before_copy: Callable[[SliceWork], None] | None = None

    def __init__(
        self,
        shuttles: ShuttleMap,
        digester: Digester,
        limiter: LinkLimiter,
        staging_bytes: int,
        *,
        helper: Helper | None = None,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self._shuttles = shuttles
        self._digester = digester
        self._limiter = limiter
        # A simulated link is slower than one thread, and its limiter knows one only.
        self._helper = helper if helper is not None and helper.shares and not limiter.bytes_per_s else None
        self._shared_bytes = shared_bytes
        # Without a helper nothing of a slice is done before the one before it is over.
        self._memories = [_Memory(staging_bytes) for _ in range(1 if self._helper is None else 2)]
        self._slots = (_Slot(self._memories[0]), _Slot(self._memories[-1]))
        self._times = CopyTimes(0.0, 0.0)

    @property
    def times(self) -> CopyTimes:
        """See `Copier`. With a helper, the sum over both threads."""
        return self._times

    def measure(self, *, exact: bool) -> None:
        """See `Copier`; the host does the work itself, so its times are exact anyway."""

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return False

    @property
    def staging_bytes(self) -> int:
        """Private memory of this copier."""
        return sum(memory.size_bytes for memory in self._memories)

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._begin(slot, work, self._capture_slice)

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        return self._finish(slot).digests

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._begin(slot, work, self._digest_slice)

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        return self._finish(slot).digests

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """See `Copier`."""
        self._begin(slot, work, self._stage_source)
        self._slots[slot].target = target

    def complete_copy(self, slot: int) -> None:
        """See `Copier`."""
        target, self._slots[slot].target = self._slots[slot].target, None
        assert target is not None, "a slot is begun before it is completed"
        self._scatter(target, self._finish(slot).staged)

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._begin(slot, work, self._stage_shuttle)

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        work = self._slots[slot].work
        self._slots[slot].staged = self._finish(slot).staged
        self._slots[slot].work = work

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        entry = self._slots[slot]
        staged, entry.staged = entry.staged, []
        work = entry.take()
        if self.before_copy is not None:
            self.before_copy(work)
        self._scatter(work, staged)

    def drain(self) -> None:
        """See `Copier`."""
        for entry in self._slots:
            entry.drop()
        self._limiter.settle()

    def _begin(self, slot: int, work: SliceWork, do: Callable[[_Memory, SliceWork], _Slice]) -> None:
        entry, other = self._slots[slot], self._slots[1 - slot]
        entry.work = work
        entry.share = Share(lambda: do(entry.memory, work))
        # The first slice of a job is the lane's own: it comes for it at once.
        if self._helper is not None and other.share is not None and _length(work) >= self._shared_bytes:
            self._helper.put(entry.share.do)

    def _finish(self, slot: int) -> _Slice:
        entry, other = self._slots[slot], self._slots[1 - slot]
        share, entry.share = entry.share, None
        entry.take()
        assert share is not None, "a slot is begun before it is completed"
        done = share.result(meanwhile=other.share)
        self._count(done.times)
        return done

    def _count(self, times: CopyTimes) -> None:
        self._times = CopyTimes(*map(sum, zip(self._times, times, strict=True)))

    def _capture_slice(self, memory: _Memory, work: SliceWork) -> _Slice:
        """Copy a slice of the pool to its places; both must have one digest."""
        clock = _Clock()
        digests: list[bytes] = []
        for chunk in work.chunks:
            digests.append(self._gather_chunk(memory, work, chunk, self._shuttles.views(chunk.place), clock))
        return _Slice(digests, [], clock.times)

    def _stage_source(self, memory: _Memory, work: SliceWork) -> _Slice:
        """Copy a slice of the pool to staging, proven like a capture."""
        clock = _Clock()
        staged = memory.staging(work)
        for chunk, whole in zip(work.chunks, staged, strict=True):
            self._gather_chunk(memory, work, chunk, [whole], clock)
        times = clock.times
        return _Slice([], staged, times._replace(gather_s=times.copy_s))

    def _gather_chunk(
        self, memory: _Memory, work: SliceWork, chunk: ChunkWork, target: list[Bytes], clock: "_Clock"
    ) -> bytes:
        """Copy a chunk of the pool to one or several views, laid end to end; both must have one digest."""
        source, copied = self._digester.hasher(XXH3), self._digester.hasher(XXH3)
        at = 0
        for group in grouped(_pool(work).view.pieces(chunk, work.rows)):
            size = sum([piece.size_bytes for piece in group])
            outs = list(parts(target, at, at + size))
            at += size
            if len(outs) == 1:
                _gather(group, outs[0])
            else:
                whole = memory.scratch(size)
                _gather(group, whole)
                _spread(whole, outs)
            self._limiter.moved(size, clock.last_s)
            clock.copied()
            if self.before_copy is not None:
                self.before_copy(work)
            _digest_source(memory, group, size, source)
            clock.digested()
            for out in outs:
                copied.update(out)
            clock.verified()
        digest = source.digest()
        if at != chunk.span.length_bytes or digest != copied.digest():
            raise SourceDiffers(chunk.number)
        return digest

    def _digest_slice(self, memory: _Memory, work: SliceWork) -> _Slice:
        clock = _Clock()
        digests: list[bytes] = []
        for chunk in work.chunks:
            hasher = self._digester.hasher(XXH3)
            for group in grouped(_pool(work).view.pieces(chunk, work.rows)):
                _digest_source(memory, group, sum([piece.size_bytes for piece in group]), hasher)
            digests.append(hasher.digest())
        clock.digested()
        return _Slice(digests, [], clock.times)

    def _stage_shuttle(self, memory: _Memory, work: SliceWork) -> _Slice:
        """Copy a slice from its places to staging, and check there that every chunk has its digest."""
        clock = _Clock()
        staged = memory.staging(work)
        for chunk, whole in zip(work.chunks, staged, strict=True):
            hasher = self._digester.hasher(chunk.algorithm)
            at = 0
            for view in self._shuttles.views(chunk.place):
                for start in range(0, len(view), PIECE_BYTES):
                    source = view[start : start + PIECE_BYTES]
                    part = whole[at : at + len(source)]
                    copy_to_cache(part, source)
                    self._limiter.moved(len(source), clock.last_s)
                    clock.copied()
                    hasher.update(part)
                    clock.verified()
                    at += len(source)
            if hasher.digest() != chunk.digest:
                raise ChunkDamaged(chunk.number)
        return _Slice([], staged, clock.times)

    def _scatter(self, work: SliceWork, staged: Sequence[Bytes]) -> None:
        clock = _Clock()
        for chunk, whole in zip(work.chunks, staged, strict=True):
            at = 0
            for piece in _pool(work).view.pieces(chunk, work.rows):
                piece.scatter(whole[at : at + piece.size_bytes])
                at += piece.size_bytes
        clock.gathered()
        self._count(clock.times)


class _Clock:
    """Sums up what a thread spends: each call accounts for the time since the one before, at `last_s`."""

    def __init__(self) -> None:
        self.last_s = time.perf_counter()
        self._copy_s = self._gather_s = self._digest_s = self._verify_s = 0.0

    @property
    def times(self) -> CopyTimes:
        """What was spent."""
        return CopyTimes(self._digest_s + self._verify_s, self._copy_s + self._gather_s, self._gather_s, self._verify_s)

    def gathered(self) -> None:
        """It went into a copy between rows and private memory."""
        self._gather_s += self._lap()

    def copied(self) -> None:
        """It went into a copy to or from a shuttle."""
        self._copy_s += self._lap()

    def digested(self) -> None:
        """It went into a digest of rows where they lie."""
        self._digest_s += self._lap()

    def verified(self) -> None:
        """It went into a digest of bytes that were copied."""
        self._verify_s += self._lap()

    def _lap(self) -> float:
        before_s, self.last_s = self.last_s, time.perf_counter()
        return self.last_s - before_s


def _digest_source(memory: _Memory, group: list[Piece], size_bytes: int, hasher: Hasher) -> None:
    flats = flats_of(group)
    if flats is None:
        whole = memory.scratch(size_bytes)
        _gather(group, whole)
        hasher.update(whole)
        return
    for flat in flats:
        hasher.update(flat)


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
        copy_to_cache(out, source[at : at + len(out)])
        at += len(out)


def _length(work: SliceWork) -> int:
    return sum(chunk.span.length_bytes for chunk in work.chunks)


def _pool(work: SliceWork) -> CpuPool:
    pool = work.pool
    if not isinstance(pool, CpuPool):
        raise DeviceFailure("internal", f"a {type(pool).__name__} met the cpu device")
    return pool
