"""The adapter parks and restores caches, here with a client that keeps the bytes in this process."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, LlamaConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from stratad.engines.kv_planes import LayerForm, TensorForm
from stratad.engines.model_layers import NewCache, fingerprint_of, observe_layers, split_layers
from stratad.engines.models import random_model
from stratad.engines.transformers import CacheParker
from stratad.errors import Busy, UsageError
from tests.support.fake_parking import FakeParkingClient, FakeParkingEngine, memfds
from tests.support.quantisers import Int8Cache, PackedCache
from tests.support.tiny_models import PROMPT, cache_bytes, go_on, read, read_into, tiny_model

CPU = torch.device("cpu")
MAX_TOKENS = 320


@contextmanager
def parking(
    stages: int = 2, slots: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[CacheParker, FakeParkingEngine]]:
    client = FakeParkingClient()
    model = tiny_model(dtype)
    with CacheParker.register(
        client, model, namespace="n", revision="r", max_tokens=MAX_TOKENS, stages=stages, slots=slots
    ) as parker:
        assert client.engine is not None
        yield parker, client.engine
    assert not client.engine.registered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_restored_conversation_goes_on_bit_for_bit(stages: int, dtype: torch.dtype) -> None:
    model = tiny_model(dtype)
    cache, token = read(model, PROMPT)
    before = cache_bytes(cache)
    expected = go_on(model, copy.deepcopy(cache), token, 12)
    assert len(set(expected[0])) > 3  # a text that says something about the cache
    with parking(stages, dtype=dtype) as (parker, engine):
        parker.park("a", cache, PROMPT).result()
        engine.scribble()
        restored, tokens = parker.restore("a")
    assert tokens == len(PROMPT)
    assert cache_bytes(restored) == before
    assert go_on(model, restored, token, 12) == expected


def test_memory_is_announced_before_it_is_allocated() -> None:
    client, before = FakeParkingClient(), memfds()
    with CacheParker.register(client, tiny_model(), namespace="n", revision="r", max_tokens=8, stages=2):
        assert client.announced == [("n", before)]
        assert memfds() > before


def test_two_conversations_share_one_slot() -> None:
    model = tiny_model()
    with parking() as (parker, _):
        expected = {}
        for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1][:77])):
            cache, token = read(model, prompt)
            parker.park(name, cache, prompt).result()
            expected[name] = (token, go_on(model, cache, token, 6))
        for name, (token, continued) in expected.items():
            restored, _ = parker.restore(name)
            assert go_on(model, restored, token, 6) == continued


def test_a_cache_is_its_own_after_park_and_restore() -> None:
    """No tensor is a view of the pool: what happens to the slot later cannot reach a conversation."""
    model = tiny_model()
    cache, _ = read(model, PROMPT)
    before = cache_bytes(cache)
    with parking() as (parker, engine):
        parker.park("a", cache, PROMPT).result()
        restored, _ = parker.restore("a")
        engine.scribble()
        assert cache_bytes(restored) == before
        assert cache_bytes(cache) == before


def test_a_prefix_can_be_restored() -> None:
    cache, _ = read(tiny_model(), PROMPT)
    with parking() as (parker, _):
        parker.park("a", cache, PROMPT).result()
        restored, tokens = parker.restore("a", tokens=100)
        assert tokens == 100
        whole, _ = parker.restore("a")
    pairs: Any = zip(restored.layers, whole.layers, strict=True)
    for short, long in pairs:
        assert torch.equal(short.keys, long.keys[:, :, :100])


def test_take_gives_the_image_up_and_lookup_finds_prefixes() -> None:
    cache, _ = read(tiny_model(), PROMPT)
    with parking() as (parker, engine):
        parker.park("a", cache, PROMPT).result()
        found = parker.lookup([*PROMPT, 1, 2])
        assert found is not None
        assert (found.conversation, found.tokens) == ("a", len(PROMPT))
        assert cache_bytes(parker.take("a")[0]) == cache_bytes(cache)
        assert engine.images == {}
        assert parker.lookup(PROMPT) is None


def test_each_slot_has_rows_of_its_own() -> None:
    cache, _ = read(tiny_model(), PROMPT[:10])
    with parking(slots=3) as (parker, engine):
        parker.park("a", cache, PROMPT[:10], slot=2).result()
        parker.restore("a", slot=1)
        parker.restore("a", slot=0, tokens=4)
        assert engine.calls == [
            ("capture", "a", [[(2 * MAX_TOKENS, 10)]] * 2, 2),
            ("restore", "a", [[(MAX_TOKENS, MAX_TOKENS)]] * 2, 1),
            ("restore", "a", [[(0, 4)]] * 2, 0),
        ]


def test_an_image_that_the_slot_cannot_hold_is_refused_and_the_slot_keeps_its_bytes() -> None:
    long, _ = read(tiny_model(), PROMPT)
    with parking() as (parker, engine):
        parker.park("a", long, PROMPT).result()
        images = engine.images
    client = FakeParkingClient()
    with CacheParker.register(
        client, tiny_model(), namespace="n", revision="r", max_tokens=len(PROMPT) - 1, slots=2
    ) as shorter:
        assert client.engine is not None
        client.engine.images = images
        before = client.engine.pool_bytes()
        with pytest.raises(UsageError) as caught:
            shorter.restore("a", slot=1)
        assert caught.value.code == "bad_rows"
        assert client.engine.pool_bytes() == before


def test_rows_of_another_slot_are_never_asked_for() -> None:
    cache, _ = read(tiny_model(), PROMPT)
    with parking(slots=2) as (parker, engine):
        parker.park("a", cache, PROMPT).result()
        for tokens in (MAX_TOKENS + 1, 0, -1):
            with pytest.raises(UsageError, match="a slot holds"):
                parker.restore("a", tokens=tokens)
        for slot in (2, -1):
            with pytest.raises(UsageError, match="there are slots"):
                parker.restore("a", slot=slot)
            with pytest.raises(UsageError, match="there are slots"):
                parker.park("a", cache, PROMPT, slot=slot)
        too_long, _ = read(tiny_model(), [1] * (MAX_TOKENS + 1))
        with pytest.raises(UsageError, match="a slot holds"):
            parker.park("a", too_long, [1] * (MAX_TOKENS + 1))
        assert len(engine.calls) == 1


def test_busy_rows_are_not_touched() -> None:
    """While a worker may still read or write a slot's rows the adapter neither writes nor asks for them."""
    cache, _ = read(tiny_model(), PROMPT)
    other, _ = read(tiny_model(), PROMPT[::-1])
    with parking(slots=2) as (parker, engine):
        engine.rows_busy = True
        parker.park("a", cache, PROMPT)
        engine.rows_busy = False
        ticket = parker.park("a", cache, PROMPT, slot=1)
        ticket.wait_source_free()
        pools = engine.pool_bytes()
        for call in (lambda: parker.park("b", other, PROMPT[::-1], deadline_s=0.01), lambda: parker.restore("a")):
            with pytest.raises(Busy):
                call()
        assert engine.pool_bytes() == pools
        assert len(engine.calls) == 2
        parker.restore("a", slot=1)  # the other slot is free


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_library_that_is_not_installed_is_named_with_the_command(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; import stratad.engines.transformers"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: stratad.engines.transformers needs {missing}, which is not installed: ")
    assert "-c constraints.txt '.[transformers]'" in last


