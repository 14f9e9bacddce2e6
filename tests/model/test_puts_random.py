"""The core under random events with puts and gets among them: see `tests.model.test_core_random`."""

from collections import Counter

import pytest

from ipc.messages import GetBegin, GetEnd, GetPart, PutAbort, PutBegin, PutCommit, PutPart, Request
from shm.rows import pack_rows
from stratad.core.state import Engine, WorkerState
from tests.model.test_core_random import CONVERSATIONS, STEPS, World
from tests.support.core_exchange import STEP, CoreExchange
from tests.support.core_harness import pack_tokens

SEEDS = 60
ROW = 4096
# Bytes of a part: nothing, a little, one chunk, a chunk and a row, three chunks.
SIZES = (0, 10, STEP * ROW, STEP * ROW + 1, 3 * STEP * ROW)
NAMES = ("x", "y", "z")


class PutWorld(World):
    """A world whose clients put and get as well, most of the time sensibly."""

    def step(self) -> None:
        if self.random.random() < 0.3:
            super().step()
            return
        actions = [
            (self.connect, 3), (self.open_exchange, 5), (self.begin_put, 3), (self.put_part, 10),
            (self.commit, 4), (self.abort, 0.3),
            (self.begin_get, 4), (self.get_part, 12), (self.end_get, 1), (self.finish, 14), (self.fail, 1),
        ]  # fmt: skip
        self.random.choices([a for a, _ in actions], [weight for _, weight in actions])[0]()
        self.core.core.validate()

    @property
    def exchanges(self) -> list[Engine]:
        return [e for e in self.core.core.state.engines.values() if e.exchange and e.registered and not e.closing]

    def ask(self, engine: Engine, request: Request) -> None:
        self.core.ask(engine.client, request)
        self.note(engine.client, request.seq)
        self.reached[type(request).__name__] += 1

    def open_exchange(self) -> None:
        clients = sorted(self.core.core.state.clients)
        worker = self.random.choice(sorted(self.core.core.state.workers))
        ready = self.core.core.state.workers[worker].state is WorkerState.READY
        if clients and ready and len(self.exchanges) < 4:
            CoreExchange.register(self.core, self.random.choice(clients), worker=worker)

    def begin_put(self) -> None:
        if self.exchanges:
            engine = self.random.choice(self.exchanges)
            tokens = pack_tokens(range(self.random.choice([0, 5, 300])))
            name = self.random.choice(CONVERSATIONS)
            self.ask(engine, PutBegin(self.core.next_seq(), engine.engine_id, name, tokens))

    def put_part(self) -> None:
        engines = [engine for engine in self.exchanges if engine.puts]
        if engines:
            engine = self.random.choice(engines)
            put = engine.puts[self.random.choice(sorted(engine.puts))]
            name, nbytes = self.random.choice(NAMES), self.random.choice(SIZES)
            total = -(-nbytes // ROW)
            first = self.random.choice([0, 0, 0, STEP]) if total > STEP else 0
            part = put.parts.get(name)
            if part is not None and part.row_count > STEP and self.random.random() < 0.8:
                nbytes, total, first = part.nbytes, part.row_count, self.random.choice([0, STEP, 2 * STEP])
            count = max(min(self.random.choice([STEP, total - first, total - first]), total - first), 0)
            rows = pack_rows([(self.random.randrange(0, 1024, 128), count)]) if count else b""
            seq, deadline_s = self.core.next_seq(), self.random.choice([0.5, 30.0])
            self.ask(engine, PutPart(seq, engine.engine_id, put.put_id, name, nbytes, rows, "", first, deadline_s))

    def commit(self) -> None:
        for engine in self.exchanges:
            for put_id in sorted(engine.puts):
                if engine.puts[put_id].parts or self.random.random() < 0.2:
                    self.ask(engine, PutCommit(self.core.next_seq(), engine.engine_id, put_id))

    def abort(self) -> None:
        for engine in self.exchanges:
            for put_id in sorted(engine.puts):
                if self.random.random() < 0.3:
                    self.ask(engine, PutAbort(self.core.next_seq(), engine.engine_id, put_id))

    def begin_get(self) -> None:
        if self.exchanges:
            engine = self.random.choice(self.exchanges)
            put = [image for image in self.core.core.state.catalog.images.values() if image.parts]
            image = self.random.choice(put) if put else None
            engine = next((e for e in self.exchanges if image and image.scope == e.scope), engine)
            name = image.conversation if image else self.random.choice(CONVERSATIONS)
            self.ask(engine, GetBegin(self.core.next_seq(), engine.engine_id, name))

    def get_part(self) -> None:
        engines = [engine for engine in self.exchanges if engine.gets]
        if engines:
            engine = self.random.choice(engines)
            get = engine.gets[self.random.choice(sorted(engine.gets))]
            parts = get.image.parts or ()
            number = self.random.randrange(len(parts))
            total = -(-parts[number].nbytes // ROW)
            first = self.random.choice([0, 0, STEP]) if total > STEP else 0
            rows = pack_rows([(self.random.randrange(0, 1024, 128), total - first)]) if total else b""
            self.ask(engine, GetPart(self.core.next_seq(), engine.engine_id, get.get_id, number, rows, first))

    def end_get(self) -> None:
        for engine in self.exchanges:
            for get_id in sorted(engine.gets):
                if self.random.random() < 0.5:
                    self.ask(engine, GetEnd(self.core.next_seq(), engine.engine_id, get_id))

    def settle(self) -> None:
        """Every client goes, and with it every put and hold; then nothing is staged any more."""
        for client in sorted(self.core.core.state.clients):
            self.core.perform(self.core.core.client_gone(client, self.core.at))
            self.asked = {seq: owner for seq, owner in self.asked.items() if owner != client}
        super().settle()
        assert self.core.core.state.catalog.staged == ()
        assert self.core.core.state.catalog.open_puts == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    world = PutWorld(seed)
    for _ in range(STEPS):
        world.step()
    answered = {seq for replies in world.core.replies.values() for seq in (reply.seq for reply in replies)}
    in_flight = {op.seq for op in world.core.core.state.ops.values()}
    assert {seq for seq in world.asked if seq not in answered} <= in_flight
    world.settle()


def test_the_seeds_reach_what_they_should() -> None:
    reached: Counter[str] = Counter()
    for seed in range(12):
        world = PutWorld(seed)
        for _ in range(STEPS):
            world.step()
        reached.update(type(reply).__name__ for replies in world.core.replies.values() for reply in replies)
        reached["held at the end"] += sum(len(engine.gets) for engine in world.core.core.state.engines.values())
        world.settle()
        reached += world.reached
        reached.update(world.core.core.state.counters)
        reached["evictions"] += world.core.core.state.catalog.evictions
    wanted = {
        "PutBegun", "PartStored", "Captured", "Parts", "PartLoaded", "Failed", "puts", "puts_ended", "put_parts",
        "put_parts_failed", "gets", "get_parts", "get_parts_failed", "held at the end", "worker death", "evictions",
        "PutAbort", "GetEnd", "images_damaged", "captures", "restores",
    }  # fmt: skip
    assert wanted <= {name for name, count in reached.items() if count}, reached
