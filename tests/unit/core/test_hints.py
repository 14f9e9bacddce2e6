"""Captures that expect chunks to be stored already: what is held, proven, missed and given back."""

from collections.abc import Callable, Sequence

import pytest

from ipc.messages import (
    Cancel,
    CancelJob,
    Captured,
    CaptureJob,
    Drop,
    Failed,
    JobDone,
    JobFailed,
    MakeShuttle,
    Pin,
    Progress,
    Restored,
    RestoreJob,
    ShuttleFailed,
    ShuttleReady,
    SourceFree,
    WorkerReady,
)
from shm.extent import GRANULE_BYTES, unpack_places
from shm.rows import unpack_numbers
from stratad.core.images import Draft, Hints, Image
from stratad.core.memory_tracks import MemorySettings
from stratad.core.ops import StageState
from tests.support.core_harness import MIB, Harness, layout

MakeCore = Callable[..., Harness]
LONGER = tuple(range(900))  # the 600 tokens that are captured first, and 300 more: chunks 0 and 1 are the same


def usual(first_token: int = 0) -> Callable[[int, int], bytes]:
    """The bytes of a conversation that begins with this token."""
    return lambda stage, chunk: bytes([stage, chunk, first_token % 251, 0]) * 4


def changed(*chunks: int) -> Callable[[int, int], bytes]:
    """Bytes that differ from the usual in these chunks of stage 0."""
    return lambda stage, chunk: usual(stage == 0 and chunk in chunks)(stage, chunk)


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    return started(make_core)


def started(make_core: MakeCore, **changes: object) -> Harness:
    core = make_core(**{"reuse": "verified", **changes})
    core.connect()
    return core


def captured(core: Harness, engine: int, conversation: str = "a", tokens: Sequence[int] = range(600)) -> Image:
    """An image, whatever its chunks were expected to be."""
    core.content = usual(tokens[0])
    seq = core.capture(engine, conversation, tuple(tokens))
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured), reply
    return core.core.state.catalog.images[reply.image_id]


def job(core: Harness, worker: str = "cpu:0") -> CaptureJob:
    """The capture that the worker has to do."""
    (found,) = core.jobs(worker)
    assert isinstance(found, CaptureJob)
    return found


def missing(core: Harness, engine: int, conversation: str = "a", tokens: Sequence[int] = LONGER) -> int:
    """A capture whose stage 0 has missed chunk 1, and waits; its stage 1 is done."""
    core.content = changed(1)
    seq = core.capture(engine, conversation, tuple(tokens))
    core.finish("cpu:1")
    core.finish("cpu:0")
    return seq


def used_granules(core: Harness) -> int:
    return core.core.state.catalog.used_bytes // GRANULE_BYTES


def test_the_next_turn_copies_what_is_new_and_shares_the_rest(core: Harness) -> None:
    engine = core.register()
    first = captured(core, engine)
    before = used_granules(core)
    seq = core.capture(engine, "a", LONGER)
    assert used_granules(core) == before + 2 * (4 + 3)
    for worker in ("cpu:0", "cpu:1"):
        assert unpack_numbers(job(core, worker).hinted) == (0, 1)
        assert [place.length_bytes for place in unpack_places(job(core, worker).places)] == [256 * 1024, 132 * 1024]
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured)
    assert (reply.image_bytes, reply.new_bytes) == (2 * 900 * 1024, 2 * 388 * 1024)
    assert [outcome.skipped_bytes for outcome in reply.stages] == [512 * 1024] * 2
    second = core.core.state.catalog.images[reply.image_id]
    for mine, theirs in zip(second.stages, first.stages, strict=True):
        assert mine[:2] == theirs[:2]
    assert used_granules(core) == 2 * (4 + 4 + 4 + 3)
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    assert used_granules(core) == 0


def test_another_conversation_with_the_same_beginning_gives_hints(core: Harness) -> None:
    engine = core.register()
    captured(core, engine, "long", range(900))
    captured(core, engine, "other", range(1000, 1600))
    core.capture(engine, "a", (*range(520), *range(2000, 2100)))
    assert unpack_numbers(job(core).hinted) == (0, 1)


