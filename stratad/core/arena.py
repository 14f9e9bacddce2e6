"""The granule allocator: which granules of one worker's shuttles are free."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from shm.extent import GRANULE_BYTES, Extent, granules_for

HEADER_GRANULES = 1


class Arena:
    """Free granules of the shuttles of one worker.

    Best fit over runs of free granules: a request takes the smallest run that holds it, else the largest runs one after
    another, so that it fails only when fewer granules are free than it needs. Neighbouring free runs are always joined.
    All calls are O(log n) in the number of different run lengths. `lost` are shuttles of an earlier arena, of which
    extents may still be held.
    """

    def __init__(self, lost: Iterable[int] = ()) -> None:
        self._granules: dict[int, int] = {}
        self._count_at: dict[tuple[int, int], int] = {}
        self._start_before: dict[tuple[int, int], int] = {}
        self._runs_of: dict[int, dict[tuple[int, int], None]] = {}
        self._counts: list[int] = []
        self._lost = set(lost)
        self._sealed: dict[int, int] = {}  # granules in use, by sealed shuttle
        self.free_granules = 0
        self.total_granules = 0  # that can hold chunks, free or not

    @property
    def used_granules(self) -> int:
        """Granules that are handed out."""
        return self.total_granules - self.free_granules

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of the shuttles that are no more."""
        return frozenset(self._lost)

    def usable_granules(self, extents: Iterable[Extent]) -> int:
        """How many granules can be handed out once these extents are freed: of lost and sealed shuttles none."""
        dead = self._lost | self._sealed.keys() if self._lost or self._sealed else frozenset[int]()
        return sum(extent.length_bytes for extent in extents if extent.shuttle not in dead) // GRANULE_BYTES

    @property
    def shuttles(self) -> tuple[int, ...]:
        """Indexes of the shuttles, ascending."""
        return tuple(sorted(self._granules))

    def shuttle_bytes(self, shuttle: int) -> int:
        """Size of a shuttle, header included."""
        return self._granules[shuttle] * GRANULE_BYTES

    def add_shuttle(self, shuttle: int, size_bytes: int, taken: Iterable[Extent] = (), *, sealed: bool = False) -> None:
        """Add a shuttle, of which the extents `taken` are handed out already (each once). Its first granule holds the
        header and is never handed out. Of a `sealed` one nothing is handed out any more, whatever comes back: somebody
        else might still write there.
        """
        assert shuttle not in self._granules, shuttle
        granules = size_bytes // GRANULE_BYTES
        assert granules > HEADER_GRANULES, size_bytes
        self._granules[shuttle] = granules
        if sealed:
            self._sealed[shuttle] = sum(extent.length_bytes for extent in taken) // GRANULE_BYTES
            self.total_granules += self._sealed[shuttle]
            return
        self.total_granules += granules - HEADER_GRANULES
        at = HEADER_GRANULES
        for extent in sorted(taken):
            start = extent.offset_bytes // GRANULE_BYTES
            assert at <= start, f"{extent} is taken twice"
            self._add_free(shuttle, at, start - at)
            at = start + extent.length_bytes // GRANULE_BYTES
        self._add_free(shuttle, at, granules - at)

    def _add_free(self, shuttle: int, start: int, count: int) -> None:
        assert count >= 0, "a taken extent ends beyond its shuttle"
        if count:
            self._insert(shuttle, start, count)
            self.free_granules += count

    def lose_shuttle(self, shuttle: int) -> None:
        """A shuttle is no more. Extents of it that are still held may be freed, which does nothing; its number is not
        to be used again.
        """
        for start, count in [(start, count) for (at, start), count in self._count_at.items() if at == shuttle]:
            self._remove(shuttle, start, count)
            self.free_granules -= count
        granules = self._granules.pop(shuttle) - HEADER_GRANULES
        self.total_granules -= self._sealed.pop(shuttle, granules)
        self._lost.add(shuttle)

    def allocate(self, length_bytes: int) -> tuple[Extent, ...] | None:
        """Extents for `length_bytes` (one where possible), or None when fewer granules are free."""
        needed = granules_for(length_bytes)
        assert needed > 0, length_bytes
        if needed > self.free_granules:
            return None
        taken: list[Extent] = []
        while needed:
            at = bisect_left(self._counts, needed)
            count = self._counts[at] if at < len(self._counts) else self._counts[-1]
            shuttle, start = self._take(count)
            used = min(count, needed)
            if used < count:
                self._insert(shuttle, start + used, count - used)
            taken.append(Extent(shuttle, start * GRANULE_BYTES, used * GRANULE_BYTES))
            needed -= used
            self.free_granules -= used
        return tuple(taken)

    def allocate_all(self, lengths_bytes: Sequence[int]) -> list[tuple[Extent, ...]] | None:
        """Extents for each of several chunks, or None when fewer granules are free than they need together.

        The granules are taken at once and cut up in order, so that the chunks of an image lie side by side (they are
        copied in few pieces), and only a chunk at the end of a run is split.
        """
        granules = [granules_for(length) for length in lengths_bytes]
        runs = self.allocate(sum(granules) * GRANULE_BYTES)
        if runs is None or len(granules) == 1:
            return None if runs is None else [runs]
        cut: list[tuple[Extent, ...]] = []
        run = iter(runs)
        shuttle, start, left = 0, 0, 0
        for needed in granules:
            parts: list[Extent] = []
            size = needed * GRANULE_BYTES
            while size:
                if not left:
                    shuttle, start, left = next(run)
                taken = min(size, left)
                parts.append(Extent(shuttle, start, taken))
                start, left, size = start + taken, left - taken, size - taken
            cut.append(tuple(parts))
        return cut

    def free(self, extents: Iterable[Extent]) -> None:
        """Take extents back and join them with their free neighbours."""
        for extent in extents:
            shuttle = extent.shuttle
            if shuttle in self._lost:
                continue
            start = extent.offset_bytes // GRANULE_BYTES
            count = extent.length_bytes // GRANULE_BYTES
            assert HEADER_GRANULES <= start < start + count <= self._granules[shuttle], extent
            if shuttle in self._sealed:
                self._sealed[shuttle] -= count
                self.total_granules -= count
                assert self._sealed[shuttle] >= 0, extent
                continue
            self.free_granules += count
            after = self._count_at.get((shuttle, start + count))
            if after is not None:
                self._remove(shuttle, start + count, after)
                count += after
            before = self._start_before.get((shuttle, start))
            if before is not None:
                joined = self._count_at[shuttle, before]
                self._remove(shuttle, before, joined)
                start, count = before, count + joined
            self._insert(shuttle, start, count)

    def validate(self, live: Iterable[Extent]) -> None:
        """Check that `live` (every extent that anybody holds) and the free runs cover each granule exactly once."""
        spans = sorted(
            [
                (e.shuttle, e.offset_bytes // GRANULE_BYTES, e.length_bytes // GRANULE_BYTES)
                for e in live
                if e.shuttle not in self._lost
            ]
            + [(shuttle, start, count) for (shuttle, start), count in self._count_at.items()]
        )
        expected = dict.fromkeys(self._granules, HEADER_GRANULES)
        sealed = dict.fromkeys(self._sealed, 0)
        for shuttle, start, count in spans:
            if shuttle in sealed:
                assert expected[shuttle] <= start, f"shuttle {shuttle}: granule {start} held twice"
                sealed[shuttle] += count
            else:
                assert expected[shuttle] == start, f"shuttle {shuttle}: granule {expected[shuttle]} lost or held twice"
            expected[shuttle] = start + count
        assert sealed == self._sealed, "sealed shuttles out of step"
        full = {shuttle: end for shuttle, end in expected.items() if shuttle not in sealed}
        assert full == {s: n for s, n in self._granules.items() if s not in sealed}, "granules lost at a shuttle's end"
        assert self.free_granules == sum(self._count_at.values())
        assert self._counts == sorted(self._runs_of), "lengths out of step with the runs"

    def _insert(self, shuttle: int, start: int, count: int) -> None:
        self._count_at[shuttle, start] = count
        self._start_before[shuttle, start + count] = start
        runs = self._runs_of.get(count)
        if runs is None:
            runs = self._runs_of[count] = {}
            insort(self._counts, count)
        runs[shuttle, start] = None

    def _take(self, count: int) -> tuple[int, int]:
        """Take out the run of this length that came last. (To find the first entry of a dict takes the longer, the more
        that stood before it were removed.)
        """
        runs = self._runs_of[count]
        (shuttle, start), _ = runs.popitem()
        if not runs:
            del self._runs_of[count]
            del self._counts[bisect_left(self._counts, count)]
        del self._count_at[shuttle, start]
        del self._start_before[shuttle, start + count]
        return shuttle, start

    def _remove(self, shuttle: int, start: int, count: int) -> None:
        del self._count_at[shuttle, start]
        del self._start_before[shuttle, start + count]
        runs = self._runs_of[count]
        del runs[shuttle, start]
        if not runs:
            del self._runs_of[count]
            del self._counts[bisect_left(self._counts, count)]
