"""How arenas grow, and how a worker that was started again gets its shuttles back."""

import math

from ipc.messages import MakeShuttle, ShuttleReady
from shm.extent import GRANULE_BYTES
from shm.header import segment_name
from stratad.core.arena import Arena
from stratad.core.effects import KillWorker, SendTo, UnlinkSegment
from stratad.core.state import State, Worker, WorkerState

# After so many deaths in a row while the same new shuttle was made, it waits too.
MAKING_DEATHS = 2
# Between what shows that a process ends (a sticky failure, the end of its lifeline) and SIGKILL: time for it to end by
# itself, and say by its status why.
LEAVE_S = 1.0


def tend(state: State, worker: Worker, needed: set[int] | None = None) -> None:
    """Keep one shuttle in the making as long as there is reason: first those the worker had before (of waiting
    operations first), then new ones while less than half a shuttle is free, or all of them with `prefault`.
    """
    if worker.making is not None or not worker.can_serve or worker.runs_short(state.now_s):
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
        _make(state, worker, worker.next_index, settings.shuttle_bytes, adopt=False)


def wanted_bytes(state: State, worker: Worker) -> int:
    """Bytes of the shuttles that a worker is to have now: those that it had, the one in the making, and with `prefault`
    as many as there may be.
    """
    settings = state.settings
    have_bytes = sum(worker.sizes.values())
    if settings.prefault:
        room_bytes = max(settings.arena_bytes - have_bytes, 0)
        return have_bytes + room_bytes // settings.shuttle_bytes * settings.shuttle_bytes
    makes_new = worker.making is not None and worker.making not in worker.sizes
    return have_bytes + makes_new * settings.shuttle_bytes


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
    worker.skipped = 0
    _suffice(state, worker)
    worker.mapped.add(report.index)
    if report.locked:
        worker.locked.add(report.index)
    if report.index not in worker.sizes:
        worker.making_deaths = 0
        worker.sizes[report.index] = state.settings.shuttle_bytes
        worker.segments[report.index] = segment_name(state.settings.instance, worker.name, report.index)
        worker.arena.add_shuttle(report.index, state.settings.shuttle_bytes)
    state.count("shuttles_made")
    state.log("info", "shuttle ready", worker=worker.name, shuttle=report.index, make_s=round(report.make_s, 4))
    tend(state, worker)


def run_short(state: State, worker: Worker, what: str, why: str) -> None:
    """Something is missing that a shuttle needs: `status` shows it, and it is tried again by and by."""
    level = "debug" if worker.grow_failed else "error"  # once, not at each try
    worker.grow_failed = why
    worker.grow_again_s = state.now_s + state.settings.grow_again_s
    worker.detail = f"{what}: {why}"
    state.wake_by(worker.grow_again_s)
    state.log(level, "shuttle failed", worker=worker.name, why=worker.detail)


def try_again(state: State, worker: Worker) -> None:
    """It is some time since the worker ran short: what was missing may be there again, and nobody else would notice."""
    if not worker.grow_failed or worker.making is not None or not worker.can_serve or worker.runs_short(state.now_s):
        return
    tend(state, worker, set())
    if worker.making is None:  # it has become as large as it may
        _suffice(state, worker)


def _suffice(state: State, worker: Worker) -> None:
    if worker.grow_failed:
        worker.grow_failed = worker.detail = ""
        state.log("info", "shuttles can be made again", worker=worker.name)


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
        worker.rests_until_s = state.now_s + state.settings.grow_again_s
        worker.detail = f"arena cannot grow: {worker.making_deaths} processes in a row died while they made a shuttle"


def make_empty(state: State, worker: Worker) -> None:
    """Give all shuttles of a worker back. It is proven gone, and nothing is stored in them."""
    assert worker.arena.used_granules == 0
    state.out.extend(UnlinkSegment(segment) for segment in worker.segments.values())
    worker.arena = state.catalog.arenas[worker.name] = Arena(worker.arena.lost)
    worker.segments.clear()
    worker.sizes.clear()
    worker.grow_failed = ""
    worker.making_deaths = 0
