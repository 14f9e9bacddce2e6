"""``stratactl bench control``: what the daemon itself costs, measured with copies so small that copying is nothing.

Each round starts a daemon for each arm and times its start. Then the arms take turns, block by block: captures and
restores of 64 KiB a stage on four `cpu` workers, one after the other, from the client's call to its return; look-ups;
captures of many clients at once; and captures and restores of slots that are thousands of single blocks.
"""

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ipc.messages import Welcome
from stratad.bench.arms import PLAIN, Arm, parse_arms, ratios_over_first
from stratad.bench.control_client import START_S, Capture, Captured, ClientProcess
from stratad.bench.control_work import Samples, Work
from stratad.bench.cpu_engine import NAMESPACE, CpuEngine
from stratad.bench.cpu_meter import CpuMeter
from stratad.bench.daemon import PrivateDaemon, StartTimes, attached
from stratad.bench.line_process import EngineError
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_high
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError, Json

NAME: Final = "control"
SUMMARY: Final = (
    "latency of small captures, restores and look-ups, start time, size and processor time of the supervisor"
)
_TOKENS: Final = 256
_ROW_BYTES: Final = 256
_SLOTS: Final = 4
_BLOCK_BYTES: Final = 16  # of a slot of single blocks: so small that their copy is little beside their names
_MIB: Final = 1 << 20
# What an arm does before the next one has its turn.
_BLOCK: Final = 250
_PAGED_BLOCK: Final = 10
_CLIENTS_S: Final = 600.0
# Tokens of the slots of single blocks are those of nobody else: far above the other conversations', all within u32.
_PAGED_FIRST: Final = 1 << 12
_MOST_BLOCKS: Final = 1_000_000
_MAY_BE_NONE: Final = ("restores", "warm_up", "clients", "blocks", "paged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--attach", action="store_true", help="measure the daemon that runs already (no start times)")
    parser.add_argument(
        "--arms",
        type=str,
        default="",
        metavar="KEY=VALUE,...",
        help="a daemon for each of these values of a setting, measured in turns",
    )
    parser.add_argument("--stages", type=int, default=4, help="stages, one cpu worker each (default: 4)")
    parser.add_argument("--captures", type=int, default=2000, help="captures a round (default: 2000)")
    parser.add_argument("--restores", type=int, default=1000, help="restores, and look-ups, a round (default: 1000)")
    parser.add_argument("--warm-up", type=int, default=200, help="captures and restores not counted (default: 200)")
    parser.add_argument(
        "--clients", type=int, default=16, help="clients that capture at once, as often in all as one (default: 16)"
    )
    parser.add_argument("--blocks", type=int, default=4096, help="single blocks of a slot, 0: none (default: 4096)")
    parser.add_argument("--paged", type=int, default=60, help="captures and restores of such slots (default: 60)")


