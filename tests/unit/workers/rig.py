"""A worker's lanes over host memory, and a byte-by-byte model of what a chunk must hold."""

import mmap
import os
import random
from collections.abc import Sequence

import numpy as np

from ipc.messages import CaptureJob, CopyCommand, CopyJob, JobDone, JobFailed, MemfdPool, RestoreJob, Stage
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places
from shm.layout import ChunkSpan, Plane, StageLayout
from shm.memfd import create_pool
from tests.support.layouts import packed_positions, packed_rows, positions, stage_layout
from workers.cpu_device import CpuDevice
from workers.device import Device, DevicePool, LaneKind
from workers.digest import Bytes, Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice
from workers.jobs import JobRefused
from workers.lanes import JobHooks, Lane
from workers.plans import PlannedJob, plan_job

KEY = bytes(range(32))
NEVER = JobHooks(lambda: False, lambda: None)


def slot_layout(planes: int = 3, row_bytes: int = 96, rows: int = 64, chunk_tokens: int = 16) -> StageLayout:
    """A slot cache: one token a row, planes one after the other, 32 unused bytes after each row."""
    stride = row_bytes + 32
    made = tuple(Plane(n * stride * rows, row_bytes, stride, rows) for n in range(planes))
    state = Plane(planes * stride * rows, 48, 64, 4)
    return stage_layout(made, state, chunk_tokens)


def paged_layout(planes: int = 2, block: int = 8, token_bytes: int = 24, rows: int = 24) -> StageLayout:
    """A paged cache: blocks of `block` tokens, dense."""
    row_bytes = block * token_bytes
    made = tuple(Plane(n * row_bytes * rows, row_bytes, row_bytes, rows, block, token_bytes) for n in range(planes))
    return stage_layout(made, None, block * 2)


def model_chunk(memory: bytes, layout: StageLayout, rows: Sequence[int], span: ChunkSpan, state_slot: int) -> bytes:
    """The chunk's bytes in gathered order, one byte at a time."""
    out = bytearray()
    for plane in layout.all_groups[span.group].planes:
        for nth in range(span.row_count):
            row = state_slot if span.is_state else rows[span.first_row + nth]
            start = plane.offset_bytes + row * plane.row_stride_bytes
            if span.is_state:
                out += memory[start : start + plane.row_bytes]
                continue
            for at in range(plane.row_bytes):
                token = nth * plane.tokens_per_row
                if plane.token_stride_bytes:
                    token += at // plane.token_stride_bytes
                out.append(memory[start + at] if token < span.token_count else 0)
    return bytes(out)


def written_bytes(layout: StageLayout, rows: Sequence[int], tokens: int) -> set[int]:
    """Offsets in the pool that hold the first `tokens` tokens."""
    found: set[int] = set()
    for plane in layout.groups[0].planes:
        for token in range(tokens):
            row, inside = divmod(token, plane.tokens_per_row)
            start = plane.offset_bytes + rows[row] * plane.row_stride_bytes
            size = plane.token_stride_bytes or plane.row_bytes
            start += inside * plane.token_stride_bytes
            found.update(range(start, start + size))
    return found


