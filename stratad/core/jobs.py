"""Jobs: an operation's stages at the workers, from the first send to the end of the last one (see `ends`)."""

import msgspec

from ipc.messages import (
    DIGEST_BYTES,
    CancelJob,
    CaptureJob,
    CopyCommand,
    CopyJob,
    CudaIpcPool,
    DigestJob,
    EventAwaited,
    GroupRestored,
    JobDone,
    JobFailed,
    LaneMoving,
    Progress,
    RestoreJob,
    SourceFree,
    StageOutcome,
)
from shm.extent import pack_places
from shm.rows import pack_numbers
from stratad.core import arenas, blame, ends, hints, journaling, marking
from stratad.core.effects import SendTo
from stratad.core.images import Staged, StageDigests
from stratad.core.ops import ACTIVE, RUNNING, Operation, StageRun, StageState
from stratad.core.state import State, Worker, WorkerState

LEAST_EVENT_WAIT_S = 0.05


def start(state: State, op: Operation) -> None:
    """Begin to copy: all stages at once, or the first one where stages copy one after another."""
    op.advance("start")
    op.waits_for = ""
    del state.waiting[op.op_id]
    for run in op.stages:
        run.generation = state.workers[run.worker].generation
    if op.writes_rows:
        marking.end_written(state, op)
    for run in op.stages if state.settings.parallel else op.stages[:1]:
        _send(state, op, run)


def send_missed(state: State, op: Operation, run: StageRun) -> None:
    """Send a stage again, with the chunks that it has missed. Their extents are reserved."""
    op.waits_for = ""
    _send(state, op, run)
    _settle_short(state, op)


def _send(state: State, op: Operation, run: StageRun) -> None:
    """Send a stage to its worker. One that was there before is failed by the caller where that cannot be any more."""
    worker = state.workers[run.worker]
    why_not = why_not_sent(run, worker)
    if why_not:
        run.advance("skip")
        run.outcome = StageOutcome(run.stage, "failed", "worker_died", f"worker {worker.name} {why_not}")
        return
    run.job = state.number("job")
    run.job_bytes = op.bytes_to_move(run)
    run.advance("send")
    if run.former is None:
        run.sent_s = state.now_s
    worker.jobs[run.job] = (op, run.stage)
    worker.job_bytes += run.job_bytes
    stage = state.engines[op.engine_id].stages[run.stage]
    pool, described = stage.pool, stage.stage.pool
    # Memory of the host is written by the engine itself before it asks; only a GPU's work is still under way then.
    poll_event = op.ordered == "event" and isinstance(described, CudaIpcPool)
    event_wait_s = max(op.deadline_s - state.now_s, LEAST_EVENT_WAIT_S) if poll_event else 0.0
    _give_time(state, worker, run)
    state.out.append(SendTo(worker.name, _command(op, run, pool, poll_event, event_wait_s)))


def _give_time(state: State, worker: Worker, run: StageRun, wait_s: float = 0.0) -> None:
    """From now on a stage has the time of its copy, behind all that its worker has to copy, and `wait_s` before."""
    settings = state.settings
    run.patience_s = wait_s + settings.job_floor_s + worker.job_bytes / settings.link_floor_bytes_per_s
    run.deadline_s = state.now_s + run.patience_s
    state.wake_by(run.deadline_s)


def moves_on(state: State, worker: Worker, report: EventAwaited | GroupRestored | LaneMoving | SourceFree) -> None:
    """A worker says how far a job is that has not ended. A stage that waits for its engine's event has the time of its
    copy after that; the worker gives it up at the caller's deadline. Where a lane goes on, its jobs have theirs anew.
    """
    found = worker.jobs.get(report.job)
    if found is None:
        return
    op, stage = found
    match report:
        case EventAwaited():
            wait_s = 0.0 if report.reached else max(op.deadline_s - state.now_s, LEAST_EVENT_WAIT_S)
            _give_time(state, worker, op.stages[stage], wait_s)
        case LaneMoving():
            worker.moved_s[op.reads_rows] = state.now_s
        case GroupRestored():
            if op.layered:
                state.reply(op.client, Progress(op.seq, "group", stage, report.group))
        case SourceFree():
            _source_free(state, op, stage)


