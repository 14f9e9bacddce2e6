"""Shuttles that cannot be had: what passes is tried again, what is lost takes its images along and nothing else."""

from collections.abc import Callable, Iterator

import pytest

from ipc.messages import (
    Captured,
    Failed,
    ImageDetail,
    MakeShuttle,
    OpenPool,
    PoolOpened,
    ResetWorker,
    Restored,
    Show,
    ShuttleFailed,
    ShuttleReady,
    WorkerOrdered,
)
from shm.extent import GRANULE_BYTES
from stratad.core.effects import LogLine, UnlinkSegment
from stratad.core.losses import SKIP_LIMIT
from stratad.core.memory_tracks import MemorySettings
from stratad.core.records import DropRecord, ImageRecord
from stratad.core.views import health, worker_info
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import MIB, Harness

MakeCore = Callable[..., Harness]


@pytest.fixture
def make_core() -> Iterator[MakeCore]:
    """Makes a core; every invariant is checked at the end of the test."""
    made: list[Harness] = []

    def make(workers: int = 1, **changes: object) -> Harness:
        made.append(Harness.make(workers, None, None, **changes))
        made[-1].connect()
        return made[-1]

    yield make
    for core in made:
        core.core.validate()


def asked(core: Harness, worker: str = "cpu:0") -> list[MakeShuttle]:
    return [command for command in core.sent.get(worker, []) if isinstance(command, MakeShuttle)]


def come_back(core: Harness, worker: str = "cpu:0") -> None:
    """The worker's process dies, and the next one is ready and asked to attach shuttle 0."""
    core.worker_gone(worker)
    core.auto = False
    core.tick(1.0)
    core.ready(worker)
    for command in core.sent[worker]:
        if isinstance(command, OpenPool):
            core.report(worker, PoolOpened(command.pool))
    assert [(order.index, order.adopt) for order in asked(core, worker)] == [(0, True)]


def lose(core: Harness, code: str = "missing", worker: str = "cpu:0") -> None:
    """Shuttle 0 is not there any more when the worker comes back."""
    come_back(core, worker)
    core.auto = True
    core.report(worker, ShuttleFailed(0, code, "there is no segment /stratad.unit.cpu_0.0", 1, 0))


