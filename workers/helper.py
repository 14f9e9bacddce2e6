"""A thread that takes slices off a lane's hands, where a worker has a CPU for it.

A *share* is work that two threads may come for: the helper when its turn comes, the lane when it needs the result.
Whoever comes first does it, so that nobody waits for a helper that is busy elsewhere.
"""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from workers.threads import TaskThread

T = TypeVar("T")
_END_S: Final = 5.0


class Share(Generic[T]):
    """Work that is done once, by whichever thread comes first. One thread, the owner, takes the result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._claim = threading.Lock()
        self._work: Callable[[], T] | None = work
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def do(self) -> bool:
        """Do the work, unless somebody has come for it before; whether that was done here. Never raises."""
        if not self._claim.acquire(blocking=False):
            return False
        work, self._work = self._work, None
        assert work is not None, "a claim is made once"
        try:
            self._result.append(work())
        except BaseException as exc:  # noqa: BLE001 - it is the owner's, whichever thread met it
            self._error = exc
        del work
        self._done.set()
        return True

    def result(self, *, meanwhile: "Share[T] | None" = None) -> T:
        """The result; where another thread is at it, do `meanwhile` rather than wait. Raises what the work raised."""
        if not self.do() and meanwhile is not None and not self._done.is_set():
            meanwhile.do()
        self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                # The exception's traceback holds this frame: no circle, no memory that waits for the collector.
                del error
        return self._result.pop()

    def give_up(self) -> None:
        """See that nobody does it any more: wait where somebody is at it. The result is let go."""
        if self._claim.acquire(blocking=False):
            self._work = None
        else:
            self._done.wait()
        self._result.clear()
        self._error = None


class Helper:
    """The thread, started when it is first needed. `shares` says whether lanes may give it slices."""

    def __init__(self, *, shares: bool) -> None:
        self.shares: Final = shares
        self._lock = threading.Lock()
        self._thread: TaskThread | None = None
        self._closed = False

    def put(self, task: Callable[[], object]) -> None:
        """Queue a task; it must not raise. Any thread may call, also a task; once closed, nothing is taken any more."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = TaskThread("helper", lambda: None)
                self._thread.start()
            self._thread.put(lambda: _run(task))

    def close(self) -> None:
        """End the thread after what is queued. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(_END_S)


def _run(task: Callable[[], object]) -> None:
    task()
