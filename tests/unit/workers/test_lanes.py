"""Lanes over a cpu device: what is captured is what the model says, and only proven bytes reach a row."""

import gc
import threading
import time
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ipc.messages import CaptureJob, JobDone, JobFailed, RestoreJob
from shm.extent import GRANULE_BYTES, Extent, pack_places
from shm.layout import Plane, StageLayout
from shm.rows import unpack_rows
from tests.support.layouts import packed_rows, stage_layout
from tests.support.shape_cases import Case, cases
from tests.unit.workers.rig import NEVER, Rig, paged_layout, slot_layout, written_bytes
from tests.unit.workers.shape_checks import (
    SLICE_BYTES,
    check_capture_and_restore,
    check_copy,
    check_copy_that_fails,
    check_copy_that_is_cancelled,
    check_digests,
    check_digests_that_are_cancelled,
    granules_of,
)
from workers.cpu_device import CpuCopier
from workers.device import CopyTimes, DeviceFailure, LaneKind, SliceWork
from workers.digest import MLH, XXH3
from workers.lanes import JobHooks, Lane
from workers.plans import plan_job


def rows_in(packed: tuple[bytes, ...], group: int = 0) -> list[int]:
    return [row for first, count in unpack_rows(packed[group]) for row in range(first, first + count)]


def rig_of(case: Case, seed: int, *, fragment: bool = False, faults: dict[str, str] | None = None) -> Rig:
    return Rig(
        case.layout,
        seed=seed,
        faults=faults,
        slice_bytes=SLICE_BYTES,
        fragment=fragment,
        shuttle_granules=granules_of(case),
        pool_bytes=case.pool_bytes,
    )


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**32), st.data())
def test_digests_are_those_of_a_capture(case: Case, seed: int, data: st.DataObject) -> None:
    wanted = sorted(data.draw(st.sets(st.integers(0, len(case.spans) - 1))))
    with rig_of(case, seed) as rig:
        check_digests_that_are_cancelled(rig, case, data.draw(SLICES))
        check_digests(rig, case, wanted, XXH3)


SEEDS = st.integers(0, 2**32)
SLICES = st.integers(0, 6)


@settings(max_examples=150)
@given(cases(), st.booleans(), SEEDS, st.data())
def test_captured_bytes_are_the_models_and_come_back(
    case: Case, fragment: bool, seed: int, data: st.DataObject
) -> None:
    with rig_of(case, seed, fragment=fragment) as rig:
        check_capture_and_restore(rig, case, data.draw(st.integers(0, case.tokens)), XXH3)


@settings(max_examples=100)
@given(cases(), SEEDS)
def test_a_copy_gives_targets_the_bytes_of_their_sources_and_touches_nothing_else(case: Case, seed: int) -> None:
    with rig_of(case, seed) as rig:
        check_copy(rig, case)


@settings(max_examples=60)
@given(cases(), SEEDS, SLICES, st.sampled_from([("flip_source", "source_changed"), ("copy_error", "device_error")]))
def test_a_copy_that_fails_has_written_what_it_names(
    case: Case, seed: int, number: int, fault: tuple[str, str]
) -> None:
    with rig_of(case, seed, faults={fault[0]: str(number + 1)}) as rig:
        check_copy_that_fails(rig, case, number, fault[1])


@settings(max_examples=60)
@given(cases(), SEEDS, SLICES)
def test_a_copy_that_is_cancelled_names_what_it_has_written(case: Case, seed: int, after: int) -> None:
    with rig_of(case, seed) as rig:
        check_copy_that_is_cancelled(rig, case, after)


@pytest.mark.parametrize("plane", range(3))
@pytest.mark.parametrize("chunk", range(4))
def test_one_flipped_bit_is_damaged_and_its_rows_are_unchanged(plane: int, chunk: int) -> None:
    layout = slot_layout()
    rows = list(range(64))
    with Rig(layout) as rig:
        places = rig.places(64)
        done = rig.capture(rows, 64, places)
        assert isinstance(done, JobDone)
        bit = rig.random.randrange(16 * 96 * 8)
        at = places[chunk].extents[0].offset_bytes + plane * 16 * 96 + bit // 8
        rig.shuttle[at] ^= 1 << (bit % 8)
        original = rig.memory.tobytes()
        rig.memory[:] = 0
        failed = rig.restore(rows, 64, places, done.digests)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk, failed.sticky) == ("damaged", chunk, False)
        # Slices before the damaged chunk were written and are named; nothing else was touched.
        undefined = rows_in(failed.rows_undefined) if failed.rows_undefined else []
        assert undefined == list(range(len(undefined)))
        assert len(undefined) <= chunk * 16
        touched = written_bytes(layout, rows, len(undefined))
        after = rig.memory.tobytes()
        assert all(after[n] == (original[n] if n in touched else 0) for n in range(len(after)))


