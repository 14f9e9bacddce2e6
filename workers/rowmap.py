"""The rows of one job as numpy arrays: token order in, row numbers out, without work per row in Python."""

import struct
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from workers.jobs import JobRefused

Index: TypeAlias = npt.NDArray[np.uint32]
_RUN: Final = struct.Struct("<II")


class RowMap:
    """Row numbers of an operation in the order of its tokens.

    `count` is their number. Position p of the list is what `ChunkSpan.first_row` counts. One run, the usual case of a
    slot cache, is kept as two numbers: numpy would cost more than the copy of a small job.
    """

    __slots__ = ("__weakref__", "_ends", "_index", "_only_first", "_runs", "count")

    def __init__(self, runs: npt.NDArray[np.int64] | None, only_first: int, count: int) -> None:
        self._runs = runs
        self._ends: npt.NDArray[np.int64] | None = None if runs is None else np.cumsum(runs[:, 1])
        self._only_first = only_first
        self._index: Index | None = None
        self.count = count

    @classmethod
    def parse(cls, packed: bytes, rows: int, needed: int) -> "RowMap":
        """Read packed rows (`shm.rows`) of a stage that has `rows` rows; a job needs the first `needed` of them.

        Raises:
            JobRefused: the packing is broken, a run is empty or passes the stage's last row, or there are too few.
        """
        if len(packed) % _RUN.size:
            raise JobRefused("bad_rows", f"packed rows have {len(packed)} bytes, expected a multiple of 8")
        if len(packed) == _RUN.size:
            first, count = _RUN.unpack(packed)
            made, lowest, highest = cls(None, first, count), count, first + count
        else:
            runs = np.frombuffer(packed, "<u4").astype(np.int64).reshape(-1, 2)
            made = cls(runs, 0, int(runs[:, 1].sum()))
            lowest, highest = (int(runs[:, 1].min()), int(runs.sum(axis=1).max())) if len(runs) else (1, 0)
        if lowest == 0 or highest > rows:
            raise JobRefused("bad_rows", f"a run is empty or passes the last of {rows} rows")
        if made.count < needed:
            raise JobRefused("bad_rows", f"{made.count} rows given, {needed} needed")
        return made

    def runs_between(self, start: int, end: int, limit: int) -> list[tuple[int, int]] | None:
        """The runs of positions `start` to `end` (exclusive), or None where that would be more than `limit` runs."""
        if start >= end:
            return []
        if self._runs is None or self._ends is None:
            return [(self._only_first + start, end - start)]
        low = int(np.searchsorted(self._ends, start, side="right"))
        high = int(np.searchsorted(self._ends, end, side="left"))
        if high - low + 1 > limit:
            return None
        runs: list[tuple[int, int]] = []
        for at in range(low, high + 1):
            run_end = int(self._ends[at])
            run_start = run_end - int(self._runs[at, 1])
            begin, stop = max(start, run_start), min(end, run_end)
            runs.append((int(self._runs[at, 0]) + begin - run_start, stop - begin))
        return runs

    def index(self, start: int, end: int) -> Index:
        """Row numbers of positions `start` to `end` (exclusive), as u32."""
        if self._runs is None or self._ends is None:
            return np.arange(self._only_first + start, self._only_first + end, dtype=np.uint32)
        if self._index is None:
            counts = self._runs[:, 1]
            shifts = np.repeat(self._runs[:, 0] - (self._ends - counts), counts)
            self._index = (shifts + np.arange(self.count, dtype=np.int64)).astype(np.uint32)
        return self._index[start:end]

    def packed_between(self, start: int, end: int) -> bytes:
        """Positions `start` to `end` (exclusive) as packed runs."""
        end = min(end, self.count)
        if start >= end:
            return b""
        if self._runs is None or self._ends is None:
            return _RUN.pack(self._only_first + start, end - start)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        runs = self._runs[first : last + 1].copy()
        runs[-1, 1] -= int(self._ends[last]) - end
        before = start - int(self._ends[first] - self._runs[first, 1])
        runs[0] += (before, -before)
        return runs.astype("<u4").tobytes()
