"""Cells of the fault matrix in which a copy fails, or the engine is killed, and the daemon lives on."""

import time
from typing import Final

from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_rig import RECOVER_S, SUBJECT_SLOT, TARGET_SLOT, Rig, polled
from stratad.bench.matrix_wire import Do, Outcome, Tell
from stratad.errors import StratadError

ENGINE_KILL: Final = "engine_kill"
# The second of four slices: what the first one wrote is there already.
AT_COPY: Final = 2
READS_IMAGE: Final = ("restore", "take")
READS_SHUTTLES: Final = ("restore", "take", "slot_from")
# A dead engine's mappings are closed this soon after its death.
UNMAPPED_S: Final = 1.0
_ERRORS: Final = {
    "error": "device_error",
    "exception": "internal",
    "oom": "out_of_memory",
    "kill": "worker_died",
    "hang": "worker_hung",
    "slow": "",
}
_ENDS_WORKER: Final = ("kill", "hang")


def expected_error(op: str, kind: str) -> str:
    """The code that an operation must end with."""
    return _ERRORS.get(kind, "damaged" if op in READS_SHUTTLES else "source_changed")


def fault_cell(rig: Rig, op: str, stage: int, kind: str) -> Cell:
    """One fault in the middle of one operation; then the same operation must succeed, and every image be exact."""
    cell = Cell(op, stage, kind)
    subject = _Subject(rig, op)
    subject.prepare()
    cell.pids_before = rig.pids()
    worker = rig.worker_of(stage)
    flipped = stage if kind == "corrupt" and op not in READS_SHUTTLES else -1
    rig.client.arm_fault(op, stage, kind, at=AT_COPY)
    started_s = time.monotonic()
    outcome = rig.engine.do(subject.order(flipped))
    cell.error = outcome.code
    cell.more = {"failed_s": round(outcome.seconds, 4), "states": list(outcome.states)}
    cell.problems += outcome.problems
    cell.expect(outcome.code == expected_error(op, kind), f"expected {expected_error(op, kind)!r}: {outcome.message}")
    if outcome.code:
        _check_blame(rig, cell, outcome, worker)
        subject.check_failed(cell, damaged=kind == "corrupt")
        outcome = rig.until_done(subject.order())
        cell.problems += outcome.problems
        cell.expect(not outcome.code, f"the same operation does not succeed again: {outcome.code} {outcome.message}")
    cell.recovered_s = time.monotonic() - started_s
    subject.note_done()
    rig.check_all(cell)
    subject.clean_up()
    cell.pids_after = rig.pids()
    same = {role for role in cell.pids_before if cell.pids_before[role] == cell.pids_after.get(role)}
    replaced = set(cell.pids_before) - same
    cell.expect(replaced == ({worker} if kind in _ENDS_WORKER else set()), f"processes replaced: {sorted(replaced)}")
    cell.expect(not rig.client.faults().faults, "the fault is still armed")
    return cell


def _check_blame(rig: Rig, cell: Cell, outcome: Outcome, worker: str) -> None:
    """The lowest failing stage is named, and no stage fails that has no part in the fault."""
    served = [stage for stage in range(len(rig.devices)) if rig.worker_of(stage) == worker]
    touched = served if cell.fault in _ENDS_WORKER else [cell.stage]
    failed = [stage for stage, state in enumerate(outcome.states) if state == "failed"]
    cell.expect(cell.stage in failed, f"stage {cell.stage} did not fail, but {failed}")
    cell.expect(set(failed) <= set(touched), f"stages {failed} failed, the fault was in {touched}")
    cell.expect(outcome.stage == min(failed, default=-1), f"stage {outcome.stage} is blamed, {failed} failed")


