"""The GPU device over the fake GPU, in cases of any shape."""

from typing import Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ipc.messages import JobFailed
from shm.gpu_runtime import GpuError, GpuRuntime
from tests.support.shape_cases import Case, cases
from tests.unit.workers.gpu_rig import CaseGpu
from tests.unit.workers.rig import slot_layout
from tests.unit.workers.shape_checks import (
    check_capture_and_restore,
    check_copy,
    check_copy_that_fails,
    check_copy_that_is_cancelled,
    check_digests,
    check_digests_that_are_cancelled,
    rows_in,
)
from workers.device import CopyPath
from workers.digest import MLH
from workers.gpu_kernels import LoadedSlice

SEEDS = st.integers(0, 2**32)
SLICES = st.integers(0, 6)
PATHS = st.sampled_from(list(CopyPath))
# The fixtures make nothing that an example changes.
FIXTURES: Final = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)

pytestmark = pytest.mark.usefixtures("clean")


def test_a_slot_is_not_used_again_before_its_last_scatter_has_read_it(runtime: GpuRuntime) -> None:
    """Slices of one shape, so that a table or staging that came too early is wrong, and never senseless."""
    layout = slot_layout(planes=1, row_bytes=64, rows=64, chunk_tokens=4)
    rows, target = tuple(range(24)), tuple(range(24, 48))
    case = Case(layout, layout.end_bytes, 24, (), (rows, ()), (target, ()), (24,))
    with CaseGpu(runtime, case, 1) as gpu:
        assert len(gpu.plan(case.copy_job()).slices) == 6
        check_copy(gpu, case)
        check_capture_and_restore(gpu, case, 24, MLH)
        check_copy(gpu, case)


@settings(max_examples=60, suppress_health_check=FIXTURES)
@given(cases(), SEEDS, PATHS, st.data())
def test_captured_bytes_are_the_models_and_come_back(
    runtime: GpuRuntime, case: Case, seed: int, path: CopyPath, data: st.DataObject
) -> None:
    with CaseGpu(runtime, case, seed, path=path) as gpu:
        check_capture_and_restore(gpu, case, data.draw(st.integers(0, case.tokens)), MLH)


@settings(max_examples=60, suppress_health_check=FIXTURES)
@given(cases(), SEEDS, SLICES, st.data())
def test_digests_are_those_of_a_capture(
    runtime: GpuRuntime, case: Case, seed: int, after: int, data: st.DataObject
) -> None:
    wanted = sorted(data.draw(st.sets(st.integers(0, len(case.spans) - 1))))
    with CaseGpu(runtime, case, seed) as gpu:
        check_digests_that_are_cancelled(gpu, case, after)
        check_digests(gpu, case, wanted, MLH)
        check_copy(gpu, case)
        check_digests(gpu, case, wanted, MLH)
        before = gpu.cuda.resources()
        check_capture_and_restore(gpu, case, case.tokens, MLH)
        check_digests(gpu, case, wanted, MLH)
        assert gpu.cuda.resources() == before


@settings(max_examples=60, suppress_health_check=FIXTURES)
@given(cases(), SEEDS)
def test_a_copy_gives_targets_the_bytes_of_their_sources_and_touches_nothing_else(
    runtime: GpuRuntime, case: Case, seed: int
) -> None:
    with CaseGpu(runtime, case, seed) as gpu:
        check_copy(gpu, case)
        before = gpu.cuda.resources()
        check_copy(gpu, case)
        assert gpu.cuda.resources() == before


@settings(max_examples=40, suppress_health_check=FIXTURES)
@given(cases(), SEEDS, SLICES, st.sampled_from([("flip_source", "source_changed"), ("copy_error", "device_error")]))
def test_a_copy_that_fails_has_written_what_it_names(
    runtime: GpuRuntime, case: Case, seed: int, number: int, fault: tuple[str, str]
) -> None:
    with CaseGpu(runtime, case, seed, {fault[0]: str(number + 1)}) as gpu:
        check_copy_that_fails(gpu, case, number, fault[1], early=True)


@settings(max_examples=40, suppress_health_check=FIXTURES)
@given(cases(), SEEDS, SLICES)
def test_a_copy_that_is_cancelled_names_what_it_has_written(
    runtime: GpuRuntime, case: Case, seed: int, after: int
) -> None:
    with CaseGpu(runtime, case, seed) as gpu:
        check_copy_that_is_cancelled(gpu, case, after, early=True)


def test_a_copy_that_fails_halfway_names_the_targets_of_its_slice(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = slot_layout(planes=1, row_bytes=64, rows=64, chunk_tokens=4)
    rows, target = tuple(range(20)), tuple(range(40, 60))
    case = Case(layout, layout.end_bytes, 20, (), (rows, ()), (target, ()), (20,))
    with CaseGpu(runtime, case, 1) as gpu:
        before = gpu.memory.copy()
        copy_rows, calls = gpu.cuda.kernels.copy_rows, list[int]()

        def breaks(loaded: LoadedSlice, differs: int, what: int, stream: int) -> None:
            copy_rows(loaded, differs, what, stream)
            calls.append(1)
            if len(calls) == 3:
                raise GpuError("cuLaunchKernel", 719, "made up")

        monkeypatch.setattr(gpu.cuda.kernels, "copy_rows", breaks)
        report = gpu.run(case.copy_job())
        assert isinstance(report, JobFailed)
        assert report.code == "device_error"
        assert rows_in(report.rows_undefined) == (target[:12], ())
        assert (gpu.memory == case.copied(before, case.spans[:3])).all()