def why_not_sent(run: StageRun, worker: Worker) -> str:
    """What stands against sending a stage now. Where stages are copied one after another, the operation may have begun
    long ago: a process that came since may lack the pool, the shuttles, or its name in the journal.
    """
    if not worker.can_serve:
        return f"is {worker.state.value}"
    return "" if worker.generation == run.generation else "was started again meanwhile"


def _command(op: Operation, run: StageRun, pool: int, poll_event: bool, event_wait_s: float) -> CopyCommand:
    rows, positions = run.rows.packed, pack_numbers(op.positions)
    if op.marking is not None:
        asked = pack_numbers(op.marking.asked[run.stage])
        return DigestJob(run.job, pool, rows, op.token_count, asked, poll_event, positions, event_wait_s)
    kind, stage = op.kind.value, run.stage
    if run.target is not None:
        target = run.target.packed
        return CopyJob(run.job, pool, rows, target, op.token_count, poll_event, positions, event_wait_s, kind, stage)
    if op.image is None:
        assert op.staged is not None
        hinted, every = op.staged.hinted[stage], op.staged.places[stage]
        numbers = run.missed or [number for number in range(len(every)) if number not in hinted]
        return CaptureJob(
            run.job,
            pool,
            rows,
            op.token_count,
            pack_places([every[number] for number in numbers]),
            poll_event,
            positions,
            event_wait_s,
            kind,
            stage,
            b"" if run.missed else pack_numbers(tuple(hinted)),
            pack_numbers(run.missed),
        )
    places = pack_places(op.places(run))
    chunks = op.stored(run)
    algorithms = tuple(chunk.key.algorithm for chunk in chunks)
    if len(set(algorithms)) == 1:
        algorithms = algorithms[:1]
    return RestoreJob(
        run.job,
        pool,
        rows,
        op.image_tokens,
        op.token_count,
        places,
        b"".join(chunk.key.digest for chunk in chunks),
        algorithms,
        poll_event,
        positions,
        event_wait_s,
        kind,
        stage,
        op.resident_tokens,
        op.layered,
    )


def cancel(state: State, op: Operation) -> None:
    """Stop a running operation between two slices; it ends when its stages have answered."""
    op.cancelled = True
    for run in op.stages:
        if run.state in RUNNING:
            state.out.append(SendTo(run.worker, CancelJob(run.job)))
    for run in op.stages:
        if run.state is StageState.MISSED:
            fail_missed(state, op, run, "cancelled", "the operation was cancelled")


def _source_free(state: State, op: Operation, stage: int) -> None:
    """A capture's stage no longer reads the rows; when all of them do not, the client may write them again. Where it is
    not known yet whether a second job will have to read them, they stay as they are.
    """
    run = op.stages[stage]
    if run.state is not StageState.SENT or not op.captures:  # what is written stays fenced up to the job's end
        return
    if op.staged is not None and op.staged.hinted[stage] and run.answer is None:
        return
    run.advance("free")
    ends.lower_fence(state, op, stage)
    _tell_free(state, op)


def _tell_free(state: State, op: Operation) -> None:
    """Tell once that no stage of a capture reads its rows any more, if one is still at work: else the end says it."""
    states = {run.state for run in op.stages}
    if StageState.FREE in states and states <= {StageState.FREE, StageState.DONE} and not op.told_free:
        op.told_free = True
        state.reply(op.client, Progress(op.seq, "source_free"))


