"""Streams between the supervisor and its workers, over real sockets."""

import contextlib
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.rundir import RunDirError
from ipc.server import Incoming, Sent
from ipc.stream import HEAD, READ_BYTES, FrameReader, LinkError, StreamLink
from ipc.stream_server import IDENTITY_BYTES, NAMELESS, SPARE_FILES, StreamServer
from tests.support.wait import wait_until

MAX_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run/worker.sock"


@pytest.fixture
def server(path: Path) -> Iterator[StreamServer]:
    with StreamServer.bind(path, max_message_bytes=MAX_BYTES, queue_count=8) as made:
        yield made


def connect(path: Path, identity: bytes = b"w") -> StreamLink:
    return StreamLink.connect(path, identity, max_message_bytes=MAX_BYTES, timeout_s=5.0)


def said(server: StreamServer, count: int = 1) -> list[Incoming]:
    """The next messages that come."""
    found: list[Incoming] = []

    def all_came() -> bool:
        found.extend(server.recv_all(64))
        return len(found) >= count

    wait_until(all_came)
    return found


def known(server: StreamServer, peer: bytes) -> None:
    """Wait until a peer is known."""
    wait_until(lambda: server.recv_all(64) or server.reaches(peer))


def is_readable(server: StreamServer) -> bool:
    poller = select.poll()
    poller.register(server.fileno(), select.POLLIN)
    return bool(poller.poll(0))


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_frames_come_whole_however_the_stream_is_cut(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(HEAD.pack(len(frame)) + frame for frame in frames)
    reader = FrameReader(20)
    found: list[bytes] = []
    at = turn = 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += reader.take(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == frames


@pytest.mark.parametrize("rest", [b"", b"x", b"x" * 21])
def test_a_frame_above_the_limit_ends_the_reading(rest: bytes) -> None:
    with pytest.raises(LinkError, match="above the limit of 20"):
        FrameReader(20).take(HEAD.pack(21) + rest)


def test_messages_go_both_ways_in_order(server: StreamServer, path: Path) -> None:
    with connect(path, b"one") as one, connect(path, b"two") as two:
        for number in range(100):
            one.send(b"a%d" % number)
            two.send(b"b%d" % number)
        found = said(server, 200)
        for peer, letter in ((b"one", b"a"), (b"two", b"b")):
            assert [i for i in found if i.peer == peer] == [
                Incoming(peer, b"%s%d" % (letter, n), 1) for n in range(100)
            ]
        for number in range(100):
            assert server.send(b"one", b"c%d" % number) is Sent.SENT
        got: list[bytes] = []
        while len(got) < 100:
            got += one.recv_all(7)
        assert got == [b"c%d" % number for number in range(100)]
        assert two.recv_all(1) == []


def test_more_than_the_limit_is_told_by_readable(server: StreamServer, path: Path) -> None:
    with connect(path) as link:
        for number in range(5):
            link.send(b"%d" % number)
        wait_until(lambda: is_readable(server))
        found: list[bytes] = []
        while is_readable(server) or server.readable:
            found += [incoming.frame for incoming in server.recv_all(2)]
        assert found == [b"%d" % number for number in range(5)]
        for number in range(5):
            server.send(b"w", b"%d" % number)
        got = link.recv_all(2)
        assert link.readable
        assert [*got, *link.recv_all(9)] == [b"%d" % number for number in range(5)]
        assert not link.readable


def test_a_large_frame_travels_in_pieces_while_others_are_served(server: StreamServer, path: Path) -> None:
    large = os.urandom(MAX_BYTES)
    with connect(path, b"slow") as slow, connect(path, b"other") as other:
        known(server, b"slow")
        known(server, b"other")
        assert server.send(b"slow", large) is Sent.QUEUED
        assert server.send(b"slow", b"after") is Sent.QUEUED
        assert (server.pending_count, server.queued_count(b"slow")) == (2, 2)
        assert server.send(b"other", b"quick") is Sent.SENT
        wait_until(lambda: other.recv_all(1) == [b"quick"])
        got: list[bytes] = []

        def all_came() -> bool:
            got.extend(slow.recv_all(4))
            if is_readable(server):  # there is room again
                assert server.recv_all(1) == []
            return len(got) == 2

        wait_until(all_came)
        assert got == [large, b"after"]
        assert server.pending_count == 0
        wait_until(lambda: not is_readable(server))
        thread = threading.Thread(target=slow.send, args=(large, 5.0))
        thread.start()
        assert said(server) == [Incoming(b"slow", large, 1)]
        thread.join()


def test_what_is_queued_is_bounded_and_dropped_with_its_peer(server: StreamServer, path: Path) -> None:
    with connect(path) as link:
        known(server, b"w")
        assert server.send(b"w", bytes(MAX_BYTES)) is Sent.QUEUED
        for _ in range(7):
            assert server.send(b"w", b"x") is Sent.QUEUED
        assert server.send(b"w", b"x") is Sent.FULL
        assert server.send(b"w", bytes(MAX_BYTES + 1)) is Sent.TOO_LARGE
        assert server.flush() == []
        with pytest.raises(LinkError, match="above the limit"):
            link.send(bytes(MAX_BYTES + 1))
    wait_until(lambda: server.flush() == [b"w"] or not server.pending_count)
    assert server.pending_count == 0
    assert server.send(b"nobody", b"x") is Sent.UNREACHABLE


def test_what_a_peer_said_before_its_end_is_read_first(server: StreamServer, path: Path) -> None:
    link = connect(path)
    for number in range(20):
        link.send(bytes(3000) + bytes([number]))
    link.close()
    found: list[Incoming] = []

    def all_came() -> bool:
        found.extend(server.recv_all(3))
        return bool(found) and not server.reaches(b"w")

    wait_until(all_came)
    assert [incoming.frame[-1] for incoming in found] == list(range(20))
    assert server.send(b"w", b"x") is Sent.UNREACHABLE


def test_a_name_in_use_is_not_given_twice(server: StreamServer, path: Path) -> None:
    with connect(path) as first:
        known(server, b"w")
        with connect(path) as second:
            second.send(b"I am w")
            wait_until(lambda: _ended(server, second))
        first.send(b"hello")
        assert said(server) == [Incoming(b"w", b"hello", 1)]
    wait_until(lambda: not (server.recv_all(1) or server.reaches(b"w")))
    with connect(path):
        known(server, b"w")


def _ended(server: StreamServer, link: StreamLink) -> bool:
    assert server.recv_all(1) == []
    try:
        link.recv_all(1)
    except LinkError:
        return True
    return False


@pytest.mark.parametrize("identity", [b"", bytes(IDENTITY_BYTES + 1)])
def test_a_peer_without_a_fit_name_is_closed(server: StreamServer, path: Path, identity: bytes) -> None:
    with connect(path, identity) as link:
        wait_until(lambda: _ended(server, link))


def test_a_peer_that_breaks_the_wire_is_closed(server: StreamServer, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(HEAD.pack(1) + b"r" + HEAD.pack(MAX_BYTES + 1))
        raw.setblocking(False)
        wait_until(lambda: not server.recv_all(1) and _at_end(raw))
    assert not server.reaches(b"r")


def _at_end(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False


def test_who_is_not_admitted_is_hung_up_on_with_all_it_says(server: StreamServer, path: Path) -> None:
    server.admit_only(frozenset({b"w"}).__contains__)
    with connect(path, b"stray") as stray, connect(path) as link:
        stray.send(b"noise")
        link.send(b"word")
        assert [incoming.frame for incoming in said(server)] == [b"word"]
        wait_until(lambda: _ended(server, stray))
    assert not server.reaches(b"stray")


def test_of_a_stranger_no_more_is_kept_than_a_name(server: StreamServer, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(HEAD.pack(MAX_BYTES) + bytes(IDENTITY_BYTES))
        raw.setblocking(False)
        wait_until(lambda: not server.recv_all(1) and _at_end(raw))


def test_those_who_keep_silent_are_few_and_keep_nobody_out(server: StreamServer, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        named = stack.enter_context(connect(path, b"early"))
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2 * NAMELESS)]
        for raw in silent:
            raw.connect(str(path))
            raw.setblocking(False)
        late = stack.enter_context(connect(path, b"late"))
        known(server, b"late")
        assert server.reaches(b"early")
        # The last of them to come are those that stay: one more was let in before the late one, and is over.
        assert [_at_end(raw) for raw in silent] == [True] * (NAMELESS + 1) + [False] * (NAMELESS - 1)
        named.send(b"1")
        late.send(b"2")
        assert sorted(incoming.frame for incoming in said(server, 2)) == [b"1", b"2"]


def test_a_name_is_read_from_whoever_is_the_eldest(server: StreamServer, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(connect(path, b"%d" % number)) for number in range(2 * NAMELESS)]
        for link in links:
            link.send(b"word")
        assert {incoming.peer for incoming in said(server, len(links))} == {b"%d" % n for n in range(2 * NAMELESS)}


def test_a_forgotten_peer_is_closed_and_its_words_are_dropped(server: StreamServer, path: Path) -> None:
    with connect(path) as link:
        link.send(b"1")
        link.send(b"2")
        wait_until(lambda: server.recv_all(1))
        server.forget(b"w")
        assert not server.readable
        assert not server.reaches(b"w")
        wait_until(lambda: _ended(server, link))


def test_a_link_ends_after_the_last_frame(server: StreamServer, path: Path) -> None:
    with connect(path) as link:
        known(server, b"w")
        server.send(b"w", b"last")
        server.close()
        assert link.recv_all(5) == [b"last"]
        with pytest.raises(LinkError, match="gone"):
            link.recv_all(5)
        with pytest.raises(LinkError, match="not taken"):
            link.send(b"x")


def test_a_supervisor_that_does_not_read_is_told(server: StreamServer, path: Path) -> None:
    with connect(path) as link, pytest.raises(LinkError, match=r"not taken within 0\.05 s"):
        link.send(bytes(MAX_BYTES), 0.05)  # more than the sockets hold


def test_nobody_listens(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="nobody answers"):
        connect(path)
    with pytest.raises(RunDirError):
        StreamServer.bind(tmp_path / ("x" * 120), max_message_bytes=MAX_BYTES)
    with pytest.raises(RunDirError):
        connect(tmp_path / ("x" * 120))


def test_the_name_is_the_owners_and_goes_with_the_server(server: StreamServer, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()
    server.close()
    assert not path.exists()


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """This process may open so many more descriptors, if those that it has lie side by side."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_a_descriptor_a_peer_waits_and_the_loop_does_not_spin(server: StreamServer, path: Path) -> None:
    with connect(path):
        with files_left(0):
            assert server.recv_all(8) == []
            assert not is_readable(server)
        known(server, b"w")


@pytest.mark.parametrize("more", [0, 1])
def test_the_last_descriptors_are_left_for_others(server: StreamServer, path: Path, more: int) -> None:
    with connect(path) as link:
        with files_left(SPARE_FILES + more):
            assert server.recv_all(8) == []
        if more:
            known(server, b"w")
        else:
            with pytest.raises(LinkError, match="reset"):  # what it said was not read
                link.recv_all(1)


def test_what_is_queued_is_bounded_in_bytes_too(
    server: StreamServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipc.stream_server.QUEUE_BYTES", 2 * MAX_BYTES)
    with connect(path) as link:
        known(server, b"w")
        assert [server.send(b"w", bytes(MAX_BYTES)) for _ in range(3)] == [Sent.QUEUED, Sent.QUEUED, Sent.FULL]
        received: list[bytes] = []

        def came(count: int) -> bool:
            server.recv_all(8)
            received.extend(link.recv_all(1))
            return len(received) >= count

        wait_until(lambda: came(1))
        assert server.queued_count(b"w") == 1
        assert server.send(b"w", bytes(MAX_BYTES)) is Sent.QUEUED  # what has left makes room
        wait_until(lambda: came(3))


def test_a_peer_that_says_much_leaves_others_their_turn(
    server: StreamServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipc.stream_server.READS", 1)
    with connect(path, b"a") as much, connect(path, b"b") as little:
        known(server, b"a")
        known(server, b"b")
        for _ in range(8):  # twice what is read at once, and what a socket takes
            much.send(bytes(READ_BYTES // 4))
        little.send(b"one")
        peers = [incoming.peer for incoming in server.recv_all(1000)]
        assert 0 < peers.count(b"a") < 8
        assert peers.count(b"b") == 1
        said(server, 8 - peers.count(b"a"))
