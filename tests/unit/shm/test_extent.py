"""Places of chunks, packed and unpacked."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places, unpack_places

EXTENTS = st.builds(
    lambda shuttle, first, count: Extent(shuttle, first * GRANULE_BYTES, count * GRANULE_BYTES),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**20),
)


@st.composite
def places(draw: st.DrawFn) -> ChunkPlace:
    extents = tuple(draw(st.lists(EXTENTS, max_size=4)))
    held_bytes = sum(extent.length_bytes for extent in extents)
    return ChunkPlace(draw(st.integers(0, held_bytes)), extents)


@given(st.lists(places(), max_size=6))
def test_packed_places_come_back(wanted: list[ChunkPlace]) -> None:
    assert list(unpack_places(pack_places(wanted))) == wanted


@given(st.lists(places(), min_size=1, max_size=4), st.data())
def test_cut_short_is_refused_or_ends_between_two_chunks(wanted: list[ChunkPlace], data: st.DataObject) -> None:
    packed = pack_places(wanted)
    end = data.draw(st.integers(0, len(packed) - 1))
    ends = [len(pack_places(wanted[:count])) for count in range(len(wanted) + 1)]
    if end in ends:
        assert list(unpack_places(packed[:end])) == wanted[: ends.index(end)]
    else:
        with pytest.raises(ValueError, match="cut short"):
            unpack_places(packed[:end])


@given(st.binary(max_size=80))
def test_any_bytes_are_places_or_refused(packed: bytes) -> None:
    try:
        found = unpack_places(packed)
    except ValueError:
        return
    assert pack_places(found) == packed


def test_a_chunk_longer_than_its_extents() -> None:
    packed = pack_places([ChunkPlace(GRANULE_BYTES + 1, (Extent(0, GRANULE_BYTES, GRANULE_BYTES),))])
    with pytest.raises(ValueError, match="longer than its extents"):
        unpack_places(packed)


def test_a_huge_count_of_extents_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="cut short"):
        unpack_places(struct.pack("<QI", 1, 2**32 - 1))


@given(st.integers(0, 2**50))
def test_granules_for(length_bytes: int) -> None:
    granules = granules_for(length_bytes)
    assert granules * GRANULE_BYTES >= length_bytes > (granules - 1) * GRANULE_BYTES or length_bytes == granules == 0
