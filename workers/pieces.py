"""A chunk of host memory in gathered order, cut into pieces that one numpy call can copy.

Gathered order (see `shm.layout`): plane after plane, inside a plane row after row. Pieces are at most 256 KiB where
rows allow it, so that what was just gathered is still in the processor's cache when it is hashed::

    plane 0: | run | run | tail row's tokens | gap |   plane 1: | run | ...

A *gap* is bytes of the chunk that belong to no live row: zeros in a capture, skipped in a restore. A *stack* is
consecutive planes of one shape, equally far apart: small parts of several of them are one piece.

A gather is read again at once, so it has to end in the cache; what a scatter writes need not be there. The C library's
copy goes past the cache from some length on (see `workers.streaming`), so a gather is made of shorter ones: `take`
copies unit by unit, in one call.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shm.layout import Plane, StageLayout
from workers.digest import Bytes
from workers.jobs import ChunkWork
from workers.rowmap import RowMap

PIECE_BYTES: Final = 256 * 1024
# Below eight rows a run on average one indexed copy is cheaper than a call a run.
_ROWS_A_RUN: Final = 8
# Hashing a run where it lies costs a call; below this one copy and one hash of many are cheaper.
_FLAT_BYTES: Final = 16 * 1024
# What a gather copies at once, at most and at least: shorter units cost more than they gain.
_UNIT_BYTES: Final = 16 * 1024
_LEAST_UNIT_BYTES: Final = 2048
_UNIT: Final = np.dtype((np.void, _UNIT_BYTES))
_UNITS: Final = np.arange(PIECE_BYTES // _UNIT_BYTES)

_Index = npt.NDArray[np.int64]
_Records = npt.NDArray[np.void]


class Piece(Protocol):
    """A run of a chunk's bytes; `size_bytes` long. Pieces are used at once and never kept."""

    size_bytes: int

    def gather(self, target: Bytes) -> None:
        """Copy the piece into contiguous memory of its size."""
        ...

    def scatter(self, source: Bytes) -> None:
        """Write contiguous memory of the piece's size to the rows."""
        ...

    def flats(self) -> list[Bytes] | None:
        """The bytes themselves, in order, where they lie in few long runs, else None."""
        ...


def copy_to_cache(target: Bytes, source: Bytes) -> None:
    """Copy contiguous bytes, at most `PIECE_BYTES`, so that they are in the cache afterwards."""
    count = len(source) // _UNIT_BYTES
    end = count * _UNIT_BYTES
    if count:
        source[:end].view(_UNIT).take(_UNITS[:count], out=target[:end].view(_UNIT), mode="clip")
    if end < len(source):
        target[end:] = source[end:]


class Units(NamedTuple):
    """Where a piece's bytes lie, for a gather: items of `records`, in order."""

    records: _Records
    items: _Index

    def gather(self, target: Bytes) -> None:
        """Copy them into contiguous memory of their size."""
        # Other modes than the default write straight to their target. No item is out of range: every row was checked.
        self.records.take(self.items, out=target.view(self.records.dtype), mode="clip")


class FlatPiece:
    """Contiguous bytes of the pool."""

    __slots__ = ("_view", "size_bytes")

    def __init__(self, view: Bytes) -> None:
        self._view = view
        self.size_bytes = len(view)

    def gather(self, target: Bytes) -> None:
        """See `Piece`."""
        copy_to_cache(target, self._view)

    def scatter(self, source: Bytes) -> None:
        """See `Piece`."""
        self._view[:] = source

    def flats(self) -> list[Bytes] | None:
        """See `Piece`: however short it is, its neighbours may be long."""
        return [self._view]


