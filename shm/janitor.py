"""The janitor: which segments of an instance there are, and their removal.

Called by the supervisor alone, under the instance lock, and for removal only once the processes that may have mapped
them are proven gone.
"""

import os
import stat
from collections.abc import Collection
from typing import NamedTuple

from shm.header import ShuttleHeader, split_segment_name
from shm.shuttle import MOUNT, ShuttleError, read_header, unlink


class Segment(NamedTuple):
    """A segment of ours. `header` is None for an empty one, whose maker was killed before its first write."""

    name: str
    header: ShuttleHeader | None
    size_bytes: int


def list_segments(instance: str) -> list[Segment]:
    """Segments that carry this instance's name, belong to our uid and have our header (or hold nothing), by name."""
    found: list[Segment] = []
    for entry in sorted(os.listdir(MOUNT)):  # noqa: PTH208 - names are wanted, not paths
        name = f"/{entry}"
        parts = split_segment_name(name)
        if parts is None or parts[0] != instance:
            continue
        try:
            status = os.stat(MOUNT / entry, follow_symlinks=False)  # noqa: PTH116
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                continue
            header = read_header(name) if status.st_size else None
        except (FileNotFoundError, ShuttleError):
            continue
        found.append(Segment(name, header, status.st_size))
    return found


def remove_segments(instance: str, keep: Collection[str] = ()) -> list[Segment]:
    """Unlink every segment of `list_segments` whose name is not in `keep`; returns what was removed."""
    return [segment for segment in list_segments(instance) if segment.name not in keep and unlink(segment.name)]
