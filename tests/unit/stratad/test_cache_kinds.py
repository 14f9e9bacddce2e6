"""Every kind of cache is parked and restored, here with a client that keeps the bytes in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stratad.engines.transformers import CacheParker
from tests.support.cache_kinds import KINDS, MAX_TOKENS, STAGES, CacheKind, check_earlier, check_round_trip
from tests.support.fake_parking import FakeParkingClient, FakeParkingEngine


@contextmanager
def parking(kind: CacheKind, slots: int = 1, kept: int = 1) -> Iterator[tuple[CacheParker, FakeParkingEngine]]:
    client = FakeParkingClient()
    model = kind.model()
    with CacheParker.register(
        client, model, namespace="n", revision="r", max_tokens=MAX_TOKENS, stages=STAGES, slots=slots,
        new_cache=lambda: kind.new_cache(model), kept_checkpoints=kept,
    ) as parker:  # fmt: skip
        assert client.engine is not None
        yield parker, client.engine


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_restored_cache_goes_on_bit_for_bit(kind: CacheKind) -> None:
    with parking(kind) as (parker, engine):
        check_round_trip(kind, parker, engine.scribble)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_earlier_token_is_restored_where_its_bytes_are_still_there(kind: CacheKind) -> None:
    with parking(kind) as (parker, engine):
        check_earlier(kind, parker, engine.scribble)
