"""``stratactl status``: what the daemon does, and what every process of it has resident."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from ipc.messages import EngineInfo, ProcessMemory, StatsReply, WorkerInfo
from stratad.ctl.connection import DaemonClient
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.memory import warning_lines
from stratad.ctl.output import Answer, JsonObject, human_age, human_bytes, printable, table

HEALTH_EXIT: Final[dict[str, ExitCode]] = {
    "ok": ExitCode.OK,
    "degraded": ExitCode.DEGRADED,
    "failed": ExitCode.UNHEALTHY,
}
ResidentOf = Callable[[int], int | None]


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process by psutil; None where it is gone or hidden."""
    import psutil  # noqa: PLC0415 - only status needs it

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def status(client: DaemonClient, resident_of: ResidentOf = resident_bytes) -> Answer:
    """Ask the daemon and the kernel, and put both side by side. Raises what the client raises."""
    return describe(client.stats(), resident_of)


def describe(stats: StatsReply, resident_of: ResidentOf) -> Answer:
    """The answer for one `StatsReply`."""
    processes = _processes(stats, resident_of)
    data: JsonObject = msgspec.to_builtins(stats)
    data.pop("t", None)
    data.pop("seq", None)
    # What the wire leaves out where it is the default.
    data["memory_warnings"] = [msgspec.to_builtins(warning) for warning in stats.memory_warnings]
    data["journal_bytes"], data["journal_error"] = stats.journal_bytes, stats.journal_error
    data["processes"] = [msgspec.to_builtins(process) for process in processes]
    lines = [
        *_head(stats),
        "",
        *_workers(stats.workers),
        "",
        *_engines(stats),
        "",
        *_ops(stats),
        "",
        *_memory(processes),
    ]
    return Answer(HEALTH_EXIT.get(stats.health, ExitCode.DEGRADED), lines, data)


class ProcessRow(msgspec.Struct, frozen=True):
    """One process: what psutil sees now, what the daemon reported, and what the daemon accounts for (bytes)."""

    role: str
    pid: int
    resident_bytes: int | None
    reported_rss_bytes: int | None
    anon_bytes: int | None
    shmem_bytes: int | None
    accounted_bytes: int
    accounted_as: str


def _processes(stats: StatsReply, resident_of: ResidentOf) -> list[ProcessRow]:
    """Every process the daemon knows, once: its own, its workers and the engines."""
    reported = {memory.pid: memory for memory in stats.memory}
    workers = {worker.pid: worker for worker in stats.workers if worker.pid > 0}
    roles = {memory.pid: memory.role for memory in stats.memory}
    roles.setdefault(stats.pid, "supervisor")
    for pid, worker in workers.items():
        roles.setdefault(pid, f"worker {worker.worker}")
    for engine in stats.engines:
        roles.setdefault(engine.pid, f"engine {engine.engine}")
    return [_process(role, pid, reported.get(pid), workers.get(pid), resident_of) for pid, role in roles.items()]


def _process(
    role: str, pid: int, memory: ProcessMemory | None, worker: WorkerInfo | None, resident_of: ResidentOf
) -> ProcessRow:
    return ProcessRow(
        role=role,
        pid=pid,
        resident_bytes=resident_of(pid),
        reported_rss_bytes=None if memory is None else memory.rss_bytes,
        anon_bytes=None if memory is None else memory.anon_bytes,
        shmem_bytes=None if memory is None else memory.shmem_bytes,
        accounted_bytes=0 if worker is None else worker.shuttle_bytes,
        accounted_as="" if worker is None else f"{worker.shuttles} {'shuttle' if worker.shuttles == 1 else 'shuttles'}",
    )


def _head(stats: StatsReply) -> list[str]:
    return [
        f"instance {stats.instance}: {stats.health}, pid {stats.pid}, up {human_age(stats.uptime_s)}",
        f"images {stats.images} of {stats.budget_images or 'any number'}, chunks {stats.chunks}",
        f"published {human_bytes(stats.published_bytes)}, staged {human_bytes(stats.staged_bytes)}, "
        f"free {human_bytes(stats.free_bytes)}, budget {human_bytes(stats.budget_bytes)}",
        f"journal {human_bytes(stats.journal_bytes)}"
        + (f", cannot be written: {stats.journal_error}" if stats.journal_error else ""),
        *copies(stats.settings),
        *_testing(stats.settings),
        *warning_lines(stats.memory_warnings),
    ]


