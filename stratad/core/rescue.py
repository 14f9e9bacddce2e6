"""Rescue: what a dead engine had marked clean becomes images, before its memory is unmapped.

::

    client gone --> waits for the proof that the process is gone --> one slot after the other --> over
                        |        PROOF_S                               |  rescue.max_s
                        '-- engine says hello, worker dies, stop ------'------------------------> over

The memory of a dead process stays valid as long as a worker maps it. Nothing is read before the process is proven gone,
and its events are never asked: they may never be reached.
"""

from collections.abc import Iterable

from stratad.core import ends, jobs, prefix_cut, queue
from stratad.core.clean_marks import CleanMark, Rescue
from stratad.core.effects import AwaitEnd, StopAwaiting
from stratad.core.failures import Refusal
from stratad.core.intake import spans_by_stage
from stratad.core.ops import Operation, OpKind, OpState, StageRun
from stratad.core.state import ClientRecord, Engine, PoolState, State, Worker

# A process that has closed its lifeline and lives on is not rescued; one that dies may need a while to give back what
# it has (seen: 0.3 s).
PROOF_S = 10.0


def client_gone(state: State, client: ClientRecord, engine: Engine) -> None:
    """A client has gone without goodbye: its engine's memory stays mapped if there is something to be rescued. To be
    called before the engine is closed.
    """
    declares = any(op.kind is OpKind.MARK and op.engine_id == engine.engine_id for op in state.ops.values())
    wanted = (
        not (client.polite or engine.closing or state.stopping)
        and state.settings.rescue_max_s > 0
        and (engine.clean.by_slot or declares)
        and all(stage.state is PoolState.OPEN for stage in engine.stages)
        and client.pid > 0
        and client.start_ticks > 0
    )
    if not wanted:
        return
    if not _is_awaited(state, client.client):
        state.out.append(AwaitEnd(client.client, client.pid, client.start_ticks))
    engine.rescue = Rescue(client.pid, state.now_s + PROOF_S)
    state.wake_by(engine.rescue.end_s)


def process_ended(state: State, client: int, *, proven: bool) -> None:
    """The process of a client that has gone is proven gone; or (not `proven`) its end cannot be watched."""
    for engine in _rescued(state):
        rescue = engine.rescue
        if engine.client != client or rescue is None or rescue.proven or rescue.over:
            continue
        if not proven:
            cut_off(state, engine, "the end of its process cannot be watched")
            continue
        rescue.proven = True
        rescue.end_s = state.now_s + state.settings.rescue_max_s
        rescue.slots = len(engine.clean.by_slot)
        state.wake_by(rescue.end_s)
        state.count("rescues")
        state.log(
            "info",
            "rescue begins",
            engine=engine.engine_id,
            namespace=engine.namespace,
            pid=rescue.pid,
            slots=rescue.slots,
        )


def holds(state: State, engine: Engine) -> bool:
    """Whether the memory of a closed engine must stay mapped. Called when it has no operation in flight: begins with
    the next slot, and once there is none left the rescue is over.
    """
    rescue = engine.rescue
    if rescue is None:
        return False
    if not (rescue.proven or rescue.over):
        return True
    if rescue.waiting is None:
        rescue.waiting = engine.clean.latest_first()
        rescue.slots = len(rescue.waiting)
    while rescue.waiting and not rescue.over:
        _begin(state, engine, rescue, rescue.waiting.pop(0))
        if engine.ops:
            return True
    engine.rescue = None
    engine.clean.by_slot.clear()
    if rescue.proven:
        state.log("info", "rescue over", engine=engine.engine_id, slots=rescue.slots, images=rescue.images)
    return False


