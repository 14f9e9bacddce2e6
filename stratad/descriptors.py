"""Descriptors on their way from a client's lifeline to a worker's, in step with the commands that need them.

A worker that takes the descriptors of its pools reads them from its lifeline only when it comes to the command that
names them, and a socket's buffer holds some 270. When it is full, the rest waits here, and with it every later command
for that worker: an order to open a pool never overtakes its descriptor. Other workers are not held back.
"""

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ipc.codec import encode
from ipc.lifeline import Lifeline, LifelineError
from ipc.logs import fields
from ipc.messages import ClosePool, Command, OpenPool, StopWorker
from ipc.server import Sent
from ipc.stream_server import StreamServer

log = logging.getLogger(__name__)
# A worker that does not read is killed by its jobs' deadlines; these bound what is kept for it until then. Commands
# about pools do not count: of them there are as many as the engines have registered.
HELD_COUNT: Final = 1024
HELD_BYTES: Final = 64 * 1024 * 1024
# Frames in the server's own queue from which on more wait here: what is there can no longer be kept in step.
QUEUED_COUNT: Final = 256
# No room in the buffer, too many descriptors in flight for this user, no kernel memory: all pass.
_LATER: Final = frozenset({errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})

Source: TypeAlias = Callable[[], int | None]


class ClientDescriptors:
    """The descriptors that one client sent, by its tags. Owns them from `find` to `close`."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._kept: dict[int, int] = {}

    def find(self, tag: int) -> int | None:
        """The descriptor under `tag`, kept from now on; None where none came or it was closed."""
        if tag not in self._kept:
            self._lifeline.read_on(tag)
            try:
                self._kept[tag] = self._lifeline.take(tag)
            except KeyError:
                return None
        return self._kept[tag]

    def close(self, tag: int) -> None:
        """It is needed no more."""
        descriptor = self.find(tag)
        if descriptor is not None:
            del self._kept[tag]
            os.close(descriptor)

    def close_all(self) -> None:
        """The client is gone."""
        while self._kept:
            os.close(self._kept.popitem()[1])


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """A descriptor that waits; `source` finds it when its turn comes, for its client may have gone by then."""

    tag: int
    source: Source


class _Frame(NamedTuple):
    """A command that waits."""

    frame: bytes
    kind: type[Command]

    @property
    def counts(self) -> bool:
        """Whether it takes from the bound."""
        return self.kind not in (OpenPool, ClosePool)


class WorkerChannel:
    """All that goes to one process of a worker, in order. Dropped when the process is gone.

    `send` and `flush` return False where what was to be sent cannot be: then only the end of the process can answer
    for it. A process that is gone already has its end coming, so for that they return True.
    """

    def __init__(self, worker: str, server: StreamServer, identity: bytes) -> None:
        self.lifeline: Lifeline | None = None
        self._worker = worker
        self._server = server
        self._identity = identity
        self._held: deque[_Descriptor | _Frame] = deque()
        self._held_count = 0
        self._held_bytes = 0

    @property
    def waiting(self) -> int:
        """Descriptors and commands that wait: `flush` is to be called again soon."""
        return len(self._held)

    def send(self, command: Command) -> bool:
        """Send a command, or have it wait for its turn."""
        frame = _Frame(encode(command), type(command))
        if not self._held and self._server.queued_count(self._identity) < QUEUED_COUNT:
            return self._hand_over(frame)
        if frame.counts:
            if self._held_count >= HELD_COUNT or self._held_bytes + len(frame.frame) > HELD_BYTES:
                return False
            self._held_count += 1
            self._held_bytes += len(frame.frame)
        self._held.append(frame)
        return True

    def pass_on(self, tag: int, source: Source) -> None:
        """Pass a descriptor on under `tag`, or have it wait for its turn. One that `source` does not find is told by
        the worker, which finds none under the tag.
        """
        entry = _Descriptor(tag, source)
        if self._held or not self._pass(entry):
            self._held.append(entry)

    def flush(self) -> bool:
        """Send what waits, as far as the worker takes it."""
        while self._held:
            entry = self._held[0]
            if isinstance(entry, _Descriptor):
                if not self._pass(entry):
                    return True
            else:
                if self._server.queued_count(self._identity) >= QUEUED_COUNT:
                    return True
                if not self._hand_over(entry):
                    return False
                if entry.counts:
                    self._held_count -= 1
                    self._held_bytes -= len(entry.frame)
            self._held.popleft()
        return True

    def _hand_over(self, entry: _Frame) -> bool:
        sent = self._server.send(self._identity, entry.frame)
        if sent in (Sent.SENT, Sent.QUEUED):
            return True
        # It does not read, or it has not even connected when it is told to stop.
        return sent is Sent.UNREACHABLE and entry.kind is not StopWorker

    def _pass(self, entry: _Descriptor) -> bool:
        """False: there is no room for it now."""
        descriptor = entry.source()
        if descriptor is None or self.lifeline is None:
            return True
        try:
            self.lifeline.send_descriptor(entry.tag, descriptor)
        except LifelineError as exc:
            if exc.errno in _LATER:
                return False
            log.error("descriptor not forwarded", extra=fields(worker=self._worker, why=str(exc)))
        return True
