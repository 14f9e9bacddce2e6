"""``stratactl memory``: what each process has resident, what of it is explained, and how it has moved."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from ipc.messages import MemoryProcess, MemoryReply, MemoryTerm, MemoryWarning
from stratad.ctl.connection import DaemonClient
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, JsonObject, human_age, human_bytes, printable, table

ShareOf = Callable[[int], int | None]
_NOTES: Final = {"at most": "<=", "estimate": "~"}


def proportional_bytes(pid: int) -> int | None:
    """The process's share of what it has resident: a page of two processes counts half. None where it is hidden."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    shares = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return next((int(kib) * 1024 for kib in shares), None)


def memory(
    client: DaemonClient, *, history: int = 0, shares: bool = False, share_of: ShareOf = proportional_bytes
) -> Answer:
    """Ask the daemon; with `shares` also the kernel. Raises what the client raises."""
    return describe(client.memory(history=history), share_of if shares else None)


def describe(reply: MemoryReply, share_of: ShareOf | None = None) -> Answer:
    """The answer for one `MemoryReply`."""
    shares = {process.pid: share_of(process.pid) for process in reply.processes} if share_of is not None else None
    data: JsonObject = msgspec.to_builtins(reply)
    data.pop("t", None)
    data.pop("seq", None)
    if shares is not None:
        data["pss_bytes"] = {str(pid): share for pid, share in shares.items()}
    lines = [
        *_head(reply),
        *warning_lines(reply.warnings),
        "",
        *_processes(reply.processes, shares),
        *_total(reply.processes),
        "",
        *_terms(reply.processes),
        "",
        *_movement(reply.processes),
        "",
        *_arenas(reply),
        f"journal: {human_bytes(reply.journal_bytes)} of /dev/shm, which no process has mapped",
        *_history(reply.processes),
    ]
    return Answer(ExitCode.DEGRADED if reply.warnings else ExitCode.OK, lines, data)


def warning_lines(warnings: Sequence[MemoryWarning]) -> list[str]:
    """One line a warning; `stratactl status` shows the same."""
    return [
        printable(
            f"warning: {warning.process} (pid {warning.pid}) holds {human_bytes(warning.residual_bytes)} that nothing "
            f"explains, {human_bytes(warning.tolerance_bytes)} are tolerated: resident "
            f"{human_bytes(warning.resident_bytes)}, explained {human_bytes(warning.explained_bytes)}, since "
            f"{_time(warning.since_unix_s)} UTC"
        )
        for warning in warnings
    ]


def _head(reply: MemoryReply) -> list[str]:
    ages = [process.age_s for process in reply.processes]
    lines = [
        f"sampled every {reply.sample_s:g} s, last {max(ages, default=0.0):.1f} s ago; up to {reply.keep} samples a "
        f"process are kept, {human_bytes(reply.samples_bytes)} now, {human_bytes(reply.samples_bound_bytes)} at most; "
        f"a round took {reply.round_s * 1000:.2f} ms, one wake-up {reply.longest_s * 1000:.2f} ms at most",
    ]
    if reply.unwatched:
        lines.append(f"not shown: {reply.unwatched} processes, too many to be watched or to be sent")
    return lines


def _processes(processes: Sequence[MemoryProcess], shares: dict[int, int | None] | None) -> list[str]:
    head = ["process", "name", "pid", "resident", "private", "shared", "files"]
    head += [] if shares is None else ["share"]
    head += ["explained", "residual", "tolerated"]
    return table(head, (_cells(process, shares) for process in processes))


def _cells(process: MemoryProcess, shares: dict[int, int | None] | None) -> list[str]:
    parts = (process.resident_bytes, process.anon_bytes, process.shmem_bytes, process.file_bytes)
    cells = [process.role, process.name or "-", str(process.pid), *map(human_bytes, parts)]
    cells += [] if shares is None else [human_bytes(shares[process.pid])]
    return [
        *cells,
        human_bytes(process.resident_bytes - process.residual_bytes),
        human_bytes(process.residual_bytes),
        human_bytes(process.tolerance_bytes) if process.judged else "-",
    ]


def _movement(processes: Sequence[MemoryProcess]) -> list[str]:
    head = ("process", "name", "samples", "window", "first", "least", "most", "last", "an hour", "residual an hour")
    rows = (
        (
            process.role,
            process.name or "-",
            str(process.samples),
            human_age(process.window_s),
            human_bytes(process.first_bytes),
            human_bytes(process.least_bytes),
            human_bytes(process.most_bytes),
            human_bytes(process.resident_bytes),
            _slope(process.slope_bytes_per_hour),
            _slope(process.residual_slope_bytes_per_hour),
        )
        for process in processes
    )
    return table(head, rows)


def _slope(bytes_per_hour: float | None) -> str:
    return human_bytes(None if bytes_per_hour is None else round(bytes_per_hour))


def _total(processes: Sequence[MemoryProcess]) -> list[str]:
    ours = [process for process in processes if process.role != "engine"]
    return [
        f"daemon in all: resident {human_bytes(sum(p.resident_bytes for p in ours))}, residual "
        f"{human_bytes(sum(p.residual_bytes for p in ours))}; a page that several processes share counts in each"
    ]


def _terms(processes: Sequence[MemoryProcess]) -> list[str]:
    lines = ["explained by (<=: at most, perhaps never touched; ~: estimated; A of B: B could be, A is resident)"]
    for process in processes:
        named = f"{process.role} {process.name}".strip()
        terms = ", ".join(_term(term) for term in process.terms if term.bound_bytes) or "nothing"
        note = "" if process.judged else " (its own business)" if process.role == "engine" else " (no baseline yet)"
        lines.append(printable(f"{named}: {terms}, residual {human_bytes(process.residual_bytes)}{note}"))
    return lines


def _term(term: MemoryTerm) -> str:
    part = {"anon": "private", "shmem": "shared", "file": ""}[term.part]
    name = f"{term.name} ({part})" if part and term.name == "baseline" else term.name
    of = f" of {human_bytes(term.bound_bytes)}" if term.bytes != term.bound_bytes else ""
    return f"{name} {_NOTES.get(term.basis, '')}{human_bytes(term.bytes)}{of}"


def _arenas(reply: MemoryReply) -> list[str]:
    return [
        f"arena {arena.worker}: reserved {human_bytes(arena.reserved_bytes)}, used {human_bytes(arena.used_bytes)}, "
        f"free {human_bytes(arena.free_bytes)}"
        for arena in reply.arenas
    ]


def _history(processes: Sequence[MemoryProcess]) -> list[str]:
    lines: list[str] = []
    for process in processes:
        series = process.series
        rows = zip(
            series.time_unix_s,
            series.resident_bytes,
            series.anon_bytes,
            series.shmem_bytes,
            series.explained_bytes,
            strict=True,
        )
        cells = [
            (_time(at_s), *map(human_bytes, (resident, anon, shmem, explained, resident - explained)))
            for at_s, resident, anon, shmem, explained in rows
        ]
        if cells:
            title = f"{process.role} {process.name}".strip()
            head = ("time (UTC)", "resident", "private", "shared", "explained", "residual")
            lines += ["", printable(f"{title}, pid {process.pid}:"), *table(head, cells)]
    return lines


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
