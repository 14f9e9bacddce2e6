"""How arenas grow, and how a worker that was started again gets its shuttles back."""

import math

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.extent import GRANULE_BYTES
from shm.header import segment_name
from stratad.core.arena import Arena
from stratad.core.effects import KillWorker, SendTo, UnlinkSegment
from stratad.core.state import State, Worker, WorkerState

# After a refusal (no memory, no room on /dev/shm) the next try waits this long.
GROW_AGAIN_S = 10.0
# After so many deaths in a row while the same new shuttle was made, it waits too.
MAKING_DEATHS = 2
# Between what shows that a process ends (a sticky failure, the end of its lifeline) and SIGKILL: time for it to end by
# itself, and say by its status why.
LEAVE_S = 1.0


def tend(state: State, worker: Worker, needed: set[int] | None = None) -> None:
    """Keep one shuttle in the making as long as there is reason: first those the worker had before (of waiting
    operations first), then new ones while less than half a shuttle is free, or all of them with `prefault`.
    """
    if worker.making is not None or not worker.can_serve:
        return
    settings = state.settings
    if len(worker.mapped) < len(worker.sizes):
        lost = [index for index in worker.sizes if index not in worker.mapped]
        index = min(lost, key=lambda i: (needed is None or i not in needed, i))
        _make(state, worker, index, worker.sizes[index], adopt=True)
        return
    wanted = (
        needed is not None
        or settings.prefault
        or worker.arena.free_granules * GRANULE_BYTES < settings.shuttle_bytes // 2
    )
    if wanted and worker.can_grow(settings, state.now_s):
        index = next(n for n in range(len(worker.sizes) + 1) if n not in worker.sizes)
        _make(state, worker, index, settings.shuttle_bytes, adopt=False)


def _make(state: State, worker: Worker, index: int, size_bytes: int, *, adopt: bool) -> None:
    worker.making = index
    settings = state.settings
    worker.life.making_by_s = state.now_s + settings.order_s + size_bytes / settings.link_floor_bytes_per_s
    state.wake_by(worker.life.making_by_s)
    segment = segment_name(state.settings.instance, worker.name, index)
    state.out.append(SendTo(worker.name, MakeShuttle(index, segment, size_bytes, adopt)))


def shuttle_ready(state: State, worker: Worker, report: ShuttleReady) -> None:
    """A shuttle may be used."""
    if report.index != worker.making:
        state.log("error", "shuttle not asked for", worker=worker.name, shuttle=report.index)
        return
    worker.making = None
    worker.life.making_by_s = math.inf
    worker.mapped.add(report.index)
    if report.locked:
        worker.locked.add(report.index)
    if report.index not in worker.sizes:
        worker.making_deaths = 0
        worker.grow_failed = ""
        worker.sizes[report.index] = state.settings.shuttle_bytes
        worker.segments[report.index] = segment_name(state.settings.instance, worker.name, report.index)
        worker.arena.add_shuttle(report.index, state.settings.shuttle_bytes)
    state.count("shuttles_made")
    state.log("info", "shuttle ready", worker=worker.name, shuttle=report.index, make_s=round(report.make_s, 4))
    tend(state, worker)


def shuttle_failed(state: State, worker: Worker, report: ShuttleFailed) -> None:
    """A shuttle could not be had: a new one is not tried again; one with images is an error that `status` shows."""
    if report.index != worker.making:
        state.log("error", "shuttle not asked for", worker=worker.name, shuttle=report.index)
        return
    worker.making = None
    worker.life.making_by_s = math.inf
    state.count("shuttles_failed")
    state.log("error", "shuttle failed", worker=worker.name, shuttle=report.index, code=report.code, why=report.message)
    if report.index in worker.sizes:
        # Images lie in it, and only a process that maps it can serve them: the next one tries again.
        worker.detail = f"shuttle {report.index} could not be attached again: {report.message}"
        kill(state, worker, "worker_died", worker.detail)
    else:
        worker.making_deaths = 0
        worker.grow_failed = f"{report.message} [{report.code}]"
        worker.grow_again_s = state.now_s + GROW_AGAIN_S
        worker.detail = f"arena cannot grow: {worker.grow_failed}"


def kill(state: State, worker: Worker, code: str, reason: str, *, excused: bool = True) -> None:
    """SIGKILL a worker's process; its jobs end with `code` once it is proven gone. `excused`: no copy is the cause."""
    worker.state = WorkerState.KILLED
    worker.kill_code = code
    worker.life.killed_s = state.now_s
    worker.life.killed_for = reason
    worker.life.excused = excused
    state.wake_by(state.now_s + state.settings.stuck_s)
    state.out.append(KillWorker(worker.name, worker.generation, reason))


def drop_half_made(state: State, worker: Worker) -> None:
    """After the proven end of a worker: a shuttle that it was making has a name and nothing else. One that was new, and
    during whose making processes died twice in a row, is not tried again at once: what the arena has is served.
    """
    if worker.making is not None and worker.making not in worker.sizes:
        state.out.append(UnlinkSegment(segment_name(state.settings.instance, worker.name, worker.making)))
        if not (worker.life.ordered or worker.life.culprit):
            worker.making_deaths += 1
    worker.making = None


def rest_from_growing(state: State, worker: Worker) -> None:
    """A new process is ready: it does not at once try again to make what its forerunners died of."""
    worker.grow_failed = ""
    if worker.making_deaths >= MAKING_DEATHS:
        worker.grow_failed = f"{worker.making_deaths} processes in a row died while they made a shuttle"
        worker.grow_again_s = state.now_s + GROW_AGAIN_S
        worker.detail = f"arena cannot grow: {worker.grow_failed}"


def make_empty(state: State, worker: Worker) -> None:
    """Give all shuttles of a worker back. It is proven gone, and nothing is stored in them."""
    assert worker.arena.used_granules == 0
    state.out.extend(UnlinkSegment(segment) for segment in worker.segments.values())
    worker.arena = state.catalog.arenas[worker.name] = Arena()
    worker.segments.clear()
    worker.sizes.clear()
    worker.grow_failed = ""
    worker.making_deaths = 0
