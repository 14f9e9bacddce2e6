"""Calls: one request of a client and how far it has come."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from ipc.messages import Request
from stratad._connection import Connection
from stratad.errors import StratadError

if TYPE_CHECKING:
    import asyncio

# How far a call has come. Plain numbers: they are compared on the path of every reply.
QUEUED: Final = 0
SENT: Final = 1
ACCEPTED: Final = 2
SOURCE_FREE: Final = 3
FINAL: Final = 4
PROGRESS: Final = {"accepted": ACCEPTED, "source_free": SOURCE_FREE}


class Owner(Protocol):
    """Whom a call waits for after a reconnect: an engine is ready once it is registered on the connection."""

    def ready_on(self, link: Connection) -> bool:
        """Whether calls of this owner may be sent; if not, the owner sees to it. Called under the pump's lock."""
        ...


class Call:
    """One request and how far it has come. Fields are written under the pump's lock."""

    __slots__ = (
        "abandoned",
        "bound",
        "build",
        "error",
        "expected",
        "groups",
        "in_doubt",
        "level",
        "lost",
        "mend",
        "name",
        "not_on",
        "on_final",
        "owner",
        "reached",
        "reply",
        "retry",
        "seq",
        "until_s",
        "unwanted",
        "was_sent",
        "watchers",
    )

    def __init__(
        self,
        name: str,
        build: Callable[[Connection, int], Request] | None,
        expected: type[object] | None,
        until_s: float,
        *,
        owner: Owner | None = None,
        retry: bool = False,
        on_final: "Callable[[Call], None] | None" = None,
        mend: Callable[[StratadError], bool] | None = None,
        bound: bool = False,
    ) -> None:
        """`build` makes the message at the moment of sending, under the lock; `until_s` is monotonic; `on_final` is
        called once, under the lock. `mend` is asked there when the daemon refused: True sends the call again, made
        anew. A `bound` call means nothing to any daemon but the one it was begun with.
        """
        self.name = name
        self.build = build
        self.expected = expected
        self.until_s = until_s
        self.owner = owner
        self.retry = retry
        self.on_final = on_final
        self.mend = mend
        self.bound = bound
        self.seq = 0
        self.level = QUEUED
        self.reached = QUEUED  # the level before the final one
        self.was_sent = False
        self.in_doubt = False  # it was lost and is to be sent again: what became of the first one is not known
        self.not_on: Connection | None = None  # whose daemon is stopping and takes nothing in any more
        self.abandoned = False
        self.unwanted = False  # it was asked to be cancelled: it is not sent again
        self.lost = False
        # Of a layered restore: a call for each stage and group, which ends when that is done or the restore has ended.
        self.groups: dict[tuple[int, int], Call] = {}
        self.reply: object | None = None
        self.error: StratadError | None = None
        self.watchers: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None

    def remaining_s(self) -> float:
        """Time left, never below a millisecond: what travels as `deadline_s`."""
        return max(self.until_s - time.monotonic(), 0.001)
