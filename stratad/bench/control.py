"""``stratactl bench control``: what the daemon itself costs, measured with captures so small that copying is nothing.

Each round starts a daemon, times its start, then captures and restores 64 KiB a stage on four `cpu` workers, one after
the other, from the client's call to its return.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Final

from ipc.messages import Welcome
from stratad.bench.cpu_engine import NAMESPACE, CpuEngine, token_ids
from stratad.bench.daemon import PrivateDaemon, StartTimes, attached
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, latency_fields, worst_high
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError, Json

NAME: Final = "control"
SUMMARY: Final = "latency of a small capture and restore, start time and size of the supervisor"
_TOKENS: Final = 256
_ROW_BYTES: Final = 256
_SLOTS: Final = 4
_CONVERSATIONS: Final = 16
_MIB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--attach", action="store_true", help="measure the daemon that runs already (no start times)")
    parser.add_argument("--stages", type=int, default=4, help="stages, one cpu worker each (default: 4)")
    parser.add_argument("--captures", type=int, default=2000, help="captures a round (default: 2000)")
    parser.add_argument("--restores", type=int, default=1000, help="restores a round (default: 1000)")
    parser.add_argument("--warm-up", type=int, default=200, help="captures and restores not counted (default: 200)")


def run(args: argparse.Namespace, target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    rows: list[Row] = []
    welcome: Welcome | None = None
    for number in range(args.rounds):
        progress(f"control: round {number + 1} of {args.rounds}")
        if args.attach:
            with attached(target) as client:
                rows += _round(client, args, number, None)
                welcome = client.welcome
        else:
            with PrivateDaemon.start({"daemon.devices": f"cpu:{args.stages}"}) as daemon:
                client, times = daemon.connect()
                with client:
                    rows += _round(client, args, number, times)
                    welcome = client.welcome
    assert welcome is not None
    return Report(NAME, rows, _ratios(rows), _settings(args), welcome)


def _settings(args: argparse.Namespace) -> dict[str, Json]:
    return {
        "stages": args.stages,
        "bytes_per_stage": _TOKENS * _ROW_BYTES,
        "captures": args.captures,
        "restores": args.restores,
        "warm_up": args.warm_up,
        "attached": args.attach,
    }


def _round(client: Client, args: argparse.Namespace, number: int, times: StartTimes | None) -> list[Row]:
    rows: list[Row] = []
    if times is not None:
        rows.append(
            {
                "round": number,
                "arm": "start",
                "hello_s": round(times.hello_s, 4),
                "workers_s": round(times.workers_s, 4),
                "supervisor_rss_mib": round(times.supervisor_rss_bytes / _MIB, 2),
            }
        )
    devices = [f"cpu:{stage}" for stage in range(args.stages)]
    with CpuEngine.register(client, devices, tokens=_TOKENS, row_bytes=_ROW_BYTES, slots=_SLOTS) as engine:
        work = _Work(engine)
        try:
            work.captures(args.warm_up)
            rows.append({"round": number, "arm": "capture", **latency_fields(work.captures(args.captures))})
            work.restores(args.warm_up)
            rows.append({"round": number, "arm": "restore", **latency_fields(work.restores(args.restores))})
            exact = work.last_restore_is_exact()
        finally:
            client.clear(NAMESPACE)
    rows[-1]["byte_exact"] = exact
    if not exact:
        raise CommandError(ExitCode.FAILED, "damaged", "a restored slot does not hold the captured bytes", "report it")
    return rows


class _Work:
    """The measured loops. Conversations take turns, so that each capture replaces an image and budget is no bound."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._names = [f"conversation-{number}" for number in range(_CONVERSATIONS)]
        self._tokens = [token_ids(engine.tokens, number) for number in range(_CONVERSATIONS)]
        # What each conversation's image must hold: the digests of its slot when it was captured last.
        self._slots: dict[int, int] = {}
        self._expected: dict[int, Sequence[bytes]] = {}
        self._count = 0

    def captures(self, count: int) -> list[float]:
        """Seconds of each capture, from the call to the published image."""
        samples_s: list[float] = []
        engine = self._engine
        for _ in range(count):
            self._count += 1
            conversation, slot = self._count % _CONVERSATIONS, self._count % _SLOTS
            engine.stamp(slot, self._count)
            started_s = time.perf_counter()
            engine.engine.capture(
                self._names[conversation], self._tokens[conversation], rows=engine.rows[slot], slot=slot
            ).result()
            samples_s.append(time.perf_counter() - started_s)
            self._slots[conversation] = slot
        self._expected = {}
        last = self._count % _CONVERSATIONS
        self._expected[last] = engine.digests(self._slots[last])
        return samples_s

    def restores(self, count: int) -> list[float]:
        """Seconds of each restore, from the call to verified rows."""
        samples_s: list[float] = []
        engine = self._engine
        known = sorted(self._slots)
        for number in range(count):
            conversation, slot = known[number % len(known)], number % _SLOTS
            started_s = time.perf_counter()
            engine.engine.restore(self._names[conversation], rows=engine.rows[slot], slot=slot).result()
            samples_s.append(time.perf_counter() - started_s)
        return samples_s

    def last_restore_is_exact(self) -> bool:
        """Restore the image captured last into a wiped slot and compare every byte."""
        ((conversation, expected),) = self._expected.items()
        slot = 0
        self._engine.zero(slot)
        self._engine.engine.restore(self._names[conversation], rows=self._engine.rows[slot], slot=slot).result()
        return tuple(expected) == self._engine.digests(slot)


def _ratios(rows: Sequence[Row]) -> Row:
    return {
        "p50_ms": worst_high(column(rows, "p50_ms", arm="capture")),
        "p99_ms": worst_high(column(rows, "p99_ms", arm="capture")),
        "supervisor_rss_mib": worst_high(column(rows, "supervisor_rss_mib", arm="start")),
        "ready_s": worst_high(column(rows, "hello_s", arm="start")),
        "workers_ready_s": worst_high(column(rows, "workers_s", arm="start")),
        "restore_p50_ms": worst_high(column(rows, "p50_ms", arm="restore")),
        "restore_p99_ms": worst_high(column(rows, "p99_ms", arm="restore")),
    }
