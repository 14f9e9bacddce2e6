"""Makers near the end of memory take turns, across processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shm.extent import GRANULE_BYTES
from shm.header import ShuttleHeader
from shm.headroom import Headroom
from shm.process import boot_id
from shm.shuttle import MARGIN_BYTES, MOUNT, STEP_BYTES, Shuttle, ShuttleError, ShuttleFault, unlink
from shm.turns import TurnTaken, turn
from tests.support.instances import fresh_instance

NEAR = Headroom(MARGIN_BYTES + STEP_BYTES, "memory.max of a test")
FAR = Headroom(2**40, "memory.max of a test")


@contextmanager
def held_elsewhere(path: Path) -> Iterator[None]:
    """Another process has the turn."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with turn(path):
            os.write(tell, b"x")
            signal.pause()
    try:
        assert os.read(ready, 1) == b"x"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)


@pytest.fixture
def lock() -> Iterator[Path]:
    path = MOUNT / f"stratad.{fresh_instance()}.lock"
    path.touch(0o600)
    yield path
    for left in MOUNT.glob(f"{path.stem}.*"):
        left.unlink()


def test_one_at_a_time_and_the_next_after_the_end_of_the_holder(lock: Path) -> None:
    with held_elsewhere(lock), pytest.raises(TurnTaken), turn(lock, 0.01):
        pass
    with turn(lock, 0.01):
        pass
    with turn(lock, 0.01):
        pass


def test_without_a_lock_file_there_is_nobody_to_wait_for(lock: Path) -> None:
    with turn(lock.with_name("stratad.nobody.lock"), 0.01):
        pass


@pytest.mark.parametrize(("room", "made"), [(FAR, True), (NEAR, False)])
def test_only_near_the_end_of_memory_a_maker_waits_for_others(lock: Path, room: Headroom, made: bool) -> None:
    """Two that looked at the same moment would both take the last bytes, and the kernel would kill for it."""
    header = ShuttleHeader(lock.name.split(".")[1], "cpu_0", 0, 4 * GRANULE_BYTES, boot_id())
    with held_elsewhere(lock):
        if made:
            Shuttle.create(header, headroom=lambda: room).close()
        else:
            with pytest.raises(ShuttleError, match=r"memory\.max of a test, which another worker is") as caught:
                Shuttle.create(header, headroom=lambda: room)
            assert caught.value.fault is ShuttleFault.NO_SPACE
    assert unlink(header.segment) is made


def test_the_room_is_looked_at_again_once_the_turn_has_come(lock: Path) -> None:
    header = ShuttleHeader(lock.name.split(".")[1], "cpu_0", 0, 4 * GRANULE_BYTES, boot_id())
    looks: list[Headroom] = []
    steps: list[int] = []

    def note(reserved_bytes: int) -> bool:
        steps.append(reserved_bytes)
        return True

    def shrinking() -> Headroom:
        looks.append(NEAR if len(looks) < 2 else Headroom(100, "what the one before has left"))
        return looks[-1]

    with pytest.raises(ShuttleError, match="what the one before has left"):
        Shuttle.create(header, headroom=shrinking, on_step=note)
    assert steps == [], "nothing was taken in between"
    assert not (MOUNT / header.segment[1:]).exists()
