"""Captures, restores and takes through the core: what is published, what is fenced, what is given back."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    Acknowledge,
    Cancel,
    CancelJob,
    Capture,
    Captured,
    ClosePool,
    CudaIpcPool,
    Done,
    Drop,
    EventAwaited,
    Found,
    GroupRestored,
    JobDone,
    LaneMoving,
    Lookup,
    Mark,
    MemfdPool,
    OpenPool,
    Pin,
    PoolClosed,
    PoolOpened,
    Progress,
    Register,
    Registered,
    Restore,
    Restored,
    ShuttleFailed,
    ShuttleReady,
    SourceFree,
    Stage,
    Unregister,
)
from shm.extent import ChunkPlace
from shm.rows import pack_rows
from stratad.core import arenas, queue
from stratad.core.effects import SpawnWorker, UnlinkSegment
from stratad.core.ops import Operation, OpState, StageRun
from tests.support.core_harness import FINGERPRINT, MIB, Harness, layout, pack_tokens

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def test_capture_is_published_only_when_every_stage_has_ended(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    core.finish("cpu:0")
    assert core.answers(1, seq) == []
    assert not core.core.state.catalog.images
    look = Lookup(core.next_seq(), engine, pack_tokens(range(600)))
    assert core.ask(1, look) == [Found(look.seq, "miss")]
    core.finish("cpu:1")
    reply = core.final(1, seq)
    assert isinstance(reply, Captured)
    assert reply.tokens == 600
    assert [outcome.state for outcome in reply.stages] == ["done", "done"]
    look = Lookup(core.next_seq(), engine, pack_tokens([*range(590), 7]))
    assert core.ask(1, look) == [Found(look.seq, "hit", reply.image_id, "a", 590, 600)]


def test_a_failed_stage_publishes_nothing_and_names_the_lowest(make_core: MakeCore) -> None:
    core = make_core(4)
    core.connect()
    engine = core.register(stages=4)
    before = core.core.state.catalog.used_bytes
    seq = core.capture(engine)
    core.fail("cpu:3", "out_of_memory")
    core.finish("cpu:0")
    core.fail("cpu:1", "source_changed")
    assert core.answers(1, seq) == []
    core.finish("cpu:2")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("source_changed", 1)
    assert [o.state for o in failure.stages] == ["done", "failed", "done", "failed"]
    assert [o.code for o in failure.stages] == ["", "source_changed", "", "out_of_memory"]
    assert core.core.state.catalog.used_bytes == before
    assert not core.core.state.catalog.images


def test_the_previous_image_stays_until_the_next_is_published(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, tokens=range(300))
    core.finish_all()
    seq = core.capture(engine, tokens=range(301))
    core.finish("cpu:0")
    core.fail("cpu:1")
    assert core.failure(1, seq).code == "device_error"
    (image,) = core.core.state.catalog.images.values()
    assert len(image.tokens) == 1200
    core.capture(engine, tokens=range(301))
    core.finish_all()
    (image,) = core.core.state.catalog.images.values()
    assert len(image.tokens) == 1204


def test_equal_chunks_are_stored_once_and_freed_with_the_last_image(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(512))
    core.finish_all()
    used = core.core.state.catalog.used_bytes
    seq = core.capture(engine, "b", range(512))
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured)
    assert reply.new_bytes == 0
    assert core.core.state.catalog.used_bytes == used
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    assert core.core.state.catalog.used_bytes == used
    core.ask(1, Drop(core.next_seq(), "ns", "b"))
    assert core.core.state.catalog.used_bytes == 0


def test_rows_that_a_capture_reads_may_be_read_but_not_written(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    reading = core.capture(engine, "b", first_row=100)
    also_reading = core.capture(engine, "c", first_row=200)
    writing = core.restore(engine, "a", first_row=699)
    failure = core.failure(1, writing)
    assert (failure.code, failure.stage) == ("rows_busy", 0)
    assert "row 699" in failure.message
    core.finish("cpu:0")
    core.finish("cpu:0")
    again = core.restore(engine, "a", first_row=699)
    assert core.failure(1, again).stage == 1  # stage 1 is still read
    core.finish_all()
    assert core.answers(1, reading)
    assert core.answers(1, also_reading)
    free = core.restore(engine, "a", first_row=699)
    core.finish_all()
    assert isinstance(core.final(1, free), Restored)


def test_two_restores_into_the_same_rows(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    core.restore(engine, "a", first_row=1000)
    second = core.restore(engine, "a", first_row=1599)
    assert core.failure(1, second).code == "rows_busy"
    third = core.restore(engine, "a", first_row=1600)
    core.finish_all()
    assert isinstance(core.final(1, third), Restored)


def test_a_worker_that_ends_one_job_after_the_other_does_not_hang(make_core: MakeCore) -> None:
    """However many wait behind, each of them costs time besides its bytes."""
    core = make_core(1)
    core.connect()
    engine = core.register(stages=1)
    for number in range(4):
        core.capture(engine, "abcd"[number], range(256), first_row=300 * number)
    for _ in range(3):
        core.tick(4.0)
        core.finish("cpu:0")
        core.core.validate()
    core.tick(4.0)
    assert core.kills == []
    assert core.core.due_s > core.now_s
    core.tick(1.1)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]


def test_time_in_which_the_daemon_stood_still_is_not_held_against_its_workers(make_core: MakeCore) -> None:
    core = make_core(1, job_floor_s=5.0, boot_s=10.0)
    core.connect()
    seq = core.capture(core.register(stages=1))
    core.now_s += 60.0
    core.perform(core.core.stood_still(60.0, core.at))
    core.tick(4.9)
    assert not core.kills
    core.tick(0.2)
    assert [kill.reason for kill in core.kills] == ["job 1 passed its deadline"]
    core.auto = False
    core.worker_gone("cpu:0")
    assert core.failure(1, seq).code == "worker_hung"
    core.tick(0.1)
    core.now_s += 60.0
    core.perform(core.core.stood_still(60.0, core.at))
    core.tick(9.8)
    assert len(core.kills) == 1
    core.tick(0.2)
    assert "not ready" in core.kills[-1].reason


def test_a_lane_that_hangs_is_seen_while_the_other_one_goes_on(make_core: MakeCore) -> None:
    core = make_core(1)
    core.connect()
    engine = core.register(stages=1)
    core.capture(engine, "a", range(256))
    core.finish_all()
    core.restore(engine, "a", rows=256, first_row=1000)
    (stuck,) = core.jobs("cpu:0")
    core.sent["cpu:0"].remove(stuck)
    for number in range(2):
        core.capture(engine, "b", range(256), first_row=2000 + 300 * number)
        core.tick(2.0)
        core.finish("cpu:0")
    core.tick(1.1)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]


def test_rows_and_extents_of_a_dead_worker_are_free_only_after_the_proof(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    seq = core.restore(engine, "a", first_row=1000)
    core.finish("cpu:1")
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    used = core.core.state.catalog.used_bytes
    assert used > 0  # the hung worker may still read them
    core.tick(100.0)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    assert core.answers(1, seq) == []
    assert core.failure(1, core.capture(engine, "b", first_row=1000)).code == "rows_busy"
    core.worker_gone("cpu:0")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("worker_hung", 0)
    assert failure.stages[0].rows_undefined == (pack_rows([(1000, 600)]),)
    assert failure.stages[1].rows_undefined == ()
    assert core.core.state.catalog.used_bytes == 0
    core.tick()
    again = core.capture(engine, "b", first_row=1000)
    core.finish_all()
    assert isinstance(core.final(1, again), Captured)


def test_a_dead_worker_fails_its_stage_and_leaves_the_others(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine, "a")
    core.worker_gone("cpu:0")
    assert core.answers(1, seq) == []
    core.finish("cpu:1")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("worker_died", 0)
    assert failure.stages[1].state == "done"
    assert core.core.state.catalog.used_bytes == 0


def test_images_outlive_their_worker(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    core.worker_gone("cpu:1")
    seq = core.restore(engine, "a", first_row=1000)
    assert core.answers(1, seq) == [Progress(seq, "accepted")]
    core.tick(5.0)
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Restored)


def test_a_damaged_chunk_flags_its_images_and_heals(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(512))
    core.capture(engine, "b", range(512))
    core.finish_all()
    seq = core.restore(engine, "a", rows=512, first_row=1000)
    core.finish("cpu:0")
    core.fail("cpu:1", "damaged", chunk=1)
    assert core.failure(1, seq).code == "damaged"
    assert all(image.damaged for image in core.core.state.catalog.images.values())
    look = Lookup(core.next_seq(), engine, pack_tokens(range(512)))
    assert core.ask(1, look) == [Found(look.seq, "miss")]
    assert core.failure(1, core.restore(engine, "b", rows=512)).code == "damaged"
    healed = core.capture(engine, "b", range(512))
    core.finish_all()
    reply = core.final(1, healed)
    assert isinstance(reply, Captured)
    assert reply.new_bytes == 256 * 1024  # the damaged chunk of stage 1 is stored anew
    restored = core.restore(engine, "b", rows=512)
    core.finish_all()
    assert isinstance(core.final(1, restored), Restored)


def test_take_gives_the_image_up_on_acknowledgement_only(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    seq = core.restore(engine, "a", take=True)
    assert core.failure(1, core.restore(engine, "a", first_row=1000, take=True)).code == "image_busy"
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Restored)
    assert core.core.state.catalog.images
    acknowledge = Acknowledge(core.next_seq(), engine, reply.image_id)
    assert core.ask(1, acknowledge) == [Done(acknowledge.seq, 1)]
    assert not core.core.state.catalog.images
    assert core.core.state.catalog.used_bytes == 0
    core.ask(1, Acknowledge(core.next_seq(), engine, reply.image_id))
    assert core.failure(1, core.seq).code == "unknown_image"


def test_a_taker_that_dies_leaves_the_image(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    core.restore(engine, "a", take=True)
    core.finish_all()
    core.perform(core.core.client_gone(1, core.at))
    (image,) = core.core.state.catalog.images.values()
    assert image.evictable


def test_least_recently_used_images_make_room(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=MIB, shuttle_bytes=2 * MIB, arena_bytes=2 * MIB)
    core.connect()
    engine = core.register(stages=1)
    for number, name in enumerate("abcd"):
        core.content = lambda stage, chunk, n=number: bytes([stage, chunk, n]) + b"x" * 13  # type: ignore[misc]
        core.capture(engine, name, range(256))
        core.finish_all()
    core.restore(engine, "a", rows=256)
    core.finish_all()
    core.ask(1, Pin(core.next_seq(), "ns", "b", True))
    core.content = lambda stage, chunk: b"new" + bytes([stage, chunk]) + b"x" * 11
    core.capture(engine, "e", range(256))
    core.finish_all()
    kept = sorted(image.conversation for image in core.core.state.catalog.images.values())
    assert kept == ["a", "b", "d", "e"]
    assert core.core.state.catalog.used_bytes <= MIB


def test_what_a_restore_reads_is_never_evicted_whatever_the_clock_says(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=MIB, shuttle_bytes=2 * MIB, arena_bytes=2 * MIB, job_floor_s=7200.0)
    core.connect()
    engine = core.register(stages=1)
    core.capture(engine, "a", range(700))
    core.finish_all()
    restoring = core.restore(engine, "a", 700)
    core.content = lambda stage, chunk: b"new" + bytes([stage, chunk]) + b"x" * 11
    capturing = core.capture(engine, "b", range(700), first_row=2000, deadline_s=7200.0)
    core.tick(3000.0)
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["a"]
    assert len(core.jobs("cpu:0")) == 1
    core.finish_all()
    assert isinstance(core.final(1, restoring), Restored)
    assert isinstance(core.final(1, capturing), Captured)


def test_no_space_evicts_nothing(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=MIB, shuttle_bytes=2 * MIB, arena_bytes=2 * MIB)
    core.connect()
    engine = core.register(stages=1)
    for number, name in enumerate("abcd"):
        core.content = lambda stage, chunk, n=number: bytes([stage, chunk, n]) + b"x" * 13  # type: ignore[misc]
        core.capture(engine, name, range(256))
        core.finish_all()
    for name in "abc":
        core.ask(1, Pin(core.next_seq(), "ns", name, True))
    seq = core.capture(engine, "e", range(512))
    assert core.failure(1, seq).code == "no_space"
    assert len(core.core.state.catalog.images) == 4
    assert core.failure(1, core.capture(engine, "f", range(1025))).code == "too_large"


def test_an_image_budget_is_kept(make_core: MakeCore) -> None:
    core = make_core(1, budget_images=2)
    core.connect()
    engine = core.register(stages=1)
    for name in "abc":
        core.capture(engine, name, range(10))
        core.finish_all()
    assert sorted(i.conversation for i in core.core.state.catalog.images.values()) == ["b", "c"]


def test_arenas_grow_before_anything_is_evicted(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=8 * MIB, shuttle_bytes=MIB, arena_bytes=4 * MIB)
    core.connect()
    engine = core.register(stages=1)
    for number, name in enumerate("abcdefghijklmn"):
        core.content = lambda stage, chunk, n=number: bytes([stage, chunk, n]) + b"x" * 13  # type: ignore[misc]
        core.capture(engine, name, range(256))
        core.finish_all()
    assert core.core.state.catalog.evictions == 0
    assert len(core.core.state.workers["cpu:0"].sizes) == 4


def test_serial_stages_follow_one_another(make_core: MakeCore) -> None:
    core = make_core(2, parallel=False)
    core.connect()
    engine = core.register()
    seq = core.capture(engine)
    assert core.jobs("cpu:0")
    assert not core.jobs("cpu:1")
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert isinstance(core.final(1, seq), Captured)
    seq = core.capture(engine, "b")
    core.fail("cpu:0")
    failure = core.failure(1, seq)
    assert [o.state for o in failure.stages] == ["failed", "untouched"]


def test_a_serial_operation_whose_next_worker_died_is_answered(make_core: MakeCore) -> None:
    core = make_core(3, parallel=False)
    core.connect()
    engine = core.register(stages=3)
    seq = core.capture(engine)
    core.worker_gone("cpu:1")
    core.finish("cpu:0")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("worker_died", 1)
    assert [o.state for o in failure.stages] == ["done", "failed", "untouched"]


def test_source_free_is_told_once_every_stage_has_let_go(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    job0, job1 = core.jobs("cpu:0")[0], core.jobs("cpu:1")[0]
    core.report("cpu:0", SourceFree(job0.job))
    assert core.answers(1, seq) == []
    core.report("cpu:1", SourceFree(job1.job))
    assert core.answers(1, seq) == [Progress(seq, "source_free")]
    writing = core.restore(engine, "nothing")
    assert core.failure(1, writing).code == "unknown_conversation"
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_cancel_stops_running_stages_and_waits_for_their_answer(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    cancel = Cancel(core.next_seq(), seq)
    assert core.ask(1, cancel) == [Done(cancel.seq)]
    asked = [c for worker in ("cpu:0", "cpu:1") for c in core.sent[worker] if isinstance(c, CancelJob)]
    assert len(asked) == 2
    core.fail("cpu:0", "cancelled")
    assert core.answers(1, seq) == []
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "cancelled"
    assert core.core.state.catalog.used_bytes == 0


def test_a_slot_poisoned_during_its_capture_is_not_published(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine, slot=3)
    core.ask(1, Mark(core.next_seq(), engine, 3, "poisoned"))
    core.finish_all()
    assert core.failure(1, seq).code == "poisoned"
    refused = core.failure(1, core.capture(engine, slot=3))
    assert (refused.code, refused.message) == ("poisoned", "slot 3 is marked poisoned (mark it clean first)")
    core.ask(1, Mark(core.next_seq(), engine, 3, "dirty"))
    core.capture(engine, slot=3)
    core.finish_all()
    assert core.core.state.catalog.images


def test_an_engine_that_dies_frees_what_waits_and_lets_copies_end(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.perform(core.core.client_gone(1, core.at))
    assert core.core.state.engines[engine].closing
    core.finish_all()
    assert not core.core.state.engines
    assert not core.core.state.ops
    assert len(core.core.state.catalog.images) == 1


def test_a_waiting_operation_ends_with_its_deadline(core: Harness) -> None:
    engine = core.register()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    seq = core.capture(engine, deadline_s=2.0)
    assert core.answers(1, seq) == [Progress(seq, "accepted")]
    core.tick(2.5)
    failure = core.failure(1, seq)
    assert failure.code == "deadline"
    assert "cpu:0" in failure.message


def test_a_worker_given_up_refuses_and_the_other_goes_on(make_core: MakeCore) -> None:
    core = make_core(2)
    core.connect()
    both = core.register()
    one = core.register(layouts=[layout()], stages=1)
    core.auto = False
    for _ in range(4):
        core.tick(20.0)
        core.worker_gone("cpu:1")
    assert core.core.state.workers["cpu:1"].state.value == "failed"
    failure = core.failure(1, core.capture(both))
    assert failure.code == "worker_unavailable"
    assert "`stratactl worker restart cpu:1` starts it again" in failure.message
    assert "`stratactl worker reset cpu:1`" in failure.message
    core.auto = True
    core.capture(one)
    core.finish_all()
    assert len(core.core.state.catalog.images) == 1


def test_state_travels_with_its_position(core: Harness) -> None:
    engine = core.register(layouts=[layout(state=True), layout()])
    missing = core.capture(engine)
    assert core.failure(1, missing).code == "bad_state"


def test_capture_with_digests_missing_is_our_fault_and_frees_all(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    job = core.jobs("cpu:0")[0]
    core.sent["cpu:0"].remove(job)
    core.report("cpu:0", JobDone(job.job, 1, 0.0, 0.0, b"short"))
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "internal"
    assert core.core.state.catalog.used_bytes == 0


def test_stop_answers_what_waits_and_lets_copies_end(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    core.perform(core.core.stop(core.at))
    refused = core.capture(engine, "b")
    assert core.failure(1, refused).code == "stopping"
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)
    for worker in ("cpu:0", "cpu:1"):
        core.worker_gone(worker, "exited with status 0")
    assert core.core.stopped
    assert all(op.state is not OpState.COPYING for op in core.core.state.ops.values())


def test_a_shuttle_half_made_by_a_dead_worker_is_removed(make_core: MakeCore) -> None:
    core = make_core(1)
    core.auto = False
    core.connect()
    core.core.state.workers["cpu:0"].making = None
    arenas.tend(core.core.state, core.core.state.workers["cpu:0"], set())
    core.core.state.out.clear()
    assert core.core.state.workers["cpu:0"].making == 1
    core.worker_gone("cpu:0")
    assert [e.segment for e in core.effects if isinstance(e, UnlinkSegment)] == ["/stratad.unit.cpu_0.1"]


def test_a_worker_that_cannot_attach_its_shuttle_again_is_killed_and_tried_anew(core: Harness) -> None:
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    core.worker_gone("cpu:1")
    core.auto = False
    core.tick(1.0)
    core.ready("cpu:1")
    waiting = core.restore(engine, first_row=1000)
    core.report("cpu:1", ShuttleFailed(0, "device_error", "the device takes no more", 1, 0))
    assert [kill.worker for kill in core.kills] == ["cpu:1"]
    assert core.core.state.workers["cpu:1"].state.value == "killed"
    core.auto = True
    core.worker_gone("cpu:1")
    core.tick(20.0)
    core.finish_all()
    assert isinstance(core.final(1, waiting), Restored)


def test_a_restore_that_waits_for_shuttles_looks_for_its_chunks_once(
    core: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image has up to 32,768 chunks, and any event may let hundreds of waiting operations go on."""
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    core.worker_gone("cpu:1")
    core.auto = False
    core.tick(1.0)
    core.ready("cpu:1")
    (pool,) = (c.pool for c in core.sent["cpu:1"] if isinstance(c, OpenPool))
    core.report("cpu:1", PoolOpened(pool))
    looked: list[int] = []
    places = Operation.places

    def counted(op: Operation, run: StageRun) -> tuple[ChunkPlace, ...]:
        looked.append(run.stage)
        return places(op, run)

    monkeypatch.setattr(Operation, "places", counted)
    waiting = core.restore(engine, first_row=1000)
    (op,) = core.core.state.ops.values()
    for _ in range(3):
        queue.pump(core.core.state)
        assert op.waits_for == "shuttles of cpu:1"
    assert looked == [0, 1]
    core.auto = True
    core.report("cpu:1", ShuttleReady(0, False, 0.0))
    core.finish_all()
    assert isinstance(core.final(1, waiting), Restored)


