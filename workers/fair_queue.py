"""Whose slice is next on a lane: small jobs first, engines in turns, and nobody waits for ever. Pure.

A lane looks here at each border of slices. *Small* jobs go before all others, the engines taking turns job by job; one
that has begun is finished. *Large* jobs of one engine go in order; those of several alternate by `quantum_slices`
slices, since each change costs the lane its pipeline. While a large job waits, small ones may take `share_s` seconds of
the lane; after that the large ones get as much time as they had.
"""

from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class _Place(NamedTuple):
    """Where a job stands: in which line, and in whose name."""

    engine: Hashable
    small: bool


class _Line(Generic[T]):
    """Jobs of several engines; the first engine's first job is next."""

    def __init__(self) -> None:
        self._engines: dict[Hashable, deque[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._engines)

    @property
    def engine_count(self) -> int:
        """Engines that have a job here."""
        return len(self._engines)

    @property
    def first(self) -> T:
        """The next job; there must be one."""
        return next(iter(self._engines.values()))[0]

    def add(self, job: T, engine: Hashable) -> None:
        """Behind the engine's others; an engine that has none comes last."""
        self._engines.setdefault(engine, deque()).append(job)

    def remove(self, job: T, engine: Hashable) -> None:
        """The job has ended or was given up."""
        jobs = self._engines[engine]
        jobs.remove(job)
        if not jobs:
            del self._engines[engine]

    def put_last(self, engine: Hashable) -> None:
        """The engine has had its turn."""
        jobs = self._engines.pop(engine, None)
        if jobs is not None:
            self._engines[engine] = jobs


class FairQueue(Generic[T]):
    """The jobs of one lane (see the module's text). A job is in it from `add` to `remove`."""

    def __init__(self, quantum_slices: int, share_s: float) -> None:
        self._quantum_slices: Final = quantum_slices
        self._share_s: Final = share_s
        self._places: dict[T, _Place] = {}
        self._small: _Line[T] = _Line()
        self._large: _Line[T] = _Line()
        self._current: T | None = None
        self._slices = 0  # that the first engine of the large jobs has had in its turn
        self._owed_s = 0.0  # that small jobs took while a large one waited
        self._paying = False

    def __len__(self) -> int:
        return len(self._places)

    def add(self, job: T, engine: Hashable, *, small: bool) -> None:
        """Take a job in."""
        self._places[job] = _Place(engine, small)
        (self._small if small else self._large).add(job, engine)

    def remove(self, job: T) -> None:
        """The job has ended or was given up: it gets no slice any more."""
        engine, small = self._places.pop(job)
        if small:
            self._small.remove(job, engine)
            self._small.put_last(engine)
        else:
            had_turn = self._large.first == job
            self._large.remove(job, engine)
            if had_turn:
                self._end_turn(engine)
        if self._current == job:
            self._current = None
        if not self._large:
            self._owed_s, self._paying = 0.0, False

    def next(self) -> T | None:
        """Whose slice is next; None: there is no job."""
        current = self._current
        if current is None or not self._places[current].small:
            self._current = self._choose()
        return self._current

    def ran(self, seconds: float, slices: int = 1) -> None:
        """The job that `next` named last, and that has not been removed, has had the lane for so long."""
        if self._current is None or not self._large:
            return
        if self._places[self._current].small:
            self._owed_s += seconds
            self._paying = self._paying or self._owed_s > self._share_s
        else:
            self._slices += slices
            self._owed_s = max(self._owed_s - seconds, 0.0)
            self._paying = self._paying and self._owed_s > 0.0

    def _choose(self) -> T | None:
        if self._small and not (self._large and self._paying):
            return self._small.first
        if not self._large:
            return None
        if self._slices >= self._quantum_slices and self._large.engine_count > 1:
            self._end_turn(self._places[self._large.first].engine)
        return self._large.first

    def _end_turn(self, engine: Hashable) -> None:
        self._large.put_last(engine)
        self._slices = 0