def test_a_damaged_state_chunk_leaves_the_state_alone() -> None:
    layout = slot_layout()
    with Rig(layout) as rig:
        places = rig.places(8, state_slot=2)
        done = rig.capture(range(8), 8, places, state_slot=2)
        assert isinstance(done, JobDone)
        rig.shuttle[places[-1].extents[0].offset_bytes + 5] ^= 0x80
        rig.memory[:] = 0
        failed = rig.restore(range(8), 8, places, done.digests, state_slot=2)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk, failed.rows_undefined) == ("damaged", 1, ())
        assert not rig.memory.any()


@pytest.mark.parametrize("layout", [slot_layout(), paged_layout()])
def test_a_source_that_changes_between_digest_and_copy_fails_the_capture(layout: StageLayout) -> None:
    rows = list(range(8))
    with Rig(layout, faults={"capture.flip_source": "1"}) as rig:
        places = rig.places(8)
        failed = rig.capture(rows, 8, places)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk, failed.rows_undefined) == ("source_changed", 0, ())
        again = rig.capture(rows, 8, places)
        assert isinstance(again, JobDone)


def test_cancel_stops_between_slices_and_names_the_rows() -> None:
    layout = slot_layout()
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 2

    with Rig(layout, slice_bytes=1) as rig:
        places = rig.places(64)
        done = rig.capture(range(64), 64, places)
        assert isinstance(done, JobDone)
        failed = rig.restore(range(64), 64, places, done.digests, hooks=JobHooks(stopped, lambda: None))
        assert isinstance(failed, JobFailed)
        assert failed.code == "cancelled"
        assert rows_in(failed.rows_undefined) == list(range(32))
        assert failed.moved_bytes == 2 * 16 * 96 * 3


@pytest.mark.parametrize(
    ("fault", "code", "sticky"),
    [
        ("copy_error", "device_error", False),
        ("copy_oom", "out_of_memory", False),
        ("copy_sticky", "device_error", True),
    ],
)
def test_device_failures_become_reports(fault: str, code: str, sticky: bool) -> None:
    layout = slot_layout()
    with Rig(layout, slice_bytes=1, faults={f"restore.{fault}": "3"}) as rig:
        places = rig.places(64)
        done = rig.capture(range(64), 64, places)
        assert isinstance(done, JobDone)
        failed = rig.restore(range(64), 64, places, done.digests)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.sticky) == (code, sticky)
        # The third slice failed while it was written: its rows count as written.
        assert rows_in(failed.rows_undefined) == list(range(48))


def test_a_device_that_cannot_be_waited_for_is_lost() -> None:
    layout = slot_layout()
    with Rig(layout, faults={"restore.drain_error": "1+"}) as rig:
        places = rig.places(8)
        done = rig.capture(range(8), 8, places)
        assert isinstance(done, JobDone)
        failed = rig.restore(range(8), 8, places, done.digests)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.sticky) == ("device_error", True)
        assert rows_in(failed.rows_undefined) == list(range(8))


def test_a_job_is_not_done_while_its_device_cannot_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = slot_layout()
    with Rig(layout) as rig:
        places = rig.places(8, state_slot=1)
        done = rig.capture(range(8), 8, places, state_slot=1)
        assert isinstance(done, JobDone)
        copier = rig.device.copier(LaneKind.RESTORE)
        drains: list[int] = []

        def second_fails() -> None:
            drains.append(1)
            if len(drains) == 2:
                raise DeviceFailure("device_error", "unknown")

        monkeypatch.setattr(copier, "drain", second_fails)
        rig.lanes[LaneKind.RESTORE] = Lane(LaneKind.RESTORE, copier)
        failed = rig.restore(range(8), 8, places, done.digests, state_slot=1)
        assert isinstance(failed, JobFailed)
        assert failed.sticky
        assert [rows_in(failed.rows_undefined, group) for group in (0, 1)] == [list(range(8)), [1]]


