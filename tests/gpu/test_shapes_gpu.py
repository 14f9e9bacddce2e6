"""Every named cache layout through the real daemon on GPUs, one stage a card where there are several: as
`tests/integration/test_shapes.py` on `cpu`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from stratad.client import Client, StagePool
from tests.support.daemon import DaemonProcess
from tests.support.engine_arrays import Bytes, Shape
from tests.support.engine_shapes import SHAPES
from tests.support.shape_rounds import Round

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

from tests.gpu.cards import all_cards, card_of, cards  # noqa: E402 - needs torch


class GpuStage:
    """A pool in a tensor on the GPU."""

    def __init__(self, stage: int, pool_bytes: int) -> None:
        self._tensor: Tensor = torch.zeros(pool_bytes, dtype=torch.uint8, device=card_of(stage))

    def stage_pool(self, shape: Shape) -> StagePool:
        return StagePool(str(self._tensor.device), shape.layout, self._tensor)

    def read(self) -> Bytes:
        data: Bytes = self._tensor.cpu().numpy().copy()
        return data

    def write(self, data: Bytes) -> None:
        self._tensor.copy_(torch.from_numpy(data))

    def close(self) -> None:
        """The allocator takes it when nobody refers to it any more."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    settings = {"ram.budget_bytes": f"{512 * len(cards())}MiB", "ram.shuttle_bytes": "64MiB"}
    with DaemonProcess(all_cards(), settings) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(60.0) as connected:
        yield connected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_conversation_goes_comes_back_and_is_copied(client: Client, name: str, seed: int) -> None:
    Round(name, seed, GpuStage).run(client)
