"""A GPU worker's lanes in this process, pools of its own or of an engine process, and shuttles of plain memory."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ipc.messages import CaptureJob, CudaIpcPool, JobDone, JobFailed, RestoreJob, Stage
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places
from shm.gpu_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, GpuRuntime
from shm.layout import StageLayout
from shm.process import start_ticks
from tests.support.layouts import packed_positions, packed_rows, positions
from workers.cuda_device import CudaDevice
from workers.cuda_memory import Counts
from workers.cuda_pool import CudaPool, PoolMemory
from workers.device import CopyPath, Device, DevicePool, LaneKind
from workers.digest import Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice
from workers.jobs import JobRefused
from workers.lanes import JobHooks, Lane
from workers.plans import plan_job

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = bytes(range(32))
NEVER = JobHooks(lambda: False, lambda: None)
MIB = 1024 * 1024


def gpu_uuid() -> str:
    """UUID of the first GPU, by torch."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


class EngineProcess:
    """See `engine_process`."""

    def __init__(self, pool_bytes: int, directory: Path) -> None:
        self.pool_bytes = pool_bytes
        self.file = directory / "pool.bin"
        command = [sys.executable, "-m", "tests.gpu.engine_process", str(pool_bytes), str(self.file)]
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, env=environment, text=True
        )
        self.start_ticks = start_ticks(self.process.pid)

    def ask(self, op: str, **fields: object) -> dict[str, object]:
        """Send one order and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10)}"
        answer: dict[str, object] = json.loads(line)
        return answer

    def stage(self, layout: StageLayout) -> Stage:
        """The stage as the client would register it."""
        exported = self.ask("export")
        memory = self.read()
        offsets = [0, layout.planes[-1].offset_bytes, self.pool_bytes - 16]
        return Stage(
            0,
            gpu_uuid(),
            CudaIpcPool(
                bytes.fromhex(str(exported["handle"])),
                int(str(exported["allocation_bytes"])),
                int(str(exported["offset_bytes"])),
                self.pool_bytes,
                bytes.fromhex(str(exported["event"])),
            ),
            layout,
            b"".join(offset.to_bytes(8, "little") for offset in offsets),
            b"".join(memory[offset : offset + 16] for offset in offsets),
        )

    def read(self) -> bytes:
        """All bytes of the pool, as the engine sees them."""
        self.ask("read")
        return self.file.read_bytes()

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class GpuRig:
    """One device with both lanes. `with` it."""

    def __init__(
        self,
        *,
        slice_bytes: int = 64 * MIB,
        kernels: str = "nvrtc",
        faults: dict[str, str] | None = None,
        shuttle_bytes: Sequence[int] = (256 * MIB,),
        path: CopyPath = CopyPath.AUTO,
    ) -> None:
        self.digester = Digester(KEY)
        self.runtime = GpuRuntime.load()
        self.cuda = CudaDevice.open(
            gpu_uuid(), self.digester, slice_bytes=slice_bytes, staging_bytes=slice_bytes, kernels=kernels, path=path
        )
        self.cuda.bind_thread()
        self.device: Device = FaultyDevice(self.cuda, FaultBook(faults)) if faults else self.cuda
        self.lanes = {kind: Lane(kind, self.device.copier(kind)) for kind in LaneKind}
        self.shuttles = [mmap.mmap(-1, size) for size in shuttle_bytes]
        for index, shuttle in enumerate(self.shuttles):
            self.device.add_shuttle(index, memoryview(shuttle))
        self._next = [GRANULE_BYTES] * len(self.shuttles)
        self.stream = self.runtime.stream_create(urgent=False)

    def own_pool(self, layout: StageLayout, data: np.ndarray[tuple[int], np.dtype[np.uint8]] | None) -> CudaPool:
        """A pool in memory of this process."""
        address = self.runtime.malloc(layout.end_bytes)
        memory = PoolMemory(address, layout.end_bytes, lambda: self.runtime.free(address))
        pool = CudaPool(self.runtime, Counts(), memory, layout, event=0, stream=self.stream)
        if data is not None:
            self.write(pool, data)
        return pool

    def write(self, pool: CudaPool, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Set every byte of a pool."""
        self.runtime.memcpy_async(pool.address, int(data.ctypes.data), len(data), HOST_TO_DEVICE, self.stream)
        self.runtime.stream_synchronize(self.stream)

    def read(self, pool: CudaPool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Every byte of a pool."""
        out = np.empty(pool.size_bytes, np.uint8)
        self.runtime.memcpy_async(int(out.ctypes.data), pool.address, len(out), DEVICE_TO_HOST, self.stream)
        self.runtime.stream_synchronize(self.stream)
        return out

    def places(self, layout: StageLayout, tokens: int, state_slot: int = -1) -> list[ChunkPlace]:
        """A place for every chunk, one extent each, filling the shuttles in order."""
        made: list[ChunkPlace] = []
        for span in layout.chunks(tokens, positions(tokens, state_slot)):
            size = granules_for(span.length_bytes) * GRANULE_BYTES
            index = next(n for n, at in enumerate(self._next) if at + size <= len(self.shuttles[n]))
            made.append(ChunkPlace(span.length_bytes, (Extent(index, self._next[index], size),)))
            self._next[index] += size
        return made

    def stored(self, place: ChunkPlace) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """What lies in a place of one extent."""
        extent = place.extents[0]
        return np.frombuffer(self.shuttles[extent.shuttle], np.uint8, place.length_bytes, extent.offset_bytes)

    def capture(
        self, pool: DevicePool, rows: Sequence[int], tokens: int, places: Sequence[ChunkPlace], state_slot: int = -1
    ) -> JobDone | JobFailed:
        """Run one capture job."""
        points = packed_positions(tokens, state_slot)
        packed = packed_rows(pool.layout, rows, state_slot)
        job = CaptureJob(1, 1, packed, tokens, pack_places(places), False, points)
        return self.run(pool, job)

    def restore(
        self,
        pool: DevicePool,
        rows: Sequence[int],
        tokens: int,
        places: Sequence[ChunkPlace],
        digests: bytes,
        *,
        algorithm: str = "mlh-128",
        state_slot: int = -1,
    ) -> JobDone | JobFailed:
        """Run one restore job."""
        points = packed_positions(tokens, state_slot)
        packed = packed_rows(pool.layout, rows, state_slot)
        job = RestoreJob(2, 1, packed, tokens, tokens, pack_places(places), digests, (algorithm,), False, points)
        return self.run(pool, job)

    def run(self, pool: DevicePool, job: CaptureJob | RestoreJob) -> JobDone | JobFailed:
        """Run one job on its lane."""
        self.device.bind_thread()
        try:
            plan = plan_job(self.device, pool, job)
        except JobRefused as exc:
            return JobFailed(job.job, exc.code, exc.message)
        return self.lanes[plan.lane].run(plan, NEVER)

    def close(self) -> None:
        """Give everything back."""
        self.runtime.stream_destroy(self.stream)
        self.device.close()

    def __enter__(self) -> "GpuRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
