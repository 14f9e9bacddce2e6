"""``stratactl bench slots``: how near slot copies come to the plain copies that the hardware allows.

A direct slot copy is held against a plain copy of the same bytes on the same device, the two halves of a slot copy
through the daemon's memory against a page-locked copy of their direction (on `cpu` devices: a plain copy between two
buffers). Limits are measured in the same run. The target slot is wiped before and compared after, and so is the source,
which nothing may have touched.
"""

import argparse
from collections.abc import Callable
from typing import Final

from stratad.bench.copy_rounds import CopyBench, CopySource, add_arguments, copy_row, run_rounds, timed
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME: Final = "slots"
SUMMARY: Final = "slot copies against the plain copy limits of the same device"
_SLOTS: Final = 2


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    ratios = {"direct_over_d2d": "direct", "to_over_limit": "to", "from_over_limit": "from"}
    return run_rounds(CopyBench(NAME, _SLOTS, _round, ratios), args, progress)


def _round(_client: Client, source: CopySource, number: int) -> list[Row]:
    """Both ways from the first slot to the last, each beside its limits."""
    source.refill(number)
    # The worker's first copy in a new pool also maps its pages: not at the cost of whichever way is first.
    _direct(source)
    arms: list[Callable[[CopySource], list[Row]]] = [_direct, _host]
    if number % 2:  # neither way always has the warmer caches
        arms.reverse()
    rows: list[Row] = []
    for arm in arms:
        rows += arm(source)
    return rows


def _direct(source: CopySource) -> list[Row]:
    limit_bytes_per_s = source.limit_bytes_per_s("direct")
    source.wipe()
    copied, seconds = timed(source.slot_direct)
    _check(source, "slot_direct")
    return [copy_row(source, "direct", limit_bytes_per_s, seconds, copied)]


def _host(source: CopySource) -> list[Row]:
    limits = {direction: source.limit_bytes_per_s(direction) for direction in ("capture", "restore")}
    source.wipe()
    captured, to_s = timed(source.slot_to)
    restored, from_s = timed(source.slot_from)
    _check(source, "slot_to and slot_from")
    return [
        copy_row(source, "to", limits["capture"], to_s, captured),
        copy_row(source, "from", limits["restore"], from_s, restored),
    ]


def _check(source: CopySource, calls: str) -> None:
    if not source.is_exact():
        what = f"after {calls} the target slot is not what the source was, or the source is not what it was"
        raise CommandError(ExitCode.FAILED, "damaged", what, "report it")
