"""Taking turns: makers of shuttles that are near the end of memory reserve one after another.

The turn is a record lock on byte 1 of the instance's lock file, which is beside the segments and open to this user
alone. It has nothing to do with the flock on the whole file that the daemon holds. The kernel drops it with its holder.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# A step of another maker takes some tens of milliseconds; one that takes longer is stopped, or its host is.
_WAIT_S: Final = 1.0
_PAUSE_S: Final = 0.002
_AT: Final = 1


class TurnTaken(RuntimeError):
    """Another maker has the turn and does not end it."""


@contextmanager
def turn(path: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold the turn of the instance whose lock file is `path`; without a file there is nobody to take turns with.

    Not to be held twice in one process: a record lock belongs to the process.

    Raises:
        TurnTaken: somebody else held it for all of `wait_s`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        _take(descriptor, time.monotonic() + wait_s)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _take(descriptor: int, until_s: float) -> None:
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _AT)
            return
        except (BlockingIOError, PermissionError) as exc:
            if time.monotonic() >= until_s:
                raise TurnTaken from exc
        time.sleep(_PAUSE_S)
