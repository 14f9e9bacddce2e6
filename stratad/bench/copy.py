"""``stratactl bench copy``: how near capture and restore come to the plain copy that the hardware allows.

On a GPU the limit is a page-locked copy of the same direction, on `cpu` devices a plain copy between two buffers; it is
measured in the same run, next to each capture and restore. Every destination is wiped before and compared after.
"""

import argparse
import dataclasses
from typing import Final

from stratad.bench.copy_rounds import CopyBench, CopySource, add_arguments, copy_row, run_rounds, timed
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column
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
    report = run_rounds(CopyBench(NAME, 1, _round, ratios), args, progress)
    blocks = [row for row in report.rows if row["op"] == "block_copies" and row["layout"] == "paged"]
    if not blocks:
        return report
    captured = column(report.rows, "gb_per_s", op="capture", layout="paged")
    over = {"paged_capture_over_block_copies": round(min(captured) / max(column(blocks, "gb_per_s")), 2)}
    return dataclasses.replace(report, ratios={**report.ratios, **over})


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
    # Once is enough, and takes longer than all else.
    others = source.baselines() if number == 1 else {}
    rows: list[Row] = [{"op": name, "gb_per_s": round(rate / 1e9, 3)} for name, rate in others.items()]
    return [
        *rows,
        copy_row(source, "capture", limits["capture"], capture_s, captured),
        copy_row(source, "restore", limits["restore"], restore_s, restored),
    ]
