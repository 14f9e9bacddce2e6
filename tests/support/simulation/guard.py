"""The invariants, from outside of the core: what it tells, asks and shows is compared with what the world really is.

The core's own full recount (`Core.validate`) is one of them; the others do not believe its records, but bytes,
processes and messages.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ipc.messages import (
    Capture,
    Captured,
    Copied,
    Done,
    Failed,
    Found,
    Lookup,
    PartLoaded,
    Pin,
    Progress,
    Reply,
    Request,
    Restore,
    Restored,
    SlotDrop,
    SlotFrom,
    SlotTo,
    Traced,
    WorkersChanged,
)
from shm.rows import unpack_numbers
from stratad.core.effects import LogLine, ReplyTo
from stratad.core.trace import STEPS
from tests.support.simulation.audit import Audit
from tests.support.simulation.content import check, part_content
from tests.support.simulation.engine import Pending
from tests.support.simulation.image_watch import ImageWatch
from tests.support.simulation.job_watch import GROUP, JobWatch, row_numbers, who
from tests.support.simulation.worker import SimWorker

_BLAME: Final = {"held against": "blamed", "suspected of a worker's death": "suspected"}

if TYPE_CHECKING:
    from tests.support.simulation.world import World


@dataclass(slots=True)
class Guard:
    """Checks replies, and has everything else checked. `waiting` are the requests without a final reply."""

    world: "World"
    jobs: JobWatch = field(init=False)
    images: ImageWatch = field(init=False)
    audit: Audit = field(init=False)
    waiting: dict[tuple[int, int], Request] = field(default_factory=dict)
    dying: SimWorker | None = None  # whose end is being noticed
    # What a client was told is in a slot's transit image, by client, engine and slot: image and tokens; and which of
    # these a request found when it was served.
    transits: dict[tuple[int, int, int], tuple[int, list[int]]] = field(default_factory=dict)
    found: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = JobWatch(self.world)
        self.audit = Audit(self.world)
        self.images = ImageWatch(self.world, self.audit)

    # --- events -------------------------------------------------------------------------------------------------------

    def request_came(self, client: int, request: Request) -> None:
        """A request has reached the core, and is about to be served."""
        self.waiting[client, request.seq] = request
        self.images.request_came(client, request)
        if isinstance(request, SlotFrom):  # the client may have had another in mind, whose successor was on its way
            there = self.transits.get((client, request.engine_id, request.source_slot))
            if there is not None:
                self.found[client, request.seq] = there

    def client_gone(self, client: int) -> None:
        """A connection ended: nobody waits there any more."""
        self.waiting = {key: request for key, request in self.waiting.items() if key[0] != client}
        self.transits = {key: there for key, there in self.transits.items() if key[0] != client}
        self.found = {key: there for key, there in self.found.items() if key[0] != client}
        self.images.client_gone(client)

    def daemon_gone(self) -> None:
        """The daemon is no more: nobody waits for it."""
        self.waiting.clear()
        self.transits.clear()
        self.found.clear()
        self.jobs.fresh = []
        self.images.daemon_gone()

    def after_event(self, *, full: bool) -> None:
        """What must hold between any two events; with `full` also the core's own recount."""
        self.images.after_event()
        if self.jobs.fresh:
            self.jobs.after_event(self.images.published)
        if full:
            try:
                self.world.core.validate()
            except AssertionError as found:
                check(False, f"recount: {found or 'an assertion of Core.validate'}")

    def blamed(self, line: LogLine) -> None:
        """The core holds a worker's death against an operation, or suspects it: one that was copied when it died."""
        if line.message not in _BLAME:
            return
        process = self.dying
        assert process is not None, "deaths are noticed one after another"
        self.world.tally.counts[_BLAME[line.message]] += 1
        copied = {process.op_of[job] for job in (*process.under_way, process.lost_by) if job}
        op = dict(line.fields)["op"]
        check(
            op in copied, f"operation {op} is blamed for the end of {process.pid}, which was copying {sorted(copied)}"
        )

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
        mine = self.jobs.of_request(*key)
        if isinstance(reply, Progress):
            if reply.state == "source_free":
                reading = [n for n in mine if not n.source_read]
                check(not reading, f"rows of request {reply.seq} are told free while {who(reading)} reads them")
            if reply.state == "group":
                self._check_group(reply, pending, client)
            return
        request = self.waiting.pop(key)
        check(not mine, f"request {reply.seq} is answered while {who(mine)} may still touch its rows")
        self._true(reply, request, pending, client)

    def _true(self, reply: Reply, request: Request, pending: Pending, client: int) -> None:
        catalog = self.world.core.state.catalog
        match reply:
            case Restored():
                if isinstance(request, SlotFrom):
                    self._check_transit(reply, request, pending, client)
                self._check_restored(reply, request, pending)
                if isinstance(request, Restore) and request.take:
                    owner = (client, request.engine_id)
                    if owner not in self.images.closed:  # a closed engine holds nothing any more
                        self.images.taken[reply.image_id] = owner
                        self.images.taken_s[reply.image_id] = self.world.now_s
            case Copied():
                self._check_memory(pending, pending.tokens, "copied")
            case PartLoaded() if pending.target is not None and pending.engine is not None and pending.tokens:
                version, count = pending.tokens
                first = pending.target.first_row
                found = pending.engine.pools[0].rows[0][first : first + count]
                check(found == part_content(version, count), "wrong bytes: a part that was got is not what was put")
            case Captured() if isinstance(request, SlotTo):
                check(reply.tokens == request.tokens, "a transit image has another number of tokens than asked for")
                self.transits[client, request.engine_id, request.slot] = (reply.image_id, pending.tokens)
            case Done() if isinstance(request, SlotDrop):
                self.transits.pop((client, request.engine_id, request.slot), None)
            case Captured():
                self._check_captured(reply, request)
                self._check_recorded(reply.image_id)
            case Found() if reply.match == "hit" and isinstance(request, Lookup):
                image = catalog.images.get(reply.image_id)
                check(
                    image is not None and not image.damaged, f"lookup found image {reply.image_id}, which is not good"
                )
                asked = request.tokens[: reply.tokens * 4]
                check(image is not None and image.tokens[: len(asked)] == asked, "lookup found other tokens")
            case Done() if isinstance(request, Pin):
                images = {image.image_id for image in catalog.named(request.namespace, request.conversation)}
                self.images.pinned = self.images.pinned | images if request.pinned else self.images.pinned - images
            case Failed() if pending.target is not None and pending.before:
                self._check_untouched(reply, pending)
            case Traced():
                _check_trace(reply)

    def _check_recorded(self, image_id: int) -> None:
        """Before anybody is told of an image, it is in the journal (it may have made room again since)."""
        ever = any(getattr(record, "image_id", 0) == image_id for record in self.world.journal.records)
        check(ever, f"image {image_id} is told published before its record is written")

    def _image(self, image_id: int) -> tuple[int, ...]:
        check(image_id in self.images.tokens, f"image {image_id} is told restored, and never was")
        return unpack_numbers(self.images.tokens[image_id])

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

    def _check_group(self, reply: Progress, pending: Pending, client: int) -> None:
        """The rows of a group that is told are those of the image, although others may be on their way."""
        assert isinstance(pending.request, Restore)
        check(pending.request.layered, f"request {reply.seq} is told of groups and has not asked for them")
        ops = self.world.core.state.ops.values()
        op = next(op for op in ops if (op.client, op.seq) == (client, reply.seq))
        truth = self.audit.truths.get(op.image.image_id) if op.image is not None else None
        if reply.group or truth is None:
            return
        assert pending.engine is not None
        assert pending.target is not None
        first, stage = pending.target.first_row, reply.stage
        now = pending.engine.pools[stage].rows[0][first : first + op.token_count]
        wanted = truth[stage][: op.token_count]
        check(now == wanted, f"wrong bytes: stage {stage} of request {reply.seq} does not hold the group it is told of")

    def _check_transit(self, reply: Restored, request: SlotFrom, pending: Pending, client: int) -> None:
        """What is restored is the transit image that was there when the request was served, and is gone unless kept."""
        slot = (client, request.engine_id, request.source_slot)
        image_id, pending.tokens = self.found.pop((client, request.seq), (0, []))
        check(reply.image_id == image_id, f"restored image {reply.image_id} out of slot {slot[2]}, told was {image_id}")
        check(reply.tokens == len(pending.tokens), f"restored {reply.tokens} tokens of {len(pending.tokens)}")
        if not request.keep and self.transits.get(slot, (0, []))[0] == image_id:
            del self.transits[slot]

    def _check_restored(self, reply: Restored, request: Request, pending: Pending) -> None:
        if isinstance(request, Restore):
            tokens = self._image(reply.image_id)
            asked = request.tokens if request.tokens != -1 else len(tokens)
            check(reply.tokens == asked, f"restored {reply.tokens} tokens, asked for {asked}")
            pending.tokens = list(tokens[: reply.tokens])
        check(all(o.state == "done" for o in reply.stages), "told restored although a stage did not end well")
        truth = self.audit.truths.get(reply.image_id) if isinstance(request, Restore) else None
        self._check_memory(pending, pending.tokens, "restored", exactly=not isinstance(request, Restore))
        for stage, before in enumerate(truth or ()):
            assert pending.engine is not None
            assert pending.target is not None
            first = pending.target.first_row
            now = pending.engine.pools[stage].rows[0][first : first + reply.tokens]
            check(now == before[: reply.tokens], f"wrong bytes: slot {pending.target.number} does not hold the image's")

    @staticmethod
    def _check_memory(pending: Pending, tokens: list[int], verb: str, *, exactly: bool = True) -> None:
        engine, target = pending.engine, pending.target
        assert engine is not None
        assert target is not None
        held = engine.holds(target, tokens, exactly=exactly)
        check(held, f"wrong bytes: slot {target.number} does not hold what was {verb}")

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
            undefined = row_numbers(outcome.rows_undefined) if outcome is not None else frozenset()
            for at, (was, row) in enumerate(zip(before[0], now[0], strict=True)):
                told = target.first_row + at in undefined
                check(told or was == row, f"row {target.first_row + at} of stage {stage} was written, and not told so")
            told = GROUP + target.number in undefined
            check(told or before[1] == now[1], f"a state of stage {stage} was written, and not told so")


def _check_trace(reply: Traced) -> None:
    """Nothing of an operation's time is missing from the trace, and nothing is in it twice."""
    for op in reply.ops:
        for stage in op.stages:
            steps_s = sum(getattr(stage, f"{step}_s") for step in STEPS)
            check(abs(steps_s - op.total_s) < 1e-6, f"the steps of a {op.kind} take {steps_s} s, it {op.total_s} s")
