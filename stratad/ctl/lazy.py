"""A parser that learns its arguments only when its command is called."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any


class LazyParser(argparse.ArgumentParser):
    """Calls `populate` once before it parses or prints help, so that ``stratactl status`` never imports the demo."""

    populate: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(  # type: ignore[override] # the stubs overload it by the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As the base class, after the command's own arguments were added."""
        populate, self.populate = self.populate, None
        if populate is not None:
            populate(self)
        return super().parse_known_args(args, namespace)
