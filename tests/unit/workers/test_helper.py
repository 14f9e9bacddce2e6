"""Work that two threads may come for is done once, and its owner gets what came of it."""

import contextlib
import gc
import sys
import threading
import traceback
import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.wait import wait_until
from workers.helper import Helper, Share


class Bytes:
    """Something that a weak reference can watch."""


def is_in(thread: int, function: str) -> bool:
    """Whether a thread is inside of a function of this name."""
    return any(entry.name == function for entry in traceback.extract_stack(sys._current_frames()[thread]))


def test_the_owner_does_what_nobody_has_come_for() -> None:
    share = Share(threading.get_ident)
    assert share.result() == threading.get_ident()
    assert not share.do()


def test_a_helper_does_it_and_the_owner_takes_it() -> None:
    helper = Helper(shares=True)
    try:
        share = Share(threading.get_ident)
        done = threading.Event()
        helper.put(share.do)
        helper.put(done.set)
        assert done.wait(10)
        assert share.result() != threading.get_ident()
    finally:
        helper.close()


def test_while_the_helper_is_at_one_the_owner_does_the_other() -> None:
    helper = Helper(shares=True)
    began, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        began.set()
        assert go_on.wait(10)
        return threading.get_ident()

    def other() -> int:
        go_on.set()
        return threading.get_ident()

    try:
        first, second = Share(slow), Share(other)
        helper.put(first.do)
        assert began.wait(10)
        # Were the owner only to wait, nobody would ever let the helper go on.
        assert first.result(meanwhile=second) != threading.get_ident()
        assert second.result() == threading.get_ident()
    finally:
        go_on.set()
        helper.close()


@pytest.mark.parametrize("helped", [False, True])
def test_the_owner_meets_the_error_whoever_did_the_work_and_nothing_is_kept(helped: bool) -> None:
    held = Bytes()
    watch = weakref.ref(held)

    def fail(held: Bytes = held) -> None:
        raise ValueError(repr(held))

    share = Share(fail)
    del fail, held
    gc.disable()
    try:
        if helped:
            thread = threading.Thread(target=share.do)
            thread.start()
            thread.join()
        try:
            share.result()
        except ValueError:
            raised = True
        else:
            raised = False
        assert raised
        assert watch() is None
    finally:
        gc.enable()


def test_what_is_given_up_is_not_done_any_more() -> None:
    done: list[int] = []
    share = Share(lambda: done.append(1))
    share.give_up()
    assert not share.do()
    assert done == []


def test_giving_up_waits_for_whoever_is_at_it() -> None:
    owner = threading.get_ident()
    began = threading.Event()
    done: list[int] = []

    def slow() -> None:
        began.set()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: is_in(owner, "give_up"))
        done.append(1)

    share = Share(slow)
    worker = threading.Thread(target=share.do)
    worker.start()
    assert began.wait(10)
    share.give_up()
    ended = list(done)
    worker.join()
    assert ended == [1]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4))
def test_each_share_is_done_exactly_once(shares: int, helpers: int) -> None:
    counts = [0] * shares

    def count(number: int) -> int:
        counts[number] += 1
        return number

    made = [Share(lambda number=number: count(number)) for number in range(shares)]  # type: ignore[misc]
    threads = [threading.Thread(target=lambda: [share.do() for share in made]) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    assert [share.result(meanwhile=made[-1]) for share in made[:-1]] == list(range(shares - 1))
    for thread in threads:
        thread.join()
    assert counts == [1] * shares


def test_a_closed_helper_has_done_what_was_queued() -> None:
    helper = Helper(shares=False)
    done: list[int] = []
    for number in range(5):
        helper.put(lambda number=number: done.append(number))  # type: ignore[misc]
    helper.close()
    helper.close()
    assert done == list(range(5))


def test_a_task_that_wants_to_go_on_starts_no_thread_behind_the_end() -> None:
    helper = Helper(shares=False)
    owner = threading.get_ident()
    began, ended = threading.Event(), threading.Event()

    def goes_on() -> None:
        began.set()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: is_in(owner, "join"))
        helper.put(goes_on)
        ended.set()

    helper.put(goes_on)
    assert began.wait(10)
    helper.close()
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "helper"]
