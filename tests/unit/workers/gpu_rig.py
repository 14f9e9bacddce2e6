"""A GPU worker's lanes over the fake GPU."""

import ctypes

import msgspec
import numpy as np

from ipc.messages import CopyCommand, CudaIpcPool, JobDone, JobFailed, Stage
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for
from shm.gpu_runtime import GpuRuntime
from shm.layout import StageLayout
from tests.support.layouts import positions
from tests.support.shape_cases import Case
from tests.unit.workers.fake_gpu import UUID
from tests.unit.workers.rig import KEY, NEVER
from tests.unit.workers.shape_checks import SLICE_BYTES, granules_of
from workers.cuda_device import CudaDevice
from workers.device import CopyPath, Device, LaneKind
from workers.digest import Bytes, Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice
from workers.jobs import JobRefused
from workers.lanes import JobHooks, Lane
from workers.plans import PlannedJob, plan_job

DIGESTER = Digester(KEY)


class Gpu:
    """A worker's lanes over the fake GPU, and the engine's side of one pool."""

    def __init__(
        self,
        runtime: GpuRuntime,
        layout: StageLayout,
        *,
        slice_bytes: int = 8192,
        granules: int = 160,
        pool_bytes: int = 0,
        seed: int = 1,
        path: CopyPath = CopyPath.AUTO,
        direct_slice_bytes: int = 0,
    ) -> None:
        self.runtime = runtime
        self.layout = layout
        self.pool_bytes = pool_bytes or layout.end_bytes
        self.digester = DIGESTER
        self.cuda = CudaDevice.open(
            UUID,
            self.digester,
            slice_bytes=slice_bytes,
            staging_bytes=slice_bytes,
            direct_slice_bytes=direct_slice_bytes or slice_bytes,
            path=path,
        )
        self.allocation = runtime.malloc(self.pool_bytes + 4096)
        self.offset = 512
        memory = (ctypes.c_ubyte * self.pool_bytes).from_address(self.allocation + self.offset)
        self.memory: Bytes = np.ctypeslib.as_array(memory)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.pool_bytes, dtype=np.uint8)
        self.shuttle = np.zeros(granules * GRANULE_BYTES, np.uint8)
        self.cuda.add_shuttle(0, memoryview(self.shuttle.data))
        self.granule = 1

    def stage(self, **changes: object) -> Stage:
        handle = self.runtime.ipc_mem_handle(self.allocation)
        size = self.pool_bytes
        fields: dict[str, object] = {
            "handle": handle,
            "allocation_bytes": size + 4096,
            "offset_bytes": self.offset,
            "pool_bytes": size,
            **changes,
        }
        probe = self.memory[:16].tobytes()
        return Stage(0, UUID, CudaIpcPool(**fields), self.layout, bytes(8), probe)  # type: ignore[arg-type]

    def places(self, tokens: int, state_slot: int = -1) -> list[ChunkPlace]:
        return [self.place(span.length_bytes) for span in self.layout.chunks(tokens, positions(tokens, state_slot))]

    def place(self, length_bytes: int) -> ChunkPlace:
        count = granules_for(length_bytes)
        start, self.granule = self.granule * GRANULE_BYTES, self.granule + count
        return ChunkPlace(length_bytes, (Extent(0, start, count * GRANULE_BYTES),))

    def stored(self, place: ChunkPlace) -> bytes:
        return self.shuttle[place.extents[0].offset_bytes :][: place.length_bytes].tobytes()

    def close(self) -> None:
        self.cuda.close()
        self.runtime.free(self.allocation)


class CaseGpu(Gpu):
    """The same with lanes and an open pool, for one case. `with` it."""

    def __init__(
        self,
        runtime: GpuRuntime,
        case: Case,
        seed: int,
        faults: dict[str, str] | None = None,
        *,
        granules: int = 0,
        path: CopyPath = CopyPath.AUTO,
    ) -> None:
        super().__init__(
            runtime,
            case.layout,
            slice_bytes=SLICE_BYTES,
            granules=granules or granules_of(case),
            pool_bytes=case.pool_bytes,
            seed=seed,
            path=path,
        )
        self.device: Device = FaultyDevice(self.cuda, FaultBook(faults)) if faults else self.cuda
        self.lanes = {kind: Lane(kind, self.device.copier(kind)) for kind in LaneKind}
        probe = self.memory[:16].tobytes().ljust(16, b"\0")
        self.pool = self.device.open_pool(msgspec.structs.replace(self.stage(), probe_bytes=probe), -1)

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

    def __enter__(self) -> "CaseGpu":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self.close()
