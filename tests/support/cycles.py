"""Cycles of a daemon's life: start, submit, stop at a random instant, while one client goes through all of them.

Engines submit without a pause, each in a thread of its own with rows of its own, through a single client. The daemon is
started, and ended by SIGTERM or SIGKILL, time and again on the same directories. Checked: every operation ends and ends
once, whatever is restored holds the bytes of a version that was captured, and no daemon leaves a process or a segment
that the next one does not know.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stratad.client import Client
from stratad.errors import Busy, Lost, PeerGone, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.wait import wait_until

LAYOUTS: Final = (slot_layout(), slot_layout(planes=2, row_bytes=160))
TOKENS: Final = 300
ROWS_EACH: Final = 512
MARK: Final = "CYCLES_OF"
# Every operation is over long before, whatever becomes of the daemon, since the next one follows at once.
DEADLINE_S: Final = 30.0
EXPECTED: Final = (Lost, PeerGone, Busy)
# What a client may be told of an image that ended with its daemon, or of a transit image.
GONE: Final = ("unknown_conversation", "unknown_image")


class Submitter(threading.Thread):
    """One stream of operations on rows of its own. `wrong` says what was not as it should be."""

    def __init__(self, engine: FakeEngine, number: int, seed: int) -> None:
        super().__init__(name=f"submitter-{number}")
        self.outcomes: Counter[str] = Counter()
        self.wrong = ""
        self._engine = engine
        self._rows = range(number * ROWS_EACH, number * ROWS_EACH + TOKENS)
        self._spare = range(number * ROWS_EACH + 200, number * ROWS_EACH + 200 + TOKENS)
        self._conversation = f"c{number}"
        self._tokens = [number * 1_000_000 + token for token in range(TOKENS)]
        self._random = random.Random(seed)
        self._over = threading.Event()
        # What the conversation may hold: the version that was published last, and those of which nobody knows.
        self._versions: list[list[list[bytes]]] = []
        self._operations: tuple[Callable[[], str], ...] = (
            self._capture,
            self._capture,
            self._restore,
            self._restore,
            self._take,
            self._slot_copy,
            self._look,
        )

    def finish(self) -> None:
        """Let it end after the operation in hand."""
        self._over.set()

    def run(self) -> None:
        """Submit until told to finish."""
        try:
            while not self._over.is_set():
                operation = self._random.choice(self._operations)
                started_s = time.monotonic()
                outcome = operation()
                self.outcomes[f"{operation.__name__.strip('_')}: {outcome}"] += 1
                took_s = time.monotonic() - started_s
                if took_s > DEADLINE_S:
                    raise AssertionError(f"{operation.__name__} took {took_s:.1f} s")
        except Exception as exc:  # noqa: BLE001 - a thread's failure is the test's
            self.wrong = f"{self.name}: {type(exc).__name__}: {exc}"

    def _end(self, ticket: "object") -> str:
        """Wait for an operation's end and for its rows."""
        result = ticket.result  # type: ignore[attr-defined]
        try:
            result()
            outcome = "ok"
        except EXPECTED as error:
            outcome = error.code
        except UsageError as error:
            if error.code not in GONE:
                raise
            outcome = error.code
        if not ticket.wait_rows_free(DEADLINE_S):  # type: ignore[attr-defined]
            raise AssertionError("rows are busy for ever")
        if not ticket.done():  # type: ignore[attr-defined]
            raise AssertionError("an operation that ended is not done")
        return outcome

    def _write(self) -> list[list[bytes]]:
        """A new version in the rows."""
        for layout, pool in zip(self._engine.layouts, self._engine.pools, strict=True):
            for plane in layout.groups[0].planes:
                at = plane.offset_bytes + self._rows.start * plane.row_stride_bytes
                size = TOKENS * plane.row_bytes
                pool.buffer[at : at + size] = self._random.randbytes(size)
        return self._engine.contents(self._rows, TOKENS)

    def _capture(self) -> str:
        version = self._write()
        outcome = self._end(self._engine.engine.capture(self._conversation, self._tokens, self._rows))
        if outcome == "ok":
            self._versions = [version]
        elif outcome == "lost":
            self._versions.append(version)
        return outcome

    def _restore(self) -> str:
        self._write()
        outcome = self._end(self._engine.engine.restore(self._conversation, self._rows))
        self._check(outcome)
        return outcome

    def _take(self) -> str:
        self._write()
        outcome = self._end(self._engine.engine.take(self._conversation, self._rows))
        self._check(outcome)
        return outcome

    def _check(self, outcome: str) -> None:
        if outcome == "ok" and self._engine.contents(self._rows, TOKENS) not in self._versions:
            raise AssertionError("restored bytes are of no version that was captured")

    def _slot_copy(self) -> str:
        version = self._write()
        engine = self._engine.engine
        first = self._end(engine.slot_to(TOKENS, self._rows, slot=self._rows.start))
        if first != "ok":
            return first
        second = self._end(engine.slot_from(self._rows.start, self._spare, slot=self._rows.start))
        if second == "ok" and self._engine.contents(self._spare, TOKENS) != version:
            raise AssertionError("a slot copy brought other bytes")
        return second

    def _look(self) -> str:
        found = self._engine.engine.lookup(self._tokens)
        return "miss" if found is None else "hit"


