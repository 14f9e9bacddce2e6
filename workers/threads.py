"""Threads beside the loop, and the mailbox through which they answer it.

The loop polls the mailbox's descriptor; no other thread ever touches a socket.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from workers import exit_codes

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class Mailbox(Generic[T]):
    """Letters from threads to the loop; `fileno` is readable while letters wait."""

    def __init__(self) -> None:
        self._letters: deque[T] = deque()
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """For a poller."""
        return self._eventfd

    def put(self, letter: T) -> None:
        """Leave a letter; any thread may."""
        self._letters.append(letter)
        os.eventfd_write(self._eventfd, 1)

    def take(self) -> list[T]:
        """All letters that wait; for the loop's thread."""
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return []
        # The eventfd was read first: a letter that comes now is either taken here or makes it readable again.
        letters: list[T] = []
        while self._letters:
            letters.append(self._letters.popleft())
        return letters

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._eventfd)


class TaskThread:
    """A thread that runs the tasks it is given, in order. `prepare` runs first, on the thread itself."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task; it must not raise."""
        self._tasks.put(task)

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after its queued tasks; whether it did within `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - without this thread orders would go unanswered: a fresh process is better
            _log.exception("thread ended thread=%s", self._thread.name)
            os._exit(exit_codes.INTERNAL)

    def _serve(self) -> None:
        self._prepare()
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task()
            # The finished task holds its job's views; the next `get` may wait for hours.
            del task