@pytest.mark.parametrize("state_slot", [-1, 2])
def test_a_bug_of_ours_makes_all_of_a_restore_undefined(monkeypatch: pytest.MonkeyPatch, state_slot: int) -> None:
    layout = slot_layout()

    def broken(*_: object) -> list[bytes]:
        raise KeyError("a bug")

    with Rig(layout) as rig:
        places = rig.places(8, state_slot)
        done = rig.capture(range(8), 8, places, state_slot=state_slot)
        assert isinstance(done, JobDone)
        for kind, call in ((LaneKind.RESTORE, "verify_restore"), (LaneKind.CAPTURE, "complete_capture")):
            copier = rig.device.copier(kind)
            monkeypatch.setattr(copier, call, broken)
            rig.lanes[kind] = Lane(kind, copier)
        failed = rig.restore(range(8), 8, places, done.digests, state_slot=state_slot)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.sticky) == ("internal", False)
        assert rows_in(failed.rows_undefined) == list(range(8))
        assert rows_in(failed.rows_undefined, 1) == ([state_slot] if state_slot >= 0 else [])
        failed = rig.capture(range(8), 8, places, state_slot=state_slot)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.rows_undefined) == ("internal", ())


def test_the_time_on_the_lane_covers_all_of_the_job() -> None:
    layout = slot_layout()
    with Rig(layout, slice_bytes=1, faults={"slow_copy_s": "0.01"}) as rig:
        start_s = time.monotonic()
        done = rig.capture(range(64), 64, rig.places(64))
        taken_s = time.monotonic() - start_s
        assert isinstance(done, JobDone)
        assert 0.04 <= done.lane_s <= taken_s