def test_a_worker_whose_end_was_asked_for_before_it_was_forked_is_killed_when_it_comes(make_core: MakeCore) -> None:
    core = make_core(1)
    core.worker_gone("cpu:0")
    core.auto = False
    core.perform([])
    core.generations["cpu:0"] = 2
    core.perform([e for e in core.core.tick(core.at) if not isinstance(e, SpawnWorker)])
    core.tick(30.0)
    assert [kill.generation for kill in core.kills] == [2]
    core.perform(core.core.worker_forked("cpu:0", 2, 77, 1, core.at))
    assert [kill.generation for kill in core.kills] == [2, 2]
    core.worker_gone("cpu:0")
    assert core.core.state.workers["cpu:0"].state.value == "dead"


def test_an_unregister_is_answered_when_the_pools_are_unmapped(core: Harness) -> None:
    engine = core.register()
    core.auto = False
    request = Unregister(core.next_seq(), engine)
    assert core.ask(1, request) == []
    closing = [c.pool for worker in ("cpu:0", "cpu:1") for c in core.sent[worker] if isinstance(c, ClosePool)]
    assert len(closing) == 2
    core.report("cpu:0", PoolClosed(closing[0]))
    assert core.answers(1, request.seq) == []
    core.worker_gone("cpu:1")
    assert core.final(1, request.seq) == Done(request.seq)
    assert not core.core.state.engines
    assert not core.core.state.pools