def test_tokens_have_one_axis() -> None:
    cache, _ = read(tiny_model(), PROMPT)
    with parking() as (parker, engine):
        rows = torch.tensor([PROMPT])
        with pytest.raises(UsageError, match=rf"one axis.*\[1, {len(PROMPT)}\]") as caught:
            parker.park("a", cache, rows)  # type: ignore[arg-type]
        assert caught.value.code == "bad_tokens"
        assert engine.calls == []
        parker.park("a", cache, rows[0]).result()  # type: ignore[arg-type]


def test_tokens_must_be_those_of_the_cache() -> None:
    cache, _ = read(tiny_model(), PROMPT)
    with parking() as (parker, engine):
        for tokens in (PROMPT[:-1], [*PROMPT, 1]):
            with pytest.raises(UsageError, match="token ids") as caught:
                parker.park("a", cache, tokens)
            assert caught.value.code == "bad_tokens"
        with pytest.raises(UsageError, match="a slot holds"):
            parker.park("a", cache, [])
        assert engine.calls == []


def test_caches_of_another_form_are_refused() -> None:
    model = tiny_model()
    with parking() as (parker, engine):
        wrong_type, _ = read(tiny_model(torch.float32), PROMPT)
        shorter = DynamicCache()
        shorter.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
        batch, _ = read(model, PROMPT)
        batch.batch_repeat_interleave(2)
        for cache, tokens, what in (
            (wrong_type, PROMPT, "float32"),
            (shorter, [1, 2, 3], "1 layers"),
            (DynamicCache(config=model.config), [1], "is empty"),
            (batch, PROMPT, "batch of 2"),
        ):
            with pytest.raises(UsageError, match=what):
                parker.park("a", cache, tokens)
        assert engine.calls == []


class Unheard(DynamicLayer):  # type: ignore[no-untyped-call] # of transformers
    """A subclass may keep more than the class that we know."""


def _unheard() -> DynamicCache:
    cache = DynamicCache(config=tiny_model().config)
    cache.layers[2] = Unheard()  # type: ignore[no-untyped-call] # see above
    return cache


def test_kinds_of_layers_that_nobody_knows_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="layer 2 is a Unheard") as caught:
        CacheParker.register(
            FakeParkingClient(), tiny_model(), namespace="n", revision="r", max_tokens=8, new_cache=_unheard
        )
    assert caught.value.detail["kind"] == "Unheard"
    cache = _unheard()
    read_into(tiny_model(), cache, PROMPT)
    with parking() as (parker, engine):
        with pytest.raises(UsageError, match="Unheard"):
            parker.park("a", cache, PROMPT)
        parker.park("a", read(tiny_model(), PROMPT)[0], PROMPT)
        with pytest.raises(UsageError, match="Unheard"):
            parker.restore("a", into=_unheard())
        assert [name for name, *_ in engine.calls] == ["capture"]


