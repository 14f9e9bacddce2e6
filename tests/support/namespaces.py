"""A small /dev/shm, pid namespaces and memory cgroups for real processes; they need root."""

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

MIB: Final = 1024 * 1024
# A daemon behind this is process 1 of a pid namespace of its own, and is its only child.
PID_NAMESPACE: Final = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--")


@functools.cache
def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def need_pid_namespaces() -> None:
    """Skip the test where there are none to be had."""
    if not _works(*PID_NAMESPACE, "true"):
        pytest.skip("no pid namespace can be made here (it takes root)")


class SmallShm:
    """A mount namespace with a tmpfs of its own at /dev/shm, held by a process that does nothing.

    `prefix` puts a command there; `folder` is the tmpfs as it is seen from here.
    """

    def __init__(self, holder: "subprocess.Popen[bytes]") -> None:
        self._holder = holder
        self.prefix = ("nsenter", f"--target={holder.pid}", "--mount", f"--wd={Path.cwd()}", "--")
        self.folder = Path(f"/proc/{holder.pid}/root/dev/shm")

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Make it; skips the test where that cannot be."""
        script = 'mount -t tmpfs -o "size=$0,mode=1777" tmpfs /dev/shm && echo ready && exec cat'
        if not _works("unshare", "--mount", "--", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"):
            pytest.skip("no mount namespace with a tmpfs can be made here (it takes root)")
        command = ["unshare", "--mount", "--", "sh", "-c", script, str(size_bytes)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        return cls(holder)

    @property
    def used_bytes(self) -> int:
        """What is taken of it."""
        status = os.statvfs(self.folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    @property
    def free_bytes(self) -> int:
        """What is left of it."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def resize(self, size_bytes: int) -> None:
        """Mount it anew with another size."""
        command = [*self.prefix, "mount", "-o", f"remount,size={size_bytes}", "/dev/shm"]
        subprocess.run(command, check=True, timeout=10)

    @contextmanager
    def filled(self, leave_bytes: int = 0) -> Iterator[Path]:
        """Somebody else's file takes all but that much."""
        path = self.folder / "somebody-else"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free_bytes - leave_bytes)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdin, self._holder.stdout):
            assert stream is not None
            stream.close()


class MemoryCgroup:
    """A memory cgroup below that of this process, and one inside it without a limit of its own, where commands run."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.inner = folder / "inner"
        self.limit_file = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
        self._events = self.inner / ("memory.oom_control" if version == 1 else "memory.events")
        self.prefix = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.inner))

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel killed there."""
        words = self._events.read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def limit(self, limit_bytes: int) -> None:
        """Set the limit of the outer one."""
        self.limit_file.write_text(str(limit_bytes))


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A `MemoryCgroup` with this limit; skips the test where none can be made. Its processes must have ended."""
    folder, version = _own_cgroup()
    made = folder / f"stratad-test-{os.getpid()}"
    group = MemoryCgroup(made, version)
    try:
        made.mkdir()
        if version == 2:
            (made / "cgroup.subtree_control").write_text("+memory")
        group.inner.mkdir()
        group.limit(limit_bytes)
        swap = made / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
    except OSError as exc:
        for part in (group.inner, made):
            if part.exists():
                part.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    try:
        yield group
    finally:
        group.inner.rmdir()
        made.rmdir()


def _own_cgroup() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), 1
    return Path("/sys/fs/cgroup"), 2
