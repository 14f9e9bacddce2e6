"""The fake GPU for the tests of workers."""

import ctypes
import shutil
from collections.abc import Iterator

import pytest

from shm.gpu_runtime import GpuRuntime
from tests.unit.workers.fake_gpu import AT_ONCE, DEFERRED, KERNELS_LATE, build_fake_gpu, fake_runtime
from workers import gpu_kernels


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return build_fake_gpu(tmp_path_factory.mktemp("fake"), compiler)


@pytest.fixture(params=[AT_ONCE, DEFERRED, KERNELS_LATE], ids=["at_once", "deferred", "kernels_late"])
def runtime(
    request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuRuntime]:
    """The fake, in each of the orders in which it can do what is put on its streams."""
    library.defer(request.param)
    made = fake_runtime(library)
    monkeypatch.setattr(GpuRuntime, "load", classmethod(lambda _cls: made))
    monkeypatch.setattr(gpu_kernels, "compiled", lambda _kind, _architecture: b"image")
    monkeypatch.setattr("workers.cuda_device.compiled", lambda _kind, _architecture: b"image")
    yield made
    library.defer(AT_ONCE)


@pytest.fixture
def clean(library: ctypes.CDLL) -> Iterator[None]:
    before = library.live_handles(), library.live_allocations(), library.live_locks()
    yield
    assert (library.live_handles(), library.live_allocations(), library.live_locks()) == before
