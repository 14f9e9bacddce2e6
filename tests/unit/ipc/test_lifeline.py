"""Lifelines between two ends of this process and to a real child."""

import array
import contextlib
import errno
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack
import pytest

from ipc.credentials import credentials_of, process_behind
from ipc.lifeline import (
    MAX_DRAINED,
    MAX_STASHED,
    Life,
    Lifeline,
    LifelineError,
    LifelineRefused,
    LifelineServer,
    Refused,
)
from ipc.rundir import RunDirError
from shm.process import own_identity, start_ticks
from tests.support.wait import wait_until

START_ID = b"0123456789abcdef"
CHILD = """
import sys, pathlib
from ipc.lifeline import Lifeline
lifeline = Lifeline.connect(pathlib.Path(sys.argv[1]), 5.0)
input()
"""


class Pair(NamedTuple):
    server: LifelineServer
    ours: Lifeline
    theirs: Lifeline


def connect(server: LifelineServer, path: Path, stash_limit: int = MAX_STASHED) -> tuple[Lifeline, Lifeline]:
    """A peer's end and the daemon's end of a new lifeline."""
    found: list[Lifeline] = []
    thread = threading.Thread(target=lambda: found.append(Lifeline.connect(path, 5.0, stash_limit)))
    thread.start()
    ours = wait_until(lambda: server.accept(START_ID))
    thread.join()
    return found[0], ours


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with LifelineServer.listen(tmp_path / "life.sock") as server:
        theirs, ours = connect(server, tmp_path / "life.sock")
        with theirs, ours:
            yield Pair(server, ours, theirs)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("sent")
    os.write(descriptor, b"content")
    yield descriptor
    os.close(descriptor)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Every descriptor below the limit is in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    filled: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        yield
    finally:
        for descriptor in filled:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def raw(lifeline: Lifeline) -> socket.socket:
    """A socket over a copy of an end, to send what no end would."""
    return socket.socket(fileno=os.dup(lifeline.fileno()))


def send_raw(lifeline: Lifeline, packet: bytes, descriptors: list[int]) -> None:
    with raw(lifeline) as connection:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        connection.sendmsg([packet], rights)


def test_both_ends_agree_and_know_each_other(pair: Pair) -> None:
    assert pair.ours.token == pair.theirs.token
    assert len(pair.ours.token) == 16
    assert pair.theirs.start_id == START_ID
    for end in (pair.ours, pair.theirs):
        assert end.peer[:4] == (own_identity().pid, os.geteuid(), os.getegid(), own_identity().start_ticks)
        assert not os.get_inheritable(end.fileno())


def test_tokens_differ(pair: Pair, tmp_path: Path) -> None:
    theirs, ours = connect(pair.server, tmp_path / "life.sock")
    with theirs, ours:
        assert ours.token != pair.ours.token


def test_credentials_of_a_child_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "life.sock"
    with (
        LifelineServer.listen(path) as server,
        subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE) as child,
        wait_until(lambda: server.accept(START_ID), 20.0) as lifeline,
    ):
        assert lifeline.peer[:2] == (child.pid, os.geteuid())
        assert lifeline.peer.start_ticks == start_ticks(child.pid)
        assert lifeline.drain() is Life.OPEN
        child.kill()
        assert select.select([lifeline], [], [], 5.0)[0] == [lifeline]
        wait_until(lambda: lifeline.drain() is Life.ENDED)


def test_nobody_waits(tmp_path: Path) -> None:
    with LifelineServer.listen(tmp_path / "life.sock") as server:
        assert server.accept(START_ID) is None


def test_a_descriptor_arrives_under_its_tag(pair: Pair, descriptor: int) -> None:
    pair.theirs.send_descriptor(2**64 - 1, descriptor)
    assert pair.ours.drain() is Life.OPEN
    received = pair.ours.take(2**64 - 1)
    try:
        assert received != descriptor
        assert os.pread(received, 7, 0) == b"content"
        assert not os.get_inheritable(received)
        with pytest.raises(KeyError):
            pair.ours.take(2**64 - 1)
    finally:
        os.close(received)


