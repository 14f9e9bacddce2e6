"""Operations that wait: for a worker, a pool, a shuttle or space."""

from ipc.messages import Progress
from shm.extent import granules_for
from stratad.core import arenas, blame, ends, hints, jobs, journaling, leases, room
from stratad.core.effects import ReplyTo
from stratad.core.failures import Refusal
from stratad.core.images import Draft, needed_granules
from stratad.core.intake import raise_fences
from stratad.core.ops import Operation, OpKind, OpState, StageRun, StageState
from stratad.core.state import UNAVAILABLE, Engine, PoolState, State

# Of all operations in flight. The rows of a new one are compared with theirs, and each takes some hundred bytes.
RUNS_IN_FLIGHT_LIMIT = 2_097_152


def submit(state: State, op: Operation) -> None:
    """Take an operation in and start it if nothing stands in its way.

    Raises:
        Refusal: it cannot be; nothing was changed.
    """
    if state.stopping:
        raise Refusal("stopping", "the daemon is stopping")
    if len(state.ops) >= state.settings.max_ops:
        raise Refusal("too_many", f"{len(state.ops)} operations are in flight, the limit is {state.settings.max_ops}")
    engine = state.engines[op.engine_id]
    _refuse_dead(state, op, engine)
    _refuse_unreportable(state, op)
    runs = op.run_count
    if state.runs_in_flight + runs > RUNS_IN_FLIGHT_LIMIT:
        raise Refusal(
            "too_many",
            f"operations in flight have {state.runs_in_flight} runs of rows, this one has {runs}: the limit is "
            f"{RUNS_IN_FLIGHT_LIMIT}",
        )
    _enter(state, op, engine, runs)
    client = state.clients[op.client]
    client.seqs[op.seq] = op.op_id
    if op.image is not None:
        op.chunks = state.catalog.read(op.image, op.chunks or None)
        if op.kind is OpKind.TAKE:
            op.image.taken += 1
    before = len(state.out)
    _start_if_possible(state, op, engine)
    if op.state is OpState.WAITING:
        # Ahead of what it may have asked the journal for: the answer to that may end it already.
        state.out.insert(before, ReplyTo(op.client, Progress(op.seq, "accepted")))


def submit_own(state: State, op: Operation) -> None:
    """Take in an operation that nobody asked for; no limit of what clients may ask for concerns it.

    Raises:
        Refusal: it cannot be; nothing was changed.
    """
    engine = state.engines[op.engine_id]
    _refuse_dead(state, op, engine)
    _enter(state, op, engine, op.run_count)
    _start_if_possible(state, op, engine)


def _enter(state: State, op: Operation, engine: Engine, runs: int) -> None:
    raise_fences(state, op)
    op.runs_held = runs
    state.runs_in_flight += runs
    state.ops[op.op_id] = state.waiting[op.op_id] = op
    state.wake_by(op.deadline_s)
    engine.ops += 1


def _refuse_dead(state: State, op: Operation, engine: Engine) -> None:
    """Refuse what no waiting can mend: what is quarantined, a worker that was given up or is stuck, a pool that could
    not be opened again.
    """
    blame.refuse_quarantined(state, op)
    for run in op.stages:
        worker = state.workers[run.worker]
        if worker.state in UNAVAILABLE:
            raise Refusal("worker_unavailable", worker.why_unavailable, stage=run.stage)
        stage = engine.stages[run.stage]
        if stage.state is PoolState.FAILED:
            raise Refusal(stage.code, f"the pool could not be opened again: {stage.message}", stage=run.stage)


def _refuse_unreportable(state: State, op: Operation) -> None:
    """Refuse to write more rows than a failure could name: who is told of none believes that none was touched."""
    if not op.writes_rows:
        return
    written = [rows for run in op.stages if (rows := op.written(run)) is not None]
    named_bytes = sum(len(packed) for rows in written for packed in rows.packed)
    limit = state.settings.max_message_bytes * 3 // 4  # the rest is for what a failure says besides
    if named_bytes > limit:
        raise Refusal(
            "too_large",
            f"the rows to be written are {named_bytes} bytes of runs over all stages, a failure could name {limit}: "
            "name them in fewer runs, or raise max_message_bytes",
        )


