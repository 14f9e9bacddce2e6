"""Engines that die, hang, do not read, fork, or come all at once: what they held is free, and nobody else notices."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq

from ipc.codec import encode
from ipc.messages import Show, Stats
from shm.layout import Plane
from shm.process import is_gone, start_ticks
from stratad import _connection
from stratad._connection import Connection
from stratad.client import Client, CpuPool, StagePool
from stratad.errors import Busy, DeadlineExceeded, NoSpace, PeerGone, UsageError
from stratad.paths import socket_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.layouts import stage_layout
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())
TOKENS = 300
# Chunks so large that each is a slice.
SLICED = (slot_layout(rows=1024, planes=4, row_bytes=1024), slot_layout(rows=1024, planes=4, row_bytes=1024))
PRELUDE = """
import ctypes, os, signal, sys, threading
from shm.layout import Plane
from stratad.client import Client
import stratad.client as module
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
client = Client.connect(run_dir=sys.argv[1], instance=sys.argv[2])
def ready(*words):
    print(*words, flush=True)
def wait():
    signal.pause()
"""


@contextlib.contextmanager
def engine_process(daemon: DaemonProcess, script: str) -> Iterator["subprocess.Popen[str]"]:
    """An engine in a process of its own that has said that it is ready."""
    command = [sys.executable, "-c", PRELUDE + script, str(daemon.run_dir), daemon.instance]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def pools(client: Client) -> list[int]:
    return [worker.resources.get("pools", -1) for worker in client.stats().workers]


def open_files(daemon: DaemonProcess) -> int:
    return sum(1 for _ in Path(f"/proc/{daemon.pid}/fd").iterdir())


# --- death ------------------------------------------------------------------------------------------------------------


def test_an_engine_killed_in_a_capture_holds_nothing_and_its_successor_goes_on_at_once() -> None:
    """Its mappings are closed long before a copy as slow as this one would have ended, and no name stays blocked."""
    script = """
engine = FakeEngine(client, (slot_layout(rows=9216, planes=1, row_bytes=64),) * 2)
engine.fill(); engine.register()
engine.engine.capture("a", range(9000), range(9000))
ready("copying"); wait()
"""
    # 576 KB a stage would take 14 s, a slice of 64 KiB takes not quite 2.
    settings = {"cpu_device.link_bytes_per_s": "4e4", "copy.slice_bytes": "64KiB"}
    layouts = (slot_layout(rows=9216, planes=1, row_bytes=64),) * 2
    with DaemonProcess("cpu:2", settings) as daemon, daemon.client() as client:
        with engine_process(daemon, script) as first:
            assert line(first) == "copying"
            wait_until(lambda: [op.state for op in client.stats().ops] == ["copying"])
            first.kill()
            first.wait()
            # The same engine comes back under another pid while the old one's memory is still being read.
            with FakeEngine(client, layouts, seed=2) as second:
                expected = second.contents(range(40), 40)
                second.capture("a", range(40), range(40))
                wait_until(lambda: pools(client) == [1, 1])
                stats = client.stats()
                assert (len(stats.engines), stats.ops, stats.staged_bytes) == (1, (), 0)
                second.fill()
                second.restore("a", range(40))
                assert second.contents(range(40), 40) == expected
        assert {worker.deaths for worker in client.stats().workers} == {0}


def test_a_process_that_an_engine_forked_does_not_keep_its_engine_alive() -> None:
    """Its copy of the lifeline stays open; the end of the engine's own process is seen all the same."""
    script = """
engine = FakeEngine(client, (slot_layout(),)); engine.fill(); engine.register()
module._clients.clear()  # a fork that Python does not hear of
child = os.fork()
if child == 0:
    os.close(1)
    wait()
ready(child); wait()
"""
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client:
        with engine_process(daemon, script) as parent:
            child = int(line(parent))
            began = start_ticks(child)
            wait_until(lambda: len(client.stats().engines) == 1)
            parent.kill()
            parent.wait()
            try:
                wait_until(lambda: not client.stats().engines)
                wait_until(lambda: pools(client) == [0])
                assert not is_gone(child, began)
            finally:
                os.kill(child, signal.SIGKILL)
        wait_until(lambda: is_gone(child, began))


