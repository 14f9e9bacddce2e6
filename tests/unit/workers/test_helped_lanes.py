"""Lanes whose every second slice a helper takes: all that holds without it holds with it."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ipc.messages import JobDone, JobFailed
from tests.support.shape_cases import Case, cases
from tests.unit.workers.rig import Rig, slot_layout
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
from workers.device import DeviceFailure, LaneKind, SliceWork
from workers.digest import XXH3

SEEDS = st.integers(0, 2**32)
SLICES = st.integers(0, 6)
FEW = settings(max_examples=25, deadline=None)


def rig_of(case: Case, seed: int, *, fragment: bool = False, faults: dict[str, str] | None = None) -> Rig:
    return Rig(
        case.layout,
        seed=seed,
        faults=faults,
        slice_bytes=SLICE_BYTES,
        fragment=fragment,
        shuttle_granules=granules_of(case),
        pool_bytes=case.pool_bytes,
        helped=True,
    )


@FEW
@given(cases(), st.booleans(), SEEDS, st.data())
def test_captures_and_restores(case: Case, fragment: bool, seed: int, data: st.DataObject) -> None:
    with rig_of(case, seed, fragment=fragment) as rig:
        check_capture_and_restore(rig, case, data.draw(st.integers(0, case.tokens)), XXH3)


@FEW
@given(cases(), SEEDS, SLICES)
def test_copies_and_digests(case: Case, seed: int, after: int) -> None:
    with rig_of(case, seed) as rig:
        check_copy_that_is_cancelled(rig, case, after)
    with rig_of(case, seed) as rig:
        check_digests_that_are_cancelled(rig, case, after)
        check_digests(rig, case, range(len(case.spans)), XXH3)
        check_copy(rig, case)


@FEW
@given(cases(), SEEDS, SLICES, st.sampled_from([("flip_source", "source_changed"), ("copy_error", "device_error")]))
def test_copies_that_fail(case: Case, seed: int, number: int, fault: tuple[str, str]) -> None:
    with rig_of(case, seed, faults={fault[0]: str(number + 1)}) as rig:
        check_copy_that_fails(rig, case, number, fault[1])


def test_both_threads_take_slices_and_a_source_that_changes_under_either_is_noticed() -> None:
    layout = slot_layout(rows=256)
    rows = list(range(256))
    with Rig(layout, helped=True, slice_bytes=16 * 96 * 3) as rig:
        places = rig.places(256)
        copier = rig.copiers[LaneKind.CAPTURE]
        threads: set[int] = set()
        both = threading.Event()

        def meet(_: SliceWork) -> None:
            threads.add(threading.get_ident())
            if len(threads) == 2:
                both.set()
            # Whoever has the first slice waits until the other has come for one.
            assert both.wait(10)

        copier.before_copy = meet
        done = rig.capture(rows, 256, places)
        assert isinstance(done, JobDone), done
        assert len(threads) == 2

        helpers = threads - {threading.get_ident()}
        for mine in (True, False):
            flipped = threading.Event()

            def flip(work: SliceWork, mine: bool = mine, flipped: threading.Event = flipped) -> None:
                at_home = threading.get_ident() not in helpers
                if at_home == mine and not flipped.is_set():
                    span = work.chunks[0].span
                    rig.memory[span.first_row * 128] ^= 1
                    flipped.set()
                assert flipped.wait(10)

            copier.before_copy = flip
            failed = rig.capture(rows, 256, places)
            assert isinstance(failed, JobFailed)
            assert failed.code == "source_changed"


def test_the_first_slices_failure_waits_for_the_helper_that_is_at_the_second() -> None:
    layout = slot_layout(rows=64)
    with Rig(layout, helped=True, slice_bytes=16 * 96 * 3) as rig:
        places = rig.places(64)
        home = threading.get_ident()
        began, out = threading.Event(), threading.Event()
        ended: list[int] = []

        def hold(_: SliceWork) -> None:
            if threading.get_ident() == home:
                assert began.wait(10)
                threading.Thread(target=out.set).start()
                raise DeviceFailure("device_error", "the slice of the lane itself")
            began.set()
            assert out.wait(10)
            ended.append(1)

        rig.copiers[LaneKind.CAPTURE].before_copy = hold
        report = rig.capture(list(range(64)), 64, places)
        assert isinstance(report, JobFailed)
        assert report.code == "device_error"
        # The helper may write to shuttles that are given to others as soon as the report is out.
        assert ended == [1]


@pytest.mark.parametrize("chunk", range(4))
def test_a_damaged_chunk_is_never_scattered_whoever_staged_it(chunk: int) -> None:
    layout = slot_layout()
    rows = list(range(64))
    with Rig(layout, helped=True, slice_bytes=16 * 96 * 3) as rig:
        places = rig.places(64)
        done = rig.capture(rows, 64, places)
        assert isinstance(done, JobDone)
        original = rig.memory.copy()
        rig.shuttle[places[chunk].extents[0].offset_bytes + 5] ^= 1
        rig.memory[:] = 0
        failed = rig.restore(rows, 64, places, done.digests)
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk) == ("damaged", chunk)
        for plane in range(3):
            start = plane * 128 * 64
            for number in range(4):
                part = slice(start + number * 16 * 128, start + number * 16 * 128 + 96)
                wanted = original[part] if number < chunk else np.zeros(96, np.uint8)
                assert np.array_equal(rig.memory[part], wanted)


def test_a_simulated_link_is_held_by_one_thread() -> None:
    staging = []
    for link_bytes_per_s in (0.0, 1e9):
        with Rig(slot_layout(), helped=True, link_bytes_per_s=link_bytes_per_s) as rig:
            staging.append(rig.device.resources()["staging_bytes"])
            assert isinstance(rig.capture(list(range(64)), 64, rig.places(64)), JobDone)
    # A helper needs memory of its own.
    assert staging[0] == 2 * staging[1]


@pytest.mark.parametrize("helped", [False, True])
def test_times_say_what_went_between_rows_and_staging_and_into_proofs(helped: bool) -> None:
    rows = list(range(64))
    with Rig(slot_layout(rows=128), helped=helped) as rig:
        places = rig.places(64)
        captured = rig.capture(rows, 64, places)
        assert isinstance(captured, JobDone)
        assert captured.gather_s == 0 < captured.verify_s < captured.digest_s
        restored = rig.restore(rows, 64, places, captured.digests)
        assert isinstance(restored, JobDone)
        assert 0 < restored.gather_s < restored.copy_s
        assert 0 < restored.verify_s == restored.digest_s
        copied = rig.copy(rows, range(64, 128), 64)
        assert isinstance(copied, JobDone)
        assert copied.gather_s == pytest.approx(copied.copy_s)
        assert 0 < copied.verify_s < copied.digest_s
