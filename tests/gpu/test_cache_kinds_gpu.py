"""Every kind of cache on a GPU, its layers split over stages that share the card."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Cache

from stratad.bench.daemon import PrivateDaemon
from stratad.client import Client
from stratad.engines.transformers import CacheParker
from tests.support.cache_kinds import KINDS, LONGER, MAX_TOKENS, STAGES, CacheKind, check_earlier, check_round_trip
from tests.support.tiny_models import read_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_way_of_summing() -> Iterator[None]:
    """Fused attention chooses its way of summing by what else there is, and the same bits are asked for."""
    backends: Any = torch.backends.cuda
    before = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()
    backends.enable_flash_sdp(enabled=False)
    backends.enable_mem_efficient_sdp(enabled=False)
    backends.enable_cudnn_sdp(enabled=False)
    yield
    backends.enable_flash_sdp(enabled=before[0])
    backends.enable_mem_efficient_sdp(enabled=before[1])
    backends.enable_cudnn_sdp(enabled=before[2])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a daemon that serves the first card."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    with PrivateDaemon.start({"daemon.devices": uuid, "ram.budget_bytes": str(256 << 20)}) as daemon:
        connected, _ = daemon.connect()  # waits until the worker is ready
        with connected:
            yield connected


def _register(client: Client, kind: CacheKind) -> CacheParker:
    model = kind.model("cuda:0")
    return CacheParker.register(
        client, model, namespace=kind.name, revision="r", max_tokens=MAX_TOKENS, stages=STAGES,
        new_cache=lambda: kind.new_cache(model),
    )  # fmt: skip


def _other_conversation(kind: CacheKind, parker: CacheParker) -> None:
    model = kind.model("cuda:0")
    cache: Cache = kind.new_cache(model)
    read_into(model, cache, LONGER)
    parker.park("other", cache, LONGER).result()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_restored_cache_goes_on_bit_for_bit(kind: CacheKind, client: Client) -> None:
    with _register(client, kind) as parker:
        check_round_trip(kind, parker, lambda: _other_conversation(kind, parker), "cuda:0")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_earlier_token_is_restored_where_its_bytes_are_still_there(kind: CacheKind, client: Client) -> None:
    with _register(client, kind) as parker:
        check_earlier(kind, parker, lambda: _other_conversation(kind, parker), "cuda:0")
