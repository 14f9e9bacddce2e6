"""What must outlive the daemon is recorded before anybody is told, and what cannot be recorded does not happen."""

from collections.abc import Callable

import pytest

from ipc.messages import Acknowledge, Captured, CaptureJob, Clear, Copied, Done, Drop, Lookup, Pin, Restored
from stratad.core.core import Core
from stratad.core.effects import Append, Effect, ReplyTo, SendTo
from stratad.core.journaling import RETRY_S
from stratad.core.records import DropRecord, ImageRecord, Record, WorkerRecord, replay
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import MIB, Harness, pack_tokens

MakeCore = Callable[..., Harness]
FULL = "No space left on device"


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def published(core: Harness, engine: int, conversation: str = "a", **how: object) -> Captured:
    seq = core.capture(engine, conversation, **how)  # type: ignore[arg-type]
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured), reply
    return reply


def images(records: list[Record]) -> list[ImageRecord]:
    return [record for record in records if isinstance(record, ImageRecord)]


def position(core: Harness, wanted: Callable[[Effect], bool]) -> int:
    return next(n for n, effect in enumerate(core.effects) if wanted(effect))


def test_the_record_comes_before_the_reply(core: Harness) -> None:
    engine = core.register()
    captured = published(core, engine)
    appended = position(core, lambda e: isinstance(e, Append) and bool(images(list(e.records))))
    replied = position(core, lambda e: isinstance(e, ReplyTo) and isinstance(e.message, Captured))
    assert appended < replied
    (record,) = images(core.records)
    assert (record.image_id, record.conversation, record.tokens) == (captured.image_id, "a", pack_tokens(range(600)))
    assert (record.owner, record.fields["model"], record.workers) == (1000, "m", ("cpu:0", "cpu:1"))


def test_an_image_whose_record_is_being_written_is_seen_by_nobody(core: Harness) -> None:
    engine = core.register()
    core.capture(engine)
    seen: list[int] = []
    journaled = Core.journaled

    def look(self: Core, serial: int, error: str, at: object) -> list[Effect]:
        seen.append(len(self.state.catalog.images))
        return journaled(self, serial, error, at)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Core, "journaled", look)
        core.finish_all()
    assert seen == [0]
    assert len(core.core.state.catalog.images) == 1


def test_a_new_image_of_a_conversation_ends_the_former_one_by_the_same_record(core: Harness) -> None:
    engine = core.register()
    first = published(core, engine)
    core.ask(1, Pin(core.next_seq(), "ns", "a", True))
    second = published(core, engine, tokens=range(300))
    assert images(core.records)[-1].supersedes == first.image_id
    assert images(core.records)[-1].pinned
    assert list(replay(core.records).images) == [second.image_id]


def test_each_process_is_recorded_before_anything_is_copied_there(core: Harness) -> None:
    assert [r for r in core.records if isinstance(r, WorkerRecord)] == [
        WorkerRecord("cpu:0", 1000, 5),
        WorkerRecord("cpu:1", 1000, 5),
    ]


def test_without_a_record_of_the_process_nothing_is_captured_there(core: Harness) -> None:
    engine = core.register()
    core.journal_error = FULL
    core.worker_gone("cpu:1")
    core.tick(0.1)
    assert not core.core.state.workers["cpu:1"].recorded
    core.journal_error = ""
    core.tick(RETRY_S)
    published(core, engine)
    assert core.core.state.workers["cpu:1"].recorded


@pytest.mark.parametrize("when", ["before", "at its end"])
def test_a_capture_that_cannot_be_recorded_fails_and_leaves_nothing(core: Harness, when: str) -> None:
    engine = core.register()
    published(core, engine, "kept")
    held = core.core.state.catalog.used_bytes
    if when == "before":
        core.journal_error = FULL
        core.ask(1, Pin(core.next_seq(), "ns", "kept", True))
    seq = core.capture(engine, "b", [7] * 300)
    core.journal_error = FULL
    core.finish_all()
    failed = core.failure(1, seq)
    assert failed.code == "journal_unwritable"
    assert FULL in failed.message
    assert core.core.state.catalog.used_bytes == held
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["kept"]
    # What is there is served all along, and captures as soon as there is room again.
    restore = core.restore(engine, "kept")
    core.finish_all()
    assert isinstance(core.final(1, restore), Restored)
    core.journal_error = ""
    early = core.capture(engine, "b", [7] * 300)
    assert core.failure(1, early).code == "journal_unwritable"
    core.tick(RETRY_S)
    published(core, engine, "b", tokens=[7] * 300)


def test_chunks_of_an_image_that_could_not_be_recorded_stay_where_another_shares_them(core: Harness) -> None:
    engine = core.register()
    published(core, engine, "a")
    seq = core.capture(engine, "b")
    core.journal_error = FULL
    core.finish_all()
    assert core.failure(1, seq).code == "journal_unwritable"
    core.core.validate()
    restore = core.restore(engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, restore), Restored)


def test_drop_clear_and_pin_that_cannot_be_recorded_change_nothing(core: Harness) -> None:
    engine = core.register()
    published(core, engine)
    for request in (
        Drop(core.next_seq(), "ns", "a"),
        Clear(core.next_seq(), "ns"),
        Pin(core.next_seq(), "ns", "a", True),
    ):
        core.journal_error = FULL
        core.ask(1, request)
        assert core.failure(1, request.seq).code == "journal_unwritable"
        core.journal_error = ""
        core.tick(RETRY_S)
    (image,) = core.core.state.catalog.images.values()
    assert not image.pinned
    assert core.ask(1, drop := Drop(core.next_seq(), "ns", "a")) == [Done(drop.seq, 1)]
    assert core.records[-1] == DropRecord((image.image_id,))


