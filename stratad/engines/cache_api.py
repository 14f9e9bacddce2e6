"""What the installed transformers calls things: its names changed between the generations that the adapter serves.

One generation hands a model its cache as ``past_key_values``, the next as ``cache``. Both remove the last tokens of a
cache with a negative number; a positive one meant an absolute length once and is refused now.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import QuantizedLayer

from stratad.errors import UsageError


def cache_argument(model: PreTrainedModel) -> str:
    """How this model's `forward` calls its cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def forward(model: PreTrainedModel, token_ids: Sequence[int], cache: Cache) -> torch.Tensor:
    """Read tokens into `cache`; the logits ``[vocabulary]`` after the last one."""
    extra = {cache_argument(model): cache}
    input_ids = torch.tensor([list(token_ids)], device=model.device)
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **extra)
    else:
        output = model(input_ids=input_ids, use_cache=True, **extra)
    logits: torch.Tensor = output.logits
    return logits[0, -1]


def drop_last(cache: Cache, count: int) -> None:
    """Remove the last `count` tokens, so that they can be read again: an image holds no logits.

    Raises:
        UsageError: the cache cannot go back, because a window has passed or it holds a state.
    """
    if count < 0:
        raise UsageError("bad_value", f"a number of tokens must be at least 0, got {count}")
    if count == 0:
        return
    layers: list[Any] = list(cache.layers)  # classes with different methods
    for number, layer in enumerate(layers):
        # Older versions let quantised layers be cropped, which takes their packed tokens for tensors.
        if not hasattr(layer, "crop") or not layer.is_croppable or isinstance(layer, QuantizedLayer):
            raise UsageError("bad_value", f"layer {number} ({type(layer).__name__}) cannot go back by tokens")
        if getattr(layer, "is_sliding", False) and layer.get_seq_length() >= getattr(layer, "sliding_window", 0) > 0:
            raise UsageError("bad_value", f"the window of layer {number} has passed: it cannot go back by tokens")
    cache.crop(-count)
