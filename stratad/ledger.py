"""What is resident, and in which process."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import psutil

from ipc.messages import ProcessMemory

_FIELDS: Final = {"RssAnon:": "anon", "RssShmem:": "shmem"}


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


def _status_bytes(pid: int) -> dict[str, int]:
    parts: dict[str, int] = {}
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
        for line in lines:
            name, _, rest = line.partition("\t")
            if name in _FIELDS:
                parts[_FIELDS[name]] = int(rest.split()[0]) * 1024
    return parts
