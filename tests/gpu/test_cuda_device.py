"""The GPU device on a real GPU: kernels, pools of another process, damage, events, counts and speed."""

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from ipc.messages import JobDone, JobFailed  # noqa: E402
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places  # noqa: E402
from shm.gpu_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, GpuError, GpuRuntime  # noqa: E402
from shm.layout import Plane, StageLayout  # noqa: E402
from tests.gpu.rig import MIB, EngineProcess, GpuRig, gpu_uuid  # noqa: E402
from tests.support.layouts import packed_rows, positions, stage_layout  # noqa: E402
from tests.support.wait import wait_until  # noqa: E402
from workers.cuda_memory import Counts, SlotMemory  # noqa: E402
from workers.cuda_pool import CudaPool  # noqa: E402
from workers.device import CopyPath, PoolRefused, SliceWork  # noqa: E402
from workers.digest import MLH, XXH3  # noqa: E402
from workers.gpu_kernels import LoadedSlice  # noqa: E402
from workers.jobs import capture_chunks  # noqa: E402
from workers.pieces import PoolView  # noqa: E402
from workers.rowmap import RowMap  # noqa: E402
from workers.slice_table import slice_table  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

GIB = 1024 * MIB
Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


def slot_layout(planes: int = 8, row_bytes: int = 1024, rows: int = 2048, gap: int = 0) -> StageLayout:
    stride = row_bytes + gap
    made = tuple(Plane(n * stride * rows, row_bytes, stride, rows) for n in range(planes))
    end = -(-made[-1].end_bytes // 256) * 256
    return stage_layout(made, Plane(end, 5008, 8192, 4), 256)


def paged_layout(planes: int = 6, token_bytes: int = 1024, block: int = 16, rows: int = 200) -> StageLayout:
    row_bytes = token_bytes * block
    made = tuple(Plane(n * row_bytes * rows, row_bytes, row_bytes, rows, block, token_bytes) for n in range(planes))
    return stage_layout(made, None, 256)


LAYOUTS = {
    "slot16": (slot_layout(), 2000, 1),
    "slot4": (slot_layout(row_bytes=516, gap=12), 1999, 2),
    "slot1": (slot_layout(planes=3, row_bytes=77, gap=2, rows=700), 700, 0),
    "paged": (paged_layout(), 200 * 16 - 5, -1),
    "paged_odd": (paged_layout(token_bytes=24, rows=300), 300 * 16 - 9, -1),
    "few_tokens": (slot_layout(), 3, 3),
}


@pytest.fixture(scope="module")
def rig() -> Iterator[GpuRig]:
    with GpuRig(slice_bytes=8 * MIB) as made:
        yield made


@pytest.fixture(scope="module")
def engine_rig() -> Iterator[GpuRig]:
    with GpuRig(slice_bytes=8 * MIB, path=CopyPath.ENGINE) as made:
        yield made


def model(memory: Array, layout: StageLayout, rows: list[int], tokens: int, slot: int) -> list[Array]:
    """Chunks by the host's own copies (proved against a byte model elsewhere)."""

    points = positions(tokens, slot)
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(tokens, points)]
    rowmaps = row_maps(layout, rows, slot)
    view = PoolView(memory, layout)
    found: list[Array] = []
    for chunk in capture_chunks(layout, tokens, points, places).copied:
        out = np.empty(chunk.span.length_bytes, np.uint8)
        at = 0
        for piece in view.pieces(chunk, rowmaps):
            piece.gather(out[at : at + piece.size_bytes])
            at += piece.size_bytes
        found.append(out)
    return found


def row_maps(layout: StageLayout, rows: list[int], slot: int) -> tuple[RowMap, ...]:
    """What the lanes make of the rows of an operation."""
    packed = packed_rows(layout, rows, slot)
    return tuple(RowMap.parse(entry, group.rows, 0) for entry, group in zip(packed, layout.all_groups, strict=True))


def show(test: str, /, **values: object) -> None:
    """One line of JSON for who reads the run."""
    print("\nGPU " + json.dumps({"test": test, **values}), flush=True)


def test_the_gpu_is_found_by_uuid() -> None:
    runtime = GpuRuntime.load()
    show("uuid", ours=runtime.device_uuid(0), torch=gpu_uuid(), kind=runtime.kind, name=runtime.device_name(0))
    assert runtime.find_device(gpu_uuid()) == 0
    assert runtime.find_device("GPU-00000000-0000-0000-0000-000000000000") is None