def job_done(state: State, worker: Worker, report: JobDone) -> None:
    """A stage ended well."""
    found = _end_job(worker, report.job)
    if found is None:
        state.log("error", "answer to no job", worker=worker.name, job=report.job)
        return
    op, stage = found
    run = op.stages[stage]
    worker.moved_s[op.reads_rows] = state.now_s
    worker.life.did_well = True
    if op.captures or op.marking is not None:
        count = len(op.digested(run))
        if len(report.digests) != count * DIGEST_BYTES or worker.ready is None:
            _fail_stage(
                state, op, run, "internal", f"worker answered {len(report.digests)} bytes of digests for {count} chunks"
            )
            return
        run.take_answer(
            StageDigests(
                report.algorithm or worker.ready.digest_algorithm,
                worker.ready.key_id,
                tuple(report.digests[at : at + DIGEST_BYTES] for at in range(0, count * DIGEST_BYTES, DIGEST_BYTES)),
            )
        )
    outcome = _outcome(run, "done", report)
    state.count("moved_bytes" if op.marking is None else "digested_bytes", report.moved_bytes)
    state.count("looked_bytes", max(report.digested_bytes - report.moved_bytes, 0))
    if op.staged is not None and _misses(state, op, op.staged, run):
        run.former = outcome
        return
    if op.staged is not None:
        skipped_bytes = sum(chunk.place.length_bytes for chunk in op.staged.hinted[stage].values())
        outcome = msgspec.structs.replace(outcome, skipped_bytes=skipped_bytes)
    run.advance("done")
    run.done_s = state.now_s
    run.outcome = outcome
    state.count("skipped_bytes", outcome.skipped_bytes)
    ends.lower_fence(state, op, stage)
    _tell_free(state, op)
    _go_on(state, op)


def _outcome(run: StageRun, ended: str, report: JobDone | JobFailed | None) -> StageOutcome:
    """How a stage has gone up to now: its job, and the one before."""
    outcome = run.former or StageOutcome(run.stage, ended)
    if report is None:
        return msgspec.structs.replace(outcome, state=ended)
    done = report if isinstance(report, JobDone) else None
    return StageOutcome(
        run.stage,
        ended,
        moved_bytes=outcome.moved_bytes + report.moved_bytes,
        digest_s=outcome.digest_s + report.digest_s,
        copy_s=outcome.copy_s + report.copy_s,
        lane_s=outcome.lane_s + report.lane_s,
        gather_s=outcome.gather_s + report.gather_s,
        verify_s=outcome.verify_s + report.verify_s,
        event_s=outcome.event_s + report.event_s,
        queue_s=outcome.queue_s + report.queue_s,
        digested_bytes=outcome.digested_bytes + (0 if done is None else done.digested_bytes),
        skipped_bytes=0 if done is None else done.skipped_bytes,
    )


def _misses(state: State, op: Operation, staged: Staged, run: StageRun) -> bool:
    """Whether chunks of a stage that has answered are not stored, though they were expected to be. Then the stage waits
    for extents for them (see `queue.pump`); its rows stay as they are.
    """
    if run.missed or run.answer is None:
        return False
    run.missed = hints.missed(staged.hinted[run.stage], run, run.answer)
    state.count("chunks_hinted", len(staged.hinted[run.stage]))
    if not run.missed:
        return False
    state.catalog.miss(staged, run.stage, run.missed)
    state.count("chunks_missed", len(run.missed))
    run.sent_s = state.trace.sent_s.pop(run.job, run.sent_s)  # its time counts from the first job on
    run.advance("miss")
    state.short[op.op_id] = op
    state.wake_by(op.deadline_s)
    return True


def _settle_short(state: State, op: Operation) -> None:
    if not any(run.state is StageState.MISSED for run in op.stages):
        state.short.pop(op.op_id, None)


def fail_missed(state: State, op: Operation, run: StageRun, code: str, message: str) -> None:
    """End a stage that waits for extents: no process touches its rows."""
    _fail_stage(state, op, run, code, message)


