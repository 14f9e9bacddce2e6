"""``stratactl bench copy``: how near capture and restore come to the plain copy that the hardware allows.

On a GPU the limit is a page-locked copy of the same direction, on `cpu` devices a plain copy between two buffers; it is
measured in the same run, next to each capture and restore. Every destination is wiped before and compared after.
"""

import argparse
from typing import Final

from stratad.bench.copy_rounds import CopyBench, CopySource, add_arguments, copy_row, run_rounds, timed
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME: Final = "copy"
SUMMARY: Final = "capture and restore against the plain copy limit of the same device"


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    ratios = {"capture_over_limit": "capture", "restore_over_limit": "restore"}
    return run_rounds(CopyBench(NAME, 1, _round, ratios), args, progress)


def _round(client: Client, source: CopySource, number: int) -> list[Row]:
    """One capture and one restore, each beside its limit."""
    conversation = "conversation"
    source.refill(number)
    limits = {direction: source.limit_bytes_per_s(direction) for direction in ("capture", "restore")}
    captured, capture_s = timed(lambda: source.capture(conversation))
    source.wipe()
    restored, restore_s = timed(lambda: source.restore(conversation))
    exact = source.is_exact()
    client.drop("bench", conversation)
    if not exact:
        raise CommandError(ExitCode.FAILED, "damaged", "the restored bytes differ from the captured", "report it")
    return [
        copy_row(source, "capture", limits["capture"], capture_s, captured),
        copy_row(source, "restore", limits["restore"], restore_s, restored),
    ]
