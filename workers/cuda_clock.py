"""How long a lane's kernels and copies take by the device's own clock, for whoever asks for exact times."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

from shm.gpu_runtime import GpuRuntime
from workers.cuda_memory import Counts

# Spans that are not over yet and wait for somebody to look: of more than a few slices they never are.
_MOST_PENDING: Final = 64


class Step(Enum):
    """What a slice's time goes to."""

    DIGEST = "digest"
    GATHER = "gather"
    VERIFY = "verify"
    LINK = "link"


class DeviceClock:
    """Off it costs nothing. One thread uses it at a time; only `exact` may be set by another."""

    def __init__(self, runtime: GpuRuntime, counts: Counts) -> None:
        self._runtime = runtime
        self._counts = counts
        self._free: list[int] = []
        self._pending: deque[tuple[Step, int, int]] = deque()
        self.exact = False
        self.spent_s = dict.fromkeys(Step, 0.0)

    @contextmanager
    def span(self, step: Step, stream: int) -> Iterator[None]:
        """What is put on a stream inside counts for a step."""
        if not self.exact:
            yield
            return
        if len(self._pending) >= _MOST_PENDING:
            self._read_oldest()
        start, end = self._event(), self._event()
        try:
            self._runtime.event_record(start, stream)
            yield
            self._runtime.event_record(end, stream)
        except BaseException:
            self._free += [start, end]
            raise
        self._pending.append((step, start, end))

    def read(self) -> None:
        """Add up what is over; the lane's streams have been waited for."""
        while self._pending:
            self._read_oldest()

    def forget(self) -> None:
        """Leave out what was not read: its streams failed."""
        for _, start, end in self._pending:
            self._free += [start, end]
        self._pending.clear()

    def _read_oldest(self) -> None:
        step, start, end = self._pending.popleft()
        self._runtime.event_synchronize(end)
        self.spent_s[step] += self._runtime.elapsed_s(start, end)
        self._free += [start, end]

    def _event(self) -> int:
        if self._free:
            return self._free.pop()
        self._counts.events += 1
        return self._runtime.event_create(timing=True)

    def close(self) -> None:
        """Destroy its events."""
        self.forget()
        for event in self._free:
            self._runtime.event_destroy(event)
        self._counts.events -= len(self._free)
        self._free.clear()
