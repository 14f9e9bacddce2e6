"""``stratactl bench isolate``: what the other cards notice when the worker of one of them is killed again and again.

One engine process a card, each with one stage there, captures and restores a small and a medium image in turn, all the
time. In each round first nothing else happens (*calm*), then the worker of the card `--victim` is killed by SIGKILL
whenever it is back in service (*kills*), until every other engine has done all of its operations. Counted are the
operations of the others that failed, and how much longer theirs took; at the end of each phase every engine restores
its images into zeroed rows and compares them.
"""

import argparse
import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ipc.messages import WorkerInfo
from stratad.bench.cards import Cards, add_cards_argument, chosen_cards
from stratad.bench.copy_rounds import add_device_argument, wants_cuda
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.engine_wire import Bye, Quit
from stratad.bench.isolate_engine import PLANES, ROW_BYTES
from stratad.bench.isolate_wire import Answer, Begun, Work, Worked
from stratad.bench.line_process import EngineError, LineProcess, start_process
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, latency_fields, worst_high
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "isolate"
SUMMARY: Final = "the other cards' operations while the worker of one card is killed"
CALM: Final = "calm"
KILLS: Final = "kills"
_START_S: Final = 180.0
_WORK_S: Final = 600.0
_BACK_S: Final = 60.0
# In service for a moment between two kills, so that its own engine has operations under way when it dies.
_SERVES_S: Final = 0.2
_LOOK_S: Final = 0.02
_MEDIUM_BYTES: Final = 1 << 24
_ARENA_BYTES: Final = 256 << 20
_SETTINGS: Final = {
    "restarts.give_up_after": "1000",
    "restarts.backoff_first_s": "0.001",
    "restarts.backoff_cap_s": "0.001",
    "ram.shuttle_bytes": "64MiB",
}


class IsolateProcess(LineProcess):
    """An engine process; see `stratad.bench.isolate_engine`."""

    @classmethod
    def begin_on(
        cls, daemon: PrivateDaemon, device: str, number: int, medium_tokens: int, log: Path
    ) -> "IsolateProcess":
        """Start it and return at once; its first answer is `Begun`."""
        given = [f"--run-dir={daemon.run_dir}", f"--instance={daemon.instance}", f"--device={device}"]
        given += [f"--seed={number + 1}", f"--medium-tokens={medium_tokens}"]
        return cls(start_process("stratad.bench.isolate_engine", given, log), log, Answer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_device_argument(parser)
    add_cards_argument(parser, "all")
    parser.add_argument("--victim", type=int, default=-1, help="whose worker is killed: a number (default: the last)")
    parser.add_argument("--ops", type=int, default=1000, help="of each kind, an engine and phase (default: 1000)")
    parser.add_argument("--medium-bytes", type=int, default=_MEDIUM_BYTES, help="of a medium image (default: 16 MiB)")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="between two operations (default: 1)")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    try:
        return _run(args, progress)
    except EngineError as exc:
        raise CommandError(ExitCode.FAILED, exc.code, exc.message, "see the lines above") from exc


def _run(args: argparse.Namespace, progress: Progress) -> Report:
    on_cuda = wants_cuda(args)
    cards = chosen_cards(args.cards, on_cuda=on_cuda)
    victim = _victim(args, cards)
    daemon_settings = {
        **_SETTINGS,
        "daemon.devices": cards.devices,
        "ram.budget_bytes": str(len(cards.names) * max(_ARENA_BYTES, 8 * args.medium_bytes)),
    }
    rows: list[Row] = []
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stratad-isolate-"))) / "engines.log"
        daemon = stack.enter_context(PrivateDaemon.start(daemon_settings))
        client = stack.enter_context(daemon.connect()[0])
        devices = cards.uuids or cards.names
        tokens = args.medium_bytes // (PLANES * ROW_BYTES)
        engines = [
            stack.enter_context(IsolateProcess.begin_on(daemon, device, number, tokens, log))
            for number, device in enumerate(devices)
        ]
        for engine in engines:
            engine.answer(Begun, _START_S)
        bench = _Bench(client, engines, cards, victim, args.pause_ms / 1000)
        for number in range(args.rounds):
            progress(f"isolate: round {number + 1} of {args.rounds}")
            for phase in (CALM, KILLS):
                rows += [{"round": number, **row} for row in bench.phase(phase, args.ops)]
        for engine in engines:
            engine.call(Quit(), Bye, _START_S)
        welcome = client.welcome
    settings: Row = {
        "device": "cuda" if on_cuda else "cpu",
        "simulated": not on_cuda,
        "cards": list(cards.names),
        "victim": cards.names[victim],
        "ops": args.ops,
        "medium_bytes": tokens * PLANES * ROW_BYTES,
        "pause_ms": args.pause_ms,
    }
    notes = {
        "others_p99_over_calm": "of the other cards: the worst p99 during kills over that of the calm phase before",
        "others_lost": "operations of the other cards that failed",
        "victim_lost": "operations of the victim's own engine that failed",
    }
    return Report(NAME, rows, _ratios(rows, cards.names[victim]), settings, welcome, "what", ratio_notes=notes)


