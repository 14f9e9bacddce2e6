"""How arenas grow, and how a worker that was started again gets its shuttles back."""

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.extent import GRANULE_BYTES
from shm.header import segment_name
from stratad.core.effects import KillWorker, SendTo, UnlinkSegment
from stratad.core.state import State, Worker, WorkerState

# After a refusal (no memory, no room on /dev/shm) the next try waits this long.
GROW_AGAIN_S = 10.0


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
    segment = segment_name(state.settings.instance, worker.name, index)
    state.out.append(SendTo(worker.name, MakeShuttle(index, segment, size_bytes, adopt)))


def shuttle_ready(state: State, worker: Worker, report: ShuttleReady) -> None:
    """A shuttle may be used."""
    if report.index != worker.making:
        state.log("error", "shuttle not asked for", worker=worker.name, shuttle=report.index)
        return
    worker.making = None
    worker.grow_failed = ""
    worker.mapped.add(report.index)
    if report.locked:
        worker.locked.add(report.index)
    if report.index not in worker.sizes:
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
    state.count("shuttles_failed")
    state.log("error", "shuttle failed", worker=worker.name, shuttle=report.index, code=report.code, why=report.message)
    if report.index in worker.sizes:
        # Images lie in it, and only a process that maps it can serve them: the next one tries again.
        worker.detail = f"shuttle {report.index} could not be attached again: {report.message}"
        kill(state, worker, "worker_died", worker.detail)
    else:
        worker.grow_failed = f"{report.message} [{report.code}]"
        worker.grow_again_s = state.now_s + GROW_AGAIN_S
        worker.detail = f"arena cannot grow: {worker.grow_failed}"


def kill(state: State, worker: Worker, code: str, reason: str) -> None:
    """SIGKILL a worker's process; its jobs end with `code` once it is proven gone."""
    worker.state = WorkerState.KILLED
    worker.kill_code = code
    state.out.append(KillWorker(worker.name, worker.generation, reason))


def drop_half_made(state: State, worker: Worker) -> None:
    """After the proven end of a worker: a shuttle that it was making has a name and nothing else."""
    if worker.making is not None and worker.making not in worker.sizes:
        state.out.append(UnlinkSegment(segment_name(state.settings.instance, worker.name, worker.making)))
    worker.making = None
