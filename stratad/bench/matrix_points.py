"""Cells of the fault matrix in which the supervisor kills itself at a fault point, and the next daemon takes over.

A *rehearsal* runs the scenario, every operation once, without a death, and finds which points it passes and how often.
Each cell then runs it again in a daemon that dies at one of them: at the first passing after the first images were
published, where there is one.
"""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ipc.messages import FAULT_OPS
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE
from stratad.bench.line_process import EngineError
from stratad.bench.matrix_rig import (
    PRIORS,
    SUBJECT_SLOT,
    TARGET_SLOT,
    Cell,
    Rig,
)
from stratad.bench.matrix_wire import Do, Outcome, Tell
from stratad.client import Client
from stratad.daemon import REACHED_POINTS
from stratad.errors import StratadError

SUPERVISOR_KILL: Final = "supervisor_kill"
_PUT: Final = "put"
_PART_BYTES: Final = 100_000
_EXCHANGE_BYTES: Final = 1 << 20
_EXIT_S: Final = 20.0


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
        self.step = ""
        self._rig = rig

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is done, in order."""
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

    def run(self) -> None:
        """Take all steps.

        Raises:
            Stopped: the daemon died at one of them.
        """
        for step, act in self.steps():
            self.step = step
            try:
                act()
            except (StratadError, EngineError) as exc:
                if self._rig.daemon.wait_ended(_EXIT_S) is None:
                    raise EngineError(exc.code, f"step {step!r}: {exc}") from exc
                raise Stopped(step) from exc
            if self._rig.daemon.ended:
                raise Stopped(step)

    def _answered(self, code: str, message: str = "", *expected: str) -> None:
        if code not in (expected or ("",)):
            raise StratadError(code or "internal", message or "unexpected answer")

    def _do(self, order: Do, *expected: str) -> None:
        outcome = self._rig.engine.do(order)
        if outcome.problems:
            raise EngineError("engine", "; ".join(outcome.problems))
        self._answered(outcome.code, outcome.message, *expected)

    def _tell(self, order: Tell, *expected: str) -> None:
        self._answered(self._rig.engine.tell(order).code, "", *expected)

    def _capture(self, conversation: str) -> None:
        seed = self._rig.seed()
        self.possible[conversation] = seed
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        self._do(Do("capture", conversation, SUBJECT_SLOT, seed=seed))
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
        self._rig.client.arm_fault("capture", 0, "slow")
        self._rig.engine.fill(SUBJECT_SLOT, self._rig.seed())
        self._do(Do("cancel", "cancelled", SUBJECT_SLOT), "cancelled")

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
        outcome: Outcome = self._rig.until_done(order)
        self._answered(outcome.code, outcome.message)


def read_put(rig: Rig, client: Client) -> bytes:
    """The part of the image that was put, through an exchange of this client."""
    with (
        client.exchange(rig.devices[0], NAMESPACE, FINGERPRINT, _EXCHANGE_BYTES) as exchange,
        exchange.get(_PUT) as got,
    ):
        return bytes(got.read("part"))


class Rehearsal:
    """Which points a scenario passes: `early` until its first images were published, `late` before its stop, and
    `reached` in all.
    """

    def __init__(self, early: dict[str, int], late: dict[str, int], reached: frozenset[str]) -> None:
        self.reached: Final = reached
        self._early: Final = early
        self._late: Final = Counter(late)

    def passing(self, point: str) -> int:
        """Which passing of a point to die at: the first one after the first images, where there is one."""
        early, late = self._early.get(point, 0), self._late[point]
        return early + 1 if late > early or not early else early


def rehearse(wanted: str, stages: int, log: Path) -> Rehearsal:
    """Run the scenario in a daemon that lives.

    Raises:
        CommandError, EngineError, StratadError: a step failed.
    """
    with Rig.start(wanted, stages, log) as rig:
        scenario = Scenario(rig)
        early: dict[str, int] = {}
        for number, (step, act) in enumerate(scenario.steps()):
            scenario.step = step
            if number == PRIORS:
                early = rig.client.faults().points
            act()
        late = rig.client.faults().points
        rig.client.close()
        rig.engine.leave()
        rig.daemon.terminate()
        rig.daemon.wait_ended(_EXIT_S)
        return Rehearsal(early, late, reached_points(rig))


def reached_points(rig: Rig) -> frozenset[str]:
    """The points that the daemons of this rig have passed."""
    path = rig.daemon.state_dir / REACHED_POINTS
    return frozenset(path.read_text(encoding="ascii").split()) if path.exists() else frozenset()


def point_cell(wanted: str, stages: int, log: Path, point: str, number: int) -> Cell:
    """The daemon dies at a passing of a point; the next one on the same state must serve every published image."""
    cell = Cell("", None, f"{SUPERVISOR_KILL} {point}#{number}")
    died_at = f"{point}#{number}"
    with Rig.start(wanted, stages, log, {"testing.die_at": died_at}) as rig:
        scenario = Scenario(rig)
        cell.pids_before = {"supervisor": rig.daemon.pid}
        with contextlib.suppress(Stopped):
            cell.pids_before = rig.pids()
            scenario.run()
            rig.daemon.terminate()
        status = rig.daemon.wait_ended(_EXIT_S)
        cell.op = scenario.step
        cell.error = "killed" if status == -signal.SIGKILL else f"exit status {status}"
        cell.expect(status == -signal.SIGKILL, f"the daemon did not die at {died_at}: status {status}")
        _next_daemon(cell, rig, scenario)
    return cell


def _next_daemon(cell: Cell, rig: Rig, scenario: Scenario) -> None:
    """Start the next daemon, look at every image, and stop it in order."""
    died_s = time.monotonic()
    rig.start_next()
    if scenario.step == "unregister" or not scenario.certain:
        rig.engine.kill()
        rig.use_fresh_engine()
    _settle_possible(cell, rig, scenario)
    rig.check_all(cell)
    cell.recovered_s = time.monotonic() - died_s
    if scenario.put:
        cell.expect(read_put(rig, rig.client) == scenario.put, "the image that was put is not what it was")
    cell.byte_exact = cell.byte_exact or not scenario.certain  # it died before there was anything to lose
    cell.more = {"images": len(scenario.certain)}
    cell.pids_after = rig.pids()
    left = [role for role, pid in cell.pids_before.items() if role != "engine" and cell.pids_after.get(role) == pid]
    cell.expect(not left, f"processes of the dead daemon: {left}")


def _settle_possible(cell: Cell, rig: Rig, scenario: Scenario) -> None:
    """What may be there must be whole if it is there; from now on it must stay."""
    for image in rig.client.list_images(NAMESPACE):
        seed = scenario.possible.get(image.conversation)
        if seed is None or image.parts:
            continue
        checked = rig.engine.check(image.conversation, seed)
        cell.expect(not checked.code and all(checked.exact), f"image {image.conversation!r}, in flight, is not whole")
        scenario.certain[image.conversation] = seed
