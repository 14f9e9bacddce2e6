"""The lives of a worker's processes: when one is started, what ends it, what follows its end, and what admins order.

::

    DEAD, NO_MEMORY --due--> STARTING --ready--> READY
                                | kill             | kill, crash
                                v                  v
              (proven gone) <-- KILLED --10 s--> STUCK --proven gone--> as after any death
                   |
                   '--> DEAD (a death), NO_MEMORY (its device was full), FAILED (given up), STOPPED (the daemon stops)
"""

import math

from ipc.messages import BootFailed, Failed, ResetWorker, RestartWorker, StopWorker, WorkerOrdered
from shm.extent import GRANULE_BYTES
from stratad.core import arenas, blame, ends, journaling, registration
from stratad.core.effects import SendTo, SpawnWorker
from stratad.core.failures import Refusal
from stratad.core.images import Image
from stratad.core.leases import end_get, end_put
from stratad.core.ops import OpState
from stratad.core.state import ALIVE, GONE, RETRIED, Life, State, Worker, WorkerState


def tick(state: State) -> None:
    """Start the workers that are due, and kill those that let a deadline pass."""
    for worker in state.workers.values():
        _tick_worker(state, worker)


def _tick_worker(state: State, worker: Worker) -> None:
    now_s, life, settings = state.now_s, worker.life, state.settings
    if worker.state in RETRIED:
        if worker.next_start_s <= now_s and not (state.stopping or worker.resetting):
            _start(state, worker)
    elif worker.state is WorkerState.KILLED or (worker.state is WorkerState.AWAITING and life.killed_s):
        if life.killed_s + settings.stuck_s <= now_s:
            _stuck(state, worker)
    elif worker.state not in ALIVE:
        return
    elif worker.state is WorkerState.STARTING and worker.born_s + settings.boot_s <= now_s:
        arenas.kill(state, worker, "worker_hung", f"not ready after {settings.boot_s} s")
    elif life.leaving_s <= now_s:
        arenas.kill(state, worker, "worker_died", "it was to end and did not", excused=False)
    elif life.making_by_s <= now_s:
        state.count("workers_hung")
        arenas.kill(state, worker, "worker_hung", f"shuttle {worker.making} was not made or attached in time")
    elif life.pools_by_s <= now_s:
        state.count("workers_hung")
        arenas.kill(state, worker, "worker_hung", f"no pool was opened or closed within {settings.order_s} s")


def due_s(state: State, worker: Worker) -> float:
    """When `tick` is due for a worker (jobs left out)."""
    if worker.state in RETRIED:
        return math.inf if state.stopping or worker.resetting else worker.next_start_s
    life = worker.life
    if worker.state is WorkerState.KILLED or (worker.state is WorkerState.AWAITING and life.killed_s):
        return life.killed_s + state.settings.stuck_s
    if worker.state is WorkerState.AWAITING:
        return worker.former_by_s
    if worker.state not in ALIVE:
        return math.inf
    boot_by_s = worker.born_s + state.settings.boot_s if worker.state is WorkerState.STARTING else math.inf
    return min(boot_by_s, life.leaving_s, life.making_by_s, life.pools_by_s)


def stood_still(worker: Worker, lost_s: float) -> None:
    """Nobody listened for so long: an answer, or the proof of an end, may have been there all the time."""
    life = worker.life
    if worker.state is WorkerState.STARTING:
        worker.born_s += lost_s
    life.leaving_s += lost_s
    life.making_by_s += lost_s
    life.pools_by_s += lost_s
    worker.former_by_s += lost_s
    if life.killed_s:
        life.killed_s += lost_s


def _start(state: State, worker: Worker) -> None:
    worker.state = WorkerState.STARTING
    worker.generation += 1
    worker.born_s = state.now_s
    worker.life = Life()
    state.wake_by(state.now_s + state.settings.boot_s)
    state.out.append(SpawnWorker(worker.name, worker.generation))


def _stuck(state: State, worker: Worker) -> None:
    """It may still read and write whatever it could before: everything stays as it is, and nobody else comes there."""
    worker.state = WorkerState.STUCK
    pid = worker.former[0] if worker.former is not None else worker.pid
    worker.detail = f"pid {pid} is not gone {state.settings.stuck_s:g} s after SIGKILL: the kernel or a driver holds it"
    state.count("workers_stuck")
    state.log("error", "worker stuck", worker=worker.name, pid=pid, generation=worker.generation)
    registration.worker_given_up(state, worker)


