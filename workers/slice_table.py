"""The tables that tell the GPU kernels about a slice (see `workers.kernel_source`), built with numpy."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.layout import StageLayout
from workers.device import SliceWork
from workers.digest import BLOCK_BYTES, Words
from workers.jobs import ChunkWork
from workers.kernel_source import COLUMN_BYTES, TILE_BYTES, WIDTHS
from workers.rowmap import Index, RowMap

PLANE: Final = np.dtype(
    [
        ("base", "<u8"),
        ("stride", "<u8"),
        ("prefix", "<u8"),
        ("magic", "<u8"),
        ("row_bytes", "<u4"),
        ("token_bytes", "<u4"),
        ("unused", "<u8"),
    ]
)
CHUNK: Final = np.dtype(
    [
        ("staging", "<u8"),
        ("length", "<u8"),
        ("plane_magic", "<u8"),
        ("first_row", "<u4"),
        ("row_count", "<u4"),
        ("live_rows", "<u4"),
        ("tail_tokens", "<u4"),
        ("first_plane", "<u4"),
        ("plane_count", "<u4"),
        ("first_tile", "<u4"),
        ("first_block", "<u4"),
        ("unused", "<u8"),
    ]
)
# Vectors of 16 bytes are read from staging.
_ALIGN_BYTES: Final = 16
# About two thread blocks for each multiprocessor of a large card; with fewer some would idle.
_DIGEST_THREAD_BLOCKS: Final = 256
# More blocks for one load of the keys save nothing that could be measured.
_MOST_BLOCKS_A_COLUMN: Final = 32
_MAGIC_LIMIT: Final = 1 << 32


class GroupShape(NamedTuple):
    """A group's planes in the plane table; `row_bytes` is that of each of them, or 0 where they differ."""

    first_plane: int
    plane_count: int
    row_bytes: int


class StagedChunk(NamedTuple):
    """Where a chunk of a slice lies in staging and which block sums are its own."""

    work: ChunkWork
    staging_bytes: int
    first_block: int
    block_count: int


class DigestGrid(NamedTuple):
    """How the digest kernels share out a slice: `columns` of its blocks, each in `groups` of `group` blocks."""

    columns: int
    groups: int
    group: int