def copies(settings: Mapping[str, str]) -> list[str]:
    """How stages copy, where that is not what it mostly is or somebody wanted it otherwise; and the trace."""
    lines = []
    serial, note = settings.get("copy.parallel") == "false", settings.get("copy.parallel_note", "")
    if serial or note:
        how = "one stage after another" if serial else "stages side by side"
        lines.append(printable(f"copies: {how}" + (f" ({note})" if note else "")))
    if settings.get("copy.trace") == "true":
        lines.append("trace: on (see `stratactl trace`)")
    return lines


def _testing(settings: Mapping[str, str]) -> list[str]:
    """That this daemon is for tests."""
    said = []
    if settings.get("testing.allow_faults") == "true":
        said.append("faults are allowed")
    if point := settings.get("testing.die_at"):
        said.append(f"the daemon kills itself at {point}")
    return [f"testing: {', '.join(said)}"] if said else []


def _workers(workers: Sequence[WorkerInfo]) -> list[str]:
    if not workers:
        return ["workers: none"]
    head = ("worker", "state", "pid", "cpus", "shuttles", "size", "locked", "used", "free", "jobs", "deaths", "note")
    resources = (
        f"{worker.worker} holds " + ", ".join(f"{name} {count}" for name, count in sorted(worker.resources.items()))
        for worker in workers
        if worker.resources
    )
    return [*table(head, (_worker_cells(worker) for worker in workers)), *map(printable, resources)]


def _worker_cells(worker: WorkerInfo) -> tuple[str, ...]:
    return (
        worker.worker,
        worker.state,
        str(worker.pid) if worker.pid > 0 else "-",
        cpu_ranges(worker.cpus),
        str(worker.shuttles),
        human_bytes(worker.shuttle_bytes),
        human_bytes(worker.locked_bytes),
        human_bytes(worker.used_bytes),
        human_bytes(worker.free_bytes),
        str(worker.jobs),
        str(worker.deaths),
        _note(worker),
    )


def _note(worker: WorkerInfo) -> str:
    """Why it does not serve, and when it is tried again."""
    if worker.state in ("dead", "no_memory"):
        return f"{worker.detail}; started again in {worker.starts_in_s:.1f} s"
    return worker.detail


def cpu_ranges(cpus: Sequence[int]) -> str:
    """CPU numbers the way the kernel lists them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _engines(stats: StatsReply) -> list[str]:
    if not stats.engines:
        return ["engines: none"]
    rows = (
        (
            str(engine.engine_id),
            engine.engine,
            engine.namespace,
            str(engine.pid),
            str(engine.uid),
            " ".join(engine.stages),
            str(engine.ops),
            " ".join(f"{mark}={count}" for mark, count in sorted(engine.marks.items())) or "-",
            f"{engine.clean_slots} ({engine.clean_tokens} tokens)" if engine.clean_slots else "-",
            f"{engine.transits} ({human_bytes(engine.transit_bytes)})" if engine.transits else "-",
            _holds(engine),
            engine.rescue or "-",
            ", ".join(engine.quarantined) or "-",
        )
        for engine in stats.engines
    )
    names = ("engine", "name", "namespace", "pid", "uid", "stages", "ops", "marks", "declared", "in transit", "holds")
    return table((*names, "rescue", "quarantined"), rows)


def _holds(engine: EngineInfo) -> str:
    """What it holds between two calls: what nobody else can have for as long."""
    if not engine.leases:
        return "-"
    counts = " ".join(f"{kind}={count}" for kind, count in sorted(engine.leases.items()))
    return f"{counts}, unused {human_age(engine.unused_s)}"


def _ops(stats: StatsReply) -> list[str]:
    if not stats.ops:
        return ["operations in flight: none"]
    rows = (
        (
            str(op.op_id),
            op.kind,
            op.state,
            op.namespace,
            op.conversation,
            str(op.engine_id),
            human_age(op.age_s),
            ",".join(map(str, op.stages_pending)) or "-",
        )
        for op in stats.ops
    )
    return table(("op", "kind", "state", "namespace", "conversation", "engine", "age", "waits for stages"), rows)


def _memory(processes: Sequence[ProcessRow]) -> list[str]:
    rows = (
        (
            process.role,
            str(process.pid),
            human_bytes(process.resident_bytes),
            human_bytes(process.reported_rss_bytes),
            human_bytes(process.anon_bytes),
            human_bytes(process.shmem_bytes),
            human_bytes(process.accounted_bytes),
            process.accounted_as,
        )
        for process in processes
    )
    return table(("process", "pid", "resident", "reported", "private", "shared", "accounted", "as"), rows)