def test_restores_of_an_engine_that_is_gone_are_stopped(core: Harness) -> None:
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    core.restore(engine, first_row=1000)
    core.perform(core.core.client_gone(1, core.at))
    assert len([c for worker in ("cpu:0", "cpu:1") for c in core.sent[worker] if isinstance(c, CancelJob)]) == 2
    core.fail("cpu:0", "cancelled")
    core.fail("cpu:1", "cancelled")
    assert not core.core.state.engines


def test_an_arena_that_could_not_grow_says_so_and_is_tried_again(make_core: MakeCore) -> None:
    core = make_core(1, shuttle_bytes=MIB, arena_bytes=4 * MIB)
    core.connect()
    engine = core.register(stages=1)
    core.auto = False
    seq = core.capture(engine, tokens=range(1100))
    core.report("cpu:0", ShuttleFailed(1, "no_space", "/dev/shm has 3 bytes free", MIB, 3))
    failure = core.failure(1, seq)
    assert failure.code == "no_space"
    assert "/dev/shm has 3 bytes free" in failure.message
    core.auto = True
    core.now_s += 11.0
    core.capture(engine, tokens=range(1100))
    core.finish_all()
    assert len(core.core.state.catalog.images) == 1


@pytest.fixture
def waiting(make_core: MakeCore) -> tuple[Harness, int]:
    """A capture that is ordered by an event, at the worker for 5 s and its copy; the number of its job."""
    core = make_core(1, devices={"gpu": "GPU-1"})
    core.connect()
    one = layout()
    pool = CudaIpcPool(bytes(64), one.end_bytes, 0, one.end_bytes, bytes(64))
    register = Register(core.next_seq(), "ns", "e", FINGERPRINT, (Stage(0, "GPU-1", pool, one),))
    core.ask(1, register)
    engine = core.final(1, register.seq).engine_id  # type: ignore[union-attr]
    rows = ((pack_rows([(0, 10)]),),)
    core.ask(1, Capture(core.next_seq(), engine, "a", pack_tokens(range(10)), rows, 0, "event", deadline_s=100.0))
    (job,) = core.jobs("gpu")
    assert job.event_wait_s == 100.0
    return core, job.job


