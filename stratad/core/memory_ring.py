"""A bounded series of memory samples of one process, with its slopes.

Every column is an array made at its full length once, so that what a series takes is known beforehand and never grows.
The sums behind the slopes are whole numbers: taking an old sample out leaves no rounding behind.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

COLUMNS: Final = 5
ITEM_BYTES: Final = 8
_MS_PER_HOUR: Final = 3_600_000
# A slope is told by the hour. Over two minutes it would be what the start took, times thirty: 50 MiB became 1.5 GiB.
SLOPE_LEAST_MS: Final = 600_000


class Sample(NamedTuple):
    """One row: monotonic milliseconds, and bytes."""

    time_ms: int
    resident_bytes: int
    anon_bytes: int
    shmem_bytes: int
    explained_bytes: int


def series_bytes(keep: int) -> int:
    """Bytes that the samples of one process take, filled or not."""
    return keep * COLUMNS * ITEM_BYTES


class _Line:
    """Sums for the least-squares slope of one quantity over time."""

    __slots__ = ("n", "t", "tt", "ty", "y")

    def __init__(self) -> None:
        self.n = self.t = self.tt = self.y = self.ty = 0

    def add(self, time_ms: int, value: int, sign: int) -> None:
        """Take a point in (`sign` 1) or out (-1)."""
        self.n += sign
        self.t += sign * time_ms
        self.tt += sign * time_ms * time_ms
        self.y += sign * value
        self.ty += sign * time_ms * value

    @property
    def per_hour(self) -> float:
        """Slope; 0 where all points lie at one time."""
        spread = self.n * self.tt - self.t * self.t
        return _MS_PER_HOUR * (self.n * self.ty - self.t * self.y) / spread if spread else 0.0


class Ring:
    """The last `keep` samples."""

    def __init__(self, keep: int) -> None:
        assert keep > 0
        self._keep = keep
        self._columns = tuple(array("q", [0]) * keep for _ in range(COLUMNS))
        self._count = 0
        self._next = 0
        self._resident = _Line()
        self._residual = _Line()

    def __len__(self) -> int:
        return self._count

    def add(self, sample: Sample) -> None:
        """Append; the oldest sample of a full ring goes."""
        if self._count == self._keep:
            self._sum(self.at(0), -1)
        else:
            self._count += 1
        for column, value in zip(self._columns, sample, strict=True):
            column[self._next] = value
        self._next = (self._next + 1) % self._keep
        self._sum(sample, 1)

    def _sum(self, sample: Sample, sign: int) -> None:
        self._resident.add(sample.time_ms, sample.resident_bytes, sign)
        self._residual.add(sample.time_ms, sample.resident_bytes - sample.explained_bytes, sign)

    def at(self, number: int) -> Sample:
        """Sample `number`, counted from the oldest; -1 is the latest."""
        assert -self._count <= number < self._count
        place = (self._next - self._count + number % self._count) % self._keep
        return Sample(*(column[place] for column in self._columns))

    @property
    def window_ms(self) -> int:
        """Time between the oldest and the latest sample."""
        return self.at(-1).time_ms - self.at(0).time_ms if self._count else 0

    @property
    def least_bytes(self) -> int:
        """Least resident memory of the window."""
        return min(self._filled(), default=0)

    @property
    def most_bytes(self) -> int:
        """Most resident memory of the window."""
        return max(self._filled(), default=0)

    def _filled(self) -> Sequence[int]:
        return self._columns[1][: self._count]  # until the ring is full it is filled from place 0

    @property
    def slope_per_hour(self) -> float | None:
        """Bytes an hour by which resident memory grows; None while the window is too short to say."""
        return self._resident.per_hour if self.window_ms >= SLOPE_LEAST_MS else None

    @property
    def residual_slope_per_hour(self) -> float | None:
        """Bytes an hour by which the residual grows; None while the window is too short to say."""
        return self._residual.per_hour if self.window_ms >= SLOPE_LEAST_MS else None

    def thinned(self, limit: int) -> list[Sample]:
        """At most `limit` samples, evenly spread, the oldest and the latest among them (one: the latest)."""
        count = self._count
        if limit <= 0 or not count:
            return []
        if count <= limit:
            return [self.at(number) for number in range(count)]
        if limit == 1:
            return [self.at(-1)]
        return [self.at(number * (count - 1) // (limit - 1)) for number in range(limit)]

    def validate(self) -> None:
        """Check the running sums by a recount."""
        resident, residual = _Line(), _Line()
        for number in range(self._count):
            sample = self.at(number)
            resident.add(sample.time_ms, sample.resident_bytes, 1)
            residual.add(sample.time_ms, sample.resident_bytes - sample.explained_bytes, 1)
        for ours, recount in ((self._resident, resident), (self._residual, residual)):
            pairs = [(getattr(ours, name), getattr(recount, name)) for name in _Line.__slots__]
            assert all(a == b for a, b in pairs), f"sums out of step: {pairs}"
