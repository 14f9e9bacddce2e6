"""Rows: which rows of a stage an operation touches, as runs of consecutive row numbers.

A run is ``(first_row, row_count)``. The order of the runs is the order of the tokens, so a paged cache lists its blocks
in any order. Packed form: little-endian pairs of u32, eight bytes a run.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

RowRuns: TypeAlias = tuple[tuple[int, int], ...]
_RUN: Final = struct.Struct("<II")
ROW_LIMIT: Final = 2**32


def pack_rows(runs: Iterable[tuple[int, int]]) -> bytes:
    """Encode runs; the caller vouches for 0 <= first and count > 0."""
    return b"".join(_RUN.pack(first, count) for first, count in runs)


def unpack_rows(packed: bytes) -> RowRuns:
    """Decode `pack_rows`.

    Raises:
        ValueError: the length is no multiple of eight, a run is empty, or it passes 2^32.
    """
    if len(packed) % _RUN.size:
        raise ValueError(f"packed rows have {len(packed)} bytes, expected a multiple of {_RUN.size}")
    runs = tuple(_RUN.iter_unpack(packed))
    for first, count in runs:
        if count == 0 or first + count > ROW_LIMIT:
            raise ValueError(f"run ({first}, {count}) is empty or passes row {ROW_LIMIT}")
    return runs


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
    return sum(count for _, count in runs)


def first_rows(runs: Sequence[tuple[int, int]], count: int) -> RowRuns:
    """The runs that hold the first `count` rows of `runs`, in order."""
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
    ordered = sorted(runs)
    end = 0
    for first, count in ordered:
        if first < end:
            raise ValueError(f"row {first} occurs twice")
        end = first + count
    return tuple(ordered)


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
