"""Planes of engine layouts: gathered bytes are what the engine's own indexing of its arrays gives."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shm.extent import ChunkPlace
from shm.layout import check_layout
from shm.rows import pack_rows, runs_of
from tests.support.engine_arrays import Bytes, Shape
from tests.support.engine_shapes import SHAPES, make_shape
from workers.jobs import capture_chunks
from workers.pieces import PoolView
from workers.rowmap import RowMap

TOKENS = 60
Rows = tuple[tuple[int, ...], ...]


def gathered(shape: Shape, pool: Bytes, rows: Rows, tokens: int, positions: tuple[int, ...]) -> list[bytes]:
    """The chunks of an image as a worker makes them."""
    layout = shape.layout
    maps = tuple(
        RowMap.parse(pack_rows(runs_of(mine)), group.rows, 0)
        for mine, group in zip(rows, layout.all_groups, strict=True)
    )
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(tokens, positions)]
    view = PoolView(pool, layout)
    found: list[bytes] = []
    for chunk in capture_chunks(layout, tokens, positions, places).copied:
        out = np.full(chunk.span.length_bytes, 0xEE, np.uint8)
        at = 0
        for piece in view.pieces(chunk, maps):
            piece.gather(out[at : at + piece.size_bytes])
            at += piece.size_bytes
        found.append(out.tobytes())
    return found


def indexed(shape: Shape, pool: Bytes, rows: Rows, tokens: int, positions: tuple[int, ...]) -> list[bytes]:
    """The same chunks as the engine would write them down: plane by plane, row by row, token by token."""
    found: list[bytes] = []
    for span in shape.layout.chunks(tokens, positions):
        out = b""
        group = shape.layout.all_groups[span.group]
        for plane, read in zip(group.planes, shape.reads[span.group], strict=True):
            part = b""
            for nth in range(span.row_count):
                row = rows[span.group][span.first_row + nth]
                if span.is_state or not plane.locates_tokens:
                    part += read(pool, row, 0).tobytes()
                    continue
                count = min(plane.tokens_per_row, span.token_count - nth * plane.tokens_per_row)
                part += b"".join(read(pool, row, token).tobytes() for token in range(count))
            out += part.ljust(span.row_count * plane.row_bytes, b"\0")
        found.append(out)
    return found


@pytest.mark.parametrize("name", list(SHAPES))
@settings(max_examples=12)
@given(st.integers(0, 2**32), st.data())
def test_a_gathered_chunk_is_what_indexing_the_array_gives(name: str, seed: int, data: st.DataObject) -> None:
    shape = make_shape(name, seed, TOKENS, chunk_tokens=32)
    check_layout(shape.layout, shape.pool_bytes)
    unit = shape.layout.token_unit
    tokens = data.draw(st.integers(1, TOKENS // unit)) * unit
    positions = (1, tokens) if shape.layout.states and tokens > 1 else (tokens,) if shape.layout.states else ()
    # Every four bytes of the pool differ, so what lies at a wrong place shows.
    pool = np.random.default_rng(seed).permutation(-(-shape.pool_bytes // 4)).astype("<u4").view(np.uint8)
    slots = range(len(positions))
    rows, _ = shape.draw_rows(random.Random(seed), tokens, slots, ())
    assert gathered(shape, pool, rows, tokens, positions) == indexed(shape, pool, rows, tokens, positions)


@pytest.mark.parametrize("name", list(SHAPES))
def test_planes_take_all_of_the_tensors_and_no_more(name: str) -> None:
    """Of the layouts here nothing of a row is left out: the engine's parts and the planes own the same bytes."""
    shape = make_shape(name, 5, TOKENS)
    by_planes, by_reads = (np.zeros(shape.pool_bytes, np.uint8) for _ in range(2))
    for group, reads in zip(shape.layout.all_groups, shape.reads, strict=True):
        for plane, read in zip(group.planes, reads, strict=True):
            for row in range(plane.rows):
                start = plane.offset_bytes + row * plane.row_stride_bytes
                by_planes[start : start + plane.row_bytes] = 1
                for token in range(plane.tokens_per_row if plane.token_stride_bytes else 1):
                    read(by_reads, row, token)[...] = np.iinfo(read(by_reads, row, token).dtype).max
    assert np.array_equal(by_planes > 0, by_reads > 0)


def test_every_kind_of_group_is_among_them() -> None:
    shapes = {name: make_shape(name, 1, TOKENS).layout for name in SHAPES}
    assert len(shapes["shared_pages"].spaces) == 1
    assert len(shapes["sliding_window"].groups) == len(shapes["sliding_window"].spaces) == 2
    assert shapes["hybrid_states"].states
    assert {name for name, layout in shapes.items() if layout.token_unit > 1} == {
        "int8_with_block_scales",
        "scattered_tokens",
    }
