"""The instance lock against everything that can lie at its name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.shuttle import MOUNT
from stratad.lock import InstanceLock, InstanceLocked
from tests.support.instances import fresh_instance


@pytest.fixture
def path() -> Iterator[Path]:
    path = MOUNT / f"stratad.{fresh_instance()}.lock"
    yield path
    for left in MOUNT.glob(f"{path.name}*"):
        left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()


def instance_of(path: Path) -> str:
    return path.name.split(".")[1]


def taken_elsewhere(path: Path) -> bool:
    """Whether another process is refused."""
    code = "import sys; from stratad.lock import InstanceLock as L; L.take(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, instance_of(path)], capture_output=True, timeout=20, check=False)
    assert done.returncode == 0 or b"InstanceLocked" in done.stderr, done.stderr
    return done.returncode != 0


def test_one_holder_at_a_time_and_its_pid_is_shown(path: Path) -> None:
    lock = InstanceLock.take(instance_of(path))
    with pytest.raises(InstanceLocked, match=rf"pid {os.getpid()}"):
        InstanceLock.take(instance_of(path))
    lock.release(unlink=False)
    again = InstanceLock.take(instance_of(path))
    again.release(unlink=True)
    again.release(unlink=True)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink", "hard link"])
def test_what_is_no_plain_file_of_ours_is_neither_locked_nor_changed(path: Path, kind: str) -> None:
    other = path.with_name(f"{path.name}.other")
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "symlink":
            other.write_text("precious")
            path.symlink_to(other)
        case _:
            other.write_text("precious")
            path.hardlink_to(other)
    with pytest.raises(InstanceLocked, match="no plain file with one name"):
        InstanceLock.take(instance_of(path))
    assert os.path.lexists(path)
    assert not other.exists() or other.read_text() == "precious"


def test_a_removed_lock_is_taken_anew_under_its_name(path: Path) -> None:
    lock = InstanceLock.take(instance_of(path))
    inode = path.stat().st_ino
    lock.renew()
    assert path.stat().st_ino == inode
    path.unlink()
    lock.renew()
    assert taken_elsewhere(path)
    lock.release(unlink=True)
    lock.renew()
    assert not path.exists()


def test_a_removed_lock_that_another_has_taken_is_his(path: Path) -> None:
    lock = InstanceLock.take(instance_of(path))
    path.unlink()
    other = InstanceLock.take(instance_of(path))
    with pytest.raises(InstanceLocked):
        lock.renew()
    lock.release(unlink=False)
    assert taken_elsewhere(path)
    other.release(unlink=True)
