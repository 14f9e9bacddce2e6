"""The instance lock: one daemon an instance on one /dev/shm."""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from shm.shuttle import MOUNT


class InstanceLocked(RuntimeError):
    """Another daemon holds the instance."""


class InstanceLock:
    """An exclusive flock on ``/dev/shm/stratad.<instance>.lock``, beside the segments that it guards.

    The kernel drops it when the process ends. The file stays; it is empty but for the holder's pid, which is shown and
    never trusted.
    """

    def __init__(self, instance: str, path: Path, descriptor: int) -> None:
        self.instance = instance
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, instance: str) -> "InstanceLock":
        """Take the lock.

        Raises:
            InstanceLocked: another daemon has it, or what is there is no lock of this user.
            OSError: the file cannot be made.
        """
        return cls(instance, *_take(instance))

    def renew(self) -> None:
        """Lock a new file where somebody removed the one that is locked: else the next daemon would take this one's
        segments for a dead one's.

        Raises:
            InstanceLocked, OSError: as in `take`; the lock on the removed file stays.
        """
        if self._descriptor < 0 or _same_file(self._descriptor, self.path):
            return
        _, descriptor = _take(self.instance)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def release(self, *, unlink: bool) -> None:
        """Let go; with `unlink` (a clean stop) the file goes too, under the lock."""
        if self._descriptor < 0:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def lock_path(instance: str) -> Path:
    """Where the lock of an instance lies."""
    return Path(MOUNT) / f"stratad.{instance}.lock"


def _take(instance: str) -> tuple[Path, int]:
    """The lock's file and the descriptor that holds it; raises as `InstanceLock.take`."""
    path = lock_path(instance)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            _refuse_foreign(path, instance)
            raise
        try:
            _refuse_foreign(path, instance)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "?"
                raise InstanceLocked(f"instance {instance!r} is served by another daemon (pid {holder})") from None
            if _same_file(descriptor, path):
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):  # it is only shown, and room may come with the next step
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was unlinked between open and flock: lock the new one


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _refuse_foreign(path: Path, instance: str) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    owner = status.st_uid
    if owner != os.geteuid():
        raise InstanceLocked(
            f"instance {instance!r} belongs to uid {owner}, this is uid {os.geteuid()}: choose another with --instance"
        )
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        # What is behind such a name is not ours to lock, to empty and to remove.
        raise InstanceLocked(f"{path} is no plain file with one name: remove it, or choose another with --instance")