def test_states_are_hinted_at_positions_within_the_common_tokens(make_core: MakeCore) -> None:
    core = started(make_core)
    engine = core.register(layouts=[layout(state=True)] * 2)
    mark = core.mark(engine, "a", tuple(range(512)), state_slot=0)  # of which a rescue makes an image
    core.finish_all()
    assert not isinstance(core.final(1, mark), Failed)
    core.die()
    core.finish_all()
    core.connect(2)
    engine = core.register(2, layouts=[layout(state=True)] * 2)
    core.mark(engine, "a", tuple(range(600)), client=2, state_slot=1)
    core.finish_all()
    core.die(2)
    assert unpack_numbers(job(core).hinted) == (0, 1)  # the state is at another position


def test_a_changed_byte_is_copied_after_all(core: Harness) -> None:
    engine = core.register()
    first = captured(core, engine)
    before = used_granules(core)
    seq = missing(core, engine)
    again = job(core)
    assert (unpack_numbers(again.chunks), again.hinted) == ((1,), b"")
    assert [place.length_bytes for place in unpack_places(again.places)] == [256 * 1024]
    assert used_granules(core) == before + 2 * (4 + 3) + 4
    assert core.answers(1, seq) == []
    core.finish("cpu:0")
    reply = core.final(1, seq)
    assert isinstance(reply, Captured)
    assert [outcome.skipped_bytes for outcome in reply.stages] == [256 * 1024, 512 * 1024]
    image = core.core.state.catalog.images[reply.image_id]
    assert [chunk.key.digest for chunk in image.stages[0]] == [core.content(0, n) for n in range(4)]
    assert image.stages[0][0] is first.stages[0][0]
    assert image.stages[0][1] is not first.stages[0][1]
    counters = core.core.state.counters
    assert (counters["chunks_hinted"], counters["chunks_missed"]) == (4, 1)


@pytest.mark.parametrize("same", [{"algorithm": "other"}, {"key_id": b"x" * 8}])
def test_what_was_digested_in_another_way_is_no_hint_or_missed(core: Harness, same: dict[str, str]) -> None:
    engine = core.register()
    captured(core, engine)
    if "key_id" in same:
        core.worker_gone("cpu:0")
        core.auto = False
        core.tick(1.0)
        core.report("cpu:0", WorkerReady("cpu:0", "host", "xxh3-128", b"x" * 8, "cpu", (0,), 0.01))
        core.auto = True
        for index in range(len(core.core.state.workers["cpu:0"].sizes)):
            core.report("cpu:0", ShuttleReady(index, False, 0.0))
        core.core.state.pools[1].state = core.core.state.pools[2].state
        core.capture(engine, "a", LONGER)
        assert job(core).hinted == b""
        return
    core.capture(engine, "a", LONGER)
    sent = job(core)
    core.sent["cpu:0"].remove(sent)
    digests = b"".join(core.content(0, n) for n in range(4))
    core.report("cpu:0", JobDone(sent.job, 1, 0.0, 0.0, digests, algorithm="other"))
    assert unpack_numbers(job(core).chunks) == (0, 1)


@pytest.mark.parametrize("reuse", ["storage", "off"])
def test_without_verified_reuse_everything_is_copied(make_core: MakeCore, reuse: str) -> None:
    core = started(make_core, reuse=reuse)
    engine = core.register()
    captured(core, engine)
    core.capture(engine, "b", LONGER)
    assert job(core).hinted == b""
    assert len(unpack_places(job(core).places)) == 4
    core.finish_all()
    shared = 2 * (4 + 4) if reuse == "storage" else 0
    assert used_granules(core) == 2 * (4 + 4 + 2) + 2 * (4 + 4 + 4 + 3) - shared


@pytest.mark.parametrize("dropped", ["a", "b"])
@pytest.mark.parametrize("reuse", ["off", "verified"])
def test_images_that_share_nothing_are_adopted_and_end_one_by_one(
    make_core: MakeCore, reuse: str, dropped: str
) -> None:
    core = started(make_core, reuse="off")
    engine = core.register()
    captured(core, engine, "a")
    captured(core, engine, "b")
    heir = make_core(legacy=core.legacy(), reuse=reuse)
    for worker in ("cpu:0", "cpu:1"):
        heir.former_gone(worker)
    assert used_granules(heir) == 2 * 2 * (4 + 4 + 2)
    heir.core.validate()
    heir.connect()
    heir.ask(1, Drop(heir.next_seq(), "ns", dropped))
    assert used_granules(heir) == 2 * (4 + 4 + 2)
    heir.core.validate()
    captured(heir, heir.register(), "c")
    assert used_granules(heir) == 2 * (4 + 4 + 2) * (2 if reuse == "off" else 1)


