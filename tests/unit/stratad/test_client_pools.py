"""Pools and what may not be one."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from shm.gpu_runtime import GpuUnavailable
from shm.layout import Plane
from stratad import _gpu_stage
from stratad._probe import MAX_PROBES, PROBE_BYTES, probe_offsets
from stratad._stages import export_stages
from stratad.client import CpuPool, StagePool
from stratad.errors import NoSpace, StratadError, UsageError
from tests.support.client_rig import PLAIN
from tests.support.layouts import stage_layout


def test_a_pool_is_zeros_that_views_share() -> None:
    with CpuPool.allocate(64) as pool:
        assert bytes(pool.buffer) == bytes(64)
        array = pool.tensor("float32", (2, 4), offset_bytes=32)
        array[1, 3] = 1.5
        assert np.frombuffer(pool.buffer, dtype="float32")[15] == 1.5
        assert array.shape == (2, 4)
        del array


def test_a_torch_view_shares_the_bytes() -> None:
    torch = pytest.importorskip("torch")
    pool = CpuPool.allocate(64)
    tensor = pool.tensor(torch.bfloat16, (4, 8))
    tensor.fill_(1.0)
    assert bytes(pool.buffer) == b"\x80\x3f" * 32
    pool.close()
    assert tensor.sum() == 32  # the view keeps the memory for itself


@pytest.mark.parametrize(("shape", "offset_bytes"), [((3, 8), 0), ((1, 4), 56), ((2, 8), 1000)])
def test_a_view_must_fit(shape: tuple[int, ...], offset_bytes: int) -> None:
    with CpuPool.allocate(64) as pool, pytest.raises(UsageError, match="of 64"):
        pool.tensor("float32", shape, offset_bytes)


def test_pools_that_cannot_be() -> None:
    with pytest.raises(UsageError):
        CpuPool.allocate(0)
    with pytest.raises(NoSpace):
        CpuPool.allocate(1 << 60)


def test_a_closed_pool_says_so() -> None:
    pool = CpuPool.allocate(64)
    pool.close()
    pool.close()
    for use in (lambda: pool.buffer, lambda: pool.descriptor, lambda: pool.tensor("u1", (1,))):
        with pytest.raises(UsageError, match="closed"):
            use()


def _refusal(stage: StagePool) -> StratadError:
    with pytest.raises(UsageError) as caught:
        export_stages([stage])
    return caught.value


def test_a_cpu_tensor_is_unshareable_and_the_text_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    error = _refusal(StagePool("cpu:0", PLAIN, torch.zeros(PLAIN.end_bytes, dtype=torch.uint8)))
    assert error.code == "unshareable"
    assert "CpuPool.allocate" in error.message
    error = _refusal(StagePool("cpu:0", PLAIN, bytearray(PLAIN.end_bytes)))  # type: ignore[arg-type]
    assert (error.code, "bytearray" in error.message) == ("unshareable", True)


def test_a_pool_belongs_to_a_cpu_device() -> None:
    with CpuPool.allocate(PLAIN.end_bytes) as pool:
        for device in ("cuda:0", "cpu", "cpu:x", "GPU-1"):
            assert _refusal(StagePool(device, PLAIN, pool)).code == "foreign_device"


def test_a_layout_must_fit_its_pool() -> None:
    with CpuPool.allocate(PLAIN.end_bytes - 1) as pool:
        error = _refusal(StagePool("cpu:0", PLAIN, pool))
        assert (error.code, error.stage) == ("bad_layout", 0)
        assert "ends at byte" in error.message


def test_an_engine_needs_a_stage() -> None:
    with pytest.raises(UsageError, match="at least one stage"):
        export_stages([])


def test_probes_lie_at_both_ends_of_each_plane() -> None:
    layout = stage_layout((Plane(0, 32, 32, 4), Plane(1000, 8, 8, 1)), Plane(2000, 8, 8, 1), 256)
    assert probe_offsets(layout, 2008) == [0, 112, 992, 1000, 1992]
    assert probe_offsets(stage_layout((Plane(0, 8, 8, 1),), None, 256), 16) == [0]
    assert probe_offsets(stage_layout((Plane(0, 8, 8, 1),), None, 256), 15) == []


def test_probes_of_many_planes_stay_few_and_inside() -> None:
    layout = stage_layout(tuple(Plane(64 * n, 64, 64, 1) for n in range(200)), None, 256)
    offsets = probe_offsets(layout, layout.end_bytes)
    assert len(offsets) == MAX_PROBES
    assert offsets == sorted(set(offsets))
    assert offsets[0] == 0
    assert max(offsets) + PROBE_BYTES <= layout.end_bytes


class FakeGpuTensor:
    """What `export_stages` asks of a tensor, for a GPU that is not here."""

    def __init__(self, address: int = 0x5000, *, contiguous: bool = True) -> None:
        self.device = SimpleNamespace(type="cuda", index=1)
        self.is_cuda = True
        self.shape = (PLAIN.end_bytes,)
        self._address = address
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return self._address

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (2,)

    def numel(self) -> int:
        return PLAIN.end_bytes

    def element_size(self) -> int:
        return 1


def test_a_tensor_with_gaps_is_unshareable() -> None:
    error = _refusal(StagePool("cuda:1", PLAIN, FakeGpuTensor(contiguous=False)))  # type: ignore[arg-type]
    assert error.code == "unshareable"
    assert "not contiguous" in error.message


def test_a_host_without_gpu_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def unavailable() -> None:
        raise GpuUnavailable("no library")

    monkeypatch.setattr(_gpu_stage, "_runtime", unavailable)
    error = _refusal(StagePool("cuda:1", PLAIN, FakeGpuTensor()))  # type: ignore[arg-type]
    assert error.code == "unshareable"
    assert "no GPU runtime" in error.message


def test_importing_the_client_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, stratad.client; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
