"""Engines come and go: their stages' pools are opened at the workers and closed again."""

import math

import msgspec

from ipc.messages import (
    Announce,
    ClosePool,
    CudaIpcPool,
    Done,
    Failed,
    MemfdPool,
    OpenPool,
    PoolFailed,
    Register,
    Registered,
    Stage,
    WorkersChanged,
)
from shm.layout import LayoutError, check_layout
from stratad.core import ends, jobs, rescue
from stratad.core.effects import CloseDescriptor, ForwardDescriptor, SendTo
from stratad.core.exchange import check_exchange
from stratad.core.failures import Refusal
from stratad.core.fingerprints import check_fingerprint, complete_fingerprint, fingerprint_id
from stratad.core.images import Scope
from stratad.core.intake import check_name, ends_s
from stratad.core.leases import end_get, end_put, end_take
from stratad.core.ops import OpKind, OpState
from stratad.core.state import (
    UNAVAILABLE,
    Announced,
    ClientRecord,
    Engine,
    EngineStage,
    PoolState,
    State,
    Worker,
    WorkerState,
)

# As many descriptors as a lifeline keeps.
STAGE_LIMIT = 64
PLANE_LIMIT = 4096
GROUP_LIMIT = 64
# Each holds pools, marks and a fingerprint. An engine of which a registration waits, or pools are still closed, counts.
ENGINE_LIMIT = 256
# The device memory of a process that is gone can be used by nobody until its worker has unmapped it.
GONE_S = 1.0
KNOWN_FINGERPRINTS = 64
KNOWN_NAMESPACES = 1024


def register(state: State, client: ClientRecord, request: Register) -> None:
    """Begin a registration; its reply follows when every stage's pool is open.

    Raises:
        Refusal: names the stage, what was wrong and what was expected.
    """
    if state.stopping:
        raise Refusal("stopping", "the daemon is stopping")
    if len(client.engines) >= ENGINE_LIMIT:
        raise Refusal("too_many", f"a client has at most {ENGINE_LIMIT} engines: unregister one first")
    check_name("namespace", request.namespace)
    check_name("engine", request.engine)
    owner = state.owners.get(request.namespace, client.uid)
    if owner != client.uid and _in_use(state, request.namespace):
        raise Refusal("not_permitted", f"namespace {request.namespace!r} belongs to uid {owner}, you are {client.uid}")
    check_fingerprint(request.fingerprint)
    if not 0 < len(request.stages) <= STAGE_LIMIT:
        raise Refusal("bad_value", f"an engine has 1 to {STAGE_LIMIT} stages, got {len(request.stages)}")
    if [stage.index for stage in request.stages] != list(range(len(request.stages))):
        raise Refusal("bad_value", f"stages must be numbered 0..{len(request.stages) - 1} in order")
    workers = [_worker_for(state, stage) for stage in request.stages]
    if request.exchange:
        check_exchange(request.stages)
    else:
        rescue.hello(state, request.namespace, [stage.device for stage in request.stages])
        remove_idle(state)
    layouts = [stage.layout for stage in request.stages]
    fields = complete_fingerprint(request.fingerprint, layouts, exchange=request.exchange)
    fingerprint = fingerprint_id(fields)
    stages = tuple(
        EngineStage(stage, worker.name, state.number("pool"))
        for stage, worker in zip(request.stages, workers, strict=True)
    )
    engine = Engine(
        state.number("engine"),
        client.client,
        request.namespace,
        request.engine,
        Scope(request.namespace, fingerprint, tuple(worker.name for worker in workers)),
        fields,
        stages,
        request.seq,
        ends_s(state, request.deadline_s),
        exchange=request.exchange,
    )
    _forget_fingerprints(state)
    _forget_owners(state, request.namespace)
    state.fingerprint_fields[fingerprint] = fields
    state.engines[engine.engine_id] = engine
    state.wake_by(engine.register_deadline_s)
    client.engines.add(engine.engine_id)
    for stage in stages:
        state.pools[stage.pool] = stage
        _open(state, engine, stage)


def _forget_fingerprints(state: State) -> None:
    """Drop the fields of fingerprints that no engine and no image has any more."""
    if len(state.fingerprint_fields) < KNOWN_FINGERPRINTS:
        return
    used = {engine.scope.fingerprint for engine in state.engines.values()}
    used |= {image.scope.fingerprint for image in state.catalog.images.values()}
    state.fingerprint_fields = {k: v for k, v in state.fingerprint_fields.items() if k in used}


def _in_use(state: State, namespace: str) -> bool:
    """Whether a namespace has an engine or an image: as long as it has, it belongs to its owner."""
    return any(engine.namespace == namespace for engine in state.engines.values()) or any(
        image.scope.namespace == namespace for image in state.catalog.images.values()
    )


