"""A model over two devices: here the second is `meta`, where only shapes are computed, so that a tensor which does not
follow its layer is an error.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from stratad.bench.model_split import spread_layers
from stratad.engines.cache_api import forward
from stratad.engines.model_layers import observe_layers, split_layers
from stratad.engines.models import ModelError, random_model

CPU, META = torch.device("cpu"), torch.device("meta")


def test_layers_lie_on_the_devices_and_everything_follows_them() -> None:
    model = random_model("tiny", 1, torch.float32)
    spread_layers(model, [META, CPU])
    decoder: Any = model.base_model
    assert [next(layer.parameters()).device for layer in decoder.layers] == [META, META, CPU, CPU]
    assert model.device == META
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        forward(model, [1, 2, 3], cache)  # the way back is tried, so what the third layer is called with was moved


def test_a_cache_keeps_each_layers_tensors_where_the_layer_lies() -> None:
    model = random_model("tiny", 1, torch.float32)
    spread_layers(model, [CPU, META])
    last: list[torch.Tensor] = []

    def stop(_layer: torch.nn.Module, _given: object, output: torch.Tensor) -> None:
        last.append(output)
        raise StopAsyncIteration

    # Nothing can come back from `meta`: the model is stopped where the last layer is done.
    decoder: Any = model.base_model
    decoder.layers[-1].register_forward_hook(stop, prepend=True)
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode(), pytest.raises(StopAsyncIteration):
        forward(model, [1, 2, 3], cache)
    assert [layer.keys.device for layer in cache.layers] == [CPU, CPU, META, META]
    assert last[0].device == META
    with torch.inference_mode(), pytest.raises(StopAsyncIteration):
        forward(model, [1], cache)


def test_what_the_last_layer_gives_goes_back_to_the_first_device() -> None:
    model = random_model("tiny", 1, torch.float32)
    spread_layers(model, [CPU, META])
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        forward(model, [1, 2, 3], DynamicCache(config=model.config))


def test_on_one_kind_of_device_nothing_changes() -> None:
    plain, split = random_model("tiny", 1, torch.float32), random_model("tiny", 1, torch.float32)
    spread_layers(split, [CPU, CPU, CPU])
    tokens = list(range(7))
    with torch.inference_mode():
        outcomes = [forward(model, tokens, DynamicCache(config=model.config)) for model in (plain, split)]
    assert torch.equal(*outcomes)
    assert len(split_layers(observe_layers(split), 3)) == 3


def test_what_cannot_be_split_is_refused() -> None:
    model = random_model("tiny", 1, torch.float32)
    with pytest.raises(ModelError, match="4 layers cannot be split over 5 devices"):
        spread_layers(model, [CPU] * 5)
    decoder: Any = model.base_model
    decoder.layers = torch.nn.Sequential(*decoder.layers)
    with pytest.raises(ModelError, match="no list of layers"):
        spread_layers(model, [CPU] * 2)
