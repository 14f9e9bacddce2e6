"""Processes that do nothing, to be named as workers and killed."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ipc.messages import WorkerProcess
from shm.process import start_ticks


class FakeWorker:
    """One such process. It ends by `kill`, or with this process."""

    def __init__(self, child: "subprocess.Popen[bytes]", process: WorkerProcess) -> None:
        self._child = child
        self.process = process

    @classmethod
    def start(cls) -> Self:
        """Start it."""
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return cls(child, WorkerProcess(0, "cpu:0", child.pid, start_ticks(child.pid)))

    def kill(self) -> None:
        """SIGKILL; back when it is gone. Idempotent."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()


@contextmanager
def fake_worker() -> Iterator[FakeWorker]:
    """A `FakeWorker`, killed at the end."""
    worker = FakeWorker.start()
    try:
        yield worker
    finally:
        worker.kill()
