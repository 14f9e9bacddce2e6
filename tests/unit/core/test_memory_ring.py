"""The series of samples: bounded, exact after any number of samples, thinned for the wire."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratad.core.memory_ring import SLOPE_LEAST_MS, Ring, Sample, series_bytes

HOUR_MS = 3_600_000


def sample(time_ms: int, resident: int, explained: int = 0) -> Sample:
    return Sample(time_ms, resident, resident // 2, resident // 4, explained)


def ring_of(keep: int, samples: list[Sample]) -> Ring:
    ring = Ring(keep)
    for one in samples:
        ring.add(one)
    return ring


def test_the_last_samples_are_kept_in_order() -> None:
    samples = [sample(1000 * n, 100 + n) for n in range(25)]
    ring = ring_of(10, samples)
    assert len(ring) == 10
    assert [ring.at(n) for n in range(10)] == samples[-10:]
    assert ring.at(-1) == samples[-1]
    assert ring.window_ms == 9000
    assert (ring.least_bytes, ring.most_bytes) == (115, 124)


def test_an_empty_ring() -> None:
    ring = Ring(3)
    assert (len(ring), ring.window_ms, ring.least_bytes, ring.most_bytes) == (0, 0, 0, 0)
    assert ring.slope_per_hour is None
    assert ring.thinned(5) == []


def test_a_series_takes_what_is_said_and_never_more() -> None:
    ring = Ring(720)
    before = sum(sys.getsizeof(column) for column in ring._columns)
    for n in range(2000):
        ring.add(sample(n, n))
    after = sum(sys.getsizeof(column) for column in ring._columns)
    assert after == before
    empty = 5 * sys.getsizeof(type(ring._columns[0])("q"))
    assert after - empty == series_bytes(720) == 28_800


def test_slopes_are_those_of_the_window() -> None:
    # First a steep rise that falls out of the window, then 36 MB an hour of which 24 are explained.
    steep = [sample(n * 10_000, n * 10**9) for n in range(50)]
    gentle = [sample((50 + n) * 10_000, 5 * 10**9 + n * 100_000, n * 66_670) for n in range(100)]
    ring = ring_of(100, steep + gentle)
    assert ring.slope_per_hour == pytest.approx(36e6)
    assert ring.residual_slope_per_hour == pytest.approx(36e6 - 6_667 * 3600)


def test_a_constant_has_no_slope() -> None:
    assert ring_of(100, [sample(n * 10_000, 77) for n in range(100)]).slope_per_hour == 0


def test_a_short_window_has_no_slope_yet() -> None:
    # What a start takes, seen for two minutes, is no growth of gigabytes an hour.
    assert ring_of(100, [sample(n * 5000, min(n, 4) * 10**7) for n in range(25)]).slope_per_hour is None
    ring = ring_of(10, [sample(0, 1), sample(SLOPE_LEAST_MS - 1, 2)])
    assert ring.slope_per_hour is None
    assert ring.residual_slope_per_hour is None
    ring.add(sample(SLOPE_LEAST_MS, 2))
    assert ring.slope_per_hour is not None


@pytest.mark.parametrize(("limit", "times"), [(0, []), (1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))])
def test_thinned_keeps_both_ends(limit: int, times: list[int]) -> None:
    ring = ring_of(20, [sample(n, n) for n in range(10)])
    assert [one.time_ms for one in ring.thinned(limit)] == times
    assert len(ring.thinned(99)) == 10


@given(
    keep=st.integers(1, 12),
    points=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 2**45), st.integers(0, 2**45)), max_size=40),
)
def test_the_running_sums_are_exact(keep: int, points: list[tuple[int, int, int]]) -> None:
    ring = ring_of(keep, [sample(*point) for point in points])
    ring.validate()
    assert len(ring) == min(keep, len(points))