@pytest.mark.parametrize("code", ["missing", "refused"])
def test_a_lost_shuttle_takes_its_images_along_and_the_worker_serves_on(make_core: MakeCore, code: str) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.capture(engine)
    core.finish_all()
    lose(core, code)
    state = core.core.state
    assert core.kills == []
    assert not state.catalog.images
    assert (state.counters["images_lost"], state.counters["shuttles_lost"]) == (1, 1)
    assert [e.segment for e in core.effects if isinstance(e, UnlinkSegment)] == ["/stratad.unit.cpu_0.0"]
    arena = state.workers["cpu:0"].arena
    assert (arena.total_granules, arena.used_granules) == (2 * MIB // GRANULE_BYTES - 1, 0)
    core.capture(engine, "b")
    core.finish_all()
    assert len(state.catalog.images) == 1
    worker = state.workers["cpu:0"]
    assert list(worker.sizes) == [1], "the number of a lost shuttle is not used again"
    assert health(state) == "ok"


def test_images_beside_a_lost_shuttle_stay(make_core: MakeCore) -> None:
    core = make_core(2)
    both, one = core.register(), core.register(stages=1, namespace="other")
    core.capture(both, "over both")
    core.finish_all()
    core.capture(one, "at the first")
    core.finish_all()
    lose(core, worker="cpu:1")
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["at the first"]
    restored = core.restore(one, "at the first", first_row=1000)
    core.finish_all()
    assert isinstance(core.final(1, restored), Restored)


def test_a_restore_that_waits_for_a_lost_shuttle_ends_with_the_cause(make_core: MakeCore) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.capture(engine)
    core.finish_all()
    core.worker_gone("cpu:0")
    waiting = core.restore(engine, first_row=1000)
    lose(core)
    failure = core.failure(1, waiting)
    assert failure.code == "damaged"
    assert "shuttle 0 of cpu:0 is lost: there is no segment" in failure.message
    assert not core.core.state.ops


def test_a_capture_of_which_a_stage_is_lost_before_the_others_end_is_not_published(make_core: MakeCore) -> None:
    core = make_core(2)
    engine = core.register()
    seq = core.capture(engine)
    core.finish("cpu:0")
    held = list(core.sent["cpu:1"])
    lose(core)
    core.sent["cpu:1"] = held
    core.finish("cpu:1")
    failure = core.failure(1, seq)
    assert (failure.code, "is lost" in failure.message) == ("worker_died", True)
    assert not core.core.state.catalog.images
    again = core.capture(engine)
    core.finish_all()
    assert isinstance(core.final(1, again), Captured)


def test_a_serial_restore_does_not_ask_for_what_was_lost_meanwhile(make_core: MakeCore) -> None:
    core = make_core(2, parallel=False)
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    seq = core.restore(engine, first_row=1000)
    held = list(core.sent["cpu:0"])
    lose(core, worker="cpu:1")
    core.sent["cpu:0"] = held
    core.finish("cpu:0")
    failure = core.failure(1, seq)
    assert (failure.code, [stage.state for stage in failure.stages]) == ("damaged", ["done", "untouched"])
    assert core.jobs("cpu:1") == []


def test_transit_images_and_takes_in_a_lost_shuttle_go(make_core: MakeCore) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    core.capture(engine)
    core.finish_all()
    core.restore(engine, first_row=2000, take=True)
    core.finish_all()
    lose(core)
    state = core.core.state
    assert not state.catalog.images
    assert not state.catalog.transits
    assert not state.engines[engine].transits
    back = core.slot_copy(engine, "slot_from")
    assert core.failure(1, back).code == "unknown_image"


def test_puts_in_a_lost_shuttle_end_whole_and_gets_say_so(make_core: MakeCore) -> None:
    core = make_core()
    exchange = CoreExchange.register(core)
    assert isinstance(exchange.put_whole("kept", {"a": 1}), Captured)
    get = exchange.open("kept")
    put = exchange.begin("half")
    exchange.put(put, "a", 1)
    core.finish_all()
    lose(core)
    commit = exchange.commit(put)
    assert isinstance(commit, Failed)
    assert commit.code == "unknown_put"
    assert core.failure(1, exchange.get(get.get_id, 0, 1)).code == "damaged"
    exchange.close(get.get_id)
    assert not core.core.state.catalog.images


@pytest.mark.parametrize("code", ["unavailable", "no_space", "cancelled"])
def test_a_shortage_when_attaching_passes_and_loses_nothing(make_core: MakeCore, code: str) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.capture(engine)
    core.finish_all()
    come_back(core)
    waiting = core.restore(engine, first_row=1000)
    core.report("cpu:0", ShuttleFailed(0, code, "this process may have 64 files open", 1, 0))
    worker = core.core.state.workers["cpu:0"]
    assert core.kills == []
    assert "shuttle 0 cannot be attached again: this process may have 64 files open" in worker.detail
    assert health(core.core.state) == "degraded"
    assert len(asked(core)) == 1, "not at once"
    core.auto = True
    core.tick(10.0)
    assert health(core.core.state) == "ok"
    assert worker.detail == ""
    core.finish_all()
    assert isinstance(core.final(1, waiting), Restored)
    assert len(core.core.state.catalog.images) == 1


def test_an_arena_that_ran_short_is_tried_again_without_being_asked(make_core: MakeCore) -> None:
    seldom = MemorySettings(sample_s=1000.0)
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB, grow_again_s=7.0, memory=seldom)
    engine = core.register(stages=1)
    core.auto = False
    core.capture(engine, tokens=range(1100))
    for tries in range(1, 4):
        assert len(asked(core)) == tries
        core.report("cpu:0", ShuttleFailed(1, "no_space", "/dev/shm has 3 bytes free", MIB, 3))
        assert health(core.core.state) == "degraded"
        assert core.core.due_s <= core.now_s + 7.0
        core.tick(6.9)
        assert len(asked(core)) == tries
        assert core.core.due_s == pytest.approx(core.now_s + 0.1), "nothing else falls due"
        core.tick(0.2)
    core.report("cpu:0", ShuttleReady(1, False, 0.0))
    assert health(core.core.state) == "ok"
    assert core.core.state.workers["cpu:0"].detail == ""
    logged = [e.level for e in core.effects if isinstance(e, LogLine) and e.message == "shuttle failed"]
    assert logged == ["error", "debug", "debug"], "one line an episode, not one a try"


