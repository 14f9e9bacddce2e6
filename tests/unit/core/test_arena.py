"""The granule allocator against a naive model: a set of free granules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.extent import GRANULE_BYTES, Extent
from stratad.core.arena import Arena


def granules(extents: tuple[Extent, ...]) -> set[tuple[int, int]]:
    return {
        (e.shuttle, number)
        for e in extents
        for number in range(e.offset_bytes // GRANULE_BYTES, (e.offset_bytes + e.length_bytes) // GRANULE_BYTES)
    }


@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=3),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 20)), max_size=40),
)
def test_allocator_agrees_with_a_set_of_granules(shuttles: list[int], steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena()
    free: set[tuple[int, int]] = set()
    for index, count in enumerate(shuttles):
        arena.add_shuttle(index, count * GRANULE_BYTES)
        free |= {(index, number) for number in range(1, count)}
    held: list[tuple[Extent, ...]] = []
    for allocate, size, which in steps:
        if allocate:
            extents = arena.allocate(size * GRANULE_BYTES - 1)
            assert (extents is None) == (size > len(free))
            if extents is not None:
                taken = granules(extents)
                assert len(taken) == size
                assert taken <= free
                free -= taken
                held.append(extents)
        elif held:
            extents = held.pop(which % len(held))
            arena.free(extents)
            free |= granules(extents)
        assert arena.free_granules == len(free)
        arena.validate(e for extents in held for e in extents)
    for extents in held:
        arena.free(extents)
    arena.validate([])
    assert arena.used_granules == 0


def test_one_extent_where_one_run_is_long_enough() -> None:
    arena = Arena()
    arena.add_shuttle(0, 11 * GRANULE_BYTES)
    a, b, c = (arena.allocate(n * GRANULE_BYTES) for n in (3, 4, 3))
    assert a is not None
    assert b is not None
    assert c is not None
    arena.free(a)
    arena.free(c)
    whole = arena.allocate(3 * GRANULE_BYTES)
    assert whole is not None
    assert len(whole) == 1
    split = arena.allocate(3 * GRANULE_BYTES)
    assert split is not None
    assert arena.allocate(1) is None


def test_validate_sees_an_extent_held_twice_and_one_lost() -> None:
    arena = Arena()
    arena.add_shuttle(0, 8 * GRANULE_BYTES)
    extents = arena.allocate(2 * GRANULE_BYTES)
    assert extents is not None
    with pytest.raises(AssertionError, match="lost or held twice"):
        arena.validate([*extents, *extents])
    with pytest.raises(AssertionError, match="lost"):
        arena.validate([])


@pytest.mark.parametrize("sealed", [False, True])
def test_a_lost_shuttle_counts_no_more_whatever_of_it_comes_back(sealed: bool) -> None:
    arena = Arena()
    held = Extent(0, GRANULE_BYTES, 2 * GRANULE_BYTES)
    arena.add_shuttle(0, 8 * GRANULE_BYTES, [held], sealed=sealed)
    arena.add_shuttle(1, 4 * GRANULE_BYTES)
    arena.lose_shuttle(0)
    arena.validate([held])
    assert (arena.total_granules, arena.free_granules, arena.shuttles) == (3, 3, (1,))
    arena.free([held])
    arena.validate([])
    assert (arena.total_granules, arena.free_granules) == (3, 3)
    assert arena.allocate(4 * GRANULE_BYTES) is None
