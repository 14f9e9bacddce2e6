"""The arms of a benchmark: daemons that differ in one setting, measured in turns."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from stratad.bench.report import Row, column
from stratad.config import setting_names
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError


class Arm(NamedTuple):
    """One daemon: what it is set to. Without a `setting` it is the only one, and nothing is said of it."""

    setting: str = ""
    value: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """What its daemon is started with."""
        return {self.setting: self.value} if self.setting else {}

    @property
    def name(self) -> str:
        """``section.key=value``, or nothing."""
        return f"{self.setting}={self.value}" if self.setting else ""


PLAIN: Final = (Arm(),)


def parse_arms(text: str) -> tuple[Arm, ...]:
    """The arms of ``KEY=VALUE,VALUE,...``; of ``section.key`` the section may be left out where only one has the key.

    Raises:
        CommandError: no such setting, or not two different values of it.
    """
    key, _, values = text.partition("=")
    names = [name for name in setting_names() if key in (name, name.partition(".")[2])]
    if len(names) != 1:
        found = "several: " + ", ".join(names) if names else "none"
        raise _wrong(f"{key!r} must name one setting (`stratad --print-config` shows all), got {found}")
    chosen = values.split(",")
    if len(chosen) < 2 or len(set(chosen)) != len(chosen) or not all(chosen):
        raise _wrong(f"at least two different values of {names[0]} are needed, got {values!r}")
    return tuple(Arm(names[0], value) for value in chosen)


def _wrong(why: str) -> CommandError:
    return CommandError(ExitCode.USAGE, "bad_value", f"--arms: {why}")


def ratios_over_first(rows: Sequence[Row], arms: Sequence[Arm], key: str) -> Row:
    """For every kind of row (its ``arm``) and every arm but the first: `key` over that of the first arm, in the worst
    round. Rounds are compared with themselves: what disturbs one disturbs all its arms.
    """
    ratios: Row = {}
    for kind in dict.fromkeys(str(row["arm"]) for row in rows if key in row):
        first = column(rows, key, arm=kind, setting=arms[0].name)
        for arm in arms[1:]:
            mine = column(rows, key, arm=kind, setting=arm.name)
            if first and len(mine) == len(first) and min(first) > 0:
                worst = max(one / base for one, base in zip(mine, first, strict=True))
                ratios[f"{kind}_{key}_{arm.value}_over_{arms[0].value}"] = round(worst, 3)
    return ratios
