"""Tickets: how they move, what they fence, how they end."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import TypeVar

import pytest

from ipc.messages import (
    Acknowledge,
    Cancel,
    Capture,
    Captured,
    Done,
    Failed,
    Hello,
    Progress,
    Release,
    Restore,
    Restored,
    Stats,
)
from stratad.client import StagePool, Ticket
from stratad.errors import Busy, Cancelled, DeadlineExceeded, PeerGone, UsageError
from tests.support.client_rig import FINGERPRINT, PLAIN, STATEFUL, rig
from tests.support.fake_daemon import FakeDaemon, empty_stats, silence
from tests.support.fake_worker import fake_worker
from tests.support.wait import wait_until

ResultT = TypeVar("ResultT", Captured, Restored)


def published(seq: int) -> Captured:
    return Captured(seq, 9, 1, 1000, 500, ())


def restored(seq: int, image_id: int = 9) -> Restored:
    return Restored(seq, image_id, 1, 1000, ())


def test_a_capture_goes_through_its_states(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Capture] = silence
        ticket = engine.capture("chat", [1], range(1))
        seq = daemon.expect(Capture).seq
        assert (ticket.state, ticket.done(), ticket.rows_busy) == ("sent", False, True)
        daemon.say(Progress(seq, "accepted"))
        wait_until(lambda: ticket.state == "accepted")
        assert ticket.rows_busy
        daemon.say(Progress(seq, "source_free"))
        ticket.wait_source_free()
        assert (ticket.state, ticket.done(), ticket.rows_busy) == ("source_free", False, False)
        daemon.say(published(seq))
        assert ticket.result() == published(seq)
        assert (ticket.state, ticket.done()) == ("published", True)


def test_groups_of_a_restore_are_waited_for_one_by_one(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        daemon.script[Stats] = silence
        ticket = engine.restore("chat", range(1), layered=True)
        request = daemon.expect(Restore)
        assert request.layered
        woken: list[int] = []

        def wait(group: int) -> None:
            ticket.wait_group(0, group)
            woken.append(group)

        leader = threading.Thread(target=client.stats)
        leader.start()
        stats = daemon.expect(Stats)
        waiters = [threading.Thread(target=wait, args=(group,)) for group in (0, 1, 2)]
        for waiter in waiters:
            waiter.start()
        daemon.say(Progress(request.seq, "group", 0, 1))
        wait_until(lambda: woken == [1])
        daemon.say(Progress(request.seq, "group", 1, 0))  # of another stage
        wait_until(lambda: ticket.group_done(1, 0))
        assert woken == [1]
        assert [ticket.group_done(0, group) for group in (0, 1, 2)] == [False, True, False]
        assert ticket.rows_busy
        with pytest.raises(DeadlineExceeded):
            ticket.wait_group(0, 2, deadline_s=0.01)
        daemon.say(restored(request.seq))
        for waiter in waiters:
            waiter.join()
        assert sorted(woken) == [0, 1, 2]
        assert ticket.group_done(0, 7)
        ticket.wait_group(0, 7)
        daemon.say(empty_stats(stats.seq))
        leader.join()


def test_the_final_reply_implies_source_free(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        ticket = engine.capture("chat", [1], range(1))
        ticket.wait_source_free()
        assert ticket.state == "published"
        daemon.script[Capture] = lambda request: [Failed(request.seq, "worker_died", "gone")]
        with pytest.raises(PeerGone):
            engine.capture("chat", [1], range(1)).wait_source_free()


def test_a_wait_for_source_free_wakes_while_another_thread_leads(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Capture] = silence
        daemon.script[Stats] = silence
        ticket = engine.capture("chat", [1], range(1))
        leader = threading.Thread(target=client.stats)
        leader.start()
        stats = daemon.expect(Stats)
        free = threading.Thread(target=ticket.wait_source_free)
        free.start()
        daemon.say(Progress(daemon.expect(Capture).seq, "source_free"))
        free.join(5.0)
        assert leader.is_alive()
        daemon.say(empty_stats(stats.seq), published(daemon.expect(Capture).seq))
        leader.join(5.0)
        ticket.result()


def test_overlapping_rows_are_refused_until_the_final_reply(tmp_path: Path) -> None:
    with rig(tmp_path, (PLAIN, PLAIN)) as (daemon, _, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", rows_by_stage=[range(10), range(10, 20)])
        assert ticket.rows_busy
        # Stage 0 uses rows 0..9, stage 1 rows 10..19: the same numbers on the other stage are free.
        engine.capture("chat", range(8), rows_by_stage=[range(10, 18), range(8)]).result()
        for by_stage in ([range(9, 10), range(1)], [range(20, 21), range(19, 20)]):
            with pytest.raises(Busy, match="may still be used by a restore") as caught:
                engine.capture("chat", [1], rows_by_stage=by_stage)
            assert caught.value.code == "rows_busy"
        assert len(daemon.of(Capture)) == 1
        daemon.say(restored(daemon.expect(Restore).seq))
        ticket.result()
        engine.capture("chat", [1], range(9, 10)).result()


def test_a_late_final_reply_is_seen_by_the_next_operation(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        engine.restore("chat", range(4))
        daemon.say(restored(daemon.expect(Restore).seq))
        client.stats()
        del daemon.script[Restore]
        engine.restore("chat", range(4)).result()


def test_the_state_of_a_slot_is_fenced_too(tmp_path: Path) -> None:
    with rig(tmp_path, (STATEFUL,)) as (daemon, _, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4), slot=1)
        with pytest.raises(Busy, match="state of slot 1"):
            engine.capture("chat", [1], range(10, 11), checkpoints=[(1, 1)])
        engine.capture("chat", [1], range(10, 11), checkpoints=[(1, 0)]).result()
        daemon.say(restored(daemon.expect(Restore).seq))
        ticket.result()


def test_a_deadline_cancels_and_keeps_the_rows_busy(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, pools):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4), deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            ticket.result()
        seq = daemon.expect(Restore).seq
        assert daemon.expect(Cancel).target_seq == seq
        assert ticket.rows_busy
        assert not ticket.done()
        with pytest.raises(Busy):
            engine.capture("chat", [1], range(1))
        with pytest.raises(Busy):
            pools[0].close()
        with pytest.raises(Busy):
            engine.unregister(deadline_s=0.05)
        daemon.say(Failed(seq, "cancelled", "between two slices"))
        with pytest.raises(Cancelled):
            ticket.result(5.0)
        assert not ticket.rows_busy
        assert len(daemon.of(Cancel)) == 1


def test_a_shorter_wait_does_not_cancel(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Capture] = silence
        ticket = engine.capture("chat", [1], range(1))
        for wait in (ticket.result, ticket.wait_source_free):
            with pytest.raises(DeadlineExceeded):
                wait(0.02)
        daemon.say(published(daemon.expect(Capture).seq))
        assert ticket.result().image_id == 9
        assert not daemon.of(Cancel)


def test_a_workers_death_alone_frees_nothing_while_the_daemon_lives(tmp_path: Path) -> None:
    """The daemon may have kept the operation for the worker's successor; its final reply will come."""
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (daemon, _, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4), deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            ticket.result()
        worker.kill()
        assert not ticket.wait_rows_free(0.05)
        daemon.say(Failed(daemon.expect(Restore).seq, "worker_died", "gone"))
        assert ticket.wait_rows_free(5.0)