@pytest.mark.parametrize("kernels", ["nvrtc", "torch"])
def test_known_answers(kernels: str) -> None:
    start_s = time.perf_counter()
    with GpuRig(slice_bytes=MIB, kernels=kernels, shuttle_bytes=[MIB]) as made:
        opened_s = time.perf_counter()
        made.device.self_test()
        show(
            "known_answers",
            kernels=made.device.digest_path,
            open_s=opened_s - start_s,
            self_test_s=time.perf_counter() - opened_s,
            device_bytes=made.device.device_bytes,
        )


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_capture_and_restore_equal_the_model(rig: GpuRig, name: str, order: str) -> None:
    check_capture_and_restore(rig, name, order)


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_the_copy_engines_bring_the_same(engine_rig: GpuRig, name: str, order: str) -> None:
    check_capture_and_restore(engine_rig, name, order)


def check_capture_and_restore(rig: GpuRig, name: str, order: str) -> None:
    """Stored is what the model says, and it comes back."""
    layout, tokens, slot = LAYOUTS[name]
    random = np.random.default_rng(tokens)
    rows = list(range(layout.groups[0].rows_for(tokens)))
    if order == "shuffled":
        rows = random.permutation(layout.groups[0].rows).tolist()[: len(rows)]
    data = random.integers(0, 256, layout.end_bytes, dtype=np.uint8)
    pool = rig.own_pool(layout, data)
    rig._next = [65536]
    places = rig.places(layout, tokens, slot)
    done = rig.capture(pool, rows, tokens, places, slot)
    assert isinstance(done, JobDone), done
    chunks = model(data, layout, rows, tokens, slot)
    for number, (place, chunk) in enumerate(zip(places, chunks, strict=True)):
        assert np.array_equal(rig.stored(place), chunk), f"chunk {number}"
        assert done.digests[16 * number : 16 * number + 16] == rig.digester.digest(MLH, chunk)
    destroyed: Array = data ^ np.uint8(0x5A)
    rig.write(pool, destroyed)
    back = rig.restore(pool, rows, tokens, places, done.digests, state_slot=slot)
    assert isinstance(back, JobDone), back
    after = rig.read(pool)
    again = model(after, layout, rows, tokens, slot)
    assert all(np.array_equal(a, b) for a, b in zip(again, chunks, strict=True))
    untouched = after == destroyed
    assert int((~untouched).sum()) <= sum(map(len, chunks))
    by_cpu = b"".join(rig.digester.digest(XXH3, chunk) for chunk in chunks)
    rig.write(pool, destroyed)
    assert isinstance(rig.restore(pool, rows, tokens, places, by_cpu, algorithm=XXH3, state_slot=slot), JobDone)
    assert np.array_equal(rig.read(pool), after)
    pool.close()


def test_one_flipped_bit_in_each_plane_is_damaged(rig: GpuRig) -> None:
    layout, tokens = slot_layout(planes=6), 1024
    data = np.random.default_rng(0).integers(0, 256, layout.end_bytes, dtype=np.uint8)
    pool = rig.own_pool(layout, data)
    rig._next = [65536]
    places = rig.places(layout, tokens)
    done = rig.capture(pool, list(range(tokens)), tokens, places)
    assert isinstance(done, JobDone)
    for plane in range(6):
        rig.write(pool, np.zeros_like(data))
        stored = rig.stored(places[0])
        at = plane * 256 * 1024 + 12345 + plane
        stored[at] ^= 1 << plane
        failed = rig.restore(pool, list(range(tokens)), tokens, places, done.digests)
        stored[at] ^= 1 << plane
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk, failed.rows_undefined) == ("damaged", 0, ())
        assert not rig.read(pool).any()
    assert isinstance(rig.restore(pool, list(range(tokens)), tokens, places, done.digests), JobDone)
    pool.close()


def test_a_source_that_changes_is_noticed() -> None:
    layout = slot_layout()
    with GpuRig(slice_bytes=MIB, faults={"capture.flip_source": "2"}) as made:
        pool = made.own_pool(layout, np.zeros(layout.end_bytes, np.uint8))
        places = made.places(layout, 2048)
        failed = made.capture(pool, list(range(2048)), 2048, places)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk) == ("source_changed", 1 if MIB < 8 * 256 * 1024 else -1)
        assert isinstance(made.capture(pool, list(range(2048)), 2048, places), JobDone)
        pool.close()


