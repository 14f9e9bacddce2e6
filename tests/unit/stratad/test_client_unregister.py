"""When the memory of an engine may go: not before no worker can have it mapped."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ipc.messages import Done, Failed, Register, Stage, Unregister, WorkerProcess
from shm.layout import StageLayout
from shm.process import start_ticks
from stratad import client as client_module
from stratad._connection import Connection
from stratad._engine import Engine
from stratad._proofs import WorkerProof
from stratad.client import Client, CpuPool, StagePool
from stratad.errors import Busy, DeadlineExceeded, UsageError
from stratad.pools import Hold
from tests.support.client_rig import FINGERPRINT, PLAIN, rig
from tests.support.fake_daemon import FakeDaemon, silence
from tests.support.fake_worker import fake_worker
from tests.support.wait import wait_until


class CountingExport:
    """Stands for a stage in a GPU tensor: what `close` drops is the tensor and the event."""

    def __init__(self, engine: Engine) -> None:
        (self._inner,) = engine.registration.exports
        self.closed = 0
        engine.registration.exports = (self,)  # type: ignore[misc]

    @property
    def layout(self) -> StageLayout:
        return self._inner.layout

    @property
    def ordered(self) -> str:
        return self._inner.ordered

    def wire(self, link: Connection, index: int) -> Stage:
        return self._inner.wire(link, index)

    def order(self) -> None: ...

    def order_by_host(self) -> None: ...

    def attach(self, hold: Hold) -> None: ...

    def close(self, hold: Hold) -> None:
        self.closed += 1
        self._inner.close(hold)


def test_memory_stays_until_the_daemon_has_unmapped_it(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, pools):
        export = CountingExport(engine)
        daemon.script[Unregister] = silence
        thread = threading.Thread(target=engine.unregister)
        thread.start()
        request = daemon.expect(Unregister)
        client.stats()
        assert export.closed == 0
        with pytest.raises(Busy, match="still have the memory"):
            pools[0].close()
        with pytest.raises(UsageError, match="no longer registered"):
            engine.capture("chat", [1], range(1))
        daemon.say(Done(request.seq))
        thread.join(5.0)
        assert export.closed > 0
        pools[0].close()


def test_an_answer_after_the_deadline_still_frees_the_memory(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, pools):
        export = CountingExport(engine)
        daemon.script[Unregister] = silence
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                engine.unregister(deadline_s=0.02)
        assert export.closed == 0
        request = daemon.expect(Unregister)
        daemon.say(Done(request.seq))
        wait_until(lambda: client.stats() and export.closed > 0)
        engine.unregister()
        pools[0].close()
        assert len(daemon.of(Unregister)) == 1
        assert engine not in client_module._fenced


def test_where_the_daemon_is_lost_the_end_of_its_workers_frees_the_memory(tmp_path: Path) -> None:
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (daemon, _, engine, pools):
        export = CountingExport(engine)
        daemon.script[Unregister] = silence
        errors: list[Busy] = []

        def unregister() -> None:
            try:
                engine.unregister(deadline_s=0.3)
            except Busy as error:
                errors.append(error)

        thread = threading.Thread(target=unregister)
        thread.start()
        daemon.expect(Unregister)
        daemon.stop()
        thread.join(5.0)
        assert str(worker.process.pid) in errors[0].message
        assert (export.closed, errors[0].code) == (0, "rows_busy")
        with pytest.raises(Busy):
            pools[0].close()
        worker.kill()
        engine.unregister()
        assert export.closed > 0
        pools[0].close()


def test_an_engine_of_a_dead_daemon_waits_for_its_workers(tmp_path: Path) -> None:
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (daemon, client, engine, pools):
        daemon.stop()
        thread = threading.Thread(target=engine.unregister)
        thread.start()
        wait_until(lambda: not client.engines)
        with pytest.raises(Busy):
            pools[0].close()
        worker.kill()
        thread.join(5.0)
        assert not thread.is_alive()
        pools[0].close()


def test_a_worker_that_died_alone_frees_nothing_while_the_daemon_lives(tmp_path: Path) -> None:
    """Its successor may map the memory before the daemon comes to the request."""
    with fake_worker() as worker, rig(tmp_path, workers=[worker.process]) as (daemon, _, engine, _):
        export = CountingExport(engine)
        worker.kill()
        daemon.script[Unregister] = silence
        with pytest.raises(DeadlineExceeded):
            engine.unregister(deadline_s=0.02)
        assert export.closed == 0
        daemon.say(Done(daemon.expect(Unregister).seq))
        engine.unregister()
        assert export.closed > 0


def test_a_refused_unregister_keeps_the_memory_and_may_be_repeated(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, pools):
        daemon.script[Unregister] = lambda request: [Failed(request.seq, "too_many", "not now")]
        with pytest.raises(Busy, match="not now"):
            engine.unregister()
        with pytest.raises(Busy, match="still have the memory"):
            pools[0].close()
        del daemon.script[Unregister]
        engine.unregister()
        pools[0].close()


def test_a_closed_client_unregisters_first(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, pools):
        export = CountingExport(engine)
        closed_then: list[int] = []

        def unregistered(request: object) -> list[Done]:
            assert isinstance(request, Unregister)
            closed_then.append(export.closed)
            return [Done(request.seq)]

        daemon.script[Unregister] = unregistered
        client.close()
        assert closed_then == [0]
        assert export.closed > 0
        pools[0].close()


def test_a_registration_that_was_given_up_keeps_the_memory_until_it_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports: list[CountingExport] = []
    made: Callable[..., None] = Engine.__init__

    def counted(engine: Engine, *args: object, **kwargs: object) -> None:
        made(engine, *args, **kwargs)
        exports.append(CountingExport(engine))

    monkeypatch.setattr(Engine, "__init__", counted)
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        daemon.script[Register] = silence
        daemon.script[Unregister] = silence
        with CpuPool.allocate(PLAIN.end_bytes) as pool:
            with pytest.raises(DeadlineExceeded):
                client.register("e", "n", FINGERPRINT, [StagePool("cpu:0", PLAIN, pool)], deadline_s=0.05)
            assert exports[0].closed == 0
            daemon.say(daemon.registered(daemon.expect(Register).seq, 1))
            wait_until(lambda: client.stats() and daemon.of(Unregister))
            assert exports[0].closed == 0
            daemon.say(Done(daemon.expect(Unregister).seq))
            wait_until(lambda: client.stats() and exports[0].closed > 0)


def test_only_a_pid_and_a_start_time_can_prove_an_end() -> None:
    with fake_worker() as worker:
        pid = worker.process.pid
        for unknown in ((0, 0), (0, 7), (pid, 0)):
            proof = WorkerProof.open(WorkerProcess(0, "cpu:0", *unknown), same_pids=True)
            assert (proof.gone(), proof.provable, proof.pidfd) == (False, False, -1)
        known = WorkerProof.open(worker.process, same_pids=True)
        assert (known.gone(), known.provable, start_ticks(pid)) == (False, True, worker.process.start_ticks)
        worker.kill()
        assert known.gone()
        known.close()
