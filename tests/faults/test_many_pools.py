"""A worker with more pools than its lifeline's buffer holds dies, and comes back with every one of them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from shm.layout import Plane
from stratad.client import CpuPool, StagePool
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.layouts import stage_layout
from tests.support.wait import wait_until

STAGES, ENGINES = 50, 10
TINY = slot_layout(rows=64, planes=1, row_bytes=64)


class WideEngine(FakeEngine):
    """An engine with all its stages on one device."""

    def register(self, fingerprint: dict[str, str] | None = None) -> None:
        stages = [StagePool("cpu:0", lay, pool) for lay, pool in zip(self.layouts, self.pools, strict=True)]
        self.engine = self.client.register("wide", self.namespace, fingerprint or FINGERPRINT, stages)


def test_a_worker_with_500_pools_comes_back_with_all_of_them() -> None:
    settings = {"ram.budget_bytes": "256MiB"}
    rows = range(40)
    with DaemonProcess("cpu:1", settings=settings) as daemon, daemon.client(deadline_s=60.0) as client:
        engines = [WideEngine(client, [TINY] * STAGES, seed=n, namespace=f"ns{n}") for n in range(ENGINES)]
        try:
            for engine in engines:
                engine.fill()
                engine.register()
            for generation in (1, 2):
                os.kill(client.stats().workers[0].pid, signal.SIGKILL)
                wait_until(lambda deaths=generation: client.stats().workers[0].deaths == deaths, 30.0)  # type: ignore[misc]
                wait_until(lambda: all(s == "cpu:0 open" for e in client.stats().engines for s in e.stages), 30.0)
                for which in (0, ENGINES - 1, ENGINES // 2):
                    engine = engines[which]
                    expected = engine.contents(rows, 40)
                    engine.capture(f"a{generation}", range(40), rows)
                    engine.fill()
                    engine.restore(f"a{generation}", rows)
                    assert engine.contents(rows, 40) == expected
            assert sum(len(engine.stages) for engine in client.stats().engines) == STAGES * ENGINES
            assert "descriptor" not in daemon.log
        finally:
            for engine in engines:
                engine.engine.unregister()
                engine.close()


def test_pools_that_are_registered_while_their_worker_is_away_are_kept() -> None:
    """A lifeline keeps 64 descriptors that nobody took; the daemon takes more when it hears of them."""
    layout = stage_layout((Plane(0, 64, 64, 64),))
    settings = {"restarts.backoff_first_s": "2"}
    with DaemonProcess("cpu:1", settings=settings) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        os.kill(client.stats().workers[0].pid, signal.SIGKILL)
        wait_until(lambda: client.stats().workers[0].deaths == 1)
        pools = [CpuPool.allocate(layout.end_bytes) for _ in range(150)]
        try:
            with ThreadPoolExecutor(3) as threads:
                registering = [
                    threads.submit(client.register, f"e{start}", "ns", FINGERPRINT, stages)
                    for start in range(0, len(pools), 50)
                    for stages in [[StagePool("cpu:0", layout, pool) for pool in pools[start : start + 50]]]
                ]
            assert [engine.result() for engine in registering]
            assert [s for e in client.stats().engines for s in e.stages] == ["cpu:0 open"] * 150
        finally:
            for engine in list(client.engines):
                engine.unregister()
            for pool in pools:
                pool.close()
