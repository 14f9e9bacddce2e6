"""Segments that are taken away, damaged, foreign or somebody's who lives; daemons in namespaces of their own."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shm.shuttle import MOUNT
from stratad.client import Client
from stratad.errors import PeerGone, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.namespaces import MIB, PID_NAMESPACE, SmallShm, need_pid_namespaces
from tests.support.wait import wait_until

LAYOUT = slot_layout()
ROWS = range(300)
FOREIGN_UID = 65534


def check_round(engine: FakeEngine, conversation: str) -> list[list[bytes]]:
    """A new capture restores byte for byte; what it holds."""
    engine.fill()
    expected = engine.contents(ROWS, len(ROWS))
    engine.capture(conversation, ROWS, ROWS)
    check_restores(engine, conversation, expected)
    return expected


def check_restores(engine: FakeEngine, conversation: str, expected: list[list[bytes]]) -> None:
    for pool in engine.pools:
        pool.buffer[:] = bytes(pool.nbytes)
    engine.restore(conversation, ROWS)
    assert engine.contents(ROWS, len(ROWS)) == expected


def worker_process(daemon: DaemonProcess, name: str = "cpu:0") -> psutil.Process | None:
    """A worker as it is seen from here: the pids that a daemon tells are those of its own namespace."""
    for process in psutil.Process(daemon.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            if process.name() == f"strata-{name}":
                return process
    return None


def kill_worker(daemon: DaemonProcess, name: str = "cpu:0") -> None:
    process = wait_until(lambda: worker_process(daemon, name), timeout_s=20, what=f"worker {name}")
    process.kill()
    wait_until(lambda: not process.is_running(), timeout_s=20, what=f"the end of worker {name}")


def replace_worker(daemon: DaemonProcess, client: Client, number: int = 0) -> None:
    deaths = client.stats().workers[number].deaths
    kill_worker(daemon, f"cpu:{number}")
    back = lambda: client.stats().workers[number].deaths > deaths and client.stats().health == "ok"  # noqa: E731
    wait_until(back, timeout_s=20, what="the next worker")


def test_segments_that_somebody_removes_live_on_until_their_worker_ends() -> None:
    """As when logind removes the IPC objects of a user whose last session has ended. Lock and journal come back."""
    settings = {"memory.sample_s": "0.5", "ram.keep": "true"}
    with (
        DaemonProcess("cpu:2", settings) as daemon,
        daemon.client() as client,
        FakeEngine(client, (LAYOUT, LAYOUT)) as engine,
        FakeEngine(client, (LAYOUT,), namespace="one") as single,
    ):
        expected, one = engine.contents(ROWS, 300), single.contents(ROWS, 300)
        engine.capture("a", ROWS, ROWS)
        single.capture("one", ROWS, ROWS)
        for name in daemon.segments():
            (MOUNT / name).unlink()
        check_restores(engine, "a", expected)
        check_round(engine, "b")
        second = subprocess.run(daemon.command(), capture_output=True, timeout=20, check=False)
        assert second.returncode == 3
        assert f"served by another daemon (pid {daemon.pid})".encode() in second.stderr
        replace_worker(daemon, client, 1)
        with pytest.raises(UsageError, match="unknown_conversation"):
            engine.restore("a", ROWS)
        check_restores(single, "one", one)
        replace_worker(daemon, client, 0)
        expected = check_round(engine, "a")
        assert [worker.deaths for worker in client.stats().workers] == [1, 1], "no loop of errors"
        assert client.stats().counters["images_lost"] == 3
        assert "shuttle 0 of cpu:1 is lost: there is no segment" in daemon.log
        names = {f"stratad.{daemon.instance}.{name}" for name in ("lock", "journal")}
        wait_until(lambda: names <= set(daemon.segments()), what="lock and journal")
        wait_until(lambda: is_locked(MOUNT / f"stratad.{daemon.instance}.lock"), what="the lock to be held")
        elsewhere = [*daemon.command(), "--run-dir", str(daemon.home / "other")]
        third = subprocess.run(elsewhere, capture_output=True, timeout=20, check=False)
        assert (third.returncode, f"pid {daemon.pid}".encode() in third.stderr) == (3, True)
        daemon.kill()
        daemon.start()
        check_restores(engine, "a", expected)


def test_a_daemon_whose_lock_was_removed_is_not_taken_over() -> None:
    with DaemonProcess("cpu:1", {"memory.sample_s": "3600"}) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        lock = MOUNT / f"stratad.{daemon.instance}.lock"
        daemon.signal(signal.SIGSTOP)  # or it might take it anew before the other one looks
        lock.unlink()
        held = inodes(daemon)
        second = subprocess.run(daemon.command(), capture_output=True, timeout=20, check=False)
        daemon.signal(signal.SIGCONT)
        assert second.returncode == 3
        assert f"(pid {daemon.pid}), which has lost its lock".encode() in second.stderr
        assert held.items() <= inodes(daemon).items()
        wait_until(lambda: is_locked(lock), what="the lock to be taken anew, with nobody looking at memory")


def is_locked(path: Path) -> bool:
    """Whether some process holds a flock on a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("harm", ["cut", "replaced"])