def test_cancel_asks_once_and_the_reply_decides(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Capture] = silence
        ticket = engine.capture("chat", [1], range(1))
        ticket.cancel()
        ticket.cancel()
        seq = daemon.expect(Capture).seq
        assert daemon.expect(Cancel).target_seq == seq
        assert ticket.rows_busy
        daemon.say(published(seq))  # the end came first
        assert ticket.result().image_id == 9
        ticket.cancel()
        assert len(daemon.of(Cancel)) == 1


def test_take_acknowledges_and_waits_for_the_answer(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Restore] = lambda request: [restored(request.seq, 77)]
        daemon.script[Acknowledge] = silence
        ticket = engine.take("chat", range(1))
        assert daemon.expect(Restore).take
        wait_until(ticket.done)
        assert not daemon.of(Acknowledge)  # the caller has not seen the result yet
        results: list[Restored] = []
        threads = [threading.Thread(target=lambda: results.append(ticket.result())) for _ in range(2)]
        for thread in threads:
            thread.start()
        acknowledge = daemon.expect(Acknowledge)
        assert (acknowledge.engine_id, acknowledge.image_id) == (1, 77)
        assert not results
        daemon.say(Done(acknowledge.seq, 1))
        for thread in threads:
            thread.join(5.0)
        assert [result.image_id for result in results] == [77, 77]
        assert ticket.result().image_id == 77
        assert len(daemon.of(Acknowledge)) == 1


