"""Exit codes of stratactl, and the table of them that ``--help`` shows."""

from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """What a script may conclude from how stratactl ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    DEGRADED = 4
    UNHEALTHY = 5
    INTERRUPTED = 130


MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "the request failed; the error's code stands in brackets",
    ExitCode.USAGE: "wrong arguments, or the running daemon is another build than this stratactl",
    ExitCode.NO_DAEMON: "no daemon answered within the time-out",
    ExitCode.DEGRADED: "the daemon serves, but not everything works (status; doctor or memory with warnings)",
    ExitCode.UNHEALTHY: "the daemon or the host has failed (status, doctor)",
    ExitCode.INTERRUPTED: "interrupted",
}


def help_text() -> str:
    """The table for the end of ``--help``."""
    return "exit codes:\n" + "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())
