"""A causal model over several devices: its layers in equal runs, one run a device, everything else on the first."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from stratad.engines.models import ModelError

_FIX: Final = "give one --cards, or a model whose decoder has a list of layers"


def spread_layers(model: PreTrainedModel, devices: Sequence[torch.device]) -> None:
    """Move a model in place. What a layer is called with follows it to its device, and the last one's output goes back
    to the first device; a cache keeps each layer's tensors where that layer made them.

    Raises:
        ModelError: the model's layers cannot be told, or are fewer than the devices.
    """
    decoder = model.base_model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ModelError(f"a {type(model).__name__} cannot be split over devices: it has no list of layers; {_FIX}")
    if len(layers) < len(devices):
        raise ModelError(f"{len(layers)} layers cannot be split over {len(devices)} devices; give fewer --cards")
    # Never all on one device: together they may be more than it holds.
    decoder.layers = torch.nn.ModuleList()
    torch.nn.Module.to(model, devices[0])
    decoder.layers = layers
    longer, base = len(layers) % len(devices), len(layers) // len(devices)
    places = [device for number, device in enumerate(devices) for _ in range(base + (number < longer))]
    for layer, device in zip(layers, places, strict=True):
        torch.nn.Module.to(layer, device)
        layer.register_forward_pre_hook(_brings_to(device), with_kwargs=True)
    layers[-1].register_forward_hook(lambda _layer, _given, output: _moved(output, devices[0]))


def _brings_to(device: torch.device) -> Any:
    """A hook that moves what a layer is called with."""

    def bring(_layer: torch.nn.Module, given: Any, named: Any) -> Any:
        return _moved(given, device), _moved(named, device)

    return bring


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on a device; what is no tensor and no container of them (a cache) is left alone."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(part, device) for part in value)
    if type(value) is dict:
        return {key: _moved(part, device) for key, part in value.items()}
    return value
