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
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from shm.process import start_ticks
from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_rig import PRIORS, Rig, device_specs
from stratad.bench.matrix_scenario import EXIT_S, Scenario, Stopped, read_put
from stratad.client import Client
from stratad.core.records import WorkerRecord
from stratad.daemon import REACHED_POINTS
from stratad.errors import StratadError
from stratad.journal import Journal, read_journal

SUPERVISOR_KILL: Final = "supervisor_kill"
TAKEOVER: Final = "takeover"
_ASK_S: Final = 0.5
_BACKOFF_S: Final = 0.5


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
        rig.daemon.wait_ended(EXIT_S)
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
            until_s = time.monotonic() + EXIT_S
            while not rig.daemon.ended and time.monotonic() < until_s:
                with contextlib.suppress(StratadError), _connected(rig) as client:
                    client.stats()
            _expect_killed(cell, rig, died_at)
        _next_daemon(cell, rig, scenario)
    return cell


def _connected(rig: Rig) -> Client:
    return Client.connect(rig.daemon.run_dir, rig.daemon.instance, deadline_s=_ASK_S)


def _expect_killed(cell: Cell, rig: Rig, died_at: str) -> None:
    status = rig.daemon.wait_ended(EXIT_S)
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
    status = rig.daemon.wait_ended(EXIT_S)
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
