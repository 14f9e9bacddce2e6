"""Instance names that tell the segments of this test run from those of another one on the same host."""

import itertools
import os
import re

import psutil

_numbers = itertools.count()


def fresh_instance() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


def is_foreign(segment_file: str) -> bool:
    """Whether a file of /dev/shm belongs to another run on this host: its instance names the pid of that run."""
    match = re.match(r"stratad\.[a-z_-]*([0-9]+)", segment_file)
    if match is None or int(match[1]) == os.getpid():
        return False
    pid = int(match[1])
    return segment_file.startswith(f"stratad.t{pid}-") or (psutil.pid_exists(pid) and not _is_descendant(pid))


def _is_descendant(pid: int) -> bool:
    try:
        return os.getpid() in {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return False
