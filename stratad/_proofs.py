"""Proof that the worker processes which served an operation are gone, as a client sees it."""

import os
import select
from collections.abc import Iterable
from typing import Final

from ipc.messages import WorkerProcess
from shm.process import is_gone, open_pidfd, pidfd_ended

_NO_PIDFD: Final = -1


class WorkerProof:
    """One worker process that served a registration; owns a pidfd.

    Not thread-safe: used under the client's lock.
    """

    def __init__(self, process: WorkerProcess, pidfd: int, *, gone: bool, provable: bool) -> None:
        self.process = process
        self._pidfd = pidfd
        self._gone = gone
        self._provable = provable

    @classmethod
    def open(cls, process: WorkerProcess, *, same_pids: bool) -> "WorkerProof":
        """Open the pidfd of a worker.

        `same_pids` says that the daemon's pids mean the same here. Elsewhere (another pid namespace), and where the
        daemon does not know pid or start time (0), nothing can be proved and the worker counts as alive for ever.
        """
        if process.pid <= 0 or process.start_ticks <= 0 or not same_pids:
            return cls(process, _NO_PIDFD, gone=False, provable=False)
        try:
            return cls(process, open_pidfd(process.pid, process.start_ticks), gone=False, provable=True)
        except ProcessLookupError:
            return cls(process, _NO_PIDFD, gone=True, provable=True)
        except OSError:
            # No descriptor to be had: pid and start time still tell.
            return cls(process, _NO_PIDFD, gone=False, provable=True)

    @property
    def pidfd(self) -> int:
        """The pidfd to poll while waiting, or -1."""
        return self._pidfd

    @property
    def provable(self) -> bool:
        """Whether its end could ever be proved."""
        return self._provable

    def gone(self) -> bool:
        """Whether the process is proven gone."""
        if not self._gone and self._provable:
            if self._pidfd >= 0:
                self._gone = pidfd_ended(self._pidfd)
            else:
                self._gone = is_gone(self.process.pid, self.process.start_ticks)
        return self._gone

    def close(self) -> None:
        """Close the pidfd; afterwards pid and start time are compared. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = _NO_PIDFD


def wait_for_end(workers: Iterable[WorkerProof], timeout_s: float) -> None:
    """Wait until any of the workers ends, or for `timeout_s`."""
    poller = select.poll()
    for worker in workers:
        if worker.pidfd >= 0 and not worker.gone():
            poller.register(worker.pidfd, select.POLLIN)
    poller.poll(timeout_s * 1000.0)