def _forget_owners(state: State, namespace: str) -> None:
    """Give up the owner of `namespace` if it is not in use, and of all such once many are known."""
    if namespace in state.owners and not _in_use(state, namespace):
        del state.owners[namespace]
    if len(state.owners) < KNOWN_NAMESPACES:
        return
    used = {engine.namespace for engine in state.engines.values()}
    used |= {image.scope.namespace for image in state.catalog.images.values()}
    state.owners = {name: uid for name, uid in state.owners.items() if name in used}


def forget_descriptors(state: State, client: int, stages: tuple[Stage, ...]) -> None:
    """The memfds of a registration that came to nothing are needed no more."""
    for stage in stages:
        if isinstance(stage.pool, MemfdPool):
            state.out.append(CloseDescriptor(client, stage.pool.descriptor))


def _worker_for(state: State, stage: Stage) -> Worker:
    """The worker of a stage's device.

    Raises:
        Refusal: ``foreign_device``, ``bad_layout``, ``worker_unavailable`` or ``bad_value``.
    """
    worker = next((w for w in state.workers.values() if w.device == stage.device), None)
    if worker is None:
        known = ", ".join(sorted(w.device for w in state.workers.values()))
        raise Refusal(
            "foreign_device", f"no worker serves device {stage.device[:64]!r}; served are {known}", stage=stage.index
        )
    if worker.state in UNAVAILABLE:
        raise Refusal("worker_unavailable", worker.why_unavailable, stage=stage.index)
    if isinstance(stage.pool, CudaIpcPool) and stage.device.startswith("cpu:"):
        raise Refusal("bad_value", f"device {stage.device} cannot hold a pool of this kind", stage=stage.index)
    if stage.layout.chunk_tokens != state.settings.chunk_tokens:
        raise Refusal(
            "bad_layout",
            f"chunk_tokens must be the daemon's {state.settings.chunk_tokens}, got {stage.layout.chunk_tokens}",
            stage=stage.index,
        )
    planes, groups = len(stage.layout.planes), len(stage.layout.all_groups)
    if planes > PLANE_LIMIT or groups > GROUP_LIMIT:
        raise Refusal(
            "bad_layout",
            f"a stage has at most {PLANE_LIMIT} planes in {GROUP_LIMIT} groups, got {planes} in {groups}",
            stage=stage.index,
        )
    try:
        check_layout(stage.layout, stage.pool.pool_bytes)
    except LayoutError as exc:
        raise Refusal("bad_layout", str(exc), stage=stage.index) from exc
    return worker


def _open(state: State, engine: Engine, stage: EngineStage) -> None:
    """Ask the worker to open a pool, as soon as it is ready."""
    worker = state.workers[stage.worker]
    if not worker.can_serve:
        stage.state = PoolState.WAITING
        return
    stage.state = PoolState.OPENING
    description = stage.stage
    client = state.clients[engine.client]
    if isinstance(description.pool, MemfdPool):
        state.out.append(ForwardDescriptor(engine.client, description.pool.descriptor, worker.name, stage.pool))
        description = msgspec.structs.replace(description, pool=MemfdPool(stage.pool, description.pool.pool_bytes))
    if engine.registered:  # opened again: the engine has written since it read the probe
        description = msgspec.structs.replace(description, probe_offsets=b"", probe_bytes=b"")
    _order(state, worker)
    state.out.append(
        SendTo(worker.name, OpenPool(stage.pool, description, client.pid, client.start_ticks, engine.engine_id))
    )


def _order(state: State, worker: Worker) -> None:
    """A worker is given an order for a pool: it does one after the other, and must end the next one in time."""
    worker.life.pool_orders += 1
    if worker.life.pool_orders == 1:
        worker.life.pools_by_s = state.now_s + state.settings.order_s
        state.wake_by(worker.life.pools_by_s)


def order_answered(state: State, worker: Worker) -> None:
    """A worker has ended an order for a pool, well or not."""
    life = worker.life
    life.pool_orders = max(life.pool_orders - 1, 0)
    life.pools_by_s = state.now_s + state.settings.order_s if life.pool_orders else math.inf
    state.wake_by(life.pools_by_s)


def worker_ready(state: State, worker: Worker) -> None:
    """Open every pool of a worker that has just become ready, and tell the engines whom they deal with now."""
    for engine in state.engines.values():
        if engine.closing:
            continue
        mine = [stage for stage in engine.stages if stage.worker == worker.name]
        if mine and engine.registered:
            state.reply(engine.client, WorkersChanged(-1, engine.engine_id, state.worker_processes(engine)))
        for stage in mine:
            _open(state, engine, stage)


