"""Kills workers in the middle of captures and restores, and looks whether anything is written after they are gone.

From a checkout: ``python tools/worker_kills.py [--device cpu|cuda] [--kills 20] [--mib 256] [--engines 5] [--json]``.

Each round: a capture and a restore of `--mib` MiB each run side by side on a daemon of its own; the worker is killed at
a random instant of them. As soon as its pidfd is readable, the rows and the shuttles are digested, and again a quarter
of a second later, while the operations have failed and nothing else was asked for: every byte must be the same. Then
the engine goes on: it computes on its device, and an image that was published before comes back byte for byte. Every
`kills / engines` rounds another engine's process is killed in the middle of its captures, and the first one's next
capture is timed: a worker waits for nobody who is gone. The exit status is 1 if something was wrong.
"""

import argparse
import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shm.layout import Plane, RowGroup, StageLayout
from shm.shuttle import MOUNT
from stratad.bench.daemon import PrivateDaemon
from stratad.client import Client, CpuPool, Engine, StagePool
from stratad.errors import StratadError

FINGERPRINT = {"model": "kills", "revision": "1", "dtype": "u8", "kv_format": "rows", "engine_build": "tool"}
MIB = 1 << 20
ROW_BYTES, PLANES = 4096, 8
QUIET_S = 0.25
WAIT_S = 30.0
GO_ON_S = 1.0
SMALL_ROWS = 256
# What each number is by default and at least, and what it says. An image must hold the rows of a small capture.
NUMBERS = {
    "kills": (20, 1, "how many workers are killed"),
    "mib": (256, SMALL_ROWS * ROW_BYTES * PLANES // MIB, "MiB of each capture and restore"),
    "engines": (5, 0, "about how many other engines are killed"),
    "seed": (1, 0, "of the instants of the kills"),
}


class Memory(Protocol):
    """The pool of one stage."""

    pool: object

    def fill(self, rows: range, seed: int) -> None:
        """Random bytes into rows."""
        ...

    def read(self, rows: range) -> bytes:
        """All bytes of rows, once the device has done everything before."""
        ...

    def digest(self) -> int:
        """Of the whole pool."""
        ...


class HostMemory:
    """A pool of a `cpu` device."""

    def __init__(self, layout: StageLayout) -> None:
        self.pool = CpuPool.allocate(layout.end_bytes)
        self._array = self.pool.tensor("uint8", (PLANES, layout.end_bytes // PLANES // ROW_BYTES, ROW_BYTES))

    def fill(self, rows: range, seed: int) -> None:
        """See `Memory`."""
        shape = (PLANES, len(rows), ROW_BYTES)
        made = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self._array[:, rows.start : rows.stop] = _as(self._array, made)

    def read(self, rows: range) -> bytes:
        """See `Memory`."""
        return np.ascontiguousarray(np.asarray(self._array[:, rows.start : rows.stop])).tobytes()

    def digest(self) -> int:
        """See `Memory`."""
        return xxhash.xxh3_64_intdigest(self.pool.buffer)


class CudaMemory:
    """A pool on the first GPU."""

    def __init__(self, layout: StageLayout) -> None:
        import torch  # noqa: PLC0415 - only where there is a GPU

        self._torch = torch
        self.pool = torch.zeros(PLANES, layout.end_bytes // PLANES // ROW_BYTES, ROW_BYTES, dtype=torch.uint8, device=0)

    def fill(self, rows: range, seed: int) -> None:
        """See `Memory`."""
        torch = self._torch
        generator = torch.Generator(device="cuda").manual_seed(seed)
        shape = (PLANES, len(rows), ROW_BYTES)
        self.pool[:, rows.start : rows.stop] = torch.randint(
            0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator
        )
        torch.cuda.synchronize()

    def read(self, rows: range) -> bytes:
        """See `Memory`."""
        self._torch.cuda.synchronize()
        return bytes(self.pool[:, rows.start : rows.stop].contiguous().cpu().numpy().tobytes())

    def digest(self) -> int:
        """See `Memory`: sums of the words, weighted by their place."""
        torch = self._torch
        words = self.pool.view(torch.int64).reshape(-1)
        weights = torch.arange(1, len(words) + 1, device="cuda", dtype=torch.int64) * 0x9E3779B97F4A7C1
        return int((words * (weights | 1)).sum().item())


def _as(like: object, made: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> object:
    """An array in the kind of the pool's view."""
    if isinstance(like, np.ndarray):
        return made
    import torch  # noqa: PLC0415 - the view is a tensor

    return torch.from_numpy(made)


class Rig:
    """A daemon, an engine in this process, and what the rounds found."""

    def __init__(self, daemon: PrivateDaemon, client: Client, options: argparse.Namespace) -> None:
        self.daemon = daemon
        self.client = client
        self.options = options
        self.random = random.Random(options.seed)  # noqa: S311 - when to kill
        self.part = options.mib * MIB // (ROW_BYTES * PLANES)
        self.rows = [range(n * self.part, (n + 1) * self.part) for n in range(3)]  # captured; restored; compared
        self.tokens = [np.full(self.part, n, np.uint32) for n in range(2)]
        self.layout = layout_of(3 * self.part)
        self.memory: Memory = CudaMemory(self.layout) if options.device == "cuda" else HostMemory(self.layout)
        self.engine = register(client, self.memory, self.layout, options.device)
        self.changed: list[str] = []
        self.wrong: list[str] = []
        self.killed_during = {"capture": 0, "restore": 0}
        self.seconds: dict[str, list[float]] = {
            "proof": [],
            "replies": [],
            "engine": [],
            "served": [],
            "next capture": [],
        }

    def prepare(self) -> None:
        """One published image, whose bytes are known."""
        self.memory.fill(self.rows[2], 1)
        self.kept = self.memory.read(self.rows[2])
        self.engine.capture("kept", self.tokens[0], rows=self.rows[2], slot=2, deadline_s=WAIT_S).result()
        start_s = time.perf_counter()
        self.engine.restore("kept", rows=self.rows[1], slot=1, deadline_s=WAIT_S).result()
        self.copy_s = time.perf_counter() - start_s

    def kill_one(self, number: int) -> None:
        """One round."""
        self.memory.fill(self.rows[0], number + 2)
        worker = self.client.stats().workers[0]
        pidfd = os.pidfd_open(worker.pid)
        tickets = {
            "capture": self.engine.capture(f"c{number}", self.tokens[1], rows=self.rows[0], slot=0, deadline_s=WAIT_S),
            "restore": self.engine.restore("kept", rows=self.rows[1], slot=1, deadline_s=WAIT_S),
        }
        time.sleep(self.random.uniform(0.0, 1.2) * self.copy_s)
        os.kill(worker.pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        if not select.select([pidfd], [], [], WAIT_S)[0]:
            raise SystemExit(f"worker {worker.pid} does not end")
        os.close(pidfd)
        self.seconds["proof"].append(time.perf_counter() - killed_s)
        before = self.digests()
        for name, ticket in tickets.items():
            try:
                ticket.result()
            except StratadError as exc:
                self.killed_during[name] += exc.code == "worker_died"
                if exc.code != "worker_died":
                    self.wrong.append(f"round {number}: the {name} failed with {exc}")
        self.seconds["replies"].append(time.perf_counter() - killed_s)
        time.sleep(QUIET_S)
        after = self.digests()
        self.changed += [f"round {number}: {name}" for name in before if before[name] != after.get(name)]
        start_s = time.perf_counter()
        self.memory.fill(range(self.rows[1].start, self.rows[1].start + 1), number)
        self.memory.read(range(self.rows[1].start, self.rows[1].start + 1))
        self.seconds["engine"].append(time.perf_counter() - start_s)
        self.memory.fill(self.rows[1], 0)
        self.engine.restore("kept", rows=self.rows[1], slot=1, deadline_s=WAIT_S).result()
        self.seconds["served"].append(time.perf_counter() - killed_s)
        if self.memory.read(self.rows[1]) != self.kept:
            self.wrong.append(f"round {number}: the image that was published before came back with other bytes")

    def digests(self) -> dict[str, int]:
        """Of the pool and of every shuttle."""
        found = {"pool": self.memory.digest()}
        for path in sorted(MOUNT.glob(f"stratad.{self.daemon.instance}.*.[0-9]*")):
            found[path.name] = xxhash.xxh3_64_intdigest(np.memmap(path, np.uint8, "r"))
        return found

    def kill_engine(self, number: int) -> None:
        """Another engine's process dies in the middle of its captures; this one's next capture must not wait for it."""
        command = [
            sys.executable,
            __file__,
            "--as-engine",
            str(self.daemon.run_dir),
            "--instance",
            self.daemon.instance,
        ]
        command += ["--device", self.options.device, "--mib", str(self.options.mib)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(self.random.uniform(0.0, 1.0) * self.copy_s)
            process.kill()
        start_s = time.perf_counter()
        small = range(self.rows[0].start, self.rows[0].start + SMALL_ROWS)
        self.memory.fill(small, number)
        tokens = np.full(SMALL_ROWS, 77, np.uint32)
        self.engine.capture("small", tokens, rows=small, slot=0, deadline_s=WAIT_S).result()
        self.seconds["next capture"].append(time.perf_counter() - start_s)


def layout_of(rows: int) -> StageLayout:
    """Planes of single-token rows, one after another."""
    plane_bytes = rows * ROW_BYTES
    return StageLayout(
        groups=(RowGroup(tuple(Plane(n * plane_bytes, ROW_BYTES, ROW_BYTES, rows) for n in range(PLANES))),)
    )


def register(client: Client, memory: Memory, layout: StageLayout, device: str) -> Engine:
    """One stage on the first device."""
    stage = StagePool("cuda:0" if device == "cuda" else "cpu:0", layout, memory.pool)  # type: ignore[arg-type]
    return client.register("kills", "kills", FINGERPRINT, [stage], deadline_s=WAIT_S)


def be_engine(options: argparse.Namespace) -> int:
    """Capture for ever."""
    rows = options.mib * MIB // (ROW_BYTES * PLANES)
    layout = layout_of(rows)
    memory: Memory = CudaMemory(layout) if options.device == "cuda" else HostMemory(layout)
    memory.fill(range(rows), os.getpid())
    with Client.connect(Path(options.as_engine), options.instance, deadline_s=WAIT_S) as client:
        engine = register(client, memory, layout, options.device)
        print("captures", flush=True)
        for number in itertools.count():
            memory.fill(range(1), number)
            engine.capture("other", np.full(rows, 5, np.uint32), rows=range(rows), slot=0, deadline_s=WAIT_S).result()


def summary(seconds: dict[str, list[float]]) -> Iterator[tuple[str, dict[str, float]]]:
    """What each duration was, in milliseconds."""
    for name, values in seconds.items():
        if values:
            yield name, {
                "n": len(values), "p50_ms": round(statistics.median(values) * 1e3, 1),
                "max_ms": round(max(values) * 1e3, 1),
            }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    for name, (default, _, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the lines")
    parser.add_argument("--as-engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--instance", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, (_, least, _) in NUMBERS.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if options.as_engine:
        return be_engine(options)
    settings = {
        "daemon.devices": "cuda:all" if options.device == "cuda" else "cpu:1",
        "ram.budget_bytes": f"{6 * options.mib + 256}MiB",
        "ram.shuttle_bytes": "256MiB",
        "ram.prefault": "true",
        "restarts.give_up_after": "1000",
        "restarts.backoff_first_s": "0.01",
        "restarts.backoff_cap_s": "0.01",
    }
    with PrivateDaemon.start(settings) as daemon:
        client, _ = daemon.connect()
        with client:
            rig = Rig(daemon, client, options)
            rig.prepare()
            every = max(options.kills // max(options.engines, 1), 1)
            for number in range(options.kills):
                rig.kill_one(number)
                if options.engines and number % every == 0:
                    rig.kill_engine(number)
            rig.engine.unregister()
    slow = [name for name in ("engine", "next capture") if max(rig.seconds[name], default=0.0) > GO_ON_S]
    good = not rig.changed and not rig.wrong and not slow
    shown = {
        "device": options.device, "kills": options.kills, "image_bytes": options.mib * MIB,
        "killed_during": rig.killed_during, "changed_after_proof": rig.changed, "wrong": rig.wrong,
        "slower_than_1_s": slow, "seconds": dict(summary(rig.seconds)), "passed": good,
    }  # fmt: skip
    if options.json:
        print(json.dumps(shown))
    else:
        for key, value in shown.items():
            print(f"{key:20} {value}")
        print("killed_during may be less than kills: a kill may hit an operation that had ended already")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
