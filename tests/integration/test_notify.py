"""What a real daemon tells the service manager, and what silences it."""

import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from stratad.client import Client
from stratad.errors import DeadlineExceeded, PeerGone
from stratad.notify import PINGS_PER_WATCHDOG
from stratad.supervisor import END_S
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.notify_socket import NotifySocket
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())
PING = "WATCHDOG=1"
WATCHDOG_S = 0.6


@pytest.fixture
def manager() -> Iterator[NotifySocket]:
    with NotifySocket() as listening:
        yield listening


def _copying(client: Client) -> bool:
    return any(op.state == "copying" for op in client.stats().ops)


def told(manager: NotifySocket) -> dict[str, str]:
    """Variables by which the daemon finds the manager and its watchdog. Pings soon fill a queue that is not read."""
    return {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}


def test_ready_comes_once_and_then_a_client_is_answered(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:2", environ={"NOTIFY_SOCKET": manager.address}) as daemon:
        manager.wait_for("READY=1")
        with daemon.client(deadline_s=5.0):
            pass
        manager.wait_for("STATUS=2 of 2 workers ready, 0 images, 0 of 64 MiB")
        with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
            engine.capture("a", range(300), range(300))
            manager.wait_for("STATUS=2 of 2 workers ready, 1 images")
    lines = manager.lines()
    assert lines.count("READY=1") == 1
    steps = manager.datagrams[: [d[0] for d in manager.datagrams].index("READY=1")]
    assert [datagram[0] for datagram in steps] == [
        "STATUS=starting: finding devices",
        "STATUS=starting: taking over from an earlier daemon",
    ]
    assert all(datagram[1].startswith("EXTEND_TIMEOUT_USEC=") for datagram in steps)
    assert lines.index("READY=1") < lines.index("STOPPING=1")


def test_it_does_not_wait_for_a_worker(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:1", faults={"cpu:0/boot_error": "1"}, environ=told(manager)):
        manager.wait_for("READY=1")
        manager.wait_for("STATUS=0 of 1 workers ready")


def test_no_child_can_notify(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:1", environ=told(manager)) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        children = psutil.Process(daemon.pid).children(recursive=True)
        assert len(children) == 2
        for child in children:
            assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & child.environ().keys()


def test_an_idle_daemon_pings_and_a_watchdog_of_another_process_is_not_fed(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:1", environ=told(manager)):
        manager.wait_for_more(PING, 2 * PINGS_PER_WATCHDOG)
    with NotifySocket() as other, DaemonProcess("cpu:1", environ={**told(other), "WATCHDOG_PID": "1"}):
        other.wait_for("STATUS=1 of 1 workers ready")
        assert PING not in other.lines()


def test_a_stopped_worker_silences_nothing_and_is_replaced(manager: NotifySocket) -> None:
    settings = {"deadlines.job_floor_s": "2"}
    with (
        DaemonProcess("cpu:2", settings, environ=told(manager)) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        engine.capture("warm", range(300), range(300))  # now the workers have shuttles
        victim = client.stats().workers[0].pid
        os.kill(victim, signal.SIGSTOP)
        ticket = engine.engine.capture("a", tokens=range(300), rows=range(300), slot=0)
        manager.wait_for_more(PING, PINGS_PER_WATCHDOG)
        assert psutil.Process(victim).status() == psutil.STATUS_STOPPED
        with pytest.raises(Exception, match="worker_hung"):
            ticket.result()
        wait_until(lambda: client.stats().workers[0].pid != victim and client.stats().health == "ok", 10)


def test_a_stopped_supervisor_is_silent(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:1", environ=told(manager)) as daemon:
        manager.wait_for_more(PING, 1)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: psutil.Process(daemon.pid).status() == psutil.STATUS_STOPPED)
            manager.read()
            assert select.select([manager], [], [], WATCHDOG_S)[0] == []
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        manager.wait_for_more(PING, 1)


@pytest.mark.parametrize("everybody", [False, True], ids=["supervisor alone", "every process"])
def test_a_stop_lets_a_copy_end_whoever_gets_the_signal(manager: NotifySocket, everybody: bool) -> None:
    faults = {"cpu:0/slow_copy_s": "0.5"}
    settings = {"deadlines.stop_s": "20"}
    with (
        DaemonProcess("cpu:2", settings, faults, environ={"NOTIFY_SOCKET": manager.address}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        children = [child.pid for child in psutil.Process(daemon.pid).children(recursive=True)]
        ticket = engine.engine.capture("a", tokens=range(300), rows=range(300), slot=0)
        wait_until(lambda: _copying(client))
        for pid in [*(children if everybody else []), daemon.pid]:
            os.kill(pid, signal.SIGTERM)
        assert ticket.result().tokens == 300
        assert daemon.stop() == 0
        assert daemon.segments() == []
    assert manager.lines().count("STOPPING=1") == 1


def test_a_stop_asks_for_the_time_that_it_may_take(manager: NotifySocket) -> None:
    faults = {"cpu:0/copy_stall": "1"}
    settings = {"deadlines.stop_s": "0.5", "deadlines.job_floor_s": "60"}
    with (
        DaemonProcess("cpu:1", settings, faults, environ={"NOTIFY_SOCKET": manager.address}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS[:1]) as engine,
    ):
        ticket = engine.engine.capture("a", tokens=range(300), rows=range(300), slot=0)
        wait_until(lambda: _copying(client))
        os.kill(daemon.pid, signal.SIGTERM)
        with pytest.raises((PeerGone, DeadlineExceeded)):  # the latter: it was too busy to hear the last reply
            ticket.result(5.0)
        manager.wait_for("STOPPING=1")
        manager.wait_for(f"EXTEND_TIMEOUT_USEC={round((0.5 + END_S) * 1e6)}")
        manager.wait_for("STATUS=stopping: 1 of 1 workers ready")
        assert daemon.stop() == 0
        assert daemon.segments() == []


def test_an_abort_of_every_process_leaves_none(manager: NotifySocket) -> None:
    with (
        DaemonProcess("cpu:2", environ=told(manager)) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        engine.capture("warm", range(300), range(300))  # now the workers have shuttles
        os.kill(client.stats().workers[0].pid, signal.SIGSTOP)  # in the middle of a copy it will not see the signal
        ticket = engine.engine.capture("a", tokens=range(300), rows=range(300), slot=0)
        wait_until(lambda: _copying(client))
        children = psutil.Process(daemon.pid).children(recursive=True)
        for process in children:
            process.send_signal(signal.SIGABRT)
        assert daemon.kill(signal.SIGABRT) == -signal.SIGABRT
        assert psutil.wait_procs(children, timeout=5.0)[1] == []
        daemon.start()
        assert ticket.result().tokens == 300  # repeated by the client, of which the next daemon knows


def test_a_start_that_fails_says_why(manager: NotifySocket) -> None:
    with DaemonProcess("cpu:1") as first:
        environ = {**os.environ, **told(manager)}
        second = subprocess.run(first.command(), capture_output=True, env=environ, timeout=20, check=False)
        assert second.returncode == 3
    assert manager.wait_for("STATUS=cannot start: ").endswith(f"(pid {first.pid})")


def _replaced(client: Client, pid: int) -> bool:
    stats = client.stats()
    return stats.workers[1].pid != pid and stats.health == "ok"


@pytest.mark.parametrize("reader", ["never reads", "has gone"])
def test_a_log_that_nobody_reads_stops_nothing(manager: NotifySocket, reader: str) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    try:
        settings = {"log.level": "debug", "restarts.give_up_after": "1000", "restarts.backoff_cap_s": "0.05"}
        with DaemonProcess("cpu:2", settings, environ=told(manager), stderr=writing) as daemon:
            if reader == "has gone":
                os.close(reading)
            with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
                expected = engine.contents(range(300), 300)
                engine.capture("c", range(300), range(300))
                for _ in range(10):  # some lines each, of the supervisor and of the worker
                    victim = client.stats().workers[1].pid
                    os.kill(victim, signal.SIGKILL)
                    wait_until(lambda pid=victim: _replaced(client, pid))  # type: ignore[misc]
                if reader == "never reads":
                    assert not select.select([], [writing], [], 0)[1], "the pipe is full"
                engine.fill()
                engine.restore("c", range(300))
                assert engine.contents(range(300), 300) == expected
                manager.wait_for_more(PING, 1)
    finally:
        os.close(writing)
        if reader == "never reads":
            os.close(reading)