def _begin(state: State, engine: Engine, rescue: Rescue, mark: CleanMark) -> None:
    """Have one slot captured, unless its conversation needs no rescue."""
    if prefix_cut.is_covered(state.catalog, engine.scope, mark.conversation, mark.tokens):
        return
    spans = spans_by_stage(engine, mark.token_count, mark.positions)
    op = Operation(
        state.number("op"),
        OpKind.RESCUE,
        engine.client,
        0,
        engine.engine_id,
        engine.scope,
        mark.conversation,
        mark.slot,
        mark.token_count,
        "host",
        state.now_s,
        rescue.end_s,
        tuple(
            StageRun(number, stage.worker, mark.rows[number], spans[number])
            for number, stage in enumerate(engine.stages)
        ),
        tokens=mark.tokens,
        positions=mark.positions,
        points=mark.points,
        image_tokens=mark.token_count,
        mark=mark,
    )
    try:
        queue.submit_own(state, op)
    except Refusal as refusal:
        state.log("warning", "slot not rescued", engine=engine.engine_id, slot=mark.slot, why=refusal.message)


def cut_off(state: State, engine: Engine, why: str, *, finish: bool = False) -> None:
    """End a rescue early: what is published stays, what is being copied is stopped (with `finish`: ends), and the
    memory can be unmapped once that has ended. The caller looks at closed engines then.
    """
    rescue = engine.rescue
    if rescue is None or rescue.over:
        return
    rescue.over = True
    under_way = [op for op in state.ops.values() if op.engine_id == engine.engine_id]
    if not (rescue.proven or _is_awaited(state, engine.client)):
        state.out.append(StopAwaiting(engine.client))
    if under_way or rescue.waiting or rescue.waiting is None:
        state.count("rescues_cut_off")
        state.log("warning", "rescue cut off", engine=engine.engine_id, images=rescue.images, why=why)
    for op in under_way:
        if op.kind not in (OpKind.RESCUE, OpKind.MARK):
            continue
        if op.state is OpState.WAITING:
            ends.fail(state, op, "cancelled", f"the rescue was cut off: {why}")
        elif not finish:
            jobs.cancel(state, op)


def hello(state: State, namespace: str, devices: Iterable[str]) -> int:
    """An engine comes: end the rescues of its namespace and on its devices; how many there were."""
    ended = 0
    for engine in dead_engines(state, namespace, devices):
        if engine.rescue is not None and not engine.rescue.over:
            cut_off(state, engine, "an engine says hello")
            ended += 1
    return ended


def dead_engines(state: State, namespace: str, devices: Iterable[str]) -> list[Engine]:
    """Engines of clients that have gone whose memory is still mapped: those of a namespace, and those on devices."""
    wanted = set(devices)
    return [
        engine
        for engine in state.engines.values()
        if engine.client not in state.clients
        and (engine.namespace == namespace or any(stage.stage.device in wanted for stage in engine.stages))
    ]


def worker_lost(state: State, worker: Worker) -> None:
    """A worker's process has ended and its mappings with it: engines with a stage there are beyond rescue."""
    for engine in _rescued(state):
        if any(stage.worker == worker.name for stage in engine.stages):
            cut_off(state, engine, f"worker {worker.name} died")


def expire(state: State) -> None:
    """End rescues whose time is over."""
    for engine in _rescued(state):
        rescue = engine.rescue
        if rescue is not None and not rescue.over and rescue.end_s <= state.now_s:
            took = f"after {state.settings.rescue_max_s} s (rescue.max_s)"
            cut_off(state, engine, took if rescue.proven else f"process {rescue.pid} still lives after {PROOF_S} s")


def stood_still(state: State, lost_s: float) -> None:
    """Nobody listened for so long: the proof that a process is gone may have been there all the time."""
    for engine in _rescued(state):
        if engine.rescue is not None and not engine.rescue.proven:
            engine.rescue.end_s += lost_s


def due_s(state: State) -> list[float]:
    """When the next one is over."""
    return [e.rescue.end_s for e in _rescued(state) if e.rescue is not None and not e.rescue.over]


def stop(state: State) -> None:
    """The daemon stops: what is being copied ends, nothing more is begun."""
    for engine in _rescued(state):
        cut_off(state, engine, "the daemon is stopping", finish=True)


def _is_awaited(state: State, client: int) -> bool:
    """Whether any engine of a client waits for the proof that its process is gone."""
    waiting = (e.rescue for e in _rescued(state) if e.client == client)
    return any(rescue is not None and not (rescue.proven or rescue.over) for rescue in waiting)


def _rescued(state: State) -> list[Engine]:
    return [state.engines[number] for number in sorted(state.closing) if state.engines[number].rescue is not None]
