"""The benchmarks that measure a card, with so little work that only their reports are examined."""

import pytest

from tests.support.bench import bench, check_slots

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

from tests.gpu.cards import cards  # noqa: E402 - needs torch


@pytest.mark.parametrize("stages", ["1", "2"])
def test_slots_on_cuda(stages: str) -> None:
    words = ("--image-mib", "64", "--stages", stages, "--layouts", "slot", "paged")
    report = bench("slots", "--device", "cuda", *words)
    check_slots(report, "cuda")
    assert report["settings"]["device_name"] == torch.cuda.get_device_name(0)
    assert report["versions"]["torch"] == torch.__version__


def test_stages_on_the_cards() -> None:
    there = len(cards())
    report = bench("stages", "--device", "cuda", "--cards", str(there), "--stage-mib", "64")
    assert report["settings"]["simulated"] is False
    assert report["settings"]["stages"] == there
    lanes = [row for row in report["rows"] if row["kind"] == "lane"]
    assert len(lanes) == 3 * 2 * 2 * there
    assert {row["card"] for row in lanes} == set(cards())
    assert all(0 < row["over_alone"] < 2 and 0 < row["over_at_once"] < 2 for row in lanes)
    assert 0 < report["ratios"]["at_once_over_alone"] < 1.5
    if there > 1:
        assert report["ratios"]["parallel_over_serial"] > 1


def test_duplex_on_the_cards() -> None:
    report = bench("duplex", "--device", "cuda", "--cards", str(len(cards())), "--stage-mib", "64")
    assert report["settings"]["cards"] == cards()
    assert report["ratios"]["both_over_one_way"] > 0
    assert report["ratios"]["both_over_limit"] < 2


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="one GPU")
def test_isolate_on_the_cards() -> None:
    report = bench("isolate", "--device", "cuda", "--cards", "2", "--ops", "20", "--medium-bytes", str(1 << 20))
    assert report["ratios"]["others_lost"] == 0
    assert report["ratios"]["kills"] >= 3


def test_delta_on_cuda() -> None:
    words = ("--tokens", "6400", "--planes", "8", "--conversations", "4", "--prefix-tokens", "1024")
    report = bench("delta", "--device", "cuda", *words)
    assert report["settings"]["device_name"] == torch.cuda.get_device_name(0)
    assert all(row["byte_exact"] for row in report["rows"])
    for row in report["rows"]:
        if row["op"] in {"next_turn", "restore_resident"}:
            assert row["moved_bytes"] + row["skipped_bytes"] == row["bytes"]
            assert 0 < row["moved_bytes"] <= row["bytes"] / 10
    assert report["ratios"]["shared_bytes_over_ideal"] <= 1.05