def test_a_page_lock_that_is_refused_stops_the_growth_and_not_the_worker(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB)
    engine = core.register(stages=1)
    core.auto = False
    seq = core.capture(engine, tokens=range(1100))
    why = "page-locking stopped after 0 of 1048576 bytes: ... (the limit of locked memory is 65536 bytes)"
    core.report("cpu:0", ShuttleFailed(1, "device_error", why, MIB, 0))
    failure = core.failure(1, seq)
    assert (failure.code, why in failure.message) == ("no_space", True)
    assert core.kills == []
    assert why in core.core.state.workers["cpu:0"].detail
    assert health(core.core.state) == "degraded"


def test_an_arena_that_became_full_grown_meanwhile_is_well(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=2 * MIB, arena_bytes=4 * MIB)
    worker = core.core.state.workers["cpu:0"]
    worker.grow_failed, worker.detail = "no room", "arena cannot grow: no room"
    worker.sizes[5] = 2 * MIB
    worker.mapped.add(5)
    worker.arena.add_shuttle(5, 2 * MIB)
    core.tick(10.0)
    assert (worker.grow_failed, worker.detail, health(core.core.state)) == ("", "", "ok")


def test_names_that_others_have_taken_are_passed_over(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB)
    engine = core.register(stages=1)
    core.auto = False
    seq = core.capture(engine, tokens=range(1100))
    for index in (1, 2):
        core.report("cpu:0", ShuttleFailed(index, "exists", f"the segment ...{index} exists already", 1, 0))
    assert [order.index for order in asked(core)] == [1, 2, 3]
    core.auto = True
    core.report("cpu:0", ShuttleReady(3, False, 0.0))
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)
    assert health(core.core.state) == "ok"


def test_somebody_who_takes_every_name_is_no_endless_loop(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=MIB, arena_bytes=4 * MIB)
    engine = core.register(stages=1)
    core.auto = False
    seq = core.capture(engine, tokens=range(1100))
    for index in range(1, SKIP_LIMIT + 2):
        core.report("cpu:0", ShuttleFailed(index, "exists", f"the segment ...{index} exists already", 1, 0))
    assert len(asked(core)) == SKIP_LIMIT + 1
    failure = core.final(1, seq)
    assert isinstance(failure, Failed)
    assert failure.code == "no_space"
    assert "exists already" in failure.message
    core.core.state.workers["cpu:0"].arena.validate([])
    assert core.core.state.workers["cpu:0"].arena.free_granules == MIB // GRANULE_BYTES - 1


def test_the_end_of_lost_images_is_recorded(make_core: MakeCore) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.capture(engine)
    core.finish_all()
    (image_id,) = core.core.state.catalog.images
    lose(core)
    assert not core.core.state.catalog.images
    assert DropRecord((image_id,)) in core.records
    assert health(core.core.state) == "ok"


def test_a_worker_that_ran_short_before_its_shuttle_was_found_lost_is_short_no_more(make_core: MakeCore) -> None:
    core = make_core()
    core.register(stages=1)
    come_back(core)
    core.report("cpu:0", ShuttleFailed(0, "no_space", "No space left on device", MIB, 0))
    assert health(core.core.state) == "degraded"
    core.tick(10.0)
    core.report("cpu:0", ShuttleFailed(0, "missing", "there is no segment", 1, 0))
    core.core.validate()
    assert asked(core)[-1].index == 1
    core.report("cpu:0", ShuttleReady(1, False, 0.0))
    assert health(core.core.state) == "ok"