def test_descriptors_travel_back_too(pair: Pair, descriptor: int) -> None:
    pair.ours.send_descriptor(1, descriptor)
    pair.theirs.drain()
    os.close(pair.theirs.take(1))


def test_too_many_are_closed_and_counted(pair: Pair, descriptor: int) -> None:
    before = open_descriptors()
    for tag in range(MAX_STASHED + 5):
        pair.theirs.send_descriptor(tag, descriptor)
    assert pair.ours.drain() is Life.OPEN
    assert open_descriptors() == before + MAX_STASHED
    assert pair.ours.refused_count == 5
    with pytest.raises(KeyError):
        pair.ours.take(MAX_STASHED)
    os.close(pair.ours.take(0))
    pair.theirs.send_descriptor(999, descriptor)
    pair.ours.drain()
    os.close(pair.ours.take(999))
    pair.ours.close()
    assert open_descriptors() == before - 1


def test_a_tag_twice_keeps_the_first(pair: Pair, descriptor: int) -> None:
    other = os.memfd_create("other")
    before = open_descriptors()
    pair.theirs.send_descriptor(1, descriptor)
    pair.theirs.send_descriptor(1, other)
    os.close(other)
    pair.ours.drain()
    received = pair.ours.take(1)
    assert os.pread(received, 7, 0) == b"content"
    os.close(received)
    assert open_descriptors() == before - 1


def test_one_drain_is_bounded(pair: Pair, descriptor: int) -> None:
    for tag in range(MAX_DRAINED + 1):
        pair.theirs.send_descriptor(tag, descriptor)
    pair.ours.drain()
    assert select.select([pair.ours], [], [], 0)[0] == [pair.ours]
    pair.ours.drain()
    assert select.select([pair.ours], [], [], 0)[0] == []
    assert pair.ours.refused_count == MAX_DRAINED + 1 - MAX_STASHED


def test_fetch_reads_on_until_the_descriptor_has_come(tmp_path: Path, descriptor: int) -> None:
    path = tmp_path / "life.sock"
    with LifelineServer.listen(path) as server:
        theirs, ours = connect(server, path, stash_limit=2 * MAX_DRAINED)
        with theirs, ours:
            before = open_descriptors()
            for tag in range(MAX_DRAINED + 10):
                ours.send_descriptor(tag, descriptor)
            os.close(theirs.fetch(MAX_DRAINED + 5))
            assert theirs.refused_count == 0
            assert open_descriptors() == before + MAX_DRAINED + 5  # what comes after it was not read
            with pytest.raises(KeyError):
                theirs.fetch(MAX_DRAINED + 10)
            ours.close()
            with pytest.raises(KeyError):
                theirs.fetch(MAX_DRAINED + 10)
            assert theirs.drain() is Life.ENDED


@pytest.mark.parametrize("packet", [b"", b"1234567", b"123456789", b"x" * 1000, struct.pack("<Q", 5)])
def test_packets_that_break_the_rules_end_the_lifeline(pair: Pair, packet: bytes) -> None:
    send_raw(pair.theirs, packet, [])
    assert pair.ours.drain() is Life.ENDED
    assert pair.ours.drain() is Life.ENDED


@pytest.mark.parametrize("packet", [b"", b"1234567", b"x" * 1000])
def test_a_descriptor_in_a_bad_packet_is_closed(pair: Pair, descriptor: int, packet: bytes) -> None:
    before = open_descriptors()
    send_raw(pair.theirs, packet, [descriptor])
    assert pair.ours.drain() is Life.ENDED
    assert open_descriptors() == before


@pytest.mark.parametrize("count", [2, 3, 100])
def test_several_descriptors_in_one_packet_are_all_closed(pair: Pair, descriptor: int, count: int) -> None:
    before = open_descriptors()
    send_raw(pair.theirs, struct.pack("<Q", 5), [descriptor] * count)
    assert pair.ours.drain() is Life.OPEN
    assert pair.ours.refused_count == 1
    assert open_descriptors() == before
    with pytest.raises(KeyError):
        pair.ours.take(5)


