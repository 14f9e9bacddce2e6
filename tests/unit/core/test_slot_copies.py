"""Slot copies through the core: fences, transit images, and what a failure leaves."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    CancelJob,
    Captured,
    Copied,
    CopyJob,
    Done,
    Lookup,
    Mark,
    PutBegin,
    Restored,
    RestoreJob,
    SlotDrop,
    SourceFree,
    Unregister,
)
from shm.rows import pack_rows
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import Harness, pack_tokens

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def transits(core: Harness) -> int:
    return len(core.core.state.catalog.transits)


def test_a_direct_copy_runs_on_all_stages_at_once(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_direct")
    jobs = [core.jobs(worker)[0] for worker in ("cpu:0", "cpu:1")]
    for job in jobs:
        assert isinstance(job, CopyJob)
        assert (job.rows, job.target_rows) == ((pack_rows([(0, 600)]),), (pack_rows([(1000, 600)]),))
    core.finish("cpu:1")
    assert core.answers(1, seq) == []
    core.finish("cpu:0")
    reply = core.final(1, seq)
    assert isinstance(reply, Copied)
    assert (reply.tokens, reply.copied_bytes) == (600, 2 * 600 * 1024)
    assert core.core.state.catalog.used_bytes == 0


def test_a_direct_copy_that_fails_names_the_targets_rows(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_direct")
    core.fail("cpu:1", "source_changed", rows=(pack_rows([(1000, 256)]),))
    core.worker_gone("cpu:0")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("worker_died", 0)
    assert [o.rows_undefined for o in failure.stages] == [(pack_rows([(1000, 600)]),), (pack_rows([(1000, 256)]),)]
    assert not len(core.core.state.fences)


def test_source_rows_may_be_read_and_target_rows_by_nobody(core: Harness) -> None:
    engine = core.register()
    core.slot_copy(engine, "slot_direct")
    core.capture(engine, "a", range(600))  # the source, once more
    assert core.failure(1, core.capture(engine, "b", range(10), first_row=1000)).code == "rows_busy"
    assert core.failure(1, core.slot_copy(engine, "slot_direct", target_row=500)).code == "bad_rows"
    assert core.failure(1, core.slot_copy(engine, "slot_direct", first_row=2000, target_row=599)).code == "rows_busy"
    core.finish_all()
    assert not len(core.core.state.fences)


def test_rows_that_are_written_stay_fenced_whatever_a_worker_says_of_its_source(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_direct")
    for worker in ("cpu:0", "cpu:1"):
        core.report(worker, SourceFree(core.jobs(worker)[0].job))
    assert core.answers(1, seq) == []
    assert core.failure(1, core.capture(engine, "b", range(10), first_row=1000)).code == "rows_busy"
    core.finish_all()
    assert isinstance(core.final(1, seq), Copied)


def test_a_poisoned_slot_is_not_copied(core: Harness) -> None:
    engine = core.register()
    core.ask(1, Mark(core.next_seq(), engine, 0, "poisoned"))
    for kind in ("slot_direct", "slot_to"):
        assert core.failure(1, core.slot_copy(engine, kind)).code == "poisoned"


def test_a_slot_that_is_poisoned_while_it_is_copied_disowns_the_target(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_direct")
    core.ask(1, Mark(core.next_seq(), engine, 0, "poisoned"))
    core.finish_all()
    failure = core.failure(1, seq)
    assert failure.code == "poisoned"
    assert [o.rows_undefined for o in failure.stages] == [(pack_rows([(1000, 600)]),)] * 2


def test_to_and_from_by_way_of_a_transit_image_that_nobody_finds(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_to")
    core.finish_all()
    stored = core.final(1, seq)
    assert isinstance(stored, Captured)
    assert (core.core.state.catalog.images, transits(core)) == ({}, 1)
    look = Lookup(core.next_seq(), engine, pack_tokens(range(600)))
    assert core.ask(1, look)[0].match == "miss"  # type: ignore[union-attr]
    seq = core.slot_copy(engine, "slot_from", keep=True)
    job = core.jobs("cpu:0")[0]
    assert isinstance(job, RestoreJob)
    assert len(job.digests) == 3 * 16
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)
    assert transits(core) == 1
    seq = core.slot_copy(engine, "slot_from")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)
    assert (transits(core), core.core.state.catalog.used_bytes) == (0, 0)
    assert core.failure(1, core.slot_copy(engine, "slot_from")).code == "unknown_image"


def test_a_failed_slot_from_leaves_the_transit_image_and_a_failed_slot_to_the_former_one(core: Harness) -> None:
    engine = core.register()
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    (former,) = core.core.state.catalog.transits
    seq = core.slot_copy(engine, "slot_to", tokens=300)
    core.finish("cpu:0")
    core.fail("cpu:1")
    assert core.failure(1, seq).code == "device_error"
    seq = core.slot_copy(engine, "slot_from")
    core.fail("cpu:0")
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "device_error"
    assert list(core.core.state.catalog.transits) == [former]


def test_a_damaged_transit_image_is_refused(core: Harness) -> None:
    engine = core.register()
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    seq = core.slot_copy(engine, "slot_from")
    core.fail("cpu:0", "damaged", chunk=1)
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "damaged"
    assert core.failure(1, core.slot_copy(engine, "slot_from")).code == "damaged"


def test_the_next_slot_to_takes_the_place_of_the_former(core: Harness) -> None:
    engine = core.register()
    for tokens in (600, 300):
        core.slot_copy(engine, "slot_to", tokens=tokens)
        core.finish_all()
    (image,) = core.core.state.catalog.transits.values()
    assert image.token_count == 300


def test_transit_images_end_with_their_engine(core: Harness) -> None:
    engine = core.register()
    for slot in (0, 1):
        core.slot_copy(engine, "slot_to", slot=slot)
        core.finish_all()
    drop = SlotDrop(core.next_seq(), engine, 1)
    assert core.ask(1, drop) == [Done(drop.seq, 1)]
    assert core.failure(1, core.slot_copy(engine, "slot_from", slot=1)).code == "unknown_image"
    reading = core.slot_copy(engine, "slot_from", keep=True)
    core.ask(1, Unregister(core.next_seq(), engine))
    core.finish_all()
    assert core.final(1, reading)
    assert (transits(core), core.core.state.catalog.used_bytes) == (0, 0)


def test_a_copy_out_of_a_slot_leaves_the_transit_image_that_came_meanwhile(core: Harness) -> None:
    engine = core.register()
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    former = core.slot_copy(engine, "slot_from")
    core.slot_copy(engine, "slot_to", tokens=300)
    for worker in ("cpu:0", "cpu:1"):
        core.sent[worker].reverse()
    core.finish_all()
    assert isinstance(core.final(1, former), Restored)
    (image,) = core.core.state.catalog.transits.values()
    assert image.token_count == 300


def test_a_copy_into_a_transit_image_is_stopped_when_its_engine_goes(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_to")
    jobs = [core.jobs(worker)[0].job for worker in ("cpu:0", "cpu:1")]
    core.ask(1, Unregister(core.next_seq(), engine))
    for number, worker in enumerate(("cpu:0", "cpu:1")):
        assert CancelJob(jobs[number]) in core.sent[worker]
        core.fail(worker, "cancelled")
    assert core.failure(1, seq).code == "cancelled"
    assert (transits(core), core.core.state.catalog.used_bytes) == (0, 0)


def test_transit_images_are_another_engines_business(core: Harness) -> None:
    engine = core.register()
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    core.connect(2)
    other = core.register(2)
    assert core.failure(2, core.slot_copy(other, "slot_from", client=2)).code == "unknown_image"
    assert core.failure(2, core.slot_copy(engine, "slot_from", client=2)).code == "not_registered"


def test_transit_images_are_never_evicted(make_core: MakeCore) -> None:
    core = make_core(budget_images=2)
    core.connect()
    engine = core.register()
    core.slot_copy(engine, "slot_to")
    core.capture(engine, "a", first_row=2000)
    core.finish_all()
    core.capture(engine, "b", range(7), first_row=2000)
    core.finish_all()
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["b"]
    assert transits(core) == 1
    core.slot_copy(engine, "slot_to", slot=1)
    core.finish_all()
    failure = core.failure(1, core.slot_copy(engine, "slot_to", slot=2))
    assert failure.code == "no_space"
    assert "2 of 2 images are held" in failure.message
    assert "0 are being captured, 0 puts are open, 2 images are on their way between slots" in failure.message


def test_what_leaves_no_room_is_counted_by_kind(make_core: MakeCore) -> None:
    core = make_core(1, budget_images=4)
    core.connect()
    engine = core.register(stages=1)
    exchange = CoreExchange.register(core)
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    for name in ("x", "y"):
        exchange.begin(name)
    core.capture(engine, "a", first_row=2000)
    request = PutBegin(core.next_seq(), exchange.engine_id, "z")
    core.ask(1, request)
    failure = core.failure(1, request.seq)
    assert failure.code == "no_space"
    assert "4 of 4 images are held" in failure.message
    assert "1 are being captured, 2 puts are open, 1 images are on their way between slots" in failure.message
