"""The way from a stratactl command to the daemon: connect, refuse another build, and say what to do when it fails."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from ipc.listening import listens
from ipc.messages import (
    FaultInfo,
    Faults,
    ImageDetail,
    ImageInfo,
    MemoryReply,
    StatsReply,
    Traced,
    Welcome,
    WorkerOrdered,
)
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError, JsonObject
from stratad.errors import DeadlineExceeded, Lost, ProtocolError, StratadError
from stratad.paths import PathError, SocketPaths, find_run_dir, socket_paths
from stratad.permission import barrier

# The client keeps every deadline itself; the alarm is for what it cannot interrupt, so it comes a little later.
_ALARM_GRACE_S: Final = 0.5
_START_FIX: Final = (
    "start it with `stratad`, or as a service with `systemctl start stratad`, or name the right one with --run-dir and "
    "--instance"
)


class DaemonClient(Protocol):
    """The part of `stratad.client.Client` that stratactl stands on."""

    @property
    def welcome(self) -> Welcome:
        """The daemon's answer to the handshake."""
        ...

    def stats(self) -> StatsReply:
        """State of the daemon."""
        ...

    def memory(self, *, history: int = 0) -> MemoryReply:
        """What is resident, and what of it is explained."""
        ...

    def trace(self, *, limit: int = 20, op: str = "", slowest: bool = False) -> Traced:
        """Where the time of the latest operations went, or of the slowest."""
        ...

    def set_trace(self, *, on: bool) -> Traced:
        """Begin to trace operations, or end it."""
        ...

    def list_images(self, namespace: str = "") -> Sequence[ImageInfo]:
        """Published images."""
        ...

    def show(self, namespace: str, conversation: str, *, image_id: int = 0) -> ImageDetail:
        """The latest image of a conversation, or the one that is named, with its chunks."""
        ...

    def drop(self, namespace: str, conversation: str, *, force: bool = False, image_id: int = 0) -> int:
        """Drop the images of a conversation, or the one that is named; returns how many went."""
        ...

    def pin(self, namespace: str, conversation: str, *, pinned: bool = True, image_id: int = 0) -> None:
        """Pin or unpin the images of a conversation, or the one that is named."""
        ...

    def clear(self, namespace: str) -> int:
        """Drop what is not pinned; returns how many went."""
        ...

    def arm_fault(self, op: str, stage: int, kind: str, *, at: int = 1, engine_id: int = 0) -> FaultInfo:
        """Arm one fault."""
        ...

    def faults(self) -> Faults:
        """Armed faults, and the fault points that were passed."""
        ...

    def disarm_fault(self, fault: int = 0) -> int:
        """Take back one fault, or all; returns how many."""
        ...

    def lift(self, namespace: str, conversation: str = "", *, image_id: int = 0) -> int:
        """Lift quarantines; returns how many there were."""
        ...

    def restart_worker(self, worker: str) -> WorkerOrdered:
        """End a worker's process and start the next."""
        ...

    def reset_worker(self, worker: str, *, force: bool = False) -> WorkerOrdered:
        """The same with an empty arena."""
        ...

    def close(self) -> None:
        """Leave; idempotent."""
        ...


@dataclass(frozen=True)
class Target:
    """Which daemon, and how long it may take to answer."""

    run_dir: Path | None
    instance: str
    timeout_s: float


Connect = Callable[[Target], DaemonClient]


class _AlarmError(Exception):
    """The alarm rang while something did not come back by itself."""


def paths_of(target: Target) -> SocketPaths:
    """The sockets of the target.

    Raises:
        PathError: no such instance can be, or the environment names no run directory.
    """
    run_dir = target.run_dir or find_run_dir(os.environ, os.geteuid(), target.instance)
    return socket_paths(run_dir.absolute(), target.instance)


def connect_client(target: Target) -> DaemonClient:
    """The real client, imported only now: commands that need no daemon must not pay for ZeroMQ.

    The client would wait for a daemon to come; a person wants to be told at once that there is none.

    Raises:
        CommandError: there is no socket, we may not get to it, or nobody listens at it.
        StratadError: the daemon did not take us.
    """
    try:
        paths = paths_of(target)
    except PathError as exc:
        raise CommandError(
            ExitCode.USAGE, "bad_value", str(exc), "name the daemon with --run-dir and --instance"
        ) from exc
    path = paths.life
    if barred := barrier(path):
        raise CommandError(ExitCode.FAILED, "not_permitted", barred.what, barred.fix)
    if not path.exists():
        raise CommandError(ExitCode.NO_DAEMON, "lost", f"no daemon: there is no {path}", _START_FIX)
    if listens(path, socket.SOCK_SEQPACKET) is False:
        what = f"no daemon: nobody listens at {path}, which an earlier one left"
        raise CommandError(ExitCode.NO_DAEMON, "lost", what, _START_FIX)
    from stratad.client import Client  # noqa: PLC0415 - see the docstring

    return Client.connect(paths.directory.parent, target.instance, deadline_s=target.timeout_s, name="stratactl")


