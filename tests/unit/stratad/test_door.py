"""Who may have a ZeroMQ connection."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.arrivals import NEWS_COUNT
from ipc.lifeline import Refused
from ipc.server import RouterServer
from stratad.door import PER_LIFELINE, STRANGERS, WHY, Door
from tests.support.wait import wait_until

OWN = (os.getpid(), os.geteuid())


def hung_up(connection: socket.socket) -> bool:
    try:
        while connection.recv(64):
            pass  # more of the greeting
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


class Rig:
    """A door whose lifelines the test counts, and connections of this process to it."""

    def __init__(self, server: RouterServer, path: Path) -> None:
        self.lifelines = 0
        self.refused: list[Refused] = []
        self.server = server
        self.connections: list[socket.socket] = []
        self._path = path
        self._door = Door.at(server, self._lifelines_of, self.refused.append)

    def connect(self, count: int) -> None:
        for _ in range(count):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.connections.append(connection)
            connection.connect(os.fspath(self._path))
            assert connection.recv(1) == b"\xff"  # ZeroMQ's greeting, which comes after the news
            connection.setblocking(False)

    def open_count(self) -> int:
        """Connections that were not hung up on; the door hears of what was done so far."""
        self._door.tend()
        return sum(not hung_up(connection) for connection in self.connections)

    def _lifelines_of(self, pid: int, uid: int) -> int:
        return self.lifelines if (pid, uid) == OWN else 0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    path = tmp_path / "run/c.sock"
    with RouterServer.bind(path, max_message_bytes=1 << 20, tell_arrivals=True) as server:
        made = Rig(server, path)
        yield made
        for connection in made.connections:
            connection.close()


@pytest.mark.parametrize("lifelines", [0, 1, 3])
def test_a_process_has_a_few_for_each_lifeline_and_some_more_are_borne(rig: Rig, lifelines: int) -> None:
    rig.lifelines = lifelines
    allowed = lifelines * PER_LIFELINE + STRANGERS
    rig.connect(allowed + 5)
    wait_until(lambda: rig.open_count() == allowed and len(rig.refused) == 5)
    assert {(refused.peer.pid, refused.peer.uid, refused.message) for refused in rig.refused} == {(*OWN, WHY)}


def test_whose_connections_have_gone_may_come_again(rig: Rig) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for lifelines in (1, 0, 1):
        rig.lifelines = lifelines
        allowed = lifelines * PER_LIFELINE + STRANGERS
        rig.connect(allowed)
        wait_until(lambda: rig.open_count() == len(rig.connections))
        assert len(rig.connections) == allowed
        while rig.connections:
            rig.connections.pop().close()
        wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) == before)
        assert rig.open_count() == 0
    assert rig.refused == []


def test_what_was_let_in_under_an_earlier_lifeline_does_not_count_against_the_next(rig: Rig) -> None:
    rig.lifelines = 1
    rig.connect(PER_LIFELINE)
    assert rig.open_count() == PER_LIFELINE
    rig.lifelines = 0
    rig.connect(2 * STRANGERS)
    assert rig.open_count() == PER_LIFELINE + STRANGERS - PER_LIFELINE
    rig.lifelines = 1
    rig.connect(PER_LIFELINE)
    assert rig.open_count() == STRANGERS + PER_LIFELINE


def test_what_is_not_a_connection_of_the_router_is_left_alone(tmp_path: Path) -> None:
    """A descriptor that ZeroMQ told of may be anything by now."""
    with RouterServer.bind(tmp_path / "run/c.sock", max_message_bytes=1 << 20, tell_arrivals=True) as server:
        arrivals = server.arrivals
        assert arrivals is not None
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        with ours, theirs:
            for descriptor in (ours.fileno(), read_end, 9999):
                assert arrivals.peer(descriptor) is None
                arrivals.hang_up(descriptor)
            theirs.send(b"x")
            assert ours.recv(1) == b"x"
        os.write(write_end, b"y")
        assert os.read(read_end, 1) == b"y"
        os.close(read_end)
        os.close(write_end)


def test_a_router_closes_although_nobody_has_read_the_news(tmp_path: Path) -> None:
    """ZeroMQ keeps about a thousand; then its thread waits, and must not for good."""
    path = tmp_path / "run/c.sock"
    with RouterServer.bind(path, max_message_bytes=1 << 20, tell_arrivals=True):
        for _ in range(1500):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 100_000))
                try:
                    connection.connect(os.fspath(path))
                except BlockingIOError:
                    break  # nobody is accepted any more


def test_nobody_is_let_in_while_a_thousand_arrivals_were_not_looked_at(rig: Rig, tmp_path: Path) -> None:
    """Each that comes and goes is told of twice; behind those only the backlog is left."""
    made, patience = 0, 300
    while patience and made < 900:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                connection.connect(os.fspath(tmp_path / "run/c.sock"))
            except BlockingIOError:
                threading.Event().wait(0.001)
                patience -= 1
            else:
                made, patience = made + 1, 300
    assert 500 <= made < 900
    assert rig.server.arrivals is not None
    assert len([*rig.server.arrivals.read(NEWS_COUNT)]) >= 1000
