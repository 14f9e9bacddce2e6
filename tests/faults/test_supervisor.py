"""The supervisor under deaths that coincide, registrations that fail, and ends that come too early."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgpack
import psutil
import pytest
import zmq

from ipc.lifeline import Lifeline
from ipc.messages import PROTOCOL_VERSION
from stratad.errors import StratadError, UsageError
from stratad.paths import socket_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())


@pytest.mark.parametrize("rounds", [10])
def test_workers_that_die_together_are_all_known_by_their_new_pids(rounds: int) -> None:
    settings = {"restarts.give_up_after": "1000", "restarts.backoff_cap_s": "0.05"}
    with (
        DaemonProcess("cpu:2", settings) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        for _ in range(rounds):
            before = [worker.pid for worker in client.stats().workers]
            for pid in before:
                os.kill(pid, signal.SIGKILL)

            def replaced(old: list[int] = before) -> bool:
                now = client.stats().workers
                return all(w.state == "ready" and w.pid > 0 and w.pid not in old for w in now)

            wait_until(replaced, timeout_s=10)
            for worker in client.stats().workers:
                assert psutil.Process(worker.pid).name().startswith("strata-")
            engine.fill()
            engine.restore("a", range(300))
            assert engine.contents(range(300), 300) == expected
            known = {proof.pid for proof in engine.engine.workers}
            assert known == {worker.pid for worker in client.stats().workers}


def test_refused_registrations_cost_the_daemon_no_descriptor() -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        before = psutil.Process(daemon.pid).num_fds()
        for number in range(100):
            engine = FakeEngine(client, LAYOUTS, seed=number)
            fingerprint = {"model": "fake", "revision": "auto", "dtype": "u8", "kv_format": "r", "engine_build": "t"}
            with pytest.raises(UsageError, match="fingerprint_missing"):
                engine.register(fingerprint)
            engine.close()
        assert psutil.Process(daemon.pid).num_fds() == before
        with FakeEngine(client, LAYOUTS) as good:
            good.capture("a", range(10), range(10))


def test_another_version_is_answered_with_both_before_the_connection_ends() -> None:
    with DaemonProcess("cpu:1") as daemon:
        paths = socket_paths(daemon.run_dir, daemon.instance)
        with (
            Lifeline.connect(paths.life, 5.0) as lifeline,
            zmq.Context() as context,
            context.socket(zmq.DEALER) as socket,
        ):
            socket.linger = 0
            socket.rcvtimeo = 5000
            socket.connect(f"ipc://{paths.client}")
            socket.send(msgpack.packb({"t": "hello", "seq": 5, "version": 99, "token": lifeline.token}))
            reply = msgpack.unpackb(socket.recv())
        assert (reply["code"], reply["seq"]) == ("wrong_version", 5)
        assert f"version {PROTOCOL_VERSION}, the client 99" in reply["message"]


def test_a_stop_before_the_first_worker_was_forked_is_a_clean_stop() -> None:
    daemon = DaemonProcess("cpu:2")
    try:
        for delay_s in (0.0, 0.1, 0.15, 0.2, 0.25, 0.3):
            process = subprocess.Popen(daemon.command(), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            wait_until(lambda p=process: psutil.Process(p.pid).cmdline()[-1:] != [])  # type: ignore[misc]
            try:
                process.wait(delay_s)
            except subprocess.TimeoutExpired:
                process.terminate()
            left = {f"stratad.{daemon.instance}.lock"}
            if process.wait(15) != 0:
                assert process.returncode == -signal.SIGTERM  # before it could be caught
                left |= {f"stratad.{daemon.instance}.journal", f"stratad.{daemon.instance}.journal.new"}
            assert set(daemon.segments()) <= left
    finally:
        daemon.close()


def test_a_template_that_hangs_is_replaced() -> None:
    with DaemonProcess("cpu:1", {"deadlines.worker_boot_s": "1"}) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        template = next(m.pid for m in client.stats().memory if m.role == "template")
        worker = client.stats().workers[0].pid
        os.kill(template, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: client.stats().workers[0].pid not in (0, worker), timeout_s=20)
        wait_until(lambda: client.stats().health == "ok", timeout_s=10)
        assert next(m.pid for m in client.stats().memory if m.role == "template") != template


def test_a_worker_that_is_quicker_than_the_news_of_its_fork_is_waited_for(tmp_path: Path) -> None:
    """On a busy host the template may be told to pause between the fork and the telling."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'workers.main' in sys.orig_argv:\n"
        "    import time\n"
        "    import workers.template as template\n"
        "    send = template._send\n"
        "    def slowly(channel, news, descriptor=-1):\n"
        "        if type(news).__name__ == 'Forked':\n"
        "            time.sleep(0.3)\n"
        "        send(channel, news, descriptor)\n"
        "    template._send = slowly\n"
    )
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    with (
        DaemonProcess("cpu:2", environ={"PYTHONPATH": path}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        assert {worker.pid for worker in engine.engine.workers} == {worker.pid for worker in client.stats().workers}
        assert all(worker.pid > 0 for worker in engine.engine.workers)
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        os.kill(engine.engine.workers[0].pid, signal.SIGKILL)
        wait_until(lambda: client.stats().workers[0].deaths == 1)
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected


def test_a_bug_in_writing_the_journal_is_an_answer_and_not_silence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'stratad' in sys.orig_argv:\n"
        "    import stratad.journal as journal\n"
        "    append = journal.Journal.append\n"
        "    def broken(self, records):\n"
        "        records = tuple(records)\n"
        "        if any(type(record).__name__ == 'ImageRecord' for record in records):\n"
        "            raise KeyError('a bug')\n"
        "        append(self, records)\n"
        "    journal.Journal.append = broken\n"
    )
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    with (
        DaemonProcess("cpu:2", environ={"PYTHONPATH": path}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        with pytest.raises(StratadError, match="a bug of the daemon") as caught:
            engine.capture("a", range(300), range(300))
        assert caught.value.code == "journal_unwritable"
        assert client.stats().counters["internal_errors"] == 1
        assert client.list_images() == []


def test_a_worker_that_cannot_be_forked_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'workers.main' in sys.orig_argv:\n"
        "    import os\n"
        "    fork, forks = os.fork, [0]\n"
        "    def limited():\n"
        "        forks[0] += 1\n"
        "        if forks[0] == 3:\n"
        "            raise BlockingIOError(11, 'no room for another process')\n"
        "        return fork()\n"
        "    os.fork = limited\n"
    )
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    with DaemonProcess("cpu:2", environ={"PYTHONPATH": path}) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        other, victim = (worker.pid for worker in client.stats().workers)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: client.stats().workers[1].pid not in (0, victim), timeout_s=20)
        wait_until(lambda: client.stats().health == "ok", timeout_s=20)
        assert [(w.pid == other, w.deaths) for w in client.stats().workers] == [(True, 0), (False, 2)]
        assert "it cannot be forked: [Errno 11] no room for another process" in daemon.log