def _victim(args: argparse.Namespace, cards: Cards) -> int:
    count = len(cards.names)
    if count < 2:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--cards {args.cards}: there must be others than the victim")
    if not -count <= args.victim < count:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--victim must be 0 to {count - 1}, got {args.victim}")
    least_bytes = PLANES * ROW_BYTES * 16
    if args.ops < 1 or not 0 <= args.pause_ms < math.inf or args.medium_bytes < least_bytes:
        what = f"--ops must be at least 1, --pause-ms at least 0, --medium-bytes at least {least_bytes}"
        raise CommandError(ExitCode.USAGE, "bad_value", what)
    return int(args.victim % count)


class _Bench:
    """The running engines, and whose worker dies."""

    def __init__(
        self, client: Client, engines: Sequence[IsolateProcess], cards: Cards, victim: int, pause_s: float
    ) -> None:
        self._client = client
        self._engines = engines
        self._cards = cards
        self._victim = victim
        self._pause_s = pause_s

    def phase(self, phase: str, count: int) -> list[Row]:
        """All engines at work; with `KILLS` until the others are done."""
        others = [engine for number, engine in enumerate(self._engines) if number != self._victim]
        own = self._engines[self._victim]
        started_s = time.perf_counter()
        for engine in others:
            engine.begin(Work(count, self._pause_s), _WORK_S)
        own.begin(Work(0 if phase == KILLS else count, self._pause_s), _WORK_S)
        deaths: list[Row] = []
        found: list[Worked] = []
        while len(found) < len(others):
            if phase == KILLS:
                deaths.append({"what": "death", "phase": phase, **self._kill()})
            ready = others[len(found)]
            # All of them are asked in turn: one that is done early has its answer in its pipe.
            if phase != KILLS or ready.has_answer():
                found.append(ready.answer(Worked, _WORK_S))
        others_s = time.perf_counter() - started_s
        if phase == KILLS:
            self._ready()
            own.begin(Work(1, self._pause_s), _WORK_S)  # ends the one before
        found.insert(self._victim, own.answer(Worked, _WORK_S))
        if phase == KILLS:
            own.answer(Worked, _WORK_S)
        rows: list[Row] = []
        for name, worked in zip(self._cards.names, found, strict=True):
            rows += self._rows(phase, name, worked)
        rows.append({"what": "phase", "phase": phase, "seconds": round(others_s, 3), "kills": len(deaths)})
        return [*rows, *deaths]

    def _rows(self, phase: str, card: str, worked: Worked) -> list[Row]:
        if not worked.exact:
            what = f"{card}: an image that was captured while {phase} does not hold the captured bytes"
            raise CommandError(ExitCode.FAILED, "damaged", what, "report it")
        rows: list[Row] = []
        for arm, seconds in worked.seconds.items():
            lost = sum(loss.count for loss in worked.losses if loss.arm == arm)
            row: Row = {"what": "latency", "phase": phase, "card": card, "arm": arm, **latency_fields(seconds)}
            rows.append({**row, "lost": lost})
        for loss in worked.losses:
            rows.append(
                {
                    "what": "lost",
                    "phase": phase,
                    "card": card,
                    "arm": loss.arm,
                    "code": loss.code,
                    "count": loss.count,
                    "message": loss.message,
                }
            )
        return rows

    def _kill(self) -> Row:
        """SIGKILL the victim's worker, and wait until it has served for a moment again."""
        before = self._ready()
        killed_s = time.perf_counter()
        os.kill(before.pid, signal.SIGKILL)
        self._ready(after=before.generation)
        row: Row = {"ready_s": round(time.perf_counter() - killed_s, 4)}
        time.sleep(_SERVES_S)
        return row

    def _ready(self, after: int = -1) -> WorkerInfo:
        """The victim's worker once it is in service, in a later life than that of `after`.

        Raises:
            CommandError: it does not come back.
        """
        until_s = time.perf_counter() + _BACK_S
        while True:
            worker = self._client.stats().workers[self._victim]
            if worker.state == "ready" and worker.generation > after and worker.mapped:
                return worker
            if time.perf_counter() > until_s:
                what = f"worker {worker.worker} is {worker.state}: {worker.detail}"
                raise CommandError(ExitCode.FAILED, "worker_unavailable", what, "see the daemon's log")
            time.sleep(_LOOK_S)


def _ratios(rows: Sequence[Row], victim: str) -> Row:
    """Of each round, engine and kind the p99 (and p50) during kills over that of the calm phase before; the worst."""
    latencies = [row for row in rows if row["what"] == "latency"]
    others = [row for row in latencies if row["card"] != victim]
    series = dict.fromkeys((row["round"], row["card"], row["arm"]) for row in others)
    found: Row = {}
    for percent in (50, 99):
        key = f"p{percent}_ms"
        ratios: list[float] = []
        for number, card, arm in series:
            calm = column(others, key, round=number, card=card, arm=arm, phase=CALM)
            kills = column(others, key, round=number, card=card, arm=arm, phase=KILLS)
            if calm and kills:  # operations that were lost may leave too few
                ratios.append(round(kills[0] / calm[0], 3))
        found[f"others_p{percent}_over_calm"] = worst_high(ratios)
    found["others_lost"] = int(sum(column(others, "lost")))
    own = [row for row in latencies if row["card"] == victim]
    found["victim_lost"] = int(sum(column(own, "lost")))
    found["kills"] = int(sum(column(rows, "kills", what="phase", phase=KILLS)))
    return found
