"""Rows of an exchange: never given twice, back when nobody needs them, and never waited for in a circle."""

import random
import threading
import time
from typing import cast

import pytest

from shm.rows import RowRuns
from stratad._room import TRANSFER_LIMIT, PartTicket, Room
from stratad.errors import Busy, PeerGone, StratadError
from tests.support.wait import wait_until


class FakeTicket:
    """A ticket whose end the test decides."""

    def __init__(self, kind: str = "put_part", error: StratadError | None = None) -> None:
        self.kind = kind
        self.error = error
        self.ended = threading.Event()
        self.rows_busy = False
        self.waited = 0

    def result(self) -> None:
        self.waited += 1
        assert self.ended.wait(10.0)
        if self.error is not None:
            raise self.error

    def wait_rows_free(self, deadline_s: float) -> bool:
        wait_until(lambda: True, deadline_s)
        self.waited += 1
        if self.waited > 3:
            self.rows_busy = False
        return not self.rows_busy


def as_ticket(ticket: FakeTicket) -> PartTicket:
    return cast("PartTicket", ticket)


def take(room: Room, count: int, within_s: float = 10.0) -> RowRuns:
    return room.take(count, time.monotonic() + within_s)


def test_rows_are_given_once_and_joined_again() -> None:
    room = Room(100)
    chance = random.Random(1)
    held: list[RowRuns] = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            room.give(held.pop(chance.randrange(len(held))))
        else:
            rows = room.try_take(chance.randrange(1, 30))
            if rows is not None:
                held.append(rows)
        used = [row for rows in held for first, count in rows for row in range(first, first + count)]
        assert len(set(used)) == len(used)
        assert room.free_rows == 100 - len(used)
    for rows in held:
        room.give(rows)
    assert room.try_take(100) == ((0, 100),)


def test_whoever_needs_room_waits_for_the_oldest_put() -> None:
    room = Room(10)
    heard: list[tuple[str, StratadError | None]] = []
    first, second = FakeTicket(error=PeerGone("worker_died", "gone")), FakeTicket()
    room.begin(take(room, 4), as_ticket(first), lambda error: heard.append(("first", error)), spare=False)
    room.begin(take(room, 4), as_ticket(second), lambda error: heard.append(("second", error)), spare=False)
    assert room.try_take(3) is None
    first.ended.set()
    assert sum(count for _, count in take(room, 5)) == 5
    assert heard == [("first", first.error)]
    assert second.waited == 0


def test_a_spare_get_gives_way_and_its_owner_sees_it() -> None:
    room = Room(10)
    ticket = FakeTicket("get_part")
    transfer = room.begin(take(room, 8), as_ticket(ticket), lambda _: None, spare=True)
    ticket.ended.set()
    take(room, 5)
    assert not room.claim(transfer)


def test_a_get_that_is_being_read_is_waited_for_and_a_claimed_one_is_kept() -> None:
    room = Room(10)
    ticket = FakeTicket("get_part")
    transfer = room.begin(take(room, 8), as_ticket(ticket), lambda _: None, spare=True)
    assert room.claim(transfer)
    with pytest.raises(Busy, match="5 rows wanted, 2 free") as busy:
        take(room, 5, within_s=0.0)
    assert busy.value.code == "rows_busy"
    got: list[RowRuns] = []
    thread = threading.Thread(target=lambda: got.append(take(room, 5)))
    thread.start()
    ticket.ended.set()
    room.settle(transfer)
    thread.join(10.0)
    assert len(got) == 1


def test_rows_that_a_worker_may_still_write_come_back_only_after_its_end() -> None:
    room = Room(10)
    ticket = FakeTicket(error=PeerGone("worker_died", "gone"))
    ticket.rows_busy = True
    ticket.ended.set()
    heard: list[StratadError | None] = []
    transfer = room.begin(take(room, 8), as_ticket(ticket), heard.append, spare=False)
    room.settle(transfer)
    room.settle(transfer)
    assert heard == [ticket.error]
    assert room.try_take(3) is None
    assert take(room, 3) is not None
    assert not ticket.rows_busy


def test_only_so_much_is_on_its_way() -> None:
    room = Room(1000)
    tickets = [FakeTicket() for _ in range(TRANSFER_LIMIT)]
    for ticket in tickets:
        room.begin(take(room, 1), as_ticket(ticket), lambda _: None, spare=False)
    assert room.try_take(1) is None
    tickets[0].ended.set()
    take(room, 1)
    assert [ticket.waited for ticket in tickets] == [1] + [0] * (TRANSFER_LIMIT - 1)
