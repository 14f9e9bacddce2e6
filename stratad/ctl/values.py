"""Values on the command line of stratactl that have bounds."""

import argparse
from typing import Final

MAX_TIMEOUT_S: Final = 86400.0
MAX_SAMPLES: Final = 20_000
MAX_OPERATIONS: Final = 1000
MAX_IMAGE_ID: Final = 2**63 - 1  # what a message can carry


def timeout(text: str) -> float:
    """Seconds on the command line.

    Raises:
        ArgumentTypeError: no number, or out of bounds.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most {MAX_TIMEOUT_S:g}, got {text!r}")
    return seconds


def samples(text: str) -> int:
    """A number of samples on the command line.

    Raises:
        ArgumentTypeError: no number, or out of bounds.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SAMPLES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_SAMPLES} samples, got {text!r}")
    return int(text)


def operations(text: str) -> int:
    """A number of operations on the command line.

    Raises:
        ArgumentTypeError: no number, or out of bounds.
    """
    if not text.isdecimal() or int(text) > MAX_OPERATIONS:
        raise argparse.ArgumentTypeError(f"expected 0 to {MAX_OPERATIONS} operations, got {text!r}")
    return int(text)


def image_id(text: str) -> int:
    """The number of an image on the command line.

    Raises:
        ArgumentTypeError: no number that an image can have.
    """
    if not (text.isdecimal() and text.isascii()) or not 1 <= int(text) <= MAX_IMAGE_ID:
        raise argparse.ArgumentTypeError(f"expected the number of an image, 1 to {MAX_IMAGE_ID}, got {text!r}")
    return int(text)
