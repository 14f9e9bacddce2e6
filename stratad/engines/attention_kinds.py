"""Cache layers of attention: keys and values of every token or of the last ones, grown or in memory of fixed length.

In all methods `where` names the layer in errors, which are `UsageError`s. See `stratad.engines.layer_kinds`.
"""

import contextlib
from collections.abc import Sequence

import torch

from stratad.engines.kv_planes import LayerContent, LayerForm, TensorForm, as_integers, by_token
from stratad.engines.quantised import Layer, Templates
from stratad.errors import UsageError


class Growing:
    """Full attention: keys and values of every token, grown by concatenation."""

    def form(self, layer: Layer, where: str) -> LayerForm:
        """Keys and values."""
        return LayerForm(type(layer).__name__, _attention_forms(layer, where), window_tokens=self.window(layer, where))

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """Keys and values, token by token."""
        del templates
        same_form(self.form(layer, where), form, where)
        self.check_length(layer, tokens, where)
        return LayerContent([by_token(layer.keys), by_token(layer.values)])

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """It must keep the same window."""
        window_tokens = self.window(layer, where)
        if window_tokens != form.window_tokens:
            raise UsageError(
                "bad_value", f"{where} keeps {window_tokens} tokens (0: all), registered was {form.window_tokens}"
            )

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """Both of them anew."""
        del tokens, templates
        keys, values = (_by_head(tensor, f) for tensor, f in zip(content.tokens, form.tokens, strict=True))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values

    def window(self, layer: Layer, where: str) -> int:
        """No window."""
        del layer, where
        return 0

    def check_length(self, layer: Layer, tokens: int, where: str) -> None:
        """As many keys as tokens."""
        _check_held(layer.keys.shape[2], tokens, tokens, where)


class Window(Growing):
    """Sliding window: the last ``sliding_window - 1`` keys and values, and the number of tokens seen."""

    def window(self, layer: Layer, where: str) -> int:
        """What it keeps."""
        window_tokens = int(layer.sliding_window) - 1
        if window_tokens < 1:
            raise UsageError("bad_value", f"{where} has a window of {window_tokens + 1}: it cannot be parked")
        return window_tokens

    def check_length(self, layer: Layer, tokens: int, where: str) -> None:
        """As many tokens seen, and of them what the window keeps."""
        held = int(layer.keys.shape[2])
        _check_held(int(layer.cumulative_length), tokens, tokens, where)
        if held != min(tokens, self.window(layer, where)):
            raise UsageError(
                "bad_value", f"{where} records {held} past tokens, more than its window keeps: crop the cache first"
            )

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """The keys and values that are left, and the number of tokens seen."""
        super().fill(layer, form, content, tokens, templates)
        layer.cumulative_length = tokens


class Indexed(Growing):
    """Sparse attention: beside keys and values those of its indexer, which have one head."""

    def form(self, layer: Layer, where: str) -> LayerForm:
        """Keys, values, and indexer keys where this layer has its own."""
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise UsageError("bad_value", f"{where} keeps the positions of its indexer: it cannot be parked yet")
        forms = _attention_forms(layer, where)
        if layer.is_indexer_initialized:
            keys = layer.indexer_keys
            forms = (*forms, TensorForm("indexer keys", keys.device, keys.dtype, (keys.shape[2],)))
        return LayerForm(type(layer).__name__, forms)

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """All of them, token by token."""
        content = super().read(layer, form, tokens, where, templates)
        if not layer.is_indexer_initialized:
            return content
        _check_held(layer.indexer_keys.shape[1], tokens, tokens, where)
        return LayerContent([*content.tokens, as_integers(layer.indexer_keys)[0]])

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """All of them anew."""
        attention, indexer = content.tokens[:2], content.tokens[2:]
        attention_form = LayerForm(form.kind, form.tokens[:2])
        super().fill(layer, attention_form, LayerContent(attention), tokens, templates)
        for source, tensor_form in zip(indexer, form.tokens[2:], strict=True):
            keys = torch.empty((1, *source.shape), dtype=tensor_form.dtype, device=tensor_form.device)
            as_integers(keys)[0].copy_(source)
            layer.lazy_initialization_indexer(keys)
            layer.indexer_keys = keys


