"""How much memory may still be taken before the kernel kills somebody for it.

The least of what the host has left (`MemAvailable`) and, for the cgroup of this process and each of its ancestors (v1
and v2), its limit minus its usage plus the file cache that it could drop. Shared memory is no such cache: it stays.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

# v1 writes "no limit" as the largest multiple of the page size; nobody sets a limit above this.
_NO_LIMIT_BYTES: Final = 2**60
# By version of the cgroup: file of the limit, file of the usage, prefix of the counts that include the descendants.
_NAMES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


class Headroom(NamedTuple):
    """`free_bytes` may still be taken; `limited_by` names the limit and its value."""

    free_bytes: int
    limited_by: str


def memory_headroom(root: Path = Path("/")) -> Headroom:
    """The least headroom of this process; `root` stands for the file system that holds proc and sys."""
    rooms = [_host_headroom(root)]
    rooms += [_group_headroom(folder, version) for folder, version in _groups(root)]
    return min((room for room in rooms if room is not None), default=Headroom(_NO_LIMIT_BYTES, "nothing"))


def oom_kills(root: Path = Path("/")) -> int:
    """How often the kernel has killed a process for memory in the cgroup of this process (or below it, with v2); 0
    where that is not counted.
    """
    for folder, version in _groups(root):  # the innermost is the first
        kills = _table(folder / ("memory.oom_control" if version == 1 else "memory.events")).get("oom_kill")
        if kills is not None:
            return kills
    return 0


def _host_headroom(root: Path) -> Headroom | None:
    kib = _table(root / "proc/meminfo").get("MemAvailable:")  # ProcSubset=pid hides the file
    return None if kib is None else Headroom(kib * 1024, "MemAvailable of the host")


def _group_headroom(folder: Path, version: int) -> Headroom | None:
    """Headroom below the limit of one cgroup; None where it has no limit or cannot be read."""
    limit_name, usage_name, prefix = _NAMES[version]
    limit_bytes, usage_bytes = _number(folder / limit_name), _number(folder / usage_name)
    if limit_bytes is None or usage_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
        return None
    counts = _table(folder / "memory.stat")
    # The two file lists hold no shared memory (that is on the anonymous lists), so what they count can be dropped.
    cache_bytes = counts.get(f"{prefix}active_file", 0) + counts.get(f"{prefix}inactive_file", 0)
    free_bytes = max(limit_bytes - usage_bytes + min(cache_bytes, usage_bytes), 0)
    return Headroom(free_bytes, f"{folder / limit_name} = {limit_bytes}")


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The memory cgroups of this process, innermost first, as (folder, 1 or 2)."""
    paths: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    for line in _lines(root / "proc/self/mountinfo"):
        # id parent device root mount-point options [tags...] - type source super-options
        left, _, right = line.partition(" - ")
        mount_root, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version not in paths:
            continue
        group = Path(paths.pop(version))  # the first mount is enough
        mount = root / mount_point.lstrip("/")
        # With a private cgroup namespace, or a part mounted alone, the path may not lie below the mounted root: then
        # the mount point is the innermost that can be seen.
        inner = group.relative_to(mount_root) if group.is_relative_to(mount_root) else Path()
        if ".." in inner.parts:
            inner = Path()
        for part in (inner, *inner.parents):
            yield mount / part, version


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no number ("max")."""
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of ``name number ...``."""
    table: dict[str, int] = {}
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            table[words[0]] = int(words[1])
    return table