class SliceTable(NamedTuple):
    """One slice for the kernels. `rows` and `chunks` go to the device, `targets` (of a copy from rows to rows) too.
    `starts` say where chunks lie in staging; sizes are in bytes and counts.
    """

    works: tuple[ChunkWork, ...]
    rows: Index
    targets: Index
    chunks: npt.NDArray[np.void]
    starts: list[int]
    tile_count: int
    block_count: int
    staging_bytes: int
    grid: DigestGrid

    @property
    def staged(self) -> list[StagedChunk]:
        """The chunks one by one."""
        found: list[StagedChunk] = []
        block = 0
        for work, start in zip(self.works, self.starts, strict=True):
            count = -(-work.span.length_bytes // BLOCK_BYTES)
            found.append(StagedChunk(work, start, block, count))
            block += count
        return found


def digest_grid(longest_bytes: int, block_count: int) -> DigestGrid:
    """Enough thread blocks to fill a card, and as many blocks for each load of a column's keys as that allows."""
    columns = -(-min(longest_bytes, BLOCK_BYTES) // COLUMN_BYTES)
    group = max(2, min(_MOST_BLOCKS_A_COLUMN, block_count * columns // _DIGEST_THREAD_BLOCKS))
    group += group % 2  # the kernel takes two at a time
    return DigestGrid(columns, -(-block_count // group), group)


def magic_of(divisor: int) -> int:
    """With this a kernel divides numbers below 2^32 by `divisor` (exactly: the error is below one part in 2^32).
    0 where it cannot or need not.
    """
    return (2**64 - 1) // divisor + 1 if 1 < divisor < _MAGIC_LIMIT else 0


def key_table(keys: Words) -> Words:
    """The digest's keys, shape (words, 4), as the kernels read them: a word's four keys are two halves of 16 bytes, a
    vector's four words eight; of 32 vectors first all first halves, then all second ones, and so on.
    """
    return np.ascontiguousarray(keys.reshape(-1, 32, 8, 2).transpose(0, 2, 1, 3))


def plane_table(layout: StageLayout, base: int) -> npt.NDArray[np.void]:
    """The planes of a pool at device address `base`, group after group."""
    entries: list[tuple[int, int, int, int, int, int, int]] = []
    for group in layout.all_groups:
        prefix = 0
        for plane in group.planes:
            token_bytes = plane.token_stride_bytes or plane.row_bytes
            start, magic = base + plane.offset_bytes, magic_of(plane.row_bytes)
            entries.append((start, plane.row_stride_bytes, prefix, magic, plane.row_bytes, token_bytes, 0))
            prefix += plane.row_bytes
    return np.array(entries, PLANE)


def group_shapes(layout: StageLayout) -> tuple[GroupShape, ...]:
    """The shape of every group, in order."""
    shapes: list[GroupShape] = []
    first = 0
    for group in layout.all_groups:
        sizes = {plane.row_bytes for plane in group.planes}
        shapes.append(GroupShape(first, len(group.planes), sizes.pop() if len(sizes) == 1 else 0))
        first += len(group.planes)
    return tuple(shapes)


def vector_width(planes: npt.NDArray[np.void]) -> int:
    """The widest vector that no row of the pool cuts."""
    every = np.concatenate([planes["base"], planes["stride"], planes["row_bytes"].astype("<u8")])
    return next(width for width in WIDTHS if not np.any(every % np.uint64(width)))


def slice_table(work: SliceWork, shapes: tuple[GroupShape, ...], target: SliceWork | None = None) -> SliceTable:
    """The tables of one slice; `target` says where a copy from rows to rows goes."""
    # A loop over plain numbers: of the few chunks of a slice numpy would take longer for each column than this for all.
    entries: list[tuple[int, ...]] = []
    starts: list[int] = []
    spans: list[tuple[int, int, int]] = []
    magics: dict[tuple[int, int], int] = {}
    staging = rows = tiles = blocks = longest = 0
    for chunk in work.chunks:
        group, _, first_row, row_count, _, _, length = chunk.span
        live_rows = chunk.live_rows
        shape = shapes[group]
        magic = magics.get((group, row_count))
        if magic is None:
            magic = magics[group, row_count] = magic_of(shape.row_bytes * row_count)
        plane_magic = magic if length < _MAGIC_LIMIT else 0
        place = rows, row_count, live_rows, chunk.tail_tokens
        entries.append((staging, length, plane_magic, *place, shape.first_plane, shape.plane_count, tiles, blocks, 0))
        starts.append(staging)
        _add_span(spans, group, first_row, live_rows)
        rows += live_rows
        tiles += -(-length // TILE_BYTES)
        blocks += -(-length // BLOCK_BYTES)
        staging += -(-length // _ALIGN_BYTES) * _ALIGN_BYTES
        longest = max(longest, length)
    return SliceTable(
        works=work.chunks,
        rows=_row_list(work.rows, spans),
        targets=_row_list(target.rows, spans) if target is not None else np.empty(0, np.uint32),
        chunks=np.array(entries, CHUNK),
        starts=starts,
        tile_count=tiles,
        block_count=blocks,
        staging_bytes=staging,
        grid=digest_grid(longest, blocks),
    )


def _add_span(spans: list[tuple[int, int, int]], group: int, first: int, count: int) -> None:
    """Add positions `first` and so many more of a group's list, joined to the last ones where these go on."""
    start = first
    if spans and spans[-1][0] == group and spans[-1][2] == first:
        start = spans.pop()[1]
    spans.append((group, start, first + count))


def _row_list(rows: tuple[RowMap, ...], spans: list[tuple[int, int, int]]) -> Index:
    parts = [rows[group].index(first, end) for group, first, end in spans]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint32), *parts])