class Static(Growing):
    """Full attention in memory of a fixed length, filled in place because compiled graphs know its address."""

    def check_length(self, layer: Layer, tokens: int, where: str) -> None:
        """Its length is the number of tokens."""
        _check_held(int(layer.cumulative_length), tokens, tokens, where)

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """Keys and values up to its length."""
        whole = super().read(layer, form, tokens, where, templates)
        return LayerContent([tensor[: self.held(layer, tokens)] for tensor in whole.tokens])

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Memory that it has already must fit."""
        super().check_target(layer, form, where)
        if layer.is_initialized:
            same_form(
                Growing.form(self, layer, where), LayerForm(form.kind, form.tokens, (), form.window_tokens), where
            )

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """In place; what lies behind is zero, as in a fresh one."""
        del templates
        if not layer.is_initialized:
            empty = [torch.empty((1, *_heads_first(f, 1)), dtype=f.dtype, device=f.device) for f in form.tokens]
            layer.lazy_initialization(*empty)
        held = self.held(layer, tokens)
        for target, source in zip((layer.keys, layer.values), content.tokens, strict=True):
            with writing(target):
                rows = by_token(target)
                rows[:held].copy_(source)
                rows[held:].zero_()
        with writing(layer.cumulative_length):
            layer.cumulative_length.fill_(held)

    def held(self, layer: Layer, tokens: int) -> int:
        """How many tokens lie in its memory."""
        del layer
        return tokens


class StaticWindow(Static):
    """Sliding window in memory of a fixed length: the last `max_cache_len` keys and values."""

    def window(self, layer: Layer, where: str) -> int:
        """What it keeps."""
        del where
        return int(layer.max_cache_len)

    def check_length(self, layer: Layer, tokens: int, where: str) -> None:
        """As many tokens seen."""
        _check_held(int(layer.cumulative_length_int), tokens, tokens, where)

    def held(self, layer: Layer, tokens: int) -> int:
        """What is left of them."""
        return min(tokens, int(layer.max_cache_len))

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """As `Static`, and the number of tokens seen."""
        super().fill(layer, form, content, tokens, templates)
        layer.cumulative_length_int = tokens


def _attention_forms(layer: Layer, where: str) -> tuple[TensorForm, ...]:
    """Forms of keys and values ``[1, heads, tokens, dim]``."""
    keys, values = layer.keys, layer.values
    if keys is None or values is None or not layer.is_initialized:
        raise UsageError("bad_value", f"{where} of the cache is empty")
    if keys.shape[0] != 1:
        raise UsageError("bad_value", f"{where} holds a batch of {keys.shape[0]}, expected 1")
    if keys.device != values.device or keys.shape[2] != values.shape[2]:
        raise UsageError("bad_value", f"keys and values of {where} differ in device or tokens")
    return tuple(
        TensorForm(name, tensor.device, tensor.dtype, (tensor.shape[1], tensor.shape[3]))
        for name, tensor in (("keys", keys), ("values", values))
    )


def same_form(seen: LayerForm, registered: LayerForm, where: str) -> None:
    """Refuse a layer whose tensors are not as they were registered."""
    if seen != registered:
        raise UsageError("bad_value", f"{where} of the cache is {seen}, registered was {registered}")


def _check_held(held: int, expected: int, tokens: int, where: str) -> None:
    if held != expected:
        raise UsageError("bad_tokens", f"{where} holds {held} tokens, got {tokens} token ids")


def _by_head(rows: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """``[tokens, heads, dim]`` as ``[1, heads, tokens, dim]``, in memory of its own."""
    target = torch.empty((1, *_heads_first(form, rows.shape[0])), dtype=form.dtype, device=form.device)
    as_integers(target)[0].copy_(rows.transpose(0, 1))
    return target


def _heads_first(form: TensorForm, tokens: int) -> Sequence[int]:
    heads, dim = form.shape
    return heads, tokens, dim


def writing(target: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """What allows to write to a tensor of the caller's: one that was made in inference mode is only written there."""
    return torch.inference_mode() if target.is_inference() else contextlib.nullcontext()
