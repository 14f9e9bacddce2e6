"""A part of the fault matrix with four stages on the cards that are here; `stratactl fault-matrix` runs all of it."""

import pytest

from tests.support.fault_matrix import fault_matrix

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_operations_fail_on_the_card_and_every_image_is_exact() -> None:
    kinds = ("exception", "kill", "hang", "corrupt", "engine_kill")
    report = fault_matrix("--devices", "cuda:all", "--ops", "capture,restore,slot_direct", "--kinds", ",".join(kinds))
    assert len(report["cells"]) == 3 * 4 * len(kinds)
