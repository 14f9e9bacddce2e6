"""The trace: a record of where the time of each operation went, once it has ended, and what is told of it.

Off it costs nothing. On, workers take the times of their copies on the device, and the ring keeps the latest
operations. The steps of a stage, one after the other, add up to the time from the request to the reply::

    queue   from the request until the stage's job is with its worker: what the operation waited for
    way     the messages to the worker and back, and the supervisor's attention
    event   the worker waited for the engine's event
    turn    the worker's lane was busy with other jobs
    lane    digest, gather, link, verify, which may overlap; what they leave of this time is `rest`
    publish the other stages, once this one was done; then binding, the record and the reply
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from ipc.messages import SetTrace, StageOutcome, Trace, TraceCopies, Traced, TracedOp, TracedStage, TraceKind
from stratad.core.effects import SendTo
from stratad.core.failures import Refusal
from stratad.core.ops import Operation, OpKind, OpState, StageRun
from stratad.core.state import ClientRecord, State, Worker
from stratad.core.trace_ring import RING_BYTES, OpTrace, StageTrace

# Percentiles are those of the latest operations: so many are sorted in some milliseconds, in which nobody is served.
SUMMED_OPS: Final = 1000
LIST_LIMIT: Final = 1000
# Room in a frame, by excess: the reply with its percentiles, an operation, a stage; and of a character.
REPLY_BYTES: Final = 8192
OP_FRAME_BYTES: Final = 512
STAGE_FRAME_BYTES: Final = 512
STEPS: Final = (
    "queue",
    "way",
    "event",
    "turn",
    "lane",
    "publish",
)
IN_LANE: Final = (
    "digest",
    "gather",
    "link",
    "verify",
    "rest",
)


def record(state: State, op: Operation) -> None:
    """An operation has ended, and its reply is on its way out: keep where its time went."""
    ring = state.trace
    stages: list[StageTrace] = []
    for run in op.stages:
        noted_s = ring.sent_s.pop(run.job, run.sent_s)
        sent_s = noted_s if run.former is None else run.sent_s
        outcome = run.outcome
        if outcome is None or outcome.message or outcome.rows_undefined:
            outcome = _without_bulk(run)
        asked_bytes = run.job_bytes if run.former is None else run.image_bytes
        stages.append((run.worker, asked_bytes, sent_s, run.done_s, outcome))
    recorded = op.state is OpState.PUBLISHED and op.kind is not OpKind.SLOT_TO
    entry = OpTrace(
        op.op_id,
        op.kind.value,
        op.scope.namespace,
        op.conversation,
        op.engine_id,
        op.token_count,
        op.code,
        op.created_s,
        state.now_s,
        ring.take_append_s() if recorded else 0.0,
        tuple(stages),
    )
    ring.add(entry)
    if op.client in state.clients:
        ring.await_reply(op.client, op.seq, entry)


def _without_bulk(run: StageRun) -> StageOutcome:
    """How a stage ended, without its message and the rows that it left undefined."""
    if run.outcome is None:
        return StageOutcome(run.stage, "untouched")
    return msgspec.structs.replace(run.outcome, message="", rows_undefined=())


def switch(state: State, *, on: bool) -> None:
    """Begin to trace, or end it."""
    if not state.trace.switch(state.now_s, on=on):
        return
    for worker in state.workers.values():
        if worker.can_serve:
            state.out.append(SendTo(worker.name, TraceCopies(on)))
    state.log("info", "operations are traced" if on else "operations are no longer traced")


def worker_ready(state: State, worker: Worker) -> None:
    """A process begins without."""
    if state.trace.on:
        state.out.append(SendTo(worker.name, TraceCopies(True)))


def serve(
    state: State, client: ClientRecord, request: Trace | SetTrace, *, admin: bool, may_see: Callable[[str], bool]
) -> None:
    """Switch, or tell of what is kept. `may_see` says it of a namespace.

    Raises:
        Refusal: ``not_permitted`` or ``bad_value``.
    """
    if isinstance(request, SetTrace):
        if not admin:
            raise Refusal("not_permitted", "only an admin of the daemon may switch the trace")
        switch(state, on=request.on)
        state.reply(client.client, _traced(state, request.seq, [], []))
        return
    kinds = {kind.value for kind in OpKind}
    if request.op and request.op not in kinds:
        raise Refusal("bad_value", f"op must be one of {', '.join(sorted(kinds))}, got {request.op[:20]!r}")
    seen = [e for e in state.trace.entries if may_see(e.namespace) and request.op in ("", e.kind)]
    limit = max(0, min(request.limit, LIST_LIMIT))
    listed = sorted(seen, key=lambda e: e.total_s, reverse=True) if request.slowest else seen[::-1]
    fitting = list(_fitting(listed[:limit], state.settings.max_message_bytes))
    if not request.slowest:
        fitting.reverse()
    state.reply(client.client, _traced(state, request.seq, fitting, seen[-SUMMED_OPS:]))


def _fitting(entries: Iterable[OpTrace], room_bytes: int) -> Iterator[OpTrace]:
    """As many as a frame has room for."""
    room_bytes -= REPLY_BYTES
    for entry in entries:
        names = 4 * (len(entry.conversation) + len(entry.namespace))
        room_bytes -= OP_FRAME_BYTES + names + STAGE_FRAME_BYTES * len(entry.stages)
        if room_bytes < 0:
            return
        yield entry


def _traced(state: State, seq: int, ops: Iterable[OpTrace], summed: Iterable[OpTrace]) -> Traced:
    ring = state.trace
    ahead_s = state.now_unix_s - state.now_s
    return Traced(
        seq,
        ring.on,
        ahead_s + ring.since_s if ring.since_s else 0.0,
        len(ring.entries),
        ring.forgotten,
        ring.held_bytes,
        RING_BYTES,
        tuple(_kinds(summed)),
        tuple(traced_op(entry, ahead_s) for entry in ops),
    )


def traced_op(entry: OpTrace, ahead_s: float) -> TracedOp:
    """An operation as clients see it; `ahead_s` is what the wall clock is ahead of the monotonic one."""
    return TracedOp(
        entry.op_id,
        entry.kind,
        entry.namespace,
        entry.conversation,
        entry.engine_id,
        entry.token_count,
        entry.code,
        ahead_s + entry.created_s,
        entry.total_s,
        entry.journal_s,
        tuple(_stage(entry, stage) for stage in entry.stages),
    )


def _stage(entry: OpTrace, stage: StageTrace) -> TracedStage:
    worker, asked_bytes, sent_s, answered_s, outcome = stage
    sent = sent_s > 0.0
    done_s = answered_s if sent else entry.replied_s
    at_worker_s = outcome.event_s + outcome.queue_s + outcome.lane_s
    return TracedStage(
        outcome.stage,
        worker,
        outcome.state,
        outcome.code,
        asked_bytes,
        outcome.moved_bytes,
        outcome.skipped_bytes,
        outcome.digested_bytes,
        queue_s=(sent_s if sent else entry.replied_s) - entry.created_s,
        way_s=max(done_s - sent_s - at_worker_s, 0.0) if sent else 0.0,
        event_s=outcome.event_s,
        turn_s=outcome.queue_s,
        lane_s=outcome.lane_s,
        digest_s=outcome.digest_s - outcome.verify_s,
        gather_s=outcome.gather_s,
        link_s=outcome.copy_s - outcome.gather_s,
        verify_s=outcome.verify_s,
        rest_s=max(outcome.lane_s - outcome.digest_s - outcome.copy_s, 0.0),
        publish_s=max(entry.replied_s - done_s, 0.0),
    )


def _kinds(entries: Iterable[OpTrace]) -> Iterator[TraceKind]:
    """Percentiles of each kind of operation. Those of a step are of the stage that was done last: the others' steps
    took none of the caller's time.
    """
    by_kind: dict[str, list[OpTrace]] = {}
    for entry in entries:
        by_kind.setdefault(entry.kind, []).append(entry)
    for kind, found in sorted(by_kind.items()):
        well = [entry for entry in found if not entry.code]
        last = [_stage(entry, max(entry.stages, key=_answered_s)) for entry in well]
        times = {"total": percentiles([entry.total_s for entry in well])}
        for step in (*STEPS, *IN_LANE):
            times[step] = percentiles([getattr(stage, f"{step}_s") for stage in last])
        times["journal"] = percentiles([entry.journal_s for entry in well])
        outcomes = [outcome for entry in found for *_, outcome in entry.stages]
        moved = sum(outcome.moved_bytes for outcome in outcomes)
        skipped = sum(outcome.skipped_bytes for outcome in outcomes)
        digested = sum(outcome.digested_bytes for outcome in outcomes)
        yield TraceKind(kind, len(well), len(found) - len(well), moved, skipped, digested, times if well else {})


def _answered_s(stage: StageTrace) -> float:
    return stage[3]


def percentiles(values: list[float]) -> tuple[float, ...]:
    """p50, p90, p99 and the largest (nearest rank)."""
    if not values:
        return ()
    values.sort()
    last = len(values) - 1
    return tuple(values[min(int(share * len(values)), last)] for share in (0.5, 0.9, 0.99, 1.0))
