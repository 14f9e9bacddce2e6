"""Slot copies on real workers: equal bytes, and after a fault the target rows are named and the source is untouched."""

import os
import signal

import pytest

from shm.rows import unpack_rows
from stratad.client import Captured, Copied, Restored, Ticket
from stratad.errors import StratadError, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.layouts import state_bytes
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(state_bytes=5000), slot_layout(planes=3, row_bytes=160))
TOKENS = 700
SOURCE, TARGET = range(3, 3 + TOKENS), range(1000, 1000 + TOKENS)
# A slice of a `cpu` worker is 1 MiB at most: chunks of 256 tokens that large make each of them a slice.
SLICED = (slot_layout(rows=1024, planes=4, row_bytes=1024), slot_layout(rows=1024, planes=4, row_bytes=1024))


def states(engine: FakeEngine, slot: int) -> bytes:
    return bytes(engine.pools[0].buffer[n] for n in sorted(state_bytes(engine.layouts[0], slot)))


def copied(engine: FakeEngine, kind: str, source: range = SOURCE, target: range = TARGET) -> None:
    """One slot copy of the given kind, from slot 0 to slot 2, waited for."""
    for part in ("direct",) if kind == "direct" else ("to", "from"):
        start(engine, part, source, target).result()


@pytest.mark.parametrize("kind", ["direct", "host"])
def test_the_target_holds_what_the_source_does_and_all_else_is_as_it_was(kind: str) -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        before = engine.everything()
        expected, state = engine.contents(SOURCE, TOKENS), states(engine, 0)
        copied(engine, kind)
        assert engine.contents(TARGET, TOKENS) == expected
        assert states(engine, 2) == state
        after = engine.everything()
        for stage, layout in enumerate(LAYOUTS):
            group = layout.groups[0]
            written = {
                plane.offset_bytes + row * plane.row_stride_bytes + byte
                for plane in group.planes
                for row in TARGET
                for byte in range(plane.row_bytes)
            } | (state_bytes(layout, 2) if layout.states else set())
            assert all(
                a == b for n, (a, b) in enumerate(zip(after[stage], before[stage], strict=True)) if n not in written
            )
        assert (client.stats().images, client.stats().published_bytes) == (0, 0)


def start(
    engine: FakeEngine, kind: str, source: range, target: range
) -> Ticket[Captured] | Ticket[Restored] | Ticket[Copied]:
    """One operation of the kind, from slot 0 to slot 2."""
    if kind == "direct":
        return engine.engine.slot_direct(len(source), source, target, slot=0, target_slot=2)
    if kind == "to":
        return engine.engine.slot_to(len(source), source, slot=0)
    return engine.engine.slot_from(0, target, slot=2)


FAULTS = ("copy_error", "copy_kill", "copy_sticky", "copy_stall")
READING_FAULTS = (*FAULTS, "flip_source")
CASES = [("from", fault) for fault in FAULTS] + [(kind, fault) for kind in ("direct", "to") for fault in READING_FAULTS]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_one_stage_fails(kind: str, fault: str) -> None:
    # Its lane's second copy: the first slice of the target is written by then.
    lane = "restore" if kind == "from" else "capture"
    settings = {"deadlines.job_floor_s": "0.5"}
    with (
        DaemonProcess("cpu:2", settings, {f"cpu:1#1/{lane}.{fault}": "2"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, SLICED) as engine,
    ):
        source, target = range(400), range(500, 900)
        expected = engine.contents(source, 400)
        if kind == "from":
            engine.engine.slot_to(400, source, slot=0).result()
        before = engine.everything()
        with pytest.raises(StratadError) as caught:
            start(engine, kind, source, target).result()
        error = caught.value
        assert error.stage == 1
        assert [outcome.state for outcome in error.stages] == ["done", "failed"]
        after = engine.everything()
        if fault == "flip_source":
            assert error.code == "source_changed"
        else:
            assert engine.contents(source, 400) == expected
        named = {
            row
            for packed in error.stages[1].rows_undefined
            for first, count in unpack_rows(packed)
            for row in range(first, first + count)
        }
        assert named <= set(target)
        assert named or kind == "to"
        for plane in SLICED[1].groups[0].planes:
            for row in set(target) - named:
                at = plane.offset_bytes + row * plane.row_stride_bytes
                assert after[1][at : at + plane.row_bytes] == before[1][at : at + plane.row_bytes]
        wait_until(lambda: client.stats().health == "ok", 10)
        again = engine.contents(source, 400)
        copied(engine, "direct" if kind == "direct" else "host", source, target)
        assert engine.contents(target, 400) == again
        wait_until(lambda: not client.stats().ops)
        assert client.stats().published_bytes == client.stats().staged_bytes == 0


def test_a_transit_image_outlives_the_death_of_its_worker() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        expected = engine.contents(SOURCE, TOKENS)
        engine.engine.slot_to(TOKENS, SOURCE, slot=0).result()
        os.kill(client.stats().workers[1].pid, signal.SIGKILL)
        wait_until(lambda: client.stats().workers[1].deaths == 1)
        engine.fill()
        engine.engine.slot_from(0, TARGET, slot=2).result()
        assert engine.contents(TARGET, TOKENS) == expected


def test_transit_images_end_with_their_engine() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client:
        with FakeEngine(client, LAYOUTS) as engine:
            engine.engine.slot_to(TOKENS, SOURCE, slot=0).result()
            assert client.stats().published_bytes > 0
            engine.engine.slot_to(TOKENS, SOURCE, slot=1).result()
            engine.engine.slot_drop(1)
            with pytest.raises(UsageError, match="unknown_image"):
                engine.engine.slot_drop(1)
        wait_until(lambda: client.stats().published_bytes == 0)


def test_poisoned_slots_and_busy_rows() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.engine.mark(0, "poisoned")
        for start in (
            lambda: engine.engine.slot_direct(TOKENS, SOURCE, TARGET, slot=0, target_slot=1),
            lambda: engine.engine.slot_to(TOKENS, SOURCE, slot=0),
        ):
            with pytest.raises(UsageError, match="poisoned"):
                start().result()
        engine.engine.mark(0, "clean")
        with pytest.raises(UsageError, match="both source and target"):
            engine.engine.slot_direct(TOKENS, SOURCE, range(500, 1200), slot=0, target_slot=1).result()
        with pytest.raises(UsageError, match="both source and target"):
            engine.engine.slot_direct(TOKENS, SOURCE, TARGET, slot=1, target_slot=1).result()
