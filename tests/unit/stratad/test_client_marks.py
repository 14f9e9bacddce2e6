"""Marks with contents and announcements, as the client sends them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from ipc.messages import Announce, Capture, Failed, Mark, Reply, Request, Restore
from shm.rows import pack_rows
from stratad.client import Marked
from stratad.errors import Busy, UsageError
from tests.support.client_rig import PLAIN, STATEFUL, rig
from tests.support.fake_daemon import FakeDaemon, silence


def test_a_mark_with_contents_is_a_ticket(tmp_path: Path) -> None:
    with rig(tmp_path, (PLAIN, PLAIN)) as (daemon, client, engine, _):
        daemon.script[Mark] = silence
        ticket = engine.mark(3, "clean", conversation="chat", tokens=[5, 6], rows=range(7, 9))
        request = daemon.expect(Mark)
        assert (request.slot, request.mark, request.conversation) == (3, "clean", "chat")
        assert request.tokens == bytes([5, 0, 0, 0, 6, 0, 0, 0])
        assert (request.rows, request.ordered) == (((pack_rows([(7, 2)]),),), "host")
        assert 0 < request.deadline_s <= 5.0
        assert (ticket.kind, ticket.state, ticket.rows_busy, engine.tickets) == ("mark", "sent", True, (ticket,))
        engine.capture("chat", [5], range(7, 8)).result()  # it reads as well
        with pytest.raises(Busy, match="may still be used by a mark"):
            engine.restore("chat", range(8, 9))
        daemon.say(Marked(request.seq, 2, 64, ()))
        assert ticket.result() == Marked(request.seq, 2, 64, ())
        assert (ticket.state, ticket.rows_busy) == ("declared", False)
        engine.restore("chat", range(8, 9)).result()
        assert len(daemon.of(Restore)) == 1
        client.close()


def test_a_state_is_the_one_of_the_slot_at_the_end(tmp_path: Path) -> None:
    with rig(tmp_path, (STATEFUL,)) as (daemon, client, engine, _):
        engine.mark(1, "clean", conversation="chat", tokens=[5, 6], rows=range(2)).result()
        assert daemon.expect(Mark).rows == ((pack_rows([(0, 2)]), pack_rows([(1, 1)])),)
        client.close()


@pytest.mark.parametrize(
    "how",
    [
        {"mark": "dirty", "conversation": "c", "tokens": [1], "rows": range(1)},
        {"mark": "clean", "conversation": "c", "rows": range(1)},
        {"mark": "clean", "tokens": [1], "rows": range(1)},
        {"mark": "clean", "rows": range(1)},
        {"mark": "clean", "conversation": "c", "tokens": [1], "rows": range(2)},
        {"mark": "clean", "conversation": "c", "tokens": [], "rows": range(1)},
    ],
)
def test_contents_that_cannot_be_are_refused_here(tmp_path: Path, how: dict[str, object]) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        with pytest.raises(UsageError):
            engine.mark(0, **how)  # type: ignore[call-overload]
        client.stats()
        assert not daemon.of(Mark)
        client.close()


def test_a_mark_that_has_no_answer_is_sent_to_the_next_daemon(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Mark] = silence
        ticket = engine.mark(0, "clean", conversation="chat", tokens=[1], rows=range(1))
        first.expect(Mark)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            assert isinstance(ticket.result(), Marked)
            assert second.expect(Mark).conversation == "chat"
            client.close()


def refuse(request: Request) -> Iterable[Reply]:
    return [Failed(request.seq, "too_many", "no room")]


@pytest.mark.parametrize("how", ["declared", "refused", "poisoned since"])
def test_the_next_daemon_hears_clean_only_of_what_was_declared(tmp_path: Path, how: str) -> None:
    """A poisoned slot must not come back clean because a mark was under way; what a slot holds is not sent again."""
    with rig(tmp_path) as (first, client, engine, _):
        engine.mark(0, "poisoned")
        if how == "refused":
            first.script[Mark] = refuse
        if how == "poisoned since":
            first.script[Mark] = silence
        ticket = engine.mark(0, "clean", conversation="chat", tokens=[1], rows=range(1))
        if how == "poisoned since":
            late = first.expect(Mark, 2)
            del first.script[Mark]
            engine.mark(0, "poisoned")
            first.say(Marked(late.seq, 1, 32, ()))
        if how == "refused":
            with pytest.raises(Busy):
                ticket.result()
        else:
            ticket.result()
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            engine.lookup([1])
            (again,) = second.of(Mark)
            assert (again.mark, again.conversation) == ("clean" if how == "declared" else "poisoned", "")
            client.close()


def test_an_announcement_names_namespace_and_devices(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, _, _pools):
        assert client.announce("tenant", ["cpu:0"]) == 0
        request = daemon.expect(Announce)
        assert (request.namespace, request.devices) == ("tenant", ("cpu:0",))
        assert 0 < request.deadline_s <= 5.0
        assert not daemon.of(Capture)
        client.close()
