"""A real systemd, as PID 1 of namespaces of its own, over a copy of this system that goes away with it."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shm.process import is_gone, start_ticks
from tests.support.wait import wait_until

_SCRIPT: Final = Path(__file__).with_suffix(".sh")
_PROGRAMS: Final = ("bash", "unshare", "nsenter", "findmnt", "chroot", "setpriv", "systemctl", "systemd-sysusers")
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--kill-child")
_BOOT_S: Final = 30.0
_COMMAND_S: Final = 30.0


class NoBox(Exception):
    """This host has no systemd, or does not let us start one: says why."""


class SystemdBox:
    """`folders` of the host can be seen inside by every user. Leaves no process, mount, cgroup or file behind."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._base = Path()
        self._name = ""
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    def start(self) -> Self:
        """Boot, until the basic target is reached.

        Raises:
            NoBox: it cannot be had here.
        """
        if os.geteuid() != 0:
            raise NoBox("needs to be run as root")
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise NoBox(f"there is no {', '.join(missing)}")
        self._base = Path(tempfile.mkdtemp(prefix="stratad-box-"))
        self._name = self._base.name
        # Should this process be killed, the box must not live on.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES]
        command += ["bash", str(_SCRIPT), str(self._base), self._name]
        try:
            with (self._base / "log").open("wb") as log:
                self._unshare = subprocess.Popen(
                    [*command, *map(str, self._folders)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            wait_until(self._booted_or_ended, _BOOT_S, "systemd's basic target")
            if self._unshare.poll() is not None:
                raise NoBox(f"systemd cannot be started here: {self._log()}")
        except AssertionError as exc:
            self.close()
            raise NoBox(f"systemd does not boot here: {exc}") from exc
        except BaseException:
            self.close()
            raise
        return self

    def run(self, *command: str, user: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root or as `user` with its groups.

        Raises:
            AssertionError: it failed, and `check`.
        """
        words = ["nsenter", "-t", str(self._init_pid), "-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w"]
        if user:
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all"]
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [*words, *command], capture_output=True, text=True, check=False, timeout=_COMMAND_S, env=environ
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        self.run("bash", "-c", 'mkdir -p "$(dirname "$1")" && printf %s "$2" >"$1"', "write", path, text)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def close(self) -> None:
        """Kill everything inside and take everything away; idempotent."""
        if self._unshare is not None:
            # The kernel kills the box's init with unshare, and everything else in its pid namespace with that.
            init_pid = self._init_pid or self._find_init()
            init = (init_pid, start_ticks(init_pid)) if init_pid else None
            if self._unshare.poll() is None:
                os.kill(self._unshare.pid, signal.SIGKILL)
            self._unshare.wait()
            if init is not None:
                wait_until(lambda: is_gone(*init), 10.0, "the end of the box")
            self._unshare = None
        if self._name:
            self._remove_cgroups()
            shutil.rmtree(self._base)
            self._name = ""

    def _booted_or_ended(self) -> bool:
        assert self._unshare is not None
        if self._unshare.poll() is not None:
            return True
        self._init_pid = self._find_init()
        if not self._init_pid:
            return False
        return self.run("systemctl", "is-active", "basic.target", check=False).returncode == 0

    def _find_init(self) -> int:
        """Pid of the box's init as we see it, 0 where there is none."""
        assert self._unshare is not None
        try:
            children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        except OSError:
            return 0
        return int(children[0]) if children else 0

    def _remove_cgroups(self) -> None:
        """The groups that systemd made, from below; they are empty now. The host may have them mounted or not."""
        program = (
            'mount --make-rprivate / && mount -t cgroup2 none "$1" || exit 0\n'
            'path=$1$(sed -n "s/^0:://p" /proc/self/cgroup)/$2\n'
            '[ ! -d "$path" ] || find "$path" -depth -type d -exec rmdir {} +\n'
        )
        command = ["unshare", "--mount", "bash", "-c", program, "remove", str(self._base), self._name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and "rmdir" in done.stderr:
            raise AssertionError(f"the box left cgroups: {done.stderr}")

    def _log(self) -> str:
        text = (self._base / "log").read_text(errors="replace").strip()
        return " ".join(text.splitlines()[-3:]) or f"exit status {self._unshare and self._unshare.returncode}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
