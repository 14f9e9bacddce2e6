"""What a test may leave behind: nothing."""

import gc
import os
import threading
from pathlib import Path
from typing import NamedTuple

from tests.support.instances import is_ours, private_segments


class Held(NamedTuple):
    """What this process holds: descriptors with their targets, children, threads, segments."""

    descriptors: frozenset[str]
    children: frozenset[str]
    threads: frozenset[str]
    segments: frozenset[str]

    def since(self, before: "Held") -> list[str]:
        """What is held now and was not before. The arena of a daemon that was there before may grow."""
        running = {_instance(entry) for entry in before.segments}
        new = [entry for now, then in zip(self, before, strict=True) for entry in now - then]
        return sorted(entry for entry in new if not (entry.startswith("segment ") and _instance(entry) in running))


def held_now() -> Held:
    """Take stock."""
    return Held(_descriptors(), _children(), _threads(), _segments())


def new_since(before: Held) -> list[str]:
    """What is held now and was not before; a collection comes first where anything is."""
    if not held_now().since(before):
        return []
    gc.collect()
    return held_now().since(before)


def _descriptors() -> frozenset[str]:
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.add(f"descriptor {name} -> {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
        except OSError:
            continue  # the one that listed the folder
    return frozenset(found)


def _children() -> frozenset[str]:
    """Zombies too. Grandchildren belong to their parents, or become children when those end before them."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(f"child {pid}" for pid in (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue  # the thread has ended meanwhile
    return frozenset(found)


def _threads() -> frozenset[str]:
    found = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    # Native pools of numerical libraries start at their first use and stay; ZeroMQ's threads belong to a context.
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("ZMQ"):
            found.add(f"thread {name} {task.name}")
    return frozenset(found)


def _segments() -> frozenset[str]:
    names = os.listdir("/dev/shm")  # noqa: PTH208
    ours = [name for name in names if is_ours(name)]
    return frozenset(f"segment {name}" for name in [*ours, *private_segments(os.getpid())])


def _instance(segment: str) -> str:
    return segment.split(".")[1]