def test_the_end_comes_after_what_was_sent(pair: Pair, descriptor: int) -> None:
    pair.theirs.send_descriptor(1, descriptor)
    pair.theirs.close()
    pair.theirs.close()
    assert pair.ours.drain() is Life.ENDED
    os.close(pair.ours.take(1))
    with pytest.raises(LifelineError):
        pair.ours.send_descriptor(1, descriptor)


def test_a_peer_that_died_with_packets_unread(pair: Pair, descriptor: int) -> None:
    pair.ours.send_descriptor(1, descriptor)
    pair.theirs.close()
    wait_until(lambda: pair.ours.drain() is Life.ENDED)


def test_a_peer_that_does_not_read(pair: Pair, descriptor: int) -> None:
    def send_many() -> None:
        for tag in range(10_000):
            pair.theirs.send_descriptor(tag, descriptor, 0.01)

    with pytest.raises(LifelineError, match="does not read") as caught:
        send_many()
    assert caught.value.errno == errno.EAGAIN
    pair.ours.drain()
    pair.theirs.send_descriptor(1, descriptor, 1.0)


def test_closing_closes_what_nobody_took(pair: Pair, descriptor: int) -> None:
    before = open_descriptors()
    for tag in range(3):
        pair.theirs.send_descriptor(tag, descriptor)
    pair.ours.drain()
    pair.ours.close()
    pair.ours.close()
    assert open_descriptors() == before - 1
    assert pair.ours.fileno() == -1
    assert pair.ours.drain() is Life.ENDED


def test_peers_that_are_gone_before_accept_do_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "life.sock"
    with LifelineServer.listen(path) as server:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
                gone.connect(str(path))
        theirs, ours = connect_last(server, path)
        with theirs, ours:
            assert theirs.token == ours.token


def connect_last(server: LifelineServer, path: Path) -> tuple[Lifeline, Lifeline]:
    """As `connect`, passing over accepted ends whose peer has gone."""
    found: list[Lifeline] = []
    thread = threading.Thread(target=lambda: found.append(Lifeline.connect(path, 5.0)))
    thread.start()
    while True:
        ours = wait_until(lambda: server.accept(START_ID))
        if ours.drain() is Life.OPEN:
            thread.join()
            return found[0], ours
        ours.close()


def test_out_of_descriptors_the_listener_does_not_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "life.sock"
    with LifelineServer.listen(path) as server, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(path))
        with no_descriptor_left():
            assert server.accept(START_ID) is None
        assert select.select([server], [], [], 0)[0] == []
        assert peer.recv(100) == b""
        theirs, ours = connect(server, path)
        theirs.close()
        ours.close()


def test_out_of_descriptors_a_sent_one_is_refused(pair: Pair, descriptor: int) -> None:
    pair.theirs.send_descriptor(1, descriptor)
    with no_descriptor_left():
        assert pair.ours.drain() is Life.OPEN
    assert pair.ours.refused_count == 1


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(LifelineError) as caught:
        Lifeline.connect(tmp_path / "life.sock", 0.1)
    assert caught.value.errno == errno.ENOENT


def test_a_stale_socket(tmp_path: Path) -> None:
    path = tmp_path / "life.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    with pytest.raises(LifelineError) as caught:
        Lifeline.connect(path, 0.1)
    assert caught.value.errno == errno.ECONNREFUSED
    LifelineServer.listen(path).close()
    assert not path.exists()


def test_a_daemon_that_does_not_accept(tmp_path: Path) -> None:
    with (
        LifelineServer.listen(tmp_path / "life.sock"),
        pytest.raises(LifelineError, match=r"no token within 0\.1 s"),
    ):
        Lifeline.connect(tmp_path / "life.sock", 0.123)


