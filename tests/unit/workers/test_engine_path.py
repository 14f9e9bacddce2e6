"""The copy engines' path on the fake GPU: which strips rows make, what is copied how, and what may go wrong."""

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from ipc.messages import CaptureJob, JobDone, JobFailed, RestoreJob
from shm.extent import ChunkPlace, Extent, pack_places
from shm.gpu_runtime import GpuRuntime
from shm.layout import Plane, StageLayout
from tests.support.layouts import packed_rows, stage_layout
from tests.support.shape_cases import Case
from tests.unit.workers.fake_gpu import AT_ONCE, fake_runtime
from tests.unit.workers.gpu_rig import CaseGpu, Gpu
from tests.unit.workers.rig import NEVER
from workers import cuda_engine
from workers.cuda_copier import LOCK_STEP_BYTES
from workers.cuda_engine import ENGINE_STRIP_BYTES, Piece, Strip, enqueue, strips_on_path
from workers.device import CopyPath, DevicePool, LaneKind, SliceWork
from workers.digest import MLH
from workers.jobs import capture_chunks
from workers.lanes import Lane
from workers.plans import plan_job
from workers.rowmap import RowMap

pytestmark = pytest.mark.usefixtures("clean")
GRANULE = 65536


class Layout:
    """As much of a pool as strips are made from."""

    def __init__(self, layout: StageLayout) -> None:
        self.layout = layout


def work_of(layout: StageLayout, rows: Sequence[int], tokens: int) -> SliceWork:
    packed = packed_rows(layout, rows, -1)
    maps = tuple(RowMap.parse(entry, group.rows, 0) for entry, group in zip(packed, layout.all_groups, strict=True))
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(tokens)]
    pool: DevicePool = Layout(layout)  # type: ignore[assignment]
    return SliceWork(pool, maps, tuple(capture_chunks(layout, tokens, (), places).copied))


def planes(count: int, row_bytes: int, rows: int, gap: int = 0) -> tuple[Plane, ...]:
    stride = row_bytes + gap
    return tuple(Plane(number * stride * rows, row_bytes, stride, rows) for number in range(count))


def test_a_run_in_planes_at_equal_distances_is_one_strip() -> None:
    layout = stage_layout(planes(3, 64, 40), None, 8)
    strips = strips_on_path(CopyPath.ENGINE, work_of(layout, range(10, 26), 16), 1000)
    assert strips == [
        [Strip(1000 + 10 * 64, 0, 8 * 64, 3, 64 * 40, 8 * 64)],
        [Strip(1000 + 18 * 64, 0, 8 * 64, 3, 64 * 40, 8 * 64)],
    ]


def test_rows_with_gaps_are_a_strip_a_plane_and_run() -> None:
    layout = stage_layout(planes(2, 64, 40, gap=32), None, 8)
    strips = strips_on_path(CopyPath.ENGINE, work_of(layout, [*range(5), 30, 31, 32], 8), 0)
    assert strips == [
        [
            Strip(0, 0, 64, 5, 96, 64),
            Strip(30 * 96, 5 * 64, 64, 3, 96, 64),
            Strip(96 * 40, 8 * 64, 64, 5, 96, 64),
            Strip(96 * 40 + 30 * 96, 13 * 64, 64, 3, 96, 64),
        ]
    ]


def test_kernels_move_what_is_not_whole_or_too_short() -> None:
    layout = stage_layout(planes(2, 64, 40), None, 8)
    whole, cut = work_of(layout, range(8), 8), work_of(layout, range(7), 7)
    assert strips_on_path(CopyPath.GATHER, whole, 0) is None
    assert strips_on_path(CopyPath.AUTO, whole, 0) is None
    paged = stage_layout((Plane(0, 256, 256, 10, 4, 64),), None, 8)
    assert strips_on_path(CopyPath.ENGINE, cut, 0) is not None
    assert strips_on_path(CopyPath.ENGINE, work_of(paged, range(2), 8), 0) is not None
    assert strips_on_path(CopyPath.ENGINE, work_of(paged, range(2), 7), 0) is None


