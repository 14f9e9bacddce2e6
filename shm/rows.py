"""Rows: which rows of a stage an operation touches, as runs of consecutive row numbers.

A run is ``(first_row, row_count)``. The order of the runs is the order of the tokens, so a paged cache lists its blocks
in any order. Packed form: little-endian pairs of u32, eight bytes a run.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import gt, itemgetter
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


class DistinctRows:
    """Runs that have no row twice, and their ascending order once somebody asks for it.

    To sort thousands of blocks costs more than all else that is done with them, and most operations are never compared
    with another.

    Raises:
        ValueError: a row occurs twice.
    """

    __slots__ = ("_ascending", "runs")

    def __init__(self, runs: RowRuns) -> None:
        self.runs = runs
        self._ascending: RowRuns | None = runs if len(runs) == 1 else None
        single = max(map(_count, runs), default=1) == 1
        if not (single and len(set(map(_first, runs))) == len(runs)):
            self._ascending = sorted_runs(runs)

    @property
    def ascending(self) -> RowRuns:
        """The same rows in ascending order."""
        if self._ascending is None:
            self._ascending = sorted_runs(self.runs)
        return self._ascending


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
