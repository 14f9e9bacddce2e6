"""The fault matrix: which cells there are, and how they are run one after another.

Cells in which a copy fails share one daemon, as the promise is that it lives on; after a cell that could not be carried
out at all there is a fresh one. Each cell of a supervisor's death has a daemon of its own.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stratad.bench.line_process import EngineError
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_cells import ENGINE_KILL, engine_kill_cell, fault_cell
from stratad.bench.matrix_points import SUPERVISOR_KILL, TAKEOVER, Rehearsal, point_cell, rehearse, takeover_cell
from stratad.bench.matrix_rig import Rig
from stratad.bench.progress import Progress
from stratad.ctl.output import CommandError
from stratad.errors import StratadError
from stratad.fault_points import point_names

_LOG_TAIL_LINES: Final = 20
TROUBLE: Final = (CommandError, EngineError, StratadError)


@dataclass(frozen=True)
class Plan:
    """What to run. `kinds` are those of armed faults, `ENGINE_KILL` and `SUPERVISOR_KILL`; `points` (empty: all) limit
    the last.
    """

    devices: str
    stages: int
    ops: Sequence[str]
    kinds: Sequence[str]
    points: Sequence[str] = ()


@dataclass(frozen=True)
class Planned:
    """One cell that is to be run."""

    name: str
    run: Callable[[], Cell]


class Matrix:
    """Runs a plan. Use as a context manager."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._rig: Rig | None = None

    @property
    def log(self) -> Path:
        """Where the engine processes write to."""
        assert self._folder is not None
        return Path(self._folder.name) / "engines.log"

    def run(self, planned: Planned) -> Cell:
        """Run a cell. One that could not be carried out has failed."""
        try:
            cell = planned.run()
        except TROUBLE as exc:
            cell = self._not_carried_out(planned.name, exc)
            self._drop_rig()
        return cell

    def tell(self, planned: Planned, cell: Cell) -> None:
        """Say how a cell ended."""
        took = "" if cell.recovered_s is None else f" {cell.recovered_s:.3f} s"
        self._progress(f"{planned.name}: {'passed' if cell.passed else 'FAILED ' + '; '.join(cell.problems)}{took}")

    def planned(self) -> Iterator[Planned]:
        """Every cell, in the order in which they are to be run; which points there are is known once one was."""
        plan = self._plan
        armed = [kind for kind in plan.kinds if kind not in (ENGINE_KILL, SUPERVISOR_KILL)]
        for op in plan.ops:
            for stage in range(plan.stages):
                for kind in armed:
                    yield self._fault(op, stage, kind)
        if ENGINE_KILL in plan.kinds:
            for op in plan.ops:
                for stage in range(plan.stages):
                    yield self._engine_kill(op, stage)
        self._drop_rig()
        if SUPERVISOR_KILL in plan.kinds:
            yield from self._supervisor_kills()

    def _fault(self, op: str, stage: int, kind: str) -> Planned:
        return Planned(f"{op} stage {stage} {kind}", lambda: fault_cell(self._living(), op, stage, kind))

    def _engine_kill(self, op: str, stage: int) -> Planned:
        return Planned(f"{op} stage {stage} {ENGINE_KILL}", lambda: engine_kill_cell(self._living(), op, stage))

    def _supervisor_kills(self) -> Iterator[Planned]:
        """One cell a point that the scenario passes, and one a point that a next daemon passes while it takes over; a
        cell of its own says whether there is a point that neither reaches.
        """
        plan = self._plan
        found: list[Rehearsal] = []

        def rehearsal() -> Cell:
            found.append(rehearse(plan.devices, plan.stages, self.log))
            missing = sorted(set(point_names()) - found[0].scenario - found[0].takeover)
            cell = Cell("rehearsal", None, SUPERVISOR_KILL, byte_exact=True)
            cell.expect(not missing, f"fault points that the scenario does not reach: {', '.join(missing)}")
            return cell

        yield Planned("rehearsal", rehearsal)
        if not found:
            return
        wanted = set(plan.points or point_names())
        for point in point_names():
            if point in wanted and point in found[0].scenario:
                yield self._point(point, found[0].passing(point))
        for point in point_names():
            if point in wanted and point in found[0].takeover:
                yield self._takeover(point)

    def _point(self, point: str, number: int) -> Planned:
        plan = self._plan
        return Planned(f"{point}#{number}", lambda: point_cell(plan.devices, plan.stages, self.log, point, number))

    def _takeover(self, point: str) -> Planned:
        plan = self._plan
        return Planned(f"{TAKEOVER} {point}", lambda: takeover_cell(plan.devices, plan.stages, self.log, point))

    def _living(self) -> Rig:
        """The rig that the cells of a living daemon share."""
        if self._rig is None:
            rig = Rig.start(self._plan.devices, self._plan.stages, self.log)
            self._rig = rig  # before the next steps: whatever fails, it is closed
            rig.connect()
            rig.use_fresh_engine()
            rig.publish_priors()
        return self._rig

    def _not_carried_out(self, name: str, exc: Exception) -> Cell:
        op, _, rest = name.partition(" stage ")
        stage, _, fault = rest.partition(" ")
        cell = Cell(op, int(stage), fault) if stage else Cell("", None, f"{SUPERVISOR_KILL} {name}")
        cell.problems.append(f"could not be carried out: {type(exc).__name__}: {exc}")
        if self._rig is not None:
            text = self._rig.daemon.log_path.read_text(errors="replace")
            cell.more["log"] = text.splitlines()[-_LOG_TAIL_LINES:]
        return cell

    def _drop_rig(self) -> None:
        rig, self._rig = self._rig, None
        if rig is not None:
            rig.close()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="stratad-matrix-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_rig()
        assert self._folder is not None
        self._folder.cleanup()