@pytest.mark.parametrize("fault", ["", "1"])
def test_a_report_has_what_the_job_added_to_the_copiers_times(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    moments = iter([CopyTimes(1.0, 2.0, 3.0, 4.0), CopyTimes(1.5, 2.25, 3.125, 4.0625)])
    monkeypatch.setattr(CpuCopier, "times", property(lambda _: next(moments)))
    layout = slot_layout()
    with Rig(layout, faults={"copy_error": fault} if fault else {}) as rig:
        places = rig.places(64)
        report = rig.capture(range(64), 64, places)
        assert isinstance(report, JobFailed if fault else JobDone)
        assert (report.digest_s, report.copy_s, report.gather_s, report.verify_s) == (0.5, 0.25, 0.125, 0.0625)
        if isinstance(report, JobDone):
            assert report.digested_bytes == report.moved_bytes == sum(place.length_bytes for place in places)


def test_the_other_algorithm_is_checked_too() -> None:
    layout = slot_layout()
    with Rig(layout) as rig:
        places = rig.places(40)
        assert isinstance(rig.capture(range(40), 40, places), JobDone)
        before = rig.memory.tobytes()
        digests = b"".join(rig.digester.digest(MLH, memory_of(rig.stored(place))) for place in places)
        rig.memory[:] = 0
        assert isinstance(rig.restore(range(40), 40, places, digests, algorithm=MLH), JobDone)
        assert all(rig.memory[n] == before[n] for n in written_bytes(layout, range(40), 40))
        rig.shuttle[places[1].extents[0].offset_bytes] ^= 1
        failed = rig.restore(range(40), 40, places, digests, algorithm=MLH)
        assert isinstance(failed, JobFailed)
        assert failed.code == "damaged"


def memory_of(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_bad_jobs_are_refused() -> None:
    layout = slot_layout()
    with Rig(layout) as rig:
        places = rig.places(8)
        assert code_of(rig.capture([63, 64, 1, 2, 3, 4, 5, 6], 8, places)) == "bad_rows"
        assert code_of(rig.capture(range(7), 8, places)) == "bad_rows"
        assert code_of(rig.capture(range(8), 8, [*places, *places])) == "bad_request"
        assert code_of(rig.capture(range(8), 8, rig.places(9))) == "bad_request"
        assert code_of(rig.capture(range(8), 8, rig.places(8, 4), state_slot=4)) == "bad_rows"
        assert code_of(rig.restore(range(8), 8, places, bytes(16), tokens=9)) == "bad_tokens"
        assert code_of(rig.restore(range(8), 8, places, bytes(15))) == "bad_request"
        header = [place._replace(extents=(Extent(0, 0, GRANULE_BYTES),)) for place in places]
        assert code_of(rig.capture(range(8), 8, header)) == "bad_request"
        beyond = [place._replace(extents=(Extent(0, 160 * GRANULE_BYTES, GRANULE_BYTES),)) for place in places]
        assert code_of(rig.capture(range(8), 8, beyond)) == "bad_request"


def code_of(report: JobDone | JobFailed) -> str:
    assert isinstance(report, JobFailed)
    return report.code


def test_a_block_whose_tokens_cannot_be_located_is_refused() -> None:
    plane = Plane(0, 64, 64, 8, 8, 0)
    with Rig(stage_layout((plane,), None, 8)) as rig:
        assert code_of(rig.capture(range(2), 9, rig.places(9))) == "bad_tokens"
        assert isinstance(rig.capture(range(2), 16, rig.places(16)), JobDone)


def test_nothing_of_a_job_is_kept_after_its_report() -> None:
    layout = slot_layout()
    with Rig(layout) as rig:
        seen: list[weakref.ref[object]] = []
        copier = rig.device.copier(LaneKind.CAPTURE)
        lane = Lane(LaneKind.CAPTURE, copier)

        def note(work: SliceWork) -> None:
            seen.append(weakref.ref(work.rows[0]))

        copier.before_copy = note
        job = CaptureJob(1, 1, packed_rows(layout, range(8)), 8, pack_places(rig.places(8)), False)
        assert isinstance(lane.run(plan_job(rig.device, rig.pool, job), NEVER), JobDone)
        done = rig.capture(range(8), 8, places := rig.places(8))
        assert isinstance(done, JobDone)
        rig.shuttle[places[0].extents[0].offset_bytes] ^= 1
        rows = packed_rows(layout, range(8))
        restore = RestoreJob(2, 1, rows, 8, 8, pack_places(places), done.digests, ("xxh3-128",), False)
        plan = plan_job(rig.device, rig.pool, restore)
        seen.append(weakref.ref(plan.rows[0]))
        failed = rig.lanes[LaneKind.RESTORE].run(plan, NEVER)
        assert isinstance(failed, JobFailed)
        del plan
        gc.collect()
        assert seen
        assert all(ref() is None for ref in seen)


def test_resources_are_the_same_after_many_jobs() -> None:
    layout = slot_layout(planes=1, rows=8, chunk_tokens=8)
    with Rig(layout) as rig:
        places = rig.places(8)
        done = rig.capture(range(8), 8, places)
        assert isinstance(done, JobDone)
        before = rig.device.resources()
        for _ in range(5000):
            assert isinstance(rig.capture(range(8), 8, places), JobDone)
            assert isinstance(rig.restore(range(8), 8, places, done.digests), JobDone)
        assert rig.device.resources() == before


def test_both_lanes_at_once() -> None:
    layout = slot_layout(planes=4, row_bytes=4096, rows=256, chunk_tokens=64)
    with Rig(layout, slice_bytes=1 << 20, shuttle_granules=2 + 2 * 64) as rig:
        first, second = rig.places(128), rig.places(128)
        low, high = range(128), range(128, 256)
        done = rig.capture(low, 128, first)
        assert isinstance(done, JobDone)
        before = rig.memory.tobytes()
        reports: list[JobDone | JobFailed] = []
        threads = [
            threading.Thread(target=lambda: reports.append(rig.capture(high, 128, second))),
            threading.Thread(target=lambda: reports.append(rig.restore(low, 128, first, done.digests))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(report) for report in reports] == [JobDone, JobDone]
        assert rig.memory.tobytes() == before


def test_the_simulated_link_holds_its_rate() -> None:
    layout = slot_layout(planes=1, row_bytes=4096, rows=256, chunk_tokens=64)
    rate = 20e6
    with Rig(layout, link_bytes_per_s=rate) as rig:
        places = rig.places(256)
        start_s = time.perf_counter()
        done = rig.capture(range(256), 256, places)
        taken_s = time.perf_counter() - start_s
        assert isinstance(done, JobDone)
        assert taken_s >= 0.97 * done.moved_bytes / rate
