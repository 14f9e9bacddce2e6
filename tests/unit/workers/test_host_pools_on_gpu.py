"""A GPU's worker serves pools in host memory with the CPU, in the same lanes and shuttles (over the fake GPU)."""

import ctypes
import mmap
import os
import shutil
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from ipc.messages import CaptureJob, DigestJob, JobDone, JobFailed, MemfdPool, RestoreJob, Stage
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places
from shm.gpu_runtime import GpuRuntime
from shm.layout import Plane
from shm.memfd import create_pool
from shm.rows import pack_numbers, pack_rows
from tests.support.layouts import stage_layout
from tests.unit.workers.fake_gpu import UUID, build_fake_gpu, fake_runtime
from tests.unit.workers.rig import KEY, NEVER
from workers.cpu_device import CpuDevice
from workers.cuda_device import CudaDevice
from workers.cuda_pool import CudaPool
from workers.device import LaneKind, PoolRefused
from workers.digest import XXH3, Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice
from workers.lanes import Lane
from workers.plans import plan_job

COMPILER = shutil.which("g++") or shutil.which("c++") or ""
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
ROWS = 1024
LAYOUT = stage_layout((Plane(0, 4096, 4096, ROWS),), None, 256)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_fake_gpu(tmp_path_factory.mktemp("fake"), COMPILER)


class Host:
    """The fake GPU's device with one shuttle, and an engine's memfd."""

    def __init__(self) -> None:
        self.digester = Digester(KEY)
        self.cuda = CudaDevice.open(UUID, self.digester, slice_bytes=1 << 26, staging_bytes=1 << 20)
        self.descriptor = create_pool("test-pool", LAYOUT.end_bytes)
        self.mapping = mmap.mmap(self.descriptor, LAYOUT.end_bytes)
        self.memory = np.frombuffer(self.mapping, np.uint8)
        self.memory[:] = np.random.default_rng(3).integers(0, 256, LAYOUT.end_bytes, dtype=np.uint8)
        self.shuttle = np.zeros(80 * GRANULE_BYTES, np.uint8)
        self.cuda.add_shuttle(0, memoryview(self.shuttle.data))

    def stage(self, probe: bytes | None = None) -> Stage:
        read = self.memory[:16].tobytes() if probe is None else probe
        return Stage(0, UUID, MemfdPool(1, LAYOUT.end_bytes), LAYOUT, bytes(8), read)

    def places(self, rows: int) -> list[ChunkPlace]:
        made: list[ChunkPlace] = []
        at = 1
        for span in LAYOUT.chunks(rows):
            count = granules_for(span.length_bytes)
            made.append(ChunkPlace(span.length_bytes, (Extent(0, at * GRANULE_BYTES, count * GRANULE_BYTES),)))
            at += count
        return made

    def close(self) -> None:
        self.cuda.close()
        del self.memory
        self.mapping.close()
        os.close(self.descriptor)