@contextmanager
def connected(target: Target, connect: Connect, own_hash: str) -> Iterator[DaemonClient]:
    """A connected client of a daemon of our own build.

    Raises:
        CommandError: whatever went wrong between here and the end of the block, with its exit code and what to do.
    """
    try:
        with _alarm(target.timeout_s + _ALARM_GRACE_S):
            client = connect(target)
            try:
                check_same_build(client.welcome, own_hash)
                yield client
            finally:
                client.close()
    except _AlarmError:
        raise CommandError(
            ExitCode.NO_DAEMON, "deadline", f"no answer within {target.timeout_s:g} s", _slow_fix(target)
        ) from None
    except StratadError as exc:
        raise translated(exc, target) from exc
    except OSError as exc:
        raise _from_os_error(exc) from exc


def check_same_build(welcome: Welcome, own_hash: str) -> None:
    """Refuse a daemon that runs other source files than ours.

    Raises:
        CommandError: with exit code 2.
    """
    if welcome.package_hash != own_hash:
        raise CommandError(
            ExitCode.USAGE,
            "wrong_build",
            f"the running daemon (pid {welcome.pid}) is another build than this stratactl",
            "restart the daemon, or run the stratactl that was installed with it",
            {"daemon_package_hash": welcome.package_hash, "package_hash": own_hash, "daemon_commit": welcome.commit},
        )


def translated(exc: StratadError, target: Target) -> CommandError:
    """What an error of the client means for the one who typed the command."""
    data: JsonObject = {"detail": dict(exc.detail)}
    if exc.stage >= 0:
        data["stage"] = exc.stage
    if isinstance(exc, Lost):
        return CommandError(ExitCode.NO_DAEMON, exc.code, exc.message, _START_FIX, data)
    if isinstance(exc, DeadlineExceeded):
        return CommandError(ExitCode.NO_DAEMON, exc.code, exc.message, _slow_fix(target), data)
    if isinstance(exc, ProtocolError):
        fix = "restart the daemon, or run the stratactl that was installed with it"
        return CommandError(ExitCode.USAGE, exc.code, exc.message, fix, data)
    if exc.code == "not_permitted" and exc.detail:  # said before the hello: this user may not even ask
        return CommandError(ExitCode.FAILED, exc.code, exc.message, _ADMIT_FIX.format(uid=os.geteuid()), data)
    return CommandError(ExitCode.FAILED, exc.code, exc.message, _FIXES.get(exc.code, ""), data)


_ADMIT_FIX: Final = (
    "have the administrator set STRATAD_ACCESS_USERS={uid} (or access.users in its file) and restart "
    "the daemon, or run as one of those who are allowed"
)
_FIXES: Final[dict[str, str]] = {
    "unknown_conversation": "see the published ones with `stratactl list`",
    "unknown_image": "see the published ones with `stratactl list`",
    "pinned": "unpin it first with `stratactl pin --off`, or drop it with --force, or only another one with --image",
    "image_busy": "try again when the operation in flight has ended (`stratactl status` shows it)",
    "not_permitted": "run stratactl as the user whose engine owns the namespace, or as an admin of the daemon",
    "faults_off": "start a daemon for tests with --set testing.allow_faults=true",
    "arena_in_use": "see them with `stratactl list`; restart the worker, which keeps them, or reset it with --force",
    "worker_unavailable": "look at `stratactl status` and at the kernel's log: only the end of that process, or of the "
    "host, gives the device back",
    "stopping": "the daemon is stopping: wait for the next one",
}


def _slow_fix(target: Target) -> str:
    return (
        f"the daemon is there but silent: look at its log, or wait longer with --timeout (now {target.timeout_s:g} s)"
    )


def _from_os_error(exc: OSError) -> CommandError:
    if exc.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return CommandError(
            ExitCode.NO_DAEMON, "lost", f"no daemon listens at {exc.filename or 'the socket'}", _START_FIX
        )
    if exc.errno in (errno.EACCES, errno.EPERM):
        barred = barrier(Path(exc.filename).absolute()) if isinstance(exc.filename, str) else None
        if barred is not None:
            return CommandError(ExitCode.FAILED, "not_permitted", barred.what, barred.fix)
        fix = f"run as a member of the run directory's group (now uid {os.geteuid()})"
        return CommandError(ExitCode.FAILED, "not_permitted", str(exc), fix)
    return CommandError(ExitCode.FAILED, "internal", str(exc), "report it")


@contextmanager
def _alarm(after_s: float) -> Iterator[None]:
    """Raise `_AlarmError` in this block after `after_s` seconds, where signals can be had (the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
