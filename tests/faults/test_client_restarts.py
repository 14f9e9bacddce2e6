"""A daemon that is killed, stopped or stands still, and the next one: what its clients notice."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from shm.process import is_gone
from stratad.client import Client
from stratad.errors import DeadlineExceeded, Lost, UsageError
from tests.support.cycles import Cycles
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.wait import wait_until

KEEP = {"ram.keep": "true"}
TOKENS = 700
ROWS = range(TOKENS)
# Chunks so large that each is a slice; at this speed 2.8 MB a stage take 0.3 s.
SLICED = (slot_layout(rows=1024, planes=4, row_bytes=1024), slot_layout(rows=1024, planes=4, row_bytes=1024))
SLOW = {**KEEP, "cpu_device.link_bytes_per_s": "1e7"}


@contextlib.contextmanager
def engine_on(daemon: DaemonProcess) -> Iterator[tuple[Client, FakeEngine]]:
    """An engine whose client goes through restarts; what was captured is dropped at the end."""
    with daemon.client(deadline_s=30.0) as client, FakeEngine(client, SLICED) as engine:
        yield client, engine
        client.clear("ns")


def copying(daemon: DaemonProcess, count: int = 1) -> None:
    """Wait until operations are being copied, with another client's eyes."""
    with daemon.client() as eyes:
        wait_until(lambda: sum(op.state == "copying" for op in eyes.stats().ops) >= count)


def test_images_of_both_daemons_and_a_capture_between_them() -> None:
    """A capture that was in flight is made again by the next daemon; no worker of the first one is left by then."""
    with DaemonProcess("cpu:2", SLOW) as daemon, engine_on(daemon) as (client, engine):
        old = engine.contents(ROWS, TOKENS)
        engine.capture("old", ROWS, ROWS)
        engine.fill()
        between = engine.contents(ROWS, TOKENS)
        ticket = engine.engine.capture("between", ROWS, ROWS)
        copying(daemon)
        former = engine.engine.workers
        daemon.kill()
        daemon.start()
        assert ticket.rows_busy
        captured = ticket.result()
        assert captured.image_bytes == sum(len(part) for stage in between for part in stage)
        assert all(is_gone(worker.pid, worker.start_ticks) for worker in former)
        assert not {worker.pid for worker in former} & {worker.pid for worker in engine.engine.workers}
        for name, expected in (("old", old), ("between", between)):
            engine.fill()
            engine.restore(name, ROWS)
            assert engine.contents(ROWS, TOKENS) == expected
        assert client.statistics() == {"connections": 2, "unknown_replies": 0}


def test_a_capture_that_the_dead_daemon_had_published_is_captured_again() -> None:
    """Nobody heard of the first one; the second shares all its bytes and takes its place."""
    with DaemonProcess("cpu:2", KEEP) as daemon, engine_on(daemon) as (client, engine):
        expected = engine.contents(ROWS, TOKENS)
        with client.pump.lock:  # nothing of it is read before the daemon is dead
            ticket = engine.engine.capture("a", ROWS, ROWS)
            with daemon.client() as eyes:
                wait_until(lambda: eyes.stats().images == 1)
            daemon.kill()
            daemon.start()
        captured = ticket.result()
        assert captured.new_bytes in (0, captured.image_bytes)  # the latter: its answer was still read
        images = client.list_images("ns")
        assert [image.image_id for image in images] == [captured.image_id]
        engine.fill()
        engine.restore("a", ROWS)
        assert engine.contents(ROWS, TOKENS) == expected


def test_a_late_scatter_never_lands_in_rows_that_the_engine_may_write() -> None:
    faults = {"cpu:0/restore.slow_copy_s": "0.05", "cpu:1/restore.slow_copy_s": "0.05"}
    with DaemonProcess("cpu:2", KEEP, faults) as daemon, engine_on(daemon) as (_, engine):
        engine.capture("a", ROWS, ROWS)
        engine.fill()
        before = engine.contents(range(256), 256)
        former = engine.engine.workers
        ticket = engine.engine.restore("a", ROWS)
        wait_until(lambda: engine.contents(range(256), 256) != before)
        daemon.kill()
        with pytest.raises(Lost):
            ticket.result(deadline_s=5.0)
        assert ticket.wait_rows_free(10.0)
        assert all(is_gone(worker.pid, worker.start_ticks) for worker in former)
        engine.fill()
        mine = engine.everything()
        daemon.start()
        assert engine.engine.lookup(ROWS) is not None
        assert engine.everything() == mine
        engine.restore("a", range(300, 300 + TOKENS))


def test_an_upgrade_in_the_middle_of_copies_is_no_more_than_a_pause() -> None:
    """SIGTERM while copies run and others wait; the next daemon follows. No call fails."""
    with DaemonProcess("cpu:2", {**SLOW, "limits.max_ops": "64"}) as daemon, engine_on(daemon) as (client, engine):
        # Four captures and a restore, of rows that do not overlap.
        parts = [range(start, start + 200) for start in range(0, 800, 200)]
        expected = [engine.contents(rows, 200) for rows in parts]
        engine.capture("first", range(200), parts[0])
        tickets = [engine.engine.capture(f"c{number}", range(200), rows) for number, rows in enumerate(parts)]
        restoring = engine.engine.restore("first", range(800, 1000))
        copying(daemon, 2)
        with ThreadPoolExecutor(3) as threads:
            os.kill(daemon.pid, signal.SIGTERM)
            late = threads.submit(lambda: engine.capture("late", range(24), range(1000, 1024)))
            looking = threads.submit(lambda: engine.engine.lookup(range(200)))
            assert daemon.ended() == 0
            daemon.start()
            assert late.result().tokens == 24
            assert looking.result() is not None
        for ticket in tickets:
            ticket.result()
        restoring.result()
        assert engine.contents(range(800, 1000), 200) == expected[0]
        for number in range(4):
            engine.fill()
            engine.restore(f"c{number}", parts[number])
            assert engine.contents(parts[number], 200) == expected[number]
        assert client.statistics()["unknown_replies"] == 0


