"""The daemon that a benchmark measures: one of its own, started here and gone afterwards, or one that runs already."""

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from ipc.listening import listens
from stratad.client import Client
from stratad.ctl.connection import Target, check_same_build
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError
from stratad.errors import DeadlineExceeded
from stratad.paths import socket_paths
from stratad.version import package_dir, package_hash

_HELLO_TIMEOUT_S: Final = 20.0
# A GPU worker imports torch, then page-locks its shuttles at 70 to 400 ms a GiB.
_WORKERS_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 15.0
# One image over a slow link, with all the room that a busy host needs.
_CALL_DEADLINE_S: Final = 120.0
# Short enough not to blur a start of some hundred milliseconds, long enough not to take its CPU.
_RETRY_S: Final = 0.001
_STATS_RETRY_S: Final = 0.01
_PR_SET_PDEATHSIG: Final = 1
_LOG_TAIL_LINES: Final = 20
_SHM: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies
_numbers: Final = itertools.count()
_libc: Final = ctypes.CDLL(None)  # loaded here: between fork and exec there is only the one call


@dataclass(frozen=True)
class StartTimes:
    """Seconds from exec, and the supervisor's resident memory once every worker was ready and nothing was stored."""

    hello_s: float
    workers_s: float
    supervisor_rss_bytes: int


class PrivateDaemon:
    """A daemon with its own run and state directory; use as a context manager."""

    def __init__(self, folder: Path, instance: str, settings: Mapping[str, str]) -> None:
        self.run_dir: Final = folder / "run"
        self.state_dir: Final = folder / "state"
        self.instance: Final = instance
        self._settings = settings
        self._folder: Final = folder
        self._process, self._started_s = self._launch()

    @classmethod
    def start(cls, settings: Mapping[str, str]) -> Self:
        """Execute ``python -m stratad`` with the files that this process runs from. `settings` are dotted names."""
        folder = Path(tempfile.mkdtemp(prefix="stratad-bench-"))
        instance = f"bench{os.getpid()}x{next(_numbers)}"
        try:
            return cls(folder, instance, settings)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _launch(self) -> "tuple[subprocess.Popen[bytes], float]":
        """A process of it, and when it was started."""
        command = [sys.executable, "-P", "-m", "stratad", *_arguments(self._folder, self.instance, self._settings)]
        with self.log_path.open("ab") as log:
            started_s = time.perf_counter()
            # A session of its own: Ctrl-C is for us, who then stop it in order.
            process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread that forks is waited for by it
            )
        return process, started_s

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        return self._process.pid

    def kill_and_start(self) -> float:
        """SIGKILL the supervisor alone, and start the next one once it is gone; the `perf_counter` of the kill."""
        killed_s = time.perf_counter()
        self._process.kill()
        self._process.wait()
        self._process, self._started_s = self._launch()
        return killed_s

    def start_next(self, settings: Mapping[str, str]) -> None:
        """Execute the next daemon of the instance, on the same directories, after this one has ended."""
        assert self._process.poll() is not None
        self._settings = settings
        self._process, self._started_s = self._launch()

    @property
    def ended(self) -> bool:
        """Whether that process has ended."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def wait_ended(self, timeout_s: float) -> int | None:
        """Exit status of the process (minus the signal's number), or None where it goes on."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def log_path(self) -> Path:
        """What the daemon wrote; removed with it."""
        return _log_path(self._folder)

    def connect(self, call_deadline_s: float = _CALL_DEADLINE_S) -> tuple[Client, StartTimes]:
        """Wait for the first accepted handshake, then for every worker. Calls of the client may take `call_deadline_s`.

        Raises:
            CommandError: the daemon ended, did not come up in time, or a worker failed.
        """
        client = self.first_client(call_deadline_s)
        hello_s = time.perf_counter() - self._started_s
        try:
            check_same_build(client.welcome, package_hash())
            workers_s = self._wait_for_workers(client)
            rss_bytes = int(psutil.Process(self.pid).memory_info().rss)
        except BaseException:
            client.close()
            raise
        return client, StartTimes(hello_s, workers_s, rss_bytes)

    def wait_for_socket(self) -> None:
        """Wait until it listens for clients.

        Raises:
            CommandError: it ended, or did not come up in time.
        """
        until_s = self._started_s + _HELLO_TIMEOUT_S
        path = socket_paths(self.run_dir, self.instance).life
        while not listens(path, socket.SOCK_SEQPACKET):
            if self._process.poll() is not None or time.perf_counter() > until_s:
                raise self._failed("did not accept a client")
            time.sleep(_RETRY_S)

    def first_client(self, call_deadline_s: float = _CALL_DEADLINE_S) -> Client:
        """Connect as soon as the socket is there; the client's own pauses between attempts would blur the time.

        Raises:
            CommandError: the daemon ended, or did not come up in time.
        """
        self.wait_for_socket()
        try:
            return Client.connect(self.run_dir, self.instance, deadline_s=call_deadline_s, name="stratactl bench")
        except DeadlineExceeded as exc:
            raise self._failed("did not accept a client") from exc

    def _wait_for_workers(self, client: Client) -> float:
        until_s = self._started_s + _WORKERS_TIMEOUT_S
        while True:
            workers = client.stats().workers
            if workers and all(worker.state == "ready" for worker in workers):
                return time.perf_counter() - self._started_s
            if any(worker.state == "failed" for worker in workers):
                raise self._failed("; ".join(f"{worker.worker}: {worker.detail}" for worker in workers))
            if time.perf_counter() > until_s:
                raise self._failed("has workers that are not ready")
            time.sleep(_STATS_RETRY_S)

    def _failed(self, what: str) -> CommandError:
        text = self.log_path.read_text(errors="replace").splitlines()
        for line in text[-_LOG_TAIL_LINES:]:
            print(f"  | {line}", file=sys.stderr)
        return CommandError(
            ExitCode.FAILED, "worker_unavailable", f"the benchmark's daemon {what}", "its last log lines stand above"
        )

    def close(self) -> None:
        """Stop it (SIGTERM, then SIGKILL), and remove its folder and what it may have left in /dev/shm. Idempotent."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        except BaseException:  # a second Ctrl-C: nothing may stay behind all the same
            self.kill()
            raise
        finally:
            for path in _SHM.glob(f"stratad.{self.instance}.*"):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _log_path(folder: Path) -> Path:
    return folder / "log"


def _end_with_parent() -> None:
    """In the new process: have the kernel send SIGTERM when we are gone, however that came."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _arguments(folder: Path, instance: str, settings: Mapping[str, str]) -> list[str]:
    """Command line of the daemon; `settings` are dotted names of the configuration. What it holds ends with it, unless
    they say otherwise.
    """
    places = {
        "daemon.instance": instance,
        "daemon.run_dir": f"{folder}/run",
        "daemon.state_dir": f"{folder}/state",
    }
    return [
        part
        for name, value in {"ram.keep": "false", **settings, **places}.items()
        for part in ("--set", f"{name}={value}")
    ]


def _environment() -> dict[str, str]:
    """Our environment, with the folder that holds our packages first on the import path and no other settings."""
    home = package_dir("stratad")
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STRATA")}
    if home is not None:
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(home.parent), inherited) if part)
    return environment


def attached(target: Target) -> Client:
    """A client of the daemon that runs already.

    Raises:
        CommandError: it is another build.
        StratadError: it cannot be reached.
    """
    client = Client.connect(target.run_dir, target.instance, deadline_s=target.timeout_s)
    try:
        check_same_build(client.welcome, package_hash())
    except BaseException:
        client.close()
        raise
    return client
