"""Every way in which a worker can fail, in real processes, each followed by a byte-exact restore in the same daemon."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ipc.messages import WorkerInfo
from shm.shuttle import MOUNT
from stratad.client import Client
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from stratad.errors import Busy, Quarantined, StratadError, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.held import HeldProcess
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(), slot_layout())
ROWS, ELSEWHERE = range(300), range(700, 1000)
PATIENT = {"restarts.give_up_after": "1000", "restarts.backoff_cap_s": "0.05"}


def worker(client: Client, name: str = "cpu:0") -> WorkerInfo:
    return next(worker for worker in client.stats().workers if worker.worker == name)


def is_ready(client: Client) -> bool:
    return client.stats().health == "ok"


class Parked:
    """An engine whose conversation "a" is captured; `check` restores it elsewhere and compares every byte."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.expected = engine.contents(ROWS, len(ROWS))
        engine.capture("a", ROWS, ROWS)

    def restore(self) -> None:
        self.engine.restore("a", ELSEWHERE)

    def check(self) -> None:
        for pool in self.engine.pools:
            pool.buffer[:] = bytes(pool.nbytes)
        self.restore()
        assert self.engine.contents(ELSEWHERE, len(ROWS)) == self.expected


def ctl(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """One command of stratactl; its status and what it printed."""
    capsys.readouterr()
    status = main([*words, "--run-dir", str(daemon.run_dir), "--instance", daemon.instance])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


class Step(NamedTuple):
    """One way to fail, of one generation of cpu:0: what the failing restore answers ("": the worker fails by itself),
    and what is shown afterwards.
    """

    fault: str
    when: str
    code: str = ""
    note: str = ""
    by_hand: Callable[[int], None] | None = None


def stop_it(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


# Each generation's first restore proves the recovery from the one before, and its second one fails.
STEPS = (
    Step("shuttle_kill", "0", note="killed by SIGKILL"),  # while the first shuttle is made
    Step("restore.copy_kill", "2", "worker_died", "killed by SIGKILL"),
    Step("restore.copy_exit", "2", "worker_died", "exited with status 1"),
    Step("restore.copy_sticky", "2", "device_error", "exited with status 4"),
    Step("restore.copy_stall", "2", "worker_hung", "passed its deadline (killed by SIGKILL)"),
    Step("", "", "worker_hung", "passed its deadline (killed by SIGKILL)", stop_it),
    Step("shuttle_kill", "0", note="killed by SIGKILL"),  # while its shuttle with the image is attached again
    Step("shuttle_stall", "0", note="shuttle 0 was not made or attached in time (killed by SIGKILL)"),
    Step("boot_error", "1", note="ordered failure of the self test [device_error]"),
    Step("boot_oom", "5000000", note="3951424 bytes missing"),
    Step("boot_stall", "1", note="not ready after 1.5 s (killed by SIGKILL)"),
)


def test_every_way_to_fail_ends_well() -> None:
    faults = {f"cpu:0#{n}/{step.fault}": step.when for n, step in enumerate(STEPS, 1) if step.fault}
    settings = {
        **PATIENT,
        "deadlines.job_floor_s": "0.4",
        "deadlines.order_s": "0.4",
        "deadlines.worker_boot_s": "1.5",
    }
    with (
        DaemonProcess("cpu:2", settings, faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        parked = Parked(engine)
        for generation, step in enumerate(STEPS[1:], 2):
            if step.code:
                parked.check()
                wait_until(lambda: is_ready(client), 10.0)
                shown = worker(client)
                assert shown.generation == generation
                if step.by_hand is not None:
                    step.by_hand(shown.pid)
                with pytest.raises(StratadError) as caught:
                    parked.restore()
                assert (caught.value.code, caught.value.stage) == (step.code, 0)
        parked.check()
        shown = wait_until(lambda: worker(client) if is_ready(client) else None, 10.0)
        assert shown.generation == len(STEPS) + 1
        ends = [line for line in daemon.log.splitlines() if "worker gone worker=cpu:0 " in line]
        assert len(ends) == len(STEPS)
        for line, step in zip(ends, STEPS, strict=True):
            assert step.note in line
        assert shown.deaths == len(STEPS) - 1  # a full device is no death
        assert client.stats().images == 1


def test_a_lack_of_memory_costs_one_copy_or_one_shuttle_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    faults = {"cpu:0/shuttle_error": "1", "cpu:0/restore.copy_oom": "1", "cpu:0/capture.copy_oom": "2"}
    with (
        DaemonProcess("cpu:2", {"ram.prefault": "true"}, faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        parked = Parked(engine)
        wait_until(lambda: "arena cannot grow" in worker(client).detail)
        assert (worker(client).shuttles, worker(client).state, client.stats().health) == (1, "ready", "degraded")
        status, text = ctl(daemon, capsys, "status")
        assert status == ExitCode.DEGRADED
        assert "ordered failure of shuttle 1 [device_error]" in text
        with pytest.raises(StratadError, match="out_of_memory"):
            parked.restore()
        with pytest.raises(StratadError, match="out_of_memory"):
            engine.capture("b", ROWS, ROWS)
        parked.check()
        assert worker(client).deaths == 0


# --- ends that do not come --------------------------------------------------------------------------------------------


def test_a_worker_that_outlives_sigkill_is_stuck_until_its_end_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("cpu:2", {"deadlines.stuck_s": "0.3", "deadlines.job_floor_s": "0.3"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
        FakeEngine(client, LAYOUTS[:1], namespace="other") as other,
    ):
        parked = Parked(engine)
        pid = worker(client).pid
        with HeldProcess(pid):
            os.kill(pid, signal.SIGSTOP)
            ticket = engine.engine.restore("a", rows=ELSEWHERE, slot=0)
            wait_until(lambda: worker(client).state == "stuck")
            with pytest.raises(Busy, match="worker_unavailable"):
                other.capture("b", ROWS, ROWS)
            with pytest.raises(Busy, match="worker_unavailable"):
                engine.capture("c", ROWS, range(1000, 1300))
            assert not ticket.done()
            assert worker(client, "cpu:1").state == "ready"
            status, text = ctl(daemon, capsys, "status")
            assert status == ExitCode.DEGRADED
            assert "stuck" in text
            assert f"pid {pid} is not gone" in text
            status, text = ctl(daemon, capsys, "worker", "restart", "cpu:0")
            assert status == ExitCode.FAILED
            assert "[worker_unavailable]" in text
            assert worker(client).pid == pid  # nobody else was started there
        with pytest.raises(StratadError, match="worker_hung"):
            ticket.result()
        parked.check()
        slow_death(client, parked)


def slow_death(client: Client, parked: Parked) -> None:
    """Nothing counts as ended before the kernel says so."""
    before = worker(client)
    with HeldProcess(before.pid):
        os.kill(before.pid, signal.SIGKILL)
        ticket = parked.engine.engine.restore("a", rows=ELSEWHERE, slot=0)
        wait_until(lambda: client.stats().ops)
        assert (worker(client).pid, worker(client).generation) == (before.pid, before.generation)
        assert not ticket.done()
    with pytest.raises(StratadError, match=r"worker_(died|hung)"):  # its deadline may have passed meanwhile
        ticket.result()
    parked.check()


def test_an_unmapping_that_never_returns_costs_the_worker_and_nobody_waits() -> None:
    settings = {**PATIENT, "deadlines.order_s": "0.5"}
    with (
        DaemonProcess("cpu:1", settings, {"cpu:0#1/pool_close_stall": "1"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS[:1]) as engine,
    ):
        parked = Parked(engine)
        with FakeEngine(client, LAYOUTS[:1], namespace="other") as other:
            other.capture("b", ROWS, ROWS)
        # Its unregistration was answered: the process that held its pool is gone.
        assert worker(client).deaths == 1
        assert "no pool was opened or closed within 0.5 s" in daemon.log
        parked.check()


# --- what kills twice -------------------------------------------------------------------------------------------------


def test_an_image_that_kills_twice_is_quarantined_and_everyone_else_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    faults = {
        "cpu:0#1/restore.copy_kill": "2",
        "cpu:0#2/restore.copy_kill": "1",
        "cpu:0#3/capture.copy_kill": "1",
        "cpu:0#4/capture.copy_kill": "1",
    }
    with (
        DaemonProcess("cpu:2", {"restarts.give_up_after": "2"}, faults) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        parked = Parked(engine)
        engine.capture("bad", range(5000, 5300), ROWS)
        parked.check()
        for _ in range(2):
            with pytest.raises(StratadError, match="worker_died"):
                engine.restore("bad", ELSEWHERE)
        with pytest.raises(Quarantined, match="quarantined"):
            engine.restore("bad", ELSEWHERE)
        assert engine.engine.lookup(range(5000, 5300)) is None
        parked.check()
        assert worker(client).state == "ready"
        _, text = ctl(daemon, capsys, "list", "--json")
        assert {i["conversation"]: i["quarantined"] for i in json.loads(text)["images"]} == {"a": False, "bad": True}
        _, text = ctl(daemon, capsys, "show", "ns", "bad")
        assert "quarantined" in text
        status, text = ctl(daemon, capsys, "lift", "ns", "bad")
        assert (status, text.strip()) == (ExitCode.OK, "lifted 1 quarantine")
        engine.restore("bad", ELSEWHERE)
        assert engine.contents(ELSEWHERE, 300) == parked.expected
        for _ in range(2):  # and so does a conversation that has no image yet
            with pytest.raises(StratadError, match="worker_died"):
                engine.capture("new", range(9000, 9300), ROWS)
        with pytest.raises(Quarantined):
            engine.capture("new", range(9000, 9300), ROWS)
        parked.check()
        assert client.stats().engines[0].quarantined == ("conversation new",)
        assert "conversation new" in ctl(daemon, capsys, "status")[1]
        assert ctl(daemon, capsys, "lift", "ns")[1].strip() == "lifted 1 quarantine"
        engine.capture("new", range(9000, 9300), ROWS)
        assert worker(client).deaths_in_row == 0


# --- given up, and back -----------------------------------------------------------------------------------------------


def failing(generations: Sequence[int], fault: str = "boot_error", when: str = "1") -> dict[str, str]:
    return {f"cpu:0#{generation}/{fault}": when for generation in generations}


def test_a_failed_worker_is_restarted_and_serves_its_images(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"restarts.give_up_after": "3"}
    with (
        DaemonProcess("cpu:2", settings, failing((2, 3))) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        parked = Parked(engine)
        os.kill(worker(client).pid, signal.SIGKILL)
        wait_until(lambda: worker(client).state == "failed")
        with pytest.raises(Busy, match="worker_unavailable"):
            parked.restore()
        assert client.stats().images == 1
        log = daemon.log
        status, text = ctl(daemon, capsys, "worker", "restart", "cpu:0")
        assert status == ExitCode.OK
        assert text.startswith("worker cpu:0 was failed: generation 4 follows")
        parked.check()
        assert len(log.splitlines()) < 60  # bounded, whatever happened


def test_orders_overlap_and_a_reset_gives_the_arena_back(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("cpu:2") as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        parked = Parked(engine)
        answers = [client.restart_worker("cpu:0").was]
        os.kill(worker(client, "cpu:1").pid, signal.SIGKILL)
        answers += [client.restart_worker("cpu:0").was for _ in range(3)]
        assert answers[0] == "ready"
        assert set(answers) <= {"ready", "killed", "starting", "dead"}
        parked.check()
        assert (worker(client).deaths, worker(client, "cpu:1").deaths) == (0, 1)
        assert ctl(daemon, capsys, "worker", "restart", "cpu:7")[0] == ExitCode.FAILED
        with pytest.raises(UsageError, match="arena_in_use"):
            client.reset_worker("cpu:0")
        before = {name: Path(MOUNT, name).stat().st_ino for name in daemon.segments()}
        status, text = ctl(daemon, capsys, "worker", "reset", "cpu:0", "--force")
        assert status == ExitCode.OK
        assert "1 image dropped" in text
        wait_until(lambda: is_ready(client) and all(w.shuttles for w in client.stats().workers), 10.0)
        after = {name: Path(MOUNT, name).stat().st_ino for name in daemon.segments()}
        changed = {name.split(".")[2] for name in after if after[name] != before.get(name)}
        assert changed == {worker_segment("cpu:0")}
        assert (client.stats().images, client.stats().published_bytes) == (0, 0)
        Parked(engine).check()


def worker_segment(name: str) -> str:
    return name.replace(":", "_")


def test_a_device_without_memory_is_tried_until_there_is_some(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"restarts.give_up_after": "2", "restarts.backoff_first_s": "0.3", "restarts.backoff_cap_s": "0.3"}
    with (
        DaemonProcess("cpu:2", settings, failing((2, 3, 4, 5), "boot_oom", "5000000")) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS) as engine,
    ):
        parked = Parked(engine)
        os.kill(worker(client).pid, signal.SIGKILL)
        shown = wait_until(lambda: next((w for w in client.stats().workers if w.state == "no_memory"), None))
        assert (shown.missing_bytes, shown.deaths) == (3951424, 1)
        status, text = ctl(daemon, capsys, "status")
        assert status == ExitCode.DEGRADED
        assert "no_memory" in text
        assert "3951424 bytes missing" in text
        parked.check()
        assert (worker(client).generation, worker(client).missing_bytes) == (6, 0)
