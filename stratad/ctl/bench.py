"""``stratactl bench NAME``: run one benchmark and show its rows and ratios."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, CommandError, Json, human_bytes, table

MIN_ROUNDS: Final = 3


def add_arguments(parser: argparse.ArgumentParser, add_common: Callable[[argparse.ArgumentParser], None]) -> None:
    """One sub-parser a benchmark; `add_common` gives each the options that every command takes."""
    from stratad.bench import control, copy, delta, recover, slots, stages  # noqa: PLC0415 - `stratactl status` must not load them

    names = parser.add_subparsers(metavar="NAME", required=True)
    for module in (control, stages, copy, slots, delta, recover):
        command = names.add_parser(module.NAME, help=module.SUMMARY, description=module.SUMMARY)
        add_common(command)
        command.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"at least {MIN_ROUNDS} (the default)")
        command.add_argument("--quiet", action="store_true", help="no progress on stderr")
        module.add_arguments(command)
        command.set_defaults(bench=module.run)


def run_bench(args: argparse.Namespace, target: Target) -> Answer:
    """Run the chosen benchmark. Raises what it raises.

    Raises:
        CommandError: too few rounds.
    """
    if args.rounds < MIN_ROUNDS:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--rounds must be at least {MIN_ROUNDS}, got {args.rounds}")
    bench: Callable[[argparse.Namespace, Target, Progress], Report] = args.bench
    # Whoever ends us by SIGTERM wants the daemons gone too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = bench(args, target, _silent if args.quiet else _to_stderr)
    return Answer(lines=report_lines(report), data=report.as_json())


def _silent(_text: str) -> None:
    """Progress of a quiet run."""


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report_lines(report: Report) -> list[str]:
    """The report for people: its tables, then its ratios."""
    lines: list[str] = []
    if not report.split_by:
        lines += [*rows_table(report.rows, report.headings), ""]
    for value in dict.fromkeys(row[report.split_by] for row in report.rows if report.split_by):
        rows = [row for row in report.rows if row[report.split_by] == value]
        shown = [{key: cell for key, cell in row.items() if key != report.split_by} for row in rows]
        lines += [f"{value}:", *rows_table(shown, report.headings), ""]
    return lines + _ratio_lines(report)


def rows_table(rows: Sequence[Row], headings: Mapping[str, str] | None = None) -> list[str]:
    """Rows as a table; columns in the order in which they first appear. One in bytes that has a heading of its own is
    shown as sizes.
    """
    named = headings or {}
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = [named.get(key, key) for key in keys]
    return table(head, ([_cell(row.get(key), as_size=_is_size(key, named)) for key in keys] for row in rows))


def _is_size(key: str, named: Mapping[str, str]) -> bool:
    return key in named and key.endswith("_bytes")


def _cell(value: Json, *, as_size: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if as_size and isinstance(value, int):
        return human_bytes(value)
    return str(value)


def _ratio_lines(report: Report) -> list[str]:
    notes = {name: f" ({note})" for name, note in report.ratio_notes.items()}
    return [f"{name}: {_cell(value)}{notes.get(name, '')}" for name, value in report.ratios.items()]
