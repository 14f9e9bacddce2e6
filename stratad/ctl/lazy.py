"""The parser of stratactl and of each of its commands."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class ArgumentsRefused(Exception):
    """The command line cannot be used. `usage` is that of the command it names, `program` how that is called."""

    def __init__(self, program: str, usage: str, message: str) -> None:
        super().__init__(message)
        self.program = program
        self.usage = usage
        self.message = message


class LazyParser(argparse.ArgumentParser):
    """Calls `populate` once before it parses or prints help, so that ``stratactl status`` never imports the demo.

    Raises `ArgumentsRefused` where the base class would print and exit, also for what its own command does not know.
    """

    populate: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(  # type: ignore[override] # the stubs overload it by the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As the base class, after the command's own arguments were added; nothing unknown is left to the caller."""
        populate, self.populate = self.populate, None
        if populate is not None:
            populate(self)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ArgumentsRefused: always.
        """
        raise ArgumentsRefused(self.prog, self.format_usage(), message)
