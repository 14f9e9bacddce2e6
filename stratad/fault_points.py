"""Points at which a supervisor can be made to die: before and after every effect that the core asks for.

They are generated from the union of all effects: an effect with a field that holds messages of a union has its
points for each of them, ``SendTo.CaptureJob:before``, any other for itself, ``SpawnWorker:after``.
"""

import contextlib
import os
import signal
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from stratad.core.effects import Effect

WHENS: Final = ("before", "after")


def _message_field(kind: type[Effect]) -> tuple[str, tuple[type, ...]] | None:
    """The field of an effect that holds one of several messages, or some of them, and which there are."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        members = get_args(get_args(hint)[0] if get_origin(hint) is tuple else hint)
        if members and all(isinstance(member, type) and issubclass(member, msgspec.Struct) for member in members):
            return field.name, members
    return None


_FIELDS: Final = {kind: _message_field(kind) for kind in get_args(Effect)}


def point_names() -> tuple[str, ...]:
    """Every point there is."""
    names: list[str] = []
    for kind, found in _FIELDS.items():
        effects = [kind.__name__] if found is None else [f"{kind.__name__}.{member.__name__}" for member in found[1]]
        names += [f"{effect}:{when}" for effect in effects for when in WHENS]
    return tuple(names)


class DieAt(NamedTuple):
    """The passing of a point at which the supervisor dies: the first is number 1."""

    point: str
    number: int

    @classmethod
    def parse(cls, text: str) -> "DieAt":
        """From ``SendTo.CaptureJob:before#2``; without a number the first.

        Raises:
            ValueError: no such point, or no number above 0.
        """
        point, hash_sign, number = text.partition("#")
        if point not in point_names():
            raise ValueError(f"no fault point is called {point!r}, see `stratactl fault points`")
        if hash_sign and not (number.isdecimal() and int(number) > 0):
            raise ValueError(f"expected a number above 0 behind #, got {number!r}")
        return cls(point, int(number or 1))


class FaultPoints:
    """Counts the points that a supervisor passes, and dies at one of them.

    The name of a point that is passed for the first time is written to the file `reached` at once: who looks for it
    cannot ask a daemon that has died there, or has stopped.
    """

    def __init__(self, die_at: DieAt | None, reached: Path) -> None:
        self.passed: Final[Counter[str]] = Counter()
        self._die_at = die_at
        self._reached = reached

    def pass_by(self, effect: Effect, when: str) -> None:
        """The supervisor is about to perform an effect, or has performed it. Does not return from the fatal point."""
        kind, found = type(effect), _FIELDS[type(effect)]
        if found is None:
            names = {kind.__name__}
        else:
            held = getattr(effect, found[0])
            names = {f"{kind.__name__}.{type(one).__name__}" for one in (held if isinstance(held, tuple) else (held,))}
        for name in sorted(names):
            self._pass_point(f"{name}:{when}")

    def _pass_point(self, point: str) -> None:
        self.passed[point] += 1
        if self.passed[point] == 1:
            # A disk without room must not keep the effect from being carried out.
            with contextlib.suppress(OSError), self._reached.open("a", encoding="ascii") as file:
                file.write(f"{point}\n")
        if self._die_at == (point, self.passed[point]):
            os.kill(os.getpid(), signal.SIGKILL)