def test_the_wait_for_an_engines_event_is_not_held_against_the_worker(waiting: tuple[Harness, int]) -> None:
    core, job = waiting
    core.report("gpu", EventAwaited(job))
    core.tick(101.0)
    assert not core.kills
    core.tick(10.0)
    assert len(core.kills) == 1


def test_a_copy_that_hangs_is_noticed_however_long_the_engine_could_have_taken(waiting: tuple[Harness, int]) -> None:
    core, _ = waiting  # nothing is said: the event was reached at once
    core.tick(4.0)
    assert not core.kills
    core.tick(2.0)
    assert len(core.kills) == 1


def test_a_lane_went_on_as_far_as_is_known_while_the_daemon_stood_still(waiting: tuple[Harness, int]) -> None:
    core, first = waiting
    core.tick(4.0)
    core.report("gpu", LaneMoving(first))
    core.tick(4.0)
    core.now_s += 60.0
    core.perform(core.core.stood_still(60.0, core.at))
    core.tick(0.5)
    assert not core.kills
    core.tick(1.0)
    assert len(core.kills) == 1


def test_a_lane_that_goes_on_with_any_of_its_jobs_does_not_hang(waiting: tuple[Harness, int]) -> None:
    """Those that came later may be copied first: as long as they are, the first one has its time anew."""
    core, first = waiting
    rows = ((pack_rows([(100, 10)]),),)
    core.tick(3.0)
    core.ask(1, Capture(core.next_seq(), 1, "b", pack_tokens(range(10)), rows, 0, "host"))
    later = core.jobs("gpu")[1].job
    for _ in range(5):
        core.report("gpu", LaneMoving(later))
        core.report("gpu", LaneMoving(77))  # of a job that has ended
        core.tick(4.0)
        assert not core.kills
    core.report("gpu", LaneMoving(first))
    core.tick(4.0)
    assert not core.kills
    core.tick(2.0)
    assert len(core.kills) == 1


