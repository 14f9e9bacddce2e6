"""One tiny model for each kind of cache, and the promise that every one of them is held to."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache, cache_utils

from stratad.engines.models import random_model
from stratad.engines.transformers import CacheParker
from stratad.errors import UsageError
from tests.support.quantisers import Int8Cache, PackedCache
from tests.support.tiny_models import PROMPT, cache_bytes, go_on, read_into

MAX_TOKENS = 400
WINDOW = 64
DECODED = 8
STEPS = 16
STAGES = 2
# Another conversation, longer than the one that is parked.
LONGER = [*PROMPT[::-1], *PROMPT[:60]]


@dataclass(frozen=True)
class CacheKind:
    """A model, the caches that are made for it, and the kinds of layers that these must have."""

    name: str
    build: Callable[[], PreTrainedModel]
    new_cache: Callable[[PreTrainedModel], Cache] = field(default=lambda model: DynamicCache(config=model.config))
    layers: tuple[str, ...] = ()
    windowed: bool = False
    stateful: bool = False
    rewinds: bool = True

    def model(self, device: str = "cpu") -> PreTrainedModel:
        """The model, made once a process and device."""
        return _model(self.name, device)

    @property
    def restores_prefixes(self) -> bool:
        """Whether an image can be restored at every token."""
        return not self.windowed and not self.stateful


_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def _llama() -> PreTrainedModel:
    return random_model("tiny", 1, torch.bfloat16)


def _causal(config_class: str, model_class: str, **settings: object) -> PreTrainedModel:
    config = getattr(transformers, config_class)(**{**_SIZES, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = getattr(transformers, model_class)(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.train(mode=False)
    return model


def _mistral() -> PreTrainedModel:
    return _causal("MistralConfig", "MistralForCausalLM", sliding_window=WINDOW)


def _gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return _causal(
        "Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=16
    )


def _qwen3_next() -> PreTrainedModel:
    """Three layers of linear attention, then one of full attention: the first of two stages has no rows at all."""
    return _causal(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip


def _lfm2() -> PreTrainedModel:
    """Convolutions have no recurrent state."""
    return _causal("Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv", "full_attention"])


def _falcon_h1() -> PreTrainedModel:
    """Linear attention and attention side by side in every layer."""
    return _causal(
        "FalconH1Config", "FalconH1ForCausalLM", num_hidden_layers=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=32,
    )  # fmt: skip


def _glm_dsa() -> PreTrainedModel:
    """Sparse attention, whose indexer keeps keys of its own."""
    return _causal(
        "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", num_hidden_layers=2, num_key_value_heads=4, q_lora_rank=32,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, index_topk=32, index_head_dim=16,
        index_n_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip


def _static(model: PreTrainedModel) -> Cache:
    return StaticCache(config=model.config, max_cache_len=MAX_TOKENS)


def _int8(model: PreTrainedModel) -> Cache:
    return Int8Cache(model.config)


def _packed(model: PreTrainedModel) -> Cache:
    return PackedCache(model.config)


def _fp8(model: PreTrainedModel) -> Cache:
    return cache_utils.QuantizedCache(backend="fp8", config=model.config)


KINDS = [
    CacheKind("full", _llama, layers=("DynamicLayer",)),
    CacheKind("window", _mistral, layers=("DynamicSlidingWindowLayer",), windowed=True),
    CacheKind("window-and-full", _gemma3, layers=("DynamicLayer", "DynamicSlidingWindowLayer"), windowed=True),
    CacheKind("static", _llama, _static, layers=("StaticLayer",)),
    CacheKind("static-window", _gemma3, _static, layers=("StaticLayer", "StaticSlidingWindowLayer"), windowed=True),
    CacheKind("int8", _llama, _int8, layers=("Int8Layer",), stateful=True, rewinds=False),
    CacheKind("packed", _llama, _packed, layers=("PackedLayer",), stateful=True, rewinds=False),
    CacheKind("linear-and-full", _qwen3_next, layers=("DynamicLayer", "LinearAttentionLayer"), stateful=True),
    CacheKind("linear-and-static", _qwen3_next, _static, layers=("LinearAttentionLayer", "StaticLayer"), stateful=True),
    CacheKind("convolution", _lfm2, layers=("DynamicLayer", "LinearAttentionLayer"), stateful=True),
    CacheKind("hybrid", _falcon_h1, layers=("LinearAttentionAndFullAttentionLayer",), stateful=True),
    CacheKind(
        "hybrid-static", _falcon_h1, _static, layers=("LinearAttentionAndStaticFullAttentionLayer",), stateful=True
    ),
    CacheKind("indexed", _glm_dsa, layers=("DynamicIndexedLayer",)),
]
if hasattr(cache_utils, "Fp8QuantizedLayer"):
    KINDS.append(CacheKind("fp8", _llama, _fp8, layers=("Fp8QuantizedLayer",), stateful=True))
_BY_NAME = {kind.name: kind for kind in KINDS}


@functools.cache
def _model(name: str, device: str) -> PreTrainedModel:
    model = _BY_NAME[name].build()
    torch.nn.Module.to(model, device)
    return model


def decoded(kind: CacheKind, device: str = "cpu", count: int = DECODED) -> tuple[Cache, list[int], int]:
    """A cache after a prompt and some decoded tokens, the tokens that it holds, and the next one."""
    model = kind.model(device)
    cache = kind.new_cache(model)
    token = read_into(model, cache, PROMPT)
    continued = go_on(model, cache, token, count)[0]
    return cache, [*PROMPT, token, *continued[:-1]], continued[-1]


def check_round_trip(kind: CacheKind, parker: CacheParker, scribble: Callable[[], None], device: str = "cpu") -> None:
    """Parked, the slot written over, restored: the same bytes, tokens and logits as the run that never parked."""
    model = kind.model(device)
    cache, tokens, token = decoded(kind, device)
    assert {type(layer).__name__ for layer in cache.layers} == set(kind.layers)
    before = cache_bytes(cache)
    captured = parker.park("a", cache, tokens).result()
    assert captured.tokens == len(tokens)
    assert cache_bytes(cache) == before
    expected = go_on(model, copy.deepcopy(cache), token, STEPS)
    assert len(set(expected[0])) > 3  # a text that says something about the cache
    scribble()
    restored, count = parker.restore("a")
    assert count == len(tokens)
    assert type(restored) is type(cache)
    assert cache_bytes(restored) == before
    assert go_on(model, restored, token, STEPS) == expected
    into = kind.new_cache(model)  # one that has read something else before, and more of it
    read_into(model, into, LONGER)
    again, _ = parker.restore("a", into=into)
    assert again is into
    assert cache_bytes(again) == before
    assert go_on(model, again, token, STEPS) == expected


def check_earlier(kind: CacheKind, parker: CacheParker, scribble: Callable[[], None], device: str = "cpu") -> None:
    """Restored at an earlier token: where the kind allows it, it goes on as it did from there; else it is refused."""
    model = kind.model(device)
    cache = kind.new_cache(model)
    token = read_into(model, cache, PROMPT)
    held = list(PROMPT)
    if kind.rewinds:
        parker.checkpoint(cache, held)
    else:
        with pytest.raises(UsageError, match="no earlier state"):
            parker.checkpoint(cache, held)
    expected = go_on(model, copy.deepcopy(cache), token, STEPS)
    continued = go_on(model, cache, token, DECODED)[0]
    longer = [*held, token, *continued[:-1]]
    parker.park("b", cache, longer).result()
    scribble()
    if kind.windowed or not kind.rewinds:
        with pytest.raises(UsageError) as caught:
            parker.restore("b", tokens=len(held))
        assert caught.value.code == "no_checkpoint"
        return
    found = parker.lookup(held)
    assert found is not None
    assert found.tokens == len(held)
    restored, count = parker.restore("b", tokens=len(held))
    assert count == len(held)
    assert go_on(model, restored, token, STEPS) == expected
    if kind.stateful:
        with pytest.raises(UsageError) as caught:
            parker.restore("b", tokens=len(held) + 1)
        assert caught.value.code == "no_checkpoint"
