"""How a benchmark tells what it is doing."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str], None]
