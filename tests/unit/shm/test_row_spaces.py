"""Rows by space against bytes: two operations have a row in common where they own a byte in common."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shm.layout import StageLayout
from shm.row_spaces import distinct_rows, shared_row
from shm.rows import RowList, runs_of
from tests.support.shape_cases import Case, Rows, cases


def bytes_of(layout: StageLayout, rows: Rows) -> list[int]:
    """Every byte of some rows, as often as a group owns it; the planes of one group own none in common."""
    return [
        byte
        for group, mine in zip(layout.all_groups, rows, strict=True)
        for plane in group.planes
        for row in mine
        for byte in range(
            plane.offset_bytes + row * plane.row_stride_bytes,
            plane.row_bytes + plane.offset_bytes + row * plane.row_stride_bytes,
        )
    ]


def lists(rows: Rows) -> tuple[RowList, ...]:
    return tuple(RowList.of(runs_of(mine)) for mine in rows)


@st.composite
def any_rows(draw: st.DrawFn, layout: StageLayout) -> Rows:
    """A few rows of every group, some of them perhaps twice."""
    return tuple(
        tuple(draw(st.lists(st.integers(0, group.rows - 1), max_size=2, unique=draw(st.booleans()))))
        for group in layout.all_groups
    )


@settings(max_examples=200)
@given(cases(max_tokens=12), st.data())
def test_rows_are_distinct_and_shared_as_their_bytes_are(case: Case, data: st.DataObject) -> None:
    layout = case.layout
    ours, theirs = data.draw(any_rows(layout)), data.draw(any_rows(layout))
    for rows in (ours, theirs):
        owned = bytes_of(layout, rows)
        if len(set(owned)) != len(owned):
            with pytest.raises(ValueError, match="occurs twice"):
                distinct_rows(layout, lists(rows))
            return
    shared = shared_row(layout, distinct_rows(layout, lists(ours)), distinct_rows(layout, lists(theirs)))
    assert bool(shared) == bool(set(bytes_of(layout, ours)) & set(bytes_of(layout, theirs)))


@given(cases(max_tokens=12))
def test_the_rows_of_a_case_and_its_targets_have_nothing_in_common(case: Case) -> None:
    ours, theirs = distinct_rows(case.layout, lists(case.rows)), distinct_rows(case.layout, lists(case.target))
    assert shared_row(case.layout, ours, theirs) == ""
    assert not set(bytes_of(case.layout, case.rows)) & set(bytes_of(case.layout, case.target))