def try_start(state: State, op: Operation) -> None:
    """Start a waiting operation if it can be; end it if it never will."""
    engine = state.engines[op.engine_id]
    try:
        _refuse_dead(state, op, engine)
    except Refusal as refusal:
        ends.fail(state, op, refusal.code, refusal.message, stage=refusal.stage)
        return
    _start_if_possible(state, op, engine)


def _start_if_possible(state: State, op: Operation, engine: Engine) -> None:
    try:
        op.waits_for = _obstacle(state, op, engine)
    except Refusal as refusal:
        ends.fail(state, op, refusal.code, refusal.message, stage=refusal.stage)
        return
    if not op.waits_for:
        jobs.start(state, op)


def _obstacle(state: State, op: Operation, engine: Engine) -> str:
    """What the operation still waits for, or "" when all is there (then a capture's extents are reserved).

    Raises:
        Refusal: it will never be there.
    """
    for run in op.stages:
        worker = state.workers[run.worker]
        if not worker.can_serve:
            lacks = f" ({worker.missing_bytes} bytes of device memory missing)" if worker.missing_bytes else ""
            return f"worker {worker.name}{lacks}"
        if blame.stands_back(state, op, worker):
            return f"its turn at {worker.name}, where a suspect of a death has, or is to have, the worker to itself"
        if engine.stages[run.stage].state is not PoolState.OPEN:
            return f"pool of stage {run.stage}"
    if op.captures:
        return _space(state, op)
    if op.image is None:
        return ""
    if not op.shuttles:  # it may be asked for at every event
        op.count_shuttles()
    for name, needed in op.shuttles.items():
        worker = state.workers[name]
        if lost := needed - worker.sizes.keys():
            raise Refusal("damaged", f"shuttle {min(lost)} of {name} is lost, and what lay in it")
        if not needed <= worker.mapped:
            arenas.tend(state, worker, needed)
            return f"shuttles of {worker.name}"
    return ""


def _space(state: State, op: Operation) -> str:
    """Reserve extents. Arenas that may grow do so before anything is evicted.

    Raises:
        Refusal: ``no_space``, ``too_large``.
    """
    draft = Draft(
        op.scope,
        op.conversation,
        op.tokens,
        op.token_count,
        op.positions,
        op.points,
        tuple(run.spans for run in op.stages),
        transit=op.kind is OpKind.SLOT_TO,
        partial=op.kind is OpKind.PUT_PART,
    )
    if op.kind is not OpKind.SLOT_TO:  # a transit image ends with the daemon
        journaling.check_writable(state)
    for name in op.scope.workers:
        if not state.workers[name].recorded:
            journaling.check_writable(state)
            journaling.record_worker(state, state.workers[name])
            return f"the journal to name the process of {name}"
    before, found = op.hints, hints.find(state, op, draft)
    if not op.need or found is not before:  # it may be asked for at every event
        op.need = needed_granules(draft, found)
    try:
        obstacle = _make_room(state, op, draft, op.need)
    except Refusal as refusal:
        if refusal.code != "no_space" or found is None or found.image is state.catalog.previous(draft):
            raise
        op.forget_hints()  # their image may be what stands in the way
        op.looked = True
        return _space(state, op)
    if obstacle:
        return obstacle
    op.staged = state.catalog.stage(draft, found)
    op.hints = None  # their chunks are held; the image that gave them may go
    for name in op.scope.workers:
        arenas.tend(state, state.workers[name])
    return ""


