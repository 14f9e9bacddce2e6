"""What the next daemon takes over: images whole or not at all, and a device only when nobody else can write there."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from ipc.messages import (
    Captured,
    CaptureJob,
    Drop,
    Found,
    Images,
    ListImages,
    Lookup,
    MakeShuttle,
    MemfdPool,
    Pin,
    Register,
    Restored,
    RestoreJob,
    Stage,
)
from shm.extent import unpack_places
from shm.header import segment_name
from stratad.core.adoption import FORMER_S, PASSED_OVER, Legacy
from stratad.core.core import Core
from stratad.core.effects import Append, KillFormer, LogLine, SendTo, SpawnWorker, UnlinkSegment, WatchFormer
from stratad.core.records import DropRecord, ImageRecord, replay
from stratad.core.state import WorkerState
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import FINGERPRINT, MIB, Harness, layout, pack_tokens, settings

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def published(core: Harness, engine: int, conversation: str = "a", tokens: Sequence[int] = range(600)) -> int:
    core.content = lambda stage, chunk: bytes([stage, chunk % 256, tokens[0]]) + b"bytes of tokens"[:13]
    seq = core.capture(engine, conversation, tokens)
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured), reply
    return reply.image_id


def serving(core: Harness) -> Harness:
    """The former workers are gone, a client is there."""
    for worker in core.core.state.workers.values():
        if worker.former is not None:
            core.former_gone(worker.name)
    core.connect()
    return core


def restored(core: Harness, engine: int, conversation: str = "a", rows: int = 600) -> list[RestoreJob]:
    """The jobs of a restore that ends well."""
    seq = core.restore(engine, conversation, rows)
    jobs = [job for worker in sorted(core.sent) for job in core.jobs(worker) if isinstance(job, RestoreJob)]
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored), core.final(1, seq)
    return jobs


def why_lost(core: Harness) -> list[str]:
    lines = [e for e in core.effects if isinstance(e, LogLine) and e.message == "images cannot be adopted"]
    return [str(dict(line.fields)["why"]) for line in lines]


def test_the_next_daemon_has_the_same_images_in_the_same_places(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine, "a")
    published(core, engine, "b", range(700))
    core.ask(1, Pin(core.next_seq(), "ns", "a", True))
    before = restored(core, engine)
    old = core.core.state.catalog
    successor = serving(make_core(legacy=core.legacy()))
    catalog = successor.core.state.catalog
    assert list(catalog.images) == list(old.images)
    for image_id, image in catalog.images.items():
        was = old.images[image_id]
        assert (image.conversation, image.tokens, image.scope, image.points, image.pinned) == (
            was.conversation, was.tokens, was.scope, was.points, was.pinned,
        )  # fmt: skip
        assert [(c.key, c.place, c.references) for c in image.chunks()] == [
            (c.key, c.place, c.references) for c in was.chunks()
        ]
    assert catalog.used_bytes == old.used_bytes
    engine = successor.register()
    after = restored(successor, engine)
    assert [(j.places, j.digests, j.algorithms) for j in after] == [(j.places, j.digests, j.algorithms) for j in before]
    look = Lookup(successor.next_seq(), engine, pack_tokens(range(650)))
    assert isinstance(found := successor.ask(1, look)[0], Found)
    assert (found.match, found.conversation, found.tokens) == ("hit", "b", 650)


def test_a_third_daemon_has_what_the_second_wrote(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine, "a")
    published(core, engine, "gone", range(5))
    second = serving(make_core(legacy=core.legacy()))
    engine = second.register()
    published(second, engine, "b", [3] * 300)
    second.ask(1, Drop(second.next_seq(), "ns", "gone"))
    third = serving(make_core(legacy=second.legacy()))
    assert sorted(image.conversation for image in third.core.state.catalog.images.values()) == ["a", "b"]
    restored(third, third.register(), "b", 300)


def test_nothing_new_is_put_where_an_image_lies(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine)
    taken = {e for job in restored(core, engine) for place in unpack_places(job.places) for e in place.extents}
    successor = serving(make_core(legacy=core.legacy()))
    engine = successor.register()
    successor.capture(engine, "new", [9] * 600)
    jobs = [job for worker in successor.sent for job in successor.jobs(worker) if isinstance(job, CaptureJob)]
    assert len(jobs) == 2
    assert not taken & {e for job in jobs for place in unpack_places(job.places) for e in place.extents}
    successor.finish_all()


def test_a_namespace_keeps_its_owner(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    for worker in ("cpu:0", "cpu:1"):
        successor.former_gone(worker)
    successor.connect(2, uid=4321)
    stages = (Stage(0, "cpu:0", MemfdPool(5, layout().end_bytes), layout()),)
    request = Register(successor.next_seq(), "ns", "thief", FINGERPRINT, stages)
    successor.ask(2, request)
    assert successor.failure(2, request.seq).code == "not_permitted"
    listing = ListImages(successor.next_seq(), "")
    assert successor.ask(2, listing) == [Images(listing.seq, (), False)]


def test_parts_of_a_put_are_adopted(core: Harness, make_core: MakeCore) -> None:
    exchange = CoreExchange.register(core)
    put = exchange.begin("a", range(8))
    exchange.put(put, "x", 5000)
    exchange.put(put, "y", 0)
    core.finish_all()
    exchange.commit(put)
    (was,) = core.core.state.catalog.images.values()
    successor = serving(make_core(legacy=core.legacy()))
    (image,) = successor.core.state.catalog.images.values()
    assert image.parts == was.parts
    assert successor.core.state.catalog.put_token_bytes == core.core.state.catalog.put_token_bytes == 32


def test_a_damaged_chunk_is_shared_with_no_new_image(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine)
    core.restore(engine)
    core.fail("cpu:1", "damaged", chunk=1)
    core.finish_all()
    successor = serving(make_core(legacy=core.legacy()))
    (image,) = successor.core.state.catalog.images.values()
    assert image.damaged
    engine = successor.register()
    seq = successor.restore(engine)
    assert successor.failure(1, seq).code == "damaged"
    bad = image.stages[1][1].place
    published(successor, engine, "b")
    (healed,) = [i for i in successor.core.state.catalog.images.values() if i.conversation == "b"]
    assert healed.stages[1][1].place != bad
    assert healed.stages[0] == image.stages[0]
    restored(successor, engine, "b")


def test_chunks_that_are_damaged_on_two_stages_are_shared_with_no_new_image(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine)
    core.restore(engine)
    core.fail("cpu:1", "damaged", chunk=1)
    core.fail("cpu:0", "damaged", chunk=2)
    successor = serving(make_core(legacy=core.legacy()))
    (image,) = successor.core.state.catalog.images.values()
    published(successor, successor.register(), "b")
    (healed,) = [i for i in successor.core.state.catalog.images.values() if i.conversation == "b"]
    shared = [
        [new is old for new, old in zip(news, olds, strict=True)]
        for news, olds in zip(healed.stages, image.stages, strict=True)
    ]
    assert shared == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("unwritten", ["a", "b"])
def test_a_chunk_is_damaged_if_one_of_its_images_says_so(core: Harness, make_core: MakeCore, unwritten: str) -> None:
    engine = core.register()
    for name in ("a", "b"):
        published(core, engine, name)
    core.restore(engine)
    core.fail("cpu:1", "damaged", chunk=1)
    for record in [r for r in core.records if isinstance(r, ImageRecord) and r.conversation == unwritten and r.damaged]:
        core.records.remove(record)  # the daemon died between the two
    successor = serving(make_core(legacy=core.legacy()))
    images = list(successor.core.state.catalog.images.values())
    assert [image.damaged for image in images] == [True, True]
    published(successor, successor.register(), "c")
    (healed,) = [i for i in successor.core.state.catalog.images.values() if i.conversation == "c"]
    assert not healed.damaged


# --- when a device may be used ----------------------------------------------------------------------------------------


def test_no_worker_is_started_before_the_former_one_is_proven_gone(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    assert [e for e in successor.effects if isinstance(e, WatchFormer)] == [
        WatchFormer("cpu:0", 1000, 5),
        WatchFormer("cpu:1", 1000, 5),
    ]
    successor.tick(10.0)
    assert {w.state for w in successor.core.state.workers.values()} == {WorkerState.AWAITING}
    for _ in range(3):
        successor.tick(10.0)
    assert not [e for e in successor.effects if isinstance(e, SpawnWorker)]
    # Killed in vain: who asks for such a device is told so, and waits no more.
    assert {w.state for w in successor.core.state.workers.values()} == {WorkerState.STUCK}
    successor.former_gone("cpu:1")
    assert [e.worker for e in successor.effects if isinstance(e, SpawnWorker)] == ["cpu:1"]
    successor.former_gone("cpu:0")
    assert {w.state for w in successor.core.state.workers.values()} == {WorkerState.READY}
    successor.connect()
    restored(successor, successor.register())


def test_images_are_found_while_the_former_worker_is_awaited(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    successor.connect(1, uid=0)
    listing = ListImages(successor.next_seq(), "")
    assert isinstance(images := successor.ask(1, listing)[0], Images)
    assert [image.conversation for image in images.images] == ["a"]


def test_a_former_worker_that_outlives_its_daemon_is_killed(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    successor.former_gone("cpu:0")
    successor.tick(FORMER_S)
    successor.tick(FORMER_S)
    assert [e for e in successor.effects if isinstance(e, KillFormer)] == [KillFormer("cpu:1")]
    assert successor.core.state.workers["cpu:1"].state is WorkerState.AWAITING


def test_a_stop_does_not_wait_for_former_workers(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    successor.perform(successor.core.stop(successor.at))
    assert successor.core.stopped


def test_the_former_process_stays_on_record_until_the_next_one_is(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    second = make_core(legacy=core.legacy())  # it is killed before it starts a worker
    assert second.legacy().journal.workers == core.legacy().journal.workers
    third = make_core(legacy=second.legacy())
    assert third.core.state.workers["cpu:0"].former == (1000, 5)


def test_where_pids_mean_nothing_shuttles_are_read_and_never_written_again(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine)
    sealed = set(core.core.state.workers["cpu:0"].sizes)
    successor = make_core(legacy=core.legacy(same_pids=False))
    assert not [e for e in successor.effects if isinstance(e, WatchFormer)]
    successor.connect()
    engine = successor.register()
    restored(successor, engine)
    successor.ask(1, drop := Drop(successor.next_seq(), "ns", "a"))
    assert successor.final(1, drop.seq)
    published(successor, engine, "b")
    chunks = [c for image in successor.core.state.catalog.images.values() for c in image.chunks()]
    assert chunks
    assert not sealed & {e.shuttle for chunk in chunks if chunk.key.worker == "cpu:0" for e in chunk.place.extents}


def numbers_made(core: Harness, worker: str = "cpu:0") -> list[int]:
    """Of the shuttles that a worker was to make anew."""
    sent = [e.command for e in core.effects if isinstance(e, SendTo) and e.worker == worker]
    return [command.index for command in sent if isinstance(command, MakeShuttle) and not command.adopt]


def test_new_shuttles_have_no_name_that_a_process_may_use_whose_end_nobody_can_prove(
    core: Harness, make_core: MakeCore
) -> None:
    published(core, core.register())
    told = numbers_made(core)
    # It was to attach or to make these again; whoever removed them may have done that before we looked.
    for shuttles in (core.legacy().shuttles, {}):
        successor = make_core(legacy=core.legacy(same_pids=False)._replace(shuttles=shuttles))
        published(successor, serving(successor).register(), "b")
        made = numbers_made(successor)
        assert made
        assert min(made) > max(told) + PASSED_OVER
        # The one after that, too, though nothing of this one's is left but its record.
        third = make_core(legacy=successor.legacy(same_pids=False)._replace(shuttles={}))
        published(third, serving(third).register(), "c")
        assert min(numbers_made(third)) > max(made) + PASSED_OVER
        # And also where the journal was written anew meanwhile.
        anew = replay(successor.core.all_records())
        assert anew.workers == successor.legacy().journal.workers


def test_what_a_former_worker_made_late_is_removed_wherever_its_numbers_began(
    core: Harness, make_core: MakeCore
) -> None:
    successor = serving(make_core(legacy=core.legacy(same_pids=False)))
    published(successor, successor.register())
    made = numbers_made(successor)
    third = make_core(legacy=successor.legacy()._replace(shuttles={}))
    third.former_gone("cpu:0")
    gone = {e.segment for e in third.effects if isinstance(e, UnlinkSegment)}
    assert {
        segment_name(third.core.state.settings.instance, "cpu:0", number) for number in (*made, max(made) + 1)
    } <= gone
    assert numbers_made(third) == [min(made)]  # it goes on where that one began


# --- what cannot be adopted -------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_served_any_more_costs_its_images(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    published(core, core.register(stages=1), "b", range(300))
    successor = make_core(1, legacy=core.legacy())
    assert [image.conversation for image in successor.core.state.catalog.images.values()] == ["b"]
    assert why_lost(successor) == ["worker cpu:1 is not served any more"]
    assert successor.core.state.counters["images_lost"] == 1


def test_another_digest_key_costs_all_images(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy(key_id=b"another!"))
    assert not successor.core.state.catalog.images
    assert why_lost(successor) == ["made under another digest key"]


def test_a_segment_that_is_gone_costs_the_images_in_it_and_no_others(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB)
    core.connect()
    engine = core.register(stages=1)
    for number, name in enumerate("abc"):
        published(core, engine, name, [number] * 600)
    legacy = core.legacy()
    held = {
        image.conversation: {e.shuttle for c in image.chunks() for e in c.place.extents}
        for image in core.core.state.catalog.images.values()
    }
    gone = max(held["c"])
    left = {worker: {i: s for i, s in sizes.items() if i != gone} for worker, sizes in legacy.shuttles.items()}
    successor = serving(make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB, legacy=legacy._replace(shuttles=left)))
    kept = {image.conversation for image in successor.core.state.catalog.images.values()}
    assert kept == {name for name, shuttles in held.items() if gone not in shuttles}
    assert kept
    assert "c" not in kept
    assert set(why_lost(successor)) == {"a segment is gone"}
    # The number is free again: the next shuttle takes it.
    successor.effects.clear()
    published(successor, successor.register(stages=1), "d", [7] * 1500)
    made = [e.command for e in successor.effects if isinstance(e, SendTo) and isinstance(e.command, MakeShuttle)]
    assert gone in [command.index for command in made if not command.adopt]


def changed(legacy: Legacy, change: Callable[[ImageRecord], ImageRecord]) -> Legacy:
    images = {image_id: change(record) for image_id, record in legacy.journal.images.items()}
    return legacy._replace(journal=legacy.journal._replace(images=images))


def test_a_record_that_contradicts_itself_costs_its_image(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())

    def cut(record: ImageRecord) -> ImageRecord:
        stage = msgspec.structs.replace(record.stages[1], groups=record.stages[1].groups[:-4])
        return msgspec.structs.replace(record, stages=(record.stages[0], stage))

    successor = make_core(legacy=changed(core.legacy(), cut))
    assert not successor.core.state.catalog.images
    assert why_lost(successor)[0].startswith("a bad record")


def test_of_two_records_that_claim_the_same_memory_the_later_counts(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    published(core, engine, "a")
    stale = list(core.records)
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    published(core, engine, "b", [5] * 600)
    # As if the end of the first had never been written.
    records = [r for r in core.records if not isinstance(r, DropRecord)]
    assert len(records) > len(stale)
    legacy = core.legacy()._replace(journal=replay(records))
    successor = make_core(legacy=legacy)
    assert [image.conversation for image in successor.core.state.catalog.images.values()] == ["b"]
    assert why_lost(successor) == ["its memory was given to a later image"]


def test_of_a_smaller_budget_the_oldest_images_are_evicted_and_their_end_recorded(make_core: MakeCore) -> None:
    core = make_core(budget_images=10)
    core.connect()
    engine = core.register()
    for number, name in enumerate("abcd"):
        core.now_s += 1
        published(core, engine, name, [number] * 300)
    core.ask(1, Pin(core.next_seq(), "ns", "a", True))
    successor = serving(make_core(budget_images=2, legacy=core.legacy()))
    assert [image.conversation for image in successor.core.state.catalog.images.values()] == ["a", "d"]
    assert len([e for e in successor.effects if isinstance(e, Append)]) >= 1
    assert len(replay(successor.records).images) == 2


def test_pinned_images_over_a_smaller_budget_stay_and_captures_are_refused(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    published(core, engine, "a")
    core.ask(1, Pin(core.next_seq(), "ns", "a", True))
    successor = serving(make_core(budget_bytes=MIB // 2, legacy=core.legacy()))
    engine = successor.register()
    restored(successor, engine)
    seq = successor.capture(engine, "b", [4] * 64)
    assert successor.failure(1, seq).code == "no_space"
    successor.ask(1, Pin(successor.next_seq(), "ns", "a", False))
    published(successor, engine, "b", [4] * 64)
    assert successor.core.state.catalog.held_bytes <= MIB // 2


def test_empty_shuttles_are_taken_over_as_far_as_the_arena_may_be_that_large(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB)
    core.connect()
    engine = core.register(stages=1)
    published(core, engine, "large", [1] * 2800)
    assert len(core.core.state.workers["cpu:0"].sizes) > 2
    core.ask(1, Drop(core.next_seq(), "ns", "large"))
    successor = make_core(shuttle_bytes=MIB, arena_bytes=2 * MIB, legacy=core.legacy())
    assert len(successor.core.state.workers["cpu:0"].sizes) == 2
    assert len(successor.core.segments) == 2 + len(successor.core.state.workers["cpu:1"].sizes)


def test_what_is_over_the_budget_and_cannot_be_ended_stays_until_there_was_room(core: Harness) -> None:
    engine = core.register()
    published(core, engine, "a")
    published(core, engine, "b", range(100, 700))
    legacy = core.legacy()
    successor = Harness(Core(settings(budget_bytes=2 * MIB), {n: n for n in ("cpu:0", "cpu:1")}, core.at, legacy))
    successor.journal_error = "No space left on device"
    successor.perform(successor.core.start(successor.at))
    successor.tick()
    successor.core.validate()
    assert len(successor.core.state.catalog.images) == 2
    successor.journal_error = ""
    serving(successor)
    successor.tick(2.0)
    published(successor, successor.register(), "c", range(200, 500))
    catalog = successor.core.state.catalog
    assert catalog.held_bytes <= catalog.budget_bytes
    assert not catalog.over_budget
    successor.core.validate()


def test_a_former_process_is_not_killed_because_the_daemon_stood_still(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    successor.perform(successor.core.stood_still(60.0, successor.at))
    successor.tick(61.0)
    assert not any(isinstance(effect, KillFormer) for effect in successor.effects)
    successor.tick(FORMER_S)
    assert any(isinstance(effect, KillFormer) for effect in successor.effects)


def test_nothing_is_evicted_for_room_in_a_sealed_shuttle(core: Harness, make_core: MakeCore) -> None:
    engine = core.register()
    kept = published(core, engine)
    successor = make_core(legacy=core.legacy(same_pids=False), budget_bytes=64 * MIB)
    serving(successor)
    engine = successor.register()
    published(successor, engine, "b", range(9, 1809))
    successor.ask(1, Pin(successor.next_seq(), "ns", "b", True))
    seq = successor.capture(engine, "c", range(5000, 5600))
    assert successor.failure(1, seq).code == "no_space"
    assert kept in successor.core.state.catalog.images


def test_a_shuttle_that_a_former_worker_made_last_is_removed_though_numbers_before_it_are_not_there(
    core: Harness, make_core: MakeCore
) -> None:
    """The former daemon had lost a shuttle, and used its number no more."""
    core.register()
    legacy = core.legacy()
    shuttles = {worker: {n: size for n, size in found.items() if n != 0} for worker, found in legacy.shuttles.items()}
    successor = make_core(legacy=legacy._replace(shuttles=shuttles))
    successor.former_gone("cpu:0")
    removed = [effect.segment for effect in successor.effects if isinstance(effect, UnlinkSegment)]
    assert {"/stratad.unit.cpu_0.0", "/stratad.unit.cpu_0.1", "/stratad.unit.cpu_0.2"} <= set(removed)
    assert not any(segment.startswith("/stratad.unit.cpu_1") for segment in removed)


def test_a_stop_leaves_no_former_process_behind(core: Harness, make_core: MakeCore) -> None:
    published(core, core.register())
    successor = make_core(legacy=core.legacy())
    successor.perform(successor.core.stop(successor.at))
    assert [e.worker for e in successor.effects if isinstance(e, KillFormer)] == ["cpu:0", "cpu:1"]
    assert successor.core.stopped