def test_engines_that_go_with_their_answers_unread_leave_nothing() -> None:
    engines: list[FakeEngine] = []
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        before = open_files(daemon)
        for number in range(40):
            gone = daemon.client()
            engine = FakeEngine(gone, LAYOUTS[:1], seed=number)
            engine.register()
            for part in range(5):
                engine.engine.capture(f"c{part}", range(TOKENS), range(part * TOKENS, (part + 1) * TOKENS))
            link = gone.pump.link
            assert link is not None
            with socket.socket(fileno=os.dup(link.lifeline_fd)) as lifeline:
                lifeline.shutdown(socket.SHUT_RDWR)  # what a death looks like
            wait_until(lambda: not client.stats().engines)
            assert client.stats().staged_bytes == 0
            gone.close(0.01)
            engines.append(engine)
        wait_until(lambda: open_files(daemon) == before)
        assert client.stats().counters.get("internal_errors", 0) == 0
    for engine in engines:  # not before the worker is gone: it might have read their rows still, for all they know
        engine.close()


# --- engines that are stuck -------------------------------------------------------------------------------------------


def test_a_stopped_engine_keeps_what_it_holds_until_another_one_needs_it() -> None:
    script = """
engine = FakeEngine(client, (slot_layout(rows=2048, planes=4, row_bytes=256),))
engine.fill(); engine.register()
engine.engine.slot_to(1024, range(1024), slot=0).result()
exchange = client.exchange("cpu:0", "ns", FINGERPRINT, 2 << 20)
put = exchange.put("p"); put.add("part", b"x" * (1 << 20))
engine.capture("taken", range(1024), range(1024))
ticket = engine.engine.take("taken", range(1024))
while not ticket.done(): pass
ready("holding"); wait()
"""
    settings = {"ram.budget_bytes": "4MiB", "ram.shuttle_bytes": "4MiB", "deadlines.lease_s": "0.2"}
    with (
        DaemonProcess("cpu:1", settings) as daemon,
        daemon.client() as client,
        engine_process(daemon, script) as stuck,
    ):
        assert line(stuck) == "holding"
        os.kill(stuck.pid, signal.SIGSTOP)
        held = {kind: n for engine in client.stats().engines for kind, n in engine.leases.items()}
        assert held == {"transit": 1, "put": 1, "take": 1}
        with FakeEngine(client, (slot_layout(rows=4096, planes=4, row_bytes=256),), namespace="other") as engine:

            def captured() -> bool:
                with contextlib.suppress(NoSpace):
                    engine.capture("large", range(3500), range(3500))
                    return True
                return False

            wait_until(captured)
        stats = client.stats()
        assert stats.counters["leases_given_up"] == 3
        assert [engine.leases for engine in stats.engines if engine.pid == stuck.pid] == [{}, {}]
        assert "lease given up" in daemon.log


def test_a_client_that_does_not_read_is_dropped_and_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"deadlines.unread_s": "0.3"}
    monkeypatch.setattr(_connection, "QUEUE_MESSAGES", 1)  # so that ZeroMQ does not read on its behalf
    with (
        DaemonProcess("cpu:1", settings) as daemon,
        daemon.client() as client,
        FakeEngine(client, (slot_layout(rows=30_000, planes=1, row_bytes=16),)) as engine,
        zmq.Context() as context,
    ):
        engine.capture("many chunks", range(30_000), range(30_000))
        before = psutil.Process(daemon.pid).memory_info().rss
        files = open_files(daemon)
        paths = socket_paths(daemon.run_dir, daemon.instance)
        deaf = Connection.open(context, paths, "deaf", time.monotonic() + 10.0)
        try:
            sent = 0
            while sent < 600:  # each answer has some 20 KB; not so many that there is no room for more
                sent += deaf.send(encode(Show(sent + 1, "ns", "many chunks")))
                if sent % 50 == 0:
                    assert client.stats().health == "ok"  # nobody else waits
            wait_until(lambda: deaf.ended())
            assert psutil.Process(daemon.pid).memory_info().rss - before < 150 << 20
            assert "client dropped: it does not read" in daemon.log
            assert client.stats().counters["clients_dropped"] == 1
        finally:
            deaf.close()
        wait_until(lambda: open_files(daemon) == files)
        # Nor does one hold up a stop, whatever waits for it.
        deaf = Connection.open(context, paths, "deaf", time.monotonic() + 10.0)
        try:
            for number in range(200):
                deaf.send(encode(Show(number + 1, "ns", "many chunks")))
            wait_until(lambda: client.stats().counters["clients_dropped"] == 1)
            assert daemon.stop() == 0
        finally:
            deaf.close()


