"""The lives of workers: stuck, out of device memory, hung in an order, and what admins order in every state."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    BootFailed,
    Captured,
    Done,
    Failed,
    MakeShuttle,
    MemfdPool,
    PoolOpened,
    Progress,
    Register,
    Registered,
    ResetWorker,
    RestartWorker,
    Restored,
    ShuttleFailed,
    ShuttleReady,
    Stage,
    Stats,
    StatsReply,
    StopWorker,
    Unregister,
    WorkerInfo,
    WorkerOrdered,
)
from stratad.core.effects import SendTo, SpawnWorker, UnlinkSegment
from stratad.core.state import Worker, WorkerState
from tests.support.core_harness import FINGERPRINT, MIB, Harness, layout

MakeCore = Callable[..., Harness]


def worker_of(core: Harness, name: str = "cpu:0") -> Worker:
    return core.core.state.workers[name]


def shown(core: Harness, name: str = "cpu:0") -> WorkerInfo:
    stats = Stats(core.next_seq())
    core.ask(1, stats)
    core.tick(0.3)
    reply = core.final(1, stats.seq)
    assert isinstance(reply, StatsReply)
    return next(worker for worker in reply.workers if worker.worker == name)


def spawns(core: Harness, name: str = "cpu:0") -> list[int]:
    return [e.generation for e in core.effects if isinstance(e, SpawnWorker) and e.worker == name]


def order(core: Harness, request: RestartWorker | ResetWorker) -> WorkerOrdered:
    core.ask(1, request)
    reply = core.final(1, request.seq)
    assert isinstance(reply, WorkerOrdered), reply
    return reply


def refused(core: Harness, request: RestartWorker | ResetWorker, client: int = 1) -> str:
    core.ask(client, request)
    return core.failure(client, request.seq).code


def restart(core: Harness, name: str = "cpu:0") -> WorkerOrdered:
    return order(core, RestartWorker(core.next_seq(), name))


def reset(core: Harness, name: str = "cpu:0", *, force: bool = False) -> WorkerOrdered:
    return order(core, ResetWorker(core.next_seq(), name, force))


def fail_for_good(core: Harness, name: str = "cpu:0") -> None:
    """Let the worker die until it is given up."""
    while worker_of(core, name).state is not WorkerState.FAILED:
        core.worker_gone(name)
        core.tick(20.0)


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    made = make_core()
    made.connect()
    return made


# --- stuck ------------------------------------------------------------------------------------------------------------


def stuck(core: Harness, engine: int) -> int:
    """The worker cpu:0 hangs in a restore and outlives SIGKILL; the number of the restore."""
    core.capture(engine, "a")
    core.finish_all()
    seq = core.restore(engine, "a", first_row=1000)
    core.finish("cpu:1")
    core.tick(6.0)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    core.tick(9.9)
    assert worker_of(core).state is WorkerState.KILLED
    core.tick(0.1)
    assert worker_of(core).state is WorkerState.STUCK
    return seq


def test_a_worker_that_outlives_sigkill_is_stuck_and_everything_stays_as_it_is(core: Harness) -> None:
    engine = core.register()
    seq = stuck(core, engine)
    assert core.answers(1, seq) == []
    assert core.failure(1, core.restore(engine, "a", first_row=2000)).code == "worker_unavailable"
    assert core.failure(1, core.capture(engine, "b", first_row=1000)).code == "worker_unavailable"
    core.tick(1000.0)
    assert spawns(core) == [1]
    assert len(core.core.state.fences) == 1
    assert (shown(core).state, shown(core).pid) == ("stuck", 1000)
    assert "SIGKILL" in shown(core).detail
    assert core.core.state.counters["workers_stuck"] == 1
    core.core.validate()


def register_at(core: Harness, worker: str, stages: int = 1, deadline_s: float = 30.0) -> Register:
    """A registration of an engine with all its stages at one worker."""
    pools = [MemfdPool(n + 1, layout().end_bytes) for n in range(stages)]
    made = tuple(Stage(n, worker, pool, layout()) for n, pool in enumerate(pools))
    request = Register(core.next_seq(), "ns", "e", FINGERPRINT, made, deadline_s)
    core.ask(1, request)
    return request


def test_others_go_on_beside_a_stuck_worker(core: Harness) -> None:
    stuck(core, core.register())
    registered = core.final(1, register_at(core, "cpu:1").seq)
    assert isinstance(registered, Registered)
    seq = core.capture(registered.engine_id, "c", range(300))
    core.finish("cpu:1", stage=0)
    assert isinstance(core.final(1, seq), Captured)
    assert core.failure(1, register_at(core, "cpu:0").seq).code == "worker_unavailable"


def test_what_waits_for_a_worker_is_told_when_that_is_stuck(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    running = core.capture(engine, "x")
    core.tick(6.0)
    waits = core.capture(engine, "b", first_row=2000, deadline_s=100.0)
    assert core.answers(1, waits) == [Progress(waits, "accepted")]
    core.tick(10.0)
    assert core.failure(1, waits).code == "worker_unavailable"
    assert core.answers(1, running) == []


def test_the_proven_end_of_a_stuck_worker_is_a_death_like_any_other(core: Harness) -> None:
    engine = core.register()
    seq = stuck(core, engine)
    core.tick(1000.0)
    core.worker_gone("cpu:0")
    assert core.failure(1, seq).code == "worker_hung"
    core.tick()
    assert spawns(core) == [1, 2]
    again = core.restore(engine, "a", first_row=1000)
    core.finish_all()
    assert isinstance(core.final(1, again), Restored)


def test_a_stuck_worker_is_not_waited_for_at_a_stop(core: Harness) -> None:
    stuck(core, core.register())
    core.perform(core.core.stop(core.at))
    core.worker_gone("cpu:1", "exited with status 0")
    assert core.core.stopped
    assert core.core.stuck == {"cpu:0"}


# --- no memory on the device ------------------------------------------------------------------------------------------


def no_memory(core: Harness, wanted: int = 700, free: int = 200) -> None:
    core.report("cpu:0", BootFailed("out_of_memory", "cudaMalloc failed", wanted, free))
    assert [e.command for e in core.effects if isinstance(e, SendTo)][-1] == StopWorker()
    core.worker_gone("cpu:0", "exited with status 3")


def test_a_full_device_is_tried_for_ever_and_the_missing_bytes_are_shown(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    delays: list[float] = []
    for _ in range(12):
        no_memory(core)
        assert worker_of(core).state is WorkerState.NO_MEMORY
        delays.append(round(worker_of(core).next_start_s - core.now_s, 3))
        core.tick(delays[-1])
        assert worker_of(core).state is WorkerState.STARTING
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0, 10.0]
    no_memory(core)
    info = shown(core)
    assert (info.state, info.missing_bytes, info.deaths) == ("no_memory", 500, 1)
    assert "500 bytes missing, 700 needed, 200 free" in info.detail
    core.tick(10.0)
    core.auto = True
    core.ready("cpu:0")
    assert (shown(core).state, shown(core).missing_bytes, shown(core).detail) == ("ready", 0, "")


def test_another_boot_failure_still_leads_to_giving_up(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    for _ in range(3):
        core.tick(20.0)
        core.report("cpu:0", BootFailed("device_error", "a kernel gave a wrong answer"))
        core.worker_gone("cpu:0", "exited with status 3")
    assert shown(core).state == "failed"
    assert "kernel" in shown(core).detail


def test_an_operation_that_waits_for_memory_says_so(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    no_memory(core)
    seq = core.capture(engine, "a", deadline_s=0.05)
    core.tick(0.06)
    reply = core.failure(1, seq)
    assert reply.code == "deadline"
    assert "500 bytes of device memory missing" in reply.message


# --- orders that hang, ends that do not come --------------------------------------------------------------------------


def test_a_shuttle_that_is_never_made_costs_the_process(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    core.ready("cpu:0")
    assert any(isinstance(c, MakeShuttle) for c in core.sent["cpu:0"])
    core.tick(30.0)
    assert core.kills == []
    core.tick(0.1)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    assert "shuttle 0" in core.kills[0].reason


def test_a_pool_that_is_never_mapped_costs_the_process_and_a_row_of_slow_ones_does_not(make_core: MakeCore) -> None:
    core = make_core(1)
    core.connect()
    core.auto = False
    request = register_at(core, "cpu:0", 3, deadline_s=1000.0)
    for pool in (1, 2):
        core.tick(29.0)
        core.report("cpu:0", PoolOpened(pool))
    assert core.kills == []
    core.tick(30.0)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    core.worker_gone("cpu:0")
    core.auto = True
    core.tick()
    assert isinstance(core.final(1, request.seq), Registered)
    core.tick(100.0)
    assert len(core.kills) == 1


def test_a_worker_that_hangs_up_gets_no_job_and_is_killed_if_it_stays(core: Harness) -> None:
    engine = core.register()
    core.perform(core.core.worker_hung_up("cpu:0", 1, core.at))
    waits = core.capture(engine, "a")
    assert core.jobs("cpu:0") == []
    core.tick(0.9)
    assert core.kills == []
    core.tick(0.2)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    core.worker_gone("cpu:0")
    core.tick()
    core.finish_all()
    assert isinstance(core.final(1, waits), Captured)


def test_a_worker_that_hangs_up_because_the_daemon_stops_is_left_to_end(core: Harness) -> None:
    core.perform(core.core.stop(core.at))
    core.perform(core.core.worker_hung_up("cpu:0", 1, core.at))
    core.tick(5.0)
    assert core.kills == []


def test_what_kills_whoever_makes_it_is_not_made_again_at_once(make_core: MakeCore) -> None:
    """A new shuttle that costs two processes their lives must not lead to giving the device up: the arena serves."""
    core = make_core(1, budget_bytes=64 * MIB, arena_bytes=8 * MIB)
    core.connect()
    engine = core.register(stages=1)
    core.capture(engine, "a", range(256))
    core.finish_all()
    core.make_shuttles = False
    seq = core.capture(engine, "b", range(1800), first_row=1800)  # 1.8 MiB: needs a second shuttle
    for _ in range(2):
        assert worker_of(core).making == 1
        core.worker_gone("cpu:0")
        core.tick(5.0)
        core.report("cpu:0", ShuttleReady(0, False, 0.0))
    assert worker_of(core).making is None
    assert "died while they made a shuttle" in shown(core).detail
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)  # it made room in the shuttle that there is
    core.make_shuttles = True
    core.tick(10.0)
    core.capture(engine, "c", range(1800), first_row=1800)
    core.finish_all()
    assert len(worker_of(core).sizes) >= 2
    assert worker_of(core).making_deaths == 0


# --- orders of admins -------------------------------------------------------------------------------------------------


def test_a_failed_worker_is_restarted_and_its_images_are_served(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    fail_for_good(core)
    assert core.failure(1, core.restore(engine, "a", first_row=1000)).code == "worker_unavailable"
    before = len(spawns(core))
    reply = restart(core)
    assert (reply.was, reply.generation) == ("failed", worker_of(core).generation)
    assert len(spawns(core)) == before + 1
    assert worker_of(core).deaths_in_row == 0
    seq = core.restore(engine, "a", first_row=1000)
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)
    core.worker_gone("cpu:0")  # the first death after it is one, not the last of many
    assert worker_of(core).state is WorkerState.DEAD


def test_a_living_worker_is_killed_and_started_anew_without_its_end_being_a_death(core: Harness) -> None:
    engine = core.register()
    running = core.capture(engine, "a")
    reply = restart(core)
    assert (reply.was, reply.generation) == ("ready", 2)
    assert [kill.worker for kill in core.kills] == ["cpu:0"]
    assert spawns(core) == [1]  # not before the end of the first is proven
    core.worker_gone("cpu:0")
    core.tick()
    assert spawns(core) == [1, 2]
    core.finish("cpu:1")
    assert core.failure(1, running).code == "worker_died"
    assert (worker_of(core).deaths, worker_of(core).deaths_in_row) == (0, 0)
    again = core.capture(engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, again), Captured)


def test_overlapping_orders_each_get_an_answer_and_one_process_follows(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.auto = False
    assert restart(core).was == "ready"
    assert restart(core).was == "killed"
    assert reset(core).was == "killed"
    core.worker_gone("cpu:0")
    assert restart(core).was == "starting"
    core.worker_gone("cpu:0")
    core.tick()
    assert spawns(core) == [1, 2, 3]
    core.ready("cpu:0")
    assert worker_of(core).state is WorkerState.READY


def test_a_worker_that_waits_for_its_back_off_is_started_at_once(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    for _ in range(3):
        core.tick(20.0)
        core.worker_gone("cpu:0")
    assert worker_of(core).state is WorkerState.DEAD
    assert worker_of(core).next_start_s > core.now_s
    assert restart(core).was == "dead"
    assert worker_of(core).state is WorkerState.READY


@pytest.mark.parametrize("kind", [RestartWorker, ResetWorker])
def test_orders_are_refused_clearly(core: Harness, kind: type[RestartWorker | ResetWorker]) -> None:
    core.connect(2, uid=4321)
    assert refused(core, kind(core.next_seq(), "cpu:0"), 2) == "not_permitted"
    assert refused(core, kind(core.next_seq(), "cpu:9")) == "bad_value"
    stuck(core, core.register())
    assert refused(core, kind(core.next_seq(), "cpu:0")) == "worker_unavailable"
    assert worker_of(core).state is WorkerState.STUCK
    core.perform(core.core.stop(core.at))
    assert refused(core, kind(core.next_seq(), "cpu:1")) == "stopping"


def test_a_reset_is_refused_while_images_lie_there_and_drops_them_by_force(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    core.slot_copy(engine, "slot_to", first_row=2000)
    core.finish_all()
    seq = core.next_seq()
    assert refused(core, ResetWorker(seq, "cpu:0")) == "arena_in_use"
    used_mib = worker_of(core).arena.used_granules / 16
    assert core.failure(1, seq).message == (
        f"2 images ({used_mib:.1f} MiB in all) in the arena of cpu:0: a reset drops what lies there"
    )
    assert core.kills == []
    reply = reset(core, force=True)
    assert (reply.was, reply.images_dropped) == ("ready", 2)
    assert not core.core.state.catalog.images
    assert not any(isinstance(e, UnlinkSegment) for e in core.effects)  # the process still maps them
    core.worker_gone("cpu:0")
    assert [e.segment for e in core.effects if isinstance(e, UnlinkSegment)] == [
        "/stratad.unit.cpu_0.0",
        "/stratad.unit.cpu_0.1",
    ]
    core.tick()
    assert worker_of(core).state is WorkerState.READY
    assert list(worker_of(core).sizes) == [0]  # a new one
    assert core.failure(1, core.restore(engine, "a", first_row=1000)).code == "unknown_conversation"
    core.capture(engine, "a")
    core.finish_all()
    seq = core.restore(engine, "a", first_row=1000)
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_a_reset_waits_for_the_last_reader_of_the_arena(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    running = core.restore(engine, "a", first_row=1000)
    reset(core, force=True)
    core.worker_gone("cpu:0")
    core.tick(1.0)
    assert spawns(core) == [1]  # stage 1 of the restore still reads: its operation holds the image
    assert not any(isinstance(e, UnlinkSegment) for e in core.effects)
    core.finish("cpu:1")
    assert isinstance(core.final(1, running), Failed)
    assert spawns(core) == [1, 2]
    assert any(isinstance(e, UnlinkSegment) for e in core.effects)
    assert worker_of(core).state is WorkerState.READY


def test_a_reset_ends_what_waits_for_an_image_that_it_drops(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    core.capture(engine, "a")
    core.finish_all()
    core.auto = False
    core.worker_gone("cpu:0")
    waits = core.restore(engine, "a", first_row=1000)
    reset(core, force=True)
    assert core.failure(1, waits).code == "unknown_image"
    core.auto = True
    core.tick()
    core.ready("cpu:0")
    core.report("cpu:0", ShuttleReady(0, False, 0.0))
    assert worker_of(core).state is WorkerState.READY


def test_a_failed_worker_is_reset_at_once(core: Harness) -> None:
    fail_for_good(core)
    assert reset(core).was == "failed"
    assert worker_of(core).state is WorkerState.READY
    assert worker_of(core).resetting is False


def test_a_capture_under_way_publishes_nothing_in_an_arena_that_is_reset(core: Harness) -> None:
    engine = core.register()
    running = core.capture(engine, "a")
    core.finish("cpu:0")
    reset(core, force=True)
    core.worker_gone("cpu:0")
    core.tick(1.0)
    core.finish("cpu:1")
    failure = core.failure(1, running)
    assert failure.code == "worker_died"
    assert "reset" in failure.message
    assert not core.core.state.catalog.images
    assert worker_of(core).state is WorkerState.READY
    again = core.capture(engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, again), Captured)


# --- an engine's pools at a worker that ends --------------------------------------------------------------------------


def test_an_engine_is_closed_once_the_worker_that_was_killed_is_gone(core: Harness) -> None:
    """Its mappings live as long as the process."""
    engine = core.register()
    core.perform(core.core.worker_unfit("cpu:0", 1, "takes no commands", core.at))
    seq = core.next_seq()
    assert core.ask(1, Unregister(seq, engine)) == []
    core.worker_gone("cpu:0")
    assert core.answers(1, seq) == [Done(seq)]
    assert not core.core.state.engines


def test_an_engine_is_not_kept_open_by_a_stuck_worker(core: Harness) -> None:
    engine = core.register()
    core.perform(core.core.worker_unfit("cpu:0", 1, "takes no commands", core.at))
    seq = core.next_seq()
    assert core.ask(1, Unregister(seq, engine)) == []
    core.tick(10.0)
    assert worker_of(core).state is WorkerState.STUCK
    assert core.answers(1, seq) == [Done(seq)]


# --- the stop, and a daemon that stood still --------------------------------------------------------------------------


def test_a_registration_that_waits_is_told_of_the_stop(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    waits = register_at(core, "cpu:0")
    core.perform(core.core.stop(core.at))
    assert core.failure(1, waits.seq).code == "stopping"
    assert not core.core.state.engines


def test_nothing_that_a_worker_owes_is_overdue_because_the_daemon_stood_still(make_core: MakeCore) -> None:
    core = make_core(3)
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    core.ready("cpu:0")  # and is asked for a shuttle
    register_at(core, "cpu:1")
    core.perform(core.core.worker_hung_up("cpu:2", 1, core.at))
    core.perform(core.core.stood_still(500.0, core.at))
    core.tick(500.5)
    assert core.kills == []
    core.tick(40.0)
    assert {kill.worker for kill in core.kills} == {"cpu:0", "cpu:1", "cpu:2"}
    core.perform(core.core.stood_still(500.0, core.at))
    core.tick(509.5)
    assert {worker.state for worker in core.core.state.workers.values()} == {WorkerState.KILLED}
    core.tick(1.0)
    assert {worker.state for worker in core.core.state.workers.values()} == {WorkerState.STUCK}


def test_no_tick_is_due_at_once_for_a_worker_that_ends_while_it_runs_short(make_core: MakeCore) -> None:
    core = make_core(1)
    core.connect()
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    core.ready("cpu:0")
    core.report("cpu:0", ShuttleFailed(0, "no_space", "No space left on device", MIB, 0))
    core.tick(9.5)
    core.perform(core.core.worker_hung_up("cpu:0", 2, core.at))
    core.tick(0.7)
    assert core.kills == []
    assert core.core.due_s > core.now_s
