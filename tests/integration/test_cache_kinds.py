"""Every kind of cache goes through a real daemon, its layers split over two workers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stratad.client import Client
from stratad.engines.transformers import CacheParker
from tests.support.cache_kinds import KINDS, LONGER, MAX_TOKENS, STAGES, CacheKind, check_earlier, check_round_trip
from tests.support.tiny_models import read_into


@contextmanager
def parking(client: Client, kind: CacheKind) -> Iterator[CacheParker]:
    model = kind.model()
    with CacheParker.register(
        client, model, namespace=kind.name, revision="r", max_tokens=MAX_TOKENS, stages=STAGES,
        new_cache=lambda: kind.new_cache(model),
    ) as parker:  # fmt: skip
        yield parker


def other_conversation(kind: CacheKind, parker: CacheParker) -> None:
    """Another conversation takes the slot: nothing of the one before is left in it."""
    model = kind.model()
    cache = kind.new_cache(model)
    read_into(model, cache, LONGER)
    parker.park("other", cache, LONGER).result()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_restored_cache_goes_on_bit_for_bit(kind: CacheKind, client: Client) -> None:
    with parking(client, kind) as parker:
        check_round_trip(kind, parker, lambda: other_conversation(kind, parker))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_earlier_token_is_restored_where_its_bytes_are_still_there(kind: CacheKind, client: Client) -> None:
    with parking(client, kind) as parker:
        check_earlier(kind, parker, lambda: other_conversation(kind, parker))
