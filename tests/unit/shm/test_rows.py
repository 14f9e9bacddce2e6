"""Runs of rows against plain lists and sets of row numbers."""

import itertools
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.rows import (
    ROW_LIMIT,
    DistinctRows,
    RowList,
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


SINGLE = st.lists(st.integers(0, 300), max_size=12).map(lambda rows: tuple((row, 1) for row in rows))


@given(st.binary(max_size=64), st.integers(1, ROW_LIMIT))
def test_a_list_takes_and_refuses_what_unpacking_does(packed: bytes, limit: int) -> None:
    try:
        runs = unpack_rows(packed, limit)
    except ValueError as exc:
        with pytest.raises(ValueError, match=re.escape(str(exc))):
            RowList.unpack(packed, limit)
        return
    check_list(RowList.unpack(packed, limit), runs)


@given(RUNS | SINGLE)
def test_a_list_says_what_its_runs_are(runs: RowRuns) -> None:
    check_list(RowList.of(runs), runs)


def check_list(rows: RowList, runs: RowRuns) -> None:
    assert rows.packed == pack_rows(runs)
    assert rows.runs == runs
    assert list(rows.firsts) == [first for first, _ in runs]
    assert (rows.run_count, rows.count) == (len(runs), row_count(runs))
    assert rows.end == max((first + count for first, count in runs), default=0)
    assert rows.single == all(count == 1 for _, count in runs)


def test_a_row_beyond_the_low_byte_is_no_single_run() -> None:
    """Lengths are told by their bytes: 257 has a low byte of 1."""
    for count in (257, 1 + (1 << 16), 1 + (1 << 24)):
        runs = ((0, 1), (5, count))
        check_list(RowList.of(runs), runs)


@given(RUNS | SINGLE, st.integers(-1, 120))
def test_the_first_rows_of_a_list(runs: RowRuns, count: int) -> None:
    rows = RowList.of(runs)
    cut = rows.first(count)
    check_list(cut, first_rows(runs, max(count, 0)))
    assert (cut is rows) == (count >= rows.count)


@given(st.lists(RUNS | SINGLE, min_size=1, max_size=3))
def test_joined_lists(lists: list[RowRuns]) -> None:
    check_list(RowList.join([RowList.of(runs) for runs in lists]), tuple(run for runs in lists for run in runs))


@given(RUNS | SINGLE, RUNS | SINGLE)
def test_distinct_lists_and_what_they_share(ours: RowRuns, theirs: RowRuns) -> None:
    for runs in (ours, theirs):
        rows = expand(runs)
        if len(set(rows)) != len(rows):
            with pytest.raises(ValueError, match="twice"):
                DistinctRows(RowList.of(runs))
            return
    one, other = DistinctRows(RowList.of(ours)), DistinctRows(RowList.of(theirs))
    assert expand(one.ascending) == sorted(expand(ours))
    assert one.shared(other) == min(set(expand(ours)) & set(expand(theirs)), default=None)
