"""The daemon that puts a conversation's K/V away outside the engine and takes it back, and its client."""

from typing import Final

__version__: Final = "0.1.0"
