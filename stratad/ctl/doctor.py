"""``stratactl doctor``: examine the host, the installation and the daemon, and name a fix for each trouble."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from stratad.ctl.connection import Connect, Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.findings import Check, State
from stratad.ctl.output import Answer

_EXIT: Final[dict[State, ExitCode]] = {
    State.OK: ExitCode.OK,
    State.WARN: ExitCode.DEGRADED,
    State.FAIL: ExitCode.UNHEALTHY,
}
Examine = Callable[[], Iterable[Check]]


def doctor(target: Target, connect: Connect, *, config_file: Path | None, try_torch: bool) -> Answer:
    """Run every check; one that breaks is itself a finding, never the end of the others."""
    from stratad.ctl import (  # noqa: PLC0415 - only here
        doctor_daemon,
        doctor_host,
        doctor_install,
        doctor_memory,
        doctor_segments,
        doctor_service,
    )

    asked = functools.cache(lambda: doctor_daemon.daemon(target, connect))
    examinations: dict[str, Examine] = {
        "devices": lambda: doctor_host.devices(try_torch=try_torch),
        "kernel": doctor_host.kernel,
        "user": lambda: doctor_service.user(doctor_daemon.owner(target).uid),
        "service": lambda: doctor_service.unit(doctor_daemon.daemon_pid(target)),
        "memory": lambda: doctor_memory.memory(target, config_file, asked().stats),
        "segments": lambda: doctor_segments.segments(target, asked().stats),
        "packages": doctor_install.packages,
        "sockets": lambda: doctor_daemon.sockets(target),
        "daemon": lambda: (asked().check,),
        "copies": lambda: doctor_daemon.copies(asked().stats),
    }
    return report(examinations)


def report(examinations: dict[str, Examine]) -> Answer:
    """All findings as one answer; the exit code is that of the worst."""
    checks = [check for name, examine in examinations.items() for check in _guarded(name, examine)]
    worst = max((check.state for check in checks), key=list(State).index, default=State.OK)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.state.value:<4}  {check.name}: {check.what}")
        if check.fix and check.state is not State.OK:
            lines.append(f"      fix: {check.fix}")
    return Answer(_EXIT[worst], lines, {"state": worst.value, "checks": [check.as_json() for check in checks]})


def _guarded(name: str, examine: Examine) -> list[Check]:
    try:
        return list(examine())
    except Exception as exc:  # noqa: BLE001 - one broken check must not hide the others
        return [Check(name, State.WARN, f"could not be examined: {type(exc).__name__}: {exc}", "report it")]