@pytest.mark.parametrize(
    "packet",
    [
        b"nonsense",
        msgpack.packb({"token": START_ID}),
        msgpack.packb({"token": b"short", "start_id": START_ID}),
        msgpack.packb({"token": "0123456789abcdef", "start_id": START_ID}),
        msgpack.packb([START_ID, START_ID]),
        msgpack.packb({"token": START_ID, "start_id": START_ID}) + b"x",
        b"\x91" * 250,
    ],
)
def test_a_first_packet_that_is_no_token(tmp_path: Path, packet: bytes) -> None:
    assert "no token" in str(connect_error(tmp_path, packet))


def test_an_end_in_place_of_the_first_packet_is_no_breach_of_the_wire(tmp_path: Path) -> None:
    """The daemon may have no descriptor left for the moment."""
    assert connect_error(tmp_path, b"").errno == errno.ECONNRESET


def connect_error(tmp_path: Path, packet: bytes) -> LifelineError:
    """What `connect` makes of a first packet (none: the connection ends)."""
    path = tmp_path / "life.sock"
    errors: list[LifelineError] = []

    def run() -> None:
        try:
            Lifeline.connect(path, 5.0)
        except LifelineError as exc:
            errors.append(exc)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=run)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            if packet:
                connection.send(packet)
            else:
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
    return errors[0]


def test_modes_and_paths(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with LifelineServer.listen(tmp_path / "life.sock"):
            assert (tmp_path / "life.sock").stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(before)
    with pytest.raises(RunDirError, match="107"):
        LifelineServer.listen(tmp_path / ("x" * 120))
    with pytest.raises(RunDirError, match="107"):
        Lifeline.connect(tmp_path / ("x" * 120), 0.1)


def test_a_peer_that_is_not_served_is_told_why_and_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "life.sock"
    caught: list[LifelineRefused] = []

    def ask() -> None:
        with pytest.raises(LifelineRefused) as refusal:
            Lifeline.connect(path, 5.0)
        caught.append(refusal.value)

    with LifelineServer.listen(path) as server:
        for reason in ("not you", "ü" * 5000):
            thread = threading.Thread(target=ask)
            thread.start()
            refused = wait_until(lambda why=reason: server.admit(START_ID, lambda _: why))  # type: ignore[misc]
            thread.join()
            assert isinstance(refused, Refused)
            assert refused.peer.uid == os.geteuid()
        before = open_descriptors()
        theirs, ours = connect(server, path)
        with theirs, ours:
            assert open_descriptors() == before + 2
    assert [(exc.code, exc.message) for exc in caught] == [("not_permitted", "not you"), ("not_permitted", "ü" * 1000)]


def test_the_judge_sees_the_kernels_word(pair: Pair, tmp_path: Path) -> None:
    assert pair.ours.peer.groups == tuple(sorted(os.getgroups()))
    assert pair.ours.peer.gid == os.getegid()


def test_the_process_behind_a_descriptor(pair: Pair) -> None:
    assert process_behind(pair.ours.fileno()) == (os.getpid(), os.geteuid())
    left, right = os.pipe()
    assert process_behind(left) is None
    os.close(left)
    os.close(right)
    assert process_behind(left) is None
    assert process_behind(-1) is None
    with raw(pair.ours) as connection:
        assert credentials_of(connection).pid == os.getpid()


def test_reading_on_loses_nothing_when_no_more_can_be_kept(pair: Pair, descriptor: int) -> None:
    for tag in range(MAX_STASHED + 10):
        pair.theirs.send_descriptor(tag, descriptor)
    assert pair.ours.read_on(3) is Life.OPEN
    assert not pair.ours.full  # it stops at what was wanted
    assert pair.ours.read_on() is Life.OPEN
    assert pair.ours.full
    for tag in range(MAX_STASHED + 10):
        pair.ours.read_on(tag)
        os.close(pair.ours.take(tag))
    assert pair.ours.refused_count == 0
    pair.theirs.close()
    assert pair.ours.read_on() is Life.ENDED
