"""Processes that are not children of the daemon, watched until they are proven gone.

Those of an earlier daemon's workers, and those of clients whose lifelines have ended: their pidfds are as good a proof
as a child's.
"""

import contextlib
import functools
import logging
import os
import signal
from typing import Final

from ipc.logs import fields
from shm.process import open_pidfd
from stratad.core.effects import AwaitEnd, WatchFormer
from stratad.turn import Turn
from stratad.watch import Watch

log = logging.getLogger(__name__)
# Without a free descriptor nothing can be proven; they become free as clients go.
AGAIN_S: Final = 0.5


class ForeignProcesses:
    """Owns the pidfds. For one thread."""

    def __init__(self, turn: Turn, watch: Watch) -> None:
        self._turn = turn
        self._watch = watch
        self._formers: dict[str, int] = {}  # pidfds, by worker
        self._unwatched: dict[str, WatchFormer] = {}  # formers for which there was no descriptor
        self._again_s = 0.0
        self._doomed: set[str] = set()  # of those, which are to be killed
        self._ending: dict[int, int] = {}  # pidfds, by client

    # --- workers of an earlier daemon ---------------------------------------------------------------------------------

    def watch_former(self, effect: WatchFormer) -> None:
        """Tell of the end of an earlier daemon's worker. Where it cannot be watched now, that is tried again: only the
        proof lets a new process write where the old one may.
        """
        try:
            pidfd = open_pidfd(effect.pid, effect.start_ticks)
        except ProcessLookupError:
            self._unwatched.pop(effect.worker, None)
            self._former_gone(effect.worker)
            return
        except OSError as exc:
            if effect.worker not in self._unwatched:
                log.warning(
                    "worker of an earlier daemon cannot be watched yet",
                    extra=fields(worker=effect.worker, pid=effect.pid, why=str(exc)),
                )
            self._unwatched[effect.worker] = effect
            self._again_s = self._turn.now.now_s + AGAIN_S
            return
        self._unwatched.pop(effect.worker, None)
        self._formers[effect.worker] = pidfd
        self._watch.add(pidfd, functools.partial(self._former_gone, effect.worker))
        if effect.worker in self._doomed:
            self.kill_former(effect.worker)

    def kill_former(self, worker: str) -> None:
        """SIGKILL a former worker, as soon as it is watched: only then is it known to be that process."""
        if worker in self._unwatched:
            self._doomed.add(worker)
            return
        self._doomed.discard(worker)
        pidfd = self._formers.get(worker, -1)
        if pidfd >= 0:
            log.warning("killing the worker of an earlier daemon", extra=fields(worker=worker))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def tend(self, now_s: float) -> None:
        """Try again what could not be watched."""
        if self._unwatched and self._again_s <= now_s:
            for effect in tuple(self._unwatched.values()):
                self.watch_former(effect)

    def wait_s(self, now_s: float, most_s: float) -> float:
        """How long the loop may wait, at most so long."""
        return min(most_s, self._again_s - now_s) if self._unwatched else most_s

    def _former_gone(self, worker: str) -> None:
        self._doomed.discard(worker)
        pidfd = self._formers.pop(worker, -1)
        if pidfd >= 0:
            self._watch.remove(pidfd)
            os.close(pidfd)
        self._turn.event(functools.partial(self._turn.core.former_gone, worker))

    # --- clients that have gone ---------------------------------------------------------------------------------------

    def await_end(self, effect: AwaitEnd) -> None:
        """Tell of the end of a client's process."""
        ended = functools.partial(self._turn.core.process_ended, effect.client)
        try:
            pidfd = open_pidfd(effect.pid, effect.start_ticks)
        except ProcessLookupError:
            self._turn.event(ended)
            return
        except OSError as exc:
            log.warning("process cannot be watched", extra=fields(pid=effect.pid, why=str(exc)))
            self._turn.event(functools.partial(ended, proven=False))
            return
        self._ending[effect.client] = pidfd
        self._watch.add(pidfd, lambda: self._on_process_ended(effect.client))

    def stop_awaiting(self, client: int) -> None:
        """The end of that process matters no more."""
        pidfd = self._ending.pop(client, None)
        if pidfd is not None:
            self._watch.remove(pidfd)
            os.close(pidfd)

    def _on_process_ended(self, client: int) -> None:
        self.stop_awaiting(client)
        self._turn.event(functools.partial(self._turn.core.process_ended, client))

    def close(self) -> None:
        """Close the pidfds; nothing is told any more."""
        for client in tuple(self._ending):
            self.stop_awaiting(client)
        while self._formers:
            pidfd = self._formers.popitem()[1]
            self._watch.remove(pidfd)
            os.close(pidfd)
        self._unwatched.clear()