def worker_lost(state: State, worker: Worker) -> None:
    """The worker's process ended and its mappings with it."""
    rescue.worker_lost(state, worker)
    for engine in list(state.engines.values()):
        for stage in engine.stages:
            if stage.worker == worker.name and stage.state in (PoolState.OPENING, PoolState.OPEN):
                stage.state = PoolState.WAITING
        engine.unmapping -= {stage.pool for stage in engine.stages if stage.worker == worker.name}
        if engine.closing:
            _remove_if_idle(state, engine)


def worker_given_up(state: State, worker: Worker) -> None:
    """Registrations that wait for a worker that will not come soon end now, and so do engines whose pools it was to
    unmap.
    """
    for engine in list(state.engines.values()):
        engine.unmapping -= {stage.pool for stage in engine.stages if stage.worker == worker.name}
        if engine.registered or engine.closing:
            continue
        for number, stage in enumerate(engine.stages):
            if stage.worker == worker.name:
                _refuse(state, engine, "worker_unavailable", worker.why_unavailable, number)
                break


def pool_opened(state: State, pool: int) -> None:
    """A pool is mapped at its worker; the last one of an engine completes its registration."""
    found = _engine_of_pool(state, pool)
    if found is None:
        return
    engine, stage = found
    if engine.closing:
        return
    stage.state = PoolState.OPEN
    if engine.registered or any(s.state is not PoolState.OPEN for s in engine.stages):
        return
    if state.owners.setdefault(engine.namespace, state.clients[engine.client].uid) != state.clients[engine.client].uid:
        _refuse(state, engine, "not_permitted", f"namespace {engine.namespace!r} belongs to another user", -1)
        return
    engine.registered = True
    state.count("registrations")
    state.log(
        "info", "engine registered", engine=engine.engine_id, namespace=engine.namespace, stages=len(engine.stages)
    )
    state.reply(engine.client, Registered(engine.register_seq, engine.engine_id, state.worker_processes(engine)))


def pool_failed(state: State, report: PoolFailed) -> None:
    """A pool could not be used: a registration ends, a registered engine's operations on that stage will."""
    found = _engine_of_pool(state, report.pool)
    if found is None:
        return
    engine, stage = found
    if engine.closing:
        engine.unmapping.discard(report.pool)
        return
    stage.state = PoolState.FAILED
    stage.code, stage.message = report.code, report.message
    state.log("warning", "pool failed", engine=engine.engine_id, stage=stage.stage.index, code=report.code)
    if not engine.registered:
        _refuse(state, engine, report.code, report.message, stage.stage.index)


def expire(state: State) -> None:
    """End registrations whose caller has stopped waiting."""
    for engine in list(state.engines.values()):
        if not engine.registered and not engine.closing and engine.register_deadline_s <= state.now_s:
            waiting = next(s for s in engine.stages if s.state is not PoolState.OPEN)
            what = (
                f"stage {waiting.stage.index}: worker {waiting.worker} is {state.workers[waiting.worker].state.value}"
            )
            _refuse(state, engine, "deadline", f"the pools were not open in time ({what})", waiting.stage.index)


def stop(state: State) -> None:
    """The daemon stops: what waits to be registered is told."""
    for engine in list(state.engines.values()):
        if not engine.registered and not engine.closing:
            _refuse(state, engine, "stopping", "the daemon is stopping", -1)


def _refuse(state: State, engine: Engine, code: str, message: str, stage: int) -> None:
    state.reply(engine.client, Failed(engine.register_seq, code, message, stage, (), state.settings.start_id))
    close(state, engine)


def pool_closed(state: State, pool: int) -> None:
    """A worker has unmapped a pool."""
    found = _engine_of_pool(state, pool)
    if found is not None:
        found[0].unmapping.discard(pool)


def close(state: State, engine: Engine, unregister_seq: int | None = None) -> None:
    """End an engine: what waits is ended, restores are stopped between two slices, captures go on (their rows hold what
    was asked for); then its pools are closed, and request `unregister_seq` is answered. Images stay.
    """
    if engine.closing:
        return
    engine.closing = True
    engine.unregister_seq = unregister_seq
    state.closing.add(engine.engine_id)
    for op in list(state.ops.values()):
        if op.engine_id != engine.engine_id:
            continue
        if op.state is OpState.WAITING:
            ends.fail(state, op, "engine_gone", "the engine was closed")
        elif op.kind is not OpKind.CAPTURE and not (op.kind is OpKind.MARK and engine.rescue is not None):
            jobs.cancel(state, op)  # a transit image would end with the engine
    for image_id in tuple(engine.takes):
        end_take(state, engine, image_id)
    for put in list(engine.puts.values()):
        end_put(state, engine, put)
    for get in list(engine.gets.values()):
        end_get(state, engine, get)
    _drop_transits(state, engine)
    _remove_if_idle(state, engine)


