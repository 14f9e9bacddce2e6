"""Checks of the run directory's sockets, and of the daemon behind them."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ipc.listening import listener, listens
from ipc.messages import StatsReply
from ipc.rundir import RunDirError, check_socket_path
from shm.shuttle import MOUNT
from stratad.ctl.connection import Connect, DaemonClient, Target, connected, paths_of
from stratad.ctl.findings import Check, State
from stratad.ctl.output import CommandError, JsonObject, human_age
from stratad.paths import PathError, SocketPaths
from stratad.permission import barrier
from stratad.switches import ASYNC
from stratad.version import package_hash

_LOCK_WORDS: Final = 8
_LOOK_AGAIN_S: Final = 0.1
_TRUST_FIX: Final = "`chown` it to the daemon's user and `chmod 0750` it, or choose another with --run-dir"
_OTHERS_FIX: Final = "start that user's daemon (`systemctl start stratad` where it is the service's)"


def sockets(target: Target) -> Iterator[Check]:
    """Path length, owner and mode of the run directory, and sockets that nobody listens at."""
    try:
        paths = paths_of(target)
        check_socket_path(paths.client)
    except (PathError, RunDirError) as exc:
        yield Check("sockets", State.FAIL, str(exc), "choose another one with --run-dir or --instance")
        return
    if barred := barrier(paths.life):
        yield Check("sockets", State.FAIL, barred.what, barred.fix)
        return
    answers = listens(paths.life, socket.SOCK_SEQPACKET) is True
    yield instance_lock(target.instance, answers=answers)
    if not paths.directory.exists():
        yield Check("sockets", State.OK, f"{paths.directory} is not there: the daemon makes it at its start")
        return
    yield directory(paths.directory, answers=answers)
    yield from _stale(paths)


class Owner(NamedTuple):
    """Whose daemon is examined: one that listens (`pid` 0 if it lives in another pid namespace), else our own to be."""

    pid: int
    uid: int


def owner(target: Target) -> Owner:
    """Pid and uid of the daemon of the target; of ourselves where none can be asked."""
    return _asked(target) or Owner(os.getpid(), os.geteuid())


def daemon_pid(target: Target) -> int | None:
    """Pid of the daemon of the target; None where none can be asked."""
    found = _asked(target)
    return None if found is None else found.pid


def _asked(target: Target) -> Owner | None:
    try:
        found = listener(paths_of(target).life, socket.SOCK_SEQPACKET)
    except PathError:
        found = None
    return None if found is None else Owner(*found)


def directory(folder: Path, *, answers: bool) -> Check:
    """Whether nobody but its owner may put sockets into a run directory, and we may use it.

    `answers` says whether somebody listens there: then a daemon of another user has let us in.
    """
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    text = f"{folder} belongs to uid {status.st_uid}, mode {mode:04o}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Check("run directory", State.FAIL, f"{text}: others may write to it", _TRUST_FIX)
    if status.st_uid not in (os.geteuid(), 0) and not answers:
        fix = f"{_OTHERS_FIX}, or choose another --run-dir"
        return Check("run directory", State.WARN, f"{text}: of another user, and no daemon listens", fix)
    return Check("run directory", State.OK, text)


def _stale(paths: SocketPaths) -> Iterator[Check]:
    """Sockets whose listener is gone: the next daemon replaces them, but clients meet them first."""
    kinds = {paths.life: socket.SOCK_SEQPACKET, paths.client: socket.SOCK_STREAM, paths.worker: socket.SOCK_STREAM}
    found = {path: listens(path, kind) for path, kind in kinds.items()}
    # One that is there but may not be tried: workers' sockets are for the daemon's own user alone.
    found = {path: answer for path, answer in found.items() if answer is not None or not path.exists()}
    stale = [path.name for path, answer in found.items() if answer is False]
    missing = [path.name for path, answer in found.items() if answer is None]
    if stale:
        text = f"nobody listens at {', '.join(stale)} in {paths.directory}: left by a daemon that died"
        yield Check("sockets", State.WARN, text, "start the daemon: it replaces them")
    elif missing and len(missing) < len(found):
        text = f"{', '.join(missing)} missing in {paths.directory}"
        yield Check("sockets", State.FAIL, text, "restart the daemon: somebody removed its sockets")
    elif missing:
        yield Check("sockets", State.OK, f"no sockets in {paths.directory}")
    else:
        yield Check("sockets", State.OK, f"all of {', '.join(path.name for path in found)} are listened at")


def instance_lock(instance: str, *, answers: bool, shm: Path = MOUNT, locks: Path = Path("/proc/locks")) -> Check:
    """Who holds the instance lock. It is looked up, never taken: a daemon that starts meanwhile must not meet us.

    `answers` says whether somebody listens at the instance's sockets: a daemon of another user may well serve us.
    """
    path = shm / f"stratad.{instance}.lock"
    try:
        status = path.stat()
    except FileNotFoundError:
        return Check("lock", State.OK, f"{path} is not there")
    if status.st_uid != os.geteuid() and not answers:
        fix = f"{_OTHERS_FIX}, or choose another --instance"
        return Check("lock", State.WARN, f"{path} belongs to uid {status.st_uid}", fix)
    holder = lock_holder(locks.read_text(), status.st_dev, status.st_ino)
    if holder is None:
        return Check("lock", State.OK, f"nobody holds {path}")
    if answers:
        return Check("lock", State.OK, f"pid {holder} holds {path}", data={"holder": holder})
    return Check(
        "lock",
        State.FAIL,
        f"pid {holder} holds {path} but no daemon answers for instance {instance}",
        f"see what pid {holder} does and whether it uses another run directory; end it if it hangs",
        {"holder": holder},
    )


def lock_holder(locks: str, device: int, inode: int) -> int | None:
    """Pid that holds a flock on a file, out of the text of /proc/locks; None where nobody does."""
    name = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for line in locks.splitlines():
        words = line.split()
        # number: FLOCK ADVISORY WRITE pid major:minor:inode start end; waiting ones have an arrow in second place.
        if len(words) == _LOCK_WORDS and words[1] == "FLOCK" and words[5] == name:
            return int(words[4])
    return None


def copies(stats: StatsReply | None) -> Iterator[Check]:
    """Whether the stages of an engine copy side by side. A switch that keeps them from it may be a remnant."""
    if stats is None or "copy.parallel" not in stats.settings:
        return
    note = stats.settings.get("copy.parallel_note", "")
    if stats.settings["copy.parallel"] == "true":
        yield Check("copies", State.OK, "stages copy side by side" + (f" ({note})" if note else ""))
        return
    by_switch = note.startswith(ASYNC)
    fix = f"unset {' and '.join(ASYNC)} for the daemon, or set STRATAD_COPY_PARALLEL=true, and restart it"
    text = "stages copy one after another" + (f": {note}" if note else "")
    yield Check("copies", State.WARN if by_switch else State.OK, text, fix if by_switch else "")


class DaemonFinding(NamedTuple):
    """What became of the attempt to ask the daemon; `stats` is None where none answered."""

    check: Check
    stats: StatsReply | None


def daemon(target: Target, connect: Connect) -> DaemonFinding:
    """Whether a daemon answers, and whether it runs the files that are installed here.

    One whose workers are still starting is given half of the time-out to get them ready.
    """
    try:
        paths = paths_of(target)
    except PathError as exc:
        return DaemonFinding(Check("daemon", State.FAIL, str(exc), "choose another --run-dir or --instance"), None)
    if barred := barrier(paths.life):
        what = f"whether one runs as instance {target.instance} cannot be seen: {barred.what}"
        return DaemonFinding(Check("daemon", State.WARN, what, barred.fix), None)
    if listens(paths.life, socket.SOCK_SEQPACKET) is not True:
        return DaemonFinding(Check("daemon", State.OK, f"no daemon runs as instance {target.instance}"), None)
    try:
        with connected(target, connect, package_hash()) as client:
            stats = _settled(client, time.monotonic() + target.timeout_s / 2)
    except CommandError as exc:
        return DaemonFinding(Check("daemon", State.FAIL, f"{exc.what} [{exc.code}]", exc.fix, exc.data), None)
    text = f"pid {stats.pid} answers, {stats.health}, up {human_age(stats.uptime_s)}, same build"
    state = State.OK if stats.health == "ok" else State.WARN
    fix = "" if state is State.OK else "see `stratactl status`"
    data: JsonObject = {"pid": stats.pid, "health": stats.health}
    return DaemonFinding(Check("daemon", state, text, fix, data), stats)


def _settled(client: DaemonClient, until_s: float) -> StatsReply:
    """The daemon's state, once no worker is on its way or the time is over."""
    stats = client.stats()
    while any(worker.state == "starting" for worker in stats.workers) and time.monotonic() < until_s:
        time.sleep(_LOOK_AGAIN_S)
        stats = client.stats()
    return stats
