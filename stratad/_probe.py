"""Probes: which bytes of a pool both sides read to prove that they see the same memory."""

from typing import Final

from shm.layout import StageLayout

PROBE_BYTES: Final = 16
# Two places a plane and no more than this in all: a probe proves which memory it is, it need not cover it.
MAX_PROBES: Final = 64


def probe_offsets(layout: StageLayout, pool_bytes: int) -> list[int]:
    """Where to probe a pool: at the first and the last bytes of each plane, of evenly chosen ones where there are many.

    Ascending, each once, each with `PROBE_BYTES` bytes inside the pool; none where the pool is shorter.
    """
    last = pool_bytes - PROBE_BYTES
    if last < 0:
        return []
    planes = layout.planes
    shown = min(len(planes), MAX_PROBES // 2)
    offsets: set[int] = set()
    for number in range(shown):
        plane = planes[number * len(planes) // shown]
        offsets.add(min(plane.offset_bytes, last))
        offsets.add(max(plane.end_bytes - PROBE_BYTES, 0))
    return sorted(offsets)
