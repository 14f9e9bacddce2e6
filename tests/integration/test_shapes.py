"""Every named cache layout through the real daemon on `cpu` devices: random sizes, rows, lengths and stages."""

import pytest

from stratad.client import Client
from tests.support.engine_shapes import SHAPES
from tests.support.shape_rounds import CpuStage, Round


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_conversation_goes_comes_back_and_is_copied(client: Client, name: str, seed: int) -> None:
    Round(name, seed, lambda stage, pool_bytes: CpuStage(f"cpu:{stage % 2}", pool_bytes)).run(client)
