"""Cycles of a daemon's life: start, submit, stop at a random instant, while one client goes through all of them.

Engines submit without a pause, each in a thread of its own with rows of its own, through a single client. The daemon is
started, and ended by SIGTERM or SIGKILL, time and again on the same directories. Checked: every operation ends and ends
once, whatever is restored holds the bytes of a version that was captured, and no daemon leaves a process or a segment
that the next one does not know. Whatever was published outlives them all.
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

from stratad.client import Captured, Client, Exchange, Restored, Ticket
from stratad.errors import Busy, Lost, PeerGone, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.wait import wait_until

LAYOUTS: Final = (slot_layout(), slot_layout(planes=2, row_bytes=160))
TOKENS: Final = 300
ROWS_EACH: Final = 512
PART_BYTES: Final = 1_100_000  # in two pieces
MARK: Final = "CYCLES_OF"
# Every operation is over long before, whatever becomes of the daemon, since the next one follows at once.
DEADLINE_S: Final = 30.0
# Of the daemons so many come to serve, however slow the host is; of the others some are ended while they start.
SERVING_SHARE: Final = 0.6
EXPECTED: Final = (Lost, PeerGone, Busy)
# What a client may be told of an image that was taken, or of a transit image, which ends with its daemon.
GONE: Final = ("unknown_conversation", "unknown_image")


class Story:
    """What a conversation may hold: the version that was published last, and those of which nobody knows."""

    def __init__(self) -> None:
        self._versions: list[object] = []
        self._may_be_gone = True

    def stored(self, version: object, outcome: str) -> None:
        """Somebody tried to store a version."""
        if outcome == "ok":
            self._versions = [version]
            self._may_be_gone = False
        elif outcome == "lost":
            self._versions.append(version)

    def taken(self, outcome: str) -> None:
        """Somebody tried to take it."""
        self._may_be_gone |= outcome in ("ok", "lost")

    def check(self, found: object, outcome: str) -> None:
        """Somebody tried to read it."""
        if outcome == "ok" and found not in self._versions:
            raise AssertionError("what was read is of no version that was stored")
        if outcome in GONE and not self._may_be_gone:
            raise AssertionError("an image that was published is gone")


class Submitter(threading.Thread):
    """One stream of operations on rows of its own. `wrong` says what was not as it should be."""

    def __init__(self, engine: FakeEngine, exchange: Exchange, number: int, seed: int) -> None:
        super().__init__(name=f"submitter-{number}")
        self.outcomes: Counter[str] = Counter()
        self.wrong = ""
        self._engine = engine
        self._exchange = exchange
        self._rows = range(number * ROWS_EACH, number * ROWS_EACH + TOKENS)
        self._spare = range(number * ROWS_EACH + 200, number * ROWS_EACH + 200 + TOKENS)
        self._conversation, self._parts = f"c{number}", f"p{number}"
        self._tokens = [number * 1_000_000 + token for token in range(TOKENS)]
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._captured, self._put_in = Story(), Story()
        self._operations: tuple[Callable[[], str], ...] = (
            self._capture,
            self._capture,
            self._restore,
            self._restore,
            self._take,
            self._slot_copy,
            self._put,
            self._get,
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

    def _end(self, ticket: Ticket[Captured] | Ticket[Restored]) -> str:
        """Wait for an operation's end and for its rows."""
        outcome = outcome_of(ticket.result)
        if not ticket.wait_rows_free(DEADLINE_S):
            raise AssertionError("rows are busy for ever")
        if not ticket.done():
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
        self._captured.stored(version, outcome)
        return outcome

    def _restore(self) -> str:
        self._write()
        outcome = self._end(self._engine.engine.restore(self._conversation, self._rows))
        self._captured.check(self._engine.contents(self._rows, TOKENS), outcome)
        return outcome

    def _take(self) -> str:
        self._write()
        outcome = self._end(self._engine.engine.take(self._conversation, self._rows))
        self._captured.check(self._engine.contents(self._rows, TOKENS), outcome)
        self._captured.taken(outcome)
        return outcome

    def _put(self) -> str:
        version = self._random.randbytes(PART_BYTES)

        def put() -> None:
            with self._exchange.put(self._parts, deadline_s=DEADLINE_S) as parts:
                parts.add("part", version)

        outcome = outcome_of(put)
        self._put_in.stored(version, outcome)
        return outcome

    def _get(self) -> str:
        found = bytearray(PART_BYTES)

        def get() -> None:
            with self._exchange.get(self._parts, deadline_s=DEADLINE_S) as parts:
                parts.read_into("part", found)

        outcome = outcome_of(get)
        self._put_in.check(found, outcome)
        return outcome

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


def outcome_of(call: Callable[[], object]) -> str:
    """``ok``, or the code of an error that a client must expect of a daemon that may end at any time."""
    try:
        call()
    except EXPECTED as error:
        return error.code
    except UsageError as error:
        if error.code not in GONE:
            raise
        return error.code
    return "ok"


class Cycles:
    """Runs cycles and keeps count. Use as a context manager, in a process that may start daemons."""

    def __init__(self, seed: int, submitters: int = 3) -> None:
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.slowest_end_s = 0.0
        self.daemon = DaemonProcess("cpu:2", {"ram.keep": "true"}, environ={MARK: str(os.getpid())})
        self._count = submitters
        self._client: Client
        self._engine: FakeEngine
        self._exchange: Exchange
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
        self._exchange = self._client.exchange("cpu:0", "parts", FINGERPRINT, 4 * PART_BYTES)
        self._submitters = [
            Submitter(self._engine, self._exchange, number, self.random.randrange(1 << 30))
            for number in range(self._count)
        ]
        for submitter in self._submitters:
            submitter.start()
        return self

    def cycle(self) -> None:
        """End the daemon that runs at a random instant, however far its start has come, and start the next."""
        if self.random.random() < SERVING_SHARE:
            wait_until(lambda: self._client.stats().health == "ok", DEADLINE_S)
            pause_s = self.random.uniform(0.0, 0.3)
        else:
            pause_s = self.random.uniform(0.0, 0.5)
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
            self._client.clear("parts")
            self._exchange.close()
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
                raise AssertionError(f"{submitter.wrong}\n{self.daemon.log[-6000:]}")


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
