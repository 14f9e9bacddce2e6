"""Pieces hold a chunk's bytes in gathered order, whatever way they are copied, and write nothing beside them."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shm.layout import Plane, StageLayout, check_layout, one_group
from shm.rows import pack_rows, runs_of
from workers.digest import Bytes
from workers.jobs import ChunkWork, copy_chunks
from workers.pieces import PIECE_BYTES, FlatPiece, IndexPiece, Piece, PoolView, RunPiece, copy_to_cache, flats_of
from workers.pieces import grouped as grouped_pieces
from workers.rowmap import RowMap

KIB = 1024


def layout_of(kind: str, row_bytes: int, planes: int, rows: int, tokens_per_row: int = 1) -> StageLayout:
    """Planes one after the other (`apart`), each row followed by bytes of nobody (`gaps`), or planes side by side
    within a row (`mixed`).
    """
    gap = {"apart": 0, "gaps": 32, "mixed": 0}[kind]
    stride = row_bytes * planes if kind == "mixed" else row_bytes + gap
    step = row_bytes if kind == "mixed" else stride * rows
    token_stride = row_bytes // tokens_per_row if row_bytes % tokens_per_row == 0 else 0
    made = tuple(
        Plane(64 + number * step, row_bytes, stride, rows, tokens_per_row, token_stride if tokens_per_row > 1 else 0)
        for number in range(planes)
    )
    return StageLayout(one_group(made), chunk_tokens=16 * tokens_per_row)


def gathered(memory: Bytes, layout: StageLayout, rows: list[int], chunk: ChunkWork) -> bytes:
    """The chunk, row by row."""
    out = bytearray()
    span = chunk.span
    for plane in layout.groups[0].planes:
        for nth in range(span.row_count):
            start = (
                plane.offset_bytes + rows[span.first_row + nth] * plane.row_stride_bytes if nth < chunk.live_rows else 0
            )
            live = plane.row_bytes if nth < chunk.live_rows else 0
            if nth == chunk.live_rows - 1 and chunk.tail_tokens:
                live = chunk.tail_tokens * plane.token_stride_bytes
            out += memory[start : start + live].tobytes() + bytes(plane.row_bytes - live)
    return bytes(out)


def check(layout: StageLayout, rows: list[int], tokens: int) -> list[Piece]:
    """Gather and scatter every chunk; all its pieces."""
    seed = random.Random(tokens)
    size = layout.end_bytes + 64
    check_layout(layout, size)
    memory = np.frombuffer(seed.randbytes(size), np.uint8).copy()
    before = memory.copy()
    view = PoolView(memory, layout)
    maps = (RowMap.parse(pack_rows(runs_of(rows)), layout.groups[0].rows, len(rows)),)
    chunks = copy_chunks(layout, tokens, ())
    stored: list[bytes] = []
    found: list[Piece] = []
    for chunk in chunks:
        wanted = gathered(before, layout, rows, chunk)
        out = bytearray()
        for group in grouped_pieces(view.pieces(chunk, maps)):
            sizes = [piece.size_bytes for piece in group]
            assert len(group) == 1 or sum(sizes) <= PIECE_BYTES
            flats = flats_of(group)
            target = np.full(sum(sizes), 0xEE, np.uint8)
            at = 0
            for piece in group:
                piece.gather(target[at : at + piece.size_bytes])
                at += piece.size_bytes
            if flats is not None:
                assert b"".join(flat.tobytes() for flat in flats) == target.tobytes()
            out += target.tobytes()
            found += group
        assert bytes(out) == wanted
        stored.append(wanted)
    memory[:] = 0x5A
    for chunk, wanted in zip(chunks, stored, strict=True):
        whole = np.frombuffer(wanted, np.uint8)
        at = 0
        for piece in view.pieces(chunk, maps):
            piece.scatter(whole[at : at + piece.size_bytes])
            at += piece.size_bytes
        assert gathered(memory, layout, rows, chunk) == wanted
    written = memory != 0x5A
    named = np.zeros(size, bool)
    for chunk in chunks:
        for plane in layout.groups[0].planes:
            for nth in range(chunk.live_rows):
                last = nth == chunk.live_rows - 1 and chunk.tail_tokens
                live = chunk.tail_tokens * plane.token_stride_bytes if last else plane.row_bytes
                start = plane.offset_bytes + rows[chunk.span.first_row + nth] * plane.row_stride_bytes
                named[start : start + live] = True
    assert not (written & ~named).any()
    return found


ROW_BYTES = st.one_of(
    st.integers(1, 300), st.sampled_from([256, 1024, 2048, 4 * KIB, 6 * KIB, 16 * KIB, 20 * KIB, 48 * KIB, 300 * KIB])
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["apart", "gaps", "mixed"]), ROW_BYTES, st.integers(1, 5), st.data())
def test_pieces_are_the_chunks_bytes(kind: str, row_bytes: int, planes: int, data: st.DataObject) -> None:
    live = data.draw(st.integers(1, 3 if row_bytes > 4 * KIB else 40))
    if row_bytes > 16 * KIB:
        planes = min(planes, 2)
    down = data.draw(st.booleans())
    per_row = data.draw(st.sampled_from([1, 4])) if row_bytes % 4 == 0 else 1
    rows_there = live + data.draw(st.integers(0, 4))
    layout = layout_of(kind, row_bytes, planes, rows_there, per_row)
    if down:
        layout = StageLayout(one_group(layout.groups[0].planes[::-1]), chunk_tokens=layout.chunk_tokens)
    order = data.draw(st.sampled_from(["run", "runs", "any"]))
    first = data.draw(st.integers(0, rows_there - live))
    rows = list(range(first, first + live))
    if order == "runs":
        half = live // 2
        rows = rows[half:] + rows[:half]
    elif order == "any":
        data.draw(st.randoms(use_true_random=False)).shuffle(rows)
    tokens = live * per_row - data.draw(st.integers(0, per_row - 1))
    check(layout, rows, tokens)


@pytest.mark.parametrize(
    ("kind", "row_bytes", "planes", "rows", "wanted"),
    [
        # Head-major rows: a chunk has 4 KiB of each plane, and one piece holds all planes.
        ("apart", 256, 8, "run", {(RunPiece, 32 * KIB): 2}),
        ("mixed", 256, 8, "run", {(RunPiece, 32 * KIB): 2}),
        ("apart", 4 * KIB, 6, "any", {(IndexPiece, 256 * KIB): 2, (IndexPiece, 128 * KIB): 2}),
        ("apart", 16 * KIB, 3, "run", {(FlatPiece, 256 * KIB): 6}),
        ("apart", 64 * KIB, 2, "any", {(IndexPiece, 256 * KIB): 16}),
        ("gaps", 64, 4, "any", {(IndexPiece, KIB): 8}),
    ],
)
def test_small_parts_of_equal_planes_are_one_piece(
    kind: str, row_bytes: int, planes: int, rows: str, wanted: dict[tuple[type[Piece], int], int]
) -> None:
    layout = layout_of(kind, row_bytes, planes, 32)
    order = list(range(32))
    if rows == "any":
        random.Random(1).shuffle(order)
    counts: dict[tuple[type[Piece], int], int] = {}
    for piece in check(layout, order, 32):
        key = type(piece), piece.size_bytes
        counts[key] = counts.get(key, 0) + 1
    assert counts == wanted


@given(st.one_of(st.integers(0, 3), st.integers(16 * KIB - 2, 16 * KIB + 2), st.integers(0, PIECE_BYTES)))
@settings(max_examples=30, deadline=None)
def test_a_copy_to_the_cache_is_a_copy(size_bytes: int) -> None:
    source = np.frombuffer(random.Random(size_bytes).randbytes(size_bytes), np.uint8)
    target = np.full(size_bytes + 1, 0xEE, np.uint8)
    copy_to_cache(target[:size_bytes], source)
    assert target[:size_bytes].tobytes() == source.tobytes()
    assert target[size_bytes] == 0xEE