def test_a_take_whose_end_cannot_be_recorded_leaves_the_image(core: Harness) -> None:
    engine = core.register()
    captured = published(core, engine)
    core.restore(engine, take=True)
    core.finish_all()
    core.journal_error = FULL
    acknowledge = Acknowledge(core.next_seq(), engine, captured.image_id)
    core.ask(1, acknowledge)
    assert core.failure(1, acknowledge.seq).code == "journal_unwritable"
    assert core.core.state.catalog.images[captured.image_id].taken == 0
    core.journal_error = ""
    core.tick(RETRY_S)
    core.restore(engine, take=True)
    core.finish_all()
    core.ask(1, again := Acknowledge(core.next_seq(), engine, captured.image_id))
    assert core.final(1, again.seq) == Done(again.seq, 1)
    assert replay(core.records).images == {}


def test_the_end_of_what_makes_room_is_recorded_before_its_extents_go_to_others(make_core: MakeCore) -> None:
    core = make_core(budget_bytes=2 * MIB, shuttle_bytes=MIB, arena_bytes=MIB)
    core.connect()
    engine = core.register()
    first = published(core, engine, "a", tokens=range(600))
    core.effects.clear()
    core.capture(engine, "b", [1] * 600)
    dropped = position(core, lambda e: isinstance(e, Append) and e.records == (DropRecord((first.image_id,)),))
    sent = position(core, lambda e: isinstance(e, SendTo) and isinstance(e.command, CaptureJob))
    assert dropped < sent
    core.finish_all()
    assert core.core.state.catalog.evictions == 1


def test_what_cannot_be_recorded_is_not_evicted(make_core: MakeCore) -> None:
    core = make_core(budget_bytes=2 * MIB, shuttle_bytes=MIB, arena_bytes=MIB)
    core.connect()
    engine = core.register()
    published(core, engine, "a", tokens=range(600))
    core.journal_error = FULL
    seq = core.capture(engine, "b", [1] * 600)
    assert core.failure(1, seq).code == "journal_unwritable"
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["a"]
    assert core.core.state.catalog.evictions == 0


def test_a_put_is_recorded_before_it_is_answered_or_comes_to_nothing(core: Harness) -> None:
    exchange = CoreExchange.register(core)
    put = exchange.begin("a")
    exchange.put(put, "x", 5000)
    core.finish_all()
    core.journal_error = FULL
    reply = exchange.commit(put)
    assert getattr(reply, "code", "") == "journal_unwritable"
    assert core.core.state.catalog.used_bytes == 0
    core.journal_error = ""
    core.tick(RETRY_S)
    put = exchange.begin("a", range(8))
    exchange.put(put, "x", 5000)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)
    (record,) = images(core.records)
    assert record.parts is not None
    assert [(part.name, part.nbytes) for part in record.parts] == [("x", 5000)]


def test_slot_copies_are_not_recorded(core: Harness) -> None:
    engine = core.register()
    before = list(core.records)
    core.journal_error = FULL
    seq = core.slot_copy(engine, "slot_to")
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)
    seq = core.slot_copy(engine, "slot_direct")
    core.finish_all()
    assert isinstance(core.final(1, seq), Copied)
    assert core.records == before


def test_damage_is_recorded_so_that_the_next_daemon_shares_no_damaged_chunk(core: Harness) -> None:
    engine = core.register()
    captured = published(core, engine)
    core.restore(engine)
    core.fail("cpu:1", "damaged", chunk=1)
    core.finish_all()
    record = replay(core.records).images[captured.image_id]
    assert record.damaged == ((1, 1),)
    look = Lookup(core.next_seq(), engine, pack_tokens(range(600)))
    assert getattr(core.ask(1, look)[0], "match", "") == "miss"


def test_damage_is_recorded_of_an_image_that_was_damaged_before(core: Harness) -> None:
    engine = core.register()
    one = published(core, engine, "a", tokens=range(600)).image_id
    other = published(core, engine, "b", tokens=range(512)).image_id
    core.restore(engine, "a")
    core.restore(engine, "b", rows=512, first_row=1000)
    core.fail("cpu:0", "damaged", chunk=2)  # which only one of them has
    core.fail("cpu:1", "damaged", chunk=0)  # which both have
    core.finish_all()
    found = replay(core.records).images
    assert (found[one].damaged, found[other].damaged) == (((0, 2), (1, 0)), ((1, 0),))
    assert core.core.state.counters["images_damaged"] == 2


def test_two_captures_that_wait_for_room_have_an_image_each_evicted(make_core: MakeCore) -> None:
    core = make_core(1, budget_images=2)
    core.connect()
    engine = core.register(stages=1)
    old = [published(core, engine, name, tokens=range(256)).image_id for name in ("a", "b")]
    core.worker_gone("cpu:0")
    waiting = [core.capture(engine, name, range(256), first_row=n * 256) for n, name in enumerate(("c", "d"))]
    core.tick(1.0)
    core.finish_all()
    assert all(isinstance(core.final(1, seq), Captured) for seq in waiting)
    assert [r.image_ids for r in core.records if isinstance(r, DropRecord)] == [(old[0],), (old[1],)]
    assert core.core.state.catalog.evictions == len(old)