def test_a_failed_take_acknowledges_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = lambda request: [Failed(request.seq, "worker_died", "gone")]
        with pytest.raises(PeerGone):
            engine.take("chat", range(1)).result()
        client.stats()
        assert not daemon.of(Acknowledge)


def test_a_take_that_is_restored_after_its_deadline_is_released(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.take("chat", range(1), deadline_s=0.05)
        for _ in range(2):  # a second wait in vain changes nothing
            with pytest.raises(DeadlineExceeded):
                ticket.result(0.05)
        assert not daemon.of(Release)
        daemon.say(restored(daemon.expect(Restore).seq, 77))
        assert ticket.wait_rows_free(5.0)
        release = daemon.expect(Release)
        assert (release.engine_id, release.image_id) == (1, 77)
        for _ in range(2):
            with pytest.raises(Cancelled) as caught:
                ticket.result()
            assert caught.value.detail == {"restored": "true"}
        ticket.cancel()
        client.stats()
        assert (len(daemon.of(Release)), len(daemon.of(Acknowledge))) == (1, 0)


@pytest.mark.parametrize("first", ["cancel", "reply"])
def test_a_cancelled_take_that_is_restored_is_released(tmp_path: Path, first: str) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.take("chat", range(1))
        seq = daemon.expect(Restore).seq
        if first == "cancel":
            ticket.cancel()
            daemon.expect(Cancel)
        daemon.say(restored(seq, 77))
        wait_until(ticket.done)
        ticket.cancel()
        assert daemon.expect(Release).image_id == 77
        client.stats()
        assert (len(daemon.of(Release)), len(daemon.of(Acknowledge))) == (1, 0)


@pytest.mark.parametrize("expired", [True, False])
def test_a_take_that_is_waited_for_again_is_acknowledged(tmp_path: Path, expired: bool) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.take("chat", range(1), deadline_s=0.05 if expired else 5.0)
        if expired:
            with pytest.raises(DeadlineExceeded):
                ticket.result()
        else:
            ticket.cancel()
        results: list[Restored] = []
        thread = threading.Thread(target=lambda: results.append(ticket.result(5.0)))
        thread.start()
        wait_until(lambda: ticket._wanted)
        daemon.say(restored(daemon.expect(Restore).seq, 77))
        thread.join(5.0)
        ticket.cancel()
        client.stats()
        assert [result.image_id for result in results] == [77]
        assert (len(daemon.of(Release)), len(daemon.of(Acknowledge))) == (0, 1)


def test_a_short_wait_for_a_take_releases_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.take("chat", range(1))
        with pytest.raises(DeadlineExceeded):
            ticket.result(0.02)
        daemon.say(restored(daemon.expect(Restore).seq, 77))
        wait_until(ticket.done)
        client.stats()
        assert not daemon.of(Release)
        assert ticket.result().image_id == 77
        assert len(daemon.of(Acknowledge)) == 1


def test_a_take_is_not_released_on_another_connection(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        ticket = engine.take("chat", range(1))
        wait_until(ticket.done)
        daemon.hang_up()
        wait_until(lambda: client.stats() and client.statistics()["connections"] == 2)
        ticket.cancel()
        client.stats()
        assert not daemon.of(Release)


def test_a_plain_restore_is_never_released(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(1))
        ticket.cancel()
        daemon.say(restored(daemon.expect(Restore).seq))
        wait_until(ticket.done)
        client.stats()
        assert not daemon.of(Release)
        assert ticket.result().image_id == 9


def test_restore_names_the_image_one_way(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        assert engine.restore(image_id=12, rows=range(3), tokens=3).result().image_id == 12
        sent = daemon.expect(Restore)
        assert (sent.image_id, sent.conversation, sent.tokens, sent.take) == (12, "", 3, False)
        for conversation, image_id, tokens in (("", 0, -1), ("chat", 3, -1), ("chat", 0, 0), ("chat", 0, 4)):
            with pytest.raises(UsageError):
                engine.restore(conversation, range(3), image_id=image_id, tokens=tokens)


def test_a_pool_of_a_registered_engine_stays_open(tmp_path: Path) -> None:
    with rig(tmp_path) as (_, _, engine, pools):
        with pytest.raises(UsageError, match="unregister first"):
            pools[0].close()
        engine.unregister()
        engine.unregister()
        pools[0].close()
        with pytest.raises(UsageError, match="no longer registered"):
            engine.capture("chat", [1], range(1))


def test_unregister_waits_for_operations(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        engine.restore("chat", range(4))
        thread = threading.Thread(target=engine.unregister)
        thread.start()
        daemon.say(restored(daemon.expect(Restore).seq))
        thread.join(5.0)
        assert client.engines == ()


def test_close_cancels_what_is_in_flight(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Restore] = silence
        engine.restore("chat", range(4))
        daemon.script[Cancel] = lambda request: [
            Done(request.seq),
            Failed(daemon.expect(Restore).seq, "cancelled", "as asked"),
        ]
        client.close()
        assert len(daemon.of(Cancel)) == 1


def test_memory_with_busy_rows_outlives_the_client(tmp_path: Path) -> None:
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (daemon, client, engine, pools):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4))
        client.close(deadline_s=0.05)
        assert ticket.rows_busy
        with pytest.raises(Busy, match="close the pool"):
            pools[0].close()
        worker.kill()
        assert not ticket.rows_busy
        pools[0].close()


def test_awaitable_forms(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, pools):

        async def main() -> None:
            assert (await engine.capture("chat", [1], range(1))).tokens == 1
            assert (await engine.restore("chat", range(1))).image_id == 1
            assert (await engine.take("chat", range(1))).image_id == 1
            ticket = engine.capture("chat", [1], range(1))
            await ticket.source_free_async()
            assert (await ticket).tokens == 1
            assert await engine.lookup_async([1]) is None
            await engine.mark_async(0, "clean")
            assert (await client.stats_async()).health == "ok"
            assert await client.drop_async("tenant", "chat") == 0
            assert await client.clear_async("tenant") == 0
            await client.pin_async("tenant", "chat")
            assert await client.list_images_async() == []
            other = await client.register_async("e2", "tenant", FINGERPRINT, [StagePool("cpu:0", PLAIN, pools[0])])
            await other.unregister_async()

        asyncio.run(main())
        assert len(daemon.of(Acknowledge)) == 1
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "stratad-pump"])


