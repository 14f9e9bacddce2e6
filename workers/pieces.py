"""A chunk of host memory in gathered order, cut into pieces that one numpy call can copy.

Gathered order (see `shm.layout`): plane after plane, inside a plane row after row. Pieces are at most 256 KiB where
rows allow it, so that what was just read is still in the processor's cache when it is hashed::

    plane 0: | run | run | tail row's tokens | gap |   plane 1: | run | ...

A *gap* is bytes of the chunk that belong to no live row: zeros in a capture, skipped in a restore.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shm.layout import Plane, StageLayout
from workers.digest import Bytes
from workers.jobs import ChunkWork
from workers.rowmap import Index, RowMap

PIECE_BYTES: Final = 256 * 1024
# Below eight rows a run on average one indexed copy is cheaper than a call a run.
_ROWS_A_RUN: Final = 8


class Piece(Protocol):
    """A run of a chunk's bytes; `size_bytes` long. Pieces are used at once and never kept."""

    size_bytes: int
    flat: Bytes | None
    """The bytes themselves where they lie in one run, else None."""

    def gather(self, target: Bytes) -> None:
        """Copy the piece into contiguous memory of its size."""
        ...

    def scatter(self, source: Bytes) -> None:
        """Write contiguous memory of the piece's size to the rows."""
        ...


class FlatPiece:
    """Contiguous bytes of the pool."""

    __slots__ = ("_view", "flat", "size_bytes")

    def __init__(self, view: Bytes) -> None:
        self._view = view
        self.flat: Bytes | None = view
        self.size_bytes = len(view)

    def gather(self, target: Bytes) -> None:
        """See `Piece`."""
        target[:] = self._view

    def scatter(self, source: Bytes) -> None:
        """See `Piece`."""
        self._view[:] = source


class RunPiece:
    """Consecutive rows, a stride apart: one strided two-dimensional copy."""

    __slots__ = ("_view", "flat", "size_bytes")

    def __init__(self, view: Bytes) -> None:
        self._view = view
        self.flat: Bytes | None = None
        self.size_bytes = view.size

    def gather(self, target: Bytes) -> None:
        """See `Piece`."""
        target.reshape(self._view.shape)[...] = self._view

    def scatter(self, source: Bytes) -> None:
        """See `Piece`."""
        self._view[...] = source.reshape(self._view.shape)


class IndexPiece:
    """Rows in any order: one indexed copy of whole rows."""

    __slots__ = ("_index", "_rows", "flat", "size_bytes")

    def __init__(self, rows: npt.NDArray[np.void], index: Index) -> None:
        self._rows = rows
        self._index = index
        self.flat: Bytes | None = None
        self.size_bytes = len(index) * rows.itemsize

    def gather(self, target: Bytes) -> None:
        """See `Piece`."""
        target.view(self._rows.dtype)[:] = self._rows[self._index]

    def scatter(self, source: Bytes) -> None:
        """See `Piece`."""
        self._rows[self._index] = source.view(self._rows.dtype)


class GapPiece:
    """Bytes of the chunk that no live row holds."""

    __slots__ = ("flat", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.flat: Bytes | None = None
        self.size_bytes = size_bytes

    def gather(self, target: Bytes) -> None:
        """See `Piece`: zeros."""
        target[:] = 0

    def scatter(self, source: Bytes) -> None:
        """See `Piece`: nothing is written."""


class PlaneView:
    """One plane of a mapped pool as arrays. `memory` is the whole pool."""

    def __init__(self, memory: Bytes, plane: Plane) -> None:
        rows, row_bytes, stride = plane.rows, plane.row_bytes, plane.row_stride_bytes
        self.token_stride_bytes = plane.token_stride_bytes
        self.row_bytes = row_bytes
        start = plane.offset_bytes
        whole = memory[start : plane.end_bytes]
        self._rows = np.lib.stride_tricks.as_strided(whole, (rows, row_bytes), (stride, 1))
        self._flat = whole if stride == row_bytes else None
        self._records: npt.NDArray[np.void] = np.ndarray(
            (rows,), np.dtype((np.void, row_bytes)), whole, strides=(stride,)
        )

    def run(self, first: int, count: int) -> Iterator[Piece]:
        """Pieces of consecutive rows."""
        size = self.row_bytes
        if self._flat is not None:
            yield from _cut(self._flat[first * size : (first + count) * size])
        elif size > PIECE_BYTES:
            for row in range(first, first + count):
                yield from _cut(self._rows[row])
        else:
            step = PIECE_BYTES // size
            for start in range(first, first + count, step):
                yield RunPiece(self._rows[start : min(start + step, first + count)])

    def indexed(self, index: Index) -> Iterator[Piece]:
        """Pieces of rows in any order."""
        step = max(1, PIECE_BYTES // self.row_bytes)
        if step == 1:
            for row in index.tolist():
                yield from self.run(row, 1)
            return
        for start in range(0, len(index), step):
            yield IndexPiece(self._records, index[start : start + step])

    def part(self, row: int, size_bytes: int) -> Iterator[Piece]:
        """Pieces of the first bytes of one row."""
        return _cut(self._rows[row, :size_bytes])


def grouped(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces together, up to `PIECE_BYTES` a group where one piece is not larger."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.size_bytes > PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size_bytes
    if group:
        yield group


def _cut(view: Bytes) -> Iterator[Piece]:
    if len(view) <= PIECE_BYTES:
        yield FlatPiece(view)
        return
    for start in range(0, len(view), PIECE_BYTES):
        yield FlatPiece(view[start : start + PIECE_BYTES])


def _gap(size_bytes: int) -> Iterator[Piece]:
    for start in range(0, size_bytes, PIECE_BYTES):
        yield GapPiece(min(PIECE_BYTES, size_bytes - start))


class PoolView:
    """All planes of a mapped pool."""

    def __init__(self, memory: Bytes, layout: StageLayout) -> None:
        self._groups = [[PlaneView(memory, plane) for plane in group.planes] for group in layout.all_groups]

    def pieces(self, chunk: ChunkWork, rows_by_group: Sequence[RowMap]) -> Iterator[Piece]:
        """The chunk's bytes in gathered order."""
        span = chunk.span
        rows = rows_by_group[span.group]
        whole = chunk.live_rows - (1 if chunk.tail_tokens else 0)
        start, end = span.first_row, span.first_row + whole
        runs = rows.runs_between(start, end, max(1, whole // _ROWS_A_RUN))
        index = rows.index(start, end) if runs is None else None
        tail_row = int(rows.index(end, end + 1)[0]) if chunk.tail_tokens else -1
        for plane in self._groups[span.group]:
            if index is not None:
                yield from plane.indexed(index)
            else:
                for first, count in runs or ():
                    yield from plane.run(first, count)
            gap_bytes = (span.row_count - chunk.live_rows) * plane.row_bytes
            if chunk.tail_tokens:
                tail_bytes = chunk.tail_tokens * plane.token_stride_bytes
                yield from plane.part(tail_row, tail_bytes)
                gap_bytes += plane.row_bytes - tail_bytes
            if gap_bytes:
                yield from _gap(gap_bytes)
