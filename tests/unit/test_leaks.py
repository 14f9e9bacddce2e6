"""The leak fixture sees what it is there to see."""

import os
import subprocess
import threading
from pathlib import Path

import pytest
import zmq

from tests.support.instances import fresh_instance
from tests.support.leaks import held_now, new_since


def test_descriptors() -> None:
    before = held_now()
    read_end, write_end = os.pipe()
    assert len(new_since(before)) == 2
    os.close(read_end)
    os.close(write_end)
    assert new_since(before) == []


def test_children_also_when_dead() -> None:
    before = held_now()
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert new_since(before) == [f"child {child.pid}"]
    child.wait()
    assert new_since(before) == []


def test_threads() -> None:
    before = held_now()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    assert "forgotten" in new_since(before)[0]
    end.set()
    thread.join()
    assert new_since(before) == []


def test_contexts() -> None:
    before = held_now()
    context = zmq.Context()
    context.socket(zmq.DEALER).close()
    assert any("ZMQ" in entry for entry in new_since(before))
    context.term()


def test_segments() -> None:
    before = held_now()
    path = Path("/dev/shm") / f"stratad.{fresh_instance()}.cpu_0.0"
    path.touch()
    try:
        assert new_since(before) == [f"segment {path.name}"]
    finally:
        path.unlink()


@pytest.mark.parametrize("instance", ["t1-0", "breaker{pid}", "fixture-{pid}", "default{fresh}"])
def test_segments_of_daemons_that_are_not_ours(instance: str) -> None:
    before = held_now()
    other = Path("/dev/shm") / f"stratad.{instance.format(fresh=fresh_instance(), pid=os.getpid())}.cpu_0.0"
    other.touch()
    try:
        assert new_since(before) == []
    finally:
        other.unlink()


def test_segments_of_private_daemons() -> None:
    before = held_now()
    path = Path("/dev/shm") / f"stratad.bench{os.getpid()}x999.cpu_0.0"
    path.touch()
    try:
        assert new_since(before) == [f"segment {path.name}"]
    finally:
        path.unlink()
