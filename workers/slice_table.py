"""The tables that tell the GPU kernels about a slice (see `workers.kernel_source`), built with numpy."""

from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.layout import StageLayout
from workers.device import SliceWork
from workers.digest import BLOCK_BYTES
from workers.jobs import ChunkWork
from workers.kernel_source import TILE_BYTES, WIDTHS

PLANE: Final = np.dtype(
    [("base", "<u8"), ("stride", "<u8"), ("prefix", "<u8"), ("row_bytes", "<u4"), ("token_bytes", "<u4")]
)
CHUNK: Final = np.dtype(
    [
        ("staging", "<u8"),
        ("length", "<u8"),
        ("first_row", "<u4"),
        ("row_count", "<u4"),
        ("live_rows", "<u4"),
        ("tail_tokens", "<u4"),
        ("first_plane", "<u4"),
        ("plane_count", "<u4"),
        ("first_tile", "<u4"),
        ("first_block", "<u4"),
    ]
)
# Vectors of 16 bytes are read from staging.
_ALIGN_BYTES: Final = 16


class StagedChunk(NamedTuple):
    """Where a chunk of a slice lies in staging and which block sums are its own."""

    work: ChunkWork
    staging_bytes: int
    first_block: int
    block_count: int


class SliceTable(NamedTuple):
    """One slice for the kernels. `rows` and `chunks` go to the device; sizes are in bytes and counts."""

    rows: npt.NDArray[np.uint32]
    chunks: npt.NDArray[np.void]
    staged: tuple[StagedChunk, ...]
    tile_count: int
    block_count: int
    staging_bytes: int


def plane_table(layout: StageLayout, base: int) -> npt.NDArray[np.void]:
    """The planes of a pool at device address `base`, group after group."""
    entries: list[tuple[int, int, int, int, int]] = []
    for group in layout.all_groups:
        prefix = 0
        for plane in group.planes:
            token_bytes = plane.token_stride_bytes or plane.row_bytes
            entries.append((base + plane.offset_bytes, plane.row_stride_bytes, prefix, plane.row_bytes, token_bytes))
            prefix += plane.row_bytes
    return np.array(entries, PLANE)


def vector_width(planes: npt.NDArray[np.void]) -> int:
    """The widest vector that no row of the pool cuts."""
    every = np.concatenate([planes["base"], planes["stride"], planes["row_bytes"].astype("<u8")])
    return next(width for width in WIDTHS if not np.any(every % np.uint64(width)))


def slice_table(work: SliceWork, layout: StageLayout) -> SliceTable:
    """The tables of one slice."""
    chunks = np.zeros(len(work.chunks), CHUNK)
    staged: list[StagedChunk] = []
    row_parts: list[npt.NDArray[np.uint32]] = []
    rows_so_far = tiles = blocks = staging = 0
    first_planes = list(accumulate((len(group.planes) for group in layout.all_groups), initial=0))
    for number, chunk in enumerate(work.chunks):
        span = chunk.span
        length = span.length_bytes
        part = work.rows[span.group].index(span.first_row, span.first_row + chunk.live_rows)
        first_plane = first_planes[span.group]
        chunks[number] = (
            staging,
            length,
            rows_so_far,
            span.row_count,
            chunk.live_rows,
            chunk.tail_tokens,
            first_plane,
            first_planes[span.group + 1] - first_plane,
            tiles,
            blocks,
        )
        block_count = -(-length // BLOCK_BYTES)
        staged.append(StagedChunk(chunk, staging, blocks, block_count))
        row_parts.append(part)
        rows_so_far += len(part)
        tiles += -(-length // TILE_BYTES)
        blocks += block_count
        staging += -(-length // _ALIGN_BYTES) * _ALIGN_BYTES
    return SliceTable(np.concatenate(row_parts), chunks, tuple(staged), tiles, blocks, staging)
