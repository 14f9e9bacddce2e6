"""A real daemon in a process of its own, for tests."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from shm.shuttle import MOUNT
from stratad.client import Client
from tests.support.instances import fresh_instance
from tests.support.users import Runtime

START_S = 20.0
STOP_S = 20.0
SMALL_SETTINGS: Mapping[str, str] = {
    "ram.budget_bytes": "64MiB",
    "ram.shuttle_bytes": "4MiB",
    "restarts.backoff_first_s": "0.02",
    "ram.keep": "false",
}


class DaemonProcess:
    """A daemon with its own run and state directories. Leaves nothing behind: not in /dev/shm either.

    Args:
        devices: ``cpu:N``.
        settings: further ``section.key`` settings, over `SMALL_SETTINGS`.
        home_mode: of the directory that holds its run and state directories.
        run_dir_gid: group that is given the run directory before the start; -1: the daemon makes it.
        run_dir_mode: the mode that it then has.
        umask: under which it is started; -1: as it is here.
        uid: user (and group) that it runs as, with `runtime`; None: as we do.
        faults: ``{"cpu:0#1/copy_error": "2"}``: faults of workers (see `workers.faulty`), here only of generation 1.
        environ: more variables.
        stderr: a descriptor to log to, in place of the file.
        prefix: a command that executes the daemon's, in a namespace, say.
        forks: whether that command starts the daemon as its only child, and not in its own place.
        shm: where the daemon's /dev/shm is seen.
    """

    def __init__(
        self,
        devices: str = "cpu:2",
        settings: Mapping[str, str] | None = None,
        faults: Mapping[str, str] | None = None,
        instance: str | None = None,
        *,
        home_mode: int = 0o700,
        run_dir_gid: int = -1,
        run_dir_mode: int = 0o750,
        umask: int = -1,
        uid: int | None = None,
        runtime: Runtime | None = None,
        environ: Mapping[str, str] | None = None,
        stderr: int | None = None,
        prefix: Sequence[str] = (),
        forks: bool = False,
        shm: Path = MOUNT,
    ) -> None:
        self.instance = instance or fresh_instance()
        self.home = Path(tempfile.mkdtemp(prefix="stratad-test-"))
        self.home.chmod(home_mode)
        if uid is not None:
            os.chown(self.home, uid, uid)
        self.run_dir = self.home / "run"
        self.state_dir = self.home / "state"
        self.log_path = self.home / "log"
        self._settings = {**SMALL_SETTINGS, **(settings or {})}
        if faults:
            self._settings["testing.worker_faults"] = ",".join(f"{key}={when}" for key, when in faults.items())
        self._devices = devices
        self._umask = umask
        self._uid = uid
        self._runtime = runtime
        if run_dir_gid >= 0:
            self.run_dir.mkdir()
            os.chown(self.run_dir, -1, run_dir_gid)
            self.run_dir.chmod(run_dir_mode)
        self._environ = environ or {}
        self._stderr = stderr
        self._prefix = tuple(prefix)
        self._forks = forks
        self._shm = shm
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Pid of the supervisor, as it is seen from here."""
        assert self._process is not None
        if self._forks:
            return int(psutil.Process(self._process.pid).children()[0].pid)
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def command(self) -> list[str]:
        """The daemon's command line."""
        python = self._runtime.python if self._runtime else sys.executable
        command = [*self._prefix, python, "-P", "-m", "stratad", "--instance", self.instance]
        command += ["--run-dir", str(self.run_dir), "--state-dir", str(self.state_dir), "--devices", self._devices]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        return command

    def start(self, answers_within_s: float = START_S) -> Self:
        """Start it and wait until it answers."""
        self.launch()
        try:
            with self.client(deadline_s=answers_within_s):
                pass
        except BaseException:
            self.kill()
            raise
        return self

    def launch(self) -> None:
        """Start it and wait for nothing."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATA")}
        environ |= self._environ
        if self._runtime:
            environ |= self._runtime.environ
        groups: list[int] | None = None if self._uid is None else []
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stderr=log if self._stderr is None else self._stderr,
                stdin=subprocess.DEVNULL,
                env=environ,
                umask=self._umask,
                user=self._uid,
                group=self._uid,
                extra_groups=groups,
            )

    def client(self, deadline_s: float = 20.0) -> Client:
        """A new client of this daemon."""
        return Client.connect(run_dir=self.run_dir, instance=self.instance, deadline_s=deadline_s)

    def stop(self) -> int:
        """SIGTERM; returns its exit status."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the daemon did not stop within {STOP_S} s:\n{self.log}") from None

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Kill the supervisor alone and reap it; returns its exit status."""
        self.signal(number)
        assert self._process is not None
        return self._process.wait(STOP_S)

    def signal(self, number: int) -> None:
        """Send a signal to the supervisor, if it runs."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self.pid, number)

    def ended(self, timeout_s: float = STOP_S) -> int:
        """Wait for its end; returns its exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def segments(self) -> list[str]:
        """Names in /dev/shm that belong to this instance."""
        return sorted(path.name for path in self._shm.glob(f"stratad.{self.instance}.*"))

    def close(self) -> None:
        """Stop it if it runs, and remove what it left."""
        try:
            if self._process is not None and self._process.poll() is None:
                self.stop()
        finally:
            for name in self.segments():
                (self._shm / name).unlink(missing_ok=True)
            shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            sys.stderr.write(self.log)
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log)
        self.close()