async def result_of(ticket: Ticket[ResultT]) -> ResultT:
    return await ticket


def test_many_coroutines_wait_at_once_beside_a_thread(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Capture] = silence

        async def main() -> None:
            tickets = [engine.capture("chat", [1], [row]) for row in range(20)]
            waiting = [asyncio.ensure_future(result_of(ticket)) for ticket in tickets]
            await asyncio.sleep(0)
            daemon.expect(Capture, 20)
            for request in reversed(daemon.of(Capture)):
                daemon.say(published(request.seq))
            assert len(await asyncio.gather(*waiting)) == 20

        thread = threading.Thread(target=lambda: [client.stats() for _ in range(50)])
        thread.start()
        asyncio.run(main())
        thread.join(5.0)
        assert len(daemon.of(Stats)) == 50


def test_a_deadline_of_a_coroutine_cancels_as_well(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Restore] = silence

        async def main() -> None:
            with pytest.raises(DeadlineExceeded):
                await engine.restore("chat", range(4), deadline_s=0.05)

        asyncio.run(main())
        assert daemon.expect(Cancel).target_seq == daemon.expect(Restore).seq
        daemon.say(Failed(daemon.expect(Restore).seq, "cancelled", "as asked"))
        wait_until(lambda: not engine.tickets)


def test_a_cancelled_coroutine_leaves_the_ticket_fenced(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        daemon.script[Restore] = silence
        ticket = engine.restore("chat", range(4))

        async def main() -> None:
            waiting = asyncio.ensure_future(result_of(ticket))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(main())
        assert ticket.rows_busy
        daemon.say(restored(daemon.expect(Restore).seq))
        assert ticket.result().image_id == 9


def test_a_submission_does_not_wait_for_a_connection_that_is_being_opened(tmp_path: Path) -> None:
    """Else every coroutine of the loop would stand still with it."""
    with rig(tmp_path) as (first, client, engine, _):
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16, script={Hello: silence}) as second:

            def lead() -> None:
                with contextlib.suppress(DeadlineExceeded):
                    client.list_images(deadline_s=1.0)

            leader = threading.Thread(target=lead)
            leader.start()
            second.expect(Hello)  # the leader now waits for the welcome, and nobody gives it

            async def main() -> float:
                started_s = time.monotonic()
                ticket = engine.capture("chat", [1], range(1))
                took_s = time.monotonic() - started_s
                ticket.cancel()
                return took_s

            assert asyncio.run(main()) < 0.3
            leader.join(5.0)
            client.close()
