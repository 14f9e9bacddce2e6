"""Captures that expect chunks to be stored already, and restores into rows that hold most, on real workers."""

import os
import signal
from collections.abc import Iterator

import pytest

from ipc.messages import Captured, Restored
from stratad.client import Client
from stratad.errors import StratadError, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, paged_layout, slot_layout
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())
SETTINGS = {"shuttle.reuse": "verified", "restarts.backoff_cap_s": "0.05"}
ROWS, MORE, ELSEWHERE = range(600), range(700), range(1000, 1700)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("cpu:2", SETTINGS) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
        connected.clear("ns")


def skipped(reply: Captured | Restored) -> list[int]:
    return [outcome.skipped_bytes for outcome in reply.stages]


def moved(reply: Captured | Restored) -> list[int]:
    return [outcome.moved_bytes for outcome in reply.stages]


def change(engine: FakeEngine, stage: int, row: int) -> None:
    """One byte of one row becomes another."""
    plane = engine.layouts[stage].groups[0].planes[1]
    engine.pools[stage].buffer[plane.offset_bytes + row * plane.row_stride_bytes + 5] ^= 0x10


def check(engine: FakeEngine, conversation: str, expected: list[list[bytes]], tokens: int) -> None:
    """A restore over other bytes brings back exactly these."""
    kept = engine.everything()
    engine.fill()
    engine.restore(conversation, ELSEWHERE[:tokens])
    assert engine.contents(ELSEWHERE, tokens) == expected
    for pool, bytes_before in zip(engine.pools, kept, strict=True):
        pool.buffer[:] = bytes_before


ROW_BYTES = 4 * 96


def test_the_next_turn_copies_what_is_new(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", ROWS, ROWS)
        reply = engine.capture("a", MORE, MORE)
        assert moved(reply) == [(700 - 512) * ROW_BYTES] * 2
        assert skipped(reply) == [512 * ROW_BYTES] * 2
        check(engine, "a", engine.contents(MORE, 700), 700)


def test_a_changed_byte_under_the_same_tokens_is_captured(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", ROWS, ROWS)
        change(engine, 1, 300)
        expected = engine.contents(MORE, 700)
        reply = engine.capture("a", MORE, MORE)
        assert moved(reply) == [(700 - 512) * ROW_BYTES, (700 - 256) * ROW_BYTES]
        assert skipped(reply) == [512 * ROW_BYTES, 256 * ROW_BYTES]
        check(engine, "a", expected, 700)
        counters = client.stats().counters
        assert counters["chunks_missed"] >= 1


def test_blocks_of_another_conversation_are_reused(client: Client) -> None:
    with FakeEngine(client, (paged_layout(), paged_layout(planes=2))) as engine:
        blocks = list(range(40, 20, -1))
        engine.capture("a", range(300), blocks[:19])
        reply = engine.capture("b", range(320), blocks)
        assert moved(reply) == [(320 - 256) * 3 * 48, (320 - 256) * 2 * 48]
        expected = engine.contents(blocks, 320)
        engine.fill()
        engine.restore("b", blocks)
        assert engine.contents(blocks, 320) == expected


def test_the_image_that_gave_the_hints_is_dropped_in_the_middle(daemon: DaemonProcess, client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine, daemon.client() as other:
        engine.capture("a", ROWS, ROWS)
        expected = engine.contents(MORE, 700)
        (pid,) = {worker.pid for worker in client.stats().workers if worker.worker == "cpu:0"}
        os.kill(pid, signal.SIGSTOP)
        try:
            ticket = engine.engine.capture("b", MORE, rows=((0, 700),), slot=0)
            assert wait_until(lambda: other.stats().ops)[0].state == "copying"
            other.drop("ns", "a")
            assert other.stats().images == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        reply = ticket.result()
        assert skipped(reply) == [512 * ROW_BYTES] * 2
        check(engine, "b", expected, 700)
        assert client.stats().images == 1


# Slices of cpu:0 in its capture lane: the first capture, then what is looked at, what is copied, and what was missed.
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_worker_killed_in_any_phase_loses_nothing(at: int) -> None:
    with (
        DaemonProcess("cpu:2", SETTINGS, {"cpu:0#1/capture.copy_kill": str(at)}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        engine.capture("a", ROWS, ROWS)
        before = engine.contents(ROWS, 600)
        used = client.stats().published_bytes
        change(engine, 0, 100)
        expected = engine.contents(MORE, 700)
        with pytest.raises(StratadError) as caught:
            engine.capture("a", MORE, MORE)
        assert (caught.value.code, caught.value.stage) == ("worker_died", 0)
        wait_until(lambda: client.stats().health == "ok")
        assert (client.stats().published_bytes, client.stats().staged_bytes) == (used, 0)
        check(engine, "a", before, 600)
        reply = engine.capture("a", MORE, MORE)
        assert skipped(reply) == [256 * ROW_BYTES, 512 * ROW_BYTES]
        check(engine, "a", expected, 700)


def test_a_restore_leaves_rows_that_are_right_and_writes_the_rest(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", MORE, MORE)
        expected = engine.contents(MORE, 700)
        change(engine, 0, 10)
        change(engine, 1, 650)
        ticket = engine.engine.restore("a", rows=((0, 700),), slot=0, resident_tokens=700)
        reply = ticket.result()
        assert engine.contents(MORE, 700) == expected
        assert skipped(reply) == [(700 - 256) * ROW_BYTES, 512 * ROW_BYTES]
        assert moved(reply) == [256 * ROW_BYTES, (700 - 512) * ROW_BYTES]
        whole = engine.engine.restore("a", rows=((0, 700),), slot=0).result()
        assert skipped(whole) == [0, 0]


def test_a_transit_image_is_restored_in_the_same_way(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine:
        engine.engine.slot_to(700, ((0, 700),), slot=0).result()
        expected = engine.contents(MORE, 700)
        change(engine, 0, 10)
        reply = engine.engine.slot_from(0, ((0, 700),), slot=1, resident_tokens=700).result()
        assert engine.contents(MORE, 700) == expected
        assert moved(reply) == [256 * ROW_BYTES, 0]


def test_resident_tokens_that_cannot_be_are_refused_at_once(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine, pytest.raises(UsageError) as caught:
        engine.engine.restore("a", rows=((0, 700),), slot=0, resident_tokens=-1)
    assert caught.value.code == "bad_tokens"


@pytest.mark.parametrize(("reuse", "images"), [("off", 2), ("storage", 1)])
def test_what_is_shared_and_copied_without_verified_reuse(reuse: str, images: int) -> None:
    with (
        DaemonProcess("cpu:2", {"shuttle.reuse": reuse}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        assert client.stats().settings["shuttle.reuse"] == reuse
        engine.capture("a", ROWS, ROWS)
        once = client.stats().published_bytes
        reply = engine.capture("b", ROWS, ROWS)
        assert moved(reply) == [600 * ROW_BYTES] * 2
        assert client.stats().published_bytes == images * once
        engine.engine.restore("a", rows=((0, 600),), slot=0, resident_tokens=600).result()
        check(engine, "b", engine.contents(ROWS, 600), 600)
