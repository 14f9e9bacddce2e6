"""The clients of the daemon: their lifelines, their requests on the way in, and the replies on the way out."""

import contextlib
import logging
import os

from ipc.codec import BadFrame, EncodeError, decode, encode
from ipc.lifeline import Life, Lifeline
from ipc.logs import fields
from ipc.messages import Failed, Hello, MemfdPool, Register, Reply, Request
from ipc.server import Incoming, RouterServer, Sent, one_frame
from shm.process import open_pidfd, pidfd_ended
from stratad.core.effects import ReplyTo
from stratad.core.failures import Refusal
from stratad.core.registration import STAGE_LIMIT
from stratad.links import ClientLink, ClientLinks
from stratad.turn import Turn
from stratad.watch import Watch

log = logging.getLogger(__name__)
RECEIVE_LIMIT = 64
BAD_FRAME_LIMIT = 16
HELLO_BYTES = 1024  # more is not read of a peer that nobody has vouched for


class ClientSide:
    """Owns the clients' socket, lifelines and descriptors. For one thread."""

    def __init__(self, turn: Turn, watch: Watch, server: RouterServer, unread_s: float) -> None:
        self.server = server
        self._turn = turn
        self._watch = watch
        self._unread_s = unread_s
        self._links = ClientLinks()
        self._dropped: list[int] = []  # clients to drop once the effects in hand are done

    # --- lifelines ----------------------------------------------------------------------------------------------------

    def add(self, lifeline: Lifeline) -> None:
        """A client has opened its lifeline."""
        link = self._links.add(lifeline)
        self._watch.add(lifeline.fileno(), lambda: self._on_lifeline(link))
        peer = lifeline.peer
        # The end of its lifeline tells of its end, unless a process that it forked keeps a copy.
        with contextlib.suppress(OSError):  # another pid namespace, no descriptor: then the lifeline alone tells
            link.pidfd = open_pidfd(peer.pid, peer.start_ticks)
            self._watch.add(link.pidfd, lambda: self._on_process(link))
        self._turn.event(
            lambda at: self._turn.core.client_connected(link.client, peer.pid, peer.uid, peer.start_ticks, at)
        )

    def _on_lifeline(self, link: ClientLink) -> None:
        if link.paused or link.lifeline.read_on() is Life.ENDED:  # of a paused one only the end is told
            self._drop(link)
        elif link.lifeline.full:
            link.paused = True
            self._watch.pause(link.lifeline.fileno())

    def _on_process(self, link: ClientLink) -> None:
        """It was asked for by the number of a descriptor, which may be another's by now."""
        if link.pidfd >= 0 and pidfd_ended(link.pidfd):
            self._drop(link)

    def lifelines_of(self, pid: int, uid: int) -> int:
        """How many lifelines a process has opened."""
        return self._links.count_of(pid, uid)

    def drop_later(self, client: int) -> None:
        """Drop a client once the effects in hand are done: its end has effects itself."""
        self._dropped.append(client)

    def drop_dropped(self) -> None:
        """Drop those now."""
        while self._dropped:
            link = self._links.get(self._dropped.pop(0))
            if link is not None:
                self._drop(link)

    def _drop(self, link: ClientLink) -> None:
        if not self._links.remove(link):
            return
        self.server.forget(link.identity)
        self._close_lifeline(link)
        self._turn.event(lambda at: self._turn.core.client_gone(link.client, at))
        link.descriptors.close_all()

    def _drop_deaf(self, link: ClientLink, why: str) -> None:
        log.info("client dropped: %s", why, extra=fields(client=link.client, pid=link.lifeline.peer.pid))
        self._turn.core.state.count("clients_dropped")
        self._drop(link)

    def _close_lifeline(self, link: ClientLink) -> None:
        self._watch.remove(link.lifeline.fileno())
        link.lifeline.close()
        if link.pidfd >= 0:
            self._watch.remove(link.pidfd)
            os.close(link.pidfd)
            link.pidfd = -1

    # --- descriptors --------------------------------------------------------------------------------------------------

    def find_descriptor(self, client: int, tag: int) -> int | None:
        """The descriptor that a client sent under a tag."""
        link = self._links.get(client)
        return None if link is None else link.descriptors.find(tag)

    def close_descriptor(self, client: int, tag: int) -> None:
        """It is needed no more."""
        link = self._links.get(client)
        if link is not None:
            link.descriptors.close(tag)

    # --- requests -----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take in what clients ask, some of it."""
        for incoming in self.server.recv_all(RECEIVE_LIMIT):
            link = self._links.of_peer(incoming.peer)
            if link is None and len(incoming.frame) > HELLO_BYTES:
                self._refuse(incoming.peer, -1, "hello_first", "the first message of a connection must be 'hello'")
                continue
            try:
                request = decode(one_frame(incoming), Request)
            except BadFrame as bad:
                self._on_bad_frame(incoming.peer, link, bad)
                continue
            if link is None:
                link = self._greet(incoming, request)
            if link is not None:
                self._serve(link, request)

    def _serve(self, link: ClientLink, request: Request) -> None:
        if isinstance(request, Register):  # a lifeline keeps few, and the worker may not be there yet
            for stage in request.stages[:STAGE_LIMIT]:
                if isinstance(stage.pool, MemfdPool):
                    link.descriptors.find(stage.pool.descriptor)
        try:
            effects = self._turn.core.request(link.client, request, self._turn.now)
        except Exception:  # noqa: BLE001 - a bug of ours must cost one request, not the daemon and every image in it
            self._turn.bug("request", type(request).__name__)
            effects = [ReplyTo(link.client, Failed(request.seq, "internal", "a bug of the daemon, see its log"))]
        self._turn.perform(effects)

    def _greet(self, incoming: Incoming, request: Request) -> ClientLink | None:
        """The client that a first message comes from, or None: then it was refused."""
        try:
            if not isinstance(request, Hello):
                raise Refusal("hello_first", "the first message of a connection must be 'hello'")
            return self._links.claim(request.token, incoming)
        except Refusal as refusal:
            self._refuse(incoming.peer, request.seq, refusal.code, refusal.message)
            return None

    def _on_bad_frame(self, peer: bytes, link: ClientLink | None, bad: BadFrame) -> None:
        self._turn.core.state.count("bad_frames")
        self._refuse(peer, bad.seq, bad.code, bad.message)
        if link is None:
            return
        link.bad_frames += 1
        if link.bad_frames >= BAD_FRAME_LIMIT:
            log.warning(
                "client dropped: too many bad frames", extra=fields(client=link.client, pid=link.lifeline.peer.pid)
            )
            self._drop(link)

    def _refuse(self, peer: bytes, seq: int, code: str, message: str) -> None:
        start_id = self._turn.core.state.settings.start_id
        self.server.send(peer, encode(Failed(seq, code, message, start_id=start_id)))

    # --- replies ------------------------------------------------------------------------------------------------------

    def hears(self, client: int) -> bool:
        """Whether a reply can reach it."""
        link = self._links.get(client)
        return link is not None and bool(link.identity)

    def reply(self, client: int, message: Reply) -> None:
        """Send a message to a client; without effect where it has gone."""
        link = self._links.get(client)
        if link is None or not link.identity:
            return
        try:
            frame = encode(message)
        except EncodeError as exc:
            log.error("reply cannot be encoded", extra=fields(client=client, why=str(exc)))
            frame = encode(Failed(message.seq, "internal", str(exc)))
        sent = self.server.send(link.identity, frame)
        if sent is Sent.TOO_LARGE:
            self.server.send(link.identity, encode(Failed(message.seq, "too_large", "the reply passes the size limit")))
        elif sent is Sent.FULL:
            self._drop_deaf(link, "it does not read")
        elif sent is Sent.UNREACHABLE:  # its half of the lifeline may be open still
            self._drop_deaf(link, "it cannot be reached")

    def flush(self, now_s: float) -> None:
        """Send on what waits for clients; who is gone, or reads nothing for too long, is dropped with all it holds."""
        if not self.server.pending_count:
            return
        lost = [(peer, "it cannot be reached") for peer in self.server.flush()]
        lost += [(peer, "it does not read") for peer in self.server.unread(now_s, self._unread_s)]
        for peer, why in lost:
            link = self._links.of_peer(peer)
            if link is not None:
                self._drop_deaf(link, why)

    # --- end ----------------------------------------------------------------------------------------------------------

    def close_lifelines(self) -> None:
        """Before the socket: a client that is told by them takes the last replies in, which its ZeroMQ drops as soon as
        ours has closed.
        """
        for link in self._links:
            self._close_lifeline(link)
            link.descriptors.close_all()
