"""The GPU device over a runtime of host memory: tables, copies, pools, counts."""

import ctypes
import resource

import numpy as np
import pytest

from ipc.messages import CaptureJob, CudaIpcPool, JobDone, JobFailed, RestoreJob
from shm.extent import GRANULE_BYTES, pack_places
from shm.gpu_runtime import GpuError, GpuRuntime
from shm.layout import Plane, StageLayout
from tests.support.layouts import packed_positions, packed_rows, positions, stage_layout
from tests.support.shape_cases import Case
from tests.unit.workers.fake_gpu import AT_ONCE, UUID
from tests.unit.workers.gpu_rig import CaseGpu, Gpu
from tests.unit.workers.rig import KEY, NEVER, model_chunk, paged_layout, slot_layout, written_bytes
from workers.cuda_copier import LOCK_STEP_BYTES
from workers.cuda_device import CudaDevice
from workers.cuda_memory import Counts
from workers.cuda_pool import AllocationBook
from workers.device import DeviceFailure, LaneKind, PoolRefused
from workers.digest import MLH, XXH3, Bytes, Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice
from workers.lanes import Lane
from workers.plans import plan_job


@pytest.mark.parametrize(
    ("layout", "tokens", "slot"),
    [(slot_layout(), 64, 2), (slot_layout(row_bytes=52), 50, -1), (paged_layout(), 37, -1), (paged_layout(), 192, -1)],
)
@pytest.mark.usefixtures("clean")
def test_capture_and_restore(runtime: GpuRuntime, layout: StageLayout, tokens: int, slot: int) -> None:
    gpu = Gpu(runtime, layout)
    gpu.cuda.self_test()
    lanes = {kind: Lane(kind, gpu.cuda.copier(kind)) for kind in LaneKind}
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    rows = list(range(layout.groups[0].rows_for(tokens)))[::-1]
    packed, points = packed_rows(layout, rows, slot), packed_positions(tokens, slot)
    before = gpu.memory.tobytes()
    places = gpu.places(tokens, slot)
    job = CaptureJob(1, 1, packed, tokens, pack_places(places), False, points)
    done = lanes[LaneKind.CAPTURE].run(plan_job(gpu.cuda, pool, job), NEVER)
    assert isinstance(done, JobDone), done
    spans = layout.chunks(tokens, positions(tokens, slot))
    for number, (span, place) in enumerate(zip(spans, places, strict=True)):
        chunk = model_chunk(before, layout, rows, span, slot)
        at = place.extents[0].offset_bytes
        assert gpu.shuttle[at : at + len(chunk)].tobytes() == chunk
        digest = gpu.digester.digest(MLH, np.frombuffer(chunk, np.uint8))
        assert done.digests[16 * number : 16 * number + 16] == digest
    resources = gpu.cuda.resources()
    restore = RestoreJob(2, 1, packed, tokens, tokens, pack_places(places), done.digests, (MLH,), False, points)
    for _ in range(3):
        gpu.memory[:] = 0
        report = lanes[LaneKind.RESTORE].run(plan_job(gpu.cuda, pool, restore), NEVER)
        assert isinstance(report, JobDone), report
        touched = written_bytes(layout, rows, tokens)
        assert all(gpu.memory[n] == before[n] for n in touched)
        assert isinstance(lanes[LaneKind.CAPTURE].run(plan_job(gpu.cuda, pool, job), NEVER), JobDone)
    assert gpu.cuda.resources() == resources
    by_cpu = b"".join(
        gpu.digester.digest(XXH3, gpu.shuttle[p.extents[0].offset_bytes :][: p.length_bytes]) for p in places
    )
    other = RestoreJob(3, 1, packed, tokens, tokens, pack_places(places), by_cpu, (XXH3,), False, points)
    assert isinstance(lanes[LaneKind.RESTORE].run(plan_job(gpu.cuda, pool, other), NEVER), JobDone)
    gpu.shuttle[places[-1].extents[0].offset_bytes] ^= 4
    gpu.memory[:] = 7
    for attempt, algorithm in ((restore, MLH), (other, XXH3)):
        failed = lanes[LaneKind.RESTORE].run(plan_job(gpu.cuda, pool, attempt), NEVER)
        assert isinstance(failed, JobFailed), algorithm
        assert (failed.code, failed.chunk) == ("damaged", len(places) - 1)
    pool.close()
    assert gpu.cuda.resources()["mappings"] == 0
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_a_changing_source_fails_the_capture(runtime: GpuRuntime) -> None:
    gpu = Gpu(runtime, slot_layout())
    device = FaultyDevice(gpu.cuda, FaultBook({"flip_source": "1"}))
    lane = Lane(LaneKind.CAPTURE, device.copier(LaneKind.CAPTURE))
    pool = device.open_pool(gpu.stage(), -1)
    job = CaptureJob(1, 1, packed_rows(gpu.layout, range(64)), 64, pack_places(gpu.places(64)), False)
    failed = lane.run(plan_job(device, pool, job), NEVER)
    assert isinstance(failed, JobFailed)
    assert (failed.code, failed.chunk) == ("source_changed", 0)
    pool.close()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_a_restore_can_be_killed_in_its_middle(runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(runtime, slot_layout(), slice_bytes=8192)
    device = FaultyDevice(gpu.cuda, FaultBook({"restore.copy_kill": "2"}))
    lanes = {kind: Lane(kind, device.copier(kind)) for kind in LaneKind}
    pool = device.open_pool(gpu.stage(), -1)
    rows, places = packed_rows(gpu.layout, range(64)), pack_places(gpu.places(64))
    done = lanes[LaneKind.CAPTURE].run(plan_job(device, pool, CaptureJob(1, 1, rows, 64, places, False)), NEVER)
    assert isinstance(done, JobDone)
    before = gpu.memory.copy()
    gpu.memory[:] = 0
    at_death: list[Bytes] = []
    monkeypatch.setattr("os.kill", lambda _pid, _number: at_death.append(gpu.memory.copy()))
    restore = RestoreJob(2, 1, rows, 64, 64, places, done.digests, (MLH,), False)
    plan = plan_job(device, pool, restore)
    assert isinstance(lanes[LaneKind.RESTORE].run(plan, NEVER), JobDone)
    (memory,) = at_death
    first, count = plan.slices[0]
    rows_before = sum(chunk.span.row_count for chunk in plan.chunks[first : first + count])
    assert 0 < rows_before < 64
    plane = gpu.layout.groups[0].planes[0]
    for row in range(64):
        start = plane.offset_bytes + row * plane.row_stride_bytes
        expected = before[start : start + plane.row_bytes] if row < rows_before else bytes(plane.row_bytes)
        assert memory[start : start + plane.row_bytes].tobytes() == bytes(expected)
    pool.close()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_device_errors_become_reports(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    lane = Lane(LaneKind.CAPTURE, gpu.cuda.copier(LaneKind.CAPTURE))
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    job = CaptureJob(1, 1, packed_rows(gpu.layout, range(64)), 64, pack_places(gpu.places(64)), False)
    plan = plan_job(gpu.cuda, pool, job)
    for number, code, sticky in ((2, "out_of_memory", False), (1, "device_error", False), (700, "device_error", True)):
        library.fail_next(number)
        failed = lane.run(plan, NEVER)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.sticky) == (code, sticky)
        assert str(number) in failed.message
    assert isinstance(lane.run(plan, NEVER), JobDone)
    pool.close()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_pools_share_an_allocation_and_bad_ones_are_refused(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    first, second = (gpu.cuda.open_pool(gpu.stage(), -1) for _ in range(2))
    assert (gpu.cuda.resources()["pools"], gpu.cuda.resources()["mappings"]) == (2, 1)
    first.close()
    assert first is not second
    assert gpu.cuda.resources()["mappings"] == 1
    second.close()
    second.close()
    assert gpu.cuda.resources()["mappings"] == 0
    for changes, code in (
        ({"handle": bytes(64)}, "unshareable"),
        ({"handle": b"short"}, "unshareable"),
        ({"offset_bytes": 1024}, "probe_failed"),
        ({"offset_bytes": 8192}, "bad_layout"),
        ({"pool_bytes": 10}, "bad_layout"),
        ({"allocation_bytes": 1 << 30}, "unshareable"),
    ):
        with pytest.raises(PoolRefused) as refused:
            gpu.cuda.open_pool(gpu.stage(**changes), -1)
        assert refused.value.code == code, changes
    event = runtime.event_create(interprocess=True)
    pool = gpu.cuda.open_pool(gpu.stage(event_handle=runtime.ipc_event_handle(event)), -1)
    library.event_waits(2)
    assert [pool.event_reached() for _ in range(3)] == [False, False, True]
    pool.close()
    runtime.event_destroy(event)
    assert gpu.cuda.resources()["mappings"] == 0
    gpu.close()


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.usefixtures("clean")
def test_an_open_allocation_is_no_larger_for_those_who_come_later(
    runtime: GpuRuntime, library: ctypes.CDLL, hidden: bool
) -> None:
    gpu = Gpu(runtime, slot_layout())
    size = gpu.layout.end_bytes
    library.hide_ranges(hidden)
    try:
        first = gpu.cuda.open_pool(gpu.stage(), -1)
        for changes, code in (
            ({"allocation_bytes": 1 << 30}, "unshareable"),
            ({"allocation_bytes": 1 << 30, "offset_bytes": 1 << 20}, "unshareable"),
            ({"allocation_bytes": size + 4097}, "unshareable"),
            ({"offset_bytes": 4097}, "bad_layout"),
        ):
            with pytest.raises(PoolRefused) as refused:
                gpu.cuda.open_pool(gpu.stage(**changes), -1)
            assert refused.value.code == code, changes
        # Those that were refused have not become users of it.
        assert gpu.cuda.resources()["mappings"] == 1
        first.close()
        assert gpu.cuda.resources()["mappings"] == 0
    finally:
        library.hide_ranges(0)
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_a_pool_outside_its_allocation_is_refused_whatever_was_checked_before(runtime: GpuRuntime) -> None:
    gpu = Gpu(runtime, slot_layout())
    book = AllocationBook(runtime, Counts())
    handle = runtime.ipc_mem_handle(gpu.allocation)
    size = gpu.layout.end_bytes + 4096
    assert book.open(CudaIpcPool(handle, size, 0, size)) == gpu.allocation
    for offset, length in ((1, size), (-1, 1), (size, 1)):
        with pytest.raises(PoolRefused) as refused:
            book.open(CudaIpcPool(handle, size, offset, length))
        assert refused.value.code == "bad_layout"
    book.release(handle)
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_a_plane_table_that_cannot_be_copied_is_freed(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    before = gpu.cuda.device_bytes, gpu.cuda.resources()
    library.fail_next(1)
    with pytest.raises(PoolRefused, match="error 1"):
        gpu.cuda.open_pool(gpu.stage(), -1)
    assert (gpu.cuda.device_bytes, gpu.cuda.resources()) == before
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_every_stream_is_waited_for_although_one_fails(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    for kind in LaneKind:
        copier = gpu.cuda.copier(kind)
        before = library.stream_waits()
        library.fail_next_sync(1)
        with pytest.raises(DeviceFailure, match="error 1"):
            copier.drain()
        assert library.stream_waits() - before == 3
        copier.drain()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_a_device_that_cannot_be_waited_for_is_lost(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    lane = Lane(LaneKind.CAPTURE, gpu.cuda.copier(LaneKind.CAPTURE))
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    job = CaptureJob(1, 1, packed_rows(gpu.layout, range(64)), 64, pack_places(gpu.places(64)), False)
    library.fail_next(1)
    library.fail_next_sync(1)
    failed = lane.run(plan_job(gpu.cuda, pool, job), NEVER)
    assert isinstance(failed, JobFailed)
    assert (failed.code, failed.sticky) == ("device_error", True)
    pool.close()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_copies_never_cross_two_registrations_and_chunks_outgrow_staging(runtime: GpuRuntime) -> None:
    row_bytes = 128 * 1024
    layout = stage_layout((Plane(0, row_bytes, row_bytes, 64),), None, 32)
    gpu = Gpu(runtime, layout, slice_bytes=1 << 20, granules=LOCK_STEP_BYTES // GRANULE_BYTES + 128)
    lanes = {kind: Lane(kind, gpu.cuda.copier(kind)) for kind in LaneKind}
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    gpu.granule = LOCK_STEP_BYTES // GRANULE_BYTES - 10
    places = gpu.places(64)
    before = gpu.memory.tobytes()
    job = CaptureJob(1, 1, packed_rows(gpu.layout, range(64)), 64, pack_places(places), False)
    done = lanes[LaneKind.CAPTURE].run(plan_job(gpu.cuda, pool, job), NEVER)
    assert isinstance(done, JobDone), done
    gpu.memory[:] = 0
    restore = RestoreJob(2, 1, job.rows, 64, 64, pack_places(places), done.digests, (MLH,), False)
    assert isinstance(lanes[LaneKind.RESTORE].run(plan_job(gpu.cuda, pool, restore), NEVER), JobDone)
    assert gpu.memory.tobytes() == before
    pool.close()
    gpu.close()


@pytest.mark.usefixtures("clean")
def test_what_cannot_be_page_locked_is_an_error(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    gpu = Gpu(runtime, slot_layout())
    library.fail_next(2)
    _, hard = before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        with pytest.raises(DeviceFailure, match=r"page-locking stopped after 0 of 65536 bytes: .* is 65536 bytes"):
            gpu.cuda.add_shuttle(1, memoryview(bytearray(GRANULE_BYTES)))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert gpu.cuda.resources()["shuttles"] == 1
    gpu.close()


def test_no_such_gpu(runtime: GpuRuntime) -> None:
    with pytest.raises(DeviceFailure, match="no GPU GPU-ff"):
        CudaDevice.open("GPU-ff", Digester(KEY), slice_bytes=1, staging_bytes=1)
    with pytest.raises(GpuError, match="error 101"):
        runtime.set_device(1)


@pytest.mark.parametrize("runtime", [AT_ONCE], indirect=True)
def test_a_start_for_which_device_memory_is_lacking_says_how_much(runtime: GpuRuntime) -> None:
    staging_bytes = 8 << 30  # more than the fake has
    assert runtime.memory_info()[0] == 1
    device = CudaDevice.open(UUID, Digester(KEY), slice_bytes=1 << 20, staging_bytes=staging_bytes)
    with pytest.raises(DeviceFailure) as caught:
        device.copier(LaneKind.CAPTURE)
    assert caught.value.code == "out_of_memory"
    assert caught.value.free_bytes == 1
    # Two slots a lane, and their tables, less what was allocated before.
    assert 4 * staging_bytes - device.device_bytes < caught.value.wanted_bytes < 4 * staging_bytes + (64 << 20)
    device.close()


@pytest.mark.parametrize("row_bytes", [64, 52, 51])
@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_copy_reads_each_source_again_behind_its_target(
    runtime: GpuRuntime, library: ctypes.CDLL, row_bytes: int, read: int
) -> None:
    """In vectors of 16, 4 and 1 bytes; a change that comes later than that is after the copy."""
    layout = slot_layout(planes=2, row_bytes=row_bytes)
    rows, targets = tuple(range(32)), tuple(range(32, 64))
    case = Case(layout, layout.end_bytes, 32, (), (rows, ()), (targets, ()), (32,))
    with CaseGpu(runtime, case, 1) as gpu:
        plane = gpu.layout.groups[0].planes[1]
        at = plane.offset_bytes + 20 * plane.row_stride_bytes + row_bytes - 1
        to = at + 32 * plane.row_stride_bytes
        before = int(gpu.memory[at])
        library.change_at_read(ctypes.c_void_p(gpu.allocation + gpu.offset + at), ctypes.c_long(read))
        report = gpu.run(case.copy_job())
        library.change_at_read(None, ctypes.c_long(0))
        if read == 2:
            assert isinstance(report, JobFailed)
            assert (report.code, report.chunk) == ("source_changed", 1)
            # Device memory is written at once, so the target's rows are undefined.
            assert any(report.rows_undefined)
        else:
            assert isinstance(report, JobDone), report
            assert gpu.memory[to] == (before ^ 0xFF if read == 1 else before)
