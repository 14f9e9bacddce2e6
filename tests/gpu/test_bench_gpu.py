"""The benchmarks that measure a card, with so little work that only their reports are examined."""

import pytest

from tests.support.bench import bench, check_slots

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("stages", ["1", "2"])
def test_slots_on_cuda(stages: str) -> None:
    report = bench("slots", "--device", "cuda", "--image-mib", "64", "--stages", stages)
    check_slots(report, "cuda")
    assert report["settings"]["device_name"] == torch.cuda.get_device_name(0)
    assert report["versions"]["torch"] == torch.__version__


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
