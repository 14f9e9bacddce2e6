"""What the client does when its daemon dies, throws it out, or changes a worker."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ipc.messages import (
    Acknowledge,
    Capture,
    Captured,
    Drop,
    Failed,
    Found,
    Hello,
    Lookup,
    Mark,
    OpInfo,
    Progress,
    Register,
    Registered,
    Request,
    Restore,
    Stats,
    WorkersChanged,
)
from stratad.client import Client, CpuPool, StagePool
from stratad.errors import Busy, DeadlineExceeded, Lost, ProtocolError, UsageError
from tests.support.client_rig import PLAIN, rig
from tests.support.fake_daemon import FakeDaemon, Handler, empty_stats, silence
from tests.support.fake_worker import fake_worker
from tests.support.wait import wait_until


def test_the_next_daemon_gets_the_registration_the_marks_and_the_call(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        engine.mark(1, "dirty")
        engine.mark(1, "poisoned")
        engine.mark(2, "clean")
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            assert engine.lookup([1]) is None
            kinds = [type(request) for request in second.requests]
            assert kinds[1:] == [Register, Mark, Mark, Lookup]
            assert {(mark.slot, mark.mark) for mark in second.of(Mark)} == {(1, "poisoned"), (2, "clean")}
            assert second.bad_probes == 0
            assert client.welcome.start_id == b"2" * 16
            client.close()


@pytest.mark.parametrize("kind", [Lookup, Capture, Stats, Register])
def test_calls_that_may_be_repeated_are(tmp_path: Path, kind: type[msgspec.Struct]) -> None:
    with rig(tmp_path) as (first, client, engine, pools):
        first.script[kind] = silence
        seen = len(first.of(kind))
        done: list[object] = []
        calls: dict[type[msgspec.Struct], Callable[[], object]] = {
            Lookup: lambda: engine.lookup([1]) or "miss",
            Capture: lambda: engine.capture("chat", [1], range(1)).result(),
            Stats: client.stats,
            Register: lambda: client.register("e2", "tenant", engine.registration.fingerprint, _stages(pools)),
        }
        thread = threading.Thread(target=lambda: done.append(calls[kind]()))
        thread.start()
        first.expect(kind, seen + 1)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            thread.join(5.0)
            assert len(done) == 1
            assert len(second.of(kind)) == (2 if kind is Register else 1)
            client.close()


def _stages(pools: tuple[CpuPool, ...]) -> list[StagePool]:
    return [StagePool("cpu:0", PLAIN, pool) for pool in pools]


def test_a_repeated_capture_names_the_new_engine(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Capture] = silence
        ticket = engine.capture("chat", [1], range(1))
        first.expect(Capture)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            second._next_engine_id = 40
            assert isinstance(ticket.result(), Captured)
            assert second.expect(Capture).engine_id == 40
            client.close()


def test_a_capture_whose_source_is_free_is_not_repeated(tmp_path: Path) -> None:
    """The engine may have written the rows since: the repeated capture would publish other bytes under the same
    tokens."""
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Capture] = lambda request: [Progress(request.seq, "source_free")]
        ticket = engine.capture("chat", [1], range(1))
        ticket.wait_source_free()
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            with pytest.raises(Lost):
                ticket.result()
            client.stats()
            assert not second.of(Capture)
            client.close()


def test_a_drop_is_lost(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, _, _):
        daemon.script[Drop] = silence
        errors: list[Exception] = []

        def drop() -> None:
            try:
                client.drop("tenant", "chat")
            except Lost as error:
                errors.append(error)

        thread = threading.Thread(target=drop)
        thread.start()
        daemon.expect(Drop)
        daemon.stop()
        thread.join(5.0)
        assert len(errors) == 1


def test_a_lost_restore_fences_its_rows_until_the_worker_is_gone(tmp_path: Path) -> None:
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (first, client, engine, pools):
        first.script[Restore] = silence
        ticket = engine.restore("chat", range(4))
        first.expect(Restore)
        first.stop()
        with pytest.raises(Lost):
            ticket.result()
        assert ticket.state == "failed"
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            client.stats()
            assert ticket.rows_busy
            with pytest.raises(Busy, match="rows_busy"):
                engine.capture("chat", [1], range(3, 4))
            with pytest.raises(Busy):
                pools[0].close()
            engine.capture("chat", [1], range(4, 5)).result()
            worker.kill()
            assert not ticket.rows_busy
            engine.capture("chat", [1], range(3, 4)).result()
            assert not second.of(Restore)
            client.close()


def test_a_daemon_that_threw_us_out_says_when_the_rows_are_free(tmp_path: Path) -> None:
    op = OpInfo(1, "restore", "copying", "tenant", "chat", 1, 1.0, (0,))
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4))
        daemon.expect(Restore)
        daemon.script[Stats] = lambda request: [msgspec.structs.replace(empty_stats(request.seq), ops=(op,))]
        daemon.hang_up()
        with pytest.raises(Lost):
            ticket.result()
        client.stats()
        assert ticket.rows_busy  # the worker lives, and the daemon still has an operation of the old engine
        del daemon.script[Stats]
        engine.capture("chat", [1], range(9, 10)).result()  # asks again on its way
        wait_until(lambda: not ticket.rows_busy)
        del daemon.script[Restore]
        engine.restore("chat", range(4)).result()


def test_a_take_whose_acknowledgement_is_lost_says_that_the_rows_are_there(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Acknowledge] = silence
        ticket = engine.take("chat", range(1))
        errors: list[Lost] = []

        def result() -> None:
            try:
                ticket.result()
            except Lost as error:
                errors.append(error)

        thread = threading.Thread(target=result)
        thread.start()
        daemon.expect(Acknowledge)
        daemon.stop()
        thread.join(5.0)
        assert errors[0].detail == {"restored": "true"}
        assert (ticket.state, ticket.rows_busy) == ("restored", False)


def test_no_next_daemon_ends_in_the_deadline(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.stop()
        with pytest.raises(DeadlineExceeded, match="no daemon answered"):
            engine.lookup([1], deadline_s=0.1)
        ticket = engine.restore("chat", range(4), deadline_s=0.1)  # never sent: nothing can touch the rows
        with pytest.raises(DeadlineExceeded, match="no daemon answered"):
            ticket.result()
        assert not ticket.rows_busy


def test_a_call_made_while_there_is_no_daemon_is_sent_to_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.stop()
        with pytest.raises(DeadlineExceeded):
            engine.lookup([1], deadline_s=0.02)
        ticket = engine.restore("chat", range(4))
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            assert ticket.result().image_id == 1
            assert second.expect(Restore).conversation == "chat"
            client.close()


def test_a_daemon_that_is_not_ready_is_asked_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.stop()
        second = FakeDaemon.start(tmp_path, start_id=b"2" * 16)
        with second:
            second.script[Register] = lambda request: (
                [Failed(request.seq, "worker_unavailable", "starting")]
                if len(second.of(Register)) < 2
                else [second.registered(request.seq, 1)]
            )
            assert engine.lookup([1]) is None
            assert len(second.of(Register)) == 3
            client.close()


def test_tries_to_register_again_come_ever_later_and_send_each_memfd_once(tmp_path: Path) -> None:
    came_s: list[float] = []
    with rig(tmp_path, (PLAIN, PLAIN)) as (first, client, engine, _):
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:

            def not_ready(request: Request) -> list[Failed | Registered]:
                came_s.append(time.monotonic())
                if len(came_s) <= 3:
                    return [Failed(request.seq, "worker_unavailable", "starting")]
                return [second.registered(request.seq, 2)]

            second.script[Register] = not_ready
            assert engine.lookup([1]) is None
            pauses_s = [later - sooner for sooner, later in itertools.pairwise(came_s)]
            assert len(pauses_s) == 3
            for pause_s, least_s in zip(pauses_s, (0.1, 0.2, 0.4), strict=True):
                assert pause_s >= least_s
            assert len(set(second.tags)) == len(second.tags) == 8
            assert second.unclaimed() == 0
            client.close()


def test_a_registration_refused_for_good_ends_the_calls(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            second.script[Register] = lambda request: [Failed(request.seq, "foreign_device", "no such device", 0)]
            for _ in range(2):
                with pytest.raises(UsageError, match="foreign_device"):
                    engine.lookup([1])
            del second.script[Register]
            assert engine.lookup([1]) is None
            client.close()


def test_coroutines_survive_a_restart(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, engine, _):
        first.script[Lookup] = silence

        async def main() -> None:
            waiting = asyncio.ensure_future(engine.lookup_async([1]))
            await asyncio.to_thread(first.expect, Lookup)
            await asyncio.to_thread(first.stop)
            script: dict[type[msgspec.Struct], Handler] = {
                Lookup: lambda request: [Found(request.seq, "hit", 3, "chat", 1, 1)]
            }
            with FakeDaemon.start(tmp_path, start_id=b"2" * 16, script=script):
                found = await waiting
                assert found is not None
                await asyncio.to_thread(client.close)

        asyncio.run(main())


def test_a_replaced_worker_is_the_one_whose_death_counts(tmp_path: Path) -> None:
    with (
        fake_worker() as old,
        fake_worker() as new,
        rig(tmp_path, workers=[old.process]) as (daemon, client, engine, _),
    ):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4))
        daemon.expect(Restore)
        old.kill()
        daemon.say(WorkersChanged(-1, 1, (new.process,)))
        wait_until(lambda: not ticket.done() and engine.workers == (new.process,))
        daemon.stop()
        with pytest.raises(Lost):
            ticket.result()
        assert ticket.rows_busy
        new.kill()
        assert not ticket.rows_busy
        client.close()


def test_a_worker_gone_before_the_loss_leaves_its_unknown_successor_time_to_end(tmp_path: Path) -> None:
    """The news of a successor may have died with the daemon."""
    with fake_worker() as old, rig(tmp_path, workers=[old.process]) as (daemon, _, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4))
        daemon.expect(Restore)
        old.kill()
        daemon.stop()
        with pytest.raises(Lost):
            ticket.result()
        assert ticket.rows_busy
        assert ticket.wait_rows_free(5.0)


def test_news_of_workers_must_fit_the_engine(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        here = daemon.workers[0]
        daemon.say(WorkersChanged(-1, 99, (here,)))  # of an engine that was unregistered meanwhile
        assert client.stats().health == "ok"
        daemon.say(WorkersChanged(-1, 1, (here, msgspec.structs.replace(here, stage=1))))
        wait_until(lambda: _connections(client) == 2)
        assert engine.lookup([1]) is None


def _connections(client: Client) -> int:
    with contextlib.suppress(ProtocolError):  # whoever waits while the wire breaks is told
        client.stats()
    return client.statistics()["connections"]


def test_messages_of_one_daemon_never_reach_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, client, _, _):
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            # Nothing was polled since the first died: to the client it looks alive.
            with contextlib.suppress(Lost):
                client.drop("tenant", "chat")
            client.stats()
            assert [type(request) for request in second.requests[:2]] == [Hello, Register]
            client.close()