class Rig:
    """One pool, one shuttle, two lanes. `with` it, or `close` it."""

    def __init__(
        self,
        layout: StageLayout,
        *,
        seed: int = 0,
        faults: dict[str, str] | None = None,
        slice_bytes: int = 4096,
        fragment: bool = False,
        link_bytes_per_s: float = 0.0,
        shuttle_granules: int = 160,
        pool_bytes: int = 0,
    ) -> None:
        self.layout = layout
        self.random = random.Random(seed)
        self.digester = Digester(KEY)
        cpu = CpuDevice(self.digester, slice_bytes=slice_bytes, link_bytes_per_s=link_bytes_per_s)
        self.book = FaultBook(faults or {})
        self.device: Device = cpu if faults is None else FaultyDevice(cpu, self.book)
        self.pool_bytes = pool_bytes or layout.end_bytes
        descriptor = create_pool("rig", self.pool_bytes)
        self._pool_map = mmap.mmap(descriptor, self.pool_bytes)
        self.memory: Bytes = np.frombuffer(self._pool_map, np.uint8)
        self.memory[:] = np.frombuffer(self.random.randbytes(self.pool_bytes), np.uint8)
        probe = self.memory[:16].tobytes().ljust(16, b"\0")
        self.stage = Stage(0, "cpu:0", MemfdPool(1, self.pool_bytes), layout, bytes(8), probe)
        self.pool: DevicePool = self.device.open_pool(self.stage, descriptor)
        os.close(descriptor)
        self.shuttle = mmap.mmap(-1, shuttle_granules * GRANULE_BYTES)
        self.device.add_shuttle(0, memoryview(self.shuttle))
        self.lanes = {kind: Lane(kind, self.device.copier(kind)) for kind in LaneKind}
        self._fragment = fragment
        self._granules = list(range(1, shuttle_granules))
        if fragment:
            self.random.shuffle(self._granules)

    def place(self, length_bytes: int) -> ChunkPlace:
        """Fresh granules, scattered at random in a fragmented rig."""
        count = granules_for(length_bytes)
        taken, self._granules = self._granules[:count], self._granules[count:]
        assert len(taken) == count, "the rig's shuttle is too small"
        if not self._fragment:
            return ChunkPlace(length_bytes, (Extent(0, taken[0] * GRANULE_BYTES, count * GRANULE_BYTES),))
        return ChunkPlace(length_bytes, tuple(Extent(0, g * GRANULE_BYTES, GRANULE_BYTES) for g in taken))

    def places(self, tokens: int, state_slot: int = -1) -> list[ChunkPlace]:
        """A place for every chunk."""
        return [self.place(s.length_bytes) for s in self.layout.chunks(tokens, positions(tokens, state_slot))]

    def stored(self, place: ChunkPlace) -> bytes:
        """What lies in a place."""
        whole = b"".join(bytes(self.shuttle[e.offset_bytes : e.offset_bytes + e.length_bytes]) for e in place.extents)
        return whole[: place.length_bytes]

    def capture(
        self,
        rows: Sequence[int],
        tokens: int,
        places: Sequence[ChunkPlace],
        *,
        state_slot: int = -1,
        hooks: JobHooks = NEVER,
    ) -> JobDone | JobFailed:
        """Run one capture job."""
        packed = packed_rows(self.layout, rows, state_slot)
        job = CaptureJob(1, 1, packed, tokens, pack_places(places), False, packed_positions(tokens, state_slot))
        return self.run(job, hooks)

    def restore(
        self,
        rows: Sequence[int],
        image_tokens: int,
        places: Sequence[ChunkPlace],
        digests: bytes,
        *,
        tokens: int = -1,
        algorithm: str = "xxh3-128",
        state_slot: int = -1,
        hooks: JobHooks = NEVER,
    ) -> JobDone | JobFailed:
        """Run one restore job."""
        job = RestoreJob(
            2,
            1,
            packed_rows(self.layout, rows, state_slot),
            image_tokens,
            image_tokens if tokens < 0 else tokens,
            pack_places(places),
            digests,
            (algorithm,),
            False,
            packed_positions(image_tokens, state_slot),
        )
        return self.run(job, hooks)

    def copy(
        self,
        rows: Sequence[int],
        target_rows: Sequence[int],
        tokens: int,
        *,
        slots: tuple[int, int] = (-1, -1),
        hooks: JobHooks = NEVER,
    ) -> JobDone | JobFailed:
        """Run one copy from rows to rows; `slots` are the state slots of source and target."""
        source, target = (packed_rows(self.layout, r, s) for r, s in zip((rows, target_rows), slots, strict=True))
        job = CopyJob(3, 1, source, target, tokens, False, packed_positions(tokens, slots[0]))
        return self.run(job, hooks)

    def plan(self, job: CopyCommand) -> PlannedJob:
        """Check a job and cut it into slices."""
        return plan_job(self.device, self.pool, job)

    def run(self, job: CopyCommand, hooks: JobHooks = NEVER) -> JobDone | JobFailed:
        """Run one job on its lane."""
        try:
            plan = self.plan(job)
        except JobRefused as exc:
            return JobFailed(job.job, exc.code, exc.message)
        return self.lanes[plan.lane].run(plan, hooks)

    def close(self) -> None:
        """Give everything back."""
        self.pool.close()
        self.device.close()
        del self.memory
        self._pool_map.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
