"""Cells of the fault matrix in which the supervisor kills itself at a fault point, and the next daemon takes over.

A *rehearsal* runs the scenario, every operation once, without a death, and finds which points it passes and how often.
Each cell then runs it again in a daemon that dies at one of them: at the first passing after the first images were
published, where there is one.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ipc.messages import FAULT_OPS
from shm.process import start_ticks
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE
from stratad.bench.engine_wire import Line
from stratad.bench.line_process import EngineError
from stratad.bench.matrix_rig import (
    CALL_S,
    PRIORS,
    SUBJECT_SLOT,
    TARGET_SLOT,
    Cell,
    Rig,
    device_specs,
)
from stratad.bench.matrix_wire import Do, Outcome, Registered, Tell, Told
from stratad.client import Client
from stratad.core.records import WorkerRecord
from stratad.ctl.output import CommandError
from stratad.daemon import REACHED_POINTS
from stratad.errors import StratadError
from stratad.journal import Journal, read_journal

SUPERVISOR_KILL: Final = "supervisor_kill"
TAKEOVER: Final = "takeover"
_PUT: Final = "put"
_PART_BYTES: Final = 100_000
_EXCHANGE_BYTES: Final = 1 << 20
_EXIT_S: Final = 20.0
_ASK_S: Final = 0.5
_LOOK_S: Final = 0.01
_BACKOFF_S: Final = 0.5
_TRIES: Final = 3
_PENDING_S: Final = 60.0
AnswerT = TypeVar("AnswerT", bound=Line)


class Stopped(Exception):
    """The scenario cannot go on: the daemon is gone."""


class Scenario:
    """Every operation once. `certain` are the images that must be there whatever happens next (conversation to seed),
    `possible` those that may be: whoever asked for them, or asked to give them up, has no answer yet.
    """

    def __init__(self, rig: Rig) -> None:
        self.certain: Final = rig.images
        self.possible: Final[dict[str, int]] = {}
        self.put: bytes | None = None
        self.step = "start"
        self.pids = {"supervisor": rig.daemon.pid}
        self._rig = rig
        self._pending: Line | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is done, in order."""
        yield "connect", lambda: self._rig.connect(ready=False)
        yield "register", self._register
        for number in range(PRIORS):
            yield "capture", lambda name=f"prior-{number}": self._capture(name)  # type: ignore[misc]
        yield "restore", lambda: self._do(Do("restore", "prior-0", target=TARGET_SLOT, seed=self.certain["prior-0"]))
        yield "capture", lambda: self._capture("taken")
        yield "take", self._take
        yield "slots", self._slots
        yield "look up", self._look_up
        yield "put", self._put
        yield "get", self._get
        yield "look", self._look
        yield "fault", self._arm_and_disarm
        yield "cancel", self._cancel
        yield "drop", self._drop
        yield "hang", self._hang
        yield "unregister", lambda: self._tell(Tell("unregister"))
        yield "leave", self._leave

    def run(self, until: str = "") -> None:
        """Take all steps, or those before `until`.

        Raises:
            Stopped: the daemon died at one of them.
        """
        for step, act in self.steps():
            if step == until:
                return
            self.step = step
            try:
                act()
            except (CommandError, StratadError, EngineError) as exc:
                if self._rig.daemon.wait_ended(_EXIT_S) is None:
                    raise EngineError(exc.code, f"step {step!r}: {exc}") from exc
                raise Stopped(step) from exc
            if self._rig.daemon.ended:
                raise Stopped(step)

    def end_pending(self, cell: Cell) -> None:
        """What the engine was asked when the daemon died must end now that there is a next one: a capture is asked
        again by the client itself, and may be published by now.
        """
        if self._pending is None:
            return
        order, self._pending = self._pending, None
        if not isinstance(order, Do):
            self._rig.engine.answer(Line, _PENDING_S)
            return
        outcome = self._rig.engine.answer(Outcome, _PENDING_S)
        cell.problems += outcome.problems
        cell.more["in_flight_ended"] = outcome.code or "done"
        if order.op in ("capture", "cancel") and not outcome.code:
            self.certain[order.conversation] = self.possible.pop(order.conversation)
        elif order.op == "take" and not outcome.code:
            self.possible.pop(order.conversation)

    def _ask(self, order: Line, expected: type[AnswerT]) -> AnswerT:
        """Give the engine an order, and look after the daemon while it is carried out.

        Raises:
            Stopped: the daemon died; the answer is still to come.
        """
        self._rig.engine.begin(order, CALL_S)
        return self._await(order, expected)

    def _await(self, order: Line | None, expected: type[AnswerT]) -> AnswerT:
        until_s = time.monotonic() + CALL_S
        while True:
            try:
                return self._rig.engine.answer(expected, _LOOK_S)
            except EngineError as exc:
                if exc.code != "deadline" or time.monotonic() > until_s:
                    raise
            if self._rig.daemon.ended:
                self._pending = order
                raise Stopped(self.step)

    def _leave(self) -> None:
        self._rig.client.close()
        self._rig.engine.quit()

    def _register(self) -> None:
        self._rig.begin_fresh_engine()
        self._await(Tell("register"), Registered)
        self.pids = self._rig.pids()

    def _answered(self, code: str, message: str = "", *expected: str) -> None:
        if code not in (expected or ("",)):
            raise StratadError(code or "internal", message or "unexpected answer")

    def _do(self, order: Do, *expected: str) -> None:
        outcome = self._ask(order, Outcome)
        for _ in range(_TRIES):
            if outcome.code != "worker_died":  # as one does in this scenario, at some time
                break
            outcome = self._ask(order, Outcome)
        if outcome.problems:
            raise EngineError("engine", "; ".join(outcome.problems))
        self._answered(outcome.code, outcome.message, *expected)

    def _tell(self, order: Tell, *expected: str) -> None:
        self._answered(self._ask(order, Told).code, "", *expected)

    def _capture(self, conversation: str) -> None:
        seed = self._rig.seed()
        self.possible[conversation] = seed
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        order = Do("capture", conversation, SUBJECT_SLOT, seed=seed)
        self._do(order)
        self.certain[conversation] = self.possible.pop(conversation)

    def _take(self) -> None:
        seed = self.possible["taken"] = self.certain.pop("taken")
        self._do(Do("take", "taken", target=TARGET_SLOT, seed=seed))
        del self.possible["taken"]

    def _slots(self) -> None:
        seed = self._rig.seed()
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        for op in ("slot_direct", "slot_to", "slot_from", "slot_to"):
            self._do(Do(op, slot=SUBJECT_SLOT, target=TARGET_SLOT, seed=seed))
        self._tell(Tell("slot_drop", SUBJECT_SLOT))

    def _look_up(self) -> None:
        self._tell(Tell("lookup", seed=self.certain["prior-0"]))
        self._tell(Tell("mark", SUBJECT_SLOT))
        self._do(Do("restore", "nobody", target=TARGET_SLOT), "unknown_conversation")

    def _put(self) -> None:
        rig = self._rig
        data = b"".join(number.to_bytes(4, "little") for number in range(_PART_BYTES // 4))
        self.put = b""  # it may be there from now on
        with rig.client.exchange(rig.devices[0], NAMESPACE, FINGERPRINT, _EXCHANGE_BYTES) as exchange:
            put = exchange.put(_PUT)
            put.add("part", data)
            put.commit()
        self.put = data

    def _get(self) -> None:
        if read_put(self._rig, self._rig.client) != self.put:
            raise EngineError("damaged", "the part that was got is not the one that was put")

    def _look(self) -> None:
        client = self._rig.client
        client.stats()
        client.memory()
        client.pin(NAMESPACE, "prior-1")
        client.pin(NAMESPACE, "prior-1", pinned=False)
        client.show(NAMESPACE, client.list_images(NAMESPACE)[0].conversation)

    def _arm_and_disarm(self) -> None:
        client = self._rig.client
        client.disarm_fault(client.arm_fault(FAULT_OPS[0], 0, "slow", at=1000).fault)

    def _cancel(self) -> None:
        seed = self.possible["cancelled"] = self._rig.seed()
        self._rig.client.arm_fault("capture", 0, "slow")
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        self._do(Do("cancel", "cancelled", SUBJECT_SLOT, seed=seed), "cancelled")
        del self.possible["cancelled"]

    def _drop(self) -> None:
        self._capture("dropped")
        self.possible["dropped"] = self.certain.pop("dropped")
        self._rig.client.drop(NAMESPACE, "dropped")
        del self.possible["dropped"]

    def _hang(self) -> None:
        seed = self.certain["prior-2"]
        order = Do("restore", "prior-2", target=TARGET_SLOT, seed=seed)
        self._rig.client.arm_fault("restore", 0, "hang", at=2)
        self._do(order, "worker_hung")
        self._do(order)  # it waits for the next process


def read_put(rig: Rig, client: Client) -> bytes:
    """The part of the image that was put, through an exchange of this client."""
    with (
        client.exchange(rig.devices[0], NAMESPACE, FINGERPRINT, _EXCHANGE_BYTES) as exchange,
        exchange.get(_PUT) as got,
    ):
        return bytes(got.read("part"))


class Rehearsal(NamedTuple):
    """Which points a scenario passes, and how often: `early` until its first images were published, `late` before its
    stop; which it passes at all (`scenario`); and which a next daemon passes until it serves (`takeover`).
    """

    early: dict[str, int]
    late: dict[str, int]
    scenario: frozenset[str]
    takeover: frozenset[str]

    def passing(self, point: str) -> int:
        """Which passing of a point to die at: the first one after the first images, where there is one."""
        early, late = self.early.get(point, 0), self.late.get(point, 0)
        return early + 1 if late > early or not early else early


def scenario_rig(wanted: str, stages: int, log: Path, die_at: str = "") -> Rig:
    """A rig for the scenario. Its first worker dies once while it makes its second shuttle, which is needed after the
    first images; the images outlive a stop.
    """
    settings = {
        "testing.worker_faults": f"{device_specs(wanted)[0].worker}#1/shuttle_kill=1",
        # What is asked of the worker that dies again meets none, and has to wait.
        "restarts.backoff_first_s": f"{_BACKOFF_S:g}",
        "restarts.backoff_cap_s": f"{_BACKOFF_S:g}",
    }
    if die_at:
        settings["testing.die_at"] = die_at
    return Rig.start(wanted, stages, log, {"ram.keep": "true"}, settings)


def rehearse(wanted: str, stages: int, log: Path) -> Rehearsal:
    """Run the scenario in a daemon that lives, stop it, and start a next one that takes over.

    Raises:
        CommandError, EngineError, StratadError: a step failed.
    """
    with scenario_rig(wanted, stages, log) as rig:
        scenario = Scenario(rig)
        early: dict[str, int] = {}
        late: dict[str, int] = {}
        for number, (step, act) in enumerate(scenario.steps()):
            scenario.step = step
            if number == PRIORS + 2:
                early = rig.client.faults().points
            if step == "leave":
                late = rig.client.faults().points
            act()
        rig.daemon.terminate()
        rig.daemon.wait_ended(_EXIT_S)
        scenario_points = _reached(rig)
        with _former_worker(rig):
            rig.start_next()
        passed = {point for point in rig.client.faults().points if not point.startswith("ReplyTo.Faults")}
        return Rehearsal(early, late, scenario_points, frozenset(passed))  # without the answer to this very question


def _reached(rig: Rig) -> frozenset[str]:
    """The points that the daemons of this rig have passed."""
    path = rig.daemon.state_dir / REACHED_POINTS
    return frozenset(path.read_text(encoding="ascii").split()) if path.exists() else frozenset()


@contextlib.contextmanager
def _former_worker(rig: Rig) -> Iterator[None]:
    """A worker of the daemon that has died which does not end by itself: a process of ours that its journal names."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as former:
        try:
            worker = rig.workers[0]
            record = WorkerRecord(worker, former.pid, start_ticks(former.pid))
            journal = Journal(rig.daemon.instance, (*read_journal(rig.daemon.instance).records, record))
            journal.open()
            journal.close()
            yield
        finally:
            former.kill()


def point_cell(wanted: str, stages: int, log: Path, point: str, number: int) -> Cell:
    """The daemon dies at a passing of a point; the next one on the same state must serve every published image."""
    died_at = f"{point}#{number}"
    cell = Cell("start", None, f"{SUPERVISOR_KILL} {died_at}")
    with scenario_rig(wanted, stages, log, died_at) as rig:
        scenario = Scenario(rig)
        with contextlib.suppress(Stopped):
            scenario.run()
            scenario.step = "stop"
            rig.daemon.terminate()
        cell.op, cell.pids_before = scenario.step, scenario.pids
        _expect_killed(cell, rig, died_at)
        _next_daemon(cell, rig, scenario)
    return cell


def takeover_cell(wanted: str, stages: int, log: Path, point: str) -> Cell:
    """A daemon is killed, the next one dies at a point while it takes over, the third must serve every image."""
    died_at = f"{point}#1"
    cell = Cell(TAKEOVER, None, f"{SUPERVISOR_KILL} {died_at}")
    with scenario_rig(wanted, stages, log) as rig:
        scenario = Scenario(rig)
        scenario.run(until="look")
        cell.pids_before = scenario.pids
        rig.daemon.kill()
        with _former_worker(rig) if point.startswith("KillFormer") else contextlib.nullcontext():
            rig.daemon.start_next({**rig.settings, "testing.die_at": died_at})
            until_s = time.monotonic() + _EXIT_S
            while not rig.daemon.ended and time.monotonic() < until_s:
                with contextlib.suppress(StratadError), _connected(rig) as client:
                    client.stats()
            _expect_killed(cell, rig, died_at)
        _next_daemon(cell, rig, scenario)
    return cell


def _connected(rig: Rig) -> Client:
    return Client.connect(rig.daemon.run_dir, rig.daemon.instance, deadline_s=_ASK_S)


def _expect_killed(cell: Cell, rig: Rig, died_at: str) -> None:
    status = rig.daemon.wait_ended(_EXIT_S)
    cell.error = "killed" if status == -signal.SIGKILL else f"exit status {status}"
    cell.expect(status == -signal.SIGKILL, f"the daemon did not die at {died_at}: status {status}")
    if status is None:
        rig.daemon.kill()


def _next_daemon(cell: Cell, rig: Rig, scenario: Scenario) -> None:
    """Start the next daemon, look at every image, and stop it in order."""
    died_s = time.monotonic()
    rig.start_next()
    scenario.end_pending(cell)
    if scenario.step in ("start", "connect", "unregister", "leave", "stop"):
        rig.engine.kill()
        rig.use_fresh_engine()
    cell.more |= {"images": len(scenario.certain), "in_flight": len(scenario.possible)}
    _settle_possible(cell, rig, scenario)
    rig.check_all(cell)
    cell.recovered_s = time.monotonic() - died_s
    if scenario.put:
        cell.expect(read_put(rig, rig.client) == scenario.put, "the image that was put is not what it was")
    cell.byte_exact = cell.byte_exact or not scenario.certain  # it died before there was anything to lose
    cell.pids_after = rig.pids()
    left = [role for role, pid in cell.pids_before.items() if role != "engine" and cell.pids_after.get(role) == pid]
    cell.expect(not left, f"processes of the dead daemon: {left}")
    rig.engine.quit()
    rig.client.close()
    rig.daemon.terminate()
    status = rig.daemon.wait_ended(_EXIT_S)
    cell.expect(status == 0, f"the next daemon does not stop in order: status {status}")


def _settle_possible(cell: Cell, rig: Rig, scenario: Scenario) -> None:
    """What may be there must be whole if it is there; from now on it must stay."""
    for image in rig.client.list_images(NAMESPACE):
        seed = scenario.possible.get(image.conversation)
        if seed is None or image.parts:
            continue
        checked = rig.engine.check(image.conversation, seed)
        cell.expect(not checked.code and all(checked.exact), f"image {image.conversation!r}, in flight, is not whole")
        scenario.certain[image.conversation] = seed