def test_a_segment_that_is_not_as_it_was_is_lost_once(harm: str) -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
        engine.capture("a", ROWS, ROWS)
        (path,) = MOUNT.glob(f"stratad.{daemon.instance}.cpu_0.*")
        if harm == "cut":  # who touches what was cut off is killed by SIGBUS
            os.truncate(path, 64 * 1024)
            with pytest.raises(PeerGone, match="SIGBUS"):
                engine.restore("a", ROWS)
        else:
            path.unlink()
            path.write_bytes(b"somebody's own data")
            kill_worker(daemon)
        wait_until(
            lambda: client.stats().images == 0 and client.stats().health == "ok",
            timeout_s=20,
            what="the loss to be noticed",
        )
        with pytest.raises(UsageError, match="unknown_conversation"):
            engine.restore("a", ROWS)
        check_round(engine, "a")
        assert client.stats().workers[0].deaths == 1
        assert not path.exists(), "what is ours and of no use gives its memory back"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_what_others_have_under_our_names_is_passed_over_and_stays() -> None:
    daemon = DaemonProcess("cpu:1")
    names = [MOUNT / f"stratad.{daemon.instance}.cpu_0.{number}" for number in range(5)]
    other_name = MOUNT / f"{names[4].name}.other-name"
    try:
        names[0].write_bytes(b"of another user")
        os.chown(names[0], FOREIGN_UID, FOREIGN_UID)
        names[1].mkdir()
        os.mkfifo(names[2])
        names[3].symlink_to("/etc/hostname")
        names[4].touch()
        other_name.hardlink_to(names[4])
        daemon.start()
        with daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
            check_round(engine, "a")
            assert client.stats().health == "ok"
            assert daemon.log.count("name of a shuttle is taken") == 4
            replace_worker(daemon, client)
            engine.restore("a", ROWS)
        assert daemon.stop() == 0
        assert [os.path.lexists(path) for path in (*names, other_name)] == [True, True, True, True, False, True]
        assert names[0].read_bytes() == b"of another user"
    finally:
        daemon.kill()
        names[1].rmdir()
        for path in (names[0], names[2], names[3], other_name):
            path.unlink(missing_ok=True)
        daemon.close()


def test_two_daemons_of_two_pid_namespaces_leave_one_another_alone() -> None:
    """Each is process 1 of its own, and both see one /dev/shm: nothing may hang on a pid."""
    need_pid_namespaces()
    first = DaemonProcess("cpu:1", prefix=PID_NAMESPACE, forks=True)
    second = DaemonProcess("cpu:1", prefix=PID_NAMESPACE, forks=True)
    with first, first.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
        assert client.stats().pid == 1
        expected = engine.contents(ROWS, len(ROWS))
        engine.capture("a", ROWS, ROWS)
        held = inodes(first)
        with second, second.client() as other, FakeEngine(other, (LAYOUT,)) as another:
            assert other.stats().pid == 1
            check_round(another, "b")
            # The same instance again, from where the first one's pid means nothing, or something else.
            for prefix in ((), PID_NAMESPACE):
                again = [*prefix, *first.command()[len(PID_NAMESPACE) :]]
                refused = subprocess.run(again, capture_output=True, timeout=20, check=False)
                assert (refused.returncode, b"is served by another daemon" in refused.stderr) == (3, True)
        assert inodes(first) == held
        replace_worker(first, client)
        assert inodes(first) == held
        check_restores(engine, "a", expected)


def inodes(daemon: DaemonProcess) -> dict[str, int]:
    return {name: (MOUNT / name).stat().st_ino for name in daemon.segments()}


@pytest.mark.timeout(180)
def test_as_process_1_it_reaps_its_workers_and_what_others_leave_behind() -> None:
    need_pid_namespaces()
    settings = {
        "restarts.give_up_after": "1000",
        "restarts.backoff_first_s": "0.001",
        "restarts.backoff_cap_s": "0.001",
        "ram.grow_again_s": "0.1",  # two in a row may die while they make a shuttle
    }
    with DaemonProcess("cpu:1", settings, prefix=PID_NAMESPACE, forks=True) as daemon:
        killed: set[int] = set()

        def another() -> psutil.Process | None:
            process = worker_process(daemon)
            return None if process is None or process.pid in killed else process

        with daemon.client() as client:
            # One that is killed before the template has told of it counts as no worker's death.
            while client.stats().workers[0].deaths < 100:
                process = wait_until(another, timeout_s=20, what="the next worker")
                process.kill()
                killed.add(process.pid)
        # A process whose parent ends before it: process 1 inherits it.
        enter = ["nsenter", f"--target={daemon.pid}", "--pid", "--", "sh", "-c", "sleep 0.05 & :"]
        subprocess.run(enter, check=True, timeout=10)
        with daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
            wait_until(lambda: client.stats().health == "ok", timeout_s=60)
            wait_until(lambda: client.stats().workers[0].shuttles)
            check_round(engine, "a")
        family = psutil.Process(daemon.pid).children
        wait_until(lambda: len(family(recursive=True)) == 2, timeout_s=20, what="the orphan to be reaped")
        assert psutil.STATUS_ZOMBIE not in [process.status() for process in family(recursive=True)]


def test_an_engine_with_another_dev_shm_works_as_any_other() -> None:
    """Its pools are memfds, which travel as descriptors; only the daemon's own processes map its segments."""
    with SmallShm.make(MIB) as shm, DaemonProcess("cpu:2") as daemon:
        command = [*shm.prefix, sys.executable, "-c", _ENGINE, str(daemon.run_dir), daemon.instance]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout) == (0, "the same bytes\n"), done.stderr
        assert list(shm.folder.iterdir()) == []


_ENGINE = """
import sys
from stratad.client import Client
from tests.support.engine import FakeEngine, slot_layout
with Client.connect(run_dir=sys.argv[1], instance=sys.argv[2]) as client:
    with FakeEngine(client, (slot_layout(), slot_layout())) as engine:
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        engine.fill()
        engine.restore("a", range(300))
        print("the same bytes" if engine.contents(range(300), 300) == expected else "others")
"""
