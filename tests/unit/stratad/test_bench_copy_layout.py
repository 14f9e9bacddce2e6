"""The layouts that the copy benchmark moves."""

import pytest

from shm.layout import check_layout
from shm.rows import row_count, sorted_runs
from stratad.bench.copy_layout import copy_shape

MIB = 1 << 20


@pytest.mark.parametrize("layout", ["slot", "paged"])
def test_every_byte_of_the_pool_is_in_the_image(layout: str) -> None:
    shape = copy_shape(layout, 64 * MIB, 256)
    check_layout(shape.layout, shape.pool_bytes)
    assert shape.pool_bytes == 64 * MIB
    assert shape.layout.end_bytes == shape.pool_bytes
    assert row_count(shape.rows) == shape.layout.groups[0].rows == shape.layout.groups[0].rows_for(shape.tokens)
    assert sorted_runs(shape.rows)[0][0] == 0
    chunks = shape.layout.chunks(shape.tokens)
    assert sum(chunk.length_bytes for chunk in chunks) == shape.pool_bytes


def test_paged_blocks_are_shuffled_the_same_way_each_time() -> None:
    rows = copy_shape("paged", 64 * MIB, 256).rows
    assert rows == copy_shape("paged", 64 * MIB, 256).rows
    assert len(rows) > 50, "neighbours would be one run"


def test_at_least_one_chunk() -> None:
    assert copy_shape("slot", 1, 256).tokens == 256


def test_no_other_layout() -> None:
    with pytest.raises(ValueError, match="slot or paged"):
        copy_shape("ring", MIB, 256)