def test_the_time_of_a_copy_begins_when_the_event_is_reached(waiting: tuple[Harness, int]) -> None:
    core, job = waiting
    core.report("gpu", EventAwaited(job))
    core.tick(50.0)
    core.report("gpu", EventAwaited(job, reached=True))
    core.report("gpu", EventAwaited(77))  # of a job that has ended
    core.tick(4.0)
    assert not core.kills
    core.tick(2.0)
    assert len(core.kills) == 1


def test_no_image_ends_for_room_on_a_device_where_it_does_not_lie(make_core: MakeCore) -> None:
    core = make_core(2, budget_bytes=64 * MIB, arena_bytes=2 * MIB)
    core.connect()
    both, one = core.register(), core.register(stages=1)
    pool = MemfdPool(9, layout().end_bytes)
    request = Register(core.next_seq(), "ns", "e", FINGERPRINT, (Stage(0, "cpu:1", pool, layout()),))
    core.ask(1, request)
    other = core.final(1, request.seq)
    assert isinstance(other, Registered)
    core.capture(one, "old, elsewhere", range(300))
    core.finish_all()
    for name in ("first", "second"):
        core.capture(other.engine_id, name, range(1200))
        core.finish("cpu:1", stage=0)
    assert sorted(i.conversation for i in core.core.state.catalog.images.values()) == ["old, elsewhere", "second"]
    core.capture(both, "over both", range(1500))
    core.finish_all()
    assert [i.conversation for i in core.core.state.catalog.images.values()] == ["old, elsewhere", "over both"]


