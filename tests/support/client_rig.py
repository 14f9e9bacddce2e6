"""A client with one registered engine on a fake daemon, as most tests of the client begin."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ipc.messages import WorkerProcess
from shm.layout import Plane, StageLayout
from stratad.client import Client, CpuPool, Engine, StagePool
from tests.support.fake_daemon import FakeDaemon
from tests.support.layouts import stage_layout

ROWS = 64
FINGERPRINT = {"model": "m", "revision": "r", "dtype": "bf16", "kv_format": "plain", "engine_build": "b"}
PLAIN = stage_layout((Plane(0, 32, 32, ROWS), Plane(4096, 32, 32, ROWS)), None, 256)
PAGED = stage_layout((Plane(0, 128, 128, ROWS, 4, 32),), None, 256)
STATEFUL = stage_layout((Plane(0, 32, 32, ROWS),), Plane(4096, 100, 128, 2), 256)


class Rig(NamedTuple):
    """The parts of a rig."""

    daemon: FakeDaemon
    client: Client
    engine: Engine
    pools: tuple[CpuPool, ...]


@contextmanager
def rig(
    run_dir: Path,
    layouts: tuple[StageLayout, ...] = (PLAIN,),
    *,
    workers: list[WorkerProcess] | None = None,
    deadline_s: float = 5.0,
) -> Iterator[Rig]:
    """A fake daemon, a client, and an engine with one `CpuPool` a stage; all gone at the end."""
    with FakeDaemon.start(run_dir) as daemon:
        if workers is not None:
            daemon.workers = workers
        pools = tuple(CpuPool.allocate(layout.end_bytes) for layout in layouts)
        with Client.connect(run_dir, deadline_s=deadline_s, name="test") as client:
            stages = [
                StagePool(f"cpu:{index}", layout, pool)
                for index, (layout, pool) in enumerate(zip(layouts, pools, strict=True))
            ]
            engine = client.register("an-engine", "tenant", FINGERPRINT, stages)
            yield Rig(daemon, client, engine, pools)
    for pool in pools:
        pool.close()
