"""Checks of the files in /dev/shm: segments that are missing, others' under our names, leftovers of dead daemons."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ipc.messages import StatsReply
from shm.header import split_segment_name
from shm.shuttle import BLOCK_BYTES, MOUNT
from stratad.ctl.connection import Target
from stratad.ctl.doctor_daemon import Owner, lock_holder, owner
from stratad.ctl.findings import Check, State
from stratad.ctl.output import JsonObject, human_bytes
from stratad.open_files import OWN, PER_CLIENT, POOLS_PER_CLIENT

_LOCKS: Final = Path("/proc/locks")
_OPEN_FILES: Final = re.compile(r"^Max open files\s+([0-9]+)\s+([0-9]+)", re.MULTILINE)
# Above this share of the limit it is time to raise it: clients come with a descriptor or two for each stage.
_NEARLY: Final = 0.8
_REMOVED_FIX: Final = (
    "the images live until their worker ends: see what cleans up /dev/shm (RemoveIPC= of logind or of a unit, a timer)"
)


def segments(target: Target, stats: StatsReply | None) -> Iterator[Check]:
    """All checks of files in /dev/shm, and of the daemon's open files."""
    daemon = owner(target)
    if stats is not None:
        yield missing(target.instance, stats, daemon)
    yield foreign(target.instance, daemon.uid)
    yield orphans(target.instance)
    yield open_files(daemon.pid if stats is not None else os.getpid(), running=stats is not None)


def missing(instance: str, stats: StatsReply, daemon: Owner, shm: Path = MOUNT, root: Path = Path("/")) -> Check:
    """Whether every segment of the daemon still has its name: without it the next worker cannot have it."""
    if not _same_folder(root / f"proc/{daemon.pid}/root/dev/shm", shm):
        return Check("segments", State.OK, "the daemon's /dev/shm cannot be seen from here: it may be another one")
    named: dict[str, int] = {}
    for name, status in _entries(shm, f"stratad.{instance}."):
        parts = split_segment_name(f"/{name}")
        if parts is not None and status.st_uid == daemon.uid and stat.S_ISREG(status.st_mode):
            named[parts[1]] = named.get(parts[1], 0) + 1
    lost = {w.worker: w.shuttles - named.get(w.worker.replace(":", "_"), 0) for w in stats.workers}
    gone = {worker: count for worker, count in lost.items() if count > 0}
    total = sum(worker.shuttles for worker in stats.workers)
    if gone:
        text = ", ".join(f"{count} of {worker}" for worker, count in gone.items())
        return Check("segments", State.FAIL, f"somebody removed segments from {shm}: {text}", _REMOVED_FIX)
    return Check("segments", State.OK, f"all {total} segments are in {shm}")


def foreign(instance: str, uid: int, shm: Path = MOUNT) -> Check:
    """Whether anything but plain files of the daemon's user has a name of this instance."""
    found: list[str] = []
    for name, status in _entries(shm, f"stratad.{instance}."):
        if status.st_uid != uid or not stat.S_ISREG(status.st_mode):
            found.append(f"{name} (uid {status.st_uid}, mode {status.st_mode:o})")
    if not found:
        return Check("names", State.OK, f"nobody else has names of instance {instance} in {shm}")
    text = f"others have names of instance {instance} in {shm}: {', '.join(found[:4])}{', ...' if found[4:] else ''}"
    return Check("names", State.WARN, text, "remove them, or choose another --instance: new segments pass them over")


def orphans(instance: str, shm: Path = MOUNT, locks: Path = _LOCKS) -> Check:
    """Segments of other instances of this user whose lock nobody is seen to hold (beside a journal, they are kept for
    the next daemon). They are told, never removed: only who has the lock has the proof that they are orphaned.
    """
    held = locks.read_text()
    found: dict[str, int] = {}
    kept: dict[str, int] = {}
    for name, status in _entries(shm, "stratad."):
        parts = split_segment_name(f"/{name}")
        if parts is None or parts[0] == instance or status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            continue
        try:
            lock = (shm / f"stratad.{parts[0]}.lock").stat()
        except FileNotFoundError:
            pass
        else:
            if lock_holder(held, lock.st_dev, lock.st_ino) is not None:
                continue
        book = found if not (shm / f"stratad.{parts[0]}.journal").exists() else kept
        book[parts[0]] = book.get(parts[0], 0) + status.st_blocks * BLOCK_BYTES
    data: JsonObject = {"bytes": dict(found), "kept_bytes": dict(kept)}
    if not found:
        told = f"; kept for the next daemon: {_listed(kept)}" if kept else ""
        return Check("orphans", State.OK, f"no segments of dead daemons in {shm}{told}", data=data)
    fix = "start a daemon of those instances, which takes over what it can use and removes the rest, or "
    fix += "`stratactl --instance NAME purge --yes`"
    return Check("orphans", State.WARN, f"segments without a daemon and a journal: {_listed(found)}", fix, data)


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{human_bytes(size)} of instance {name}" for name, size in sizes.items())


def open_files(pid: int, *, running: bool, root: Path = Path("/")) -> Check:
    """Whether the limit of open files leaves room; for a daemon that does not run yet, whether it could start."""
    folder = root / f"proc/{pid}"
    try:
        limits = _OPEN_FILES.search((folder / "limits").read_text())
        used = len(os.listdir(folder / "fd"))  # noqa: PTH208 - a process of another user shows its limits only
    except OSError:
        limits, used = None, 0
    if limits is None:
        return Check("open files", State.OK, f"what pid {pid} has open cannot be seen")
    soft, hard = int(limits[1]), int(limits[2])
    least = OWN + PER_CLIENT + POOLS_PER_CLIENT
    fix = "raise LimitNOFILE= of the unit, or `ulimit -Hn`"
    if not running:
        state = State.OK if hard >= least else State.FAIL
        return Check("open files", state, f"{hard} files may be open, a daemon needs at least {least}", fix)
    state = State.WARN if used > soft * _NEARLY else State.OK
    return Check("open files", state, f"the daemon has {used} of {soft} files open", fix, {"used": used, "limit": soft})


def _entries(shm: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """What there is under names that begin so; files come and go while they are listed."""
    for entry in sorted(shm.iterdir()):
        if entry.name.startswith(prefix):
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.lstat()


def _same_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
