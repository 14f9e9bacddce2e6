"""Which devices `--cards` names, and what the links to them are said to do."""

from collections.abc import Sequence

import pytest

from stratad.bench import links
from stratad.bench.cards import Cards, choose_cards
from stratad.bench.isolate import CALM, KILLS, _Bench
from stratad.bench.isolate import _ratios as isolate_ratios
from stratad.bench.isolate_wire import Loss, Worked
from stratad.bench.links import BOTH, CAPTURE, CpuLinks, rates, survey
from stratad.bench.report import Row
from stratad.ctl.output import CommandError


class Host:
    """A host with four GPUs."""

    def count(self) -> int:
        return 4

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("all", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("2", ("cuda:0", "cuda:1")),
        ("cuda:2", ("cuda:2",)),
        ("cuda:3, cuda:1", ("cuda:3", "cuda:1")),
    ],
)
def test_gpus_that_are_named(wanted: str, names: tuple[str, ...]) -> None:
    cards = choose_cards(wanted, Host())
    assert cards.names == names
    assert cards.on_cuda
    assert cards.devices == ",".join(f"GPU-{name[-1]}" for name in names)


@pytest.mark.parametrize(
    "wanted",
    ["0", "5", "-1", "9" * 12, "cuda:4", "cuda:0,cuda:4", "cuda:0,cuda:0", "cpu:0", "cuda:", "", "some", "cuda:0,"],
)
def test_gpus_that_are_not_there_are_refused(wanted: str) -> None:
    with pytest.raises(CommandError) as caught:
        choose_cards(wanted, Host())
    assert f"--cards {wanted}" in caught.value.what
    assert caught.value.fix


def test_cpu_devices() -> None:
    cards = choose_cards("3", None)
    assert (cards.names, cards.devices, cards.on_cuda) == (("cpu:0", "cpu:1", "cpu:2"), "cpu:3", False)
    assert choose_cards("cpu:0,cpu:1", None).names == ("cpu:0", "cpu:1")
    assert choose_cards("all", None).devices == "cpu:4"
    for wanted in ("cpu:1", "cuda:0", "65"):
        with pytest.raises(CommandError):
            choose_cards(wanted, None)


def test_stages_lie_on_the_cards_in_turn() -> None:
    cards = Cards(("cuda:1", "cuda:3"), ("GPU-1", "GPU-3"))
    assert cards.of_stages(2) == ("cuda:1", "cuda:3")
    assert cards.of_stages(3) == ("cuda:1", "cuda:3", "cuda:1")


class KnownLinks:
    """Links of 8 bytes: a card's copy takes a second alone, and two at once; the host's clock sees one more."""

    size_bytes = 8

    def seconds(self, cards: Sequence[int], way: str) -> list[float]:
        each_s = 1.0 if len(cards) == 1 else 2.0
        return [*[each_s] * len(cards), each_s + 1.0]

    def close(self) -> None:
        """Nothing is held."""


def test_rates_count_all_that_is_moved() -> None:
    assert rates(KnownLinks(), [0, 1], CAPTURE) == [4.0, 4.0, 8 * 2 / 3]
    assert rates(KnownLinks(), [0], BOTH) == [16.0, 8.0]


def test_a_survey_sets_all_at_once_against_each_alone() -> None:
    *each, total = survey(KnownLinks(), ["a", "b"], [CAPTURE])
    assert [(row["card"], row["at_once_over_alone"]) for row in each] == [("a", 0.5), ("b", 0.5)]
    assert (total["card"], total["at_once_over_alone"]) == ("all", round(8 * 2 / 3 / 16, 4))


def test_the_plain_copies_are_real() -> None:
    made = CpuLinks(2, 1 << 16)
    try:
        assert len(made.seconds([0, 1], BOTH)) == 3
        assert all((target == 1).all() for _, target in made._pairs)
    finally:
        made.close()


def test_links_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert links.main(["--device", "cpu", "--cards", "cuda:0"]) == 2
    assert "--cards cuda:0: no such cpu devices" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        links.main(["--device", "cpu", "--mib", "0"])
    assert "--mib must be at least 1, got 0" in capsys.readouterr().err


def _latency(number: int, phase: str, card: str, p99_ms: float | None, lost: int = 0) -> Row:
    return {
        "round": number, "what": "latency", "phase": phase, "card": card, "arm": "capture small",
        "p50_ms": 1.0, "p99_ms": p99_ms, "lost": lost,
    }  # fmt: skip


def test_the_worst_of_the_others_counts_and_the_victim_does_not() -> None:
    rows: list[Row] = [
        _latency(0, CALM, "cuda:0", 2.0), _latency(0, KILLS, "cuda:0", 3.0),
        _latency(0, CALM, "cuda:1", 2.0), _latency(0, KILLS, "cuda:1", 200.0, lost=9),
        _latency(1, CALM, "cuda:0", 4.0), _latency(1, KILLS, "cuda:0", 4.0, lost=1),
        _latency(2, CALM, "cuda:0", 4.0), _latency(2, KILLS, "cuda:0", None, lost=1),
        {"round": 0, "what": "phase", "phase": KILLS, "seconds": 1.0, "kills": 3},
    ]  # fmt: skip
    ratios = isolate_ratios(rows, "cuda:1")
    assert ratios["others_p99_over_calm"] == 1.5
    assert ratios["others_p50_over_calm"] == 1.0
    assert (ratios["others_lost"], ratios["victim_lost"], ratios["kills"]) == (2, 9, 3)


def test_an_engine_that_met_other_bytes_ends_the_benchmark() -> None:
    bench = _Bench(None, (), Cards(("cpu:0",)), 0, 0.0)  # type: ignore[arg-type]
    loss = Loss("capture small", "worker_died", 2, "why")
    worked = Worked({"capture small": [0.1]}, [loss], exact=True)
    latency, lost = bench._rows(KILLS, "cpu:0", worked)
    assert (latency["n"], latency["lost"], latency["max_ms"]) == (1, 2, 100.0)
    assert (lost["what"], lost["count"], lost["code"]) == ("lost", 2, "worker_died")
    with pytest.raises(CommandError) as caught:
        bench._rows(KILLS, "cpu:0", Worked({}, [], exact=False))
    assert caught.value.code == "damaged"
