"""stratactl doctor: files in /dev/shm and descriptors, seen without a daemon."""

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from stratad.ctl.doctor_daemon import Owner
from stratad.ctl.doctor_segments import foreign, missing, open_files, orphans
from stratad.ctl.findings import State
from stratad.open_files import LEAST
from tests.support.ctl_fakes import STATS

ME = os.geteuid()
LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax open files            {}                 {}                 files\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host whose daemon is process 7 and has this /dev/shm."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/root").symlink_to(tmp_path)
    return tmp_path


def test_segments_that_lost_their_names_are_counted(root: Path) -> None:
    shm = root / "dev/shm"
    stats = msgspec.structs.replace(STATS, workers=STATS.workers[:1])  # cpu:0 with two shuttles
    for number in (0, 3):
        (shm / f"stratad.one.cpu_0.{number}").touch()
    (shm / "stratad.other.cpu_0.0").touch()
    assert missing("one", stats, Owner(7, ME), shm, root).state is State.OK
    (shm / "stratad.one.cpu_0.3").unlink()
    (shm / "stratad.one.cpu_0.4").mkdir()
    check = missing("one", stats, Owner(7, ME), shm, root)
    assert (check.state, "1 of cpu:0" in check.what, "RemoveIPC" in check.fix) == (State.FAIL, True, True)


def test_another_dev_shm_is_not_judged(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    check = missing("one", STATS, Owner(7, ME), elsewhere, root)
    assert (check.state, "cannot be seen from here" in check.what) == (State.OK, True)


def test_what_is_no_file_of_the_daemon_under_its_names(tmp_path: Path) -> None:
    (tmp_path / "stratad.one.cpu_0.0").touch()
    assert foreign("one", ME, tmp_path).state is State.OK
    (tmp_path / "stratad.one.cpu_0.1").mkdir()
    (tmp_path / "stratad.other.cpu_0.1").mkdir()
    check = foreign("one", ME, tmp_path)
    assert check.state is State.WARN
    assert "stratad.one.cpu_0.1 (uid" in check.what
    assert "stratad.other" not in check.what
    assert foreign("one", ME + 1, tmp_path).what.count("(uid") == 2


def test_orphans_are_those_whose_lock_nobody_holds(tmp_path: Path) -> None:
    for instance in ("lives", "dead", "nolock", "mine", "kept"):
        (tmp_path / f"stratad.{instance}.cpu_0.0").write_bytes(bytes(8192))
    (tmp_path / "stratad.dead.lock").touch()
    (tmp_path / "stratad.kept.journal").touch()
    with (tmp_path / "stratad.lives.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check = orphans("mine", tmp_path)
    assert check.state is State.WARN
    assert (check.data["bytes"], check.data["kept_bytes"]) == ({"dead": 8192, "nolock": 8192}, {"kept": 8192})
    for instance in ("lives", "dead", "nolock"):
        (tmp_path / f"stratad.{instance}.cpu_0.0").unlink()
    check = orphans("mine", tmp_path)
    assert (check.state, "kept for the next daemon: 8.0 KiB of instance kept" in check.what) == (State.OK, True)


@pytest.mark.parametrize(
    ("limits", "used", "running", "state"),
    [
        ((100, 100), 79, True, State.OK),
        ((100, 100), 81, True, State.WARN),
        ((64, LEAST), 3, False, State.OK),
        ((64, LEAST - 1), 3, False, State.FAIL),
    ],
)
def test_the_limit_of_open_files(
    tmp_path: Path, limits: tuple[int, int], used: int, running: bool, state: State
) -> None:
    folder = tmp_path / "proc/7"
    (folder / "fd").mkdir(parents=True)
    for number in range(used):
        (folder / "fd" / str(number)).touch()
    (folder / "limits").write_text(LIMITS.format(*limits))
    assert open_files(7, running=running, root=tmp_path).state is state
    assert open_files(8, running=running, root=tmp_path).state is State.OK
