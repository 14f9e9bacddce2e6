"""Small models with random weights, and what tests do with their caches."""

import functools
from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from stratad.engines.cache_api import forward
from stratad.engines.models import random_model

# Threads that share such small work mostly wait for each other, on a busy machine for seconds.
torch.set_num_threads(1)
PROMPT = [(7 * place + place * place) % 512 for place in range(300)]


@functools.cache
def tiny_model(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The tiny random Llama: 4 layers, 2 K/V heads of 16."""
    return random_model("tiny", 1, dtype)


def read(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[DynamicCache, int]:
    """A `DynamicCache` that holds `tokens`, and the token that the model chooses next."""
    cache = DynamicCache(config=model.config)
    return cache, read_into(model, cache, tokens)


def read_into(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> int:
    """Read tokens into a cache; the token that the model chooses next."""
    with torch.inference_mode():
        return int(forward(model, tokens, cache).argmax())


def go_on(model: PreTrainedModel, cache: Cache, token: int, count: int) -> tuple[list[int], list[bytes]]:
    """Greedy tokens after `token`, and the logits' bytes of every step."""
    tokens: list[int] = []
    logits_bytes: list[bytes] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = forward(model, [token], cache)
            token = int(logits.argmax())
            tokens.append(token)
            logits_bytes.append(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return tokens, logits_bytes


def cache_bytes(cache: Cache) -> list[bytes]:
    """Every tensor that the layers hold, quantised containers too, and every number that follows the tokens."""
    parts: list[bytes] = []
    for layer in cache.layers:
        for name, value in sorted(vars(layer).items()):
            if name.startswith(("keys", "values", "conv_states", "recurrent_states", "indexer_keys", "_quantized")):
                parts += [name.encode(), *_bytes_of(value)]
            elif name == "cumulative_length" and hasattr(layer, "cumulative_length_int"):
                pass  # a static window follows it until it is full, and then neither reads it nor keeps it right
            elif name.startswith(("cumulative_length", "has_previous_state")):
                parts.append(f"{name} {value}".encode())
    return parts


def _bytes_of(value: object) -> list[bytes]:
    match value:
        case torch.Tensor() if hasattr(value, "__tensor_flatten__"):
            return [part for name in value.__tensor_flatten__()[0] for part in _bytes_of(getattr(value, name))]
        case torch.Tensor():
            return [
                str((value.shape, value.dtype)).encode(),
                value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            ]
        case dict():
            return [part for key in value for part in (str(key).encode(), *_bytes_of(value[key]))]
        case tuple():
            return [part for entry in value for part in _bytes_of(entry)]
        case _:
            return [repr(value).encode()]
