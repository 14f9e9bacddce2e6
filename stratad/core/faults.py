"""Faults that an admin arms in running workers: refused unless the daemon was started to allow it."""

from ipc.messages import (
    FAULT_KINDS,
    FAULT_OPS,
    ArmFault,
    DisarmFault,
    Done,
    FaultArm,
    FaultDisarm,
    FaultInfo,
    FaultList,
    Faults,
    FaultStruck,
)
from stratad.core.effects import SendTo
from stratad.core.failures import Refusal
from stratad.core.state import ClientRecord, State, Worker

# More than a copy number that anybody waits for.
AT_LIMIT = 1_000_000
ARMED_LIMIT = 1000


def serve(state: State, client: ClientRecord, request: FaultArm | FaultList | FaultDisarm, *, admin: bool) -> None:
    """Arm, list or disarm.

    Raises:
        Refusal: ``faults_off``, ``not_permitted``, ``bad_value``, ``worker_unavailable`` or ``too_many``.
    """
    if not state.settings.allow_faults:
        raise Refusal("faults_off", "the daemon was not started with testing.allow_faults = true")
    if not admin:
        raise Refusal("not_permitted", "only an admin of the daemon may order faults")
    match request:
        case FaultArm():
            state.reply(client.client, Faults(request.seq, (_arm(state, request),)))
        case FaultList():
            state.reply(client.client, Faults(request.seq, tuple(state.faults.values())))
        case FaultDisarm():
            state.reply(client.client, Done(request.seq, _disarm(state, request.fault)))


def _arm(state: State, request: FaultArm) -> FaultInfo:
    if request.op not in FAULT_OPS:
        raise Refusal("bad_value", f"op must be one of {', '.join(FAULT_OPS)}, got {request.op[:20]!r}")
    if request.kind not in FAULT_KINDS:
        raise Refusal("bad_value", f"kind must be one of {', '.join(FAULT_KINDS)}, got {request.kind[:20]!r}")
    if not 1 <= request.at <= AT_LIMIT:
        raise Refusal("bad_value", f"at must be 1 to {AT_LIMIT}, got {request.at}")
    if len(state.faults) >= ARMED_LIMIT:
        raise Refusal("too_many", f"{len(state.faults)} faults are armed already")
    worker = _worker_of(state, request.stage, request.engine_id)
    if not worker.can_serve:
        raise Refusal("worker_unavailable", f"worker {worker.name} is {worker.state.value}", stage=request.stage)
    number = state.number("fault")
    info = FaultInfo(number, request.op, request.stage, request.kind, request.at, worker.name)
    state.faults[number] = info
    state.out.append(SendTo(worker.name, ArmFault(number, info.op, info.stage, info.kind, info.at)))
    state.log("warning", "fault armed", fault=number, worker=worker.name, op=info.op, kind=info.kind, at=info.at)
    return info


def _worker_of(state: State, stage: int, engine_id: int) -> Worker:
    """The worker that serves a stage of one engine, or of all.

    Raises:
        Refusal: none does, or several do.
    """
    engines = [engine for engine in state.engines.values() if engine_id in (0, engine.engine_id) and engine.registered]
    workers = {e.stages[stage].worker for e in engines if not e.exchange and 0 <= stage < len(e.stages)}
    if len(workers) != 1:
        who = f"engine {engine_id}" if engine_id else "the registered engines"
        found = f"is served by {', '.join(sorted(workers))}: name one engine" if workers else "does not exist"
        raise Refusal("bad_value", f"stage {stage} of {who} {found}")
    return state.workers[workers.pop()]


def _disarm(state: State, number: int) -> int:
    """How many were disarmed.

    Raises:
        Refusal: ``bad_value``: no fault of this number is armed.
    """
    if number and number not in state.faults:
        raise Refusal("bad_value", f"no fault {number} is armed: it has struck, or ended with its worker")
    gone = [state.faults.pop(n) for n in ([number] if number else list(state.faults))]
    for info in gone:
        state.out.append(SendTo(info.worker, DisarmFault(info.fault)))
    return len(gone)


def struck(state: State, worker: Worker, report: FaultStruck) -> None:
    """A worker says that an armed fault strikes."""
    if state.faults.pop(report.fault, None) is not None:
        state.count("faults_struck")
        state.log("warning", "fault strikes", fault=report.fault, worker=worker.name)


def worker_gone(state: State, worker: Worker) -> None:
    """What was armed in a process ended with it."""
    for info in [info for info in state.faults.values() if info.worker == worker.name]:
        del state.faults[info.fault]
