"""Slices as work for a GPU's copy engines: strips of rows, straight to or from bytes in gathered order.

A strip is lines of equal length at equal distances on both sides, so one two-dimensional copy moves it. A run of rows
that lie close together in planes at equal distances is one strip (a line a plane); otherwise it is one a plane.

The copy engines need no multiprocessor, so a model keeps more of them; but each copy costs the host some microseconds,
so many short strips are slower than a kernel that gathers them. The digests need multiprocessors all the same. Bytes
that no token has filled are zeros in an image, and a copy engine has none to give: chunks with such bytes are always
gathered.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from shm.gpu_runtime import GpuRuntime, Lines
from shm.layout import Plane
from workers.device import CopyPath, SliceWork
from workers.jobs import ChunkWork, is_whole

# Measured on an H200: strips of 16 MiB come to 0.97 of the link by the copy engines and to 0.98 by kernels, of 64 MiB
# both to 0.98, and the kernels take twice as much of the device memory's time.
ENGINE_STRIP_BYTES: Final = 32 * 1024 * 1024
# What two-dimensional copies take for the distance of two lines.
_MOST_PITCH_BYTES: Final = 2**31 - 1


class Strip(NamedTuple):
    """`height` lines of `width` bytes: `pitch` apart in the pool, from device address `rows` on, and `line_bytes` apart
    in the chunk, from its byte `at` on.
    """

    rows: int
    at: int
    width: int
    height: int
    pitch: int
    line_bytes: int


class Piece(NamedTuple):
    """Bytes `start` to `end` of a chunk lie at `address`, which one copy may go to or come from."""

    start: int
    end: int
    address: int


def strips_on_path(path: CopyPath, work: SliceWork, base: int) -> list[list[Strip]] | None:
    """The strips of every chunk of a slice of a pool at device address `base`, or None where kernels are to move it."""
    if path is CopyPath.GATHER:
        return None
    found: list[list[Strip]] = []
    groups = work.pool.layout.all_groups
    for chunk in work.chunks:
        if not is_whole(chunk):
            return None
        span = chunk.span
        most = span.row_count if path is CopyPath.ENGINE else max(1, span.length_bytes // ENGINE_STRIP_BYTES)
        runs = work.rows[span.group].runs_between(span.first_row, span.first_row + span.row_count, most)
        if runs is None:
            return None
        strips = _chunk_strips(chunk, groups[span.group].planes, runs, base)
        if path is CopyPath.AUTO and span.length_bytes < len(strips) * ENGINE_STRIP_BYTES:
            return None
        found.append(strips)
    return found


def unstaged_strips(path: CopyPath, work: SliceWork, base: int, staging_bytes: int) -> list[list[Strip]] | None:
    """The strips of a captured slice, or None where kernels are to gather it to staging of so many bytes.

    Slices are cut by their first chunk (see `Device.unstaged_bytes`), so one may be larger than staging and its rows
    turn out to make short strips. It goes by the copy engines all the same: staging would have to grow, and a full card
    has no memory for that.
    """
    strips = strips_on_path(path, work, base)
    size_bytes = sum(chunk.span.length_bytes for chunk in work.chunks)
    if strips is None and path is CopyPath.AUTO and len(work.chunks) > 1 and size_bytes > staging_bytes:
        return strips_on_path(CopyPath.ENGINE, work, base)
    return strips


def _chunk_strips(chunk: ChunkWork, planes: Sequence[Plane], runs: Sequence[tuple[int, int]], base: int) -> list[Strip]:
    first = planes[0]
    size, stride, rows = first.row_bytes, first.row_stride_bytes, chunk.span.row_count
    distance = _distance(planes)
    strips: list[Strip] = []
    if distance and stride == size:
        done = 0
        for row, count in runs:
            start = base + first.offset_bytes + row * stride
            strips.append(Strip(start, done * size, count * size, len(planes), distance, rows * size))
            done += count
        return strips
    at = 0
    for plane in planes:
        size, stride = plane.row_bytes, plane.row_stride_bytes
        for row, count in runs:
            start = base + plane.offset_bytes + row * stride
            dense = stride == size
            lines, width = (1, count * size) if dense else (count, size)
            strips.append(Strip(start, at, width, lines, stride, size))
            at += count * size
    return strips


def _distance(planes: Sequence[Plane]) -> int:
    """How far apart planes of one shape lie, or 0 where they have several shapes or distances."""
    first = planes[0]
    distance = planes[1].offset_bytes - first.offset_bytes if len(planes) > 1 else first.row_stride_bytes
    alike = all(
        plane.row_bytes == first.row_bytes
        and plane.row_stride_bytes == first.row_stride_bytes
        and plane.offset_bytes == first.offset_bytes + number * distance
        for number, plane in enumerate(planes)
    )
    # The distance of lines is at least their length, which for planes that lie one in the other it is not.
    return distance if alike and first.row_bytes <= distance <= _MOST_PITCH_BYTES else 0


def enqueue(
    runtime: GpuRuntime, strips: Sequence[Strip], pieces: Sequence[Piece], direction: int, stream: int, *, gather: bool
) -> None:
    """Copy a chunk's strips to where the chunk lies (`gather`), or back to the rows."""
    single: list[tuple[int, int, int]] = []
    for rows, chunk, part in _fitted(strips, pieces):
        target, source = (chunk, rows) if gather else (rows, chunk)
        if part.height == 1:
            single.append((target, source, part.width))
            continue
        here, there = Lines(chunk, part.line_bytes), Lines(rows, part.pitch)
        to, start = (here, there) if gather else (there, here)
        runtime.memcpy_2d_async(to, start, part.width, part.height, direction=direction, stream=stream)
    runtime.memcpy_many_async(single, direction, stream)


def _fitted(strips: Sequence[Strip], pieces: Sequence[Piece]) -> Iterator[tuple[int, int, Strip]]:
    """(address of the rows, address in the chunk, strip) of parts that do not cross the end of a piece."""
    for strip in strips:
        for piece in pieces:
            yield from _parts(strip, piece)


def _parts(strip: Strip, piece: Piece) -> Iterator[tuple[int, int, Strip]]:
    """The lines that lie in a piece as a whole, then what it has of the lines at its ends."""
    first = max(0, -(-(piece.start - strip.at) // strip.line_bytes))
    last = min(strip.height - 1, (piece.end - strip.width - strip.at) // strip.line_bytes)
    if first <= last:
        at = strip.at + first * strip.line_bytes
        rows = strip.rows + first * strip.pitch
        yield rows, piece.address + at - piece.start, strip._replace(height=last - first + 1)
    ends = {(piece.start - strip.at) // strip.line_bytes, (piece.end - 1 - strip.at) // strip.line_bytes}
    for line in ends:
        if not 0 <= line < strip.height or first <= line <= last:
            continue
        begin = strip.at + line * strip.line_bytes
        low, high = max(begin, piece.start), min(begin + strip.width, piece.end)
        if low < high:
            rows = strip.rows + line * strip.pitch + low - begin
            yield rows, piece.address + low - piece.start, strip._replace(width=high - low, height=1)
