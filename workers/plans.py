"""Plans: a job's message, checked against its pool's layout and cut into slices, before a lane takes it."""

from collections.abc import Sequence
from typing import NamedTuple

from ipc.messages import CaptureJob, CopyCommand, CopyJob, DigestJob, RestoreJob
from shm.extent import unpack_places
from shm.layout import StageLayout
from shm.rows import unpack_numbers
from workers.device import HOST_SLICE_BYTES, Device, DevicePool, LaneKind, SliceWork
from workers.digest import XXH3
from workers.jobs import (
    ChunkWork,
    JobRefused,
    SliceRange,
    SliceSizes,
    capture_chunks,
    copy_chunks,
    digest_chunks,
    plan_slices,
    restore_chunks,
    rows_needed,
)
from workers.rowmap import RowMap


class PlannedJob(NamedTuple):
    """A checked job, ready to run. `moved_bytes` is what it will move, or with `digests_only` read. `written` are the
    rows of each group that it writes, if any; of a copy they are others than `rows`, which it reads. `algorithm` makes
    its digests, where that is not the device's own.
    """

    job: int
    lane: LaneKind
    pool: DevicePool
    rows: tuple[RowMap, ...]
    written: tuple[RowMap, ...]
    chunks: tuple[ChunkWork, ...]
    slices: tuple[SliceRange, ...]
    moved_bytes: int
    algorithm: str = ""
    op: str = ""
    stage: int = -1
    digests_only: bool = False

    def slice_work(self, number: int, *, written: bool = False) -> SliceWork:
        """What the device is told about one slice; with `written` about where it goes."""
        first, count = self.slices[number]
        rows = self.written if written else self.rows
        return SliceWork(self.pool, rows, self.chunks[first : first + count], self.op, self.stage)


def plan_job(device: Device, pool: DevicePool, message: CopyCommand) -> PlannedJob:
    """Check a job against the pool's layout and cut it into slices.

    Raises:
        JobRefused: the job does not fit the pool.
    """
    layout = pool.layout
    try:
        positions = unpack_numbers(message.positions)
        places = () if isinstance(message, CopyJob | DigestJob) else unpack_places(message.places)
        wanted = unpack_numbers(message.chunks) if isinstance(message, DigestJob) else ()
    except ValueError as exc:
        raise JobRefused("bad_request", str(exc)) from exc
    if isinstance(message, CaptureJob):
        chunks = capture_chunks(layout, message.tokens, positions, places)
    elif isinstance(message, CopyJob):
        chunks = copy_chunks(layout, message.tokens, positions)
    elif isinstance(message, DigestJob):
        chunks = digest_chunks(layout, message.tokens, positions, wanted)
    else:
        chunks = restore_chunks(
            layout,
            message.image_tokens,
            message.tokens,
            positions,
            places,
            digests=message.digests,
            algorithms=message.algorithms,
        )
    rows = _row_maps(layout, message.rows, chunks)
    written: tuple[RowMap, ...] = ()
    lane = LaneKind.CAPTURE
    if isinstance(message, CopyJob):
        written = _row_maps(layout, message.target_rows, chunks)
    elif isinstance(message, RestoreJob):
        written, lane = rows, LaneKind.RESTORE
    sizes, algorithm = _sizes(device, pool, message, rows, chunks), ""
    if pool.in_host_memory and device.digest_algorithm != XXH3:
        sizes, algorithm = SliceSizes(min(device.slice_bytes, HOST_SLICE_BYTES), device.slice_rows), XXH3
    slices = plan_slices(chunks, sizes)
    moved_bytes = sum(chunk.span.length_bytes for chunk in chunks)
    only = isinstance(message, DigestJob)
    op, stage = ("", -1) if isinstance(message, DigestJob) else (message.op, message.stage)
    return PlannedJob(
        message.job,
        lane,
        pool,
        rows,
        written,
        tuple(chunks),
        tuple(slices),
        moved_bytes,
        algorithm,
        op,
        stage,
        digests_only=only,
    )


def _sizes(
    device: Device, pool: DevicePool, message: CopyCommand, rows: tuple[RowMap, ...], chunks: Sequence[ChunkWork]
) -> SliceSizes:
    """What is exposed is small: the first slice of a capture, which nothing is copied under, and the last of a restore,
    which is scattered under nothing.
    """
    most_bytes, most_rows, ramp_bytes = device.slice_bytes, device.slice_rows, device.ramp_bytes
    if isinstance(message, CopyJob):
        return SliceSizes(device.direct_slice_bytes, most_rows, device.direct_slice_bytes // 4 if ramp_bytes else 0)
    if isinstance(message, RestoreJob):
        return SliceSizes(most_bytes, most_rows, last_bytes=ramp_bytes)
    if isinstance(message, CaptureJob) and chunks and (whole_bytes := device.unstaged_bytes(pool, rows, chunks[0])):
        # Both ends are digests of rows here, of which one wait for its turn costs more than a larger slice.
        return SliceSizes(most_bytes, most_rows, 2 * ramp_bytes, 2 * ramp_bytes, whole_bytes)
    return SliceSizes(most_bytes, most_rows, ramp_bytes)


def _row_maps(layout: StageLayout, packed: Sequence[bytes], chunks: Sequence[ChunkWork]) -> tuple[RowMap, ...]:
    groups = layout.all_groups
    if len(packed) != len(groups):
        raise JobRefused("bad_rows", f"rows of {len(packed)} groups were given, the stage has {len(groups)}")
    needed = rows_needed(chunks, len(groups))
    return tuple(
        RowMap.parse(rows, group.rows, count) for rows, group, count in zip(packed, groups, needed, strict=True)
    )