def test_a_journal_that_had_no_room_is_asked_again_without_a_request(make_core: MakeCore) -> None:
    core = make_core()
    engine = core.register(stages=1)
    core.journal_error = "/dev/shm: 5 bytes are free"
    seq = core.capture(engine)
    core.finish_all()
    assert core.failure(1, seq).code == "journal_unwritable"
    for _ in range(3):
        assert health(core.core.state) == "degraded"
        assert core.core.due_s <= core.now_s + 1.0
        core.tick(1.0)
    core.journal_error = ""
    core.tick(1.0)
    assert health(core.core.state) == "ok"


def test_extents_of_a_lost_shuttle_may_come_back_after_a_reset(make_core: MakeCore) -> None:
    core = make_core(2)
    engine = core.register()
    running = core.capture(engine)
    lose(core)
    order = ResetWorker(core.next_seq(), "cpu:0", force=True)
    assert isinstance(core.ask(1, order)[-1], WorkerOrdered)
    core.worker_gone("cpu:0")
    core.finish("cpu:1")
    assert isinstance(core.final(1, running), Failed)
    core.tick(1.0)
    again = core.capture(engine)
    core.finish_all()
    assert isinstance(core.final(1, again), Captured)
    assert 0 not in core.core.state.workers["cpu:0"].sizes, "its number stands for what is lost"


def test_images_whose_loss_cannot_be_recorded_stay_flagged_and_keep_their_other_extents(make_core: MakeCore) -> None:
    core = make_core(2)
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    core.restore(engine, first_row=1000)
    core.finish_all()
    core.journal_error = "No space left on device"
    lose(core)
    state = core.core.state
    (image,) = state.catalog.images.values()
    assert image.damaged
    assert state.workers["cpu:1"].arena.used_granules > 0
    assert core.failure(1, core.restore(engine, first_row=1000)).code == "damaged"
    shown = core.ask(1, Show(core.next_seq(), "ns", "a"))[-1]
    assert isinstance(shown, ImageDetail)
    assert shown.chunks[0].segments == ("",)
    core.journal_error = ""
    core.tick(2.0)
    core.capture(engine)
    core.finish_all()
    assert image.image_id not in state.catalog.images
    assert [r.supersedes for r in core.records if isinstance(r, ImageRecord)] == [0, image.image_id]


def progress(core: Harness) -> tuple[int, int, int]:
    info = worker_info(core.core.state, core.core.state.workers["cpu:0"])
    return info.mapped_bytes // MIB, info.locked_bytes // MIB, info.wanted_bytes // MIB


def test_it_is_shown_how_much_of_an_arena_is_there_and_how_much_is_wanted(make_core: MakeCore) -> None:
    core = make_core(prefault=True, shuttle_bytes=2 * MIB, arena_bytes=5 * MIB)
    assert progress(core) == (4, 0, 4)
    come_back(core)
    assert progress(core) == (0, 0, 4)
    core.report("cpu:0", ShuttleReady(0, True, 0.0))
    assert progress(core) == (2, 2, 4)
    core.report("cpu:0", ShuttleReady(1, False, 0.0))
    assert progress(core) == (4, 2, 4)


def test_without_prefault_only_what_is_in_the_making_is_wanted(make_core: MakeCore) -> None:
    core = make_core(shuttle_bytes=2 * MIB, arena_bytes=8 * MIB)
    before = progress(core)
    engine = core.register(stages=1)
    core.make_shuttles = False
    assert before[0] == before[2]
    core.capture(engine, tokens=range(2048))
    assert len(asked(core)) == 1
    assert progress(core) == (before[0], 0, before[2] + 2)
