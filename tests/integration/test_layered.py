"""A layered restore of an engine with several stages: each group can be used as soon as it is told."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from shm.layout import Plane, StageLayout, layer_groups
from stratad.client import Client, Restored
from stratad.errors import DeadlineExceeded, StratadError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine

ROWS, ROW_BYTES, GROUPS = 2048, 768, 4


def layered_layout(planes: int) -> StageLayout:
    made = [Plane(n * ROWS * ROW_BYTES, ROW_BYTES, ROW_BYTES, ROWS) for n in range(planes)]
    return StageLayout(layer_groups(made, GROUPS, 2))


LAYOUTS = [layered_layout(8), layered_layout(16)]
COUNT = 1000
SOURCE, TARGET = range(COUNT), range(COUNT, 2 * COUNT)


def group_of(engine: FakeEngine, stage: int, group: int, rows: range) -> list[bytes]:
    buffer = engine.pools[stage].buffer
    found = []
    for plane in LAYOUTS[stage].groups[group].planes:
        start = plane.offset_bytes + rows.start * ROW_BYTES
        found.append(bytes(buffer[start : start + len(rows) * ROW_BYTES]))
    return found


@contextlib.contextmanager
def held(client: Client, worker: str) -> Iterator[None]:
    """A worker is stopped for a while."""
    pid = next(info.pid for info in client.stats().workers if info.worker == worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_each_group_is_there_when_it_is_waited_for_and_the_rest_comes() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", SOURCE, SOURCE)
        with held(client, "cpu:1"):
            ticket = engine.engine.restore("a", rows=TARGET, slot=0, layered=True)
            for group in range(GROUPS):
                ticket.wait_group(0, group)
                assert group_of(engine, 0, group, TARGET) == group_of(engine, 0, group, SOURCE)
                assert ticket.group_done(0, group)
                assert not ticket.group_done(1, group)
                assert not ticket.done()
                assert ticket.rows_busy
        for group in range(GROUPS):
            ticket.wait_group(1, group)
            assert group_of(engine, 1, group, TARGET) == group_of(engine, 1, group, SOURCE)
        assert isinstance(ticket.result(), Restored)

        async def all_groups() -> None:
            again = engine.engine.restore("a", rows=SOURCE, slot=0, layered=True)
            await asyncio.gather(*(again.group_async(1, group) for group in range(GROUPS)))
            await again

        asyncio.run(all_groups())


def test_who_does_not_ask_for_groups_waits_for_the_end() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", SOURCE, SOURCE)
        with held(client, "cpu:1"):
            ticket = engine.engine.restore("a", rows=TARGET, slot=0)
            with pytest.raises(DeadlineExceeded):
                ticket.wait_group(0, 0, deadline_s=0.2)
            assert not ticket.group_done(0, 0)
        ticket.wait_group(0, 0)
        assert ticket.done()


def test_a_failure_after_some_groups_is_told_to_who_waits_and_to_who_asks_again() -> None:
    with (
        DaemonProcess("cpu:2", faults={"cpu:1/restore.copy_error": "9"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        engine.capture("a", SOURCE, SOURCE)
        ticket = engine.engine.restore("a", rows=TARGET, slot=0, layered=True)
        with pytest.raises(StratadError, match="device_error") as caught:
            ticket.wait_group(1, GROUPS - 1)
        with pytest.raises(StratadError, match="device_error"):
            ticket.group_done(1, 0)
        undefined = caught.value.stages[1].rows_undefined
        assert len(undefined[0]) == 8  # all of its first group, in one run
        assert undefined[GROUPS - 1] == b""
        engine.restore("a", TARGET)
        for stage, group in ((0, 0), (1, GROUPS - 1)):
            assert group_of(engine, stage, group, TARGET) == group_of(engine, stage, group, SOURCE)
