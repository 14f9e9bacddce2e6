"""Checks of memory: /dev/shm against the budget, page-locking by trying it, and what the cgroup leaves."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ipc.messages import StatsReply
from shm.headroom import memory_headroom
from shm.janitor import list_segments
from stratad.config import ConfigError, load_config
from stratad.ctl.connection import Target, paths_of
from stratad.ctl.doctor_daemon import owner
from stratad.ctl.findings import Check, State
from stratad.ctl.output import JsonObject, human_bytes
from stratad.paths import SYSTEM_RUN_DIR, SYSTEM_STATE_DIR, PathError

SHM: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies
MEMLOCK_TRY_BYTES: Final = 64 * 1024 * 1024
_MEMLOCK_TIMEOUT_S: Final = 20.0
_MEMLOCK_FIX: Final = "give the daemon CAP_IPC_LOCK (AmbientCapabilities= in its unit) or a larger limit (`ulimit -l`)"
_CAP_IPC_LOCK: Final = 1 << 14
_CAPABILITIES: Final = re.compile(r"^CapEff:\s+([0-9a-f]+)$", re.MULTILINE)
_LOCKED_LIMIT: Final = re.compile(r"^Max locked memory\s+(unlimited|[0-9]+)", re.MULTILINE)
# Exit status 0: locked; 1: refused, the reason on stdout. Tried in a process of its own, which takes the pages along.
_MEMLOCK_PROBE: Final = """
import ctypes, mmap, os, sys
size = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
if libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(size)) != 0:
    print(os.strerror(ctypes.get_errno()))
    sys.exit(1)
"""


def shared_memory(budget_bytes: int | None, held_bytes: int, shm: Path = SHM) -> Check:
    """Whether /dev/shm can hold the budget; `held_bytes` of it are already in our own segments."""
    try:
        status = os.statvfs(shm)
    except OSError as exc:
        fix = "mount a tmpfs at /dev/shm"
        return Check("shm", State.FAIL, f"{shm} cannot be used: {exc.strerror}", fix)
    size_bytes = status.f_blocks * status.f_frsize
    free_bytes = status.f_bavail * status.f_frsize
    needed_bytes = 0 if budget_bytes is None else budget_bytes
    wanted = "chosen by the daemon" if budget_bytes is None else human_bytes(budget_bytes)
    text = f"{shm}: {human_bytes(free_bytes)} of {human_bytes(size_bytes)} free, budget {wanted}"
    if held_bytes:
        text += f", {human_bytes(held_bytes)} held"
    fits = free_bytes + held_bytes >= needed_bytes
    size_needed_bytes = needed_bytes + size_bytes - free_bytes - held_bytes
    fix = f"`mount -o remount,size={size_needed_bytes} {shm}`, or lower ram.budget_bytes"
    return Check(
        "shm",
        State.OK if fits else State.FAIL,
        text,
        "" if fits else fix,
        {"size_bytes": size_bytes, "free_bytes": free_bytes, "budget_bytes": budget_bytes, "held_bytes": held_bytes},
    )


def page_lock(*, needed: bool, try_bytes: int = MEMLOCK_TRY_BYTES) -> Check:
    """Whether memory can really be locked: a capability can lift the limit, so reading the limit tells nothing.

    `needed` says that a GPU is there; `cpu` devices lock nothing.
    """
    refused = try_page_lock(try_bytes)
    if not refused:
        return Check("memlock", State.OK, f"{human_bytes(try_bytes)} can be page-locked")
    return Check(
        "memlock",
        State.FAIL if needed else State.WARN,
        f"{human_bytes(try_bytes)} cannot be page-locked: {refused}" + ("" if needed else " (only GPUs need it)"),
        _MEMLOCK_FIX,
    )


def page_lock_of(pid: int, *, needed: bool, root: Path = Path("/")) -> Check:
    """Whether a daemon of another user may lock memory: not to be tried from here, so by its rights and its limit."""
    folder = root / f"proc/{pid}"
    try:
        capabilities = _CAPABILITIES.search((folder / "status").read_text())
        limit = _LOCKED_LIMIT.search((folder / "limits").read_text())
    except OSError:
        return Check("memlock", State.OK, f"what pid {pid} may page-lock cannot be seen")
    if capabilities is not None and int(capabilities[1], 16) & _CAP_IPC_LOCK:
        return Check("memlock", State.OK, f"the daemon (pid {pid}) may page-lock: it has CAP_IPC_LOCK")
    if limit is None or limit[1] == "unlimited":
        return Check("memlock", State.OK, f"the daemon (pid {pid}) may page-lock without a limit")
    return Check(
        "memlock",
        State.FAIL if needed else State.WARN,
        f"the daemon (pid {pid}) may page-lock {human_bytes(int(limit[1]))}"
        + ("" if needed else " (only GPUs need it)"),
        _MEMLOCK_FIX,
    )


def try_page_lock(try_bytes: int) -> str:
    """Lock and release that much in another process; empty text where it worked, else the reason."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _MEMLOCK_PROBE, str(try_bytes)],
            capture_output=True,
            text=True,
            timeout=_MEMLOCK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_MEMLOCK_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"exit status {done.returncode}"


