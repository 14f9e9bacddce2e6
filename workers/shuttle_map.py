"""The worker's shuttles as byte arrays: extents in, views out."""

from collections.abc import Iterator

import numpy as np

from shm.extent import GRANULE_BYTES, ChunkPlace
from workers.digest import Bytes
from workers.jobs import JobRefused


class ShuttleMap:
    """Index of a shuttle to its memory. Read by the lanes, extended by the thread that makes shuttles."""

    def __init__(self) -> None:
        self._memory: dict[int, Bytes] = {}

    def __len__(self) -> int:
        return len(self._memory)

    def add(self, index: int, memory: memoryview) -> None:
        """Take a shuttle into use; its mapping must outlive the map."""
        self._memory[index] = np.frombuffer(memory, np.uint8)

    def clear(self) -> None:
        """Let go of all memory."""
        self._memory.clear()

    def runs(self, place: ChunkPlace) -> list[tuple[int, int, int]]:
        """The place as (address of the shuttle's first byte, offset in it, length) of each extent's used bytes.

        Raises:
            JobRefused: as in `views`.
        """
        self.views(place)
        left = place.length_bytes
        runs: list[tuple[int, int, int]] = []
        for extent in place.extents:
            take = min(left, extent.length_bytes)
            if take:
                base = int(self._memory[extent.shuttle].__array_interface__["data"][0])
                runs.append((base, extent.offset_bytes, take))
            left -= take
        return runs

    def views(self, place: ChunkPlace) -> list[Bytes]:
        """The bytes of a place, in order, without the unused end of its last extent.

        Raises:
            JobRefused: an extent names a shuttle that is not here, its header, or bytes beyond its end.
        """
        left = place.length_bytes
        views: list[Bytes] = []
        for extent in place.extents:
            memory = self._memory.get(extent.shuttle)
            end = extent.offset_bytes + extent.length_bytes
            if memory is None or extent.offset_bytes < GRANULE_BYTES or end > len(memory):
                raise JobRefused("bad_request", f"{extent} does not lie in a shuttle of this worker")
            take = min(left, extent.length_bytes)
            views.append(memory[extent.offset_bytes : extent.offset_bytes + take])
            left -= take
        return views


def parts(views: list[Bytes], start: int, end: int) -> Iterator[Bytes]:
    """Bytes `start` to `end` of views laid end to end."""
    if len(views) == 1:
        yield views[0][start:end]
        return
    base = 0
    for view in views:
        low, high = max(start, base), min(end, base + len(view))
        if low < high:
            yield view[low - base : high - base]
        base += len(view)
