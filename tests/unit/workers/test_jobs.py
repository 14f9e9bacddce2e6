"""The pure half of jobs: states, slices, chunks; and the row map against plain lists."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shm.extent import ChunkPlace
from shm.layout import ChunkSpan, Plane, StageLayout, StateGroup
from shm.rows import pack_rows, row_count, unpack_rows
from tests.support.layouts import stage_layout
from workers.jobs import (
    TRANSITIONS,
    ChunkWork,
    InvalidTransition,
    JobEvent,
    JobRecord,
    JobRefused,
    JobState,
    SliceSizes,
    capture_chunks,
    plan_slices,
    restore_chunks,
    rows_needed,
)
from workers.rowmap import RowMap


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", JobEvent)
def test_every_state_meets_every_event(state: JobState, event: JobEvent) -> None:
    record = JobRecord(5)
    record.state = state
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(InvalidTransition, match=f"job 5: {event.name} in state {state.name}"):
            record.apply(event)
        assert record.state is state
    else:
        assert record.apply(event) is after is record.state


def test_ends_are_the_states_that_nothing_leaves() -> None:
    ends = {state for state in JobState if not TRANSITIONS[state]}
    assert ends == {JobState.DONE, JobState.FAILED, JobState.CANCELLED}
    assert all(JobEvent.FAIL in TRANSITIONS[state] for state in set(JobState) - ends)


def chunk(number: int, length: int, rows: int = 1) -> ChunkWork:
    return ChunkWork(number, ChunkSpan(0, False, 0, rows, 0, rows, length), ChunkPlace(length, ()), rows, 0)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100), st.integers(1, 8))
def test_slices_cover_all_chunks_in_order_within_their_bounds(lengths: list[int], size: int, rows: int) -> None:
    chunks = [chunk(n, length) for n, length in enumerate(lengths)]
    slices = plan_slices(chunks, SliceSizes(size, rows))
    covered = [n for first, count in slices for n in range(first, first + count)]
    assert covered == list(range(len(lengths)))
    for first, count in slices:
        assert count == 1 or (sum(lengths[first : first + count]) <= size and count <= rows)
    # No slice could have taken the next chunk as well.
    for (first, count), _ in itertools.pairwise(slices):
        assert sum(lengths[first : first + count + 1]) > size or count + 1 > rows


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200), st.integers(0, 60), st.integers(0, 60)
)
def test_slices_grow_from_the_first_and_shrink_to_the_last(
    lengths: list[int], most: int, first: int, last: int
) -> None:
    chunks = [chunk(n, length) for n, length in enumerate(lengths)]
    slices = plan_slices(chunks, SliceSizes(most, 1000, first, last))
    assert [n for at, count in slices for n in range(at, at + count)] == list(range(len(lengths)))
    left = sum(lengths)
    for number, (at, count) in enumerate(slices):
        size = sum(lengths[at : at + count])
        bound = min(most, first << number) if first else most
        if last:
            bound = min(bound, max(last, left // 2))
        assert count == 1 or size <= bound
        assert at + count == len(lengths) or size + lengths[at + count] > bound
        left -= size


def test_slices_of_whole_chunks_are_large_and_hold_no_others() -> None:
    chunks = [chunk(n, 10) for n in range(9)]
    for number in (4, 8):
        chunks[number] = chunks[number]._replace(live_rows=0)
    slices = plan_slices(chunks, SliceSizes(20, 1000, whole_bytes=40))
    assert [tuple(entry) for entry in slices] == [(0, 4), (4, 1), (5, 3), (8, 1)]
    assert [count for _, count in plan_slices(chunks, SliceSizes(20, 1000))] == [2, 2, 2, 2, 1]


def test_restore_of_a_prefix_takes_the_chunks_that_hold_it() -> None:
    layout = stage_layout((Plane(0, 32, 32, 100, 4, 8),), None, 8)
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(30)]
    digests = bytes(range(16)) * 4
    works = restore_chunks(layout, 30, 13, (), places, digests=digests, algorithms=("a", "b", "c", "d"))
    assert [(w.number, w.live_rows, w.tail_tokens, w.algorithm) for w in works] == [(0, 2, 0, "a"), (1, 2, 1, "b")]
    assert rows_needed(works, 1) == [4]
    assert restore_chunks(layout, 30, 0, (), places, digests=digests, algorithms=("a",)) == []


def test_a_restore_writes_the_states_of_its_own_position_only() -> None:
    layout = StageLayout((), (StateGroup((Plane(0, 8, 8, 4),)), StateGroup((Plane(32, 3, 4, 4),))))
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(9, (3, 7, 9))]
    works = restore_chunks(layout, 9, 7, (3, 7, 9), places, digests=bytes(range(96)), algorithms=("a",))
    assert [(w.number, w.span.group, w.span.first_token, w.span.first_row) for w in works] == [
        (2, 0, 7, 0),
        (3, 1, 7, 0),
    ]
    assert [w.digest[0] for w in works] == [32, 48]
    assert rows_needed(works, 2) == [1, 1]


def test_capture_names_the_tail() -> None:
    layout = stage_layout((Plane(0, 32, 32, 100, 4, 8),), None, 8)
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(14)]
    works = capture_chunks(layout, 14, (), places).copied
    assert [(w.live_rows, w.tail_tokens) for w in works] == [(2, 0), (2, 2)]


RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=12)


@given(RUNS, st.data())
def test_rows_are_those_of_plain_lists(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    plain = [row for first, count in runs for row in range(first, first + count)]
    rows = RowMap.parse(pack_rows(runs), 100, 0)
    assert rows.count == len(plain)
    start = data.draw(st.integers(0, len(plain)))
    end = data.draw(st.integers(start, len(plain)))
    assert rows.index(start, end).tolist() == plain[start:end]
    cut = rows.runs_between(start, end, 100)
    assert cut is not None
    assert [row for first, count in cut for row in range(first, first + count)] == plain[start:end]
    limited = rows.runs_between(start, end, 1)
    assert limited is None or len(limited) <= 1
    prefix = unpack_rows(rows.packed_between(0, end))
    assert [row for first, count in prefix for row in range(first, first + count)] == plain[:end]
    assert row_count(prefix) == end


@pytest.mark.parametrize(
    ("packed", "needed"),
    [(b"1234567", 0), (pack_rows([(0, 5), (9, 2)]), 0), (pack_rows([(9, 2)]), 0), (bytes(8), 0), (bytes(16), 0),
     (pack_rows([(0, 5)]), 6), (b"", 1)],
)  # fmt: skip
def test_bad_rows_are_refused(packed: bytes, needed: int) -> None:
    with pytest.raises(JobRefused) as refused:
        RowMap.parse(packed, 10, needed)
    assert refused.value.code == "bad_rows"


def test_no_rows_are_rows_too() -> None:
    assert RowMap.parse(b"", 10, 0).count == 0
    assert RowMap.parse(b"", 10, 0).packed_between(0, 3) == b""
