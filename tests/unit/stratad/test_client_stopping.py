"""What the client makes of a daemon that is stopping: what it never began is done by the next one."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from ipc.messages import (
    Acknowledge,
    Cancel,
    Capture,
    Failed,
    Lookup,
    Progress,
    Register,
    Reply,
    Request,
    Restore,
    StageOutcome,
)
from shm.rows import pack_rows
from stratad import _registration
from stratad.errors import Busy, Lost
from tests.support.client_rig import rig
from tests.support.fake_daemon import FakeDaemon, silence
from tests.support.wait import wait_until

UNTOUCHED = StageOutcome(0, "untouched")
TURNED_AWAY = StageOutcome(0, "failed", "stopping", "the worker stops", rows_undefined=(b"",))
WRITTEN = StageOutcome(0, "failed", "stopping", "the worker stops", rows_undefined=(pack_rows([(0, 1)]),))


def stopping(*outcomes: StageOutcome) -> Callable[[Request], Iterable[Reply]]:
    """A handler that turns every request away."""
    return lambda request: [Failed(request.seq, "stopping", "the daemon is stopping", stages=outcomes)]


@pytest.mark.parametrize("outcomes", [(), (UNTOUCHED,), (TURNED_AWAY,)])
@pytest.mark.parametrize("kind", [Capture, Restore, Lookup])
def test_what_a_stopping_daemon_turns_away_is_done_by_the_next(
    tmp_path: Path, kind: type[msgspec.Struct], outcomes: tuple[StageOutcome, ...]
) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[kind] = stopping(*outcomes)
        first.script[Register] = stopping()
        calls: dict[type[msgspec.Struct], Callable[[], object]] = {
            Capture: lambda: engine.capture("chat", [1], range(1)).result(),
            Restore: lambda: engine.restore("chat", range(1)).result(),
            Lookup: lambda: engine.lookup([1]) or "miss",
        }
        done: list[object] = []
        thread = threading.Thread(target=lambda: done.append(calls[kind]()))
        thread.start()
        first.expect(kind)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            thread.join(5.0)
            assert len(done) == 1
            assert (len(first.of(kind)), len(second.of(kind))) == (1, 1)
            client.close()


def test_a_call_that_was_turned_away_is_not_sent_to_the_same_daemon_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Capture] = stopping()
        ticket = engine.capture("chat", [1], range(1))
        first.expect(Capture)
        client.stats()
        client.pump.flush(engine.registration)  # as after a registration: whatever else goes on meanwhile
        assert (len(first.of(Capture)), ticket.state, ticket.rows_busy) == (1, "sent", True)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            ticket.result()
            assert len(second.of(Capture)) == 1
            client.close()


def test_a_capture_that_one_stage_had_ended_is_repeated_as_long_as_its_rows_are_not_free(tmp_path: Path) -> None:
    partly = stopping(StageOutcome(0, "done"), StageOutcome(1, "failed", "stopping"))
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Capture] = partly
        ticket = engine.capture("chat", [1], range(1))
        first.expect(Capture)
        first.script[Capture] = lambda request: [Progress(request.seq, "source_free"), *partly(request)]
        with pytest.raises(Busy, match="stopping"):
            engine.capture("other", [1], range(1, 2)).result()
        assert ticket.rows_busy
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            ticket.result()
            assert [request.conversation for request in second.of(Capture)] == ["chat"]
            client.close()


def test_where_rows_were_written_the_caller_is_told(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Restore] = stopping(WRITTEN)
        with pytest.raises(Busy, match="stopping") as caught:
            engine.restore("chat", range(1)).result()
        assert caught.value.stages == (WRITTEN,)


def test_rows_of_what_was_turned_away_are_free_when_it_is_given_up(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Restore] = stopping()
        ticket = engine.restore("chat", range(1))
        first.expect(Restore)
        client.stats()
        ticket.cancel()
        assert (ticket.state, ticket.rows_busy) == ("failed", False)  # without a worker's end: none had it
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            client.stats()
            assert not second.of(Restore)
            client.close()


@pytest.mark.parametrize("end", ["stopping", "killed"])
def test_what_was_cancelled_is_not_begun_anew(tmp_path: Path, end: str) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Capture] = silence
        first.script[Cancel] = silence
        ticket = engine.capture("chat", [1], range(1))
        request = first.expect(Capture)
        ticket.cancel()
        first.expect(Cancel)
        if end == "stopping":
            first.say(Failed(request.seq, "stopping", "the daemon is stopping"))
            with pytest.raises(Busy, match="stopping"):
                ticket.result()
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            client.stats()
            if end == "killed":
                with pytest.raises(Lost):
                    ticket.result()
            assert not second.of(Capture)
            client.close()


def test_a_take_is_not_acknowledged_to_the_next_daemon(tmp_path: Path) -> None:
    """Its numbers may name another image there."""
    with rig(tmp_path) as (first, client, engine, _):
        ticket = engine.take("chat", range(1))
        wait_until(ticket.done)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            assert engine.lookup([1]) is None
            with pytest.raises(Lost) as caught:
                ticket.result()
            assert caught.value.detail == {"restored": "true"}
            assert not second.of(Acknowledge)
            client.close()


def test_the_pause_before_a_new_try_to_register_ends_with_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was not ready is followed by one that is: nobody waits for the first one's sake."""
    monkeypatch.setattr(_registration, "FIRST_RETRY_S", 60.0)
    with rig(tmp_path, deadline_s=20.0) as (first, client, engine, _):
        first.stop()
        second = FakeDaemon.start(tmp_path, start_id=b"2" * 16)
        second.script[Register] = lambda request: [Failed(request.seq, "worker_unavailable", "starting")]
        done: list[object] = []
        thread = threading.Thread(target=lambda: done.append(engine.lookup([1])))
        thread.start()
        second.expect(Register)
        second.stop()
        with FakeDaemon.start(tmp_path, start_id=b"3" * 16) as third:
            third.expect(Register)
            thread.join(5.0)
            assert done == [None]
            client.close()