def _make_room(state: State, op: Operation, draft: Draft, need: dict[str, int]) -> str:
    """What extents that an operation has to reserve still wait for, or "".

    Raises:
        Refusal: ``no_space``, ``too_large``.
    """
    staged = op.staged is not None
    for name in room.shortfall(state.catalog, need):
        worker = state.workers[name]
        if worker.can_grow(state.settings, state.now_s):
            arenas.tend(state, worker, set())
            return f"a shuttle of {name}"
    for name in need:
        worker = state.workers[name]
        if len(worker.mapped) < len(worker.sizes):
            arenas.tend(state, worker)
            return f"shuttles of {name}"
    try:
        victims = leases.with_room(
            state, op.client, lambda: room.victims(state.catalog, draft, need, op.hints, staged=staged)
        )
    except Refusal as refusal:
        # One that waits for room itself may wait for this one.
        others = (o for o in state.ops.values() if o.state is OpState.COPYING and o.op_id not in state.short)
        if refusal.code == "no_space" and any(others):
            return "space held by operations in flight"
        for name in op.scope.workers:
            failed = state.workers[name].grow_failed
            if failed:
                text = f"{refusal.message}; the arena of {name} could not grow: {failed}"
                raise Refusal("no_space", text) from refusal
        raise
    if victims:
        journaling.check_writable(state)
        if state.appends:  # what is being recorded may make room, too
            return "the journal"
        journaling.evict(state, victims, lambda _: None)
        return "room: images are evicted"
    return ""


def _fill(state: State, op: Operation) -> None:
    """Reserve extents for what the stages of an operation have missed, as far as there is room, and send it."""
    for run in op.stages:
        if run.state is not StageState.MISSED:
            continue
        try:
            op.waits_for = _obstacle_of_missed(state, op, run)
        except Refusal as refusal:
            jobs.fail_missed(state, op, run, refusal.code, refusal.message)
            continue
        if not op.waits_for:
            assert op.staged is not None
            state.catalog.fill(op.staged, run.stage, run.missed)
            arenas.tend(state, state.workers[run.worker])
            jobs.send_missed(state, op, run)


def _obstacle_of_missed(state: State, op: Operation, run: StageRun) -> str:
    """What stands between a stage and the chunks that it has missed, or "".

    Raises:
        Refusal: it will never be sent.
    """
    assert op.staged is not None
    worker = state.workers[run.worker]
    failed = any(one.state is StageState.FAILED for one in op.stages)
    if state.stopping:
        raise Refusal("stopping", "the daemon is stopping")
    if op.cancelled or failed:
        raise Refusal("cancelled", "the operation was cancelled" if op.cancelled else "another stage failed")
    if op.lost is not None:
        raise Refusal(*op.lost)
    if why_not := jobs.why_not_sent(run, worker):
        raise Refusal("worker_died", f"worker {worker.name} {why_not}")
    if blame.stands_back(state, op, worker):
        return f"its turn at {worker.name}, where a suspect of a death has, or is to have, the worker to itself"
    need = {run.worker: sum(granules_for(run.spans[number].length_bytes) for number in run.missed)}
    return _make_room(state, op, op.staged.draft, need)


def pump(state: State) -> None:
    """Look at every waiting operation again, oldest first. Called after each event that may have freed something."""
    state.let_go = False
    for op in list(state.short.values()):
        _fill(state, op)
    for op in list(state.waiting.values()):
        if op.state is OpState.WAITING:
            try_start(state, op)


def expire(state: State) -> None:
    """End waiting operations whose caller has stopped waiting."""
    for op in list(state.short.values()):
        if op.deadline_s <= state.now_s:
            for run in op.stages:
                if run.state is StageState.MISSED:
                    waited = f"waited for {op.waits_for or 'its turn'}"
                    jobs.fail_missed(state, op, run, "deadline", waited)
    for op in list(state.waiting.values()):
        if op.deadline_s <= state.now_s:
            waited_s = state.now_s - op.created_s
            ends.fail(state, op, "deadline", f"waited {waited_s:.3f} s for {op.waits_for or 'its turn'}")
