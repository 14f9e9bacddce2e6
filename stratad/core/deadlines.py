"""When the core has to be told the time: the earliest of everything that waits for it."""

import math

from stratad.core import jobs, lives, rescue
from stratad.core.state import State, WorkerState


def exact_due_s(state: State) -> float:
    """The earliest of all times at which something falls due (infinite: nothing does)."""
    due: list[float] = [request.deadline_s for request in state.stats_requests]
    due.append(state.memory.due_s)
    if state.journal_error:
        due.append(state.journal_probe_s)
    due.extend(rescue.due_s(state))
    due.extend(entry.deadline_s for entry in state.announced)
    for worker in state.workers.values():
        due.append(lives.due_s(state, worker))
        if worker.state is WorkerState.READY:
            due.extend(jobs.due_s(worker, op, op.stages[stage]) for op, stage in worker.jobs.values())
            if worker.grow_failed and worker.making is None and worker.can_serve:
                due.append(worker.grow_again_s)
    due.extend(op.deadline_s for op in (*state.waiting.values(), *state.short.values()))
    due.extend(c.hello_by_s for c in state.clients.values() if not c.greeted and c.hello_by_s > state.now_s)
    due.extend(e.register_deadline_s for e in state.engines.values() if not e.registered and not e.closing)
    due.extend(state.engines[engine_id].stop_copies_s for engine_id in state.closing)
    return min(due, default=math.inf)