@pytest.mark.parametrize(
    ("row_bytes", "taken"), [(ENGINE_STRIP_BYTES // 8, True), (ENGINE_STRIP_BYTES // 8 - 1, False)]
)
def test_the_size_of_strips_decides(row_bytes: int, taken: bool) -> None:
    layout = stage_layout(planes(1, row_bytes, 40), None, 8)
    assert (strips_on_path(CopyPath.AUTO, work_of(layout, range(8), 8), 0) is not None) is taken
    scattered = [*range(4), *range(20, 24)]
    assert strips_on_path(CopyPath.AUTO, work_of(layout, scattered, 8), 0) is None


@pytest.mark.parametrize("runtime", [AT_ONCE], indirect=True)
@pytest.mark.parametrize("seed", range(16))
def test_parts_of_strips_end_with_pieces(runtime: GpuRuntime, seed: int) -> None:
    """A chunk that lies in pieces of any size gets every byte, and gives it back; between lines nothing is touched."""
    random = np.random.default_rng(seed)
    width, height, pitch = int(random.integers(1, 40)), int(random.integers(1, 12)), int(random.integers(40, 70))
    # Half of the time other strips have parts of every line and what lies before.
    at, line_bytes = (int(random.integers(0, 30)), width + int(random.integers(0, 30))) if seed % 2 else (0, width)
    size = at + line_bytes * height
    device, host = runtime.malloc(1000), runtime.malloc(2000)
    rows = np.ctypeslib.as_array((ctypes.c_ubyte * 1000).from_address(device))
    chunk = np.ctypeslib.as_array((ctypes.c_ubyte * 2000).from_address(host))
    rows[:] = random.integers(1, 256, 1000)
    chunk[:] = 0
    cuts = sorted({0, size, *random.integers(0, size + 1, 3).tolist()})
    # Pieces lie apart: what crosses an end shows.
    pieces = [
        Piece(low, high, host + low + 100 * number) for number, (low, high) in enumerate(itertools.pairwise(cuts))
    ]
    strip = Strip(device, at, width, height, pitch, line_bytes)
    enqueue(runtime, [strip], pieces, 4, 1, gather=True)
    lines = np.lib.stride_tricks.as_strided(rows, (height, width), (pitch, 1)).copy()
    wanted = np.zeros(size, np.uint8)
    wanted[at:].reshape(height, line_bytes)[:, :width] = lines
    got = np.concatenate([chunk[p.address - host :][: p.end - p.start] for p in pieces])
    assert np.array_equal(got, wanted)
    assert int(np.count_nonzero(chunk)) == lines.size
    before = rows.copy()
    rows[:] = 0
    enqueue(runtime, [strip], pieces, 4, 1, gather=False)
    expected = np.zeros_like(before)
    np.lib.stride_tricks.as_strided(expected, (height, width), (pitch, 1))[:] = lines
    assert np.array_equal(rows, expected)
    runtime.free(device)
    runtime.free(host)


def scattered_layout() -> StageLayout:
    """Planes of two sizes, so that every run is a strip of its own in each."""
    return stage_layout((Plane(0, 64, 64, 64), Plane(64 * 64, 32, 32, 64)), None, 16)


@pytest.mark.parametrize(
    ("version", "driver", "batched"),
    [(12000, 13000, False), (12080, 12080, True), (13000, 13000, True), (13000, 12040, False)],
)
def test_many_short_strips_are_one_call_where_there_is_one(
    runtime: GpuRuntime, library: ctypes.CDLL, version: int, driver: int, batched: bool
) -> None:
    library.be_version(version, driver)
    try:
        made = fake_runtime(library)
        assert made.copies_in_batches is batched
        gpu = Gpu(made, scattered_layout(), path=CopyPath.ENGINE)
        gpu.cuda._runtime = made  # the fixture's was made under another version
        lanes = {kind: Lane(kind, gpu.cuda.copier(kind)) for kind in LaneKind}
        pool = gpu.cuda.open_pool(gpu.stage(), -1)
        rows = np.random.default_rng(1).permutation(64)[:32].tolist()
        places = gpu.places(32)
        before_copies = library.batched_copies()
        job = CaptureJob(1, 1, packed_rows(gpu.layout, rows), 32, pack_places(places), False)
        done = lanes[LaneKind.CAPTURE].run(plan_job(gpu.cuda, pool, job), NEVER)
        assert isinstance(done, JobDone), done
        assert (library.batched_copies() > before_copies) is batched
        before = gpu.memory.copy()
        gpu.memory[:] = 0
        back = RestoreJob(2, 1, job.rows, 32, 32, pack_places(places), done.digests, (MLH,), False)
        assert isinstance(lanes[LaneKind.RESTORE].run(plan_job(gpu.cuda, pool, back), NEVER), JobDone)
        for plane in gpu.layout.planes:
            for row in rows:
                start = plane.offset_bytes + row * plane.row_stride_bytes
                assert np.array_equal(gpu.memory[start:][: plane.row_bytes], before[start:][: plane.row_bytes])
        pool.close()
        gpu.close()
    finally:
        library.be_version(13000, 13000)


def test_a_strip_never_crosses_two_registrations(runtime: GpuRuntime, library: ctypes.CDLL) -> None:
    layout = stage_layout(planes(4, 16 * 1024, 64), None, 32)
    gpu = Gpu(runtime, layout, slice_bytes=1 << 22, granules=LOCK_STEP_BYTES // GRANULE + 64, path=CopyPath.ENGINE)
    lane = Lane(LaneKind.CAPTURE, gpu.cuda.copier(LaneKind.CAPTURE))
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    start = LOCK_STEP_BYTES - 10 * GRANULE
    place = ChunkPlace(32 * 64 * 1024, (Extent(0, start, 32 * GRANULE),))
    copies = library.two_dimensional_copies()
    job = CaptureJob(1, 1, packed_rows(layout, range(32)), 32, pack_places([place]), False)
    done = lane.run(plan_job(gpu.cuda, pool, job), NEVER)
    assert isinstance(done, JobDone), done
    assert library.two_dimensional_copies() > copies
    expected = gpu.memory.reshape(4, 64, -1)[:, :32].tobytes()
    assert gpu.stored(place) == expected
    pool.close()
    gpu.close()


def test_rows_that_are_scattered_later_on_take_no_more_device_memory(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk goes by the copy engines, so slices are cut larger than staging; the others have short strips."""
    row_bytes, tokens = 32 * 1024, 256
    monkeypatch.setattr(cuda_engine, "ENGINE_STRIP_BYTES", 4 * row_bytes)
    layout = stage_layout(planes(1, row_bytes, tokens), None, 4)
    slice_bytes = 4 * row_bytes
    gpu = Gpu(runtime, layout, slice_bytes=slice_bytes, direct_slice_bytes=16 * slice_bytes)
    lane = Lane(LaneKind.CAPTURE, gpu.cuda.copier(LaneKind.CAPTURE))
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    rows = [*range(4), *np.random.default_rng(1).permutation(np.arange(4, tokens)).tolist()]
    places = gpu.places(tokens)
    plan = plan_job(gpu.cuda, pool, CaptureJob(1, 1, packed_rows(layout, rows), tokens, pack_places(places), False))
    assert max(count for _, count in plan.slices) * slice_bytes > slice_bytes + (1 << 20)
    before = gpu.cuda.resources()
    assert isinstance(lane.run(plan, NEVER), JobDone)
    assert gpu.cuda.resources() == before
    stored = b"".join(gpu.stored(place) for place in places)
    assert stored == gpu.memory.reshape(tokens, row_bytes)[rows].tobytes()
    pool.close()
    gpu.close()


@pytest.mark.parametrize("path", list(CopyPath))
def test_a_source_that_changes_under_its_copy_is_noticed(runtime: GpuRuntime, path: CopyPath) -> None:
    layout = stage_layout(planes(2, 64, 64), None, 4)
    rows = tuple(range(24))
    case = Case(layout, layout.end_bytes, 24, (), (rows,), (tuple(range(24, 48)),), (24,))
    with CaseGpu(runtime, case, 1, {"capture.flip_source": "2"}, path=path) as gpu:
        places = [gpu.place(span.length_bytes) for span in case.spans]
        failed = gpu.run(case.capture_job(places))
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk) == ("source_changed", 1)
        assert isinstance(gpu.run(case.capture_job(places)), JobDone)


@pytest.mark.parametrize("when", ["begun", "completed"])
@pytest.mark.parametrize("path", [CopyPath.GATHER, CopyPath.ENGINE])
def test_whenever_a_source_changes_what_is_stored_has_the_digests_that_are_told(
    runtime: GpuRuntime, path: CopyPath, when: str
) -> None:
    """The copy lies between the two digests, however late or early each of the three is done."""
    gpu = Gpu(runtime, stage_layout(planes(2, 64, 64), None, 4), path=path)
    copier = gpu.cuda.copier(LaneKind.CAPTURE)
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    places = gpu.places(8)
    job = CaptureJob(1, 1, packed_rows(gpu.layout, range(8)), 8, pack_places(places), False)
    copier.begin_capture(0, plan_job(gpu.cuda, pool, job).slice_work(0))
    if when == "begun":
        gpu.memory ^= 1
    digests = copier.complete_capture(0)
    if when == "completed":
        gpu.memory ^= 1
    copier.drain()
    stored = [np.frombuffer(gpu.stored(place), np.uint8) for place in places]
    assert digests == [gpu.digester.digest(MLH, chunk) for chunk in stored]
    pool.close()
    gpu.close()


@pytest.mark.parametrize("path", [CopyPath.GATHER, CopyPath.ENGINE])
def test_a_damaged_chunk_reaches_no_row(runtime: GpuRuntime, path: CopyPath) -> None:
    layout = stage_layout(planes(2, 64, 64), None, 4)
    rows = tuple(range(24))
    case = Case(layout, layout.end_bytes, 24, (), (rows,), (rows,), (24,))
    with CaseGpu(runtime, case, 1, path=path) as gpu:
        places = [gpu.place(span.length_bytes) for span in case.spans]
        done = gpu.run(case.capture_job(places))
        assert isinstance(done, JobDone)
        gpu.memory[:] = 0
        gpu.shuttle[places[0].extents[0].offset_bytes + 5] ^= 1
        failed = gpu.run(case.restore_job(places, done.digests, 24, MLH))
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.rows_undefined) == ("damaged", ())
        assert not gpu.memory.any()


@pytest.mark.parametrize("path", [CopyPath.GATHER, CopyPath.ENGINE])
def test_exact_times_come_from_the_device(runtime: GpuRuntime, path: CopyPath) -> None:
    layout = stage_layout(planes(2, 64, 64), None, 4)
    rows = tuple(range(24))
    case = Case(layout, layout.end_bytes, 24, (), (rows,), (tuple(range(24, 48)),), (24,))
    with CaseGpu(runtime, case, 1, path=path) as gpu:
        for lane in gpu.lanes.values():
            lane.measure(exact=True)
        places = [gpu.place(span.length_bytes) for span in case.spans]
        slices = len(gpu.plan(case.capture_job(places)).slices)
        done = gpu.run(case.capture_job(places))
        assert isinstance(done, JobDone)
        # The fake's clock says a millisecond for everything.
        gathers = slices if path is CopyPath.GATHER else 0
        found = [done.digest_s, done.verify_s, done.copy_s, done.gather_s]
        assert found == pytest.approx([2e-3 * slices, 1e-3 * slices, 1e-3 * (slices + gathers), 1e-3 * gathers])
        back = gpu.run(case.restore_job(places, done.digests, 24, MLH))
        assert isinstance(back, JobDone)
        assert back.verify_s == pytest.approx(back.digest_s)
        assert back.gather_s == pytest.approx(back.copy_s / 2)
        before = gpu.cuda.resources()
        assert isinstance(gpu.run(case.capture_job(places)), JobDone)
        assert gpu.cuda.resources() == before
