"""Which process is that, and is it gone: identity that survives the reuse of pids, and proof of death.

A process is named by its pid and its start time. Both must have been seen in the pid namespace of the caller; pid 0
(what the kernel reports for a process of another namespace) and start time 0 stand for "cannot be proved".
"""

import errno
import functools
import os
import select
from pathlib import Path
from typing import Final, NamedTuple

# In /proc/<pid>/stat, counted after the name's closing bracket (state is number 0).
_START_FIELD: Final = 19


class ProcessIdentity(NamedTuple):
    """A process for good: `start_ticks` are clock ticks between boot and its start."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int:
    """Start time of a process, in clock ticks after boot.

    Raises:
        ProcessLookupError: there is no such process (or /proc hides it).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as exc:  # the second: it died between open and read
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from exc
    # The name may hold anything, brackets and blanks too: count from the last bracket.
    return int(stat[stat.rindex(b")") + 2 :].split()[_START_FIELD])


def own_identity() -> ProcessIdentity:
    """The calling process."""
    return ProcessIdentity(os.getpid(), start_ticks(os.getpid()))


def is_gone(pid: int, start_ticks_then: int) -> bool:
    """Whether a process is proven gone: its pid has vanished or belongs to a later process, or it is a zombie.

    A zombie counts only once all its threads have ended: a main thread may be dead while others still write. False
    means "alive or not provable".
    """
    if pid <= 0 or start_ticks_then <= 0:
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError as exc:
        # The number now belongs to a thread of a later process (EINVAL, on newer kernels ENOENT), or there is no pidfd
        # to be had: the start time can still tell, if only in one direction.
        return exc.errno in (errno.EINVAL, errno.ENOENT, errno.ENOSYS) and _is_other(pid, start_ticks_then)
    try:
        return pidfd_ended(pidfd) or _is_other(pid, start_ticks_then)
    finally:
        os.close(pidfd)


def open_pidfd(pid: int, start_ticks_then: int) -> int:
    """A pidfd (close-on-exec, the caller closes it) of exactly this process, perhaps a zombie by now.

    Raises:
        ProcessLookupError: it is gone.
        OSError: no descriptor to be had.
    """
    pidfd = os.pidfd_open(pid)
    # Read after the open: if the number was reused before the open, the start time tells.
    try:
        now = start_ticks(pid)
    except OSError:  # gone, or there was a descriptor for the pidfd but none to read /proc with
        os.close(pidfd)
        raise
    if now != start_ticks_then:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is a later one (started at tick {now})")
    return pidfd


def pidfd_ended(pidfd: int) -> bool:
    """Whether every thread of the pidfd's process has ended (reaped or not)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


@functools.cache
def boot_id() -> bytes:
    """16 bytes that are new at each boot. Read once: a process that has run out of descriptors needs them too."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", ""))


def _is_other(pid: int, start_ticks_then: int) -> bool:
    try:
        return start_ticks(pid) != start_ticks_then
    except ProcessLookupError:
        return False  # /proc may hide it; a pid that has vanished is seen by pidfd_open
