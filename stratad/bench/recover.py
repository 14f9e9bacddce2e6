"""``stratactl bench recover``: how long a killed worker, and a killed daemon, are out of service.

*worker*: a daemon's only worker is killed by SIGKILL while its arena is all made and page-locked. Measured from the
kill until its successor is ready with its first shuttle attached, and until all others are; an image that lay there is
restored over wiped rows and compared.

*daemon*: the supervisor alone is killed while it holds `--images` images over `--stages` `cpu` devices, and the next
one is started at once. Measured from the kill until the engine's first restore is answered; then every image is
restored over wiped rows and compared. The engine is the same all along and does nothing but call.
"""

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ipc.messages import Welcome, WorkerInfo
from stratad.bench.cards import chosen_cards
from stratad.bench.copy_rounds import CopySource, add_device_argument, open_on, wants_cuda
from stratad.bench.cpu_engine import NAMESPACE, CpuEngine, token_ids
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_high
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "recover"
SUMMARY: Final = "time from the SIGKILL of a worker, and of the daemon, until they are back in service"
_MIB: Final = 1 << 20
_TOKENS: Final = 256
_SLOT_BYTES: Final = 16 * _MIB
_BACK_S: Final = 120.0
_POLL_S: Final = 0.001
_DEADLINE_S: Final = 60.0
# One kill after the other is what is measured here, not the back-off that a worker meets which dies by itself.
_RESTARTS: Final = {
    "restarts.give_up_after": "1000",
    "restarts.backoff_first_s": "0.001",
    "restarts.backoff_cap_s": "0.001",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_device_argument(parser)
    parser.add_argument("--arena-bytes", type=int, default=1 << 30, help="arena of the worker (default: 1 GiB)")
    parser.add_argument("--shuttle-bytes", type=int, default=1 << 28, help="of one shuttle in it (default: 256 MiB)")
    parser.add_argument("--kills", type=int, default=4, help="of the worker, a round (default: 4)")
    parser.add_argument(
        "--images", type=int, default=1000, help="that the daemon holds; 0: leave it out (default: 1000)"
    )
    parser.add_argument("--image-bytes", type=int, default=_MIB, help="of one image (default: 1 MiB)")
    parser.add_argument("--stages", type=int, default=4, help="of each image, on a cpu device each (default: 4)")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    _check(args)
    rows, welcome, device_name = _kill_workers(args, progress)
    if args.images:
        rows += _kill_daemons(args, progress)
    settings: Row = {
        "device": "cuda" if wants_cuda(args) else "cpu",
        "device_name": device_name,
        "arena_bytes": args.arena_bytes,
        "shuttle_bytes": args.shuttle_bytes,
        "kills": args.kills,
        "images": args.images,
        "image_bytes": args.image_bytes,
        "stages": args.stages,
    }
    back = column(rows, "first_shuttle_s", arm="worker")
    ratios: Row = {
        "worker_s_p50": round(statistics.median(back), 4),
        "worker_s_max": worst_high(back),
        "daemon_s": worst_high(column(rows, "serves_s", arm="daemon")),
    }
    notes = {
        "worker_s_p50": "median of the workers' first_shuttle_s",
        "worker_s_max": "longest of the workers' first_shuttle_s",
        "daemon_s": "longest of the daemon's serves_s",
    }
    return Report(NAME, rows, ratios, settings, welcome, "arm", {"shuttle_bytes": "arena"}, notes)


def _check(args: argparse.Namespace) -> None:
    if args.shuttle_bytes < 2 * _SLOT_BYTES or args.arena_bytes < args.shuttle_bytes:
        least = f"--shuttle-bytes at least {2 * _SLOT_BYTES}, --arena-bytes at least a shuttle"
        raise CommandError(ExitCode.USAGE, "bad_value", f"{least}, got {args.shuttle_bytes} and {args.arena_bytes}")
    if args.kills < 1 or args.images < 0 or args.stages < 1:
        raise CommandError(ExitCode.USAGE, "bad_value", "--kills and --stages must be at least 1, --images at least 0")
    if args.images and (args.image_bytes < args.stages * _TOKENS or args.image_bytes % (args.stages * _TOKENS)):
        step = args.stages * _TOKENS
        raise CommandError(
            ExitCode.USAGE, "bad_value", f"--image-bytes must be a multiple of {step}: tokens and stages"
        )


# --- workers ----------------------------------------------------------------------------------------------------------


def _kill_workers(args: argparse.Namespace, progress: Progress) -> tuple[list[Row], Welcome, str]:
    card = chosen_cards("1", on_cuda=wants_cuda(args))
    settings = {
        **_RESTARTS,
        "daemon.devices": card.devices,
        "ram.budget_bytes": str(args.arena_bytes),
        "ram.shuttle_bytes": str(args.shuttle_bytes),
        "ram.prefault": "true",
    }
    rows: list[Row] = []
    with PrivateDaemon.start(settings) as daemon:
        client, _ = daemon.connect()
        with client, open_on(client, "slot", 1, _SLOT_BYTES, 2, cards=card) as source:
            source.refill(0)
            source.capture("kept")
            progress("recover: waiting for the whole arena")
            _wait(client, lambda worker: worker.shuttle_bytes + args.shuttle_bytes > args.arena_bytes)
            for number in range(args.rounds):
                progress(f"recover: workers, round {number + 1} of {args.rounds}")
                rows += [_kill_worker(client, source, number) for _ in range(args.kills)]
            return rows, client.welcome, source.device_name


def _kill_worker(client: Client, source: CopySource, number: int) -> Row:
    before = _wait(client, _is_whole)
    source.wipe()
    killed_s = time.perf_counter()
    os.kill(before.pid, signal.SIGKILL)
    _wait(client, lambda worker: worker.generation > before.generation)
    gone_s = time.perf_counter() - killed_s
    ready = _wait(client, lambda worker: worker.generation > before.generation and worker.state == "ready")
    ready_s = time.perf_counter() - killed_s
    _wait(client, lambda worker: worker.mapped > 0)
    first_s = time.perf_counter() - killed_s
    source.restore("kept")
    restored_s = time.perf_counter() - killed_s
    _wait(client, _is_whole)
    whole_s = time.perf_counter() - killed_s
    _demand(source.is_exact(), "a restored slot after the death of a worker")
    return {
        "round": number,
        "arm": "worker",
        "shuttle_bytes": before.shuttle_bytes,
        "gone_s": round(gone_s, 4),
        "start_s": round(ready.start_s, 4),
        "ready_s": round(ready_s, 4),
        "first_shuttle_s": round(first_s, 4),
        "restored_s": round(restored_s, 4),
        "all_shuttles_s": round(whole_s, 4),
        "byte_exact": True,
    }


def _is_whole(worker: WorkerInfo) -> bool:
    return worker.state == "ready" and worker.mapped == worker.shuttles > 0


def _wait(client: Client, done: Callable[[WorkerInfo], bool]) -> WorkerInfo:
    """Ask for the worker until it is as wanted.

    Raises:
        CommandError: it did not become so.
    """
    until_s = time.perf_counter() + _BACK_S
    while True:
        worker = client.stats().workers[0]
        if done(worker):
            return worker
        if time.perf_counter() > until_s:
            shuttles = f"{worker.mapped} of {worker.shuttles} shuttles"
            what = f"worker {worker.worker} is {worker.state}, {shuttles}: {worker.detail}"
            raise CommandError(ExitCode.FAILED, "worker_unavailable", what, "see the daemon's log")
        time.sleep(_POLL_S)


def _demand(exact: bool, what: str) -> None:
    if not exact:
        raise CommandError(ExitCode.FAILED, "damaged", f"{what} does not hold the captured bytes", "report it")


# --- the daemon -------------------------------------------------------------------------------------------------------


def _kill_daemons(args: argparse.Namespace, progress: Progress) -> list[Row]:
    settings = {
        "daemon.devices": f"cpu:{args.stages}",
        "ram.budget_bytes": str(2 * args.images * args.image_bytes + args.stages * args.shuttle_bytes),
        "ram.budget_images": str(args.images + 1),
        "ram.shuttle_bytes": str(args.shuttle_bytes),
    }
    with PrivateDaemon.start(settings) as daemon, _engine(daemon, args) as engine:
        rows: list[Row] = []
        images = _Images(engine, args)
        progress(f"recover: capturing {args.images} images")
        images.capture_all()
        for number in range(args.rounds):
            progress(f"recover: daemon, round {number + 1} of {args.rounds}")
            killed_s = daemon.kill_and_start()
            daemon.wait_for_socket()
            accepts_s = time.perf_counter() - killed_s
            images.restore(0)
            serves_s = time.perf_counter() - killed_s
            for image in range(args.images):
                images.restore(image)
            restored_s = time.perf_counter() - killed_s
            rows.append(
                {
                    "round": number,
                    "arm": "daemon",
                    "images": args.images,
                    "accepts_s": round(accepts_s, 4),
                    "serves_s": round(serves_s, 4),
                    "all_restored_s": round(restored_s, 4),
                    "byte_exact": True,
                }
            )
        return rows


@contextmanager
def _engine(daemon: PrivateDaemon, args: argparse.Namespace) -> Iterator[CpuEngine]:
    client, _ = daemon.connect()
    devices = [f"cpu:{stage}" for stage in range(args.stages)]
    row_bytes = args.image_bytes // args.stages // _TOKENS
    with client, CpuEngine.register(client, devices, tokens=_TOKENS, row_bytes=row_bytes, slots=1) as engine:
        try:
            yield engine
        finally:
            client.clear(NAMESPACE)


class _Images:
    """Images of random bytes that can be made again from their number."""

    def __init__(self, engine: CpuEngine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._count: int = args.images
        self._stages: int = args.stages

    def _parts(self, number: int) -> Sequence[bytes]:
        generator = random.Random(number)  # noqa: S311 - test bytes
        return [generator.randbytes(self._engine.slot_bytes) for _ in range(self._stages)]

    def capture_all(self) -> None:
        """Publish every image."""
        for number in range(self._count):
            self._engine.fill(0, self._parts(number))
            tokens = token_ids(_TOKENS, number)
            self._engine.engine.capture(f"image-{number}", tokens, rows=self._engine.rows[0], slot=0).result()

    def restore(self, number: int) -> None:
        """Restore one over wiped rows and compare it."""
        self._engine.zero(0)
        rows = self._engine.rows[0]
        self._engine.engine.restore(f"image-{number}", rows=rows, slot=0, deadline_s=_DEADLINE_S).result()
        _demand(self._engine.holds(0, self._parts(number)), f"image {number} after the death of the daemon")
