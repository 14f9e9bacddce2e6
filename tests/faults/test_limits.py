"""Limits of a process: open files, CPUs, and a log that takes nothing."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ipc.lifeline import MAX_STASHED, Lifeline
from stratad.client import Client
from stratad.door import PER_LIFELINE, STRANGERS, WHY
from stratad.errors import DeadlineExceeded, NoSpace
from stratad.open_files import LEAST, POOLS_PER_CLIENT, SPARE_LEAST
from stratad.paths import socket_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.namespaces import MIB, SmallShm
from tests.support.wait import wait_until

LAYOUT = slot_layout()
LARGE = slot_layout(row_bytes=1024)
ROWS = range(300)


def check_round(engine: FakeEngine, conversation: str) -> None:
    """A new capture restores byte for byte."""
    engine.fill()
    expected = engine.contents(ROWS, len(ROWS))
    engine.capture(conversation, ROWS, ROWS)
    for pool in engine.pools:
        pool.buffer[:] = bytes(pool.nbytes)
    engine.restore(conversation, ROWS)
    assert engine.contents(ROWS, len(ROWS)) == expected


@contextmanager
def no_more_files(pid: int, spare: int = 0) -> Iterator[None]:
    """The process has as many descriptors as it may have, but for `spare`."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The limit is on the number, not on the count, and the kernel hands out the lowest number that is free.
    lowest = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest + spare, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("spare", [0, 1, 2, 7])
def test_out_of_descriptors_who_is_there_is_served_and_who_comes_waits(spare: int) -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
        check_round(engine, "a")
        worker = client.stats().workers[0].pid
        with no_more_files(daemon.pid, spare):
            with pytest.raises(DeadlineExceeded):
                daemon.client(deadline_s=0.3)
            check_round(engine, "a")
            assert client.stats().workers[0].pid == worker
        with daemon.client() as other:
            assert other.stats().health == "ok"
        assert client.stats().counters.get("internal_errors", 0) == 0


def test_a_worker_out_of_descriptors_makes_no_shuttle_and_is_not_ended_by_that() -> None:
    settings = {"ram.grow_again_s": "0.1"}
    with DaemonProcess("cpu:1", settings) as daemon, daemon.client() as client, FakeEngine(client, (LARGE,)) as engine:
        check_round(engine, "a")
        worker = client.stats().workers[0].pid
        with no_more_files(worker):
            with pytest.raises(NoSpace, match=r"this process may have \d+ files open"):
                engine.capture("large", range(2048), range(2048))
            assert "[unavailable]" in client.stats().workers[0].detail
        wait_until(lambda: client.stats().health == "ok", timeout_s=20)
        engine.capture("large", range(2048), range(2048))
        check_round(engine, "a")
        assert [(w.pid, w.deaths) for w in client.stats().workers] == [(worker, 0)]


def test_too_few_open_files_for_anybody_is_said_at_the_start() -> None:
    few = LEAST - 1
    daemon = DaemonProcess("cpu:1", prefix=("prlimit", f"--nofile={few}:{few}", "--"))
    refused = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20, check=False)
    daemon.close()
    assert refused.returncode == 1
    assert f"{few} open files are allowed, at least {LEAST} are needed: raise LimitNOFILE" in refused.stderr
    assert daemon.segments() == []


def test_what_is_said_to_be_enough_open_files_does_for_one_client_with_all_pools() -> None:
    pools = (LAYOUT,) * POOLS_PER_CLIENT
    with (
        DaemonProcess(f"cpu:{POOLS_PER_CLIENT}", prefix=("prlimit", f"--nofile={LEAST}:{LEAST}", "--")) as daemon,
        daemon.client() as client,
        FakeEngine(client, pools) as engine,
    ):
        check_round(engine, "a")
        assert client.stats().counters.get("internal_errors", 0) == 0


def test_on_one_allowed_cpu_all_workers_share_it() -> None:
    last = max(os.sched_getaffinity(0))
    with DaemonProcess("cpu:2", prefix=("taskset", "--cpu-list", str(last))) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok", timeout_s=20)
        assert [worker.cpus for worker in client.stats().workers] == [(last,), (last,)]
        for worker in client.stats().workers:
            assert psutil.Process(worker.pid).cpu_affinity() == [last]
        with FakeEngine(client, (LAYOUT, LAYOUT)) as engine:
            check_round(engine, "a")