def headroom(budget_bytes: int | None, held_bytes: int, root: Path = Path("/")) -> Check:
    """Whether the host and our cgroups leave room for what of the budget is not held yet."""
    room = memory_headroom(root)
    text = f"{human_bytes(room.free_bytes)} may still be taken (bound by {room.limited_by})"
    missing_bytes = 0 if budget_bytes is None else budget_bytes - held_bytes - room.free_bytes
    data: JsonObject = {"free_bytes": room.free_bytes, "limited_by": room.limited_by}
    if missing_bytes <= 0:
        return Check("headroom", State.OK, text, data=data)
    return Check(
        "headroom",
        State.FAIL,
        f"{text}, the budget needs {human_bytes(missing_bytes)} more",
        "lower ram.budget_bytes, or raise that limit",
        data,
    )


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether a GPU's kernel driver is loaded."""
    return (root / "proc/driver/nvidia/gpus").is_dir() or (root / "dev/kfd").exists()


def memory(target: Target, config_file: Path | None, stats: StatsReply | None) -> Iterator[Check]:
    """All checks of memory, against the budget of the running daemon or, with none, of the configuration.

    A file that was named is always examined: the next daemon is to start with it.
    """
    budget_bytes: int | None = None
    if stats is None or config_file is not None:
        try:
            budget_bytes = configured_budget_bytes(target, config_file)
        except ConfigError as exc:
            yield Check("configuration", State.FAIL, str(exc), "mend it; `stratad --print-config` shows every setting")
        else:
            if config_file is not None:
                yield Check("configuration", State.OK, f"{config_file} can be used")
    if stats is not None:
        budget_bytes = stats.budget_bytes
    held_bytes = sum(segment.size_bytes for segment in list_segments(target.instance))
    yield shared_memory(budget_bytes, held_bytes)
    daemon = owner(target)
    if daemon.uid == os.geteuid():
        yield page_lock(needed=has_gpu())
    else:
        yield page_lock_of(daemon.pid, needed=has_gpu())
    yield headroom(budget_bytes, held_bytes)


def configured_budget_bytes(target: Target, config_file: Path | None) -> int | None:
    """The budget that a daemon of this target would have; None where it chooses by what is there.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    argv = ["--instance", target.instance]
    environ: Mapping[str, str] = os.environ
    if target.run_dir is not None:
        argv += ["--run-dir", str(target.run_dir.absolute())]
    else:
        with contextlib.suppress(PathError):  # there is no daemon to be asked: then the configuration must name all
            environ = found_environ(paths_of(target).directory.parent, environ)
    if config_file is not None:
        argv += ["--config", str(config_file)]
    budget = load_config(argv, environ).ram.budget_bytes
    return None if budget == "auto" else budget


def found_environ(run_dir: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a daemon whose run directory was found: what it has no setting for it does not lack.

    Only a daemon of one's own would need XDG_RUNTIME_DIR, say; systemd gives the service its directories.
    """
    filled = {"RUNTIME_DIRECTORY": str(run_dir)}
    if run_dir == SYSTEM_RUN_DIR:
        filled["STATE_DIRECTORY"] = str(SYSTEM_STATE_DIR)
    return {**filled, **{name: value for name, value in environ.items() if value or name not in filled}}
