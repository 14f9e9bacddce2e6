"""Shuttles that cannot be had: a shortage passes and is tried again, a lost segment takes its images along."""

import math
from collections.abc import Iterable

from ipc.messages import ShuttleFailed
from shm.extent import ChunkPlace
from stratad.core import arenas, ends, journaling, leases
from stratad.core.effects import UnlinkSegment
from stratad.core.images import Image, Staged
from stratad.core.ops import Operation, OpState, StageState
from stratad.core.state import State, Worker

# A segment that a former process of the worker mapped and that is not there, or is not what it was, stays so.
_LOST = frozenset({"missing", "refused"})
# These say something of now, not of the segment.
_PASSING = frozenset({"no_space", "unavailable", "cancelled"})
# Names that others have taken are passed over, so many in a row before the arena rests.
SKIP_LIMIT = 64


def shuttle_failed(state: State, worker: Worker, report: ShuttleFailed) -> None:
    """A shuttle could not be had. Nothing but what lay in it, if it is lost for good, may suffer from that."""
    if report.index != worker.making:
        state.log("error", "shuttle not asked for", worker=worker.name, shuttle=report.index)
        return
    worker.making = None
    worker.life.making_by_s = math.inf
    state.count("shuttles_failed")
    held = report.index in worker.sizes
    if not held:
        worker.making_deaths = 0
    if held and report.code in _LOST:
        lose_shuttle(state, worker, report.index, report.message)
        arenas.tend(state, worker)
        arenas.try_again(state, worker)
    elif held and report.code not in _PASSING:
        # Perhaps this process has lost its device: the next one tries again.
        worker.detail = f"shuttle {report.index} could not be attached again: {report.message}"
        state.log("error", "shuttle failed", worker=worker.name, shuttle=report.index, code=report.code)
        arenas.kill(state, worker, "worker_died", worker.detail)
    elif report.code == "exists" and worker.skipped < SKIP_LIMIT:
        worker.skipped += 1
        worker.retired.add(report.index)
        state.log("warning", "name of a shuttle is taken", worker=worker.name, why=report.message)
        arenas.tend(state, worker, set())
        arenas.try_again(state, worker)
    else:
        what = f"shuttle {report.index} cannot be attached again" if held else "arena cannot grow"
        arenas.run_short(state, worker, what, f"{report.message} [{report.code}]")


def lose_shuttle(state: State, worker: Worker, index: int, why: str) -> None:
    """Forget a shuttle that no process maps and none ever will: drop every image that has bytes in it, end what counts
    on those bytes, and go on with the others. Its number is not used again.
    """
    cause = f"shuttle {index} of {worker.name} is lost: {why}"
    for engine in state.engines.values():
        for put in list(engine.puts.values()):
            stored = [piece.stored.staged for piece in put.pieces() if piece.stored is not None]
            if any(_reserved_in(staged, worker, index) for staged in stored):
                leases.end_put(state, engine, put)
        for slot, image in list(engine.transits.items()):
            if state.catalog.lies_in(image, worker.name, index):
                del engine.transits[slot]
                state.catalog.drop_transit(image)
    images = [i for i in state.catalog.images.values() if state.catalog.lies_in(i, worker.name, index)]
    segment = worker.segments.pop(index)
    del worker.sizes[index]
    worker.retired.add(index)
    worker.arena.lose_shuttle(index)
    state.count("shuttles_lost")
    state.count("images_lost", len(images))
    state.log("error", "shuttle lost, its images are dropped", worker=worker.name, images=len(images), why=cause)
    for op in list(state.ops.values()):
        _end(state, op, worker, index, cause)
    if images:
        journaling.drop(state, images, lambda _: None, lambda state, _: _flag(state, images, worker, index))
    state.out.append(UnlinkSegment(segment))  # where it is ours but not as it should be, its memory goes back


def _flag(state: State, images: Iterable[Image], worker: Worker, index: int) -> None:
    """Their end could not be recorded: what else they hold must not go to others before it is. Nobody finds them, and
    they make room or are dropped like any other damaged image.
    """
    for image in images:
        for chunk in image.chunks():
            if chunk.key.worker == worker.name and _holds([chunk.place], index):
                state.catalog.flag_damaged(chunk)


def _end(state: State, op: Operation, worker: Worker, index: int, cause: str) -> None:
    """End an operation that counts on a lost shuttle; one that is copying ends with the stages that are under way."""
    reads = op.image is not None and any(
        _holds(op.places(run), index)
        for run in op.stages
        if run.worker == worker.name and run.state is StageState.PENDING
    )
    if op.state is OpState.WAITING:
        op.forget_hints()
        if reads or (op.piece is not None and op.piece.put.ended):
            ends.fail(state, op, "damaged", cause)
    elif reads:
        op.lost = ("damaged", cause)
    elif op.staged is not None and _reserved_in(op.staged, worker, index):
        op.lost = ("worker_died", cause)


def _reserved_in(staged: Staged, worker: Worker, index: int) -> bool:
    workers = staged.draft.scope.workers
    return any(name == worker.name and _holds(staged.all_places(stage), index) for stage, name in enumerate(workers))


def _holds(places: Iterable[ChunkPlace], index: int) -> bool:
    return any(extent.shuttle == index for place in places for extent in place.extents)
