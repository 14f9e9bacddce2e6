"""Which images there are: each comes whole, and none ends without a reason, not even with the daemon."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipc.messages import Acknowledge, Clear, Drop, PutCommit, Release, Request, ResetWorker, Unregister
from stratad.core.ops import Operation
from tests.support.simulation.audit import Audit
from tests.support.simulation.content import Place, check, granules_of

if TYPE_CHECKING:
    from tests.support.simulation.world import World


@dataclass(slots=True)
class Cause:
    """The event in hand, as far as it explains the end of an image."""

    name: str = ""
    request: Request | None = None
    client: int = 0
    running: tuple[Operation, ...] = ()  # operations that were in flight when it came


@dataclass(slots=True)
class ImageWatch:
    """Images that were visible after the last event, by number: namespace, conversation and fingerprint; and the
    places where they lie. `pinned` and `taken` are what clients were told.
    """

    world: "World"
    audit: Audit
    images: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    published: dict[Place, int] = field(default_factory=dict)
    homes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # worker and shuttle of each chunk
    pinned: set[int] = field(default_factory=set)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)  # not acknowledged yet, by client and engine
    taken_s: dict[int, float] = field(default_factory=dict)  # since when
    closed: set[tuple[int, int]] = field(default_factory=set)  # engines that want to end, by client and engine
    transits: set[int] = field(default_factory=set)
    tokens: dict[int, bytes] = field(default_factory=dict)  # of every image that ever was
    cause: Cause = field(default_factory=Cause)

    def after_event(self) -> None:
        """Compare what is there with what was."""
        catalog, live = self.world.core.state.catalog, self.world.journal.live
        same = catalog.images.keys() == live.keys()
        check(same, f"the journal does not hold what is there: {sorted(catalog.images.keys() ^ live.keys())}")
        if catalog.images.keys() != self.images.keys() or catalog.transits.keys() != self.transits:
            self.changed()

    def changed(self) -> None:
        catalog = self.world.core.state.catalog
        named = {
            n: (image.scope.namespace, image.conversation, image.scope.fingerprint)
            for n, image in catalog.images.items()
        }
        born = [n for n in named if n not in self.images]
        for image_id in [n for n in self.images if n not in named]:
            self._explain_end(image_id, {named[n]: n for n in born})
        self.place()
        for image_id, record in self.world.journal.live.items():
            same = record.pinned == catalog.images[image_id].pinned
            check(same, f"the journal says of image {image_id} that it is{'' if record.pinned else ' not'} pinned")
        for image_id in born:
            self.tokens[image_id] = catalog.images[image_id].tokens
            self.audit.learn(catalog.images[image_id], self.cause.running)
            self.audit.one(catalog.images[image_id], born=True)
        for image_id in catalog.transits.keys() - self.transits:
            self.audit.one(catalog.transits[image_id], born=True)
        self.images = named
        self.transits = set(catalog.transits)

    def place(self) -> None:
        catalog = self.world.core.state.catalog
        self.published = {
            (chunk.key.worker, shuttle, granule): image.image_id
            for image in (*catalog.images.values(), *catalog.transits.values())
            for chunk in image.chunks()
            for shuttle, granule in granules_of(chunk.place)
        }
        self.homes = {
            image.image_id: frozenset(
                (chunk.key.worker, extent.shuttle) for chunk in image.chunks() for extent in chunk.place.extents
            )
            for image in catalog.images.values()
        }

    def _recorded_in_lost(self, image_id: int) -> bool:
        """Whether an image of the journal has bytes in a segment that is lost."""
        return any((worker, shuttle) in self.world.lost for worker, shuttle, _ in self.world.journal.places[image_id])

    def _explain_end(self, image_id: int, born: dict[tuple[str, str, str], int]) -> None:
        """An image is no more: something must have asked for that, or it made room and nobody needed it."""
        namespace, conversation, _ = name = self.images[image_id]
        request = self.cause.request
        pinned = image_id in self.pinned
        self.pinned.discard(image_id)
        if name in born:
            if pinned:
                image = self.world.core.state.catalog.images[born[name]]
                check(image.pinned, f"image {image.image_id} lost the pin of the one that it supersedes")
                self.pinned.add(born[name])
            return
        if self.homes[image_id] & self.world.lost:
            self.taken.pop(image_id, None)
            return
        if self._superseded(name):
            check(not pinned, f"pinned image {image_id} ended, and what supersedes it is not there")
            return
        match request:
            case Drop() if (request.namespace, request.conversation) == (namespace, conversation):
                check(request.force or not pinned, f"pinned image {image_id} was dropped without force")
                return
            case Clear() if request.namespace == namespace:
                check(not pinned, f"pinned image {image_id} was cleared")
                return
            case ResetWorker() if request.force:
                there = request.worker in {worker for worker, _ in self.homes[image_id]}
                check(there, f"image {image_id} was dropped by a reset of {request.worker}, where it does not lie")
                self.taken.pop(image_id, None)
                return
            case Acknowledge() if request.image_id == image_id:
                check(image_id in self.taken, f"image {image_id} was given up, and nobody had taken it")
                check(not pinned, f"pinned image {image_id} was given up")
                return
            case _:
                pass
        check(not pinned, f"pinned image {image_id} was evicted ({self.cause.name})")
        self._end_lease(image_id)
        check(image_id not in self.taken, f"image {image_id} ended before its taker acknowledged ({self.cause.name})")
        reading = [
            op.op_id
            for op in self.world.core.state.ops.values()
            if op.image is not None and op.image.image_id == image_id
        ]
        check(not reading, f"image {image_id} was evicted while operation {reading} reads it")

    def _end_lease(self, image_id: int) -> None:
        """Another client may have needed the place of what was taken and not asked for again since long."""
        world = self.world
        if image_id in self.taken and world.now_s - self.taken_s[image_id] >= world.settings.lease_s:
            del self.taken[image_id]

    def _superseded(self, name: tuple[str, str, str]) -> bool:
        """Whether this event published another image of that name, which then made room itself."""
        for op in self.cause.running:
            scope = op.scope
            same = name == (scope.namespace, op.conversation, scope.fingerprint)
            if same and op.captures and op.state.value == "published":
                return True
        client = self.world.by_number.get(self.cause.client)
        if client is None or not isinstance(self.cause.request, PutCommit):
            return False
        return any(engine.put is not None and engine.put.conversation == name[1] for engine in client.engines)

    # --- takes --------------------------------------------------------------------------------------------------------

    def request_came(self, client: int, request: Request) -> None:
        """A request that may end takes is about to be served."""
        if isinstance(request, Unregister):
            self.closed.add((client, request.engine_id))
            self.taken = {n: owner for n, owner in self.taken.items() if owner != (client, request.engine_id)}
        elif isinstance(request, Release) and self.taken.get(request.image_id) == (client, request.engine_id):
            del self.taken[request.image_id]

    def event_done(self) -> None:
        """The event in hand is over: a take that it ended."""
        request, client = self.cause.request, self.cause.client
        if isinstance(request, Acknowledge) and self.taken.get(request.image_id) == (client, request.engine_id):
            del self.taken[request.image_id]

    def client_gone(self, client: int) -> None:
        """What it had taken stays."""
        self.taken = {n: owner for n, owner in self.taken.items() if owner[0] != client}

    # --- the next daemon ----------------------------------------------------------------------------------------------

    def daemon_gone(self) -> None:
        """What only the daemon knew is gone."""
        self.taken.clear()
        self.closed.clear()
        self.audit.read.clear()
        for record in self.world.journal.in_hand:
            self.pinned.discard(getattr(record, "image_id", 0))

    def adopted(self) -> None:
        """The next one has replayed the journal: every image that was told published is there, unless its end was."""
        world = self.world
        before = {n: record for n, record in world.journal.live.items() if not self._recorded_in_lost(n)}
        doubtful = {getattr(record, "image_id", 0) for record in world.journal.in_hand}
        doubtful |= {getattr(record, "supersedes", 0) for record in world.journal.in_hand}
        doubtful |= {n for record in world.journal.in_hand for n in getattr(record, "image_ids", ())}
        world.journal.settle()
        now = world.core.state.catalog.images
        lost = before.keys() - now.keys() - doubtful
        check(not lost, f"published images are lost with the daemon: {sorted(lost)}")
        live = {n: record for n, record in world.journal.live.items() if not self._recorded_in_lost(n)}
        check(now.keys() == live.keys(), "what was adopted is not what the journal holds")
        # That a pin was lifted may have been written down although nobody was told any more.
        differing = [n for n, record in live.items() if record.pinned != now[n].pinned]
        check(not differing, f"images have not the pin that the journal says: {differing}")
        if world.journal.failures:
            self.audit.reported = {}
        self.transits = set()
        self.images = {
            n: (image.scope.namespace, image.conversation, image.scope.fingerprint) for n, image in now.items()
        }
        self.tokens.update({n: image.tokens for n, image in now.items()})
        self.pinned &= {n for n in now if now[n].pinned}
        self.place()
        self.audit.check_flags()
        self.audit.all()