def _drop_transits(state: State, engine: Engine) -> None:
    for image in engine.transits.values():
        state.catalog.drop_transit(image)
    engine.transits.clear()


def orphan(state: State, engine: Engine) -> None:
    """End an engine whose process is gone, or can no longer be heard: its memory is kept mapped only as long as that
    takes, and what is being captured out of it has a moment to end.
    """
    engine.stop_copies_s = state.now_s + GONE_S
    state.wake_by(engine.stop_copies_s)
    close(state, engine)


def stop_copies(state: State) -> None:
    """Stop what is still copied for engines that are gone too long."""
    for engine_id in sorted(state.closing):
        engine = state.engines[engine_id]
        if engine.stop_copies_s <= state.now_s:
            engine.stop_copies_s = math.inf
            for op in [op for op in state.ops.values() if op.engine_id == engine_id]:
                if engine.rescue is None or op.kind not in (
                    OpKind.MARK,
                    OpKind.RESCUE,
                ):  # those have a limit of their own
                    jobs.cancel(state, op)


def _remove_if_idle(state: State, engine: Engine) -> None:
    """Once no operation is left, have the pools unmapped; once they are, the engine is no more."""
    if engine.ops or rescue.holds(state, engine):
        return
    _drop_transits(state, engine)
    for stage in engine.stages:
        worker = state.workers[stage.worker]
        if stage.state in (PoolState.OPEN, PoolState.OPENING):
            if worker.can_serve:
                _order(state, worker)
                state.out.append(SendTo(stage.worker, ClosePool(stage.pool)))
            if worker.state is not WorkerState.STUCK:  # which may hold its mappings for ever
                engine.unmapping.add(stage.pool)  # of one that is about to end, too: until that is proven
        stage.state = PoolState.CLOSED
    if engine.unmapping:
        return
    forget_descriptors(state, engine.client, tuple(stage.stage for stage in engine.stages))
    for stage in engine.stages:
        del state.pools[stage.pool]
    del state.engines[engine.engine_id]
    state.closing.discard(engine.engine_id)
    client = state.clients.get(engine.client)
    if client is not None:
        client.engines.discard(engine.engine_id)
    if engine.unregister_seq is not None:
        state.reply(engine.client, Done(engine.unregister_seq))
    state.log("info", "engine closed", engine=engine.engine_id, namespace=engine.namespace)
    for announced in state.announced:
        announced.waiting.discard(engine.engine_id)
    answer_announced(state)


def remove_idle(state: State) -> None:
    """Remove closed engines whose last operation has ended."""
    for engine_id in sorted(state.closing):
        _remove_if_idle(state, state.engines[engine_id])


def announce(state: State, client: ClientRecord, request: Announce) -> None:
    """An engine is about to allocate memory: end rescues in its way; the reply follows when what dead engines left
    there is unmapped.

    Raises:
        Refusal: ``foreign_device`` or ``too_many``.
    """
    if len(state.announced) >= state.settings.max_ops:
        raise Refusal(
            "too_many", f"{len(state.announced)} announcements wait for memory, the limit is as of operations"
        )
    known = {worker.device for worker in state.workers.values()}
    for device in request.devices:
        if device not in known:
            text = f"no worker serves device {device[:64]!r}; served are {', '.join(sorted(known))}"
            raise Refusal("foreign_device", text)
    ended = rescue.hello(state, request.namespace, request.devices)
    waiting = {engine.engine_id for engine in rescue.dead_engines(state, request.namespace, request.devices)}
    deadline_s = ends_s(state, request.deadline_s)
    state.announced.append(Announced(client.client, request.seq, waiting, ended, deadline_s))
    state.wake_by(deadline_s)
    remove_idle(state)
    answer_announced(state)


def answer_announced(state: State) -> None:
    """Answer the `Announce` requests that wait for nothing more, or whose time is over."""
    waiting, state.announced = state.announced, []
    for entry in waiting:
        if not entry.waiting:
            state.reply(entry.client, Done(entry.seq, entry.count))
        elif entry.deadline_s <= state.now_s:
            text = f"the memory of {len(entry.waiting)} dead engines is still mapped"
            state.reply(entry.client, Failed(entry.seq, "deadline", text, start_id=state.settings.start_id))
        else:
            state.announced.append(entry)


def _engine_of_pool(state: State, pool: int) -> tuple[Engine, EngineStage] | None:
    stage = state.pools.get(pool)
    if stage is None:
        return None
    engine = next((e for e in state.engines.values() if stage in e.stages), None)
    return None if engine is None else (engine, stage)