@pytest.fixture
def host(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = fake_runtime(library)
    monkeypatch.setattr(GpuRuntime, "load", classmethod(lambda _cls: made))
    monkeypatch.setattr("workers.cuda_device.compiled", lambda _kind, _architecture: b"image")
    before = library.live_handles(), library.live_allocations(), library.live_locks()
    rig = Host()
    yield rig
    rig.close()
    assert (library.live_handles(), library.live_allocations(), library.live_locks()) == before


def test_capture_and_restore_in_host_memory(host: Host) -> None:
    lanes = {kind: Lane(kind, host.cuda.copier(kind)) for kind in LaneKind}
    pool = host.cuda.open_pool(host.stage(), host.descriptor)
    assert not isinstance(pool, CudaPool)
    rows = pack_rows([(700, 300), (3, 200)])
    order = [*range(700, 1000), *range(3, 203)]
    places = host.places(500)
    before = host.memory.reshape(ROWS, 4096).copy()
    plan = plan_job(host.cuda, pool, CaptureJob(1, 1, (rows,), 500, pack_places(places), False))
    assert len(plan.slices) == 2  # of the processor's size, not the GPU's
    resources = host.cuda.resources()
    done = lanes[LaneKind.CAPTURE].run(plan, NEVER)
    assert isinstance(done, JobDone), done
    assert done.algorithm == XXH3
    for number, (span, place) in enumerate(zip(LAYOUT.chunks(500), places, strict=True)):
        wanted = before[order[span.first_row : span.first_row + span.row_count]].reshape(-1)
        at = place.extents[0].offset_bytes
        assert np.array_equal(host.shuttle[at : at + len(wanted)], wanted)
        assert done.digests[16 * number : 16 * number + 16] == host.digester.digest(XXH3, wanted)
    host.memory[:] = 0
    restore = RestoreJob(2, 1, (rows,), 500, 500, pack_places(places), done.digests, (XXH3,), False)
    report = lanes[LaneKind.RESTORE].run(plan_job(host.cuda, pool, restore), NEVER)
    assert isinstance(report, JobDone), report
    assert report.algorithm == ""
    now = host.memory.reshape(ROWS, 4096)
    assert np.array_equal(now[order], before[order])
    assert not np.delete(now, order, axis=0).any()
    host.shuttle[places[0].extents[0].offset_bytes + 5] ^= 1
    host.memory[:] = 7
    failed = lanes[LaneKind.RESTORE].run(plan_job(host.cuda, pool, restore), NEVER)
    assert isinstance(failed, JobFailed)
    assert (failed.code, failed.chunk, failed.rows_undefined) == ("damaged", 0, ())
    assert (host.memory == 7).all()
    assert host.cuda.resources() == resources
    assert resources["pools"] == resources["mappings"] == 1
    del report, now
    pool.close()
    assert host.cuda.resources()["pools"] == host.cuda.resources()["mappings"] == 0


def test_digests_in_host_memory_say_how_they_were_made(host: Host) -> None:
    lane = Lane(LaneKind.CAPTURE, host.cuda.copier(LaneKind.CAPTURE))
    pool = host.cuda.open_pool(host.stage(), host.descriptor)
    rows = pack_rows([(700, 300), (3, 200)])
    order = [*range(700, 1000), *range(3, 203)]
    before = host.memory.reshape(ROWS, 4096)
    wanted = [host.digester.digest(XXH3, before[order[256:]].reshape(-1))]
    for numbers, digests in (((1,), wanted), ((), [])):
        job = DigestJob(1, 1, (rows,), 500, pack_numbers(numbers), False)
        done = lane.run(plan_job(host.cuda, pool, job), NEVER)
        assert isinstance(done, JobDone), done
        assert (done.algorithm, done.digests) == (XXH3, b"".join(digests))
    del before
    pool.close()


def test_a_source_that_changes_fails_the_capture(host: Host) -> None:
    device = FaultyDevice(host.cuda, FaultBook({"capture.flip_source": "1"}))
    lane = Lane(LaneKind.CAPTURE, device.copier(LaneKind.CAPTURE))
    pool = device.open_pool(host.stage(), host.descriptor)
    job = CaptureJob(1, 1, (pack_rows([(0, 10)]),), 10, pack_places(host.places(10)), False)
    failed = lane.run(plan_job(device, pool, job), NEVER)
    assert isinstance(failed, JobFailed)
    assert failed.code == "source_changed"
    assert isinstance(lane.run(plan_job(device, pool, job), NEVER), JobDone)
    pool.close()


def test_nothing_of_a_job_that_failed_between_two_slices_is_kept(host: Host) -> None:
    lanes = {kind: Lane(kind, host.cuda.copier(kind)) for kind in LaneKind}
    pool = host.cuda.open_pool(host.stage(), host.descriptor)
    rows, places = pack_rows([(0, 500)]), pack_places(host.places(500))
    done = lanes[LaneKind.CAPTURE].run(plan_job(host.cuda, pool, CaptureJob(1, 1, (rows,), 500, places, False)), NEVER)
    assert isinstance(done, JobDone), done
    host.shuttle[GRANULE_BYTES] ^= 1
    plan = plan_job(host.cuda, pool, RestoreJob(2, 1, (rows,), 500, 500, places, done.digests, (XXH3,), False))
    assert len(plan.slices) == 2  # the second one has begun when the first one is found damaged
    kept = weakref.ref(plan.rows[0])
    assert isinstance(lanes[LaneKind.RESTORE].run(plan, NEVER), JobFailed)
    del plan
    assert kept() is None
    pool.close()


def test_bad_host_pools_are_refused_and_leave_nothing(host: Host) -> None:
    read_end, write_end = os.pipe()
    cases = [
        (host.stage(bytes(16)), host.descriptor, "probe_failed"),
        (host.stage(), read_end, "unshareable"),
    ]
    for stage, descriptor, code in cases:
        with pytest.raises(PoolRefused) as refused:
            host.cuda.open_pool(stage, descriptor)
        assert refused.value.code == code
        assert host.cuda.resources()["pools"] == host.cuda.resources()["mappings"] == 0
    os.close(read_end)
    os.close(write_end)


def test_a_pool_whose_chunks_would_not_fit_into_memory_is_refused(host: Host) -> None:
    """A chunk is staged as a whole, and a pool of any size may be sparse."""
    layout = stage_layout((Plane(0, 2**23, 2**23, ROWS),), None, 256)
    stage = Stage(0, UUID, MemfdPool(1, layout.end_bytes), layout, b"", b"")
    on_cpu = CpuDevice(host.digester, slice_bytes=1 << 20, link_bytes_per_s=0.0)
    descriptor = create_pool("test-sparse", layout.end_bytes)
    for device in (host.cuda, on_cpu):
        with pytest.raises(PoolRefused, match="a chunk has 256 rows of 8388608 bytes") as refused:
            device.open_pool(stage, descriptor)
        assert refused.value.code == "bad_layout"
        assert device.resources()["pools"] == device.resources()["mappings"] == 0
    os.close(descriptor)


def test_looks_at_host_memory_are_no_longer_than_what_is_copied(host: Host) -> None:
    """A CPU reads them: slices that a GPU has read at once would hold up the lane."""
    pool = host.cuda.open_pool(host.stage(), host.descriptor)
    rows = (pack_rows([(0, ROWS)]),)
    plan = plan_job(host.cuda, pool, CaptureJob(1, 1, rows, ROWS, b"", False, hinted=pack_numbers(range(4))))
    assert plan.look is not None
    assert plan.look.sizes.most_bytes == host.cuda.slice_bytes
    assert len(plan.look.slices) == 4
    pool.close()
