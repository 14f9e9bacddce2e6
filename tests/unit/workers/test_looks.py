"""Chunks that may be there already: captures do not copy them, restores do not write them."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ipc.messages import JobDone, JobFailed
from shm.gpu_runtime import GpuRuntime
from shm.rows import pack_numbers, unpack_rows
from tests.support.shape_cases import Case, cases
from tests.unit.workers.gpu_rig import CaseGpu
from tests.unit.workers.look_checks import check_hinted_capture, check_hints_that_cannot_be, check_resident_restore
from tests.unit.workers.rig import NEVER, Rig, slot_layout
from tests.unit.workers.shape_checks import SLICE_BYTES, granules_of
from workers.digest import MLH, XXH3
from workers.lanes import JobHooks

SEEDS = st.integers(0, 2**32)
CHANGED = st.lists(st.integers(0, 2**20), max_size=3)
RESTORABLE = cases().filter(lambda case: any(case.prefixes))
FIXTURES = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


def rig_of(case: Case, seed: int, faults: dict[str, str] | None = None) -> Rig:
    return Rig(
        case.layout,
        seed=seed,
        faults=faults,
        slice_bytes=SLICE_BYTES,
        shuttle_granules=4 * granules_of(case),
        pool_bytes=case.pool_bytes,
    )


def numbers(data: st.DataObject, case: Case) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(0, len(case.spans) - 1))))


@settings(max_examples=30)
@given(cases(), SEEDS, st.data())
def test_hinted_chunks_are_digested_and_not_copied(case: Case, seed: int, data: st.DataObject) -> None:
    hinted, only = numbers(data, case), numbers(data, case)
    with rig_of(case, seed) as rig:
        check_hinted_capture(rig, case, hinted, only)
        check_hints_that_cannot_be(rig, case)


@settings(max_examples=30)
@given(RESTORABLE, SEEDS, CHANGED, st.data())
def test_what_is_in_its_rows_is_not_written(case: Case, seed: int, changed: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([n for n in case.prefixes if n]))
    with rig_of(case, seed) as rig:
        check_resident_restore(rig, case, tokens, data.draw(st.integers(0, case.tokens + 1)), changed, XXH3)


@pytest.mark.usefixtures("clean")
@settings(max_examples=12, suppress_health_check=FIXTURES)
@given(RESTORABLE, SEEDS, CHANGED, st.data())
def test_a_gpu_does_the_same(
    runtime: GpuRuntime, case: Case, seed: int, changed: list[int], data: st.DataObject
) -> None:
    tokens = data.draw(st.sampled_from([n for n in case.prefixes if n]))
    hinted, only = numbers(data, case), numbers(data, case)
    resident = data.draw(st.integers(0, case.tokens + 1))
    with CaseGpu(runtime, case, seed, granules=6 * granules_of(case)) as gpu:
        staging = gpu.cuda.resources()["staging_bytes"]
        check_resident_restore(gpu, case, tokens, resident, changed, MLH)
        check_hinted_capture(gpu, case, hinted, only)
        assert gpu.cuda.resources()["staging_bytes"] == staging


LAYOUT = slot_layout(planes=2, row_bytes=64, rows=64, chunk_tokens=4)
CASE = Case(LAYOUT, LAYOUT.end_bytes, 24, (), (tuple(range(24)), ()), (tuple(range(24, 48)), ()), (24,))


def test_slices_that_are_only_digested_are_larger() -> None:
    with rig_of(CASE, 1) as rig:
        plan = rig.plan(CASE.digest_job([]))
        assert plan.look is None
        places = rig.places(24)
        done = rig.run(CASE.capture_job(places))
        assert isinstance(done, JobDone)
        job = CASE.restore_job(places, done.digests, 24)
        plan = rig.plan(msgspec.structs.replace(job, resident_tokens=20))
        assert plan.look is not None
        assert len(plan.look.chunks) == 5
        assert len(plan.look.slices) < 5 <= len(plan.slices)
        assert plan.work_bytes == plan.moved_bytes + plan.look.moved_bytes


def test_of_another_algorithm_nothing_is_looked_for() -> None:
    with rig_of(CASE, 1) as rig:
        job = CASE.restore_job(rig.places(24), bytes(6 * 16), 24, MLH)
        plan = rig.plan(msgspec.structs.replace(job, resident_tokens=24))
        assert plan.look is None


def test_a_failed_restore_does_not_name_rows_that_it_has_left_alone() -> None:
    """Chunks 1 and 3 have changed in the rows, and the stored chunk 5 is damaged."""
    with rig_of(CASE, 1) as rig:
        places = rig.places(24)
        done = rig.run(CASE.capture_job(places))
        assert isinstance(done, JobDone)
        job = CASE.restore_job(places, done.digests, 24)
        assert isinstance(rig.run(job), JobDone)
        expected = rig.memory.copy()
        plane = LAYOUT.groups[0].planes[0]
        for row in (24 + 4, 24 + 13, 24 + 20):
            rig.memory[plane.offset_bytes + row * plane.row_stride_bytes] ^= 1
        rig.shuttle[places[5].extents[0].offset_bytes] ^= 1
        report = rig.run(msgspec.structs.replace(job, resident_tokens=24))
        assert isinstance(report, JobFailed)
        assert (report.code, report.chunk) == ("damaged", 5)
        assert unpack_rows(report.rows_undefined[0]) == ((28, 4), (36, 4))
        rig.memory[plane.offset_bytes + 44 * plane.row_stride_bytes] ^= 1
        assert np.array_equal(rig.memory, expected)


@pytest.mark.parametrize("after", [0, 1])
def test_a_capture_that_is_cancelled_while_it_looks_is_none(after: int) -> None:
    with rig_of(CASE, 1) as rig:
        asked: list[int] = []

        def stopped() -> bool:
            asked.append(1)
            return len(asked) > after

        job = CASE.capture_job([rig.place(LAYOUT.chunks(24)[5].length_bytes)])
        job = msgspec.structs.replace(job, hinted=pack_numbers(range(5)))
        report = rig.run(job, JobHooks(stopped, lambda: None))
        assert isinstance(report, JobFailed)
        assert (report.code, report.moved_bytes, report.rows_undefined) == ("cancelled", 0, ())
        assert isinstance(rig.run(job, NEVER), JobDone)
