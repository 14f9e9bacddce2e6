"""Engines of another user than the daemon's: their memory can be mapped, their events cannot be opened.

Engine and worker are real and share the fake GPU; the daemon between them has the worker's device open every pool.
"""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ipc.messages import Capture, CudaIpcPool, Failed, Register, Reply, Request
from shm.gpu_runtime import GpuRuntime
from shm.layout import Plane, StageLayout
from stratad import _gpu_stage
from stratad.client import Client, Engine, StagePool
from stratad.errors import StratadError, UsageError
from tests.support.client_rig import FINGERPRINT
from tests.support.fake_daemon import FakeDaemon, Handler, silence
from tests.support.layouts import stage_layout
from tests.unit.workers.gpu_rig import DIGESTER, Gpu
from tests.unit.workers.rig import slot_layout
from workers.cuda_device import CudaDevice
from workers.device import PoolRefused

LAYOUT: StageLayout = stage_layout((Plane(0, 32, 32, 64),))
CANNOT_BE_MAPPED = 205  # what CUDA answers for the event of another user
pytestmark = pytest.mark.usefixtures("clean")


class Tensor:
    """What the client asks of a tensor."""

    def __init__(self, runtime: GpuRuntime) -> None:
        self.device = SimpleNamespace(type="cuda", index=0)
        self.is_cuda = True
        self.address = runtime.malloc(LAYOUT.end_bytes)

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return LAYOUT.end_bytes

    def element_size(self) -> int:
        return 1


@pytest.fixture
def stages(runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StagePool]]:
    """Two stages of an engine whose torch and GPU are fakes."""
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        device=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: SimpleNamespace(cuda_stream=7),
        memory_snapshot=list,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_gpu_stage, "_runtime", lambda: runtime)
    tensors = [Tensor(runtime) for _ in range(2)]
    yield [StagePool("cuda:0", LAYOUT, tensor) for tensor in tensors]  # type: ignore[arg-type]
    for tensor in tensors:
        runtime.free(tensor.address)


@pytest.fixture
def device(runtime: GpuRuntime) -> Iterator[CudaDevice]:
    """A worker's device."""
    made = CudaDevice.open(runtime.device_uuid(0), DIGESTER, slice_bytes=8192, staging_bytes=8192)
    yield made
    made.close()


