"""Every kind of cache is parked and restored, here with a client that keeps the bytes in this process."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Cache, StaticCache

from stratad.engines.cache_api import cache_argument
from stratad.engines.transformers import CacheParker
from stratad.errors import Busy, UsageError
from tests.support.cache_kinds import (
    KINDS,
    LONGER,
    MAX_TOKENS,
    STAGES,
    WINDOW,
    CacheKind,
    check_earlier,
    check_round_trip,
    decoded,
)
from tests.support.fake_parking import FakeParkingClient, FakeParkingEngine
from tests.support.quantisers import RESIDUAL, Int8Layer, PackedCache
from tests.support.tiny_models import PROMPT, cache_bytes, go_on, read_into, tiny_model


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


def _kind(name: str) -> CacheKind:
    return next(kind for kind in KINDS if kind.name == name)


def _read(kind: CacheKind, tokens: list[int]) -> Cache:
    cache = kind.new_cache(kind.model())
    read_into(kind.model(), cache, tokens)
    return cache


def test_an_image_holds_of_a_window_what_the_window_keeps() -> None:
    kind = _kind("window-and-full")
    with parking(kind) as (parker, engine):
        parker.park("a", _read(kind, PROMPT), PROMPT)
        for stage in engine.images["a"].rows:
            full, window = (sum(map(len, planes)) for planes in stage)
            assert full == len(PROMPT) * 2 * 2 * 16 * 2
            assert window == (WINDOW - 1) * 2 * 2 * 16 * 2


def test_a_prefix_within_the_window_can_be_restored() -> None:
    kind = _kind("window")
    short = PROMPT[: WINDOW - 2]
    with parking(kind) as (parker, engine):
        cache = _read(kind, short)
        parker.park("a", cache, short)
        engine.scribble()
        restored, count = parker.restore("a", tokens=40)
    assert count == 40
    layers: Any = zip(restored.layers, cache.layers, strict=True)
    for layer, whole in layers:
        assert torch.equal(layer.keys, whole.keys[:, :, :40])
        assert layer.cumulative_length == 40


def test_several_states_are_kept_and_the_oldest_is_dropped() -> None:
    kind = _kind("linear-and-full")
    model = kind.model()
    with parking(kind, kept=2) as (parker, engine):
        cache = kind.new_cache(model)
        expected = {}
        for start, end in ((0, 60), (60, 100), (100, 140), (140, 150)):
            token = read_into(model, cache, PROMPT[start:end])
            parker.checkpoint(cache, PROMPT[:end])
            expected[end] = (token, go_on(model, copy.deepcopy(cache), token, 6))
        parker.park("a", cache, PROMPT[:150])
        engine.scribble()
        assert sorted(engine.images["a"].states) == [140, 150]
        for end in (140, 150):
            restored, count = parker.restore("a", tokens=end)
            assert count == end
            assert go_on(model, restored, expected[end][0], 6) == expected[end][1]
        with pytest.raises(UsageError) as caught:
            parker.restore("a", tokens=100)
        assert caught.value.code == "no_checkpoint"


def test_slots_keep_their_states_apart() -> None:
    kind = _kind("linear-and-full")
    model = kind.model()
    with parking(kind, slots=2) as (parker, engine):
        expected = {}
        for slot, prompt in enumerate((PROMPT, PROMPT[::-1])):
            cache = _read(kind, prompt[:50])
            parker.checkpoint(cache, prompt[:50], slot=slot)
            read_into(model, cache, prompt[50:80])
            expected[slot] = (cache, prompt, cache_bytes(cache))
        for slot, (cache, prompt, _) in expected.items():
            parker.park(str(slot), cache, prompt[:80], slot=slot)
        engine.scribble()
        for slot, (_, prompt, held) in expected.items():
            assert cache_bytes(parker.restore(str(slot), slot=1 - slot)[0]) == held
            early, _ = parker.restore(str(slot), slot=1 - slot, tokens=50)
            assert cache_bytes(early)[-1] == cache_bytes(_read(kind, prompt[:50]))[-1]


def test_no_state_is_kept_where_there_is_no_room() -> None:
    kind = _kind("linear-and-full")
    with parking(kind, kept=0) as (parker, _):
        cache = _read(kind, PROMPT)
        with pytest.raises(UsageError, match="kept_checkpoints is 0"):
            parker.checkpoint(cache, PROMPT)
        parker.park("a", cache, PROMPT)
    with parking(_kind("full")) as (parker, engine):
        parker.checkpoint(_read(_kind("full"), PROMPT), PROMPT)  # needs none
        assert engine.calls == []


def test_a_busy_slot_keeps_its_states() -> None:
    kind = _kind("linear-and-full")
    with parking(kind) as (parker, engine):
        cache = _read(kind, PROMPT)
        engine.rows_busy = True
        parker.park("a", cache, PROMPT)
        before = engine.pool_bytes()
        with pytest.raises(Busy):
            parker.checkpoint(cache, PROMPT, deadline_s=0.01)
        assert engine.pool_bytes() == before


@pytest.mark.parametrize("name", ["static", "linear-and-static", "hybrid-static"])
def test_a_cache_that_is_too_short_is_refused_before_anything_is_written(name: str) -> None:
    kind = _kind(name)
    model = kind.model()
    short = StaticCache(config=model.config, max_cache_len=len(PROMPT) - 1)
    with pytest.raises(UsageError, match=f"the cache holds {len(PROMPT) - 1} tokens"):
        CacheParker.register(
            FakeParkingClient(), model, namespace="n", revision="r", max_tokens=MAX_TOKENS, new_cache=lambda: short
        )
    with parking(kind) as (parker, engine):
        cache = _read(kind, PROMPT[:50])
        parker.checkpoint(cache, PROMPT[:50])
        read_into(model, cache, PROMPT[50:])
        parker.park("a", cache, PROMPT)
        before = engine.pool_bytes()
        with pytest.raises(UsageError) as caught:
            parker.restore("a", into=short)
        assert caught.value.code == "bad_rows"
        with pytest.raises(UsageError, match="asked were"):
            parker.restore("a", into=short, tokens=len(PROMPT))
        assert engine.pool_bytes() == before
        restored, count = parker.restore("a", into=short, tokens=50)
        assert (count, int(restored.get_seq_length(len(restored.layers) - 1))) == (50, 50)


def test_memory_of_a_fixed_length_stays_where_it_is() -> None:
    """Compiled graphs know its address."""
    for name in ("static", "static-window", "linear-and-static"):
        kind = _kind(name)
        into: Any = _read(kind, LONGER)

        def addresses(cache: Any) -> list[int]:
            tensors = [value for layer in cache.layers for value in vars(layer).values()]
            tensors += [part for value in tensors if isinstance(value, dict) for part in value.values()]
            return [value.data_ptr() for value in tensors if isinstance(value, torch.Tensor)]

        before = addresses(into)
        with parking(kind) as (parker, _):
            parker.park("a", _read(kind, PROMPT), PROMPT)
            parker.restore("a", into=into)
        assert addresses(into) == before


def test_a_cache_that_was_made_in_inference_mode_is_filled_outside_of_it() -> None:
    for name in ("static", "static-window", "linear-and-static"):
        kind = _kind(name)
        with torch.inference_mode():
            into = _read(kind, LONGER)
        cache = _read(kind, PROMPT)
        with parking(kind) as (parker, _):
            parker.park("a", cache, PROMPT)
            parker.restore("a", into=into)
        assert cache_bytes(into) == cache_bytes(cache)


def test_memory_of_another_batch_is_not_filled() -> None:
    kind = _kind("static")
    into: Any = kind.new_cache(kind.model())
    for layer in into.layers:
        layer.lazy_initialization(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16))
    with parking(kind) as (parker, _):
        parker.park("a", _read(kind, PROMPT), PROMPT)
        with pytest.raises(UsageError, match="batch of 2"):
            parker.restore("a", into=into)


def test_what_a_layer_keeps_beside_is_refused() -> None:
    """Past tokens that a window still records, beams that wait to be reordered, layers that move between devices."""
    window = _kind("window")
    recording: Any = window.new_cache(window.model())
    recording.activate_past_recording()
    read_into(window.model(), recording, PROMPT)
    with parking(window) as (parker, engine):
        with pytest.raises(UsageError, match="records 300 past tokens"):
            parker.park("a", recording, PROMPT)
        recording.crop(0)
        parker.park("a", recording, PROMPT)
        assert len(engine.calls) == 1
    int8 = _kind("int8")
    reordered: Any = _read(int8, PROMPT)
    for layer in reordered.layers:
        layer._pending_beam_idx = torch.tensor([0])
    with parking(int8) as (parker, _), pytest.raises(UsageError, match="beams"):
        parker.park("a", reordered, PROMPT)
    adding: Any = _read(int8, PROMPT)
    adding.layers[2].outliers = torch.zeros(3)
    with parking(int8) as (parker, _), pytest.raises(UsageError, match="layer 2 keeps outliers beside"):
        parker.park("a", adding, PROMPT)
    full = _kind("full")
    moving = _read(full, PROMPT)
    moving.offloading = True
    with parking(full) as (parker, _), pytest.raises(UsageError, match="moves its layers"):
        parker.park("a", moving, PROMPT)


def test_a_linear_layer_that_has_read_nothing_is_empty() -> None:
    kind = _kind("linear-and-full")
    emptied = _read(kind, PROMPT)
    with torch.inference_mode():
        for layer in emptied.layers[:3]:
            layer.reset()
    with parking(kind) as (parker, _):
        for cache in (emptied, kind.new_cache(kind.model())):
            with pytest.raises(UsageError, match="layer 0 of the cache is empty"):
                parker.park("a", cache, PROMPT)


def test_other_settings_of_a_quantiser_are_refused() -> None:
    kind = _kind("packed")
    other = PackedCache(kind.model().config, q_group_size=32)
    read_into(kind.model(), other, PROMPT)
    with parking(kind) as (parker, engine):
        with pytest.raises(UsageError, match="q_group_size"):
            parker.park("a", other, PROMPT)
        parker.park("a", _read(kind, PROMPT), PROMPT)
        with pytest.raises(UsageError, match="q_group_size"):
            parker.restore("a", into=other)
        assert len(engine.calls) == 1


def test_another_quantiser_with_the_same_settings_is_refused_by_name() -> None:
    class Renamed(Int8Layer):  # type: ignore[no-untyped-call] # of transformers
        """May pack in any other way."""

    kind = _kind("int8")
    cache = kind.new_cache(kind.model())
    cache.layers[3] = Renamed()
    read_into(kind.model(), cache, PROMPT)
    with parking(kind) as (parker, engine):
        with pytest.raises(UsageError, match="layer 3 is a Renamed"):
            parker.park("a", cache, PROMPT)
        assert engine.calls == []


def test_groups_larger_than_a_token_are_served() -> None:
    """The quantiser of this cache cannot take a single token: 64 elements a group, 32 a token."""
    kind = CacheKind("wide", tiny_model, lambda model: PackedCache(model.config, q_group_size=64))
    model, tokens = tiny_model(), PROMPT[:100]
    client = FakeParkingClient()
    with CacheParker.register(
        client, model, namespace="n", revision="r", max_tokens=MAX_TOKENS, new_cache=lambda: kind.new_cache(model)
    ) as parker:
        assert client.engine is not None
        cache = kind.new_cache(model)
        read_into(model, cache, tokens)
        parker.park("a", cache, tokens)
        client.engine.scribble()
        assert cache_bytes(parker.restore("a")[0]) == cache_bytes(cache)


def test_a_container_that_its_quantiser_would_not_make_is_refused() -> None:
    """A number beside the tensors would not be restored."""
    kind = _kind("packed")
    cache: Any = _read(kind, PROMPT)
    packed, table = cache.layers[1]._quantized_keys
    cache.layers[1]._quantized_keys = (packed, {**table, "axis": 7})
    with parking(kind) as (parker, engine):
        with pytest.raises(UsageError, match="layer 1"):
            parker.park("a", cache, PROMPT)
        assert engine.calls == []


def test_more_tokens_in_full_precision_than_the_layer_is_to_keep_are_refused() -> None:
    kind = _kind("int8")
    cache: Any = _read(kind, PROMPT)
    for layer in cache.layers:
        layer.keys = layer.values = torch.zeros(1, 2, RESIDUAL + 1, 16, dtype=torch.bfloat16)
        layer.cumulative_length += RESIDUAL + 1
    tokens = [*PROMPT, *PROMPT[: RESIDUAL + 1]]
    with parking(kind) as (parker, _), pytest.raises(UsageError, match="in full precision"):
        parker.park("a", cache, tokens)


@pytest.mark.parametrize("name", ["int8", "packed"])
@pytest.mark.parametrize("count", [1, RESIDUAL - 1, RESIDUAL, RESIDUAL + 5])
def test_tokens_in_full_precision_are_restored_whatever_their_number(name: str, count: int) -> None:
    kind = _kind(name)
    cache, tokens, token = decoded(kind, count=count)
    before = cache_bytes(cache)
    expected = go_on(kind.model(), copy.deepcopy(cache), token, RESIDUAL + 2)  # past the next packing
    with parking(kind) as (parker, engine):
        parker.park("a", cache, tokens)
        engine.scribble()
        restored, _ = parker.restore("a")
    assert cache_bytes(restored) == before
    assert go_on(kind.model(), restored, token, RESIDUAL + 2) == expected


def test_equal_caches_make_equal_images() -> None:
    """No byte of an image comes from whatever lay in the slot before."""
    for kind in KINDS:
        with parking(kind) as (parker, engine):
            cache, tokens, _ = decoded(kind)
            parker.park("a", cache, tokens)
            engine.scribble()
            parker.park("b", cache, tokens)
            first, second = engine.images["a"], engine.images["b"]
        assert first == second, kind.name


@pytest.mark.parametrize("name", ["full", "window-and-full", "linear-and-full", "hybrid"])
def test_the_models_own_generation_goes_on_with_a_restored_cache(name: str) -> None:
    kind = _kind(name)
    model: Any = kind.model()
    cache, tokens, token = decoded(kind)
    expected = [token, *go_on(model, copy.deepcopy(cache), token, 7)[0]]
    with parking(kind) as (parker, engine):
        parker.park("a", cache, tokens)
        engine.scribble()
        restored, _ = parker.restore("a")
    input_ids = torch.tensor([[*tokens, token]])
    said = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=7, do_sample=False,
        **{cache_argument(model): restored},
    )  # fmt: skip
    assert said[0, len(tokens) :].tolist() == expected
