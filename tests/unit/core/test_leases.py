"""What an engine holds between two calls: kept for as long as it likes, unless another client needs it."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    Acknowledge,
    CancelJob,
    Captured,
    ClosePool,
    CudaIpcPool,
    Done,
    Failed,
    Lookup,
    PutBegin,
    PutBegun,
    Register,
    Registered,
    Release,
    Restored,
    Stage,
    Stats,
    StatsReply,
)
from stratad.core.effects import SendTo
from stratad.core.intake import DEADLINE_LIMIT_S
from stratad.core.registration import GONE_S
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import FINGERPRINT, MIB, Harness, layout, pack_tokens

MakeCore = Callable[..., Harness]
LEASE_S = 60.0
DAY_S = 86_400.0
STUCK, OTHER = 1, 2
PART_BYTES = 1024 * 1024


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    """One worker with room for one image of 1024 tokens; two clients."""
    harness = make_core(1, budget_bytes=MIB + MIB // 2, shuttle_bytes=2 * MIB, arena_bytes=2 * MIB)
    harness.content = lambda stage, chunk: f"{harness.seq}-{stage}-{chunk}".ljust(16).encode()
    harness.connect(STUCK)
    harness.connect(OTHER)
    return harness


def capture(core: Harness, engine: int, client: int, name: str = "wanted") -> Captured | Failed:
    """A capture that needs most of the arena."""
    seq = core.capture(engine, name, range(1024), client=client)
    core.finish_all()
    reply = core.final(client, seq)
    assert isinstance(reply, Captured | Failed)
    return reply


def hold(core: Harness, kind: str) -> tuple[int, Callable[[], str]]:
    """Have the stuck client hold most of the space in one way; its engine, and what it is told when it comes back."""
    if kind in ("put", "get"):
        exchange = CoreExchange.register(core, STUCK)
        if kind == "put":
            put_id = exchange.begin("p")
            exchange.put(put_id, "part", PART_BYTES)
            core.finish_all()
            return exchange.engine_id, lambda: _code(exchange.commit(put_id))
        exchange.put_whole("p", {"part": PART_BYTES})
        get_id = exchange.open("p").get_id
        return exchange.engine_id, lambda: _code(exchange.close(get_id))
    engine = core.register(STUCK, stages=1)
    if kind == "transit":
        core.slot_copy(engine, "slot_to", client=STUCK, tokens=1024, slot=3)
        core.finish_all()
        return engine, lambda: _code(core.final(STUCK, core.slot_copy(engine, "slot_from", client=STUCK, slot=3)))
    image = capture(core, engine, STUCK, "a")
    assert isinstance(image, Captured)
    taken = core.restore(engine, "a", 1024, client=STUCK, take=True)
    core.finish_all()
    assert isinstance(core.final(STUCK, taken), Restored)

    def acknowledge() -> str:
        request = Acknowledge(core.next_seq(), engine, image.image_id)
        core.ask(STUCK, request)
        return _code(core.final(STUCK, request.seq))

    return engine, acknowledge


def _code(reply: object) -> str:
    return reply.code if isinstance(reply, Failed) else "ok"


def info(core: Harness, engine: int) -> tuple[dict[str, int], float]:
    request = Stats(core.next_seq())
    core.ask(STUCK, request)
    reply = core.final(STUCK, request.seq)
    assert isinstance(reply, StatsReply)
    (found,) = [entry for entry in reply.engines if entry.engine_id == engine]
    return found.leases, found.unused_s


KINDS = {"put": "unknown_put", "get": "unknown_get", "transit": "unknown_image", "take": "unknown_image"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_ends_when_another_client_needs_its_space_and_it_was_not_used_for_long(
    core: Harness, kind: str
) -> None:
    engine, come_back = hold(core, kind)
    other = core.register(OTHER, stages=1, namespace="other")
    core.tick(LEASE_S - 1.0)
    assert info(core, engine) == ({kind: 1}, LEASE_S - 1.0)
    failed = capture(core, other, OTHER)
    assert isinstance(failed, Failed)
    assert failed.code == "no_space"
    core.tick(1.0)
    assert isinstance(capture(core, other, OTHER), Captured)
    assert info(core, engine) == ({}, 0.0)
    assert core.core.state.counters["leases_given_up"] == 1
    assert come_back() == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_ends_by_time_alone(core: Harness, kind: str) -> None:
    engine, come_back = hold(core, kind)
    core.tick(DAY_S)
    assert info(core, engine) == ({kind: 1}, DAY_S)
    assert come_back() in ("ok", "bad_rows")  # of a slot_from with too few rows, which found its image


def test_a_clients_own_leases_do_not_end_for_its_own_sake(core: Harness) -> None:
    engine, _ = hold(core, "transit")
    core.tick(DAY_S)
    failed = capture(core, engine, STUCK)
    assert isinstance(failed, Failed)
    assert (failed.code, info(core, engine)[0]) == ("no_space", {"transit": 1})


def test_the_lease_that_was_not_used_for_longest_ends_first_and_no_more_than_needed(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=2 * MIB, shuttle_bytes=4 * MIB, arena_bytes=4 * MIB)
    core.content = lambda stage, chunk: f"{core.seq}-{chunk}".ljust(16).encode()
    core.connect(STUCK)
    core.connect(OTHER)
    engine = core.register(STUCK, stages=1)
    for slot in (5, 4):
        core.slot_copy(engine, "slot_to", client=STUCK, tokens=900, slot=slot)
        core.finish_all()
        core.tick(1.0)
    core.slot_copy(engine, "slot_from", client=STUCK, tokens=900, slot=5, target_row=1000, keep=True)
    core.finish_all()
    core.tick(LEASE_S)
    assert isinstance(capture(core, core.register(OTHER, stages=1), OTHER), Captured)
    assert set(core.core.state.engines[engine].transits) == {5}


@pytest.mark.parametrize("kind", ["put", "get", "transit"])
def test_what_an_operation_belongs_to_is_in_use(core: Harness, kind: str) -> None:
    engine, _ = hold(core, kind)
    if kind == "transit":
        core.slot_copy(engine, "slot_from", client=STUCK, tokens=1024, slot=3, target_row=2000)
    else:
        exchange = CoreExchange(core, engine, STUCK)
        number = next(iter(core.core.state.engines[engine].puts or core.core.state.engines[engine].gets))
        if kind == "put":
            exchange.put(number, "more", 4096, at=300)
        else:
            exchange.get(number, 0, PART_BYTES)
    other = core.register(OTHER, stages=1, namespace="other")
    stuck = core.core.state.engines[engine]  # as if the operation took for ever
    for put in stuck.puts.values():
        put.used_s -= DAY_S
    for get in stuck.gets.values():
        get.used_s -= DAY_S
    for image in stuck.transits.values():
        image.held_s -= DAY_S
    seq = core.capture(other, "wanted", range(1024), client=OTHER, deadline_s=1.0)
    assert info(core, engine)[0] == {kind: 1}
    core.tick(1.0)
    assert core.failure(OTHER, seq).code in ("no_space", "deadline")


def test_a_put_that_needs_an_image_more_than_there_may_be_ends_a_lease_too(make_core: MakeCore) -> None:
    core = make_core(1, budget_images=2)
    core.connect(STUCK)
    core.connect(OTHER)
    stuck, other = CoreExchange.register(core, STUCK), CoreExchange.register(core, OTHER, namespace="other")
    for name in ("x", "y"):
        stuck.begin(name)
    core.tick(LEASE_S)
    request = PutBegin(core.next_seq(), other.engine_id, "z")
    core.ask(OTHER, request)
    assert isinstance(core.final(OTHER, request.seq), PutBegun)
    assert len(core.core.state.engines[stuck.engine_id].puts) == 1


def test_an_image_that_was_taken_and_not_acknowledged_can_be_taken_by_another(core: Harness) -> None:
    _, acknowledge = hold(core, "take")
    other = core.register(OTHER, stages=1)
    core.tick(LEASE_S - 1.0)
    assert core.failure(OTHER, core.restore(other, "a", 1024, client=OTHER, take=True)).code == "image_busy"
    core.tick(1.0)
    seq = core.restore(other, "a", 1024, client=OTHER, take=True)
    core.finish_all()
    assert isinstance(core.final(OTHER, seq), Restored)
    assert acknowledge() == "unknown_image"  # the first taker's: the second one holds it now
    (image,) = core.core.state.catalog.images.values()
    assert image.taken == 1


def test_an_engine_that_is_silent_for_days_is_registered_still(core: Harness) -> None:
    """Whoever lives is heard of through its lifeline: there are no signs of life to be late with."""
    engine = core.register(STUCK, stages=1)
    capture(core, engine, STUCK, "a")
    for _ in range(10):
        core.tick(DAY_S)
    seq = core.restore(engine, "a", 1024, client=STUCK)
    core.finish_all()
    assert isinstance(core.final(STUCK, seq), Restored)


def test_lookups_hold_nothing_and_a_take_is_released_once_by_its_holder_alone(core: Harness) -> None:
    engine, other = core.register(STUCK, stages=1), core.register(OTHER, stages=1)
    image = capture(core, engine, STUCK, "a")
    assert isinstance(image, Captured)
    for number in range(10_000):
        core.perform(core.core.request(STUCK, Lookup(10_000 + number, engine, pack_tokens(range(1024))), core.at))
    core.seq = 30_000
    (held,) = core.core.state.catalog.images.values()
    assert held.evictable
    core.restore(engine, "a", 1024, client=STUCK, take=True)
    core.finish_all()

    def release(client: int, by: int) -> str:
        request = Release(core.next_seq(), by, image.image_id)
        core.ask(client, request)
        return _code(core.final(client, request.seq))

    assert release(OTHER, other) == "unknown_image"
    assert not held.evictable
    assert [release(STUCK, engine), release(STUCK, engine)] == ["ok", "unknown_image"]
    assert held.evictable


def test_captures_of_an_engine_that_is_gone_have_a_second(core: Harness) -> None:
    """Nobody can use the memory of a dead engine before its worker has unmapped it."""
    engine = core.register(STUCK, stages=1)
    core.capture(engine, "a", range(1024), client=STUCK)
    (job,) = core.jobs("cpu:0")
    core.perform(core.core.client_gone(STUCK, core.at))

    def sent(kind: type[object]) -> int:
        return sum(isinstance(e, SendTo) and isinstance(e.command, kind) for e in core.effects)

    core.tick(GONE_S / 2)
    assert sent(CancelJob) == 0
    assert core.core.due_s <= core.now_s + GONE_S / 2
    core.tick(GONE_S / 2)
    assert CancelJob(job.job) in [e.command for e in core.effects if isinstance(e, SendTo)]
    core.tick(1.0)
    assert sent(CancelJob) == 1
    core.fail("cpu:0", "cancelled")
    assert sent(ClosePool) == 1
    assert not core.core.state.engines
    assert core.core.state.catalog.used_bytes == 0


def test_a_capture_that_ends_in_time_is_published_though_its_engine_is_gone(core: Harness) -> None:
    engine = core.register(STUCK, stages=1)
    core.capture(engine, "a", range(1024), client=STUCK)
    core.perform(core.core.client_gone(STUCK, core.at))
    core.tick(GONE_S / 2)
    core.finish_all()
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["a"]
    assert not core.core.state.engines


def test_no_engine_has_its_event_waited_for_without_end(make_core: MakeCore) -> None:
    core = make_core(1, devices={"gpu0": "GPU-1"})
    core.connect(STUCK)
    one = layout()
    pool = CudaIpcPool(b"h" * 64, one.end_bytes, 0, one.end_bytes, b"e" * 64)
    request = Register(core.next_seq(), "ns", "e", FINGERPRINT, (Stage(0, "GPU-1", pool, one),), deadline_s=1e300)
    core.ask(STUCK, request)
    reply = core.final(STUCK, request.seq)
    assert isinstance(reply, Registered)
    core.capture(reply.engine_id, client=STUCK, deadline_s=1e300)
    (op,) = core.core.state.ops.values()
    assert op.deadline_s == core.now_s + DEADLINE_LIMIT_S


def test_done_is_the_answer_to_a_release(core: Harness) -> None:
    engine, _ = hold(core, "take")
    (image_id,) = core.core.state.engines[engine].takes
    request = Release(core.next_seq(), engine, image_id)
    core.ask(STUCK, request)
    assert core.final(STUCK, request.seq) == Done(request.seq, 1)


def test_a_take_that_is_refused_for_another_reason_ends_no_hold(core: Harness) -> None:
    engine, _ = hold(core, "take")
    other = core.register(OTHER, stages=1)
    core.tick(LEASE_S + 1.0)
    assert core.failure(OTHER, core.restore(other, "a", 3, client=OTHER, take=True)).code == "bad_rows"
    assert info(core, engine)[0] == {"take": 1}
