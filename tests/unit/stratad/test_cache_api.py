"""Both names of a model's cache are served, and the last tokens of a cache can be read again."""

import copy
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from stratad.engines.cache_api import cache_argument, drop_last, forward
from stratad.errors import UsageError
from tests.support.cache_kinds import KINDS
from tests.support.tiny_models import PROMPT, cache_bytes, read, read_into, tiny_model


class Output:
    """What a model returns."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Base:
    """What every generation of models has."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> Output:
        self.calls.append(arguments)
        return Output(torch.arange(6.0).view(1, 2, 3))


class Older(Base):
    """Calls its cache `past_key_values`, and gives logits of all tokens."""

    def forward(self, input_ids: object, past_key_values: object = None) -> None: ...


class Newer(Base):
    """Calls its cache `cache`, and takes both names for a while."""

    def forward(self, input_ids: object, cache: object = None, logits_to_keep: int = 0, **kwargs: object) -> None: ...


def test_a_cache_goes_by_the_name_that_the_model_has_for_it() -> None:
    cache = DynamicCache()
    for model, name, few_logits in ((Older(), "past_key_values", False), (Newer(), "cache", True)):
        assert cache_argument(cast("PreTrainedModel", model)) == name
        logits = forward(cast("PreTrainedModel", model), [1, 2], cache)
        (call,) = model.calls
        assert call[name] is cache
        assert ("logits_to_keep" in call) == few_logits
        assert call["input_ids"].tolist() == [[1, 2]]
        assert logits.tolist() == [3.0, 4.0, 5.0]


def test_the_last_tokens_can_be_read_again() -> None:
    model = tiny_model()
    cache, token = read(model, PROMPT)
    before = cache_bytes(read(model, PROMPT[:-3])[0])
    whole = cache_bytes(cache)
    shorter = copy.deepcopy(cache)
    drop_last(shorter, 0)
    assert cache_bytes(shorter) == whole
    drop_last(shorter, 3)
    assert shorter.get_seq_length() == len(PROMPT) - 3
    assert len(cache_bytes(shorter)) == len(before)
    assert read_into(model, shorter, PROMPT[-3:]) == token
    with pytest.raises(UsageError, match="at least 0"):
        drop_last(cache, -1)


def test_a_cache_that_cannot_go_back_says_so_and_stays() -> None:
    for kind in KINDS:
        if kind.name not in {"window", "int8", "linear-and-full"}:
            continue
        model = kind.model()
        cache = kind.new_cache(model)
        read_into(model, cache, PROMPT)
        before = cache_bytes(cache)
        with pytest.raises(UsageError, match="layer 0"):
            drop_last(cache, 1)
        assert cache_bytes(cache) == before