@pytest.fixture
def others(library: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    """Makes every event from now on one of another user."""
    yield library.refuse_events
    library.refuse_events(0)


def opening(daemon: FakeDaemon, device: CudaDevice) -> Handler:
    """A daemon's answer to a registration: its worker maps the stages' pools and proves them by the probe."""

    def answer(request: Request) -> Iterable[Reply]:
        assert isinstance(request, Register)
        for stage in request.stages:
            try:
                device.open_pool(stage, -1).close()
            except PoolRefused as exc:
                return [Failed(request.seq, exc.code, exc.message, stage.index)]
        return [daemon.registered(request.seq, len(request.stages))]

    return answer


def event_handles(request: Register) -> list[int]:
    """Lengths of the handles of a registration's events."""
    return [len(stage.pool.event_handle) for stage in request.stages if isinstance(stage.pool, CudaIpcPool)]


def register(client: Client, stages: list[StagePool]) -> Engine:
    return client.register("e", "n", FINGERPRINT, stages)


def register_async(client: Client, stages: list[StagePool]) -> Engine:
    return asyncio.run(client.register_async("e", "n", FINGERPRINT, stages))


@pytest.mark.parametrize("how", [register, register_async])
def test_an_engine_whose_events_cannot_be_opened_waits_itself(
    tmp_path: Path,
    stages: list[StagePool],
    device: CudaDevice,
    library: ctypes.CDLL,
    others: Callable[[int], None],
    *,
    how: Callable[[Client, list[StagePool]], Engine],
) -> None:
    others(CANNOT_BE_MAPPED)
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        daemon.script[Register] = opening(daemon, device)
        engine = how(client, stages)
        assert [event_handles(request) for request in daemon.of(Register)] == [[64, 64], [0, 0]]
        before = library.stream_waits()
        engine.capture("chat", range(8), range(8)).result()
        assert daemon.expect(Capture).ordered == "host"
        assert library.stream_waits() - before == len(stages)
        engine.unregister()


def test_an_engine_of_the_daemons_user_is_ordered_by_events(
    tmp_path: Path, stages: list[StagePool], device: CudaDevice, library: ctypes.CDLL
) -> None:
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        daemon.script[Register] = opening(daemon, device)
        engine = register(client, stages)
        before = library.stream_waits()
        engine.capture("chat", range(8), range(8)).result()
        assert [event_handles(request) for request in daemon.of(Register)] == [[64, 64]]
        assert daemon.expect(Capture).ordered == "event"
        assert library.stream_waits() == before
        engine.unregister()


def test_the_next_daemon_may_be_another_user(
    tmp_path: Path,
    stages: list[StagePool],
    device: CudaDevice,
    library: ctypes.CDLL,
    others: Callable[[int], None],
) -> None:
    """A capture that was ordered by events waits for them before it goes to a daemon that cannot."""
    with FakeDaemon.start(tmp_path) as first, Client.connect(tmp_path) as client:
        first.script |= {Register: opening(first, device), Capture: silence}
        engine = register(client, stages)
        ticket = engine.capture("chat", range(8), range(8))
        assert first.expect(Capture).ordered == "event"
        before = library.event_waits_done()
        others(CANNOT_BE_MAPPED)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            second.script[Register] = opening(second, device)
            ticket.result()
            assert second.expect(Capture).ordered == "host"
            assert library.event_waits_done() - before == len(stages)
            engine.unregister()


def test_a_daemon_that_refuses_events_for_ever_is_asked_twice(tmp_path: Path, stages: list[StagePool]) -> None:
    def refuse(request: Request) -> Iterable[Reply]:
        return [Failed(request.seq, "event_unshareable", "no", 0)]

    with FakeDaemon.start(tmp_path, script={Register: refuse}) as daemon, Client.connect(tmp_path) as client:
        with pytest.raises(UsageError, match="event_unshareable"):
            register(client, stages)
        assert [event_handles(request) for request in daemon.of(Register)] == [[64, 64], [0, 0]]


def test_an_event_that_cannot_be_waited_for_ends_the_registration(
    tmp_path: Path,
    stages: list[StagePool],
    device: CudaDevice,
    library: ctypes.CDLL,
    others: Callable[[int], None],
) -> None:
    others(CANNOT_BE_MAPPED)
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        opened = opening(daemon, device)

        def answer(request: Request) -> Iterable[Reply]:
            answers = list(opened(request))
            library.fail_next_event_wait(700)
            return answers  # type: ignore[return-value]

        daemon.script[Register] = answer
        with pytest.raises(StratadError, match="event_unshareable"):
            register(client, stages)
        assert len(daemon.of(Register)) == 1


@pytest.mark.parametrize(("error", "code"), [(CANNOT_BE_MAPPED, "event_unshareable"), (999, "device_error")])
def test_a_pool_whose_event_cannot_be_opened_is_given_back(
    runtime: GpuRuntime, others: Callable[[int], None], error: int, code: str
) -> None:
    gpu = Gpu(runtime, slot_layout())
    event = runtime.event_create(interprocess=True)
    others(error)
    with pytest.raises(PoolRefused, match=rf"cudaIpcOpenEventHandle: made up \(error {error}\)") as refused:
        gpu.cuda.open_pool(gpu.stage(event_handle=runtime.ipc_event_handle(event)), -1)
    assert refused.value.code == code
    resources = gpu.cuda.resources()
    assert (resources["pools"], resources["mappings"], resources["events"]) == (0, 0, 0)
    pool = gpu.cuda.open_pool(gpu.stage(), -1)
    assert pool.event_reached()
    pool.close()
    runtime.event_destroy(event)
    gpu.close()