@pytest.mark.parametrize("kernels", ["nvrtc", "torch"])
def test_pool_of_another_process(tmp_path: Path, kernels: str) -> None:
    layout, tokens = paged_layout(), 3000
    rows = np.random.default_rng(1).permutation(layout.groups[0].rows).tolist()[: layout.groups[0].rows_for(tokens)]
    engine = EngineProcess(layout.end_bytes, tmp_path)
    try:
        with GpuRig(slice_bytes=8 * MIB, kernels=kernels) as made:
            engine.ask("fill", seed=3)
            start_s = time.perf_counter()
            stage = engine.stage(layout)
            pool = made.device.open_pool(stage, -1)
            second = made.device.open_pool(stage, -1)
            show("ipc_open", seconds=time.perf_counter() - start_s, resources=made.device.resources())
            assert made.device.resources()["mappings"] == 1
            second.close()
            memory = np.frombuffer(engine.read(), np.uint8)
            places = made.places(layout, tokens)
            done = made.capture(pool, rows, tokens, places)
            assert isinstance(done, JobDone), done
            for place, chunk in zip(places, model(memory, layout, rows, tokens, -1), strict=True):
                assert np.array_equal(made.stored(place), chunk)
            engine.ask("fill", seed=4, keep=False)
            engine_view = np.frombuffer(engine.read(), np.uint8).copy()
            assert isinstance(made.restore(pool, rows, tokens, places, done.digests), JobDone)
            restored = np.frombuffer(engine.read(), np.uint8)
            chunks = model(memory, layout, rows, tokens, -1)
            again = model(restored, layout, rows, tokens, -1)
            assert all(np.array_equal(a, b) for a, b in zip(again, chunks, strict=True))
            other_rows = sorted(set(range(layout.groups[0].rows)) - set(rows))
            for plane in layout.planes:
                start = plane.offset_bytes + other_rows[0] * plane.row_stride_bytes
                assert np.array_equal(
                    restored[start : start + plane.row_bytes], engine_view[start : start + plane.row_bytes]
                )

            # The event: not reached while the engine's kernels run, then reached; polled, never waited for.
            engine.ask("busy", seconds=0.3)
            assert not pool.event_reached()
            wait_until(pool.event_reached, 5.0, "the engine's event")

            wrong = stage.__class__(
                0, stage.device, stage.pool, layout, stage.probe_offsets, bytes(len(stage.probe_bytes))
            )
            with pytest.raises(PoolRefused) as refused:
                made.device.open_pool(wrong, -1)
            assert refused.value.code == "probe_failed"

            # A dead engine's memory can still be read by whoever has mapped it; then everything closes.
            engine.process.send_signal(signal.SIGKILL)
            engine.process.wait(10)
            late = made.capture(pool, rows, tokens, places)
            show("after_engine_death", report=type(late).__name__)
            pool.close()
            assert made.device.resources()["mappings"] == 0
            assert made.device.resources()["pools"] == 0
    finally:
        engine.close()


def test_memory_that_cannot_be_shared_says_so(tmp_path: Path) -> None:
    runtime = GpuRuntime.load()
    runtime.set_device(0)
    host = torch.zeros(1024)
    with pytest.raises(GpuError):
        runtime.ipc_mem_handle(host.data_ptr())
    # The error is not left behind for somebody else.
    assert float(torch.ones(4, device="cuda").sum()) == 4.0


def test_resources_are_the_same_after_many_jobs() -> None:
    layout = slot_layout(planes=2, rows=256)
    with GpuRig(slice_bytes=MIB) as made:
        pool = made.own_pool(layout, np.zeros(layout.end_bytes, np.uint8))
        places = made.places(layout, 32)
        rows = list(range(32))
        done = made.capture(pool, rows, 32, places)
        assert isinstance(done, JobDone)
        assert isinstance(made.restore(pool, rows, 32, places, done.digests), JobDone)
        before, free_before = made.device.resources(), made.runtime.memory_info()[0]
        capture_s: list[float] = []
        restore_s: list[float] = []
        for _ in range(1000):
            start_s = time.perf_counter()
            assert isinstance(made.capture(pool, rows, 32, places), JobDone)
            middle_s = time.perf_counter()
            assert isinstance(made.restore(pool, rows, 32, places, done.digests), JobDone)
            capture_s.append(middle_s - start_s)
            restore_s.append(time.perf_counter() - middle_s)
        assert made.device.resources() == before
        show(
            "small_jobs_64KiB",
            capture_p50_us=statistics.median(capture_s) * 1e6,
            restore_p50_us=statistics.median(restore_s) * 1e6,
            capture_max_us=max(capture_s) * 1e6,
            free_lost_bytes=free_before - made.runtime.memory_info()[0],
        )
        pool.close()


