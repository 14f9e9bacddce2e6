"""Transformers models and their caches as an adapter sees them: layer kinds, K/V forms, the split, the fingerprint.

transformers has named a model's cache in two ways, ``past_key_values`` and later ``cache``; `forward` works with both.
"""

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Sequence
from typing import Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stratad.engines.kv_planes import LayerForm
from stratad.errors import UsageError

KV_FORMAT: Final = "transformers DynamicCache, token-major"
# What a model's configuration says about its origin, not about the bytes of its K/V.
_CONFIG_NOISE: Final = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "architectures"})


def cache_argument(model: PreTrainedModel) -> str:
    """How this model's `forward` calls its cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def forward(model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Read tokens into `cache`; the logits ``[vocabulary]`` after the last one."""
    extra = {cache_argument(model): cache}
    input_ids = torch.tensor([list(token_ids)], device=model.device)
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **extra)
    else:
        output = model(input_ids=input_ids, use_cache=True, **extra)
    logits: torch.Tensor = output.logits
    return logits[0, -1]


def observe_layers(model: PreTrainedModel) -> list[LayerForm]:
    """The form of every layer's K/V, seen by reading one token into an empty cache.

    Raises:
        UsageError: a layer is of a kind that cannot be parked yet, or holds nothing.
    """
    cache = DynamicCache(config=model.config)
    plain_layers(cache)  # before anything is run: the refusal should come first
    with torch.inference_mode():
        forward(model, [0], cache)
    forms: list[LayerForm] = []
    for number, layer in enumerate(plain_layers(cache)):
        if layer.keys is None or layer.values is None:
            raise UsageError("bad_value", f"layer {number} keeps no K/V of its own: it cannot be parked yet")
        forms.append(layer_form(layer.keys, layer.values))
    return forms


def plain_layers(cache: DynamicCache) -> list[DynamicLayer]:
    """The layers of a cache that consists of plain full-attention layers.

    Raises:
        UsageError: it does not; names the kind.
    """
    if not isinstance(cache, DynamicCache):
        raise UsageError("bad_value", f"only a DynamicCache can be parked yet, got a {type(cache).__name__}")
    plain: list[DynamicLayer] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UsageError(
                "bad_value",
                f"layer {number} is a {type(layer).__name__}: only plain DynamicLayer layers can be parked yet",
                detail={"layer": str(number), "kind": type(layer).__name__},
            )
        plain.append(layer)
    return plain


def split_layers(forms: Sequence[LayerForm], stages: int) -> list[Sequence[LayerForm]]:
    """Layers of each stage, in order: one stage a device where there are several, else evenly, the first ones longer.

    Raises:
        UsageError: fewer layers than stages, another number of devices, or mixed element types.
    """
    if not 1 <= stages <= len(forms):
        raise UsageError("bad_value", f"{len(forms)} layers cannot be split over {stages} stages")
    types = {form.dtype for form in forms}
    if len(types) > 1:
        raise UsageError("bad_value", f"all layers must have one element type, got {sorted(map(str, types))}")
    bounds = [number for number in range(1, len(forms)) if forms[number].device != forms[number - 1].device]
    if bounds and len(bounds) + 1 != stages:
        raise UsageError("bad_value", f"the model lies on {len(bounds) + 1} devices in turn: register as many stages")
    if not bounds:
        longer, base = len(forms) % stages, len(forms) // stages
        bounds = [base * number + min(number, longer) for number in range(1, stages)]
    return [forms[start:end] for start, end in zip([0, *bounds], [*bounds, len(forms)], strict=True)]


def fingerprint_of(model: PreTrainedModel, dtype: torch.dtype, revision: str) -> dict[str, str]:
    """What must match for restored bytes to mean the same."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _CONFIG_NOISE}
    hashed = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": f"{model.config.model_type} {hashed[:32]}",
        "revision": revision,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_format": KV_FORMAT,
        "engine_build": f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}",
    }


def layer_form(keys: torch.Tensor, values: torch.Tensor) -> LayerForm:
    """The form of keys and values ``[1, kv_heads, tokens, dim]`` of one layer.

    Raises:
        UsageError: they do not belong together.
    """
    if keys.dtype != values.dtype or keys.device != values.device or keys.shape[:3] != values.shape[:3]:
        raise UsageError("bad_value", "keys and values of a layer differ in element type, device, heads or tokens")
    return LayerForm(keys.device, keys.dtype, keys.shape[1], keys.shape[3], values.shape[3])
