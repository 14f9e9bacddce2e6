"""What every cell of the fault matrix stands on: a daemon of its own, an admin's client, an engine process, and images.

The images are published first and looked at after every fault: each is restored into zeroed rows and compared, by the
engine process, byte by byte.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
import psutil

from ipc.messages import StatsReply
from shm.header import segment_name
from stratad import topology
from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.line_process import EngineError, LineProcess, start_process
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_wire import (
    Answer,
    Check,
    Checked,
    Do,
    Fill,
    Filled,
    Imported,
    Outcome,
    Register,
    Registered,
    Tell,
    Told,
)
from stratad.client import Client
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError
from stratad.devices import parse_devices
from stratad.errors import StratadError
from stratad.topology import DeviceSpec

# Four slices a stage, so that a fault at the second one strikes in the middle of the copy.
TOKENS: Final = 256
PLANES: Final = 4
ROW_BYTES: Final = 256
SLICE_BYTES: Final = 64 * 1024
SUBJECT_SLOT: Final = 0
TARGET_SLOT: Final = 1
PROBE_SLOT: Final = 2
SLOTS: Final = 3
PRIORS: Final = 3
# A job of 256 KiB takes a millisecond; a lane that is kept from running for this long on a busy host is no hang yet.
JOB_FLOOR_S: Final = 0.5
RECOVER_S: Final = 20.0
CALL_S: Final = 30.0
# Of the driver's own client: what it asks again and again of a daemon that has died must end soon.
DRIVER_CALL_S: Final = 5.0
_IMPORT_S: Final = 120.0
_RETRY_S: Final = 0.002
AnswerT = TypeVar("AnswerT")
# How the kernel names a worker's process: cut to 15 characters.
_WORKER_PREFIX: Final = "strata-"
_NAME_CHARS: Final = 15 - len(_WORKER_PREFIX)
_SHM: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies

SETTINGS: Final[Mapping[str, str]] = {
    "testing.allow_faults": "true",
    "ram.budget_bytes": "128MiB",
    "ram.shuttle_bytes": "2MiB",
    "copy.chunk_tokens": "64",
    "copy.slice_bytes": str(SLICE_BYTES),
    "copy.staging_bytes": str(2 * SLICE_BYTES),
    # Lanes run on threads of their own, so that the worker's loop can tell what happens to them.
    "copy.inline_bytes": "0",
    "deadlines.job_floor_s": f"{JOB_FLOOR_S:g}",
    # Workers die here again and again, on purpose.
    "restarts.backoff_first_s": "0.01",
    "restarts.backoff_cap_s": "0.01",
    "restarts.give_up_after": "1000",
}


class EngineProcess(LineProcess):
    """The engine process; see `stratad.bench.matrix_engine`."""

    @classmethod
    def start(cls, log: Path, *, gpu: bool) -> Self:
        """Start it and return at once: it imports, and touches nothing before `register`."""
        arguments = ["--import-torch"] if gpu else []
        return cls(start_process("stratad.bench.matrix_engine", arguments, log), log, Answer)

    def begin_to_register(self, daemon: PrivateDaemon, devices: list[str]) -> None:
        """Have it connect and register one stage a device; its answer will be `Registered`.

        Raises:
            EngineError: it has died.
        """
        order = Register(str(daemon.run_dir), daemon.instance, devices, SLOTS, TOKENS, PLANES, ROW_BYTES)
        self.answer(Imported, _IMPORT_S)
        self.begin(order, CALL_S)

    def fill(self, slot: int, seed: int) -> None:
        """Write the contents of a seed to a slot."""
        self.call(Fill(slot, seed), Filled, CALL_S)

    def do(self, order: Do) -> Outcome:
        """Carry out one operation."""
        return self.call(order, Outcome, CALL_S)

    def tell(self, order: Tell) -> Told:
        """Say or ask something."""
        return self.call(order, Told, CALL_S)

    def check(self, conversation: str, seed: int) -> Checked:
        """Restore an image into zeroed rows and compare."""
        return self.call(Check(conversation, PROBE_SLOT, seed), Checked, CALL_S)


class Rig:
    """A daemon with one engine and published images. Use as a context manager."""

    def __init__(
        self,
        daemon: PrivateDaemon,
        *,
        workers: tuple[str, ...],
        devices: list[str],
        log: Path,
        spare: EngineProcess,
        settings: Mapping[str, str],
        stack: ExitStack,
    ) -> None:
        """`workers` are the daemon's, `devices` those of the stages, `settings` those of a next daemon."""
        self.daemon: Final = daemon
        self.workers: Final = workers
        self.devices: Final = devices
        self.settings: Final = settings
        self.images: Final[dict[str, int]] = {}  # conversation to seed, of every image that must be there
        self._log = log
        self._stack = stack
        self._client: Client | None = None
        self._seeds = itertools.count(1)
        self.engine: EngineProcess = spare
        self._spare: EngineProcess | None = spare

    @classmethod
    def start(
        cls,
        wanted: str,
        stages: int,
        log: Path,
        settings: Mapping[str, str] | None = None,
        first_settings: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a daemon and an engine process, which will register `stages` stages on the daemon's devices in turn.
        `first_settings` are for this daemon alone, `settings` for the next ones on its state too.

        Raises:
            CommandError, EngineError, StratadError: something did not come up.
        """
        with ExitStack() as stack:
            common = {**SETTINGS, "daemon.devices": wanted, **(settings or {})}
            daemon = stack.enter_context(PrivateDaemon.start({**common, **(first_settings or {})}))
            specs = device_specs(wanted)
            devices = [specs[n % len(specs)].device for n in range(stages)]
            spare = stack.enter_context(EngineProcess.start(log, gpu=_on_gpus(devices)))
            return cls(
                daemon,
                workers=tuple(spec.worker for spec in specs),
                devices=devices,
                log=log,
                spare=spare,
                settings=common,
                stack=stack.pop_all(),
            )

    @property
    def client(self) -> Client:
        """The admin's client."""
        assert self._client is not None, "connect first"
        return self._client

    def connect(self, *, ready: bool = True) -> None:
        """Connect to the daemon, and with `ready` wait for its workers.

        Raises:
            CommandError: it does not come up.
        """
        if self._client is not None:
            with contextlib.suppress(StratadError):
                self._client.close()
        self._client = None
        connected = self.daemon.connect(DRIVER_CALL_S)[0] if ready else self.daemon.first_client(DRIVER_CALL_S)
        self._client = connected

    # --- engines -----------------------------------------------------------------------------------------------------

    def _fresh_engine(self) -> EngineProcess:
        return self._stack.enter_context(EngineProcess.start(self._log, gpu=_on_gpus(self.devices)))

    def use_fresh_engine(self) -> None:
        """Register the engine process that stands ready, and make the next one ready.

        Raises:
            EngineError: it cannot register.
        """
        self.begin_fresh_engine()
        self._spare = self._fresh_engine()
        self.engine.answer(Registered, _IMPORT_S)

    def begin_fresh_engine(self) -> None:
        """Have an engine process register that has not done so; its answer is still to come.

        Raises:
            EngineError: it has died.
        """
        self.engine, self._spare = self._spare or self._fresh_engine(), None
        self.engine.begin_to_register(self.daemon, self.devices)

    def seed(self) -> int:
        """A number that was not used before."""
        return next(self._seeds)

    def publish(self, conversation: str) -> Outcome:
        """Publish an image of fresh contents, which from then on must be there."""
        seed = self.seed()
        self.engine.fill(PROBE_SLOT, seed)
        outcome = self.engine.do(Do("capture", conversation, slot=PROBE_SLOT, seed=seed))
        if not outcome.code:
            self.images[conversation] = seed
        return outcome

    def publish_priors(self) -> None:
        """Publish the images that every cell looks at.

        Raises:
            EngineError: one of them could not be.
        """
        for number in range(PRIORS):
            outcome = self.publish(f"prior-{number}")
            if outcome.code:
                raise EngineError(outcome.code, f"prior image {number} was not published: {outcome.message}")

    def start_next(self) -> None:
        """Start the next daemon on the state of the one that has died, and connect to it.

        Raises:
            CommandError: it does not come up.
        """
        self.daemon.start_next(self.settings)
        self.connect()

    # --- looking -----------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """The processes that matter, by role; asked of the kernel, which costs the daemon no message."""
        pids = {"supervisor": self.daemon.pid, "engine": self.engine.pid}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.daemon.pid).children(recursive=True):
                name = process.name().removeprefix(_WORKER_PREFIX)
                pids |= {worker: process.pid for worker in self.workers if worker[:_NAME_CHARS] == name}
        return pids

    def worker_of(self, stage: int) -> str:
        """Name of the worker that serves a stage."""
        return self.workers[stage % len(self.workers)]

    def wait_for(self, what: Callable[[StatsReply], bool], timeout_s: float = RECOVER_S) -> StatsReply | None:
        """Ask until something holds; None where it does not in time."""
        for found in polled(self.client.stats, timeout_s):
            if what(found):
                return found
        return None

    def until_done(self, order: Do, timeout_s: float = RECOVER_S) -> Outcome:
        """Carry an operation out, again and again until it succeeds; the last outcome. Problems of all are kept."""
        outcome = self.engine.do(order)
        problems = list(outcome.problems)
        again = polled(lambda: self.engine.do(order), timeout_s)
        while outcome.code and (following := next(again, None)) is not None:
            outcome = following
            problems += outcome.problems
        return msgspec.structs.replace(outcome, problems=tuple(problems))

    def check_all(self, cell: Cell) -> None:
        """Every image that must be there is, byte for byte, and nothing else is to be seen."""
        exact = True
        for conversation, seed in self.images.items():
            checked = self.engine.check(conversation, seed)
            good = not checked.code and all(checked.exact)
            exact = exact and good
            cell.expect(
                good, f"image {conversation!r} is not restored: {checked.code or 'other bytes'} {checked.message}"
            )
        cell.byte_exact = exact and bool(self.images)
        self.check_listing(cell)
        settled = self.wait_for(lambda s: not s.ops and not s.staged_bytes and _all_ready(s))
        cell.expect(settled is not None, "the daemon does not settle: operations, staged bytes or workers are left")
        self.check_segments(cell)

    def check_listing(self, cell: Cell) -> None:
        """Exactly the images that must be there are to be seen, each whole."""
        listed = self.client.list_images(NAMESPACE)
        seen = sorted(image.conversation for image in listed if not image.parts)
        cell.expect(seen == sorted(self.images), f"images to be seen are {seen}, expected {sorted(self.images)}")
        partial = [
            i.conversation for i in listed if not i.parts and (i.tokens, i.stages) != (TOKENS, len(self.devices))
        ]
        cell.expect(not partial, f"partial images: {partial}")

    def check_segments(self, cell: Cell) -> None:
        """Of this instance only those shuttles are there that the daemon tells of, its lock and its journal."""
        shown = self.client.stats().workers
        listed = {
            segment_name(self.daemon.instance, worker.worker, index).removeprefix("/")
            for worker in shown
            for index in range(worker.shuttles)
        }
        found = {path.name for path in _SHM.glob(f"stratad.{self.daemon.instance}.*")}
        own = {f"stratad.{self.daemon.instance}.{name}" for name in ("lock", "journal")}
        cell.expect(found - own == listed, f"segments {sorted((found - own) ^ listed)} are not both listed and there")

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything."""
        with self._stack:
            if self._client is not None:
                self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self.daemon.ended:
                self.engine.quit()
        finally:
            self.close()


def device_specs(wanted: str) -> list[DeviceSpec]:
    """What a daemon with these devices serves, and how its workers are called.

    Raises:
        CommandError: no such devices.
    """
    try:
        parsed = parse_devices(wanted)
        if parsed.kind == "cpu":
            return topology.cpu_devices(parsed.cpu_count, topology.allowed_cpus())
        if parsed.kind == "auto":
            raise ValueError("expected cpu:N, cuda:all or UUIDs")
        return topology.gpu_devices(parsed.uuids, topology.find_gpus(), topology.allowed_cpus())
    except ValueError as exc:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--devices {wanted}: {exc}") from exc


def _on_gpus(devices: list[str]) -> bool:
    return not devices[0].startswith("cpu:")


def _all_ready(stats: StatsReply) -> bool:
    return all(worker.state == "ready" for worker in stats.workers)


def polled(ask: Callable[[], AnswerT], timeout_s: float) -> Iterator[AnswerT]:
    """Answers, one after another, as long as there is time; at least one."""
    until_s = time.monotonic() + timeout_s
    while True:
        yield ask()
        if time.monotonic() >= until_s:
            return
        time.sleep(_RETRY_S)
