"""What every stratactl command hands back, and how it is written to the terminal."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO, TypeAlias

from stratad.ctl.exit_codes import ExitCode

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024


@dataclass(frozen=True)
class Answer:
    """Outcome of one command: `lines` for people, `data` for ``--json``. Commands never print; `main` does."""

    exit_code: ExitCode = ExitCode.OK
    lines: Sequence[str] = ()
    data: JsonObject = field(default_factory=dict)


class CommandError(Exception):
    """A command could not do what it was asked: what happened, a code, and what to do about it."""

    def __init__(
        self, exit_code: ExitCode, code: str, what: str, fix: str = "", data: JsonObject | None = None
    ) -> None:
        super().__init__(f"{what} [{code}]")
        self.exit_code = exit_code
        self.code = code
        self.what = what
        self.fix = fix
        self.data: JsonObject = data or {}


def human_bytes(size_bytes: int | None) -> str:
    """A size for people: ``1.5 GiB``; ``-`` for an unknown one."""
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit in _UNITS:
        if abs(value) < _STEP or unit == _UNITS[-1]:
            return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    raise AssertionError("unreachable: the last unit takes every value")


def human_age(age_s: float) -> str:
    """An age for people: ``12 s``, ``3 m 20 s``, ``5 h 2 m``, ``3 d 4 h``."""
    seconds = max(0, int(age_s))
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} m {seconds} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} m"
    return f"{hours // 24} d {hours % 24} h"


def printable(text: str) -> str:
    """Text of another process without control characters, so that a name cannot write escapes to a terminal."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns; a column whose cells all start with a digit or a dash is aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    columns = list(zip(head, *cells, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [bool(cells) and all(c[:1].isdigit() or c[:1] == "-" for c in column[1:]) for column in columns]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    return [line(head), *(line(row) for row in cells)]


def write_answer(answer: Answer, stream: TextIO, *, as_json: bool) -> None:
    """Write lines, or one JSON object on the last line.

    Raises:
        OSError: the stream is closed or full.
    """
    if as_json:
        stream.write(json.dumps(answer.data) + "\n")
    else:
        stream.writelines(line + "\n" for line in answer.lines)
    stream.flush()