def test_caches_of_another_kind_than_the_registered_one_are_refused_by_name() -> None:
    window = DynamicCache(config=tiny_model().config)
    window.layers[3] = DynamicSlidingWindowLayer(sliding_window=8)
    static = StaticCache(config=tiny_model().config, max_cache_len=MAX_TOKENS)
    caches: list[tuple[Cache, str]] = [(window, "DynamicSlidingWindowLayer"), (static, "StaticLayer")]
    for cache, _ in caches:
        read_into(tiny_model(), cache, PROMPT)
    caches.append((EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"))
    with parking() as (parker, engine):
        for cache, name in caches:
            with pytest.raises(UsageError, match=name):
                parker.park("a", cache, PROMPT)
            with pytest.raises(UsageError, match=name):
                parker.restore("a", into=cache)
        assert engine.calls == []


def test_a_refused_registration_leaves_nothing() -> None:
    """The leak check of every test sees the pools' descriptors."""
    client = FakeParkingClient(refusal=UsageError("foreign_device", "no"))
    with pytest.raises(UsageError):
        CacheParker.register(client, tiny_model(), namespace="n", revision="r", max_tokens=8)
    for change in ({"stages": 5}, {"stages": 0}, {"slots": 0}, {"max_tokens": 0}, {"devices": ["cpu:0"]}):
        with pytest.raises(UsageError):
            CacheParker.register(
                FakeParkingClient(), tiny_model(), namespace="n", revision="r", **{"max_tokens": 8, **change}  # type: ignore[arg-type]
            )  # fmt: skip


def test_the_daemons_chunk_size_is_used() -> None:
    client = FakeParkingClient(chunk_tokens=64)
    with CacheParker.register(client, tiny_model(), namespace="n", revision="r", max_tokens=8):
        assert client.engine is not None
        assert [stage.layout.chunk_tokens for stage in client.engine.stages] == [64, 64]


def _forms(*devices: str) -> list[LayerForm]:
    """Layers on these devices; an empty name is a layer that keeps nothing."""
    return [
        LayerForm("kind", (TensorForm("keys", torch.device(device), torch.bfloat16, (1, 4)),) if device else ())
        for device in devices
    ]


def test_layers_are_split_evenly_or_by_device() -> None:
    assert [len(part) for part in split_layers(_forms(*["cpu"] * 7), 3)] == [3, 2, 2]
    assert [len(part) for part in split_layers(_forms("cuda:0", "cuda:1", "cuda:1"), 2)] == [1, 2]
    assert [len(part) for part in split_layers(_forms("cuda:0", "", "cuda:1", ""), 2)] == [2, 2]
    with pytest.raises(UsageError, match="2 devices"):
        split_layers(_forms("cuda:0", "cuda:1", "cuda:1"), 3)
    with pytest.raises(UsageError, match="no layer of stage 1 keeps anything"):
        split_layers(_forms("cpu", "cpu", "", ""), 2)


def test_layer_forms_are_seen_not_guessed() -> None:
    tensors = tuple(TensorForm(name, CPU, torch.float16, (2, 16)) for name in ("keys", "values"))
    assert observe_layers(tiny_model(torch.float16)) == [LayerForm("DynamicLayer", tensors)] * 4


def _fingerprint(model: PreTrainedModel, revision: str = "r", new_cache: NewCache | None = None) -> dict[str, str]:
    make = new_cache or (lambda: DynamicCache(config=model.config))
    return fingerprint_of(model, observe_layers(model, make), make(), revision)


def test_the_fingerprint_tells_models_and_caches_apart() -> None:
    model = tiny_model()
    base = _fingerprint(model)
    assert set(base) == {"model", "revision", "dtype", "kv_format", "engine_build"}
    assert base["dtype"] == "bfloat16"
    assert _fingerprint(model, "other") != base
    assert _fingerprint(tiny_model(torch.float16))["dtype"] == "float16"
    again = random_model("tiny", 2, torch.bfloat16)
    again.config._name_or_path = "/elsewhere"
    assert _fingerprint(again) == base
    again.config.rope_parameters = {"rope_type": "default", "rope_theta": 1.0}
    assert _fingerprint(again)["model"] != base["model"]
    assert isinstance(again.config, LlamaConfig)

    def other_axis() -> PackedCache:
        """The same tensors, which mean something else."""
        cache = PackedCache(model.config)
        for layer in cache.layers:
            layer.axis_key = 1  # type: ignore[union-attr] # every layer is a `PackedLayer`
        return cache

    formats = {
        _fingerprint(model, new_cache=make)["kv_format"]
        for make in (
            lambda: DynamicCache(config=model.config),
            lambda: StaticCache(config=model.config, max_cache_len=9),
            lambda: Int8Cache(model.config),
            lambda: PackedCache(model.config),
            lambda: PackedCache(model.config, q_group_size=32),
            other_axis,
        )
    }
    assert len(formats) == 6
