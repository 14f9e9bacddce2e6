"""Plans: a job's message, checked against its pool's layout and cut into slices, before a lane takes it."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
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
    resident_chunks,
    restore_chunks,
    rows_needed,
)
from workers.rowmap import RowMap


class PlannedJob(NamedTuple):
    """A checked job, ready to run. `moved_bytes` is what it will move, or with `digests_only` read. `written` are the
    rows of each group that it writes, if any; of a copy they are others than `rows`, which it reads. `algorithm` makes
    its digests, where that is not the device's own.

    `look` are chunks that are digested where they lie, before anything is copied: of a capture others than `chunks`,
    of a restore those of `chunks` that may be there already. `group_ends` has the last slice of each group and that
    group's number, where the job is `layered`: then no slice holds chunks of two groups.
    """

    job: int
    lane: LaneKind
    pool: DevicePool
    rows: tuple[RowMap, ...]
    written: tuple[RowMap, ...]
    chunks: tuple[ChunkWork, ...]
    slices: tuple[SliceRange, ...]
    moved_bytes: int
    sizes: SliceSizes
    algorithm: str = ""
    op: str = ""
    stage: int = -1
    digests_only: bool = False
    look: "PlannedJob | None" = None
    layered: bool = False
    group_ends: Mapping[int, int] = MappingProxyType({})

    @property
    def work_bytes(self) -> int:
        """What it will move or read at most."""
        return self.moved_bytes + (0 if self.look is None else self.look.moved_bytes)

    def slice_work(self, number: int, *, written: bool = False) -> SliceWork:
        """What the device is told about one slice; with `written` about where it goes."""
        first, count = self.slices[number]
        rows = self.written if written else self.rows
        return SliceWork(self.pool, rows, self.chunks[first : first + count], self.op, self.stage)

    def of(self, chunks: Sequence[ChunkWork], sizes: SliceSizes, *, digests_only: bool = False) -> "PlannedJob":
        """The same job with other chunks of its image and no look."""
        slices, group_ends = plan_slices(chunks, sizes), dict[int, int]()
        if self.layered and not digests_only:
            slices, group_ends = _layered_slices(chunks, sizes)
        return self._replace(
            chunks=tuple(chunks),
            slices=tuple(slices),
            group_ends=group_ends,
            moved_bytes=bytes_of(chunks),
            sizes=sizes,
            digests_only=digests_only,
            look=None,
        )

    def rows_touched(self, slices: int) -> tuple[bytes, ...]:
        """The rows of each group that the first `slices` slices write, packed; empty: none of any group."""
        touched: list[list[bytes]] = [[] for _ in self.written]
        first = end = 0  # positions of neighbouring chunks, joined
        group = -1
        for chunk in self.chunks[: sum(count for _, count in self.slices[:slices])]:
            span = chunk.span
            if span.group != group or span.first_row != end:
                _add_rows(touched, self.written, group, (first, end))
                group, first = span.group, span.first_row
            end = span.first_row + chunk.live_rows
        _add_rows(touched, self.written, group, (first, end))
        packed = tuple(b"".join(parts) for parts in touched)
        return packed if any(packed) else ()


def _add_rows(touched: list[list[bytes]], written: Sequence[RowMap], group: int, positions: tuple[int, int]) -> None:
    if group >= 0 and written:
        touched[group].append(written[group].packed_between(*positions))


def bytes_of(chunks: Sequence[ChunkWork]) -> int:
    """Bytes of chunks."""
    return sum(chunk.span.length_bytes for chunk in chunks)


def plan_job(device: Device, pool: DevicePool, message: CopyCommand) -> PlannedJob:
    """Check a job against the pool's layout and cut it into slices.

    Raises:
        JobRefused: the job does not fit the pool.
    """
    layout = pool.layout
    algorithm = XXH3 if pool.in_host_memory and device.digest_algorithm != XXH3 else ""
    chunks, look = _chunks(layout, message, algorithm or device.digest_algorithm)
    rows = _row_maps(layout, message.rows, [*chunks, *look])
    written: tuple[RowMap, ...] = ()
    lane = LaneKind.CAPTURE
    if isinstance(message, CopyJob):
        written = _row_maps(layout, message.target_rows, chunks)
    elif isinstance(message, RestoreJob):
        written, lane = rows, LaneKind.RESTORE
    op, stage = ("", -1) if isinstance(message, DigestJob) else (message.op, message.stage)
    sizes = _sizes(device, pool, message, rows, chunks)
    empty = PlannedJob(message.job, lane, pool, rows, written, (), (), 0, sizes, algorithm, op, stage)
    empty = empty._replace(layered=isinstance(message, RestoreJob) and message.layered)
    plan = empty.of(chunks, sizes, digests_only=isinstance(message, DigestJob))
    if look:
        # What a GPU reads in no time takes a CPU long, and until then nobody else has the lane and no job ends early.
        most_bytes = device.slice_bytes if algorithm else device.digest_slice_bytes
        larger = SliceSizes(most_bytes, device.slice_rows)
        plan = plan._replace(look=empty.of(look, larger, digests_only=True))
    return plan


def _layered_slices(chunks: Sequence[ChunkWork], sizes: SliceSizes) -> tuple[list[SliceRange], dict[int, int]]:
    """Slices of which none holds chunks of two groups, and the last one of each group."""
    slices: list[SliceRange] = []
    ends: dict[int, int] = {}
    first = 0
    for group, found in groupby(chunks, lambda chunk: chunk.span.group):
        works = list(found)
        slices += [SliceRange(first + at, count) for at, count in plan_slices(works, sizes)]
        ends[len(slices) - 1] = group
        first += len(works)
    return slices, ends


def _chunks(layout: StageLayout, message: CopyCommand, algorithm: str) -> tuple[list[ChunkWork], list[ChunkWork]]:
    """The chunks of a job, and those that are looked at first.

    Raises:
        JobRefused: they do not fit the layout.
    """
    tokens = message.tokens
    try:
        positions = unpack_numbers(message.positions)
        places = () if isinstance(message, CopyJob | DigestJob) else unpack_places(message.places)
        wanted = unpack_numbers(message.chunks) if isinstance(message, DigestJob | CaptureJob) else ()
        hinted = unpack_numbers(message.hinted) if isinstance(message, CaptureJob) else ()
    except ValueError as exc:
        raise JobRefused("bad_request", str(exc)) from exc
    if isinstance(message, CaptureJob):
        return capture_chunks(layout, tokens, positions, places, hinted, wanted)
    if isinstance(message, CopyJob):
        return copy_chunks(layout, tokens, positions), []
    if isinstance(message, DigestJob):
        return digest_chunks(layout, tokens, positions, wanted), []
    chunks = restore_chunks(
        layout,
        message.image_tokens,
        tokens,
        positions,
        places,
        digests=message.digests,
        algorithms=message.algorithms,
    )
    return chunks, resident_chunks(chunks, message.resident_tokens, algorithm)


def _sizes(
    device: Device, pool: DevicePool, message: CopyCommand, rows: tuple[RowMap, ...], chunks: Sequence[ChunkWork]
) -> SliceSizes:
    """What is exposed is small: the first slice of a capture, which nothing is copied under, and the last of a restore,
    which is scattered under nothing.
    """
    most_bytes, most_rows, ramp_bytes = device.slice_bytes, device.slice_rows, device.ramp_bytes
    if pool.in_host_memory and device.digest_algorithm != XXH3:
        return SliceSizes(min(most_bytes, HOST_SLICE_BYTES), most_rows)
    if isinstance(message, CopyJob):
        return SliceSizes(device.direct_slice_bytes, most_rows, device.direct_slice_bytes // 4 if ramp_bytes else 0)
    if isinstance(message, RestoreJob):
        return SliceSizes(most_bytes, most_rows, last_bytes=ramp_bytes)
    if isinstance(message, DigestJob):
        return SliceSizes(most_bytes, most_rows)
    if chunks and (whole_bytes := device.unstaged_bytes(pool, rows, chunks[0])):
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
