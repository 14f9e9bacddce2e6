"""Rows: which rows of a stage an operation touches, as runs of consecutive row numbers.

A run is ``(first_row, row_count)``. The order of the runs is the order of the tokens, so a paged cache lists its blocks
in any order. Packed form: little-endian pairs of u32, eight bytes a run.
"""

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import add, gt, itemgetter
from typing import Final, TypeAlias

RowRuns: TypeAlias = tuple[tuple[int, int], ...]
_RUN: Final = struct.Struct("<II")
RUN_BYTES: Final = _RUN.size
ROW_LIMIT: Final = 2**32
# An operation may have thousands of runs, so what is done to all of them is done without a line of Python for each.
_first: Final = itemgetter(0)
_count: Final = itemgetter(1)


def pack_rows(runs: Sequence[tuple[int, int]]) -> bytes:
    """Encode runs; the caller vouches for 0 <= first and count > 0."""
    return struct.pack(f"<{2 * len(runs)}I", *chain.from_iterable(runs))


def unpack_rows(packed: bytes, limit: int = ROW_LIMIT) -> RowRuns:
    """Decode `pack_rows`.

    Raises:
        ValueError: the length is no multiple of eight, a run is empty, or it passes the last of `limit` rows.
    """
    if len(packed) % _RUN.size:
        raise ValueError(f"packed rows have {len(packed)} bytes, expected a multiple of {_RUN.size}")
    runs = tuple(_RUN.iter_unpack(packed))
    if runs and (min(map(_count, runs)) == 0 or max(map(sum, runs)) > limit):
        first, count = next(run for run in runs if run[1] == 0 or sum(run) > limit)
        raise ValueError(f"run ({first}, {count}) is empty or passes the last of {limit} rows")
    return runs


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Little-endian u32s: token positions, or anything else below 2^32."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """Decode `pack_numbers`.

    Raises:
        ValueError: the length is no multiple of four.
    """
    if len(packed) % 4:
        raise ValueError(f"packed numbers have {len(packed)} bytes, expected a multiple of 4")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def runs_of(rows: Iterable[int]) -> RowRuns:
    """Join single row numbers, in the given order, into runs."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][0] + runs[-1][1] == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return tuple(runs)


def row_count(runs: Iterable[tuple[int, int]]) -> int:
    """Number of rows in the runs."""
    return sum(map(_count, runs))


def first_rows(runs: Sequence[tuple[int, int]], count: int) -> RowRuns:
    """The runs that hold the first `count` rows of `runs`, in order."""
    if row_count(runs) <= count:
        return tuple(runs)
    taken: list[tuple[int, int]] = []
    for first, length in runs:
        if count <= 0:
            break
        taken.append((first, min(length, count)))
        count -= length
    return tuple(taken)


def sorted_runs(runs: Iterable[tuple[int, int]]) -> RowRuns:
    """The same rows in ascending order.

    Raises:
        ValueError: a row occurs twice.
    """
    ordered = tuple(sorted(runs, key=_first))  # numbers compare faster than pairs; equal ones are refused below
    ends, starts = map(sum, ordered), map(_first, ordered[1:])
    if any(map(gt, ends, starts)):
        end = 0
        for first, count in ordered:
            if first < end:
                raise ValueError(f"row {first} occurs twice")
            end = first + count
    return ordered