class Cycles:
    """Runs cycles and keeps count. Use as a context manager, in a process that may start daemons."""

    def __init__(self, seed: int, submitters: int = 3) -> None:
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.slowest_end_s = 0.0
        self.daemon = DaemonProcess("cpu:2", environ={MARK: str(os.getpid())})
        self._count = submitters
        self._client: Client
        self._engine: FakeEngine
        self._submitters: list[Submitter] = []

    @property
    def outcomes(self) -> Counter[str]:
        """How operations ended, by kind."""
        return sum((submitter.outcomes for submitter in self._submitters), Counter())

    def __enter__(self) -> "Cycles":
        self.daemon.start()
        self._client = self.daemon.client(deadline_s=DEADLINE_S)
        self._engine = FakeEngine(self._client, LAYOUTS)
        self._engine.fill()
        self._engine.register()
        self._submitters = [
            Submitter(self._engine, number, self.random.randrange(1 << 30)) for number in range(self._count)
        ]
        for submitter in self._submitters:
            submitter.start()
        return self

    def cycle(self) -> None:
        """End the daemon that runs at a random instant, however far its start has come, and start the next."""
        pause_s = self.random.choice((self.random.uniform(0.0, 0.35), self.random.uniform(0.3, 0.8)))
        threading.Event().wait(pause_s)
        numbers = self.random.choice(
            ((signal.SIGTERM,), (signal.SIGKILL,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGKILL))
        )
        ended_s = time.monotonic()
        for number in numbers:
            self.daemon.signal(number)
        status = self.daemon.ended()
        self.slowest_end_s = max(self.slowest_end_s, time.monotonic() - ended_s)
        self.ends[f"{'+'.join(number.name for number in numbers)}: {status}"] += 1
        if status not in (0, -signal.SIGKILL, -signal.SIGTERM):  # the last: before Python could catch it
            raise AssertionError(f"the daemon ended with status {status}:\n{self.daemon.log[-4000:]}")
        wait_until(lambda: not marked_processes(), 5.0, "an end of all processes of the daemon")
        self._raise_wrong()
        self.daemon.launch()

    def __exit__(self, *_: object) -> None:
        for submitter in self._submitters:
            submitter.finish()
        for submitter in self._submitters:
            submitter.join(2 * DEADLINE_S)
        stuck = [submitter.name for submitter in self._submitters if submitter.is_alive()]
        try:
            if stuck:
                raise AssertionError(f"operations without an end: {stuck}")
            self._raise_wrong()
            if late := self._client.statistics()["unknown_replies"]:
                raise AssertionError(f"{late} replies to calls that had ended")
            self._client.clear("ns")
            self._engine.engine.unregister()
            self._engine.close()
            self._client.close()
            if status := self.daemon.stop():
                raise AssertionError(f"the last daemon ended with status {status}")
            if left := self.daemon.segments():
                raise AssertionError(f"left in /dev/shm: {left}")
        finally:
            self.daemon.close()

    def _raise_wrong(self) -> None:
        for submitter in self._submitters:
            if submitter.wrong:
                raise AssertionError(submitter.wrong)


def marked_processes() -> list[int]:
    """Processes of daemons that were started here, but for zombies."""
    wanted = f"{MARK}={os.getpid()}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found
