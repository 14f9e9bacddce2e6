"""Descriptors and the commands that need them reach a worker in order, whatever room its lifeline has."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ipc.codec import decode, encode
from ipc.lifeline import Lifeline, LifelineServer
from ipc.messages import ClosePool, Command, MemfdPool, OpenPool, Stage, StopWorker, TakeCensus
from ipc.stream import StreamLink
from ipc.stream_server import StreamServer
from shm.layout import Plane
from stratad.descriptors import HELD_COUNT, QUEUED_COUNT, ClientDescriptors, WorkerChannel
from tests.support.layouts import stage_layout
from tests.support.wait import wait_until

IDENTITY = b"cpu:0#1"
LAYOUT = stage_layout((Plane(0, 32, 32, 64),))
POOLS = 1500  # more than any socket's buffer holds


class Ends(NamedTuple):
    """A channel, and the worker at its other end."""

    channel: WorkerChannel
    server: StreamServer
    lifeline: Lifeline
    link: StreamLink

    def take_commands(self, count: int) -> list[Command]:
        """The next commands that come to the worker, with the channel flushed as the loop does."""
        found: list[Command] = []

        def all_came() -> bool:
            assert self.channel.flush()
            self.server.flush()
            found.extend(decode(frame, Command) for frame in self.link.recv_all(100))
            return len(found) >= count

        wait_until(all_came, 20.0)
        return found


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with (
        StreamServer.bind(tmp_path / "run/w.sock", max_message_bytes=1 << 20) as server,
        LifelineServer.listen(tmp_path / "run/l.sock") as listener,
        StreamLink.connect(tmp_path / "run/w.sock", IDENTITY, max_message_bytes=1 << 20, timeout_s=5.0) as link,
    ):
        theirs: list[Lifeline] = []
        thread = threading.Thread(target=lambda: theirs.append(Lifeline.connect(tmp_path / "run/l.sock", 5.0, POOLS)))
        thread.start()
        ours = wait_until(lambda: listener.accept(bytes(16)))
        thread.join()
        link.send(b"hello")
        wait_until(lambda: server.recv_all(1))
        channel = WorkerChannel("cpu:0", server, IDENTITY)
        channel.lifeline = ours
        with ours, theirs[0]:
            yield Ends(channel, server, theirs[0], link)


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("pool")
    yield number
    os.close(number)


def open_pool(number: int) -> OpenPool:
    return OpenPool(number, Stage(0, "cpu:0", MemfdPool(number, 4096), LAYOUT), 1, 1)


def test_many_pools_all_arrive_each_before_its_command(ends: Ends, descriptor: int) -> None:
    for number in range(POOLS):
        ends.channel.pass_on(number, lambda: descriptor)
        assert ends.channel.send(open_pool(number))
    assert ends.channel.waiting, "the lifeline took them all: the test needs more pools"
    seen = 0
    while seen < POOLS:
        assert ends.channel.flush()
        ends.server.flush()
        for frame in ends.link.recv_all(100):
            command = decode(frame, Command)
            assert isinstance(command, OpenPool)
            assert command.pool == seen
            os.close(ends.lifeline.fetch(command.pool))  # as the worker does: KeyError if it was overtaken
            seen += 1
    assert not ends.channel.waiting


def fill(ends: Ends, descriptor: int) -> int:
    """Pass descriptors on until one waits; returns how many went."""
    for number in range(POOLS):
        ends.channel.pass_on(number, lambda: descriptor)
        if ends.channel.waiting:
            return number
    raise AssertionError("no descriptor waits")


def test_later_commands_wait_for_a_descriptor_that_waits(ends: Ends, descriptor: int) -> None:
    passed = fill(ends, descriptor)
    assert ends.channel.send(TakeCensus(1))
    assert ends.channel.send(ClosePool(2))
    ends.channel.flush()
    assert ends.channel.waiting == 3
    for tag in range(passed):
        os.close(ends.lifeline.fetch(tag))
    assert ends.take_commands(2) == [TakeCensus(1), ClosePool(2)]
    os.close(ends.lifeline.fetch(passed))


def test_another_channel_is_not_held_back(ends: Ends, descriptor: int, tmp_path: Path) -> None:
    fill(ends, descriptor)
    with StreamLink.connect(tmp_path / "run/w.sock", b"other", max_message_bytes=1 << 20, timeout_s=5.0) as link:
        link.send(b"hello")
        wait_until(lambda: ends.server.recv_all(1))
        assert WorkerChannel("cpu:1", ends.server, b"other").send(TakeCensus(9))
        assert wait_until(lambda: link.recv_all(1)) == [encode(TakeCensus(9))]


def test_a_descriptor_whose_client_has_gone_is_left_out(ends: Ends, descriptor: int) -> None:
    kept: dict[int, int | None] = {}
    passed = fill(ends, descriptor)
    ends.channel.pass_on(5000, lambda: kept.get(1))
    ends.channel.send(TakeCensus(1))
    for tag in range(passed):
        os.close(ends.lifeline.fetch(tag))
    assert ends.take_commands(1) == [TakeCensus(1)]
    with pytest.raises(KeyError):
        ends.lifeline.fetch(5000)


def test_what_is_held_is_bounded_but_for_pools(ends: Ends, descriptor: int) -> None:
    fill(ends, descriptor)
    for number in range(HELD_COUNT):
        assert ends.channel.send(TakeCensus(number))
        assert ends.channel.send(open_pool(number))
    assert ends.channel.send(open_pool(HELD_COUNT))
    assert not ends.channel.send(TakeCensus(HELD_COUNT))


def test_a_worker_that_is_slow_with_commands_gets_any_number_of_pools(ends: Ends, descriptor: int) -> None:
    """More orders than the server would queue: they wait in the channel, and the worker need not be killed."""
    count = 4 * (HELD_COUNT + QUEUED_COUNT)
    assert all(ends.channel.send(open_pool(number)) for number in range(count))
    assert [command.pool for command in ends.take_commands(count) if isinstance(command, OpenPool)] == list(
        range(count)
    )


def test_only_a_stop_that_cannot_be_sent_needs_a_kill(ends: Ends) -> None:
    nobody = WorkerChannel("cpu:9", ends.server, b"nobody")
    assert nobody.send(TakeCensus(1))
    assert not nobody.send(StopWorker())


def test_a_descriptor_is_kept_until_it_is_closed(ends: Ends, descriptor: int) -> None:
    client = ClientDescriptors(ends.lifeline)
    ends.channel.pass_on(7, lambda: descriptor)
    found = wait_until(lambda: client.find(7))
    assert os.path.samestat(os.fstat(found), os.fstat(descriptor))
    assert client.find(7) == found
    client.close(7)
    assert client.find(7) is None
    ends.channel.pass_on(8, lambda: descriptor)
    client.close(8)  # it was never asked for: it is taken out of the lifeline all the same
    assert client.find(8) is None
    ends.channel.pass_on(9, lambda: descriptor)
    kept = client.find(9)
    assert kept is not None
    client.close_all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)
