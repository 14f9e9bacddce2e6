"""``stratactl fault-matrix``: operations, stages and faults in real processes, and what became of every image."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Final

from ipc.messages import FAULT_KINDS, FAULT_OPS
from stratad.bench.matrix import Matrix, Plan
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_cells import ENGINE_KILL
from stratad.bench.matrix_points import SUPERVISOR_KILL
from stratad.bench.matrix_rig import device_specs
from stratad.bench.report import hardware
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, CommandError, JsonObject, table
from stratad.fault_points import point_names
from stratad.version import commit, package_hash

STAGES_LIMIT: Final = 64
NO_POINTS: Final = "none"
# `slow` harms nobody: it is there to be armed by hand.
KINDS: Final = (*(kind for kind in FAULT_KINDS if kind != "slow"), ENGINE_KILL, SUPERVISOR_KILL)
_KNOWN_KINDS: Final = (*FAULT_KINDS, ENGINE_KILL, SUPERVISOR_KILL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--devices", default="cpu:4", metavar="cpu:N|cuda:all|UUID,...", help="default: cpu:4")
    parser.add_argument(
        "--stages", type=int, default=4, metavar="N", help="stages, on the devices in turn (default: 4)"
    )
    parser.add_argument("--ops", default=",".join(FAULT_OPS), metavar="OP,...", help=f"default: {','.join(FAULT_OPS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KIND,...", help=f"default: {','.join(KINDS)}")
    points_help = (
        "only these points of the supervisor, see `stratactl fault points`; `none` leaves all cells of its deaths out "
        "(default: all it passes)"
    )
    parser.add_argument("--points", default="", metavar="POINT,...", help=points_help)
    parser.add_argument("--fail-fast", action="store_true", help="skip everything after the first cell that fails")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run_fault_matrix(args: argparse.Namespace) -> Answer:
    """Run the matrix.

    Raises:
        CommandError: an argument that cannot be, or devices that are not there.
    """
    plan = plan_of(args)
    device_specs(plan.devices)
    # Whoever ends us by SIGTERM wants the daemons gone too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells: list[Cell] = []
    skipped = 0
    cut_short = False
    try:
        with Matrix(plan, _silent if args.quiet else _to_stderr) as matrix:
            for planned in matrix.planned():
                if args.fail_fast and cells and not cells[-1].passed:
                    skipped += 1
                    continue
                cells.append(matrix.run(planned))
                matrix.tell(planned, cells[-1])
    except KeyboardInterrupt:
        cut_short = True  # what was found until now is worth having
    return report(plan, cells, skipped, cut_short=cut_short)


def plan_of(args: argparse.Namespace) -> Plan:
    """What the arguments ask for.

    Raises:
        CommandError: an argument that cannot be, or nothing is left to be run.
    """
    if not 1 <= args.stages <= STAGES_LIMIT:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--stages must be 1 to {STAGES_LIMIT}, got {args.stages}")
    kinds = _chosen("--kinds", args.kinds, _KNOWN_KINDS)
    points: tuple[str, ...] = ()
    if args.points == NO_POINTS:
        kinds = tuple(kind for kind in kinds if kind != SUPERVISOR_KILL)
        if not kinds:
            what = f"--points {NO_POINTS}: nothing is left of --kinds {args.kinds}"
            raise CommandError(ExitCode.USAGE, "bad_value", what, "name another kind, or points")
    elif args.points:
        points = _chosen("--points", args.points, point_names())
    return Plan(args.devices, args.stages, _chosen("--ops", args.ops, FAULT_OPS), kinds, points)


def report(plan: Plan, cells: Sequence[Cell], skipped: int, *, cut_short: bool = False) -> Answer:
    """What the cells found; the exit status says whether all of them passed, or that they were `cut_short`."""
    failed = [cell for cell in cells if not cell.passed]
    data: JsonObject = {
        "devices": plan.devices,
        "stages": plan.stages,
        "hardware": hardware(),
        "versions": {"commit": commit(), "installed_package_hash": package_hash()},
        "cells": [cell.as_json() for cell in cells],
        "passed": len(cells) - len(failed),
        "failed": len(failed),
        "skipped": skipped,
        "cut_short": cut_short,
    }
    lines = [*_table(cells), "", f"passed {len(cells) - len(failed)}, failed {len(failed)}, skipped {skipped}"]
    for cell in failed:
        lines += ["", f"{cell.op}, stage {cell.stage}, {cell.fault}:", *(f"  {text}" for text in cell.problems)]
    if cut_short:
        lines += ["", "cut short by a signal: the other cells were not run"]
        return Answer(ExitCode.INTERRUPTED, lines, data)
    return Answer(ExitCode.FAILED if failed else ExitCode.OK, lines, data)


def _table(cells: Sequence[Cell]) -> list[str]:
    """One line an operation and fault, over all stages."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.op, cell.fault), []).append(cell)
    rows = []
    for (op, fault), group in groups.items():
        times_s = [cell.recovered_s for cell in group if cell.recovered_s is not None]
        passed = sum(cell.passed for cell in group)
        errors = ",".join(dict.fromkeys(cell.error or "-" for cell in group))
        worst = f"{max(times_s):.3f}" if times_s else "-"
        exact = "yes" if all(cell.byte_exact for cell in group) else "NO"
        rows.append((op, fault, f"{passed}/{len(group)}", errors, worst, exact))
    return table(("op", "fault", "passed", "error", "recovered s", "byte exact"), rows)


def _chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        what = f"{option} {text}: " + (f"no {unknown[0]!r}" if unknown else "nothing is left")
        fix = "see `stratactl fault points`" if option == "--points" else f"choose among {', '.join(known)}"
        raise CommandError(ExitCode.USAGE, "bad_value", what, fix)
    return chosen


def _silent(_text: str) -> None:
    """Progress of a quiet run."""


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