def test_groups_of_a_layered_restore_are_told_as_they_come_and_to_nobody_else(make_core: MakeCore) -> None:
    core = make_core(2)
    core.connect()
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    plain = core.restore(engine, first_row=1000)
    assert not any(job.layered for worker in ("cpu:0", "cpu:1") for job in core.jobs(worker))  # type: ignore[union-attr]
    core.report("cpu:0", GroupRestored(core.jobs("cpu:0")[0].job, 0))
    assert core.answers(1, plain) == []
    core.finish_all()
    rows = ((pack_rows([(1000, 600)]),),)
    request = Restore(core.next_seq(), engine, "a", rows, 0, "host", layered=True)
    core.ask(1, request)
    jobs = [core.jobs(worker)[0] for worker in ("cpu:0", "cpu:1")]
    assert all(job.layered for job in jobs)  # type: ignore[union-attr]
    core.report("cpu:1", GroupRestored(jobs[1].job, 0))
    core.report("cpu:0", GroupRestored(jobs[0].job, 0))
    core.report("cpu:0", GroupRestored(777, 0))
    told = [Progress(request.seq, "group", 1, 0), Progress(request.seq, "group", 0, 0)]
    assert core.answers(1, request.seq) == told
    assert len(core.core.state.fences) > 0
    core.finish_all()
    assert isinstance(core.final(1, request.seq), Restored)