# --- signs of an end --------------------------------------------------------------------------------------------------


def hung_up(state: State, worker: Worker) -> None:
    """Its lifeline ended. That is no proof: it gets no more jobs, and is killed if it does not end by itself."""
    if worker.state in ALIVE and not state.stopping:  # then it was told to, and has until the end of that
        worker.life.leaving_s = min(worker.life.leaving_s, state.now_s + arenas.LEAVE_S)
        state.wake_by(worker.life.leaving_s)


def boot_failed(state: State, worker: Worker, report: BootFailed) -> None:
    """It cannot use its device and says why; then it ends."""
    if worker.state is WorkerState.STARTING:
        worker.life.boot_failed = report
        state.out.append(SendTo(worker.name, StopWorker()))


# --- the end ----------------------------------------------------------------------------------------------------------


def ended(state: State, worker: Worker, reason: str) -> None:
    """The process is proven gone: decide what the worker is now. Its jobs are not ended yet."""
    life = worker.life
    worker.missing_bytes = 0
    if life.boot_failed is not None:
        reason = _why_not_booted(worker, life.boot_failed)
    elif life.killed_for:
        reason = f"{life.killed_for} ({reason})"
    worker.detail = f"generation {worker.generation}: {reason}"
    against_it = blame.settle(state, worker)
    arenas.drop_half_made(state, worker)
    if state.stopping:
        worker.state = WorkerState.STOPPED
        return
    then = _next_state(state, worker, against_it=against_it)
    state.log(
        "error" if not life.ordered else "info",
        "worker gone",
        worker=worker.name,
        pid=worker.pid,
        generation=worker.generation,
        why=reason,
        then=then,
    )


def _why_not_booted(worker: Worker, report: BootFailed) -> str:
    if report.code != "out_of_memory":
        return f"{report.message} [{report.code}]"
    worker.missing_bytes = max(report.wanted_bytes - report.free_bytes, 1)
    return (
        f"no memory on the device: {worker.missing_bytes} bytes missing, {report.wanted_bytes} needed, "
        f"{report.free_bytes} free ({report.message})"
    )


def _next_state(state: State, worker: Worker, *, against_it: bool) -> str:
    """Set state and next start after an end; in words."""
    life, policy = worker.life, state.settings.restarts
    worker.state = WorkerState.DEAD
    delay_s: float | None = 0.0
    if life.ordered:
        worker.deaths_in_row = worker.refusals = 0
    elif worker.missing_bytes:
        # No fault of the worker's: whoever filled its device may leave, so it is tried for ever.
        worker.state = WorkerState.NO_MEMORY
        worker.refusals += 1
        state.count("starts_without_memory")
        delay_s = policy.backoff_s(worker.refusals)
    else:
        worker.deaths += 1
        worker.refusals = 0
        state.count("worker_deaths")
        if against_it:
            lived_s = state.now_s - worker.born_s
            worker.deaths_in_row = policy.deaths_in_row(worker.deaths_in_row, lived_s)
            delay_s = policy.delay_s(worker.deaths_in_row)
    if delay_s is None:
        worker.state = WorkerState.FAILED
        return "given up"
    worker.next_start_s = state.now_s + delay_s
    state.wake_by(worker.next_start_s)
    return f"started again in {delay_s:g} s"


# --- orders of admins -------------------------------------------------------------------------------------------------


