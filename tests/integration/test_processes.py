"""Processes: pinned, separate, replaced when they die, gone when the daemon is."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from shm.process import is_gone, start_ticks
from shm.shuttle import MOUNT
from stratad.client import Client
from stratad.errors import DeadlineExceeded, PeerGone
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())


def test_each_worker_is_a_process_with_its_own_affinity(client: Client, daemon: DaemonProcess) -> None:
    wait_until(lambda: client.stats().health == "ok")
    workers = client.stats().workers
    assert len({worker.pid for worker in workers}) == 2
    allowed = os.sched_getaffinity(0)
    for worker in workers:
        process = psutil.Process(worker.pid)
        assert tuple(process.cpu_affinity()) == worker.cpus
        assert set(worker.cpus) <= allowed
        assert process.ppid() != daemon.pid  # the template's child
    if len(allowed) >= 2:
        assert not set(workers[0].cpus) & set(workers[1].cpus)


def test_the_supervisor_imports_neither_torch_nor_numpy(client: Client, daemon: DaemonProcess) -> None:
    maps = [entry.path for entry in psutil.Process(daemon.pid).memory_maps()]
    assert maps
    assert not [path for path in maps if "torch" in path or "numpy" in path or "cuda" in path]


def test_a_killed_worker_is_replaced_and_the_other_serves_on() -> None:
    with (
        DaemonProcess("cpu:2") as daemon,
        daemon.client() as client,
        daemon.client() as other,
        FakeEngine(client, LAYOUTS) as engine,
        FakeEngine(other, LAYOUTS[:1], namespace="other") as single,
    ):
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        victim = client.stats().workers[1]
        os.kill(victim.pid, signal.SIGKILL)
        single.capture("b", range(10), range(10))
        single.restore("b", range(10))
        # A worker takes a while to die, and what it is sent meanwhile fails with it.
        wait_until(lambda: client.stats().workers[1].deaths == 1)
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected
        now = client.stats()
        assert now.workers[1].pid != victim.pid
        assert now.workers[1].deaths == 1
        assert now.workers[0].deaths == 0
        assert now.health == "ok"


def test_a_worker_that_dies_in_a_copy_fails_that_operation_only() -> None:
    faults = {"cpu:1#1/copy_kill": "2"}
    with (
        DaemonProcess("cpu:2", faults=faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        with pytest.raises(PeerGone) as caught:
            engine.capture("b", range(300), range(300))
        assert (caught.value.code, caught.value.stage) == ("worker_died", 1)
        assert [o.state for o in caught.value.stages] == ["done", "failed"]
        engine.capture("b", range(300), range(300))
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected


def test_a_worker_that_hangs_is_killed_and_replaced() -> None:
    settings = {"deadlines.job_floor_s": "0.3"}
    faults = {"cpu:0#1/copy_stall": "1"}
    with (
        DaemonProcess("cpu:2", settings, faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        with pytest.raises(PeerGone) as caught:
            engine.capture("a", range(300), range(300))
        assert (caught.value.code, caught.value.stage) == ("worker_hung", 0)
        engine.capture("a", range(300), range(300))


def test_a_worker_that_cannot_start_is_given_up_and_shown() -> None:
    settings = {"restarts.give_up_after": "3"}
    with DaemonProcess("cpu:2", settings, {"cpu:1/boot_error": "1"}) as daemon, daemon.client() as client:
        state = wait_until(lambda: [w for w in client.stats().workers if w.state == "failed"], timeout_s=10)
        assert state[0].worker == "cpu:1"
        assert client.stats().health == "degraded"
        with FakeEngine(client, LAYOUTS[:1]) as engine:
            engine.capture("a", range(10), range(10))


def test_the_template_dies_and_everything_comes_back() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        template = next(m.pid for m in client.stats().memory if m.role == "template")
        before = {w.pid for w in client.stats().workers}
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: not {w.pid for w in client.stats().workers} & before and client.stats().health == "ok", 10)
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected


def test_no_process_outlives_its_supervisor_and_the_next_daemon_takes_over() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", range(300), range(300))
        children = [(p.pid, start_ticks(p.pid)) for p in psutil.Process(daemon.pid).children(recursive=True)]
        assert len(children) == 3
        daemon.kill()
        wait_until(lambda: all(is_gone(*child) for child in children), timeout_s=1.0)
        assert len(daemon.segments()) >= 2
        with pytest.raises(DeadlineExceeded):
            engine.engine.restore("a", rows=range(300), slot=0, deadline_s=0.5).result()
        expected = engine.contents(range(300), 300)
        daemon.start()
        assert client.stats().images == 1  # by its own: the client has connected and registered again
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected


def test_a_stopped_daemon_leaves_nothing() -> None:
    daemon = DaemonProcess("cpu:2")
    with daemon:
        with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
            engine.capture("a", range(300), range(300))
        children = [(p.pid, start_ticks(p.pid)) for p in psutil.Process(daemon.pid).children(recursive=True)]
        assert daemon.stop() == 0
        assert all(is_gone(*child) for child in children)
        assert daemon.segments() == []
        assert list((daemon.run_dir / daemon.instance).iterdir()) == []


def test_repeated_sigterm_to_everybody_is_one_graceful_stop() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", range(300), range(300))
        everybody = [daemon.pid, *(p.pid for p in psutil.Process(daemon.pid).children(recursive=True))]
        for _ in range(3):
            for pid in everybody:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGTERM)
        assert daemon.stop() == 0
        assert daemon.segments() == []


def test_a_second_daemon_of_the_instance_says_so_and_leaves_the_first_alone() -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client:
        second = subprocess.run(daemon.command(), capture_output=True, timeout=20, check=False)
        assert second.returncode == 3
        assert b"served by another daemon" in second.stderr
        assert f"pid {daemon.pid}".encode() in second.stderr
        assert client.stats().pid == daemon.pid
        with daemon.client() as another:
            assert another.stats().pid == daemon.pid


def test_an_engine_that_is_killed_leaves_its_images_and_nothing_else() -> None:
    script = (
        "import sys, os, signal\n"
        "from tests.support.engine import FakeEngine, slot_layout\n"
        "from stratad.client import Client\n"
        "client = Client.connect(run_dir=sys.argv[1], instance=sys.argv[2])\n"
        "engine = FakeEngine(client, (slot_layout(), slot_layout()), seed=5)\n"
        "engine.fill(); engine.register(); engine.capture('a', range(300), range(300))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client:
        command = [sys.executable, "-c", script, str(daemon.run_dir), daemon.instance]
        assert subprocess.run(command, timeout=30, check=False).returncode == -signal.SIGKILL
        wait_until(lambda: not client.stats().engines, timeout_s=1.0)
        wait_until(lambda: all(w.resources.get("pools") == 0 for w in client.stats().workers), timeout_s=1.0)
        with FakeEngine(client, LAYOUTS, seed=5) as engine:
            expected = engine.contents(range(300), 300)
            engine.random.seed(99)
            engine.fill()
            engine.restore("a", range(300))
            assert engine.contents(range(300), 300) == expected


@pytest.mark.timeout(120)
def test_ten_thousand_operations_leave_every_counter_as_it_was(client: Client) -> None:
    with FakeEngine(client, LAYOUTS) as engine:

        def some(count: int) -> None:
            for number in range(count // 2):
                engine.capture(f"c{number % 7}", range(64 + number % 5), range(64 + number % 5))
                rows = range(1000, 1064 + number % 5)
                engine.restore(f"c{number % 7}", rows)

        some(200)
        before = [without_counts(worker.resources) for worker in client.stats().workers]
        some(10_000)
        assert [without_counts(worker.resources) for worker in client.stats().workers] == before
        client.clear("ns")
        assert client.stats().published_bytes == 0


def without_counts(resources: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in resources.items() if not name.startswith("jobs")}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_an_instance_of_another_user_is_refused_by_name() -> None:
    daemon = DaemonProcess("cpu:1")
    lock = MOUNT / f"stratad.{daemon.instance}.lock"
    try:
        lock.touch()
        os.chown(lock, 65534, 65534)
        refused = subprocess.run(daemon.command(), capture_output=True, timeout=20, check=False)
        assert refused.returncode == 3
        assert b"belongs to uid 65534" in refused.stderr
        assert b"--instance" in refused.stderr
    finally:
        lock.unlink(missing_ok=True)
        daemon.close()


def test_a_budget_smaller_than_a_shuttle_makes_the_shuttle_smaller() -> None:
    with DaemonProcess("cpu:2", {"ram.budget_bytes": "1MiB"}) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok" and all(w.shuttles for w in client.stats().workers))
        assert sum(worker.shuttle_bytes for worker in client.stats().workers) <= 1024 * 1024
