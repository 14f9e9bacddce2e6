"""Instance names that tell the segments of this test run from those of another one on the same host."""

import itertools
import os

_numbers = itertools.count()


def fresh_instance() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


def is_ours(segment_file: str) -> bool:
    """Whether a file of /dev/shm belongs to a daemon of this test run; others come and go on the same host."""
    return segment_file.startswith(f"stratad.t{os.getpid()}-")


def private_segments(pid: int) -> list[str]:
    """Files of /dev/shm that belong to the daemons which process `pid` started for itself (benchmarks and the demo)."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"stratad.bench{pid}x"))  # noqa: PTH208
