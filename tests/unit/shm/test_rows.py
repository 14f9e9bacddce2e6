"""Runs of rows against plain lists and sets of row numbers."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.rows import (
    ROW_LIMIT,
    RowRuns,
    first_rows,
    overlap,
    pack_rows,
    row_count,
    runs_of,
    sorted_runs,
    unpack_rows,
)

ROWS = st.lists(st.integers(0, 60), max_size=40)
RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=12).map(tuple)


def expand(runs: RowRuns) -> list[int]:
    return [row for first, count in runs for row in range(first, first + count)]


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 2**31)), max_size=20).map(tuple))
def test_packed_runs_come_back(runs: RowRuns) -> None:
    packed = pack_rows(runs)
    assert len(packed) == 8 * len(runs)
    assert unpack_rows(packed) == runs


@given(st.binary(max_size=64))
def test_any_bytes_are_runs_or_refused(packed: bytes) -> None:
    try:
        runs = unpack_rows(packed)
    except ValueError:
        return
    assert pack_rows(runs) == packed
    assert all(count > 0 and first + count <= ROW_LIMIT for first, count in runs)


@pytest.mark.parametrize("packed", [b"x", b"x" * 9, struct.pack("<II", 5, 0), struct.pack("<II", 2**32 - 1, 2)])
def test_bad_packed_runs(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"run|packed rows"):
        unpack_rows(packed)


def test_the_last_row_can_be_named() -> None:
    assert unpack_rows(struct.pack("<II", 2**32 - 1, 1)) == ((2**32 - 1, 1),)


@given(ROWS)
def test_runs_of_keep_the_order(rows: list[int]) -> None:
    runs = runs_of(rows)
    assert expand(runs) == rows
    assert row_count(runs) == len(rows)
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(runs))


@given(RUNS, st.integers(-1, 120))
def test_first_rows(runs: RowRuns, count: int) -> None:
    assert expand(first_rows(runs, count)) == expand(runs)[: max(count, 0)]


@given(RUNS)
def test_sorted_runs(runs: RowRuns) -> None:
    rows = expand(runs)
    if len(set(rows)) == len(rows):
        assert expand(sorted_runs(runs)) == sorted(rows)
    else:
        with pytest.raises(ValueError, match="twice"):
            sorted_runs(runs)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_overlap_is_the_lowest_shared_row(a: set[int], b: set[int]) -> None:
    found = overlap(runs_of(sorted(a)), runs_of(sorted(b)))
    assert found == min(a & b, default=None)
