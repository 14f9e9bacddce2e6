"""What is resident, and in which process.

The parts come from /proc/PID/status: one read of some twenty microseconds, whatever is mapped. `smaps_rollup` would
tell shares of shared pages too, but walks every page table: 7.5 ms a GiB, so the daemon never reads it.

Kernels from 6.2 on count the parts per CPU; before commit 82241a83cd15 (6.16) the file shows an estimate that may be
off by up to 2 x CPUs x CPUs pages: 128 MiB on 128 CPUs, less than 1 MiB on 8.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

import psutil

from ipc.messages import ProcessMemory
from shm.process import start_ticks
from stratad.core.memory_tracks import Reading

_PARTS: Final = re.compile(rb"^Rss(Anon|File|Shmem):\s*([0-9]+) kB$", re.MULTILINE)


class Member(NamedTuple):
    """A process to look at: its role (``supervisor``, ``template``, a worker's name, ``engine NAME``) and pid."""

    role: str
    pid: int


def resident(members: Iterable[Member]) -> tuple[ProcessMemory, ...]:
    """Resident memory of each process at this instant; one that is gone or hidden is left out.

    RSS is psutil's; its anonymous and shared-memory parts are read from /proc/PID/status (bytes).
    """
    found: list[ProcessMemory] = []
    for member in members:
        try:
            rss_bytes = psutil.Process(member.pid).memory_info().rss
            parts = _status_bytes(member.pid)
        except (psutil.Error, OSError):
            continue
        found.append(ProcessMemory(member.role, member.pid, rss_bytes, parts.get("anon", 0), parts.get("shmem", 0)))
    return tuple(found)


def read_parts(pid: int, *, settled: bool = True) -> Reading | None:
    """One process at this instant; None where it is gone, hidden or a zombie, which has no memory.

    Raises:
        OSError: it cannot be said now (no free descriptor, say).
    """
    try:
        parts = _status_bytes(pid)
        # After the parts: a number that was reused in between shows the later process's start here.
        ticks = start_ticks(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if not parts:
        return None
    return Reading(pid, ticks, parts.get("anon", 0), parts.get("shmem", 0), parts.get("file", 0), settled)


def _status_bytes(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:  # noqa: PTH123
        return {name.decode().lower(): int(kib) * 1024 for name, kib in _PARTS.findall(status.read())}
