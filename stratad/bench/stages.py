"""``stratactl bench stages``: how much sooner all stages are done when they copy at once.

On one host with few cores the stages would share the memory's bandwidth, which a real split does not: each card has its
own link. So the `cpu` device holds every stage to a simulated link, inside its copy; all bytes move and are compared.
Two daemons of the same build take turns, one with ``copy.parallel = false``.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from stratad.bench.cpu_engine import CpuEngine, token_ids
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_low
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "stages"
SUMMARY: Final = "parallel against serial stages, with a simulated link per stage"
_ROW_BYTES: Final = 16 * 1024
_SLOTS: Final = 2
_SPARE_IMAGES: Final = 4
_MIB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--stages", type=int, default=4, help="stages, one cpu worker each (default: 4)")
    parser.add_argument(
        "--link-bytes-per-s", type=float, default=200e6, help="rate of each stage's link (default: 2e8)"
    )
    parser.add_argument("--stage-mib", type=int, default=32, help="MiB a stage (default: 32)")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    rows: list[Row] = []
    with ExitStack() as stack:
        arms = {name: _Arm(stack, args, parallel=name == "parallel") for name in ("serial", "parallel")}
        for number in range(args.rounds):
            progress(f"stages: round {number + 1} of {args.rounds}")
            # The order changes from round to round, so that neither arm always has the warmer caches.
            names = list(arms) if number % 2 == 0 else list(reversed(arms))
            for name in names:
                rows += [{"round": number, "arm": name, **row} for row in arms[name].measure(number)]
        welcome = arms["parallel"].client.welcome
    settings: Row = {
        "simulated": True,
        "link_bytes_per_s": args.link_bytes_per_s,
        "stages": args.stages,
        "bytes_per_stage": args.stage_mib * _MIB,
    }
    return Report(NAME, [{**row, "simulated": True} for row in rows], _ratios(rows, args.rounds), settings, welcome)


class _Arm:
    """One of the two daemons, with its engine."""

    def __init__(self, stack: ExitStack, args: argparse.Namespace, *, parallel: bool) -> None:
        stage_bytes = args.stage_mib * _MIB
        daemon = stack.enter_context(
            PrivateDaemon.start(
                {
                    "daemon.devices": f"cpu:{args.stages}",
                    "copy.parallel": str(parallel).lower(),
                    "cpu_device.link_bytes_per_s": f"{args.link_bytes_per_s:g}",
                    "ram.budget_bytes": str(_SPARE_IMAGES * args.stages * stage_bytes),
                }
            )
        )
        self.client: Final[Client] = stack.enter_context(daemon.connect()[0])
        if self.client.welcome.parallel is not parallel:
            raise CommandError(ExitCode.FAILED, "bad_value", "the daemon did not take copy.parallel", "report it")
        devices = [f"cpu:{stage}" for stage in range(args.stages)]
        self._engine = stack.enter_context(
            CpuEngine.register(
                self.client, devices, tokens=stage_bytes // _ROW_BYTES, row_bytes=_ROW_BYTES, slots=_SLOTS
            )
        )
        self._tokens = token_ids(self._engine.tokens, 0)
        self._least_s = stage_bytes / args.link_bytes_per_s * (1 if parallel else args.stages)
        self.measure(-1)  # first touch of the shuttles and pools is no part of the measurement

    def measure(self, number: int) -> list[Row]:
        """Capture one slot, restore it into the other, wiped one, compare."""
        engine = self._engine
        engine.stamp(0, number + 2)
        engine.zero(1)
        capture_s = _timed(
            lambda: engine.engine.capture("conversation", self._tokens, rows=engine.rows[0], slot=0).result()
        )
        restore_s = _timed(lambda: engine.engine.restore("conversation", rows=engine.rows[1], slot=1).result())
        if engine.digests(0) != engine.digests(1):
            raise CommandError(ExitCode.FAILED, "damaged", "the restored bytes differ from the captured", "report it")
        common: Row = {"bytes": engine.image_bytes, "byte_exact": True, "link_limit_s": round(self._least_s, 4)}
        return [
            {"op": "capture", "seconds": round(capture_s, 5), **common},
            {"op": "restore", "seconds": round(restore_s, 5), **common},
        ]


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _ratios(rows: Sequence[Row], rounds: int) -> Row:
    """Serial over parallel of each round; the least of them counts."""
    by_op: dict[str, list[float]] = {"capture": [], "restore": []}
    for op, ratios in by_op.items():
        for number in range(rounds):
            (serial_s,) = column(rows, "seconds", round=number, op=op, arm="serial")
            (parallel_s,) = column(rows, "seconds", round=number, op=op, arm="parallel")
            ratios.append(round(serial_s / parallel_s, 3))
    return {
        "parallel_over_serial": worst_low([*by_op["capture"], *by_op["restore"]]),
        "capture_parallel_over_serial": worst_low(by_op["capture"]),
        "restore_parallel_over_serial": worst_low(by_op["restore"]),
    }
