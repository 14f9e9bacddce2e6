"""The plain descriptors of the loop: one epoll, and a handler for each."""

import select
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

Handler = Callable[[], None]


class Watch:
    """Descriptors that the loop waits for, all behind one, so that its poller has few entries."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._handlers: dict[int, Handler] = {}

    @classmethod
    def open(cls) -> Self:
        """One that watches nothing yet.

        Raises:
            OSError: no descriptor to be had.
        """
        return cls(select.epoll())

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._handlers

    def fileno(self) -> int:
        """Readable when `ready` has something."""
        return self._epoll.fileno()

    def add(self, descriptor: int, handler: Handler) -> None:
        """Have `handler` called at each turn at which the descriptor is readable."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def pause(self, descriptor: int) -> None:
        """From now on only its end is told."""
        self._epoll.modify(descriptor, 0)

    def remove(self, descriptor: int) -> None:
        """Before the descriptor is closed. Without effect where it is not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def ready(self) -> Iterator[Handler]:
        """The handlers that are to be called now; one that another has removed meanwhile is left out."""
        for descriptor, _ in self._epoll.poll(0):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                yield handler

    def close(self) -> None:
        """The descriptors stay open."""
        self._handlers.clear()
        self._epoll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