def link_limit(rig: GpuRig) -> dict[str, float]:
    """GB/s of plain copies between device memory and the rig's page-locked shuttles, 64 MiB each."""
    runtime, size = rig.runtime, 64 * MIB
    device = runtime.malloc(size)
    base = int(np.frombuffer(rig.shuttles[0], np.uint8).ctypes.data)
    found = {}
    for name, direction in (("d2h", DEVICE_TO_HOST), ("h2d", HOST_TO_DEVICE)):
        rates = []
        for _ in range(3):
            runtime.stream_synchronize(rig.stream)
            start_s = time.perf_counter()
            for number in range(32):
                host = base + (number % (len(rig.shuttles[0]) // size)) * size
                target, source = (host, device) if direction == DEVICE_TO_HOST else (device, host)
                runtime.memcpy_async(target, source, size, direction, rig.stream)
            runtime.stream_synchronize(rig.stream)
            rates.append(32 * size / (time.perf_counter() - start_s) / 1e9)
        found[name] = max(rates)
    runtime.free(device)
    return found


@pytest.mark.timeout(400)
def test_speed_of_4_gib() -> None:
    rows = 16384
    shapes = {
        # 96 planes of 2 KiB a token and 16,384 tokens are 3 GiB; 128 of them 4 GiB.
        "slot_128x2KiB": stage_layout(tuple(Plane(n * 2048 * rows, 2048, 2048, rows) for n in range(128)), None, 256),
        "paged_64x64KiB": stage_layout(
            tuple(Plane(n * 65536 * 1024, 65536, 65536, 1024, 16, 4096) for n in range(64)), None, 256
        ),
    }
    start_s = time.perf_counter()
    with GpuRig(slice_bytes=64 * MIB, shuttle_bytes=[GIB + MIB] * 9) as made:
        show("page_lock", gib=9, seconds=time.perf_counter() - start_s)
        limit = link_limit(made)
        for name, layout in shapes.items():
            (group,) = layout.groups
            tokens = rows if group.tokens_per_row == 1 else 1024 * 16
            order = np.random.default_rng(2).permutation(group.rows)[: group.rows_for(tokens)].tolist()
            pool = made.own_pool(layout, None)
            torch.cuda.synchronize()
            made._next = [65536] * len(made.shuttles)
            places, more = made.places(layout, tokens), made.places(layout, tokens)
            size = sum(place.length_bytes for place in places)
            best = {"capture": 0.0, "restore": 0.0}
            done: JobDone | JobFailed | None = None
            for _ in range(3):
                start_s = time.perf_counter()
                done = made.capture(pool, order, tokens, places)
                best["capture"] = max(best["capture"], size / (time.perf_counter() - start_s) / 1e9)
                assert isinstance(done, JobDone), done
                start_s = time.perf_counter()
                back = made.restore(pool, order, tokens, places, done.digests)
                best["restore"] = max(best["restore"], size / (time.perf_counter() - start_s) / 1e9)
                assert isinstance(back, JobDone), back
            assert isinstance(done, JobDone)
            duplex = both_at_once(made, pool, order, tokens, places=places, more=more, digests=done.digests)
            show(
                "speed",
                layout=name,
                bytes=size,
                limit_gb_s=limit,
                gb_s=best,
                duplex_gb_s=2 * size / duplex / 1e9,
                digest_s=done.digest_s,
                copy_s=done.copy_s,
                capture_over_limit=best["capture"] / limit["d2h"],
                restore_over_limit=best["restore"] / limit["h2d"],
            )
            show("kernels", layout=name, **kernel_rates(made, pool, order))
            pool.close()
            assert best["capture"] >= 0.85 * limit["d2h"]
            assert best["restore"] >= 0.85 * limit["h2d"]


def both_at_once(
    rig: GpuRig,
    pool: CudaPool,
    rows: list[int],
    tokens: int,
    *,
    places: list[ChunkPlace],
    more: list[ChunkPlace],
    digests: bytes,
) -> float:
    """Seconds of a capture and a restore of the same rows' bytes at once (equal bytes, so neither disturbs)."""
    reports: list[JobDone | JobFailed] = []
    threads = [
        threading.Thread(target=lambda: reports.append(rig.capture(pool, rows, tokens, more))),
        threading.Thread(target=lambda: reports.append(rig.restore(pool, rows, tokens, places, digests))),
    ]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - start_s
    assert [type(report) for report in reports] == [JobDone, JobDone], reports
    return taken_s


def kernel_rates(rig: GpuRig, pool: CudaPool, rows: list[int]) -> dict[str, float]:
    """GB/s of each kernel over one slice of 64 MiB, alone on its stream."""

    layout = pool.layout
    (group,) = layout.groups
    tokens = 64 * MIB // group.row_bytes * group.tokens_per_row
    places = [ChunkPlace(span.length_bytes, ()) for span in layout.chunks(tokens)]
    chunks = capture_chunks(layout, tokens, (), places).copied
    work = SliceWork(pool, row_maps(layout, rows, -1), tuple(chunks))
    table = slice_table(work, pool.shapes)
    slot = SlotMemory(rig.runtime, Counts(), 64 * MIB, rig.cuda.kernels)
    loaded = LoadedSlice.of(pool, slot, table, rig.stream)
    kernels = rig.cuda.kernels
    calls: dict[str, Callable[[], None]] = {
        "digest_rows": lambda: kernels.digest_rows(loaded, slot.source_sums, rig.stream),
        "gather": lambda: kernels.gather(loaded, rig.stream),
        "digest_staging": lambda: kernels.digest_staging(loaded, slot.copy_sums, rig.stream),
        "scatter": lambda: kernels.scatter(loaded, rig.stream),
    }
    found = {}
    for name, call in calls.items():
        call()
        rig.runtime.stream_synchronize(rig.stream)
        start_s = time.perf_counter()
        for _ in range(20):
            call()
        rig.runtime.stream_synchronize(rig.stream)
        found[name] = 20 * table.staging_bytes / (time.perf_counter() - start_s) / 1e9
    slot.close()
    return found


def test_a_worker_process_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("posix_ipc")
    from ipc.messages import (  # noqa: PLC0415
        CaptureJob,
        Census,
        ClosePool,
        Forked,
        MakeShuttle,
        OpenPool,
        PoolClosed,
        PoolOpened,
        RestoreJob,
        ShuttleReady,
        StopWorker,
        TakeCensus,
        TemplateReady,
        WorkerHello,
        WorkerReady,
    )
    from shm.shuttle import unlink  # noqa: PLC0415
    from tests.unit.workers.supervisor import SmallSupervisor  # noqa: PLC0415

    layout, tokens = slot_layout(), 2048
    segment = f"/stratad.t{os.getpid()}.gpu0.0"
    engine = EngineProcess(layout.end_bytes, tmp_path)
    try:
        with SmallSupervisor(tmp_path) as supervisor:
            supervisor.start("--import-torch")
            ready = supervisor.heard(TemplateReady, 120.0)
            supervisor.order(
                supervisor.spec(worker="cpu0", device=gpu_uuid(), slice_bytes=64 * MIB, staging_bytes=64 * MIB)
            )
            supervisor.heard(Forked)
            supervisor.report(WorkerHello, 30.0)
            worker = supervisor.report(WorkerReady, 60.0)
            show(
                "worker_start",
                import_s=ready.import_s,
                start_s=worker.start_s,
                digest_path=worker.digest_path,
                device_name=worker.device_name,
                device_bytes=worker.device_bytes,
            )
            assert worker.digest_algorithm == MLH
            made = supervisor.ask(MakeShuttle(0, segment, 256 * MIB, False), ShuttleReady)
            assert made.locked
            show("shuttle", bytes=256 * MIB, make_s=made.make_s)
            engine.ask("fill", seed=9)
            supervisor.ask(OpenPool(1, engine.stage(layout), engine.process.pid, engine.start_ticks), PoolOpened)
            places = places_in_order(layout, tokens)
            rows = packed_rows(layout, range(tokens))
            engine.ask("busy", seconds=0.2)
            done = supervisor.ask(CaptureJob(1, 1, rows, tokens, pack_places(places), True), JobDone)
            engine.ask("fill", seed=10, keep=False)
            supervisor.ask(
                RestoreJob(2, 1, rows, tokens, tokens, pack_places(places), done.digests, (MLH,), False), JobDone
            )
            # The state and the last unused bytes are not part of this capture: compare the planes only.
            restored = np.frombuffer(engine.read(), np.uint8)
            engine.ask("fill", seed=9)
            engine.ask("busy", seconds=0.0)
            expected = np.frombuffer(engine.read(), np.uint8)
            end = layout.groups[0].planes[-1].end_bytes
            assert np.array_equal(restored[:end], expected[:end])
            show("census", **supervisor.ask(TakeCensus(1), Census).resources)
            supervisor.ask(ClosePool(1), PoolClosed)
            supervisor.send(StopWorker())
            assert supervisor.exited(20.0).status == 0
    finally:
        unlink(segment)
        engine.close()


def places_in_order(layout: StageLayout, tokens: int) -> list[ChunkPlace]:
    at = GRANULE_BYTES
    places: list[ChunkPlace] = []
    for span in layout.chunks(tokens):
        size = granules_for(span.length_bytes) * GRANULE_BYTES
        places.append(ChunkPlace(span.length_bytes, (Extent(0, at, size),)))
        at += size
    return places
