"""Transformers models and their caches as an adapter sees them: layers, their split over stages, the fingerprint."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from stratad.engines.cache_api import forward
from stratad.engines.kv_planes import LayerContent, LayerForm, TensorForm
from stratad.engines.layer_kinds import capacity_of, check_target, kind_of
from stratad.engines.quantised import Layer, QuantisedKind, Templates
from stratad.errors import UsageError

# Makes an empty cache of the kind that an engine uses.
NewCache: TypeAlias = Callable[[], Cache]
# Tokens that are whole groups for every group size in use, whatever the heads.
_GROUP_TOKENS: Final = 64
# What a model's configuration says about its origin, not about the bytes of its K/V.
_CONFIG_NOISE: Final = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "architectures"})


def observe_layers(model: PreTrainedModel, new_cache: NewCache | None = None) -> list[LayerForm]:
    """What is parked of every layer, seen by reading a token (some tokens, where it is quantised) into an empty cache.

    `new_cache` makes it; the default is a `DynamicCache` of the model.

    Raises:
        UsageError: a layer is of a kind that cannot be parked; names the kind.
    """
    cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
    # Before anything is run: the refusal should come first.
    kinds = [kind_of(layer, f"layer {number}") for number, layer in enumerate(layers_of(cache))]
    # Backends that quantise in groups refuse what is no whole group.
    count = _GROUP_TOKENS if any(isinstance(kind, QuantisedKind) for kind in kinds) else 1
    with torch.inference_mode():
        forward(model, [0] * count, cache)
        if not kinds:  # a cache that makes its layers as they come
            kinds = [kind_of(layer, f"layer {number}") for number, layer in enumerate(layers_of(cache))]
        pairs = enumerate(zip(kinds, cache.layers, strict=True))
        return [kind.form(layer, f"layer {number}") for number, (kind, layer) in pairs]


def layers_of(cache: Cache) -> list[Layer]:
    """The layers of a cache that keeps all of them in place.

    Raises:
        UsageError: it does not; names the class.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UsageError("bad_value", f"a {type(cache).__name__} has no list of layers: it cannot be parked")
    if getattr(cache, "offloading", False):
        raise UsageError(
            "bad_value", f"this {type(cache).__name__} moves its layers between devices: it cannot be parked"
        )
    return list(layers)


def contents_of(cache: Cache, forms: Sequence[LayerForm], tokens: int) -> list[LayerContent]:
    """The tensors of every layer, checked against the registered forms; none is copied that need not be.

    Raises:
        UsageError: the cache is not of these forms, or holds another number of tokens.
    """
    layers, templates = layers_of(cache), Templates()
    if len(layers) != len(forms):
        raise UsageError("bad_value", f"the cache has {len(layers)} layers, the registered model {len(forms)}")
    contents: list[LayerContent] = []
    for number, (layer, form) in enumerate(zip(layers, forms, strict=True)):
        where = f"layer {number}"
        kind = kind_of(layer, where)
        if type(layer).__name__ != form.kind:
            name = type(layer).__name__
            raise UsageError(
                "bad_value", f"{where} is a {name}, registered was a {form.kind}", detail={"layer": where, "kind": name}
            )
        contents.append(kind.read(layer, form, tokens, where, templates))
    return contents


def check_cache(cache: Cache, forms: Sequence[LayerForm]) -> None:
    """Whether a cache, empty or used, can be filled with what has these forms.

    Raises:
        UsageError: it cannot; nothing was changed.
    """
    layers = layers_of(cache)
    if len(layers) != len(forms):
        raise UsageError("bad_value", f"the cache has {len(layers)} layers, the registered model {len(forms)}")
    for number, (layer, form) in enumerate(zip(layers, forms, strict=True)):
        check_target(layer, form, f"layer {number}")


def fill_cache(cache: Cache, forms: Sequence[LayerForm], contents: Sequence[LayerContent], tokens: int) -> None:
    """Make a cache that `check_cache` has passed hold copies of these tensors, as if it had read `tokens` tokens."""
    templates = Templates()
    for layer, form, content in zip(layers_of(cache), forms, contents, strict=True):
        kind_of(layer, form.kind).fill(layer, form, content, tokens, templates)


def room_of(cache: Cache) -> int | None:
    """The most tokens that a cache can hold; None where it grows."""
    rooms = [room for layer in layers_of(cache) if (room := capacity_of(layer)) is not None]
    return min(rooms, default=None)


def split_layers(forms: Sequence[LayerForm], stages: int) -> list[Sequence[LayerForm]]:
    """Layers of each stage, in order: one stage a device where there are several, else evenly, the first ones longer.

    Raises:
        UsageError: fewer layers than stages, another number of devices, or a stage that keeps nothing.
    """
    if not 1 <= stages <= len(forms):
        raise UsageError("bad_value", f"{len(forms)} layers cannot be split over {stages} stages")
    bounds: list[int] = []
    before: torch.device | None = None
    for number, form in enumerate(forms):
        if form.device is None:
            continue  # keeps nothing: it belongs to the stage of the layers before it
        if before is not None and form.device != before:
            bounds.append(number)
        before = form.device
    if bounds and len(bounds) + 1 != stages:
        raise UsageError("bad_value", f"the model lies on {len(bounds) + 1} devices in turn: register as many stages")
    if not bounds:
        longer, base = len(forms) % stages, len(forms) // stages
        bounds = [base * number + min(number, longer) for number in range(1, stages)]
    split = [forms[start:end] for start, end in zip([0, *bounds], [*bounds, len(forms)], strict=True)]
    for number, part in enumerate(split):
        if all(form.device is None for form in part):
            raise UsageError("bad_value", f"no layer of stage {number} keeps anything: register fewer stages")
    return split


def fingerprint_of(model: PreTrainedModel, forms: Sequence[LayerForm], cache: Cache, revision: str) -> dict[str, str]:
    """What must match for restored bytes to mean the same."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _CONFIG_NOISE}
    layers = [_described(form) for form in forms]
    return {
        "model": f"{model.config.model_type} {_hash(config)}",
        "revision": revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_format": f"transformers {type(cache).__name__}, token-major {_hash(layers)}",
        "engine_build": f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}",
    }


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _described(form: LayerForm) -> list[object]:
    """A layer's form without its device, on which no byte depends."""

    def tensor(part: TensorForm) -> list[object]:
        return [part.name, str(part.dtype), part.shape]

    settings = getattr(form, "settings", ())
    return [form.kind, form.window_tokens, [*map(tensor, form.tokens)], [*map(tensor, form.states)], settings]