class _Subject:
    """What an operation of a cell works on; fresh for each cell, so that it shares no chunk with another image."""

    def __init__(self, rig: Rig, op: str) -> None:
        self._rig = rig
        self._op = op
        self._seed = rig.seed()
        self.conversation = f"subject-{self._seed}"

    def prepare(self) -> None:
        """Fill the source slot, and publish or copy to the daemon what the operation reads there."""
        self._rig.engine.fill(SUBJECT_SLOT, self._seed)
        if self._op in READS_IMAGE:
            self._do("capture")
            self._rig.images[self.conversation] = self._seed
        elif self._op == "slot_from":
            self._do("slot_to")

    def order(self, flipped: int = -1) -> Do:
        """The operation."""
        return self._order(self._op, flipped)

    def _order(self, op: str, flipped: int = -1) -> Do:
        return Do(op, self.conversation, SUBJECT_SLOT, TARGET_SLOT, self._seed, flipped)

    def _do(self, op: str) -> None:
        outcome = self._rig.until_done(self._order(op))
        if outcome.code or outcome.problems:
            raise StratadError(
                outcome.code or "internal", f"{op} before the fault: {outcome.message} {outcome.problems}"
            )

    def check_failed(self, cell: Cell, *, damaged: bool) -> None:
        """After the failure: nothing partial is to be seen, and a damaged image is refused from now on; then its bytes
        are captured again.
        """
        self._rig.check_listing(cell)
        if not damaged or self._op not in READS_SHUTTLES:
            return
        again = self._rig.engine.do(self.order())
        cell.problems += again.problems
        cell.expect(again.code == "damaged", f"a damaged image is not refused, but {again.code or 'restored'!r}")
        if self._op in READS_IMAGE:
            flagged = [i.conversation for i in self._rig.client.list_images(NAMESPACE) if i.damaged]
            cell.expect(flagged == [self.conversation], f"images flagged as damaged: {flagged}")
            self._do("capture")
        else:
            self._do("slot_to")

    def note_done(self) -> None:
        """The operation succeeded: which images there must be now."""
        if self._op == "capture":
            self._rig.images[self.conversation] = self._seed
        elif self._op == "take":
            self._rig.images.pop(self.conversation, None)

    def clean_up(self) -> None:
        """Give up what this cell stored."""
        if self._op == "slot_to":
            self._rig.engine.tell(Tell("slot_drop", SUBJECT_SLOT))
        if self._rig.images.pop(self.conversation, None) is not None:
            self._rig.client.drop(NAMESPACE, self.conversation)


def engine_kill_cell(rig: Rig, op: str, stage: int) -> Cell:
    """SIGKILL of the engine in the middle of an operation: its memory is let go of, its images stay."""
    cell = Cell(op, stage, ENGINE_KILL)
    subject = _Subject(rig, op)
    subject.prepare()
    cell.pids_before = rig.pids()
    rig.client.arm_fault(op, stage, "slow", at=AT_COPY)
    rig.engine.begin(subject.order(), RECOVER_S)
    in_flight = any(not armed.faults for armed in polled(rig.client.faults, RECOVER_S))
    cell.expect(in_flight and bool(rig.client.stats().ops), "the operation was over before the engine was killed")
    rig.engine.kill()
    killed_s = time.monotonic()
    unmapped = rig.wait_for(lambda stats: not any(worker.resources.get("pools", 1) for worker in stats.workers))
    unmapped_s = time.monotonic() - killed_s
    cell.more = {"unmapped_s": round(unmapped_s, 4)}
    cell.expect(unmapped is not None and unmapped_s <= UNMAPPED_S, "the dead engine's memory is still mapped")
    rig.client.disarm_fault()
    # A capture that was all there when its engine died may have been published: then it is whole.
    if op == "capture" and any(i.conversation == subject.conversation for i in rig.client.list_images(NAMESPACE)):
        subject.note_done()
    rig.use_fresh_engine()
    rig.check_all(cell)
    again = _Subject(rig, op)
    again.prepare()
    outcome = rig.until_done(again.order())
    cell.problems += outcome.problems
    cell.expect(not outcome.code, f"the same operation does not succeed again: {outcome.code} {outcome.message}")
    cell.recovered_s = time.monotonic() - killed_s
    again.note_done()
    again.clean_up()
    subject.clean_up()
    cell.pids_after = rig.pids()
    same = {role for role in cell.pids_before if cell.pids_before[role] == cell.pids_after.get(role)}
    replaced = set(cell.pids_before) - same
    cell.expect(replaced == {"engine"}, f"processes replaced: {sorted(replaced)}")
    return cell
