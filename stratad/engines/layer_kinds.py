"""How each kind of cache layer is read and filled: what of it an image needs, and what makes an empty one go on.

| kind | tensors with tokens | states | beside them |
|---|---|---|---|
| growing (full attention) | keys, values | - | - |
| window | the last ``sliding_window - 1`` keys, values | - | how many tokens it has seen |
| static | keys, values up to its length | - | its length; zeros behind it |
| static window | the last ``max_cache_len`` keys, values | - | how many tokens it has seen, twice |
| indexed | keys, values, indexer keys | - | - |
| linear attention | - | convolution and recurrent states | that there is a previous state |
| hybrid | those of its attention | those of linear attention | both |
| quantised | see `stratad.engines.quantised` | | |

A layer is known by its exact class: a subclass may keep more than we know of. Tensors are copied as integers.
"""

from typing import Final, Protocol

import torch
from transformers import cache_utils

from stratad.engines.attention_kinds import Growing, Indexed, Static, StaticWindow, Window, same_form, writing
from stratad.engines.kv_planes import LayerContent, LayerForm, TensorForm, as_integers
from stratad.engines.quantised import Layer, QuantisedKind, Templates
from stratad.errors import UsageError


class LayerKind(Protocol):
    """One way of keeping a layer. `where` names the layer in errors, all of which are `UsageError`."""

    def form(self, layer: Layer, where: str) -> LayerForm:
        """What is parked of a layer that has read something."""
        ...

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """The layer's tensors; it must be of this form and hold so many tokens."""
        ...

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Whether `fill` can fill this layer, which may be empty."""
        ...

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """Make the layer hold copies of these tensors, as if it had read `tokens` tokens."""
        ...


class Empty:
    """A layer that keeps nothing: it has no attention, or uses another layer's."""

    def form(self, layer: Layer, where: str) -> LayerForm:
        """Nothing."""
        del where
        return LayerForm(type(layer).__name__)

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """Nothing."""
        del layer, form, tokens, where, templates
        return LayerContent()

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Always."""

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """Nothing is to be done."""


class Linear:
    """Linear attention: convolution and recurrent states, some of each, which hold all tokens at once."""

    def form(self, layer: Layer, where: str) -> LayerForm:
        """The states that it has."""
        forms: list[TensorForm] = []
        for name, tensor in _states_of(layer):
            if tensor.shape[0] != 1:
                raise UsageError("bad_value", f"{where} holds a batch of {tensor.shape[0]}, expected 1")
            forms.append(TensorForm(name, tensor.device, tensor.dtype, tuple(tensor.shape)))
        return LayerForm(type(layer).__name__, (), tuple(forms))

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """The states; what they have seen of is the caller's word, because the layer does not know."""
        del tokens, templates
        convolutions = [layer.conv_states[index] for index in range(layer.number_of_states)]
        seen = [layer.has_previous_state[index] for index, state in enumerate(convolutions) if state is not None]
        if not all(seen) or (form.states and not _states_of(layer)):
            raise UsageError("bad_value", f"{where} of the cache is empty")
        same_form(self.form(layer, where), form, where)
        return LayerContent((), [as_integers(tensor) for _, tensor in _states_of(layer)])

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Memory that it has already must fit."""
        if _states_of(layer):
            same_form(self.form(layer, where), LayerForm(form.kind, (), form.states), where)

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """In place, because compiled graphs know their address."""
        del tokens, templates
        for tensor_form, source in zip(form.states, content.states, strict=True):
            attribute, number = tensor_form.name.split()
            index, states = int(number), getattr(layer, attribute)
            if states[index] is None:
                empty = torch.empty(tensor_form.shape, dtype=tensor_form.dtype, device=tensor_form.device)
                layer.lazy_initialization(**{attribute: empty, "state_idx": index})
            with writing(states[index]):
                as_integers(states[index]).copy_(source)
            if attribute == "conv_states":  # the only ones that ask
                layer.has_previous_state[index] = True


class Both:
    """Linear attention and attention in one layer."""

    def __init__(self, attention: Growing) -> None:
        self._attention: Final = attention
        self._linear: Final = Linear()

    def form(self, layer: Layer, where: str) -> LayerForm:
        """Both forms."""
        attention, linear = self._attention.form(layer, where), self._linear.form(layer, where)
        return LayerForm(attention.kind, attention.tokens, linear.states, attention.window_tokens)

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """Both contents."""
        attention, linear = _parts(form)
        held = self._attention.read(layer, attention, tokens, where, templates)
        return LayerContent(held.tokens, self._linear.read(layer, linear, tokens, where, templates).states)

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Both must be able to."""
        attention, linear = _parts(form)
        self._attention.check_target(layer, attention, where)
        self._linear.check_target(layer, linear, where)

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """Both of them."""
        attention, linear = _parts(form)
        self._attention.fill(layer, attention, LayerContent(content.tokens), tokens, templates)
        self._linear.fill(layer, linear, LayerContent((), content.states), tokens, templates)


_BY_NAME: Final[dict[str, LayerKind]] = {
    "DynamicLayer": Growing(),
    "DynamicSlidingWindowLayer": Window(),
    "DynamicIndexedLayer": Indexed(),
    "StaticLayer": Static(),
    "StaticSlidingWindowLayer": StaticWindow(),
    "LinearAttentionLayer": Linear(),
    "LinearAttentionAndFullAttentionLayer": Both(Growing()),
    "LinearAttentionAndSlidingWindowAttentionLayer": Both(Window()),
    "LinearAttentionAndStaticFullAttentionLayer": Both(Static()),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": Both(StaticWindow()),
    "DummyLayer": Empty(),
}
# Those that the installed version has.
_KINDS: Final = {getattr(cache_utils, name): kind for name, kind in _BY_NAME.items() if hasattr(cache_utils, name)}
_QUANTISED: Final = QuantisedKind()


def kind_of(layer: Layer, where: str) -> LayerKind:
    """How this layer is read and filled.

    Raises:
        UsageError: nobody knows; names its class.
    """
    kind = _KINDS.get(type(layer))
    if kind is not None:
        return kind
    if QuantisedKind.serves(layer):
        return _QUANTISED
    name = type(layer).__name__
    raise UsageError(
        "bad_value",
        f"{where} is a {name}: a layer of this kind cannot be parked",
        detail={"layer": where, "kind": name},
    )


def capacity_of(layer: Layer) -> int | None:
    """The most tokens that a layer can hold; None where it grows or keeps a window."""
    fixed = isinstance(layer, cache_utils.StaticLayer) and not layer.is_sliding
    return int(layer.max_cache_len) if fixed else None


def check_target(layer: Layer, form: LayerForm, where: str) -> None:
    """Whether a layer, empty or used, can be filled with what has this form.

    Raises:
        UsageError: it is of another kind, or keeps memory or settings that do not fit.
    """
    if type(layer).__name__ != form.kind:
        raise UsageError("bad_value", f"{where} is a {type(layer).__name__}, registered was a {form.kind}")
    kind_of(layer, where).check_target(layer, form, where)


def _parts(form: LayerForm) -> tuple[LayerForm, LayerForm]:
    """The form of the attention, and that of the linear attention."""
    return LayerForm(form.kind, form.tokens, (), form.window_tokens), LayerForm(form.kind, (), form.states)


def _states_of(layer: Layer) -> list[tuple[str, torch.Tensor]]:
    """Its states with their names, ``attribute number``."""
    return [
        (f"{attribute} {index}", tensor)
        for index in range(layer.number_of_states)
        for attribute in ("conv_states", "recurrent_states")
        if (tensor := getattr(layer, attribute)[index]) is not None
    ]