class RunPiece:
    """Runs of rows of one or several planes, one strided copy each. `runs` have shape (planes, rows, bytes); behind
    them lie `gap_bytes` of each plane. `units` are the same bytes where they can be gathered so.
    """

    __slots__ = ("_gap_bytes", "_runs", "_units", "size_bytes")

    def __init__(self, runs: list[Bytes], gap_bytes: int = 0, units: Units | None = None) -> None:
        self._runs = runs
        self._units = units
        self._gap_bytes = gap_bytes
        self.size_bytes = sum([run.size for run in runs]) + gap_bytes * len(runs[0])

    def gather(self, target: Bytes) -> None:
        """See `Piece`: a gap becomes zeros."""
        if self._units is not None:
            self._units.gather(target)
            return
        for run, part in self._parts(target):
            part[...] = run
        if self._gap_bytes:
            target.reshape(len(self._runs[0]), -1)[:, -self._gap_bytes :] = 0

    def scatter(self, source: Bytes) -> None:
        """See `Piece`: of a gap nothing is written."""
        for run, part in self._parts(source):
            run[...] = part

    def _parts(self, whole: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        planes = whole.reshape(len(self._runs[0]), -1)
        at = 0
        for run in self._runs:
            end = at + run.shape[1] * run.shape[2]
            yield run, planes[:, at:end].reshape(run.shape)
            at = end

    def flats(self) -> list[Bytes] | None:
        """See `Piece`."""
        runs = self._runs
        if self._gap_bytes or len(runs) * len(runs[0]) * _FLAT_BYTES > self.size_bytes:
            return None
        if any(run.strides[1] != run.shape[2] for run in runs):
            return None
        return [run[plane].reshape(-1) for plane in range(len(runs[0])) for run in runs]


class IndexPiece:
    """Whole rows in any order, one indexed copy. `units` are the same bytes where they can be gathered so."""

    __slots__ = ("_index", "_rows", "_units", "size_bytes")

    def __init__(self, rows: _Records, index: _Index, units: Units | None = None) -> None:
        self._rows = rows
        self._index = index
        self._units = units
        self.size_bytes = len(index) * rows.itemsize

    def gather(self, target: Bytes) -> None:
        """See `Piece`."""
        if self._units is not None:
            self._units.gather(target)
        else:
            target.view(self._rows.dtype)[:] = self._rows[self._index]

    def scatter(self, source: Bytes) -> None:
        """See `Piece`."""
        self._rows[self._index] = source.view(self._rows.dtype)

    def flats(self) -> list[Bytes] | None:
        """See `Piece`."""
        size = self._rows.itemsize
        if size < _FLAT_BYTES:
            return None
        return [self._rows[row : row + 1].view(np.uint8) for row in self._index.tolist()]


class GapPiece:
    """Bytes of the chunk that no live row holds."""

    __slots__ = ("size_bytes",)

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def gather(self, target: Bytes) -> None:
        """See `Piece`: zeros."""
        target[:] = 0

    def scatter(self, source: Bytes) -> None:
        """See `Piece`: nothing is written."""

    def flats(self) -> list[Bytes] | None:
        """See `Piece`."""
        return None


class _Part(NamedTuple):
    """What a chunk has of each plane of its group: runs or an index of rows, then the first tokens of `tail_row` (-1:
    none), then as many rows without life, of which the tail's is the first if there is one, as `row_count` leaves.
    """

    runs: list[tuple[int, int]]
    rows: _Index | None
    tail_row: int
    tail_tokens: int
    row_count: int
    live_rows: int


class Stack:
    """Planes of one shape, equally far apart, as arrays. `memory` is the whole pool."""

    def __init__(self, memory: Bytes, planes: Sequence[Plane]) -> None:
        first, last = planes[0], planes[-1]
        size, stride = first.row_bytes, first.row_stride_bytes
        step = planes[1].offset_bytes - first.offset_bytes if len(planes) > 1 else 0
        self._whole = memory[first.offset_bytes : last.end_bytes]
        self._planes = len(planes)
        self._row_bytes, self._stride, self._step = size, stride, step
        self._token_stride_bytes = first.token_stride_bytes
        self._flat = stride == size
        self._bytes: Bytes | None = None
        if self._flat:
            self._bytes = np.lib.stride_tricks.as_strided(self._whole, (len(planes), first.rows * size), (step, 1))
        shape, strides = (len(planes), first.rows, size), (step, stride, 1)
        self._rows: Bytes = np.lib.stride_tricks.as_strided(self._whole, shape, strides)
        self._records: dict[int, _Records] = {}
        # Rows as items of one array over all planes, where rows and planes are whole rows apart.
        self._dense = stride % size == 0 and step % size == 0
        self._strided: list[_Records] = []
        if not self._dense:
            record = np.dtype((np.void, size))
            self._strided = [
                np.ndarray((plane.rows,), record, memory[plane.offset_bytes : plane.end_bytes], strides=(stride,))
                for plane in planes
            ]

    def pieces(self, part: _Part) -> Iterator[Piece]:
        """A chunk's bytes of all planes in gathered order."""
        plane_bytes = part.row_count * self._row_bytes
        together = max(1, PIECE_BYTES // plane_bytes)
        whole = part.live_rows == part.row_count and part.tail_row < 0
        if part.rows is not None and whole and self._dense and together > 1:
            yield from self._rows_of_planes(part.rows, range(self._planes), together)
        elif part.rows is None and together > 1:
            yield from self._runs_of_planes(part, together)
        else:
            for plane in range(self._planes):
                yield from self._plane(plane, part)

    def _record(self, size_bytes: int) -> _Records:
        """The memory of all planes as items of a size."""
        found = self._records.get(size_bytes)
        if found is None:
            count = len(self._whole) // size_bytes
            found = np.ndarray((count,), np.dtype((np.void, size_bytes)), self._whole)
            self._records[size_bytes] = found
        return found

    def _rows_of_planes(self, index: _Index, planes: range, together: int) -> Iterator[Piece]:
        """The same rows of planes, of `together` ones at once; rows are dense."""
        size = self._row_bytes
        rows = index * (self._stride // size)
        if together > 1:
            rows = (np.arange(together)[:, None] * (self._step // size) + rows).reshape(-1)
        unit = math.gcd(size, _UNIT_BYTES) if size > _UNIT_BYTES else size
        units = rows
        if unit != size:
            units = (rows[:, None] * (size // unit) + np.arange(size // unit)).reshape(-1)
        for plane in planes[::together]:
            start, count = plane * self._step, min(together, planes.stop - plane) * len(index)
            items = None
            if unit == size or unit >= _LEAST_UNIT_BYTES:
                items = Units(self._record(unit), units[: count * (size // unit)] + start // unit)
            yield IndexPiece(self._record(size), rows[:count] + start // size, items)

    def _runs_of_planes(self, part: _Part, together: int) -> Iterator[Piece]:
        size = self._row_bytes
        gap_bytes = (part.row_count - part.live_rows) * size
        tail_bytes = part.tail_tokens * self._token_stride_bytes
        if tail_bytes:
            gap_bytes += size - tail_bytes
        unit, inside = self._units_of_runs(part.runs, together) if not gap_bytes else (0, None)
        for plane in range(0, self._planes, together):
            planes = self._rows[plane : plane + together]
            runs = [planes[:, first : first + count] for first, count in part.runs]
            if tail_bytes:
                runs.append(planes[:, part.tail_row : part.tail_row + 1, :tail_bytes])
            units = None
            if inside is not None:
                count = len(inside) // together * len(planes)
                units = Units(self._record(unit), inside[:count] + plane * self._step // unit)
            yield RunPiece(runs, gap_bytes, units)

    def _units_of_runs(self, runs: list[tuple[int, int]], together: int) -> tuple[int, _Index | None]:
        """Runs of the first `together` planes as items: their size and numbers, if they are all of one useful size."""
        if not self._flat:
            return 0, None
        size = self._row_bytes
        unit = math.gcd(_UNIT_BYTES, self._step, *[bound * size for run in runs for bound in run])
        if unit < _LEAST_UNIT_BYTES:
            return 0, None
        ends = [(first * size // unit, (first + count) * size // unit) for first, count in runs]
        inside = np.concatenate([np.arange(start, end) for start, end in ends])
        if together > 1:
            inside = (np.arange(together)[:, None] * (self._step // unit) + inside).reshape(-1)
        return unit, inside

    def _plane(self, plane: int, part: _Part) -> Iterator[Piece]:
        if part.rows is not None:
            yield from self._indexed(plane, part.rows)
        else:
            for first, count in part.runs:
                yield from self._run(plane, first, count)
        gap_bytes = (part.row_count - part.live_rows) * self._row_bytes
        if part.tail_row >= 0:
            tail_bytes = part.tail_tokens * self._token_stride_bytes
            yield from _cut(self._rows[plane, part.tail_row, :tail_bytes])
            gap_bytes += self._row_bytes - tail_bytes
        for start in range(0, gap_bytes, PIECE_BYTES):
            yield GapPiece(min(PIECE_BYTES, gap_bytes - start))

    def _run(self, plane: int, first: int, count: int) -> Iterator[Piece]:
        """Pieces of consecutive rows."""
        if self._bytes is not None:
            yield from _cut(self._bytes[plane, first * self._row_bytes : (first + count) * self._row_bytes])
            return
        rows = self._rows[plane, first : first + count]
        if self._row_bytes > PIECE_BYTES:
            for row in rows:
                yield from _cut(row)
        else:
            step = PIECE_BYTES // self._row_bytes
            for start in range(0, count, step):
                yield RunPiece([rows[None, start : start + step]])

    def _indexed(self, plane: int, index: _Index) -> Iterator[Piece]:
        """Pieces of rows in any order."""
        step = max(1, PIECE_BYTES // self._row_bytes)
        if step == 1:
            for row in index.tolist():
                yield from _cut(self._rows[plane, row])
            return
        for start in range(0, len(index), step):
            rows = index[start : start + step]
            if self._dense:
                yield from self._rows_of_planes(rows, range(plane, plane + 1), 1)
            else:
                yield IndexPiece(self._strided[plane], rows)


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


def flats_of(group: Sequence[Piece]) -> list[Bytes] | None:
    """The bytes of a group where they lie, or None where hashing them there costs more than a copy."""
    found: list[Bytes] = []
    size = 0
    for piece in group:
        flats = piece.flats()
        if flats is None:
            return None
        found += flats
        size += piece.size_bytes
    return found if len(found) == 1 or len(found) * _FLAT_BYTES <= size else None


def _cut(view: Bytes) -> Iterator[Piece]:
    if len(view) <= PIECE_BYTES:
        yield FlatPiece(view)
        return
    for start in range(0, len(view), PIECE_BYTES):
        yield FlatPiece(view[start : start + PIECE_BYTES])


def stacked(planes: Sequence[Plane]) -> list[list[Plane]]:
    """Planes cut, in order, into stacks: one shape, each as far behind the one before as that behind its own."""
    stacks: list[list[Plane]] = [[planes[0]]]
    for before, plane in pairwise(planes):
        stack = stacks[-1]
        step = plane.offset_bytes - before.offset_bytes
        alike = step > 0 and plane == msgspec.structs.replace(before, offset_bytes=plane.offset_bytes)
        if alike and (len(stack) == 1 or step == stack[1].offset_bytes - stack[0].offset_bytes):
            stack.append(plane)
        else:
            stacks.append([plane])
    return stacks


class PoolView:
    """All planes of a mapped pool."""

    def __init__(self, memory: Bytes, layout: StageLayout) -> None:
        self._groups = [[Stack(memory, planes) for planes in stacked(group.planes)] for group in layout.all_groups]

    def pieces(self, chunk: ChunkWork, rows_by_group: Sequence[RowMap]) -> Iterator[Piece]:
        """The chunk's bytes in gathered order."""
        span = chunk.span
        rows = rows_by_group[span.group]
        whole = chunk.live_rows - (1 if chunk.tail_tokens else 0)
        start, end = span.first_row, span.first_row + whole
        runs = rows.runs_between(start, end, max(1, whole // _ROWS_A_RUN))
        index = rows.index(start, end).astype(np.int64) if runs is None else None
        tail_row = int(rows.index(end, end + 1)[0]) if chunk.tail_tokens else -1
        part = _Part(runs or [], index, tail_row, chunk.tail_tokens, span.row_count, chunk.live_rows)
        for stack in self._groups[span.group]:
            yield from stack.pieces(part)
