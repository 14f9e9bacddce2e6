"""The layouts that the copy benchmark moves."""

import math

import pytest

from shm.layout import check_layout
from shm.rows import row_count, sorted_runs
from stratad.bench.copy_layout import LAYOUTS, PlaneForm, copy_shape, largest_slot_bytes

MIB = 1 << 20


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_the_pool_is_in_one_slot(layout: str, slots: int) -> None:
    shape = copy_shape(layout, 64 * MIB, 256, slots)
    check_layout(shape.layout, shape.pool_bytes)
    assert shape.slot_bytes == 64 * MIB
    assert shape.pool_bytes == shape.layout.end_bytes == slots * 64 * MIB == math.prod(shape.axes)
    group = shape.layout.groups[0]
    assert len(shape.slot_rows) == slots
    assert {row_count(rows) for rows in shape.slot_rows} == {group.rows_for(shape.tokens)}
    everything = [row for slot in range(slots) for row in shape.row_numbers(slot)]
    assert sorted(everything) == list(range(group.rows))
    chunks = shape.layout.chunks(shape.tokens)
    assert sum(chunk.length_bytes for chunk in chunks) == shape.slot_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_axes_are_those_of_the_planes(layout: str) -> None:
    shape = copy_shape(layout, 32 * MIB, 256, 2)
    planes, rows, row_bytes = shape.axes
    for number, plane in enumerate(shape.layout.groups[0].planes):
        assert plane.offset_bytes == number * rows * row_bytes
        assert (plane.rows, plane.row_bytes, plane.row_stride_bytes) == (rows, row_bytes, row_bytes)
    assert planes == len(shape.layout.groups[0].planes)


def test_paged_blocks_are_shuffled_the_same_way_each_time() -> None:
    slot_rows = copy_shape("paged", 64 * MIB, 256, 2).slot_rows
    assert slot_rows == copy_shape("paged", 64 * MIB, 256, 2).slot_rows
    assert all(len(rows) > 50 for rows in slot_rows), "neighbours would be one run"
    first, last = (sorted_runs(rows) for rows in slot_rows)
    assert first[0] < last[-1], "the slots lie among each other"
    assert last[0] < first[-1], "the slots lie among each other"


def test_shuffled_rows_have_the_size_in_their_name() -> None:
    sizes = {"4k": 4096, "64k": 65536, "256k": 262_144, "1m": MIB, "256": 256}
    for name in LAYOUTS[2:]:
        shape = copy_shape(name, 256 * MIB, 256, 2)
        assert shape.piece_bytes == sizes[name.partition("-")[2]]
        assert len(shape.slot_rows[0]) > shape.layout.groups[0].rows_for(shape.tokens) // 2


def test_at_least_one_chunk() -> None:
    assert copy_shape("slot", 1, 256).tokens == 256


def test_no_other_layout() -> None:
    with pytest.raises(ValueError, match="one of slot, paged, "):
        copy_shape("ring", MIB, 256)


def test_a_budget_is_made_for_the_layout_that_takes_most() -> None:
    assert largest_slot_bytes(["slot", "paged"], 64 * MIB) == 64 * MIB
    assert (
        largest_slot_bytes(["slot", "rows-1m"], 16 * MIB) == copy_shape("rows-1m", 16 * MIB, 256).slot_bytes == 64 * MIB
    )
    assert largest_slot_bytes(["slot"], MIB, PlaneForm(1, 16384)) == 4 * MIB
    assert largest_slot_bytes(["slot"], 64 * MIB + 1) == 64 * MIB + 1