def test_rows_stay_fenced_until_nothing_is_missed(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    core.content = changed(1)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:1")
    core.report("cpu:0", SourceFree(job(core).job))  # of the first job, which cannot know of a second
    assert not [reply for reply in core.answers(1, seq) if isinstance(reply, Progress)]
    core.finish("cpu:0")
    refused = core.restore(engine, "a", 600)
    assert core.failure(1, refused).code == "rows_busy"
    core.report("cpu:0", SourceFree(job(core).job))
    assert [reply.state for reply in core.answers(1, seq) if isinstance(reply, Progress)] == ["source_free"]
    core.finish("cpu:0")
    assert isinstance(core.final(1, seq), Captured)


def test_rows_are_free_once_the_stage_that_might_have_missed_is_done(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    core.content = lambda stage, chunk: usual(stage == 1 and chunk == 1)(stage, chunk)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:1")
    core.report("cpu:1", SourceFree(job(core, "cpu:1").job))  # of its second job
    assert not [reply for reply in core.answers(1, seq) if isinstance(reply, Progress)]
    core.finish("cpu:0")
    assert [reply.state for reply in core.answers(1, seq) if isinstance(reply, Progress)] == ["source_free"]
    core.finish("cpu:1")
    assert isinstance(core.final(1, seq), Captured)


def test_the_image_that_gave_the_hints_may_be_dropped_meanwhile(core: Harness) -> None:
    engine = core.register()
    captured(core, engine, "old")
    core.capture(engine, "new", LONGER)
    core.ask(1, Drop(core.next_seq(), "ns", "old"))
    core.core.validate()
    assert used_granules(core) == 2 * (4 + 4 + 4 + 3)  # what is hinted is held, the rest of it is free
    core.finish_all()
    assert used_granules(core) == 2 * (4 + 4 + 4 + 3)
    captured(core, engine, "third", range(512))  # found in the index again
    assert used_granules(core) == 2 * (4 + 4 + 4 + 3)


def test_chunks_that_came_anew_while_the_hinted_ones_were_nobodys_are_shared(make_core: MakeCore) -> None:
    core = started(make_core, arena_bytes=8 * MIB, budget_bytes=16 * MIB)
    engine = core.register()
    captured(core, engine, "old")
    core.capture(engine, "new", LONGER)
    core.ask(1, Drop(core.next_seq(), "ns", "old"))
    seq = core.capture(engine, "between", tuple(range(600)), first_row=1000)
    assert job_of(core, seq).hinted == b""
    while len(core.jobs("cpu:0")) > 1 or len(core.jobs("cpu:1")) > 1:
        for worker in ("cpu:0", "cpu:1"):
            finish_last(core, worker)
    core.core.validate()
    core.finish_all()
    assert used_granules(core) == 2 * (4 + 4 + 4 + 3 + 2)


def job_of(core: Harness, seq: int) -> CaptureJob:
    found = core.jobs("cpu:0")[-1]
    assert isinstance(found, CaptureJob)
    assert core.core.state.clients[1].seqs[seq]
    return found


def finish_last(core: Harness, worker: str) -> None:
    """The worker does its latest job first."""
    last = core.jobs(worker)[-1]
    core.sent[worker].remove(last)
    core.sent[worker].insert(0, last)
    core.finish(worker)


def test_a_capture_that_fails_lets_go_of_its_hints(core: Harness) -> None:
    engine = core.register()
    captured(core, engine, "old")
    core.capture(engine, "new", LONGER)
    core.ask(1, Drop(core.next_seq(), "ns", "old"))
    core.fail("cpu:0")
    core.finish("cpu:1")
    assert used_granules(core) == 0


def test_a_hinted_chunk_that_is_damaged_meanwhile_is_missed(core: Harness) -> None:
    engine = core.register()
    image = captured(core, engine)
    seq = core.capture(engine, "a", LONGER)
    core.core.state.catalog.flag_damaged(image.stages[0][1])
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured)
    now = core.core.state.catalog.images[reply.image_id]
    assert not now.damaged
    assert now.stages[0][1] is not image.stages[0][1]


def test_one_that_is_damaged_after_it_was_proven_fails_the_capture(core: Harness) -> None:
    engine = core.register()
    image = captured(core, engine)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    core.core.state.catalog.flag_damaged(image.stages[0][1])
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "damaged"
    assert not captured(core, engine, "a", LONGER).damaged


def test_no_room_for_what_is_missed_fails_and_the_former_image_stays(make_core: MakeCore) -> None:
    core = started(make_core, arena_bytes=2 * MIB)  # 31 granules each
    engine = core.register()
    first = captured(core, engine)  # 10
    captured(core, engine, "pinned", range(5000, 5600))  # 10
    core.ask(1, Pin(core.next_seq(), "ns", "pinned", True))
    core.content = changed(0, 1)
    seq = core.capture(engine, "a", LONGER)  # 7, then 8 more
    before = used_granules(core)
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert (core.failure(1, seq).code, core.failure(1, seq).stage) == ("no_space", 0)
    assert core.core.state.catalog.images[first.image_id] is first
    assert used_granules(core) == before - 2 * 7


def test_images_make_room_for_what_is_missed(make_core: MakeCore) -> None:
    core = started(make_core, arena_bytes=2 * MIB)
    engine = core.register()
    captured(core, engine, "victim", range(5000, 5600))  # 10
    captured(core, engine)  # 10
    seq = missing(core, engine)  # 7, then 4 more of which there are 4
    core.core.validate()
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_an_image_whose_hints_were_wrong_makes_room_itself(make_core: MakeCore) -> None:
    core = started(make_core, arena_bytes=2 * MIB)  # 31 granules
    engine = core.register(stages=1)
    captured(core, engine, "hint")  # 10
    core.content = changed(0, 1)
    seq = core.capture(
        engine, "a", tuple(range(1400))
    )  # 14 besides chunks 0 and 1, and 8 for these, of 7 that are free
    core.finish("cpu:0")
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["a"]


def test_the_arena_grows_for_what_is_missed(make_core: MakeCore) -> None:
    core = started(make_core)
    engine = core.register(stages=1)
    captured(core, engine)
    core.make_shuttles = False
    captured(core, engine, "b", range(5000, 5600))
    core.content = changed(0, 1)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    state = core.core.state
    (op,) = state.ops.values()
    assert op.stages[0].state is StageState.MISSED
    assert op.waits_for == "a shuttle of cpu:0"
    assert state.due_s <= op.deadline_s
    order = [command for command in core.sent["cpu:0"] if isinstance(command, MakeShuttle)][-1]
    core.report("cpu:0", ShuttleReady(order.index, False, 0.0))
    assert unpack_numbers(job(core).chunks) == (0, 1)
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_stages_that_end_meanwhile_do_not_end_the_capture(make_core: MakeCore) -> None:
    core = started(make_core)
    engine = core.register()
    captured(core, engine)
    core.make_shuttles = False
    captured(core, engine, "b", range(5000, 5600))
    core.content = changed(0, 1)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert core.answers(1, seq) == []
    for order in [command for command in core.sent["cpu:0"] if isinstance(command, MakeShuttle)]:
        core.report("cpu:0", ShuttleReady(order.index, False, 0.0))
    core.finish("cpu:0")
    assert isinstance(core.final(1, seq), Captured)


@pytest.fixture
def waiting(make_core: MakeCore) -> tuple[Harness, int]:
    """A capture whose one stage has missed two chunks and waits for a shuttle."""
    core = started(make_core, memory=MemorySettings(sample_s=1e6))
    engine = core.register(stages=1)
    captured(core, engine)
    core.make_shuttles = False
    captured(core, engine, "b", range(5000, 5600))
    core.content = changed(0, 1)
    seq = core.capture(engine, "a", LONGER, deadline_s=20.0)
    core.finish("cpu:0")
    assert core.core.state.short
    return core, seq


def test_a_suspect_that_waits_for_a_shuttle_is_not_overtaken(make_core: MakeCore) -> None:
    core = started(make_core)
    engine = core.register(stages=1)
    captured(core, engine)
    core.make_shuttles = False
    captured(core, engine, "b", range(5000, 5600))
    core.capture(engine, "a", tuple(range(700)))
    core.capture(engine, "c", tuple(range(6000, 6300)))
    core.worker_gone("cpu:0", under_way=None)  # by the one or by the other
    core.tick()
    for index in (c.index for c in list(core.sent["cpu:0"]) if isinstance(c, MakeShuttle) and c.adopt):
        core.report("cpu:0", ShuttleReady(index, False, 0.0))
    core.content = changed(0, 1)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    assert core.core.state.short
    later = core.restore(engine, "b", 600, first_row=2000)
    assert not core.jobs("cpu:0")
    order = [command for command in core.sent["cpu:0"] if isinstance(command, MakeShuttle)][-1]
    core.report("cpu:0", ShuttleReady(order.index, False, 0.0))
    core.finish("cpu:0")
    assert isinstance(core.final(1, seq), Captured)
    core.finish_all()
    assert isinstance(core.final(1, later), Restored)


def test_one_that_waits_is_cancelled_at_once(waiting: tuple[Harness, int]) -> None:
    core, seq = waiting
    core.ask(1, Cancel(core.next_seq(), seq))
    assert core.failure(1, seq).code == "cancelled"
    assert not core.core.state.short
    assert not [command for command in core.sent["cpu:0"] if isinstance(command, CancelJob)]


def test_one_that_waits_has_its_callers_deadline(waiting: tuple[Harness, int]) -> None:
    core, seq = waiting
    core.tick(19.0)
    assert core.answers(1, seq) == []
    assert core.core.due_s <= 120.0
    core.tick(1.5)
    assert core.failure(1, seq).code == "deadline"


def test_the_deadline_counts_again_once_chunks_are_missed(make_core: MakeCore) -> None:
    core = started(make_core, memory=MemorySettings(sample_s=1e6), job_floor_s=1000.0)
    engine = core.register(stages=1)
    captured(core, engine)
    core.make_shuttles = False
    captured(core, engine, "b", range(5000, 5600))
    core.content = changed(0, 1)
    core.capture(engine, "a", LONGER, deadline_s=5.0)
    (op,) = core.core.state.ops.values()
    core.tick(1.0)  # what is being copied has no deadline of its caller's
    assert core.core.due_s > op.deadline_s
    core.finish("cpu:0")
    assert core.core.state.short
    assert core.core.due_s <= op.deadline_s


def test_one_that_waits_ends_with_its_worker(waiting: tuple[Harness, int]) -> None:
    core, seq = waiting
    core.worker_gone("cpu:0")
    assert core.failure(1, seq).code == "worker_died"


def test_one_that_waits_ends_with_the_daemon(waiting: tuple[Harness, int]) -> None:
    core, seq = waiting
    core.perform(core.core.stop(core.at))
    assert core.failure(1, seq).code == "stopping"


def test_a_worker_that_dies_in_the_second_job_fails_the_capture(core: Harness) -> None:
    engine = core.register()
    first = captured(core, engine)
    before = used_granules(core)
    seq = missing(core, engine)
    core.worker_gone("cpu:0")
    assert core.failure(1, seq).code == "worker_died"
    assert used_granules(core) == before
    assert list(core.core.state.catalog.images.values()) == [first]


def test_a_second_job_that_fails_is_the_stages_failure(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    seq = missing(core, engine)
    sent = job(core)
    core.sent["cpu:0"].remove(sent)
    core.report("cpu:0", JobFailed(sent.job, "source_changed", "it was written", 1, moved_bytes=5))
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("source_changed", 0)
    assert failure.stages[0].moved_bytes == 6


def test_a_stage_whose_other_stage_failed_is_not_sent_again(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    core.content = changed(1)
    seq = core.capture(engine, "a", LONGER)
    core.fail("cpu:1")
    core.finish("cpu:0")
    assert core.jobs("cpu:0") == []
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("device_error", 1)
    assert [outcome.code for outcome in failure.stages] == ["cancelled", "device_error"]


def test_stages_that_copy_one_after_another_miss_one_after_another(make_core: MakeCore) -> None:
    core = started(make_core, parallel=False)
    engine = core.register()
    captured(core, engine)
    core.content = changed(1)
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    assert unpack_numbers(job(core).chunks) == (1,)
    assert core.jobs("cpu:1") == []
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert isinstance(core.final(1, seq), Captured)


def test_a_lost_shuttle_with_hinted_chunks_ends_the_capture(make_core: MakeCore) -> None:
    core = started(make_core, shuttle_bytes=MIB)
    engine = core.register()
    captured(core, engine)
    captured(core, engine, "b", range(5000, 5128))
    core.content = usual()
    seq = core.capture(engine, "a", LONGER)
    core.finish("cpu:0")
    (op,) = core.core.state.ops.values()
    assert op.staged is not None
    hinted = {extent.shuttle for chunk in op.staged.hinted[0].values() for extent in chunk.place.extents}
    assert not hinted & {extent.shuttle for place in op.staged.places[0] for extent in place.extents}
    core.worker_gone("cpu:0")
    core.make_shuttles = False
    core.tick(1.0)
    core.report("cpu:0", ShuttleFailed(min(hinted), "missing", "there is no segment", 1, 0))
    core.finish("cpu:1")
    assert core.failure(1, seq).code == "worker_died"


@pytest.mark.parametrize("looked", [True, False])
def test_what_waits_does_not_count_on_a_shuttle_that_is_lost(make_core: MakeCore, *, looked: bool) -> None:
    core = started(make_core)
    engine = core.register(stages=1)
    for number in range(3):  # shuttle 0 is full
        captured(core, engine, f"filler {number}", range(5000 + number, 5600 + number))
    image = captured(core, engine)
    assert {extent.shuttle for chunk in image.chunks() for extent in chunk.place.extents} == {1}
    for number in range(3):
        core.ask(1, Drop(core.next_seq(), "ns", f"filler {number}"))
    core.worker_gone("cpu:0")
    core.make_shuttles = False
    core.tick(1.0)
    core.report("cpu:0", ShuttleReady(0, False, 0.0))
    seq = core.capture(engine, "b", LONGER)
    if not looked:  # it was not asked about while shuttle 1 was there
        (op,) = core.core.state.ops.values()
        op.forget_hints()
    core.report("cpu:0", ShuttleFailed(1, "missing", "there is no segment", 1, 0))
    core.core.validate()
    assert job(core).hinted == b""
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_a_hinted_image_that_is_shortened_keeps_the_hints_of_what_stays(core: Harness) -> None:
    engine = core.register(stages=1)
    image = captured(core, engine)
    catalog = core.core.state.catalog
    spans = tuple(layout().chunks(600))
    draft = Draft(image.scope, "b", image.tokens, 600, (), None, (spans,))
    hints = Hints(image, ({0: image.stages[0][0], 1: image.stages[0][1]},))
    staged = catalog.stage(draft, hints)
    catalog.shorten(staged, draft._replace(spans=(spans[1:],)), [[1, 2]])
    assert staged.hinted == ({0: image.stages[0][1]},)
    catalog.validate()
    catalog.discard(staged)
    assert used_granules(core) == 4 + 4 + 2


def test_a_capture_of_another_conversation_gives_up_hints_that_stand_in_its_way(make_core: MakeCore) -> None:
    core = started(make_core, arena_bytes=2 * MIB)
    engine = core.register(stages=1)
    captured(core, engine, "hint", (*range(256), *range(5000, 6100)))  # 22 of 31 granules
    seq = core.capture(engine, "a", (*range(256), *range(7000, 7900)))  # 15 besides chunk 0, and 9 are free
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["a"]


def test_a_rescue_is_hinted_and_cut(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    core.mark(engine, "a", LONGER)
    core.finish_all()
    core.die()
    assert unpack_numbers(job(core).hinted) == (0, 1)
    core.content = lambda stage, chunk: usual(chunk == 3)(stage, chunk)
    core.finish_all()
    (image,) = core.core.state.catalog.images.values()
    assert image.token_count == 768


def test_residents_are_named_to_the_worker(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    seq = core.restore(engine, resident_tokens=10**6)
    (sent,) = core.jobs("cpu:0")
    assert isinstance(sent, RestoreJob)
    assert sent.resident_tokens == 600
    for worker in ("cpu:0", "cpu:1"):
        done = core.jobs(worker)[0]
        core.sent[worker].remove(done)
        core.report(worker, JobDone(done.job, 1, 0.0, 0.0, digested_bytes=7, skipped_bytes=5))
    reply = core.final(1, seq)
    assert isinstance(reply, Restored)
    assert [(o.moved_bytes, o.digested_bytes, o.skipped_bytes) for o in reply.stages] == [(1, 7, 5)] * 2


def test_residents_that_cannot_be_are_refused(core: Harness) -> None:
    engine = core.register()
    captured(core, engine)
    assert core.failure(1, core.restore(engine, resident_tokens=-1)).code == "bad_tokens"


@pytest.mark.parametrize("reuse", ["off", "storage"])
def test_residents_are_not_looked_for_without_verified_reuse(make_core: MakeCore, reuse: str) -> None:
    core = started(make_core, reuse=reuse)
    engine = core.register()
    captured(core, engine)
    core.restore(engine, resident_tokens=600)
    (sent,) = core.jobs("cpu:0")
    assert isinstance(sent, RestoreJob)
    assert sent.resident_tokens == 0