def test_signals_to_every_process_at_once_and_again_lose_nothing() -> None:
    """As service managers send them. The copy in flight ends first."""
    with DaemonProcess("cpu:2", SLOW) as daemon, engine_on(daemon) as (client, engine):
        expected = engine.contents(ROWS, TOKENS)
        ticket = engine.engine.capture("a", ROWS, ROWS)
        copying(daemon)
        everybody = [process.pid for process in psutil.Process(daemon.pid).children(recursive=True)]
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(ticket.result)
            for _ in range(3):
                for pid in (daemon.pid, *everybody):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                wait_until(lambda: "stopping within_s" in daemon.log)
            assert daemon.ended() == 0
            assert result.result().tokens == TOKENS
        assert client.statistics()["connections"] == 1
        daemon.start()
        engine.fill()
        engine.restore("a", ROWS)
        assert engine.contents(ROWS, TOKENS) == expected


def test_a_daemon_that_stands_still_ends_no_call_late_and_no_worker_early() -> None:
    settings = {**SLOW, "deadlines.job_floor_s": "0.2", "deadlines.link_floor_bytes_per_s": "5e6"}
    with DaemonProcess("cpu:2", settings) as daemon, engine_on(daemon) as (client, engine):
        expected = engine.contents(ROWS, TOKENS)
        ticket = engine.engine.capture("a", ROWS, ROWS)
        copying(daemon)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                engine.engine.lookup(ROWS, deadline_s=0.2)
            with pytest.raises(DeadlineExceeded):
                client.stats(deadline_s=0.2)
            with pytest.raises(DeadlineExceeded):
                ticket.result(deadline_s=0.2)
            with pytest.raises(DeadlineExceeded, match="no daemon answered"):
                daemon.client(deadline_s=0.2)
            other = engine.engine.restore("a", range(900, 1000), deadline_s=1.0)
            with pytest.raises(DeadlineExceeded):
                other.result()  # by now the capture is far beyond its own time
            assert other.rows_busy
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        ticket.result()
        assert other.wait_rows_free(10.0)
        engine.fill()
        engine.restore("a", ROWS)
        assert engine.contents(ROWS, TOKENS) == expected
        stats = client.stats()
        assert [worker.deaths for worker in stats.workers] == [0, 0]
        assert stats.counters["stood_still"] >= 1
        assert "loop stood still" in daemon.log


def test_what_a_worker_had_answered_before_it_died_is_done() -> None:
    """The news of its death overtakes the answer."""
    with DaemonProcess("cpu:1", SLOW) as daemon, daemon.client() as client, FakeEngine(client, SLICED[:1]) as engine:
        expected = engine.contents(ROWS, TOKENS)
        engine.capture("a", ROWS, ROWS)
        engine.fill()
        process = engine.engine.workers[0]
        worker = process.pid
        ticket = engine.engine.restore("a", ROWS)
        copying(daemon)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: engine.contents(ROWS, TOKENS) == expected)
            wait_until(quiet(worker))
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: is_gone(worker, process.start_ticks))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert ticket.result().tokens == TOKENS
        wait_until(lambda: client.stats().workers[0].deaths == 1)
        client.clear("ns")


def quiet(pid: int) -> Callable[[], bool]:
    """A predicate: the process has used no CPU while it was asked several times."""
    seen: list[object] = []

    def same_as_before() -> bool:
        seen.append(psutil.Process(pid).cpu_times())
        return len(seen) > 8 and len(set(seen[-8:])) == 1

    return same_as_before


def test_a_client_whose_daemon_stands_still_can_be_closed() -> None:
    with DaemonProcess("cpu:1") as daemon:
        client = daemon.client()
        engine = FakeEngine(client, SLICED[:1])
        engine.register()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            engine.engine.capture("a", ROWS, ROWS)
            closing = threading.Thread(target=client.close, args=(0.2,))
            closing.start()
            closing.join(10.0)
            assert not closing.is_alive()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.stop()
    engine.close()


def test_some_cycles_of_start_submit_stop() -> None:
    """`tools/cycles.py` runs a thousand."""
    with Cycles(seed=7) as cycles:
        for _ in range(6):
            cycles.cycle()
    assert cycles.outcomes["capture: ok"] > 1


def test_marks_of_more_slots_than_any_queue_holds_reach_the_next_daemon_before_what_waits() -> None:
    """Some thousand replies that nobody reads yet make a daemon drop its client, again and again."""
    slots = 6000
    with DaemonProcess("cpu:2", KEEP) as daemon, engine_on(daemon) as (client, engine):
        for slot in range(slots):
            engine.engine.mark(slot, "dirty")
        engine.engine.mark(slots - 1, "poisoned")
        expected = engine.contents(ROWS, TOKENS)
        engine.capture("chat", ROWS, ROWS)
        daemon.kill()
        daemon.start()
        with pytest.raises(UsageError) as refused:
            engine.engine.capture("other", range(TOKENS), ROWS, slots - 1).result()
        assert refused.value.code == "poisoned"
        engine.fill()
        engine.restore("chat", ROWS)
        assert engine.contents(ROWS, TOKENS) == expected
        assert client.statistics()["connections"] == 2
