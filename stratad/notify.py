"""What the service manager (systemd) is told: that we serve, how we are, that we live, that we stop.

The protocol is sd_notify's: datagrams of NAME=value lines to the unix socket that ``$NOTIFY_SOCKET`` names. It is so
small that a library would be more to trust than these lines; those that there are do not know the watchdog, or block.

The loop that does the work calls `Notifier.beat` at the end of each of its turns, and pings leave from nowhere else: a
hung loop is silent, and a hung worker, which the loop only waits for, silences nothing.
"""

import logging
import math
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from ipc.logs import fields

log = logging.getLogger(__name__)

# The manager wants to hear from us once per interval; at a third of it, a ping may be late by more than its period.
PINGS_PER_WATCHDOG: Final = 3
# The status is for people.
STATUS_EVERY_S: Final = 1.0
RETRY_S: Final = 0.1
_MICROSECONDS: Final = 1_000_000


@dataclass(slots=True)
class Rhythm:
    """When the manager is to hear from us; free of I/O. A status that comes too soon after the last waits its turn."""

    ping_every_s: float = math.inf
    next_ping_s: float = -math.inf
    next_status_s: float = -math.inf
    status_waits: bool = False

    @classmethod
    def of_watchdog(cls, watchdog_s: float) -> "Rhythm":
        """Pings for a watchdog that bites after so long (infinite: there is none)."""
        return cls(watchdog_s / PINGS_PER_WATCHDOG, -math.inf if math.isfinite(watchdog_s) else math.inf)

    def ping_due(self, now_s: float) -> bool:
        """Whether to ping now."""
        return self.next_ping_s <= now_s

    def status_due(self, now_s: float) -> bool:
        """Whether to look at the status now; where not, `due_s` says when."""
        self.status_waits = now_s < self.next_status_s
        return not self.status_waits

    def pinged(self, now_s: float) -> None:
        """A ping has left."""
        self.next_ping_s = now_s + self.ping_every_s

    def looked(self, now_s: float) -> None:
        """The status was looked at, and told where it was new."""
        self.next_status_s = now_s + STATUS_EVERY_S

    @property
    def due_s(self) -> float:
        """When something is due (infinite: nothing waits for time)."""
        return min(self.next_ping_s, self.next_status_s if self.status_waits else math.inf)


class Notifier:
    """The way to the service manager. Where there is none everything here does nothing.

    It never waits and never fails: what the manager does not take now is tried again at a later turn. Owns `channel`.
    """

    def __init__(self, channel: socket.socket | None, address: str, watchdog_s: float) -> None:
        """See `take`."""
        self._socket = channel
        self._address = address
        self._rhythm = Rhythm.of_watchdog(watchdog_s if channel is not None else math.inf)
        self._owed: list[str] = []
        self._told = ""
        self._retry_s = -math.inf
        self._failing = False

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int) -> "Notifier":
        """The manager that `environ` names to process `pid`. Its variables are removed: children must not notify."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_s = _watchdog_s(environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", ""), pid)
        if address[:1] not in ("/", "@"):
            if address:
                log.warning("the service manager is not told anything: no unix socket", extra=fields(address=address))
            return cls(None, "", math.inf)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        channel.setblocking(False)
        return cls(channel, f"\0{address[1:]}" if address[0] == "@" else address, watchdog_s)

    # --- before the loop, and after it --------------------------------------------------------------------------------

    def starting(self, step: str, within_s: float) -> None:
        """The start is at a step that may take so long, whatever the manager allows."""
        self._send([_status(f"starting: {step}"), _extend(within_s)])

    def failed(self, why: str) -> None:
        """The start has failed."""
        self._send([_status(f"cannot start: {why}")])

    # --- in the loop --------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Clients are served. It leaves with the next beat, which proves that the loop turns."""
        self._owed.append("READY=1")

    def stopping(self, within_s: float) -> None:
        """The stop has begun and ends within so long, whatever the manager allows. It leaves with the next beat."""
        self._owed += ["STOPPING=1", _extend(within_s)]
        self._rhythm.next_status_s = -math.inf

    def beat(self, now_s: float, status: Callable[[], str]) -> None:
        """The loop has come round: tell what is due. `status` gives one line; it is told when it has changed."""
        if self._socket is None or now_s < self._retry_s:
            return
        lines = list(self._owed)
        ping = self._rhythm.ping_due(now_s)
        look = self._rhythm.status_due(now_s)
        text = _status(status()) if look else self._told
        if ping:
            lines.append("WATCHDOG=1")
        if text != self._told:
            lines.append(text)
        if lines and not self._send(lines):
            self._retry_s = now_s + RETRY_S
            return
        self._owed.clear()
        self._told = text
        if ping:
            self._rhythm.pinged(now_s)
        if look:
            self._rhythm.looked(now_s)

    @property
    def due_s(self) -> float:
        """When the next beat is needed (monotonic; infinite: it waits for nothing)."""
        due_s = -math.inf if self._owed else self._rhythm.due_s
        return math.inf if self._socket is None else max(due_s, self._retry_s)

    def close(self) -> None:
        """Say no more; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, lines: list[str]) -> bool:
        if self._socket is None:
            return True
        try:
            # Not connected: a manager that was started again has a new socket under the old name.
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as exc:
            if not self._failing:
                log.warning("the service manager cannot be told", extra=fields(why=str(exc)))
            self._failing = True
            return False
        self._failing = False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _watchdog_s(usec: str, owner: str, pid: int) -> float:
    """Seconds after which the manager's watchdog bites; infinite where there is none or it watches another process."""
    if not usec or (owner and owner != str(pid)):
        return math.inf
    if not (usec.isascii() and usec.isdigit()) or int(usec) == 0:
        log.warning("no watchdog: its interval is no number above 0", extra=fields(watchdog_usec=usec))
        return math.inf
    return int(usec) / _MICROSECONDS


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())


def _extend(within_s: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(within_s * _MICROSECONDS)}"