def order(state: State, client: int, request: RestartWorker | ResetWorker) -> None:
    """Restart or reset a worker.

    Raises:
        Refusal: ``bad_value``, ``stopping``, ``worker_unavailable`` (it is stuck), ``arena_in_use`` or
            ``journal_unwritable``.
    """
    worker = state.workers.get(request.worker)
    if worker is None:
        known = ", ".join(state.workers)
        raise Refusal("bad_value", f"there is no worker {request.worker[:80]!r}; there are {known}")
    if state.stopping:
        raise Refusal("stopping", "the daemon is stopping")
    if worker.state is WorkerState.STUCK:
        text = f"worker {worker.name} is stuck: {worker.detail}; the next one starts once its end is proven"
        raise Refusal("worker_unavailable", text)
    images = _images_of(state, worker) if isinstance(request, ResetWorker) else []
    if isinstance(request, ResetWorker) and not request.force and (images or worker.arena.used_granules):
        used_mib = worker.arena.used_granules * GRANULE_BYTES / (1 << 20)
        raise Refusal(
            "arena_in_use",
            f"{len(images)} {'image' if len(images) == 1 else 'images'} ({used_mib:.1f} MiB in all) in the arena of "
            f"{worker.name}: a reset drops what lies there",
        )
    if isinstance(request, RestartWorker) or not images:
        _carry_out(state, worker, client, request, 0)
        return
    journaling.check_writable(state)
    published = [image for image in images if not image.transit]

    def written(state: State) -> None:
        for image in images:
            if image.image_id in state.catalog.transits:  # it may have gone while the record was written
                _drop_transit(state, image)
        _carry_out(state, worker, client, request, len(images))

    def not_written(state: State, error: str) -> None:
        refusal = journaling.unwritable(error)
        start_id = state.settings.start_id
        state.reply(client, Failed(request.seq, refusal.code, refusal.message, start_id=start_id))

    journaling.drop(state, published, written, not_written)


def _carry_out(
    state: State, worker: Worker, client: int, request: RestartWorker | ResetWorker, images_dropped: int
) -> None:
    was = worker.state
    if isinstance(request, ResetWorker):
        worker.resetting = True
        state.resets.add(worker.name)
        _end_readers(state, worker)
    _end_now(state, worker)
    generation = worker.generation + (worker.state not in ALIVE)
    state.log("info", "worker ordered", worker=worker.name, what=type(request).__name__, was=was.value)
    state.reply(client, WorkerOrdered(request.seq, worker.name, was.value, generation, images_dropped))


def _end_now(state: State, worker: Worker) -> None:
    """See to it that the next process starts as soon as it may, whatever the deaths so far."""
    worker.deaths_in_row = worker.refusals = 0
    worker.life.ordered = True
    if worker.state in ALIVE:
        arenas.kill(state, worker, "worker_died", "an admin ordered it")
    elif worker.state in GONE:
        worker.state = WorkerState.DEAD
        worker.next_start_s = state.now_s
        if not worker.resetting:
            _start(state, worker)


def _images_of(state: State, worker: Worker) -> list[Image]:
    """Images, transit images too, with a chunk in the worker's arena."""
    every = (*state.catalog.images.values(), *state.catalog.transits.values())
    return [image for image in every if worker.name in image.scope.workers]


def _drop_transit(state: State, image: Image) -> None:
    for engine in state.engines.values():
        engine.transits = {slot: kept for slot, kept in engine.transits.items() if kept is not image}
    state.catalog.drop_transit(image)


def _end_readers(state: State, worker: Worker) -> None:
    """End what waits for, or goes on to need, bytes of an arena that will be no more. What runs ends by itself, and
    publishes nothing there, or the arena would not become empty.
    """
    for op in state.ops.values():
        if op.staged is not None and worker.name in op.scope.workers and op.lost is None:
            op.lost = ("worker_died", f"the arena of worker {worker.name} is reset")
    for op in list(state.waiting.values()):
        if op.image is not None and worker.name in op.image.scope.workers and op.state is OpState.WAITING:
            ends.fail(state, op, "unknown_image", f"its image was dropped by a reset of worker {worker.name}")
    for engine in state.engines.values():
        for get in [get for get in engine.gets.values() if worker.name in get.image.scope.workers]:
            end_get(state, engine, get)
        if worker.name in engine.scope.workers:
            for put in list(engine.puts.values()):
                end_put(state, engine, put)


def finish_resets(state: State) -> None:
    """Empty the arenas that are to be, as soon as their workers are gone and nothing lies in them; then start anew."""
    for name in sorted(state.resets):
        worker = state.workers[name]
        if worker.state in GONE and worker.arena.used_granules == 0:
            arenas.make_empty(state, worker)
            worker.resetting = False
            state.resets.discard(name)
            state.log("info", "arena empty", worker=name)
            if worker.state in RETRIED and not state.stopping:
                _start(state, worker)
