"""What ``stratactl bench control`` has one client do, and how long each piece of it took."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from ipc.messages import StageOutcome
from stratad._rows import StageRowsLike
from stratad.bench.cpu_engine import CpuEngine, token_ids
from stratad.bench.cpu_meter import CpuMeter
from stratad.bench.report import Row, latency_fields, milliseconds

CONVERSATIONS: Final = 16
# Operations between two looks at the supervisor's clock, which costs some ten microseconds.
METERED: Final = 50


class Samples:
    """What was measured of one kind of operation, over several turns."""

    def __init__(self, meter: CpuMeter) -> None:
        self.seconds: Final[list[float]] = []
        self._lane_s: Final[list[float]] = []
        self._cpu_s: Final[list[float]] = []  # of one operation, in each metered row of them
        self._meter = meter

    def measure(
        self, count: int, operation: Callable[[], Sequence[StageOutcome]], before: Callable[[], None] | None = None
    ) -> None:
        """Do `operation`, which tells what became of each stage, `count` times; `before` each of them what is to cost
        it nothing.
        """
        for done in range(0, count, METERED):
            times = min(METERED, count - done)
            before_s = self._meter.read_s()
            for _ in range(times):
                if before is not None:
                    before()
                started_s = time.perf_counter()
                outcomes = operation()
                self.seconds.append(time.perf_counter() - started_s)
                self._lane_s.append(max((outcome.lane_s for outcome in outcomes), default=0.0))
            after_s = self._meter.read_s()
            if before_s is not None and after_s is not None:
                self._cpu_s.append((after_s - before_s) / times)

    def note_cpu(self, cpu_s: float) -> None:
        """The supervisor took so long for each of some operations that others measured."""
        self._cpu_s.append(cpu_s)

    def fields(self, *, lanes: bool = False) -> Row:
        """Percentiles of the latency, and the median of the supervisor's processor time an operation. With `lanes` also
        what passed outside of the slowest stage's lane.
        """
        row: Row = {**latency_fields(self.seconds), "supervisor_cpu_ms_per_op": None}
        if self._cpu_s:
            row["supervisor_cpu_ms_per_op"] = milliseconds(statistics.median(self._cpu_s))
        if lanes:
            outside_s = [took_s - lane_s for took_s, lane_s in zip(self.seconds, self._lane_s, strict=True)]
            row["outside_lane_p50_ms"] = milliseconds(statistics.median(outside_s))
        return row


class Work:
    """Captures, restores and look-ups of one engine. Conversations take turns, so that each capture replaces an image
    and budget is no bound. `rows` are those of every slot, in whatever form an engine would pass them.
    """

    def __init__(
        self, engine: CpuEngine, rows: Sequence[StageRowsLike] | None = None, *, prefix: str = "", first_token: int = 0
    ) -> None:
        self._engine = engine
        self._rows: Sequence[StageRowsLike] = engine.rows if rows is None else rows
        self._names = [f"{prefix}conversation-{number}" for number in range(CONVERSATIONS)]
        self._tokens = [token_ids(engine.tokens, first_token + number) for number in range(CONVERSATIONS)]
        # What each conversation's image must hold: the slot that it was captured from, and its bytes then.
        self._slots: dict[int, int] = {}
        self._expected: dict[int, Sequence[bytes]] = {}
        self._count = self._restored = self._looked_up = 0

    def capture(self) -> Sequence[StageOutcome]:
        """Capture the next conversation, of bytes that nobody has captured before, up to the published image."""
        conversation, slot = self._count % CONVERSATIONS, self._count % self._engine.slots
        engine = self._engine.engine
        ticket = engine.capture(self._names[conversation], self._tokens[conversation], self._rows[slot], slot=slot)
        self._slots[conversation] = slot
        return ticket.result().stages

    def stamp(self) -> None:
        """Make the bytes of the next capture unlike any before. Not a part of what is measured."""
        self._count += 1
        self._engine.stamp(self._count % self._engine.slots, self._count)

    def restore(self) -> Sequence[StageOutcome]:
        """Restore the next conversation, up to verified rows."""
        known = sorted(self._slots)
        self._restored += 1
        conversation, slot = known[self._restored % len(known)], self._restored % self._engine.slots
        engine = self._engine.engine
        return engine.restore(self._names[conversation], self._rows[slot], slot=slot).result().stages

    def lookup(self) -> Sequence[StageOutcome]:
        """Look the next conversation's tokens up."""
        self._looked_up += 1
        wanted = self._looked_up % len(self._slots)
        match = self._engine.engine.lookup(self._tokens[sorted(self._slots)[wanted]])
        if match is None or match.tokens != self._engine.tokens:
            raise AssertionError(f"a look-up of what was captured found {match}")
        return ()

    def note_last(self) -> None:
        """Remember the bytes of the slot that was captured last, before a restore overwrites them."""
        last = self._count % CONVERSATIONS
        self._expected = {last: self._engine.digests(self._slots[last])}

    def last_restore_is_exact(self) -> bool:
        """Restore the image captured last into its slot, wiped, and compare every byte. In another slot, whose rows may
        lie in another order, the same bytes would lie elsewhere.
        """
        ((conversation, expected),) = self._expected.items()
        slot = self._slots[conversation]
        self._engine.zero(slot)
        engine = self._engine.engine
        engine.restore(self._names[conversation], self._rows[slot], slot=slot).result()
        return tuple(expected) == self._engine.digests(slot)
