"""Keeps the ZeroMQ connections of clients to those that their lifelines stand for.

ZeroMQ accepts whoever may open the socket's path, in a thread of its own, and aborts the process once no descriptor is
left for the next one. So each connection is looked at as it comes: a process may have a few for each of its lifelines,
all others together `STRANGERS`. One too many is hung up on, which gives its descriptor back within the same moment.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, Self

from ipc.arrivals import Arrivals
from ipc.credentials import Credentials
from ipc.lifeline import Refused
from ipc.server import RouterServer
from ipc.wire import readable

# A client has one; while it connects anew the earlier one may not be gone yet.
PER_LIFELINE: Final = 2
# Of all processes together. Nothing is served without a lifeline but the answer that one is needed.
STRANGERS: Final = 16
# At each turn: a flood of arrivals must not hold the loop.
READ_LIMIT: Final = 256
WHY: Final = "connections without lifelines are hung up on"

Process = tuple[int, int]  # pid and uid
NOBODY: Final = (-1, -1)  # it has gone again, which is told next, or there is no descriptor left to ask with


class Door:
    """Who has come in at the clients' ROUTER. `lifelines_of` counts those of a process, `refused` hears of each
    connection that was hung up on.
    """

    def __init__(
        self, arrivals: Arrivals, lifelines_of: Callable[[int, int], int], refused: Callable[[Refused], None]
    ) -> None:
        self._arrivals = arrivals
        self._fileno = arrivals.socket.fileno()
        self._lifelines_of = lifelines_of
        self._refused = refused
        self._known: dict[int, Process] = {}  # by descriptor: those that a lifeline stands for
        self._counts: Counter[Process] = Counter()
        self._strangers: set[int] = set()  # descriptors
        self._touched = True  # read since `readable` was asked

    @classmethod
    def at(
        cls, server: RouterServer, lifelines_of: Callable[[int, int], int], refused: Callable[[Refused], None]
    ) -> Self:
        """That of a ROUTER, which tells of its arrivals."""
        assert server.arrivals is not None
        return cls(server.arrivals, lifelines_of, refused)

    def fileno(self) -> int:
        """ZeroMQ's own descriptor. It is edge-triggered: whoever polls it must have asked `readable` before."""
        return self._fileno

    @property
    def readable(self) -> bool:
        """Whether `tend` has something to do of which `fileno` does not tell."""
        if not self._touched:
            return False
        self._touched = False
        return readable(self._arrivals.socket)

    def tend(self) -> None:
        """Take in what came and went, some of it."""
        self._touched = True
        for descriptor, here in self._arrivals.read(READ_LIMIT):
            self._forget(descriptor)
            if here:
                self._came(descriptor)

    def _came(self, descriptor: int) -> None:
        process = self._arrivals.peer(descriptor) or NOBODY
        allowed = PER_LIFELINE * self._lifelines_of(*process)
        if not allowed and process in self._counts:
            self._disown(process)
        if self._counts.get(process, 0) < allowed:
            self._known[descriptor] = process
            self._counts[process] += 1
        else:
            self._take_as_stranger(descriptor, process)

    def _disown(self, process: Process) -> None:
        """A process has no lifeline any more: what it has left must not count against its next one."""
        for descriptor in [known for known, owner in self._known.items() if owner == process]:
            del self._known[descriptor]
            self._take_as_stranger(descriptor, process)
        del self._counts[process]

    def _take_as_stranger(self, descriptor: int, process: Process) -> None:
        if len(self._strangers) < STRANGERS:
            self._strangers.add(descriptor)
        else:
            self._arrivals.hang_up(descriptor)
            self._refused(Refused(Credentials(*process, -1, 0), WHY))

    def _forget(self, descriptor: int) -> None:
        """A connection has gone."""
        self._strangers.discard(descriptor)
        process = self._known.pop(descriptor, None)
        if process is not None:
            self._counts[process] -= 1
            if not self._counts[process]:
                del self._counts[process]
