"""The janitor: which segments of an instance there are, and their removal.

Called by the supervisor alone, under the instance lock, and for removal only once the processes that may have mapped
them are proven gone.
"""

import os
import stat
from collections.abc import Collection
from typing import NamedTuple

import posix_ipc

from shm.header import ShuttleHeader, split_segment_name
from shm.shuttle import BLOCK_BYTES, MOUNT, ShuttleError, ShuttleFault, read_header, unlink


class Segment(NamedTuple):
    """A segment of ours. `header` is None where it cannot be read: its maker was killed before it was written, or it
    has another format. `whole` says that all of it is there as the header says: its maker had finished.
    """

    name: str
    header: ShuttleHeader | None
    size_bytes: int
    whole: bool = False


def list_segments(instance: str) -> list[Segment]:
    """Plain files that carry a segment name of this instance and belong to our uid, by name.

    The name decides, not the header: nobody else could make a shuttle of that name as long as the file is there.
    """
    found: list[Segment] = []
    for entry in sorted(os.listdir(MOUNT)):  # noqa: PTH208 - names are wanted, not paths
        name = f"/{entry}"
        parts = split_segment_name(name)
        if parts is None or parts[0] != instance:
            continue
        try:
            status = os.stat(MOUNT / entry, follow_symlinks=False)  # noqa: PTH116
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            continue
        try:
            header = read_header(name)
            whole = status.st_size == header.shuttle_bytes <= status.st_blocks * BLOCK_BYTES
            found.append(Segment(name, header, status.st_size, whole))
        except ShuttleError as exc:
            if exc.fault is not ShuttleFault.MISSING:
                found.append(Segment(name, None, status.st_size))
    return found


def remove_segment(name: str) -> bool:
    """Unlink one segment if it is a plain file of ours; False where there is none or it is somebody else's."""
    try:
        status = os.stat(MOUNT / name[1:], follow_symlinks=False)  # noqa: PTH116
        return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and unlink(name)
    except (FileNotFoundError, posix_ipc.PermissionsError):
        return False


def remove_segments(instance: str, keep: Collection[str] = ()) -> list[Segment]:
    """Unlink every segment of `list_segments` whose name is not in `keep`; returns what was removed."""
    return [s for s in list_segments(instance) if s.name not in keep and remove_segment(s.name)]