def run(args: argparse.Namespace, target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    arms = parse_arms(args.arms) if args.arms else PLAIN
    if args.arms and args.attach:
        raise CommandError(ExitCode.USAGE, "bad_value", "--arms starts daemons, --attach takes one that runs")
    _check(args)
    rows: list[Row] = []
    welcome: Welcome | None = None
    for number in range(args.rounds):
        progress(f"control: round {number + 1} of {args.rounds}")
        with contextlib.ExitStack() as stack:
            sessions = [_Session.open(stack, args, arm, target) for arm in arms]
            _take_turns(sessions, args)
            for session in sessions:
                session.check_bytes()
                rows += [{"round": number, **row} for row in session.rows()]
            welcome = sessions[0].client.welcome
    assert welcome is not None
    ratios = _ratios(rows, arms)
    return Report(NAME, rows, ratios, _settings(args), welcome, split_by="arm")


def _check(args: argparse.Namespace) -> None:
    for name, least in (("stages", 1), ("captures", 1), *((name, 0) for name in _MAY_BE_NONE)):
        value = getattr(args, name)
        most = _MOST_BLOCKS if name == "blocks" else value
        if not least <= value <= most:
            bound = f"at least {least}" + (f" and at most {_MOST_BLOCKS}" if name == "blocks" else "")
            what = f"--{name.replace('_', '-')} must be {bound}, got {value}"
            raise CommandError(ExitCode.USAGE, "bad_value", what)


def _settings(args: argparse.Namespace) -> dict[str, Json]:
    return {
        "stages": args.stages,
        "bytes_per_stage": _TOKENS * _ROW_BYTES,
        "captures": args.captures,
        "restores": args.restores,
        "warm_up": args.warm_up,
        "clients": args.clients,
        "blocks": args.blocks,
        "paged": args.paged,
        "attached": args.attach,
        "arms": args.arms,
    }


class _Session:
    """One arm in one round: its daemon, a client with two engines, and what was measured so far."""

    def __init__(self, arm: Arm, client: Client, times: StartTimes | None, place: tuple[Path, str], log: Path) -> None:
        self.arm = arm
        self.client = client
        self.clients: list[ClientProcess] = []
        self._times = times
        self._place = place
        self._log = log
        meter = CpuMeter(client.welcome.pid)
        self.meter = meter
        kinds = ("capture", "restore", "lookup", "clients", "capture_paged", "restore_paged")
        self.samples = {kind: Samples(meter) for kind in kinds}
        self._exact: bool | None = None
        self.work: Work
        self.paged: Work | None = None

    @classmethod
    def open(cls, stack: contextlib.ExitStack, args: argparse.Namespace, arm: Arm, target: Target) -> "_Session":
        """Start what is needed; `stack` ends it."""
        devices = [f"cpu:{stage}" for stage in range(args.stages)]
        if args.attach:
            client = stack.enter_context(attached(target))
            paths = client.paths
            session = cls(arm, client, None, (paths.directory, target.instance), Path("/dev/null"))
        else:
            settings = {"daemon.devices": f"cpu:{args.stages}", **arm.settings}
            daemon = stack.enter_context(PrivateDaemon.start(settings))
            client, times = daemon.connect()
            stack.enter_context(client)
            session = cls(arm, client, times, (daemon.run_dir, daemon.instance), daemon.log_path)
        stack.callback(client.clear, NAMESPACE)
        engine = CpuEngine.register(client, devices, tokens=_TOKENS, row_bytes=_ROW_BYTES, slots=_SLOTS)
        stack.enter_context(engine)
        session.work = Work(engine)
        if args.blocks and args.paged:
            engine = CpuEngine.register(client, devices, tokens=args.blocks, row_bytes=_BLOCK_BYTES, slots=2)
            stack.enter_context(engine)
            session.paged = Work(engine, _shuffled(args.blocks), prefix="paged-", first_token=_PAGED_FIRST)
        session.start_clients(args.clients, args.stages, stack)
        return session

    def start_clients(self, count: int, stages: int, stack: contextlib.ExitStack) -> None:
        """Start the clients that capture at once, and wait until all are registered."""
        run_dir, instance = self._place
        for number in range(count):
            process = ClientProcess.start(run_dir, instance, number, stages, self._log)
            stack.enter_context(process)
            self.clients.append(process)
        with _engine_errors():
            for process in self.clients:
                process.answer(Captured, START_S)

    def capture_at_once(self, count: int) -> None:
        """Have all clients capture, `count` times together."""
        each = max(1, count // len(self.clients))
        before_s = self.meter.read_s()
        with _engine_errors():
            for process in self.clients:
                process.begin(Capture(each), _CLIENTS_S)
            answers = [process.answer(Captured, _CLIENTS_S) for process in self.clients]
        after_s = self.meter.read_s()
        samples = self.samples["clients"]
        samples.seconds.extend(took_s for answer in answers for took_s in answer.seconds)
        if before_s is not None and after_s is not None:
            samples.note_cpu((after_s - before_s) / (each * len(self.clients)))

    def check_bytes(self) -> None:
        """Restore what was captured last and compare it.

        Raises:
            CommandError: it is not what was captured.
        """
        self._exact = all(work.last_restore_is_exact() for work in (self.work, self.paged) if work is not None)
        if not self._exact:
            raise CommandError(
                ExitCode.FAILED, "damaged", "a restored slot does not hold the captured bytes", "report it"
            )

    def rows(self) -> list[Row]:
        """What was measured."""
        rows: list[Row] = []
        if self._times is not None:
            rows.append(
                {
                    "arm": "start",
                    "hello_s": round(self._times.hello_s, 4),
                    "workers_s": round(self._times.workers_s, 4),
                    "supervisor_rss_mib": round(self._times.supervisor_rss_bytes / _MIB, 2),
                }
            )
        for kind, samples in self.samples.items():
            if samples.seconds:
                rows.append({"arm": kind, **samples.fields(lanes=kind.endswith("paged"))})
                if kind.startswith("restore"):
                    rows[-1]["byte_exact"] = self._exact
        if self.arm.name:
            rows = [{"setting": self.arm.name, **row} for row in rows]
        return rows


def _shuffled(blocks: int) -> list[list[int]]:
    """The rows of two slots of single blocks, in an order that is always the same and that of nothing else."""
    order = random.Random(1)  # noqa: S311 - not for secrets
    slots = [list(range(slot * blocks, (slot + 1) * blocks)) for slot in range(2)]
    for slot in slots:
        order.shuffle(slot)
    return slots


def _take_turns(sessions: Sequence[_Session], args: argparse.Namespace) -> None:
    for session in sessions:  # a warm-up that leaves something to restore
        for work, count in ((session.work, args.warm_up), (session.paged, 2)):
            if work is not None:
                _captures(work, Samples(session.meter), max(1, count))
                work.note_last()
                Samples(session.meter).measure(count, work.restore)
    _in_blocks(sessions, args.captures, _BLOCK, lambda s, n: _captures(s.work, s.samples["capture"], n))
    for session in sessions:
        session.work.note_last()
    _in_blocks(sessions, args.restores, _BLOCK, lambda s, n: s.samples["restore"].measure(n, s.work.restore))
    _in_blocks(sessions, args.restores, _BLOCK, lambda s, n: s.samples["lookup"].measure(n, s.work.lookup))
    if args.clients:
        _in_blocks(sessions, args.captures, max(_BLOCK, args.clients), lambda s, n: s.capture_at_once(n))
    if args.blocks:
        _in_blocks(sessions, args.paged, _PAGED_BLOCK, _paged_captures)
        _in_blocks(sessions, args.paged, _PAGED_BLOCK, _paged_restores)


def _in_blocks(sessions: Sequence[_Session], count: int, block: int, do: Callable[[_Session, int], None]) -> None:
    """Have every session do something `count` times, in blocks, each time in the other order."""
    for turn, done in enumerate(range(0, count, block)):
        for session in sessions if turn % 2 == 0 else reversed(sessions):
            do(session, min(block, count - done))


def _captures(work: Work, samples: Samples, count: int) -> None:
    samples.measure(count, work.capture, work.stamp)


def _paged_captures(session: _Session, count: int) -> None:
    if session.paged is not None:
        _captures(session.paged, session.samples["capture_paged"], count)
        session.paged.note_last()


def _paged_restores(session: _Session, count: int) -> None:
    if session.paged is not None:
        session.samples["restore_paged"].measure(count, session.paged.restore)


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as exc:
        raise CommandError(ExitCode.FAILED, exc.code, f"a client process failed: {exc.message}", "see above") from exc


def _ratios(rows: Sequence[Row], arms: Sequence[Arm]) -> Row:
    where: dict[str, Json] = {"setting": arms[0].name} if arms[0].name else {}

    def worst(key: str, kind: str) -> float | None:
        return worst_high(column(rows, key, arm=kind, **where))

    ratios: Row = {
        "p50_ms": worst("p50_ms", "capture"),
        "p99_ms": worst("p99_ms", "capture"),
        "supervisor_rss_mib": worst("supervisor_rss_mib", "start"),
        "ready_s": worst("hello_s", "start"),
        "workers_ready_s": worst("workers_s", "start"),
        "restore_p50_ms": worst("p50_ms", "restore"),
        "restore_p99_ms": worst("p99_ms", "restore"),
        "supervisor_cpu_ms_per_op": worst("supervisor_cpu_ms_per_op", "capture"),
        "restore_supervisor_cpu_ms_per_op": worst("supervisor_cpu_ms_per_op", "restore"),
        "lookup_p50_ms": worst("p50_ms", "lookup"),
        "clients_p50_ms": worst("p50_ms", "clients"),
        "clients_supervisor_cpu_ms_per_op": worst("supervisor_cpu_ms_per_op", "clients"),
        "paged_capture_outside_lane_ms": worst("outside_lane_p50_ms", "capture_paged"),
        "paged_restore_outside_lane_ms": worst("outside_lane_p50_ms", "restore_paged"),
    }
    for key in ("p50_ms", "supervisor_cpu_ms_per_op"):
        ratios.update(ratios_over_first(rows, arms, key))
    return ratios
