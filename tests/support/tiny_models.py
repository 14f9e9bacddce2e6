"""Small models with random weights, and what tests do with their caches."""

import functools
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from stratad.engines.model_layers import forward, plain_layers
from stratad.engines.models import random_model

PROMPT = [(7 * place + place * place) % 512 for place in range(300)]


@functools.cache
def tiny_model(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The tiny random Llama: 4 layers, 2 K/V heads of 16."""
    return random_model("tiny", 1, dtype)


def read(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[DynamicCache, int]:
    """A cache that holds `tokens`, and the token that the model chooses next."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        return cache, int(forward(model, tokens, cache).argmax())


def go_on(model: PreTrainedModel, cache: DynamicCache, token: int, count: int) -> tuple[list[int], list[bytes]]:
    """Greedy tokens after `token`, and the logits' bytes of every step."""
    tokens: list[int] = []
    logits_bytes: list[bytes] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = forward(model, [token], cache)
            token = int(logits.argmax())
            tokens.append(token)
            logits_bytes.append(logits.contiguous().view(torch.uint8).numpy().tobytes())
    return tokens, logits_bytes


def cache_bytes(cache: DynamicCache) -> list[bytes]:
    """Keys and values of every layer."""
    parts: list[bytes] = []
    for layer in plain_layers(cache):
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, torch.Tensor)
            parts.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return parts
