"""What must hold between any two events, found out by a full recount."""

from stratad.core import memory
from stratad.core.deadlines import exact_due_s
from stratad.core.images import Chunk
from stratad.core.ops import RUNNING, OpKind, OpState, StageState
from stratad.core.state import State, WorkerState

HOLDING_JOBS = frozenset({WorkerState.READY, WorkerState.KILLED, WorkerState.STUCK})


def check(state: State) -> None:
    """Recount everything.

    Raises:
        AssertionError: our bug; the text says what is out of step.
    """
    state.catalog.validate()
    assert state.due_s <= exact_due_s(state), "something falls due that no tick was asked for"
    assert list(state.waiting) == [op.op_id for op in state.ops.values() if op.state is OpState.WAITING]
    assert state.closing == {engine.engine_id for engine in state.engines.values() if engine.closing}
    short = {op.op_id for op in state.ops.values() if any(run.state is StageState.MISSED for run in op.stages)}
    assert state.short.keys() == short, f"missed chunks out of step: {state.short.keys() ^ short}"
    assert state.runs_in_flight == sum(op.run_count for op in state.ops.values())
    in_jobs = {(op.op_id, stage) for worker in state.workers.values() for op, stage in worker.jobs.values()}
    in_ops = {(op.op_id, run.stage) for op in state.ops.values() for run in op.stages if run.state in RUNNING}
    assert in_jobs == in_ops, f"jobs out of step: {in_jobs ^ in_ops}"
    for worker in state.workers.values():
        assert worker.job_bytes == sum(op.stages[stage].job_bytes for op, stage in worker.jobs.values())
        assert set(worker.arena.shuttles) == set(worker.sizes)
        assert not worker.jobs or worker.state in HOLDING_JOBS
        assert worker.resetting == (worker.name in state.resets)
    _check_places(state)
    for info in state.faults.values():
        assert state.workers[info.worker].state in HOLDING_JOBS, f"fault {info.fault}"
    memory.validate(state)
    state.trace.validate(frozenset(run.job for op in state.ops.values() for run in op.stages))
    _check_fences(state)
    for engine in state.engines.values():
        assert engine.ops == sum(1 for op in state.ops.values() if op.engine_id == engine.engine_id)
        assert engine.rescue is None or engine.closing
        assert all(mark.slot == slot and mark.digests for slot, mark in engine.clean.by_slot.items())
    _check_holds(state)


def _check_places(state: State) -> None:
    """No image lies where an arena is to be emptied, and only what is flagged in a shuttle that is lost."""
    shuttles = {name: frozenset(worker.sizes) for name, worker in state.workers.items()}
    for image in (*state.catalog.images.values(), *state.catalog.transits.values()):
        assert not any(state.workers[name].resetting for name in image.scope.workers), f"image {image.image_id}: reset"
        for chunk in image.chunks():
            there = all(extent.shuttle in shuttles[chunk.key.worker] for extent in chunk.place.extents)
            assert there or chunk.damaged, f"image {image.image_id}: its shuttle is lost"


def _check_holds(state: State) -> None:
    """Whatever is staged belongs to one operation or to one put; every hold is somebody's."""
    puts = [put for engine in state.engines.values() for put in engine.puts.values()]
    held = [piece.stored.staged for put in puts for piece in put.pieces() if piece.stored is not None]
    held += [op.staged for op in state.ops.values() if op.staged is not None]
    assert len({id(staged) for staged in held}) == len(held)
    assert {id(staged) for staged in held} == {id(staged) for staged in state.catalog.staged}
    assert state.catalog.open_puts == len(puts)
    assert set(state.catalog.transits) == {i.image_id for e in state.engines.values() for i in e.transits.values()}
    open_bytes = sum(len(put.draft.tokens) for put in puts)
    images = state.catalog.images.values()
    assert state.catalog.put_token_bytes == open_bytes + sum(image.put_token_bytes for image in images)
    assert not state.appends, "an append was not answered at once"
    copied = {id(op.piece) for op in state.ops.values() if op.piece is not None and not op.piece.put.ended}
    assert copied == {id(piece) for put in puts for piece in put.pieces() if piece.stored is None}
    _check_reads(state)
    readers: dict[int, int] = {}
    for image in [op.image for op in state.ops.values() if op.image is not None] + [
        get.image for engine in state.engines.values() for get in engine.gets.values()
    ]:
        readers[image.image_id] = readers.get(image.image_id, 0) + 1
    takes = [op.image.image_id for op in state.ops.values() if op.image is not None and op.kind is OpKind.TAKE]
    takes += [image_id for engine in state.engines.values() for image_id in engine.takes]
    for image in state.catalog.images.values():
        assert image.readers == readers.get(image.image_id, 0), f"image {image.image_id}: readers out of step"
        assert image.taken == takes.count(image.image_id), f"image {image.image_id}: takes out of step"


def _check_reads(state: State) -> None:
    """Chunks are held by what reads them, and by captures that expect them to be theirs."""
    reads: dict[Chunk, int] = {}
    for chunks in [op.chunks for op in state.ops.values()] + [
        get.chunks for engine in state.engines.values() for get in engine.gets.values()
    ]:
        for chunk in chunks:
            reads[chunk] = reads.get(chunk, 0) + 1
    for staged in state.catalog.staged:
        for hinted in staged.hinted:
            for chunk in hinted.values():
                reads[chunk] = reads.get(chunk, 0) + 1
    for chunk in {*reads, *state.catalog.all_chunks()}:
        assert chunk.reads == reads.get(chunk, 0), f"{chunk.key}: {chunk.reads} reads, counted {reads.get(chunk, 0)}"


def _check_fences(state: State) -> None:
    assert len(state.fences) == sum(len(op.fenced) for op in state.ops.values())
    for op in state.ops.values():
        unread = (StageState.SENT, StageState.MISSED, StageState.PENDING)
        running = {run.stage for run in op.stages if run.state in unread}
        assert running <= op.fenced, f"operation {op.op_id}: rows of stages {running - op.fenced} are not fenced"
