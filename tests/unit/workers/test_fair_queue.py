"""Whose slice is next: small jobs first, engines in turns, and neither sort starves the other."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from workers.fair_queue import FairQueue

QUANTUM, SHARE_S = 4, 0.05


def queue() -> FairQueue[str]:
    return FairQueue(QUANTUM, SHARE_S)


def slices(fair: FairQueue[str], count: int, seconds: float = 0.01) -> list[str]:
    """Who gets the next slices, each of so many seconds."""
    found: list[str] = []
    for _ in range(count):
        job = fair.next()
        assert job is not None
        fair.ran(seconds)
        found.append(job)
    return found


def test_a_lone_job_goes_on() -> None:
    fair = queue()
    assert fair.next() is None
    fair.add("L", "a", small=False)
    assert slices(fair, 100) == ["L"] * 100
    fair.remove("L")
    assert fair.next() is None
    assert len(fair) == 0


def test_large_jobs_of_two_engines_alternate_by_quanta() -> None:
    fair = queue()
    fair.add("A", "a", small=False)
    fair.add("B", "b", small=False)
    assert slices(fair, 12) == ["A"] * 4 + ["B"] * 4 + ["A"] * 4


def test_a_job_that_was_alone_has_had_its_turn_when_another_comes() -> None:
    fair = queue()
    fair.add("A", "a", small=False)
    assert slices(fair, 6) == ["A"] * 6
    fair.add("B", "b", small=False)
    assert slices(fair, 5) == ["B"] * 4 + ["A"]


def test_large_jobs_of_one_engine_go_in_order() -> None:
    fair = queue()
    fair.add("A1", "a", small=False)
    fair.add("A2", "a", small=False)
    assert slices(fair, 9) == ["A1"] * 9
    fair.add("B", "b", small=False)
    assert slices(fair, 8) == ["B"] * 4 + ["A1"] * 4
    fair.remove("A1")
    fair.next()
    assert slices(fair, 8) == ["B"] * 4 + ["A2"] * 4


def test_an_engine_that_asks_for_much_gets_no_more_than_another() -> None:
    fair = queue()
    for number in range(9):
        fair.add(f"A{number}", "a", small=False)
    fair.add("B", "b", small=False)
    had = Counter(job[0] for job in slices(fair, 80))
    assert had == {"A": 40, "B": 40}


def test_a_small_job_goes_before_a_large_one_that_has_begun_and_is_finished_first() -> None:
    fair = queue()
    fair.add("L", "a", small=False)
    assert slices(fair, 3) == ["L"] * 3
    fair.add("s", "a", small=True)
    fair.add("t", "b", small=True)
    assert slices(fair, 3) == ["s"] * 3
    fair.remove("s")
    assert slices(fair, 1) == ["t"]
    fair.remove("t")
    assert slices(fair, 3) == ["L"] * 3


def test_small_jobs_of_several_engines_take_turns_job_by_job() -> None:
    fair = queue()
    for job in ("a1", "a2", "a3", "b1", "c1"):
        fair.add(job, job[0], small=True)
    order: list[str] = []
    while len(fair):
        order += slices(fair, 1)
        fair.remove(order[-1])
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_a_stream_of_small_jobs_leaves_a_large_one_half_of_the_time() -> None:
    fair = queue()
    fair.add("L", "a", small=False)
    had = {"s": 0.0, "L": 0.0}
    waited_s = worst_s = 0.0
    for number in range(2000):
        fair.add(f"s{number}", number % 3, small=True)
        job = fair.next()
        assert job is not None
        seconds = 0.01 if job == "L" else 0.002
        fair.ran(seconds)
        had[job[0]] += seconds
        waited_s = 0.0 if job == "L" else waited_s + seconds
        worst_s = max(worst_s, waited_s)
        if job != "L":
            fair.remove(job)
    assert 0.8 < had["L"] / had["s"] < 1.2
    assert worst_s <= SHARE_S + 0.002 + 1e-9


def test_small_jobs_get_in_between_when_the_large_one_has_had_its_share() -> None:
    """The other direction: after the large one has been paid, the next small one waits for one slice at most."""
    fair = queue()
    fair.add("L", "a", small=False)
    fair.add("s1", "b", small=True)
    assert slices(fair, 1, 0.06) == ["s1"]
    fair.remove("s1")
    fair.add("s2", "b", small=True)
    assert slices(fair, 6, 0.01) == ["L"] * 6
    assert fair.next() == "s2"


def test_nothing_is_owed_once_no_large_job_waits() -> None:
    fair = queue()
    fair.add("L", "a", small=False)
    fair.add("s1", "b", small=True)
    assert slices(fair, 1, 1.0) == ["s1"]
    fair.remove("s1")
    fair.remove("L")
    fair.add("M", "a", small=False)
    fair.add("s2", "b", small=True)
    assert fair.next() == "s2"


def test_who_is_given_up_gets_no_slice() -> None:
    fair = queue()
    for job, engine in (("A", "a"), ("B", "b"), ("C", "c")):
        fair.add(job, engine, small=False)
    assert slices(fair, 2) == ["A"] * 2
    fair.remove("B")
    assert slices(fair, 6) == ["A"] * 2 + ["C"] * 4
    fair.remove("C")
    fair.remove("A")
    assert fair.next() is None


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 12), st.integers(0, 20)), max_size=30))
def test_every_job_ends_and_gets_just_its_slices(jobs: list[tuple[int, bool, int, int]]) -> None:
    fair: FairQueue[int] = FairQueue(QUANTUM, SHARE_S)
    left: dict[int, int] = {}
    coming = sorted(range(len(jobs)), key=lambda n: jobs[n][3])
    for tick in range(2000):
        while coming and jobs[coming[0]][3] <= tick:
            number = coming.pop(0)
            engine, small, count, _ = jobs[number]
            fair.add(number, engine, small=small)
            left[number] = count
        assert len(fair) == len(left)
        job = fair.next()
        assert (job is None) == (not left)
        if job is None:
            if not coming:
                return
            continue
        fair.ran(0.01)
        left[job] -= 1
        if left[job] == 0:
            del left[job]
            fair.remove(job)
    raise AssertionError(f"never served: {left}")