def test_a_log_on_a_full_disk_stops_nothing_and_goes_on_later() -> None:
    settings = {"log.level": "debug", "restarts.give_up_after": "1000", "restarts.backoff_cap_s": "0.05"}
    with SmallShm.make(MIB) as disk:
        log = disk.folder / "log"
        with (
            log.open("ab") as file,
            DaemonProcess("cpu:1", settings, stderr=file.fileno()) as daemon,
            daemon.client() as client,
            FakeEngine(client, (LAYOUT,)) as engine,
        ):
            check_round(engine, "a")
            os.truncate(log, 0)
            with disk.filled():
                replace(client)
                check_round(engine, "b")
                assert log.stat().st_size == 0
            replace(client)
            check_round(engine, "a")
            text = log.read_text()
            assert text.count("worker gone") == 2, "what was said meanwhile waits for room"
            assert text.splitlines()[0].split()[1] in ("DEBUG", "INFO", "WARNING", "ERROR")


def replace(client: Client) -> None:
    """The worker is killed, and the next one serves."""
    (before,) = client.stats().workers
    psutil.Process(before.pid).kill()
    wait_until(lambda: client.stats().workers[0].deaths > before.deaths and client.stats().health == "ok", 20)


def test_without_standard_descriptors_nothing_else_is_logged_to() -> None:
    prefix = ("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-')
    with DaemonProcess("cpu:1", {"log.level": "debug"}, prefix=prefix) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok", timeout_s=20)
        for pid in (daemon.pid, client.stats().workers[0].pid):
            assert Path(f"/proc/{pid}/fd/2").readlink() == Path("/dev/null")
        with FakeEngine(client, (LAYOUT,)) as engine:
            check_round(engine, "a")


LOW = 1024  # the hard limit of a daemon that a flood of connections could exhaust


def connect_raw(path: Path, count: int, stack: contextlib.ExitStack) -> None:
    """Open connections that say nothing."""
    for _ in range(count):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(os.fspath(path))


# Another process than the client's, whose own connections would count as these do.
_FLOOD = """
import socket, sys
client, life, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
held = []
if life:
    from pathlib import Path
    from ipc.lifeline import Lifeline
    held.append(Lifeline.connect(Path(life), 5.0))
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    held[-1].connect(client)
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flooded(client: Path, life: Path | None, count: int) -> Iterator[None]:
    """A process has opened so many connections, and a lifeline before them if `life` is given."""
    command = [sys.executable, "-c", _FLOOD, os.fspath(client), os.fspath(life or ""), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield
        process.stdin.close()


@pytest.mark.parametrize("with_lifeline", [False, True], ids=["strangers", "a client"])
def test_connections_that_no_lifeline_stands_for_cost_the_daemon_nothing(with_lifeline: bool) -> None:
    """ZeroMQ aborts the process that has no descriptor left for one."""
    with DaemonProcess("cpu:1", prefix=("prlimit", f"--nofile={LOW}:{LOW}", "--")) as daemon:
        with daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
            check_round(engine, "a")
        descriptors = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        paths = socket_paths(daemon.run_dir, daemon.instance)
        with flooded(paths.client, paths.life if with_lifeline else None, 2 * LOW):
            # Three for the lifeline: itself, the pidfd of its process, and a moment's copy.
            most = descriptors + STRANGERS + (PER_LIFELINE + 3 if with_lifeline else 1)
            wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) <= most, what="the hanging up")
            with daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
                check_round(engine, "b")
                assert client.stats().counters["peers_refused"] >= 2 * LOW - STRANGERS - 2 * PER_LIFELINE
                assert client.stats().counters.get("internal_errors", 0) == 0
        assert WHY in daemon.log
        wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) <= descriptors, what="the end of all")


def test_pools_that_are_sent_leave_what_others_need() -> None:
    """Descriptors that nobody registers: without a bound they would take those of ZeroMQ's next connections."""
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
        check_round(engine, "a")
        paths = socket_paths(daemon.run_dir, daemon.instance)
        pool = os.memfd_create("never-registered")
        with Lifeline.connect(paths.life, 5.0) as lifeline, no_more_files(daemon.pid, SPARE_LEAST + 3):
            for tag in range(MAX_STASHED):
                lifeline.send_descriptor(tag, pool, 5.0)
            check_round(engine, "a")  # whatever was sent before has been read
            used = {int(path.name) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()}
            limit = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[0]
            assert SPARE_LEAST <= limit - len(used) < SPARE_LEAST + 4
            with contextlib.ExitStack() as stack:
                connect_raw(paths.client, STRANGERS + 4, stack)
                check_round(engine, "a")
        os.close(pool)
        with daemon.client() as other, FakeEngine(other, (LAYOUT,)) as second:
            check_round(second, "b")
        assert client.stats().counters.get("internal_errors", 0) == 0
