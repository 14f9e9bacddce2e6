"""The invariants, from outside of the core: what it tells, asks and shows is compared with what the world really is.

The core's own full recount (`Core.validate`) is one of them; the others do not believe its records, but bytes,
processes and messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ipc.messages import (
    Acknowledge,
    Capture,
    Captured,
    CaptureJob,
    Clear,
    Copied,
    CopyJob,
    Done,
    Drop,
    Failed,
    Found,
    JobFailed,
    Lookup,
    PartLoaded,
    Pin,
    Progress,
    PutCommit,
    Release,
    Report,
    Request,
    Restore,
    Restored,
    RestoreJob,
    SlotTo,
    Unregister,
    WorkersChanged,
)
from shm.extent import ChunkPlace, unpack_places
from shm.rows import unpack_numbers, unpack_rows
from stratad.core.effects import ReplyTo
from stratad.core.ops import Operation
from tests.support.simulation.content import (
    Pool,
    check,
    digest_of,
    granules_of,
    join,
    part_content,
)
from tests.support.simulation.engine import Pending, content_of, state_of
from tests.support.simulation.worker import AnyJob, SimWorker

if TYPE_CHECKING:
    from tests.support.simulation.world import World

Place = tuple[str, int, int]  # worker, shuttle, granule


@dataclass(slots=True, eq=False)
class JobNote:
    """A job that was sent: whose it is, and what it may touch until its process has finished it or is gone."""

    process: SimWorker
    job: int
    client: int
    seq: int
    pool: Pool | None
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[Place]
    holds: frozenset[Place]

    @property
    def over(self) -> bool:
        """Whether nothing of it can happen any more."""
        return self.process.gone or self.process.exited or self.job in self.process.finished

    @property
    def source_read(self) -> bool:
        """Whether it reads no row any more."""
        return self.over or self.job in self.process.source_read


@dataclass(slots=True)
class Cause:
    """The event in hand, as far as it explains the end of an image."""

    name: str = ""
    request: Request | None = None
    client: int = 0
    running: tuple[Operation, ...] = ()  # operations that were in flight when it came


@dataclass(slots=True)
class Guard:
    """Compares. `images` are those that were visible after the last event, by number: namespace, conversation and
    fingerprint.
    """

    world: "World"
    notes: list[JobNote] = field(default_factory=list)
    images: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    published: dict[Place, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)  # not acknowledged yet, by client and engine
    reported: dict[Place, tuple[int, ...]] = field(default_factory=dict)  # what lay where a worker found damage
    waiting: dict[tuple[int, int], Request] = field(default_factory=dict)  # requests without a final reply
    cause: Cause = field(default_factory=Cause)
    known_transits: set[int] = field(default_factory=set)
    tokens: dict[int, bytes] = field(default_factory=dict)  # of every image that ever was
    fresh: list[JobNote] = field(default_factory=list)  # of the event in hand
    audits: int = 0

    # --- what the core asks workers to do -----------------------------------------------------------------------------

    def job_sent(self, process: SimWorker, command: AnyJob) -> None:
        """A job is on its way: nothing else may touch what it touches."""
        world = self.world
        self.notes = [note for note in self.notes if not note.over]
        op, _ = world.core.state.workers[process.name].jobs[command.job]
        named = _numbers(command.rows)
        targets = _numbers(command.target_rows) if isinstance(command, CopyJob) else frozenset()
        places: frozenset[Place] = frozenset()
        if not isinstance(command, CopyJob):
            places = frozenset(
                (process.name, shuttle, granule)
                for place in unpack_places(command.places)
                for shuttle, granule in granules_of(place)
            )
        unmapped = {shuttle for _, shuttle, _ in places} - process.mapped.keys()
        check(not unmapped, f"job {command.job} names shuttles {unmapped}, which its process does not map")
        check(command.pool in process.pools, f"job {command.job} names pool {command.pool}, which is not open")
        if isinstance(command, CaptureJob):
            named_pid = world.journal.workers.get(process.name)
            check(named_pid == process.pid, f"{process.pid} writes the arena of {process.name}, the journal names {named_pid}")
        reads, writes = (frozenset(), named) if isinstance(command, RestoreJob) else (named, targets)
        fills, holds = (places, frozenset()) if isinstance(command, CaptureJob) else (frozenset(), places)
        pool = world.pool_at(process, command.pool)
        note = JobNote(process, command.job, op.client, op.seq, pool, reads, writes, fills, holds)
        check(not process.condemned, f"a job is sent to {process.name}, which was told to die")
        for other in world.processes:
            alone = other is process or other.gone or other.name != process.name or other.unprovable
            check(alone, f"a job is sent to {process.name} while its former process {other.pid} is not proven gone")
        for other_note in self.notes:
            self._check_apart(note, other_note)
        self.notes.append(note)
        self.fresh.append(note)

    @staticmethod
    def _check_apart(note: JobNote, other: JobNote) -> None:
        both = note.fills & (other.fills | other.holds) or note.holds & other.fills
        mine, theirs = note.process.mapped, other.process.mapped
        both = {place for place in both if mine[place[1]] is theirs[place[1]]}  # a name may stand for other memory now
        check(not both, f"extents {sorted(both)[:3]} of job {note.job} are also used by job {other.job}")
        if note.pool is None or note.pool is not other.pool:
            return
        used = other.writes if other.source_read else other.writes | other.reads
        both_rows = note.writes & used or note.reads & other.writes
        check(not both_rows, f"rows {sorted(both_rows)[:3]} of job {note.job} are still used by job {other.job}")

    # --- what the core tells clients ----------------------------------------------------------------------------------

    def replied(self, effect: ReplyTo) -> None:
        """The core tells a client something: it must be true now, and stay true for the rows it sets free."""
        client, reply = effect.client, effect.message
        if isinstance(reply, WorkersChanged) or (client not in self.world.by_number):
            return
        key = (client, reply.seq)
        check(key in self.waiting, f"request {reply.seq} of client {client} is answered again: {type(reply).__name__}")
        pending = self.world.by_number[client].pending.get(reply.seq)
        check(pending is not None, f"client {client} has no request {reply.seq}")
        assert pending is not None
        mine = [n for n in self.notes if (n.client, n.seq) == key and not n.over]
        if isinstance(reply, Progress):
            if reply.state == "source_free":
                reading = [n for n in mine if not n.source_read]
                check(not reading, f"rows of request {reply.seq} are told free while {_who(reading)} reads them")
            return
        request = self.waiting.pop(key)
        check(not mine, f"request {reply.seq} is answered while {_who(mine)} may still touch its rows")
        self._true(reply, request, pending, client)

    def _true(self, reply: object, request: Request, pending: Pending, client: int) -> None:
        catalog = self.world.core.state.catalog
        match reply:
            case Restored():
                self._check_restored(reply, request, pending)
                if isinstance(request, Restore) and request.take:
                    self.taken[reply.image_id] = (client, request.engine_id)
            case Copied():
                self._check_memory(pending, pending.tokens, "copied")
            case PartLoaded() if pending.target is not None and pending.engine is not None and pending.tokens:
                version, count = pending.tokens
                first = pending.target.first_row
                found = pending.engine.pools[0].rows[0][first : first + count]
                check(found == part_content(version, count), "wrong bytes: a part that was got is not what was put")
            case Captured() if isinstance(request, SlotTo):
                check(reply.tokens == request.tokens, "a transit image has another number of tokens than asked for")
            case Captured():
                self._check_captured(reply, request)
                self._check_recorded(reply.image_id)
            case Found() if reply.match == "hit" and isinstance(request, Lookup):
                image = catalog.images.get(reply.image_id)
                check(image is not None and not image.damaged, f"lookup found image {reply.image_id}, which is not good")
                asked = request.tokens[: reply.tokens * 4]
                check(image is not None and image.tokens[: len(asked)] == asked, "lookup found other tokens")
            case Done() if isinstance(request, Pin):
                images = {image.image_id for image in catalog.named(request.namespace, request.conversation)}
                self.pinned = self.pinned | images if request.pinned else self.pinned - images
            case Failed() if pending.target is not None and pending.before:
                self._check_untouched(reply, pending)

    def _check_recorded(self, image_id: int) -> None:
        """Before anybody is told of an image, it is in the journal (it may have made room again since)."""
        ever = any(getattr(record, "image_id", 0) == image_id for record in self.world.journal.records)
        check(ever, f"image {image_id} is told published before its record is written")

    def _image(self, image_id: int) -> tuple[int, ...]:
        check(image_id in self.tokens, f"image {image_id} is told restored, and never was")
        return unpack_numbers(self.tokens[image_id])

    def _check_captured(self, reply: Captured, request: Request) -> None:
        if isinstance(request, Capture):
            check(reply.tokens * 4 == len(request.tokens), "captured another number of tokens than asked for")
            catalog = self.world.core.state.catalog
            image = catalog.images.get(reply.image_id)  # it may have made room again in the same event
            check(image is not None or reply.image_id < catalog.next_image_id, f"image {reply.image_id} never was")
            if image is not None:
                check(image.tokens == request.tokens, "an image has other tokens than were captured")
                check(image.token_count == reply.tokens, "an image has another count of tokens than was told")
        check(all(o.state == "done" for o in reply.stages), "an image is published although a stage did not end well")

    def _check_restored(self, reply: Restored, request: Request, pending: Pending) -> None:
        if isinstance(request, Restore):
            tokens = self._image(reply.image_id)
            asked = request.tokens if request.tokens != -1 else len(tokens)
            check(reply.tokens == asked, f"restored {reply.tokens} tokens, asked for {asked}")
            pending.tokens = list(tokens[: reply.tokens])
        check(all(o.state == "done" for o in reply.stages), "told restored although a stage did not end well")
        self._check_memory(pending, pending.tokens, "restored")

    @staticmethod
    def _check_memory(pending: Pending, tokens: list[int], verb: str) -> None:
        engine, target = pending.engine, pending.target
        assert engine is not None
        assert target is not None
        check(engine.holds(target, tokens), f"wrong bytes: slot {target.number} does not hold what was {verb}")

    @staticmethod
    def _check_untouched(reply: Failed, pending: Pending) -> None:
        """Rows that a failure does not name must be what they were."""
        engine, target = pending.engine, pending.target
        assert engine is not None
        assert target is not None
        outcomes = {outcome.stage: outcome for outcome in reply.stages}
        for stage, (before, now) in enumerate(zip(pending.before, engine.snapshot(target), strict=True)):
            outcome = outcomes.get(stage)
            if outcome is not None and outcome.state == "done":
                continue
            undefined = _numbers(outcome.rows_undefined) if outcome is not None else frozenset()
            for at, (was, row) in enumerate(zip(before[0], now[0], strict=True)):
                told = target.first_row + at in undefined
                check(told or was == row, f"row {target.first_row + at} of stage {stage} was written, and not told so")
            told = _GROUP + target.number in undefined
            check(told or before[1] == now[1], f"a state of stage {stage} was written, and not told so")

    # --- after each event ---------------------------------------------------------------------------------------------

    def after_event(self, *, full: bool) -> None:
        """What must hold between any two events."""
        catalog = self.world.core.state.catalog
        transits = catalog.transits
        live = self.world.journal.live
        check(catalog.images.keys() == live.keys(), f"the journal does not hold what is there: {catalog.images.keys() ^ live.keys()}")
        if catalog.images.keys() != self.images.keys() or transits.keys() != self.known_transits:
            self._images_changed()
        if self.fresh:  # only now, since the same event may have evicted what lay there
            recorded = self.world.journal.places
            for note in self.fresh:
                for place in note.fills & self.published.keys():
                    check(False, f"extent {place} of job {note.job} holds image {self.published[place]}")
                for image_id, places in recorded.items():
                    check(not note.fills & places, f"extents of job {note.job} hold image {image_id}, whose end is not recorded")
            self.fresh = []
        if full:
            self._recount()

    def _recount(self) -> None:
        try:
            self.world.core.validate()
        except AssertionError as found:
            check(False, f"recount: {found or 'an assertion of Core.validate'}")

    def _images_changed(self) -> None:
        catalog = self.world.core.state.catalog
        named = {
            n: (image.scope.namespace, image.conversation, image.scope.fingerprint)
            for n, image in catalog.images.items()
        }
        born = [n for n in named if n not in self.images]
        for image_id in [n for n in self.images if n not in named]:
            self._explain_end(image_id, {named[n]: n for n in born})
        self._place_images()
        for image_id, record in self.world.journal.live.items():
            same = record.pinned == catalog.images[image_id].pinned
            check(same, f"the journal says of image {image_id} that it is{'' if record.pinned else ' not'} pinned")
        for image_id in born:
            self.tokens[image_id] = catalog.images[image_id].tokens
            self._audit(catalog.images[image_id], born=True)
        for image_id in catalog.transits.keys() - self.known_transits:
            self._audit(catalog.transits[image_id], born=True)
        self.images = named
        self.known_transits = set(catalog.transits)

    def _place_images(self) -> None:
        catalog = self.world.core.state.catalog
        self.published = {
            (chunk.key.worker, shuttle, granule): image.image_id
            for image in (*catalog.images.values(), *catalog.transits.values())
            for chunk in image.chunks()
            for shuttle, granule in granules_of(chunk.place)
        }

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
            case Acknowledge() if request.image_id == image_id:
                check(image_id in self.taken, f"image {image_id} was given up, and nobody had taken it")
                check(not pinned, f"pinned image {image_id} was given up")
                return
            case _:
                pass
        check(not pinned, f"pinned image {image_id} was evicted ({self.cause.name})")
        check(image_id not in self.taken, f"image {image_id} ended before its taker acknowledged ({self.cause.name})")
        reading = [op.op_id for op in self.world.core.state.ops.values() if op.image is not None and op.image.image_id == image_id]
        check(not reading, f"image {image_id} was evicted while operation {reading} reads it")

    def _superseded(self, name: tuple[str, str, str]) -> bool:
        """Whether this event published another image of that name, which then made room itself."""
        for op in self.cause.running:
            if op.captures and op.state.value == "published":
                if name == (op.scope.namespace, op.conversation, op.scope.fingerprint):
                    return True
        client = self.world.by_number.get(self.cause.client)
        if client is None or not isinstance(self.cause.request, PutCommit):
            return False
        return any(engine.put is not None and engine.put.conversation == name[1] for engine in client.engines)

    def request_came(self, client: int, request: Request) -> None:
        """A request has reached the core, and is about to be served."""
        self.waiting[client, request.seq] = request
        if isinstance(request, Unregister):
            self.taken = {n: owner for n, owner in self.taken.items() if owner != (client, request.engine_id)}
        elif isinstance(request, Release) and self.taken.get(request.image_id) == (client, request.engine_id):
            del self.taken[request.image_id]

    def event_done(self) -> None:
        """The event in hand is over: a take that it ended."""
        request = self.cause.request
        if isinstance(request, Acknowledge) and self.taken.get(request.image_id) == (
            self.cause.client,
            request.engine_id,
        ):
            del self.taken[request.image_id]

    def client_gone(self, client: int) -> None:
        """A connection ended: nobody waits there any more."""
        self.waiting = {key: request for key, request in self.waiting.items() if key[0] != client}
        self.taken = {n: owner for n, owner in self.taken.items() if owner[0] != client}

    # --- the next daemon ----------------------------------------------------------------------------------------------

    def daemon_gone(self) -> None:
        """The daemon is no more: nobody waits for it, and what only it knew is gone."""
        self.waiting.clear()
        self.taken.clear()
        self.fresh = []
        for record in self.world.journal.in_hand:
            self.pinned.discard(getattr(record, "image_id", 0))

    def adopted(self) -> None:
        """The next one has replayed the journal: every image that was told published is there, unless its end was."""
        world = self.world
        before = dict(world.journal.live)
        doubtful = {getattr(record, "image_id", 0) for record in world.journal.in_hand}
        doubtful |= {getattr(record, "supersedes", 0) for record in world.journal.in_hand}
        doubtful |= {n for record in world.journal.in_hand for n in getattr(record, "image_ids", ())}
        world.journal.settle()
        now = world.core.state.catalog.images
        lost = before.keys() - now.keys() - doubtful
        check(not lost, f"published images are lost with the daemon: {sorted(lost)}")
        check(now.keys() == world.journal.live.keys(), "what was adopted is not what the journal holds")
        unpinned = [n for n in self.pinned & now.keys() if not now[n].pinned]
        check(not unpinned, f"images lost their pin with the daemon: {unpinned}")
        if world.journal.failures:
            self.reported = {}
        self.known_transits = set()
        self.images = {
            n: (image.scope.namespace, image.conversation, image.scope.fingerprint) for n, image in now.items()
        }
        self.tokens.update({n: image.tokens for n, image in now.items()})
        self.pinned &= now.keys()
        self._place_images()
        self._check_flags()
        self.audit()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def damage_reported(self, process: SimWorker, report: Report) -> None:
        """The core was told of a damaged chunk: no image that has it may be found sound, now or later."""
        if not isinstance(report, JobFailed) or report.code != "damaged":
            return
        note = next((n for n in self.notes if n.process is process and n.job == report.job), None)
        if note is None or report.chunk < 0:
            return
        for key in process.damaged.get(report.job, ()):
            place = (process.name, *key)
            segment = process.mapped.get(key[0])
            if segment is not None and key[1] in segment.corrupted:
                self.reported[place] = segment.granules.get(key[1], ())
        self._check_flags()

    def _check_flags(self) -> None:
        catalog = self.world.core.state.catalog
        for image in (*catalog.images.values(), *catalog.transits.values()):
            places = [(c.key.worker, *g) for c in image.chunks() for g in granules_of(c.place)]
            known = any(self._known_damaged(place) for place in places)
            check(image.damaged or not known, f"image {image.image_id} has a chunk known damaged, and is not flagged")

    def _known_damaged(self, place: Place) -> bool:
        if place not in self.reported:
            return False
        segment = self.world.segment_of(place[0], place[1])
        return segment is not None and place[2] in segment.corrupted and segment.granules.get(place[2]) == self.reported[place]

    def audit(self) -> None:
        """Every image that is visible can be had with exact bytes, but where somebody else changed them."""
        catalog = self.world.core.state.catalog
        for image in (*catalog.images.values(), *catalog.transits.values()):
            self._audit(image, born=False)

    def _audit(self, image: object, *, born: bool) -> None:
        self.audits += 1
        image_id, tokens = image.image_id, unpack_numbers(image.tokens)  # type: ignore[attr-defined]
        for stage, chunks in enumerate(image.stages):  # type: ignore[attr-defined]
            truth = self._truth(image, tokens, stage)
            found_rows: list[int] = []
            sound = True
            for chunk in chunks:
                places = granules_of(chunk.place)
                content = [self._granule(chunk.key.worker, shuttle, granule) for shuttle, granule in places]
                changed = any(c is None for c in content) or any(
                    granule in self._corrupted(chunk.key.worker, shuttle) for shuttle, granule in places
                )
                if changed:
                    lost = any(c is None for c in content)
                    check(not lost, f"image {image_id}: bytes of stage {stage} are nowhere")
                    bad = born and any(self._known_damaged((chunk.key.worker, *place)) for place in places)
                    check(not bad, f"image {image_id} was published with a chunk known damaged")
                    sound = False
                    continue
                rows = join(c for c in content if c is not None)
                check(digest_of(rows) == chunk.key.digest, f"image {image_id}: bytes of stage {stage} lost their digest")
                found_rows.extend(rows)
            if sound and truth is not None:
                check(found_rows == truth, f"wrong bytes: image {image_id} does not hold on stage {stage} what it stands for")

    @staticmethod
    def _truth(image: object, tokens: tuple[int, ...], stage: int) -> list[int] | None:
        """What the chunks of a stage must hold; None: only its engine could say (a transit image)."""
        parts = image.parts  # type: ignore[attr-defined]
        if parts is not None:
            rows: list[int] = []
            for part in parts:
                version, count = map(int, part.meta.split())
                rows += part_content(version, count)
            return rows
        if not tokens:
            return None
        states = [state_of(tokens[:position], stage) for position in image.positions]  # type: ignore[attr-defined]
        return content_of(tokens, stage) + states

    def _granule(self, worker: str, shuttle: int, granule: int) -> tuple[int, ...] | None:
        segment = self.world.segment_of(worker, shuttle)
        return None if segment is None else segment.granules.get(granule)

    def _corrupted(self, worker: str, shuttle: int) -> set[int]:
        segment = self.world.segment_of(worker, shuttle)
        return set() if segment is None else segment.corrupted


_GROUP = 1 << 20


def _numbers(packed: Iterable[bytes]) -> frozenset[int]:
    """Rows of all groups as one set of numbers."""
    return frozenset(
        group * _GROUP + row
        for group, rows in enumerate(packed)
        for first, count in unpack_rows(rows)
        for row in range(first, first + count)
    )


def _who(notes: list[JobNote]) -> str:
    return ", ".join(f"job {n.job} of {n.process.name} (pid {n.process.pid})" for n in notes)

