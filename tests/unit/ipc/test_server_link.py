"""Both ends of the ZeroMQ wire, over real sockets."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from ipc.link import Link, LinkError
from ipc.rundir import RunDirError
from ipc.server import Incoming, RouterServer, Sent
from tests.support.wait import wait_until

MAX_BYTES = 1 << 20
# So long ZeroMQ's thread is never without a turn, even on a busy machine.
_QUIET_S = 0.2
T = TypeVar("T")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "default" / "client.sock"


@pytest.fixture
def server(path: Path) -> Iterator[RouterServer]:
    with RouterServer.bind(
        path, max_message_bytes=MAX_BYTES, high_water_count=4, queue_count=5, queue_bytes=3000
    ) as server:
        yield server


def connect(path: Path, identity: bytes = b"", high_water_count: int = 64) -> Link:
    return Link.connect(path, identity, max_message_bytes=MAX_BYTES, timeout_s=5.0, high_water_count=high_water_count)


def greeted(server: RouterServer, path: Path, identity: bytes, high_water_count: int = 64) -> Link:
    """A link that the server has heard of: until then it is unreachable."""
    link = connect(path, identity, high_water_count)
    link.send(b"hello")
    assert receive(server).peer == identity
    return link


def receive(server: RouterServer) -> Incoming:
    (incoming,) = wait_until(lambda: server.recv_all(1))
    return incoming


def fill(server: RouterServer, peer: bytes, frame: bytes) -> dict[Sent, int]:
    """Send until the server refuses; how many frames had which fate."""
    fates: dict[Sent, int] = {}
    while (fate := server.send(peer, frame)) not in (Sent.FULL, Sent.UNREACHABLE):
        fates[fate] = fates.get(fate, 0) + 1
    return fates


def test_there_and_back(server: RouterServer, path: Path) -> None:
    with connect(path, b"cpu:0#1") as link:
        link.send(b"ask")
        assert receive(server)[:3] == (b"cpu:0#1", b"ask", 1)
        assert server.send(b"cpu:0#1", b"answer") is Sent.SENT
        assert link.recv(5.0) == b"answer"
        assert link.recv(0.0) is None
        assert link.recv(0.01) is None


def test_peers_without_a_name_get_one_each(server: RouterServer, path: Path) -> None:
    with connect(path) as one, connect(path) as other:
        one.send(b"1")
        first = receive(server)
        other.send(b"2")
        second = receive(server)
        assert first.peer != second.peer
        server.send(second.peer, b"to 2")
        assert other.recv(5.0) == b"to 2"
        assert one.recv(0.01) is None


def collect(take: Callable[[int], list[T]], count: int) -> list[T]:
    """`count` messages, taken a few at a time."""
    found: list[T] = []

    def enough() -> bool:
        found.extend(take(count - len(found)))
        return len(found) >= count

    wait_until(enough)
    return found


def test_a_turn_takes_no_more_than_its_limit(server: RouterServer, path: Path) -> None:
    with connect(path, b"w") as link:
        for number in range(4):
            link.send(b"%d" % number, 5.0)
        assert [incoming.frame for incoming in collect(server.recv_all, 3)] == [b"0", b"1", b"2"]
        assert receive(server).frame == b"3"
        for number in range(3):
            server.send(b"w", b"%d" % number)
        assert collect(link.recv_all, 2) == [b"0", b"1"]
        assert link.recv(5.0) == b"2"


@pytest.mark.parametrize("frames", [[b"a", b"b"], [b"", b"a"], [b"a", b"b", b"c"]])
def test_any_other_count_of_frames_is_reported(server: RouterServer, path: Path, frames: list[bytes]) -> None:
    with connect(path, b"w") as link:
        link.socket.send_multipart(frames)
        assert receive(server)[:3] == (b"w", b"", len(frames))
        link.send(b"good")
        assert receive(server)[:3] == (b"w", b"good", 1)


def test_an_answer_of_two_frames_breaks_the_wire(server: RouterServer, path: Path) -> None:
    with greeted(server, path, b"w") as link:
        server.socket.send_multipart([b"w", b"a", b"b"])
        with pytest.raises(LinkError, match="2 frames"):
            link.recv(5.0)


def test_an_unknown_peer_is_reported_not_raised(server: RouterServer) -> None:
    assert server.send(b"nobody", b"x") is Sent.UNREACHABLE
    assert server.pending_count == 0


def fill_up(server: RouterServer, peer: bytes) -> None:
    """Fill all buffers on the way to a peer that does not read, and empty its queue.

    ZeroMQ's own thread passes on what it has taken in for a while: the peer is full once nothing more goes out.
    """
    last_sent_s = time.monotonic()

    def full() -> bool:
        nonlocal last_sent_s
        if server.send(peer, bytes(MAX_BYTES // 2)) is Sent.SENT:
            last_sent_s = time.monotonic()
        else:
            server.forget(peer)
        return time.monotonic() - last_sent_s > _QUIET_S

    wait_until(full)


@pytest.mark.parametrize(("size_bytes", "queued"), [(10, 5), (1000, 3)])
def test_a_peer_that_does_not_read_fills_only_its_own_queue(
    server: RouterServer, path: Path, size_bytes: int, queued: int
) -> None:
    # Frames large enough for the kernel's buffers to be full soon.
    with greeted(server, path, b"slow", high_water_count=1) as slow, greeted(server, path, b"quick") as quick:
        fill_up(server, b"slow")
        fates = fill(server, b"slow", bytes(size_bytes))
        assert fates == {Sent.QUEUED: queued}
        assert (server.pending_count, server.pending_bytes) == (queued, queued * size_bytes)
        assert server.send(b"quick", b"hello") is Sent.SENT
        assert quick.recv(5.0) == b"hello"
        assert server.flush() == []
        received: list[bytes] = []

        def all_there() -> bool:
            received.extend(frame for frame in slow.recv_all(100) if len(frame) == size_bytes)
            assert server.flush() == []
            return len(received) == queued

        wait_until(all_there)
        assert (server.pending_count, server.pending_bytes) == (0, 0)


def test_a_peer_that_reads_nothing_is_told_from_a_slow_one(server: RouterServer, path: Path) -> None:
    with greeted(server, path, b"slow", high_water_count=1) as slow:
        fill_up(server, b"slow")
        assert server.send(b"slow", b"x") is Sent.QUEUED
        assert server.unread(100.0, 60.0) == []  # from now on
        assert server.unread(159.9, 60.0) == []
        assert server.unread(160.0, 60.0) == [b"slow"]
        assert server.send(b"slow", b"y") is Sent.QUEUED  # more for it is no progress
        assert server.unread(160.0, 60.0) == [b"slow"]
        taken = 0

        def one_has_left() -> bool:
            nonlocal taken
            taken += len(slow.recv_all(1))
            if server.pending_count == 2:
                server.flush()
            return server.pending_count < 2

        wait_until(one_has_left)
        assert server.unread(160.0, 60.0) == []
        assert server.unread(219.9, 60.0) == []


def test_all_queues_together_are_bounded_and_the_fattest_is_refused(path: Path) -> None:
    server = RouterServer.bind(
        path, max_message_bytes=MAX_BYTES, high_water_count=4, queue_bytes=4000, total_bytes=4000
    )
    with server, greeted(server, path, b"a", high_water_count=1), greeted(server, path, b"b", high_water_count=1):
        for peer in (b"a", b"b"):
            fill_up(server, peer)
        assert server.send(b"b", bytes(100)) is Sent.QUEUED
        assert fill(server, b"a", bytes(1000)) == {Sent.QUEUED: 3}
        assert server.send(b"b", bytes(1000)) is Sent.QUEUED  # it has less than its share
        assert server.send(b"b", bytes(1000)) is Sent.FULL
        assert server.pending_bytes == 4100
        server.forget(b"a")
        assert server.pending_bytes == 1100
        assert server.send(b"b", bytes(1000)) is Sent.QUEUED


def test_queued_frames_keep_their_order(server: RouterServer, path: Path) -> None:
    with greeted(server, path, b"slow", high_water_count=1) as slow:
        fill_up(server, b"slow")
        assert [server.send(b"slow", b"%d" % number) for number in range(3)] == [Sent.QUEUED] * 3
        received: list[bytes] = []

        def all_there() -> bool:
            received.extend(frame for frame in slow.recv_all(100) if len(frame) == 1)
            # A frame sent while others wait must not overtake them.
            server.flush()
            return len(received) == 3

        wait_until(all_there)
        assert received == [b"0", b"1", b"2"]


def test_a_peer_that_goes_with_a_full_queue(server: RouterServer, path: Path) -> None:
    with greeted(server, path, b"slow", high_water_count=1):
        while server.send(b"slow", bytes(MAX_BYTES // 2)) is Sent.SENT:
            pass
        assert server.pending_count > 0 or server.send(b"slow", b"x") is Sent.QUEUED
    gone: list[bytes] = []

    def settled() -> bool:
        assert server.recv_all(10) == []  # as a loop does; without it ZeroMQ does not take note of the end
        gone.extend(server.flush())
        return server.pending_count == 0

    wait_until(settled)
    assert server.pending_bytes == 0
    # Its last frames may have gone into the connection while that was being closed: then there is nothing to report.
    assert gone in ([], [b"slow"])
    wait_until(lambda: server.send(b"slow", b"x") is Sent.UNREACHABLE)


def test_frames_above_the_limit(server: RouterServer, path: Path) -> None:
    with greeted(server, path, b"w") as link:
        assert server.send(b"w", bytes(MAX_BYTES + 1)) is Sent.TOO_LARGE
        with pytest.raises(LinkError, match=str(MAX_BYTES + 1)):
            link.send(bytes(MAX_BYTES + 1))
        link.send(bytes(MAX_BYTES))
        assert len(receive(server).frame) == MAX_BYTES


def test_a_peer_that_sends_above_the_limit_is_dropped_and_the_others_go_on(server: RouterServer, path: Path) -> None:
    with (
        Link.connect(path, b"bad", max_message_bytes=2 * MAX_BYTES, timeout_s=5.0) as bad,
        connect(path, b"good") as good,
    ):
        bad.send(b"hello")
        receive(server)
        bad.send(bytes(MAX_BYTES + 1))
        wait_until(lambda: server.send(b"bad", b"x") is Sent.UNREACHABLE)
        good.send(b"still here")
        assert receive(server).frame == b"still here"


def test_a_link_never_takes_in_a_frame_above_its_limit(server: RouterServer, path: Path) -> None:
    with Link.connect(path, b"w", max_message_bytes=MAX_BYTES // 2, timeout_s=5.0) as link:
        link.send(b"hello")
        receive(server)
        assert server.send(b"w", bytes(MAX_BYTES // 2 + 1)) is Sent.SENT
        wait_until(lambda: server.send(b"w", b"x") is Sent.UNREACHABLE)
        assert all(frame == b"x" for frame in link.recv_all(100))


def test_a_link_ends_with_its_daemon_and_does_not_move_to_the_next(path: Path) -> None:
    first = RouterServer.bind(path, max_message_bytes=MAX_BYTES)
    with connect(path, b"w") as link:
        link.send(b"x")
        receive(first)
        first.close()

        def refused() -> bool:
            try:
                link.send(b"x")
            except LinkError:
                return True
            return False

        wait_until(refused)
        with RouterServer.bind(path, max_message_bytes=MAX_BYTES) as second:
            assert not link.socket.poll(300, zmq.POLLOUT)
            assert second.recv_all(10) == []
            assert second.send(b"w", b"x") is Sent.UNREACHABLE


def test_nobody_listens(path: Path) -> None:
    with pytest.raises(LinkError, match="nobody"):
        Link.connect(path, max_message_bytes=MAX_BYTES, timeout_s=0.05)


def test_closing_twice_and_using_afterwards(server: RouterServer, path: Path) -> None:
    link = connect(path)
    link.close()
    link.close()
    with pytest.raises(LinkError):
        link.send(b"x")
    with pytest.raises(LinkError):
        link.recv(0.01)
    server.close()
    server.close()
    assert not path.exists()


def test_a_context_that_is_passed_in_stays_open(path: Path) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    with (
        RouterServer.bind(path, max_message_bytes=MAX_BYTES, context=context),
        connect_with(path, context) as link,
    ):
        link.send(b"x")
    assert not context.closed
    context.term()


def connect_with(path: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> Link:
    return Link.connect(path, max_message_bytes=MAX_BYTES, timeout_s=5.0, context=context)


def test_modes_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        with RouterServer.bind(path, max_message_bytes=MAX_BYTES):
            assert path.stat().st_mode & 0o777 == 0o660
            assert path.parent.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="107"):
        RouterServer.bind(tmp_path / ("x" * 120), max_message_bytes=MAX_BYTES)
    with pytest.raises(RunDirError, match="107"):
        Link.connect(tmp_path / ("x" * 120), max_message_bytes=MAX_BYTES, timeout_s=0.1)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(RunDirError, match="others may write"):
        RouterServer.bind(tmp_path / "open/client.sock", max_message_bytes=MAX_BYTES)
    assert not (tmp_path / "open/client.sock").exists()
