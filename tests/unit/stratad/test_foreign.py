"""Processes that are not our children, with descriptors and without."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shm.process import start_ticks
from stratad.core.adoption import Legacy
from stratad.core.core import Core
from stratad.core.effects import WatchFormer
from stratad.core.records import WorkerRecord, replay
from stratad.core.state import Instant, WorkerState
from stratad.foreign import AGAIN_S, ForeignProcesses
from stratad.turn import Turn
from stratad.watch import Watch
from tests.support.core_harness import KEY_ID, settings
from tests.support.wait import wait_until


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


@contextmanager
def no_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def former(child: "subprocess.Popen[bytes]") -> tuple[Core, WatchFormer]:
    """A core that waits for the end of an earlier daemon's worker."""
    ticks = start_ticks(child.pid)
    legacy = Legacy(replay([WorkerRecord("cpu:0", child.pid, ticks)]), {}, KEY_ID)
    core = Core(settings(), {"cpu:0": "cpu:0"}, Instant(0.0, 0.0), legacy)
    return core, WatchFormer("cpu:0", child.pid, ticks)


def run_ready(watch: Watch) -> bool:
    """Call what is to be called; whether anything was."""
    handlers = list(watch.ready())
    for handler in handlers:
        handler()
    return bool(handlers)


@pytest.mark.parametrize("ordered", ["while it is not watched", "afterwards"])
def test_a_former_worker_is_watched_and_killed_once_there_is_a_descriptor(
    child: "subprocess.Popen[bytes]", ordered: str
) -> None:
    core, effect = former(child)
    with Watch.open() as watch:
        turn = Turn(core, lambda _: None, lambda _: None, lambda: None)
        processes = ForeignProcesses(turn, watch)
        with no_descriptor():
            processes.watch_former(effect)
            processes.tend(AGAIN_S)
        assert core.state.workers["cpu:0"].state is WorkerState.AWAITING, "nothing is proven"
        assert processes.wait_s(0.0, 60.0) <= AGAIN_S
        if ordered == "while it is not watched":
            processes.kill_former("cpu:0")
            assert child.poll() is None
        processes.tend(3 * AGAIN_S)
        assert processes.wait_s(0.0, 60.0) == 60.0
        if ordered == "afterwards":
            processes.kill_former("cpu:0")
        wait_until(lambda: run_ready(watch))
        assert core.state.workers["cpu:0"].state is not WorkerState.AWAITING
        processes.close()


def test_one_that_has_gone_meanwhile_needs_no_watch(child: "subprocess.Popen[bytes]") -> None:
    core, effect = former(child)
    child.kill()
    child.wait()
    with Watch.open() as watch:
        processes = ForeignProcesses(Turn(core, lambda _: None, lambda _: None, lambda: None), watch)
        processes.watch_former(effect)
        assert core.state.workers["cpu:0"].state is not WorkerState.AWAITING
        processes.close()
