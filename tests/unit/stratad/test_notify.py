"""sd_notify: what the service manager is told, when, and that nobody waits for it."""

import contextlib
import math
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratad.notify import PINGS_PER_WATCHDOG, RETRY_S, STATUS_EVERY_S, Notifier, Rhythm
from tests.support.notify_socket import NotifySocket

PID = 4711


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[NotifySocket]:
    with (
        tempfile.TemporaryDirectory(prefix="ntf") as folder,
        NotifySocket(Path(folder) if request.param == "file" else None) as listening,
    ):
        yield listening


@pytest.fixture
def notifier(manager: NotifySocket) -> Iterator[Notifier]:
    with Notifier.take({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "6000000"}, PID) as taken:
        yield taken


def pings(manager: NotifySocket) -> int:
    return manager.lines().count("WATCHDOG=1")


# --- when to ping: no socket, no clock --------------------------------------------------------------------------------


def test_pings_come_at_under_half_of_the_interval() -> None:
    rhythm = Rhythm.of_watchdog(6.0)
    assert rhythm.ping_due(100.0)  # at once
    rhythm.pinged(100.0)
    assert not rhythm.ping_due(101.9)
    assert rhythm.due_s == 102.0
    assert rhythm.ping_due(102.0)
    assert rhythm.due_s - 100.0 < 6.0 / 2


def test_without_a_watchdog_nothing_is_ever_due() -> None:
    rhythm = Rhythm.of_watchdog(math.inf)
    assert not rhythm.ping_due(1e12)
    assert rhythm.due_s == math.inf


def test_a_status_that_comes_too_soon_is_looked_at_later_and_wakes_the_loop_once() -> None:
    rhythm = Rhythm.of_watchdog(math.inf)
    assert rhythm.status_due(10.0)
    rhythm.looked(10.0)
    assert rhythm.due_s == math.inf  # a loop in which nothing happens is not woken
    assert not rhythm.status_due(10.1)
    assert rhythm.due_s == 10.0 + STATUS_EVERY_S
    assert rhythm.status_due(10.0 + STATUS_EVERY_S)
    rhythm.looked(10.0 + STATUS_EVERY_S)
    assert rhythm.due_s == math.inf


# --- who is told ------------------------------------------------------------------------------------------------------


def test_the_variables_are_taken_away_so_that_children_do_not_notify(manager: NotifySocket) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(PID), "HOME": "/x"}
    Notifier.take(environ, PID).close()
    assert environ == {"HOME": "/x"}


@pytest.mark.parametrize("owner", [None, str(PID)])
def test_the_watchdog_is_ours(manager: NotifySocket, owner: str | None) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000"}
    if owner is not None:
        environ["WATCHDOG_PID"] = owner
    with Notifier.take(environ, PID) as notifier:
        notifier.beat(50.0, lambda: "s")
        assert notifier.due_s == 50.0 + 3.0 / PINGS_PER_WATCHDOG
        assert pings(manager) == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(PID + 1)},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "٣"},
        {},
    ],
)
def test_no_watchdog_or_that_of_another_process(manager: NotifySocket, environ: dict[str, str]) -> None:
    with Notifier.take({"NOTIFY_SOCKET": manager.address, **environ}, PID) as notifier:
        notifier.beat(50.0, lambda: "s")
        assert notifier.due_s == math.inf
        assert manager.lines() == ["STATUS=s"]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "notify"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    def never() -> str:
        raise AssertionError("nobody asks for a status")

    with Notifier.take({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"}, PID) as notifier:
        notifier.starting("x", 1.0)
        notifier.ready()
        notifier.beat(1.0, never)
        notifier.stopping(1.0)
        notifier.failed("y")
        assert notifier.due_s == math.inf


# --- what is told -----------------------------------------------------------------------------------------------------


def test_a_life(manager: NotifySocket, notifier: Notifier) -> None:
    notifier.starting("finding devices", 60.0)
    assert manager.read() == [["STATUS=starting: finding devices", "EXTEND_TIMEOUT_USEC=60000000"]]
    notifier.ready()
    assert manager.read() == []  # the loop has not turned yet
    assert notifier.due_s < 100.0
    notifier.beat(100.0, lambda: "0 of 2 workers ready")
    assert manager.read() == [["READY=1", "WATCHDOG=1", "STATUS=0 of 2 workers ready"]]
    notifier.beat(100.5, lambda: "2 of 2 workers ready")
    assert manager.read() == []
    assert notifier.due_s == 101.0
    notifier.beat(101.0, lambda: "2 of 2 workers ready")
    assert manager.read() == [["STATUS=2 of 2 workers ready"]]
    notifier.beat(102.0, lambda: "2 of 2 workers ready")
    assert manager.read() == [["WATCHDOG=1"]]
    notifier.stopping(12.5)
    assert notifier.due_s < 102.0
    notifier.beat(102.1, lambda: "stopping")  # sooner than another status would be told
    assert manager.read() == [["STOPPING=1", "EXTEND_TIMEOUT_USEC=12500000", "STATUS=stopping"]]


def test_a_status_is_one_line(manager: NotifySocket, notifier: Notifier) -> None:
    notifier.failed("no\nREADY=1\r\nhere")
    assert manager.read() == [["STATUS=cannot start: no READY=1 here"]]


# --- a manager that does not read, or is gone -------------------------------------------------------------------------


def test_what_a_full_manager_does_not_take_comes_later_and_once(manager: NotifySocket, notifier: Notifier) -> None:
    _fill(manager)
    notifier.ready()
    notifier.beat(10.0, lambda: "s")
    assert notifier.due_s == 10.0 + RETRY_S  # no busy loop
    notifier.beat(10.0 + RETRY_S / 2, lambda: "s")
    manager.read()
    manager.datagrams.clear()
    notifier.beat(10.0 + RETRY_S, lambda: "s")
    assert manager.lines() == ["READY=1", "WATCHDOG=1", "STATUS=s"]
    notifier.beat(10.0 + 2 * RETRY_S, lambda: "s")
    assert manager.read() == []


def test_a_manager_that_is_gone_costs_nothing_but_one_line_of_log(
    manager: NotifySocket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    manager.close()
    for turn in range(5):
        notifier.beat(float(turn), lambda: "s")
    assert len(caplog.records) == 1
    assert "cannot be told" in caplog.text


def _fill(manager: NotifySocket) -> None:
    """Send until the manager's queue is full. A sender's own may be the smaller one: until one cannot send at all."""
    address = f"\0{manager.address[1:]}" if manager.address[0] == "@" else manager.address
    sent = -1
    while sent != 0:
        sent = 0
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
            contextlib.suppress(BlockingIOError),
        ):
            sender.setblocking(False)
            while sender.sendto(b"FILL=1", address):
                sent += 1


def test_the_variables_leave_the_real_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with NotifySocket() as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        Notifier.take(os.environ, os.getpid()).close()
        assert "NOTIFY_SOCKET" not in os.environ