def test_a_client_whose_link_ends_before_its_lifeline_is_dropped_when_it_is_answered() -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, zmq.Context() as context:
        wait_until(lambda: client.stats().health == "ok")
        half = Connection.open(context, socket_paths(daemon.run_dir, daemon.instance), "half", time.monotonic() + 10.0)
        try:
            for number in range(20):
                half.send(encode(Stats(number + 1)))
            half._link.close()
            wait_until(lambda: half._lifeline.drain().name == "ENDED")
            assert client.stats().counters["clients_dropped"] == 1
        finally:
            half.close()


def test_a_deadline_keeps_the_rows_until_the_hung_worker_is_gone() -> None:
    """The copy that comes late finds no row that the engine was allowed to write."""
    settings = {"deadlines.job_floor_s": "1"}
    faults = {"cpu:0#1/restore.copy_stall": "2"}
    with (
        DaemonProcess("cpu:2", settings, faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, SLICED) as engine,
    ):
        engine.capture("a", range(700), range(700))
        engine.fill()
        worker = engine.engine.workers[0]
        ticket = engine.engine.restore("a", range(700), deadline_s=0.2)
        with pytest.raises(DeadlineExceeded):
            ticket.result()
        assert ticket.rows_busy
        with pytest.raises(Busy, match="rows_busy"):
            engine.engine.capture("b", range(9), range(691, 700))
        wait_until(lambda: not ticket.rows_busy)
        assert is_gone(worker.pid, worker.start_ticks)
        with pytest.raises(PeerGone) as caught:
            ticket.result()
        assert caught.value.code == "worker_hung"
        engine.fill()
        expected = engine.everything()
        engine.capture("b", range(9), range(691, 700))
        assert engine.everything() == expected


# --- many and shared --------------------------------------------------------------------------------------------------


def test_forty_engines_register_at_once() -> None:
    """Each with a pool of 2000 planes."""
    count = 40
    layout = stage_layout(tuple(Plane(number * 64, 16, 16, 4) for number in range(2000)))
    with DaemonProcess("cpu:2") as daemon, ThreadPoolExecutor(count) as threads:
        clients = [daemon.client() for _ in range(count)]
        made = [CpuPool.allocate(layout.end_bytes) for _ in clients]
        together = threading.Barrier(count)

        def register(number: int) -> None:
            together.wait()
            stage = StagePool(f"cpu:{number % 2}", layout, made[number])
            clients[number].register(f"e{number}", "ns", FINGERPRINT, [stage])

        for done in [threads.submit(register, number) for number in range(count)]:
            done.result()
        stats = clients[0].stats()
        assert len(stats.engines) == count
        assert stats.counters["registrations"] == count
        assert pools(clients[0]) == [count // 2, count // 2]
        for client in clients:
            client.close()
        for pool in made:
            pool.close()


def test_children_that_an_engine_forks_leave_its_registration_alone() -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS[:1]) as engine:
        for number in range(30):
            child = os.fork()
            if child == 0:
                try:
                    client.stats()
                except UsageError:
                    os._exit(7)
                os._exit(1)
            engine.capture(f"c{number % 3}", range(TOKENS), range(TOKENS))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.statistics() == {"connections": 1, "unknown_replies": 0}
        assert len(client.stats().engines) == 1


def test_eight_threads_on_one_client_through_a_stop_of_the_daemon() -> None:
    """Whatever a thread was told, it was told; none hangs, and the client is good for the next daemon."""
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        stop = threading.Event()

        def work(number: int) -> int:
            rows = range(number * 250, number * 250 + 200)
            done = 0
            while not stop.is_set() or done == 0:
                engine.capture(f"t{number}", range(number, number + 200), rows)
                assert engine.engine.lookup(range(number, number + 200)) is not None or stop.is_set()
                client.stats()
                done += 1
            return done

        with ThreadPoolExecutor(8) as threads:
            working = [threads.submit(work, number) for number in range(8)]
            wait_until(lambda: client.stats().counters.get("captures", 0) > 40)
            stop.set()
            assert daemon.stop() == 0
            daemon.start()
            assert all(done.result() > 0 for done in working)


# --- when rows may be written -----------------------------------------------------------------------------------------


def test_bytes_are_those_before_the_source_was_free() -> None:
    settings = {"cpu_device.link_bytes_per_s": "2e7"}
    with DaemonProcess("cpu:2", settings) as daemon, daemon.client() as client, FakeEngine(client, SLICED) as engine:
        expected = engine.contents(range(700), 700)
        ticket = engine.engine.capture("a", range(700), range(700))
        ticket.wait_source_free()
        engine.fill()
        ticket.result()
        engine.restore("a", range(700))
        assert engine.contents(range(700), 700) == expected
