"""Engines that share a worker: a small copy does not wait for a huge one, two huge ones advance together."""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from stratad.client import Captured, Client, Restored, Ticket
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout

ROW_BYTES = 4 * 768
LAYOUTS = [slot_layout(rows=4096, row_bytes=768)]
HUGE, SMALL = 3072, 256  # rows: 9 MiB, 0.16 s of the simulated link, and 0.75 MiB, one slice
HALF = HUGE // 2
SETTINGS = {"cpu_device.link_bytes_per_s": "6e7", "copy.small_bytes": "1MiB", "copy.inline_bytes": "0"}


def start(engine: FakeEngine, kind: str, name: str, rows: range) -> Ticket[Captured] | Ticket[Restored]:
    if kind == "capture":
        return engine.engine.capture(name, tokens=rows, rows=rows, slot=0)
    return engine.engine.restore(name, rows=rows, slot=0)


@contextlib.contextmanager
def held(client: Client) -> Iterator[None]:
    """The worker is stopped, so that all that is asked of it meanwhile lies before it at once."""
    pid = client.stats().workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ended(client: Client) -> list[str]:
    """The images in the order in which their last captures and restores ended, as the daemon saw it."""
    return [image.conversation for image in sorted(client.list_images(), key=lambda image: image.used_unix_s)]


@pytest.mark.parametrize("kind", ["capture", "restore"])
def test_a_small_copy_behind_a_huge_one_ends_first_and_the_huge_one_ends(kind: str) -> None:
    with (
        DaemonProcess("cpu:1", SETTINGS) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as first,
        daemon.client() as other,
        FakeEngine(other, LAYOUTS, seed=2, namespace="other") as second,
    ):
        wanted = [first.contents(range(HUGE), HUGE), second.contents(range(SMALL), SMALL)]
        if kind == "restore":
            first.capture("huge", range(HUGE), range(HUGE))
            second.capture("small", range(SMALL), range(SMALL))
            first.fill()
            second.fill()
        with held(client):
            huge = start(first, kind, "huge", range(HUGE))
            client.list_images()  # answered after the daemon has passed the job on
            small = start(second, kind, "small", range(SMALL))
            other.list_images()
        small.result()
        huge.result()
        assert ended(client) == ["small", "huge"]
        if kind == "capture":
            first.fill()
            second.fill()
            second.restore("small", range(SMALL))
            first.restore("huge", range(HUGE))
        assert [first.contents(range(HUGE), HUGE), second.contents(range(SMALL), SMALL)] == wanted


def test_two_huge_restores_of_two_engines_advance_together() -> None:
    """The one that came later has half as much to copy and ends first."""
    with (
        DaemonProcess("cpu:1", SETTINGS) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as first,
        daemon.client() as other,
        FakeEngine(other, LAYOUTS, seed=2, namespace="other") as second,
    ):
        wanted = [first.contents(range(HUGE), HUGE), second.contents(range(HALF), HALF)]
        first.capture("a", range(HUGE), range(HUGE))
        second.capture("b", range(HALF), range(HALF))
        first.fill()
        second.fill()
        with held(client):
            whole = first.engine.restore("a", rows=range(HUGE), slot=0)
            client.list_images()
            part = second.engine.restore("b", rows=range(HALF), slot=0)
            other.list_images()
        part.result()
        whole.result()
        assert ended(client) == ["b", "a"]
        assert [first.contents(range(HUGE), HUGE), second.contents(range(HALF), HALF)] == wanted