class RowList:
    """Runs of rows in token order, as they travel: packed. Whatever is asked of thousands of runs is answered from the
    bytes, without a line of Python, or an object, for each run.

    Attributes:
        packed: the runs.
        run_count: how many runs there are.
        count: how many rows they have together.
        end: the row after the highest one; 0 where there is none.
        single: every run is one row.
    """

    __slots__ = ("_runs", "count", "end", "packed", "run_count", "single")

    def __init__(self, packed: bytes, count: int, end: int, *, single: bool) -> None:
        """The caller vouches for what he says of the runs; see `unpack` and `of`."""
        self.packed: Final = packed
        self.run_count: Final = len(packed) // RUN_BYTES
        self.count: Final = count
        self.end: Final = end
        self.single: Final = single
        self._runs: RowRuns | None = None

    @classmethod
    def unpack(cls, packed: bytes, limit: int = ROW_LIMIT) -> "RowList":
        """Check packed runs.

        Raises:
            ValueError: as in `unpack_rows`.
        """
        if len(packed) == RUN_BYTES:  # what nearly all slots are
            first, count = _RUN.unpack(packed)
            made = cls(packed, count, first + count, single=count == 1)
            short = count == 0
        else:
            if len(packed) % RUN_BYTES:
                raise ValueError(f"packed rows have {len(packed)} bytes, expected a multiple of {RUN_BYTES}")
            runs = len(packed) // RUN_BYTES
            firsts = _numbers(packed, 0)
            if packed[4::8] == b"\1" * runs and not any(packed[at::8].strip(b"\0") for at in (5, 6, 7)):
                made, short = cls(packed, runs, max(firsts, default=-1) + 1, single=True), False
            else:
                counts = _numbers(packed, 1)
                made = cls(packed, sum(counts), max(map(add, firsts, counts)), single=False)
                short = min(counts) == 0
        if short or made.end > limit:
            unpack_rows(packed, limit)  # says which run it is
        return made

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]]) -> "RowList":
        """The list of some runs; the caller vouches for them as in `pack_rows`."""
        if len(runs) == 1:
            ((first, count),) = runs
            return cls(_RUN.pack(first, count), count, first + count, single=count == 1)
        return cls.unpack(pack_rows(runs))

    @classmethod
    def join(cls, lists: Sequence["RowList"]) -> "RowList":
        """All rows of several lists, one after the other."""
        if len(lists) == 1:
            return lists[0]
        return cls(
            b"".join([one.packed for one in lists]),
            sum(one.count for one in lists),
            max(one.end for one in lists),
            single=all(one.single for one in lists),
        )

    @property
    def runs(self) -> RowRuns:
        """The runs one by one, for whoever has few of them or cannot do otherwise."""
        if self._runs is None:
            self._runs = tuple(_RUN.iter_unpack(self.packed))
        return self._runs

    @property
    def firsts(self) -> "array[int]":
        """The first row of each run."""
        return _numbers(self.packed, 0)

    def first(self, count: int) -> "RowList":
        """The first `count` rows; itself where these are all of them."""
        if count >= self.count:
            return self
        if self.single:
            return RowList.unpack(self.packed[: RUN_BYTES * max(count, 0)])
        ends = list(accumulate(_numbers(self.packed, 1)))
        whole = bisect_left(ends, count)  # the run in which they end
        last, length = _RUN.unpack_from(self.packed, RUN_BYTES * whole)
        left = length - ends[whole] + count
        tail = _RUN.pack(last, left) if left > 0 else b""
        return RowList.unpack(self.packed[: RUN_BYTES * whole] + tail)


def _numbers(packed: bytes, which: int) -> "array[int]":
    """The first rows (0) or the lengths (1) of packed runs."""
    numbers = array("I", packed)[which::2]
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class DistinctRows:
    """A list that has no row twice, and what compares it with another one.

    To sort thousands of blocks costs more than all else that is done with them, and most operations are never compared
    with another; rows that lie alone are compared as a set, which is what told that they differ.

    Raises:
        ValueError: a row occurs twice.
    """

    __slots__ = ("_ascending", "alone", "rows")

    def __init__(self, rows: RowList) -> None:
        self.rows: Final = rows
        self._ascending: RowRuns | None = None
        self.alone: frozenset[int] | None = None  # the rows, where each is a run of its own
        if rows.run_count == 1:
            return
        if rows.single:
            found = frozenset(rows.firsts)
            if len(found) == rows.run_count:
                self.alone = found
                return
        self._ascending = sorted_runs(rows.runs)

    @property
    def ascending(self) -> RowRuns:
        """The same rows in ascending order."""
        if self._ascending is None:
            self._ascending = sorted_runs(self.rows.runs)
        return self._ascending

    def shared(self, other: "DistinctRows") -> int | None:
        """The lowest row that both have, or None."""
        if self.alone is not None and other.alone is not None:
            return None if self.alone.isdisjoint(other.alone) else min(self.alone & other.alone)
        return overlap(self.ascending, other.ascending)


def overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int | None:
    """The lowest row that two ascending run lists share, or None."""
    i = j = 0
    while i < len(a) and j < len(b):
        low = max(a[i][0], b[j][0])
        end_a, end_b = a[i][0] + a[i][1], b[j][0] + b[j][1]
        if low < min(end_a, end_b):
            return low
        if end_a <= end_b:
            i += 1
        else:
            j += 1
    return None
