"""Events told to the core, and effects that cannot be carried out."""

import pytest

from stratad.core.core import Core
from stratad.core.effects import Effect, LogLine
from stratad.core.state import Instant
from stratad.turn import Turn
from tests.support.core_harness import settings


class Shell:
    """Performs effects by name; those in `broken` raise."""

    def __init__(self, *broken: str) -> None:
        self.core = Core(settings(), {"cpu:0": "cpu:0"}, Instant(0.0, 0.0))
        self.turn = Turn(
            self.core, self.carry_out, lambda effect: self.done.append(f"failed {name(effect)}"), self.last
        )
        self.broken = broken
        self.done: list[str] = []

    def carry_out(self, effect: Effect) -> None:
        if name(effect) in self.broken:
            raise KeyError(name(effect))
        self.done.append(name(effect))
        if name(effect) == "nested":
            self.turn.event(lambda _: [line("inner")])

    def last(self) -> None:
        self.done.append("last")


def line(text: str) -> LogLine:
    return LogLine("info", text)


def name(effect: Effect) -> str:
    assert isinstance(effect, LogLine)
    return effect.message


@pytest.mark.parametrize("broken", ["one", "nested", "inner", "two"])
def test_an_effect_that_fails_costs_itself_and_is_answered_for(broken: str) -> None:
    shell = Shell(broken)
    shell.turn.event(lambda _: [line("one"), line("nested"), line("two")])
    whole = ["one", "nested", "inner", "two", "last"]
    expected = [f"failed {entry}" if entry == broken else entry for entry in whole]
    if broken == "nested":
        expected.remove("inner")
    assert shell.done == expected
    assert shell.core.state.counters["internal_errors"] == 1


def test_an_event_that_the_core_cannot_take_costs_that_event() -> None:
    shell = Shell()

    def bad(_: Instant) -> list[Effect]:
        raise ZeroDivisionError

    shell.turn.event(bad)
    shell.turn.event(lambda _: [line("one")])
    assert shell.done == ["one", "last"]
    assert shell.core.state.counters["internal_errors"] == 1
