"""Who is connected: clients and workers, each known by the kernel's word for its lifeline and by a ZeroMQ identity."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ipc.credentials import process_behind
from ipc.lifeline import Lifeline, LifelineServer, Refused
from ipc.logs import fields
from ipc.server import Incoming, RouterServer
from stratad.core.failures import Refusal
from stratad.descriptors import ClientDescriptors, WorkerChannel

log = logging.getLogger(__name__)
REFUSALS_LOGGED_EVERY_S: Final = 10.0


class Endpoints(NamedTuple):
    """The daemon's three sockets; the supervisor closes them."""

    clients: RouterServer
    workers: RouterServer
    lifelines: LifelineServer


@dataclass(slots=True, eq=False)
class ClientLink:
    """A client's lifeline with what came over it and, once it has said hello, its ZeroMQ identity. `paused`: it sent
    more descriptors than are kept for it; they wait in its socket and are read as its messages name them. Owns `pidfd`.
    """

    client: int
    lifeline: Lifeline
    descriptors: ClientDescriptors
    identity: bytes = b""
    bad_frames: int = 0
    paused: bool = False
    pidfd: int = -1  # of its process; -1: none could be opened


@dataclass(slots=True, eq=False)
class WorkerLink:
    """The current process of a worker: its secret, its identity and the way to it. `early` is what it said before the
    template told of it: then neither its pid is known nor which lifeline is its own. `hung_up_s`: when its lifeline
    ended.
    """

    generation: int
    token: bytes
    identity: bytes
    channel: WorkerChannel
    greeted: bool = False
    early: list[Incoming] = field(default_factory=list)
    hung_up_s: float | None = None


class ClientLinks:
    """All clients, by number, by ZeroMQ identity and by the token of their lifeline."""

    def __init__(self) -> None:
        self._links: dict[int, ClientLink] = {}
        self._by_identity: dict[bytes, ClientLink] = {}
        self._by_token: dict[bytes, ClientLink] = {}
        self._next_client = 1

    def __iter__(self) -> Iterator[ClientLink]:
        return iter(tuple(self._links.values()))

    def add(self, lifeline: Lifeline) -> ClientLink:
        """A client that has opened its lifeline."""
        link = ClientLink(self._next_client, lifeline, ClientDescriptors(lifeline))
        self._next_client += 1
        self._links[link.client] = link
        self._by_token[lifeline.token] = link
        return link

    def count_of(self, pid: int, uid: int) -> int:
        """How many lifelines a process has."""
        return sum(link.lifeline.peer.pid == pid and link.lifeline.peer.uid == uid for link in self._links.values())

    def get(self, client: int) -> ClientLink | None:
        """The client of this number, as long as it is connected."""
        return self._links.get(client)

    def of_peer(self, identity: bytes) -> ClientLink | None:
        """The client that has said hello under a ZeroMQ identity."""
        return self._by_identity.get(identity)

    def claim(self, token: bytes, incoming: Incoming) -> ClientLink:
        """Tie the ZeroMQ identity of a hello to the lifeline whose token it knows; both must be the same process's.

        Raises:
            Refusal: ``hello_first`` or ``not_permitted``.
        """
        link = self._by_token.get(token)
        if link is None or link.identity:
            raise Refusal("hello_first", "the token is not one of a lifeline that waits for its hello")
        holder = link.lifeline.peer
        if process_behind(incoming.descriptor) != (holder.pid, holder.uid):
            log.warning("token of another process", extra=fields(client=link.client, uid=holder.uid, pid=holder.pid))
            raise Refusal("not_permitted", "the token is that of another process's lifeline")
        link.identity = incoming.peer
        self._by_identity[incoming.peer] = link
        return link

    def remove(self, link: ClientLink) -> bool:
        """Forget a client; False when that was done before."""
        if self._links.pop(link.client, None) is None:
            return False
        self._by_token.pop(link.lifeline.token, None)
        self._by_identity.pop(link.identity, None)
        return True


class RefusalLog:
    """One line a while about peers that were refused, however many come."""

    def __init__(self) -> None:
        self._count = 0
        self._logged_s = -math.inf

    def add(self, refused: Refused, now_s: float) -> None:
        """A peer was refused."""
        self._count += 1
        if now_s - self._logged_s < REFUSALS_LOGGED_EVERY_S:
            return
        peer = refused.peer
        log.warning("refused", extra=fields(uid=peer.uid, pid=peer.pid, why=refused.message, count=self._count))
        self._count, self._logged_s = 0, now_s