def job_failed(state: State, worker: Worker, report: JobFailed) -> None:
    """A stage failed and its worker will write nothing more of it."""
    found = _end_job(worker, report.job)
    if found is None:
        state.log("error", "answer to no job", worker=worker.name, job=report.job)
        return
    op, stage = found
    if report.sticky:  # it ends now; the next one serves
        blame.accuse(state, worker, op)
        worker.life.leaving_s = state.now_s + arenas.LEAVE_S
        state.wake_by(worker.life.leaving_s)
    stored = op.stored(op.stages[stage]) if op.image is not None else ()
    if report.code == "damaged" and 0 <= report.chunk < len(stored):
        holders, flagged = state.catalog.flag_damaged(stored[report.chunk])
        state.count("images_damaged", len(flagged))
        for image in holders:
            state.log("error", "image damaged", image=image.image_id, stage=stage, chunk=report.chunk)
        journaling.record_flags(state, holders)
    _fail_stage(
        state,
        op,
        op.stages[stage],
        report.code,
        report.message,
        rows_undefined=report.rows_undefined,
        report=report,
    )


def worker_gone(state: State, worker: Worker, code: str, message: str) -> None:
    """The worker's process is proven gone: its jobs have failed, and all rows they were to write are undefined."""
    jobs = sorted(worker.jobs)
    for job in jobs:
        found = _end_job(worker, job)
        assert found is not None
        op, stage = found
        run = op.stages[stage]
        written = op.written(run)
        _fail_stage(state, op, run, code, message, rows_undefined=written.packed if written is not None else ())


def due_s(worker: Worker, op: Operation, run: StageRun) -> float:
    """When a worker that has not answered a job hangs. A lane copies one job at a time, those that came later may go
    first, and jobs cost time besides their bytes: as long as it goes on with any, all have their time anew.
    """
    return max(run.deadline_s, worker.moved_s[op.reads_rows] + run.patience_s)


def check_deadlines(state: State) -> None:
    """Kill a worker that let a job's deadline pass. Its stages end when its end is proven."""
    for worker in state.workers.values():
        if worker.state is not WorkerState.READY or not worker.jobs:
            continue
        late = [j for j, (op, stage) in worker.jobs.items() if due_s(worker, op, op.stages[stage]) <= state.now_s]
        if late:
            state.count("workers_hung")
            worker.life.hung = frozenset(worker.jobs[job][0].reads_rows for job in late)
            arenas.kill(state, worker, "worker_hung", f"job {min(late)} passed its deadline", excused=False)


def _end_job(worker: Worker, job: int) -> tuple[Operation, int] | None:
    found = worker.jobs.pop(job, None)
    if found is not None:
        worker.job_bytes -= found[0].stages[found[1]].job_bytes
    return found


def _fail_stage(
    state: State,
    op: Operation,
    run: StageRun,
    code: str,
    message: str,
    *,
    rows_undefined: tuple[bytes, ...] = (),
    report: JobFailed | None = None,
) -> None:
    """End a stage without success; its worker's `report` says how far it came, if it could."""
    run.advance("fail")
    run.done_s = state.now_s
    run.outcome = msgspec.structs.replace(
        _outcome(run, "failed", report), code=code, message=message, rows_undefined=rows_undefined
    )
    _settle_short(state, op)
    ends.lower_fence(state, op, run.stage)
    _go_on(state, op)


def _go_on(state: State, op: Operation) -> None:
    """After the end of a stage: send the next one of a serial operation, or end the operation with its last stage."""
    running = pending = None
    failed = False
    for run in op.stages:
        if run.state in ACTIVE:
            running = run
        elif run.state is StageState.PENDING:
            pending = pending or run
        elif run.outcome is not None and run.outcome.state == "failed":
            failed = True
    if pending is not None and (op.cancelled or failed or op.lost):
        op.skip_pending()
    elif pending is not None and running is None:
        _send(state, op, pending)
        if pending.state is StageState.UNTOUCHED:  # its worker has died meanwhile
            op.skip_pending()
        else:
            running = pending
    if running is None:
        ends.finish(state, op)
