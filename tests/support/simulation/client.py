"""An engine's process: what it asks for, and what it then believes."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ipc.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    Cancel,
    Capture,
    Captured,
    Clear,
    Copied,
    Done,
    Drop,
    Failed,
    GetBegin,
    GetPart,
    Goodbye,
    Hello,
    Lift,
    ListImages,
    Lookup,
    Mark,
    Memory,
    PartLoaded,
    Parts,
    PartStored,
    Pin,
    Progress,
    PutAbort,
    PutBegin,
    PutBegun,
    PutCommit,
    PutPart,
    Register,
    Registered,
    Release,
    Reply,
    Request,
    ResetWorker,
    RestartWorker,
    Restore,
    Restored,
    SetTrace,
    Show,
    SlotDirect,
    SlotDrop,
    SlotFrom,
    SlotTo,
    Stats,
    Trace,
    Unregister,
)
from shm.rows import pack_numbers
from tests.support.simulation import exchange
from tests.support.simulation.content import Pool
from tests.support.simulation.engine import CONVERSATIONS, Pending, SimEngine, SimPut, Slot, tokens_of

WRITERS: Final = (Restore, SlotDirect, SlotFrom)


@dataclass(slots=True, eq=False)
class SimClient:
    """One process. `number` is that of its connection (0: none); `inbox` and `outbox` are the requests on their way to
    the daemon and the replies on their way back.
    """

    name: str
    pid: int
    rng: random.Random
    engines: list[SimEngine]
    reached: Counter[str]
    number: int = 0
    greeted: bool = False
    dead: bool = False
    inbox: deque[Request] = field(default_factory=deque)
    outbox: deque[Reply] = field(default_factory=deque)
    pending: dict[int, Pending] = field(default_factory=dict)
    descriptors: dict[int, Pool] = field(default_factory=dict)  # that have travelled over its lifeline
    seq: int = 0
    next_descriptor: int = 0
    put_names: set[str] = field(default_factory=set)
    known: dict[str, int] = field(default_factory=dict)  # conversations that it believes to be there, and their tokens
    sent: int = 0

    def send(self, request: Request, pending: Pending) -> None:
        """Put a request on its way."""
        self.pending[request.seq] = pending
        for slot in pending.slots:
            slot.busy.add(request.seq)
        self.inbox.append(request)
        self.sent += 1

    def next_seq(self) -> int:
        """A number that no request had."""
        self.seq += 1
        return self.seq

    def lose_connection(self, served_by: set[tuple[str, int]]) -> None:
        """Nobody will answer any more. Rows of what was under way stay out of use until all who may touch them are
        gone.
        """
        for pending in self.pending.values():
            for slot in pending.slots:
                slot.held_by |= served_by
                if pending.target is slot:
                    slot.tokens = None
        self.pending.clear()
        for engine in self.engines:
            engine.forget()
            for slot in engine.slots:
                slot.busy.clear()
                slot.poisoned = False
        self.inbox.clear()
        self.outbox.clear()
        self.descriptors.clear()
        self.number = 0
        self.greeted = False

    def process_gone(self, process: tuple[str, int]) -> None:
        """A worker's process is proven gone."""
        for engine in self.engines:
            for slot in engine.slots:
                slot.held_by.discard(process)

    # --- what it does -------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """Do one thing, mostly a sensible one. False: it could not think of any."""
        if not self.greeted:
            if self.pending:
                return False
            seq = self.next_seq()
            self.send(Hello(seq, PROTOCOL_VERSION, b"", self.name), Pending(Hello(seq, PROTOCOL_VERSION, b"")))
            return True
        engine = self.engines[-1] if self.rng.random() < 0.6 else self.engines[0]
        if engine.engine_id == 0:
            return self._register(engine)
        if len(self.pending) > 4:
            return False
        roll = self.rng.random()
        if roll < 0.09:
            return self._administer(engine)
        if engine.exchange:
            return exchange.act(self, engine)
        return self._work(engine)

    def _register(self, engine: SimEngine) -> bool:
        if engine.registering in self.pending:
            return False
        descriptors = []
        for pool in engine.pools:
            self.next_descriptor += 1
            self.descriptors[self.next_descriptor] = pool
            descriptors.append(self.next_descriptor)
        request = engine.register(self.next_seq(), descriptors)
        engine.registering = request.seq
        self.send(request, Pending(request, engine))
        return True

    def _work(self, engine: SimEngine) -> bool:
        if engine.taken and self.rng.random() < 0.5:
            image_id = engine.taken.pop()
            kind = Acknowledge if self.rng.random() < 0.7 else Release
            request = kind(self.next_seq(), engine.engine_id, image_id)
            self.send(request, Pending(request, engine))
            return True
        slot = self.rng.choice(engine.slots)
        if slot.busy and not slot.held_by and self.rng.random() < 0.05:
            return self._restore(engine, slot, careless=True)
        if slot.busy or slot.held_by:
            return False
        if slot.poisoned:
            return self._mark(engine, slot, "clean")
        roll = self.rng.random()
        if slot.tokens is None or roll < 0.06:
            conversation = self.rng.choice(CONVERSATIONS)
            version = 0 if self.rng.random() < 0.8 else self.rng.randrange(3)
            count = self.rng.choice((1, 3, 4, 5, 8, 9, 10, 12))
            engine.fill(slot, tokens_of(conversation, count, version), conversation)
            roll = 0.1
        if roll < 0.33 or (not self.known and roll < 0.75):
            if self.rng.random() < 0.2 and slot.tokens:
                engine.twist(slot, self.rng.randrange(len(slot.tokens)), self.rng.randrange(len(engine.pools)))
            return self._capture(engine, slot)
        if roll < 0.75 and self.known:
            return self._restore(engine, slot)
        if slot.twisted:  # of what follows only the tokens are kept
            return False
        if roll < 0.86:
            return self._slot_copy(engine, slot)
        if slot.tokens and self.rng.random() < 0.8:
            return self._declare(engine, slot)
        return self._mark(engine, slot, self.rng.choice(("clean", "dirty", "poisoned")))

    def deadline_s(self) -> float:
        """How long it will wait."""
        return 30.0 if self.rng.random() < 0.9 else 0.4

    def _capture(self, engine: SimEngine, slot: Slot) -> bool:
        tokens = slot.tokens or []
        request = Capture(
            self.next_seq(),
            engine.engine_id,
            slot.conversation,
            pack_numbers(tokens),
            engine.rows(slot, len(tokens)),
            slot.number,
            "host",
            engine.positions(len(tokens)),
            self.deadline_s(),
        )
        self.send(request, Pending(request, engine, (slot,), tokens=tokens))
        return True

    def _conversation(self, *, there: bool) -> str:
        """One that is there, as far as it knows, or any."""
        if there and self.known and self.rng.random() < 0.95:
            return self.rng.choice(sorted(self.known))
        return self.rng.choice(CONVERSATIONS)

    def _restore(self, engine: SimEngine, slot: Slot, *, careless: bool = False) -> bool:
        """Restore whatever is there; the rows for the largest image are named, and mostly all its tokens asked for. A
        careless client does not ask itself whether the rows are free.
        """
        tokens = -1 if engine.has_state or self.rng.random() < 0.8 else self.rng.choice((1, 4, 5))
        request = Restore(
            self.next_seq(),
            engine.engine_id,
            self._conversation(there=True),
            engine.rows(slot, 12 if tokens == -1 else tokens),
            slot.number,
            "host",
            tokens=tokens,
            take=self.rng.random() < 0.35,
            deadline_s=self.deadline_s(),
            resident_tokens=self.rng.choice((0, 4, 12)),
        )
        before = [] if careless else engine.snapshot(slot)
        self.send(request, Pending(request, engine, (slot,), slot, before))
        return True

    def _slot_copy(self, engine: SimEngine, slot: Slot) -> bool:
        free = [s for s in engine.slots if s is not slot and not s.busy and not s.held_by]
        roll = self.rng.random()
        seq = self.next_seq()
        if engine.transits and roll < 0.45:
            source = self.rng.choice(sorted(engine.transits))
            if roll < 0.05:
                self.send(
                    SlotDrop(seq, engine.engine_id, source), Pending(SlotDrop(seq, engine.engine_id, source), engine)
                )
                return True
            tokens = engine.transits[source]
            keep = self.rng.random() < 0.4
            rows = engine.rows(slot, len(tokens))
            request: Request = SlotFrom(seq, engine.engine_id, source, rows, slot.number, "host", keep)
            self.send(request, Pending(request, engine, (slot,), slot, engine.snapshot(slot), tokens))
        elif slot.tokens is not None and (roll < 0.75 or not free):
            count = len(slot.tokens)
            request = SlotTo(seq, engine.engine_id, count, engine.rows(slot, count), slot.number, "host")
            self.send(request, Pending(request, engine, (slot,), tokens=slot.tokens))
        elif slot.tokens is not None:
            target, count = free[0], len(slot.tokens)
            rows, written = engine.rows(slot, count), engine.rows(target, count)
            request = SlotDirect(seq, engine.engine_id, count, rows, written, slot.number, target.number, "host")
            before = engine.snapshot(target)
            self.send(request, Pending(request, engine, (slot, target), target, before, slot.tokens))
        else:
            return False
        return True

    def _declare(self, engine: SimEngine, slot: Slot) -> bool:
        """Mark a slot clean and say what it holds: that outlives the engine."""
        tokens = slot.tokens or []
        rows = engine.rows(slot, len(tokens))
        packed, seq = pack_numbers(tokens), self.next_seq()
        request = Mark(seq, engine.engine_id, slot.number, "clean", slot.conversation, packed, rows)
        self.send(request, Pending(request, engine, (slot,)))
        return True

    def _mark(self, engine: SimEngine, slot: Slot, mark: str) -> bool:
        request = Mark(self.next_seq(), engine.engine_id, slot.number, mark)
        slot.poisoned = mark == "poisoned"
        self.send(request, Pending(request, engine))
        return True

    def _administer(self, engine: SimEngine) -> bool:
        seq, name = self.next_seq(), self._conversation(there=self.rng.random() < 0.7)
        kinds: list[Callable[[], Request]] = [
            lambda: Drop(seq, "ns", name),
            lambda: Drop(seq, "ns", name, force=True),
            lambda: Pin(seq, "ns", name, True),
            lambda: Pin(seq, "ns", name, True),
            lambda: Pin(seq, "ns", name, False),
            lambda: Lookup(seq, engine.engine_id, pack_numbers(tokens_of(name, 11, self.rng.randrange(2)))),
            lambda: Lookup(seq, engine.engine_id, pack_numbers(tokens_of(name, 11))),
            lambda: Stats(seq),
            lambda: ListImages(seq, "ns"),
            lambda: Show(seq, "ns", name),
            lambda: Cancel(seq, self.rng.choice(sorted(self.pending))),
            lambda: Cancel(seq, self.rng.choice(sorted(self.pending))),
            lambda: Cancel(seq, self.rng.choice(sorted(self.pending))),
            lambda: Memory(seq),
            lambda: Clear(seq, "ns"),
            lambda: Unregister(seq, engine.engine_id),
            lambda: Goodbye(seq),
            lambda: Lift(seq, "ns", name),
            lambda: RestartWorker(seq, self.rng.choice(engine.devices)),
            lambda: ResetWorker(seq, self.rng.choice(engine.devices), force=self.rng.random() < 0.5),
            lambda: Trace(seq, slowest=self.rng.random() < 0.3),
            lambda: SetTrace(seq, self.rng.random() < 0.7),
        ]
        pick = self.rng.randrange(len(kinds))
        if 10 <= pick <= 12 and not self.pending:
            pick = 0
        request = kinds[pick]()
        if isinstance(request, Unregister):
            for slot in engine.slots:  # what is under way ends, but not at once
                slot.poisoned = False
        self.send(request, Pending(request, engine))
        return True

    # --- what it is told ----------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Read one reply."""
        reply = self.outbox.popleft()
        if reply.seq < 0:
            return
        if isinstance(reply, Progress):
            pending = self.pending[reply.seq]
            if reply.state == "source_free":
                for slot in pending.slots:
                    slot.busy.discard(reply.seq)
            return
        pending = self.pending.pop(reply.seq)
        for slot in pending.slots:
            slot.busy.discard(reply.seq)
        if pending.engine is not None:
            self._learn(reply, pending, pending.engine)
        elif isinstance(pending.request, Hello):
            self.greeted = not isinstance(reply, Failed)

    def _learn(self, reply: Reply, pending: Pending, engine: SimEngine) -> None:
        request, target = pending.request, pending.target
        match reply:
            case Registered():
                engine.engine_id = reply.engine_id
            case Restored() if target is not None:
                target.twisted = not engine.holds(target, pending.tokens)
                if isinstance(request, Restore):
                    target.tokens, target.conversation = pending.tokens or None, request.conversation
                    if request.take:
                        engine.taken.append(reply.image_id)
                        engine.taken_names[reply.image_id] = request.conversation
                else:
                    target.tokens = pending.tokens
                    if isinstance(request, SlotFrom) and not request.keep:
                        engine.transits.pop(request.source_slot, None)
            case Copied() if target is not None:
                target.tokens, target.twisted = pending.tokens, False
            case Captured() if isinstance(request, SlotTo):
                engine.transits[request.slot] = pending.tokens
            case Captured() if isinstance(request, Capture):
                self.known[request.conversation] = reply.tokens
            case PutBegun() if isinstance(request, PutBegin):
                engine.put = SimPut(reply.put_id, request.conversation)
            case PartStored() if engine.put is not None and isinstance(request, PutPart):
                engine.put.stored = engine.put.sent
            case Parts():
                parts = [(p.name, [int(number) for number in p.meta.split()]) for p in reply.parts]
                engine.get = (reply.get_id, tuple((name, version, rows) for name, (version, rows) in parts))
            case Failed():
                self._failed(request, reply, pending, engine)
            case Done() if isinstance(request, Drop):
                self.known.pop(request.conversation, None)
            case Done() if isinstance(request, Acknowledge):
                self.known.pop(engine.taken_names.pop(request.image_id, ""), None)
            case Done() if isinstance(request, Clear):
                self.known.clear()
            case Done() if isinstance(request, Unregister):
                engine.forget()
            case Done() if isinstance(request, SlotDrop):
                engine.transits.pop(request.slot, None)
            case PartLoaded() | Done() | _:
                pass
        if isinstance(request, PutCommit) and engine.put is not None and isinstance(reply, Captured):
            self.put_names.add(engine.put.conversation)
        if isinstance(request, PutCommit | PutAbort) and getattr(reply, "code", "") != "part_incomplete":
            engine.put = None

    def _failed(self, request: Request, reply: Failed, pending: Pending, engine: SimEngine) -> None:
        target = pending.target
        if target is not None and any(o.state == "done" or o.rows_undefined for o in reply.stages):
            target.tokens = None
        if reply.code == "unknown_conversation" and isinstance(request, Restore | GetBegin):
            self.known.pop(request.conversation, None)
            self.put_names.discard(request.conversation)
        if isinstance(request, PutPart):
            self._give_up_put(request, engine)
        elif isinstance(request, PutBegin):
            engine.put = None
        elif isinstance(request, GetPart) and reply.code == "unknown_get":
            engine.get = None
        elif isinstance(request, SlotFrom) and reply.code in ("unknown_image", "damaged"):
            engine.transits.pop(request.source_slot, None)
        elif isinstance(request, Register):
            engine.registering = 0

    def _give_up_put(self, request: PutPart, engine: SimEngine) -> None:
        engine.put = None
        abort = PutAbort(self.next_seq(), engine.engine_id, request.put_id)
        self.send(abort, Pending(abort, engine))
