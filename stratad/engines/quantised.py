"""Quantised cache layers: keys and values as a backend packs them, and the newest tokens in full precision.

The containers are the backend's own, so none is interpreted: see `stratad.engines.containers`. What a container of q
tokens looks like is asked of the layer itself, which quantises any q tokens: a *template*. Leaves are told apart by the
templates of two lengths::

    shape (1, a, q, b)       one row a token, of a * b elements
    the same for both        a state: scales of a whole tensor
    anything else            packed across tokens: its bytes are spread evenly over the rows of all tokens

Beside them a layer has three states: how many tokens are in full precision, and their keys and values with zeros
behind. A container that does not look like its template is refused, so that nothing which is no tensor can be lost.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from transformers import cache_utils
from transformers.cache_utils import QuantizedLayer

from stratad.engines.containers import put_together, take_apart
from stratad.engines.kv_planes import LayerContent, LayerForm, TensorForm, as_integers, by_token
from stratad.errors import UsageError

# Layers of transformers are known by what they hold, and their classes differ between versions.
Layer: TypeAlias = Any
# The class that backends without a residual part share, where the installed version has it.
_BASE: Final[type] = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)
# Only appends to what it has quantised: the rows of n tokens are those of fewer, too.
_APPENDING: Final = getattr(cache_utils, "Fp8QuantizedLayer", None)
# Lengths that tell leaves apart: two multiples of every group size in use.
_PROBES: Final = (256, 512)
# Lengths at which the spread bytes a token are measured; rounding weighs most where there are few tokens.
_WIDTH_PROBES: Final = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 100, 128, 256, 512)
# Attributes of a layer that follow its tokens or their place.
_VARYING: Final = frozenset({
    "cumulative_length", "is_initialized", "keys", "values", "device", "dtype",
    "_quantized_keys", "_quantized_values", "_pending_beam_idx",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantisedForm(LayerForm):
    """Also how to make containers: heads and widths of keys and values, and which leaves go where.

    `places` has one entry a leaf, those of the keys first: ``row``, ``state`` or ``spread``. `settings` are the layer's
    own, as text: bits, groups, axes.
    """

    home: torch.device
    heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    residual_tokens: int
    places: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]


class Templates:
    """Containers of one operation, made once for all layers of a form."""

    def __init__(self) -> None:
        self._made: Final[dict[tuple[QuantisedForm, int], tuple[object, object]]] = {}

    def get(self, layer: Layer, form: QuantisedForm, tokens: int) -> tuple[object, object]:
        """Containers of any keys and values of `tokens` tokens."""
        if (form, tokens) not in self._made:
            self._made[form, tokens] = _template(layer, form, tokens)
        return self._made[form, tokens]


class QuantisedKind:
    """Every layer on transformers' quantised base classes, whatever its backend."""

    @staticmethod
    def serves(layer: Layer) -> bool:
        """Whether it is one."""
        return isinstance(layer, (_BASE, QuantizedLayer))

    def form(self, layer: Layer, where: str) -> QuantisedForm:
        """What the layer's own quantiser makes of a few tokens."""
        sides = _containers(layer, where)
        keys, values = (layer._dequantize(side) for side in sides)  # noqa: SLF001 - the only name that backends share
        bare = QuantisedForm(
            kind=type(layer).__name__,
            rewinds=_APPENDING is not None and type(layer) is _APPENDING,
            home=keys.device,
            heads=keys.shape[1],
            dims=(keys.shape[3], values.shape[3]),
            dtype=layer.keys.dtype,
            residual_tokens=int(getattr(layer, "residual_length", 0)),
            places=(),
            settings=settings_of(layer),
        )
        short, long = (_leaves(_template(layer, bare, tokens)) for tokens in _PROBES)
        places = tuple(_place(a, b) for a, b in zip(short, long, strict=True))
        numbered = [(f"leaf {number}", *pair) for number, pair in enumerate(zip(short, places, strict=True))]
        rows, states = _row_forms(layer, bare, numbered), _state_forms(bare, numbered)
        return dataclasses.replace(bare, tokens=rows, states=states, places=places)

    def read(self, layer: Layer, form: LayerForm, tokens: int, where: str, templates: Templates) -> LayerContent:
        """The leaves of both containers, and the tokens in full precision."""
        assert isinstance(form, QuantisedForm)
        sides = _containers(layer, where)
        if layer.keys.device != form.home or layer.keys.dtype != form.dtype:
            raise UsageError("bad_value", f"{where} of the cache is {layer.keys.dtype} on {layer.keys.device}")
        self.check_target(layer, form, where)
        if int(layer.cumulative_length) != tokens:
            raise UsageError("bad_tokens", f"{where} holds {layer.cumulative_length} tokens, got {tokens} token ids")
        full = _full_precision(layer)
        if full > form.residual_tokens:
            raise UsageError(
                "bad_value",
                f"{where} keeps {full} tokens in full precision, more than its residual_length of "
                f"{form.residual_tokens}: it can be parked when the next token has been read",
            )
        taken = [take_apart(side) for side in sides]
        expected = [take_apart(side) for side in templates.get(layer, form, tokens - full)]
        for seen, wanted in zip(taken, expected, strict=True):
            if seen.skeleton != wanted.skeleton:
                raise UsageError("bad_value", f"{where}: {seen.skeleton} is not what its quantiser makes of its tokens")
        leaves = [leaf for side in taken for leaf in side.leaves]
        rows = [by_token(leaf) for leaf in _placed(leaves, form, "row")]
        spread = _placed(leaves, form, "spread")
        if spread:
            rows.append(_spread(spread, tokens, form.tokens[-1].row_bytes, where))
        states = [torch.tensor([full], dtype=torch.int64, device=form.home), *_residual(layer, form, full)]
        return LayerContent(rows, [*states, *(as_integers(leaf) for leaf in _placed(leaves, form, "state"))])

    def check_target(self, layer: Layer, form: LayerForm, where: str) -> None:
        """Its settings must be the registered ones."""
        assert isinstance(form, QuantisedForm)
        if settings_of(layer) != form.settings:
            raise UsageError("bad_value", f"{where} has {settings_of(layer)}, registered was {form.settings}")

    def fill(self, layer: Layer, form: LayerForm, content: LayerContent, tokens: int, templates: Templates) -> None:
        """New containers with these leaves."""
        assert isinstance(form, QuantisedForm)
        full = int(content.states[0].item())
        layer.lazy_initialization(*(_any_tokens(form, dim, 1) for dim in form.dims))
        residual = content.states[1:3] if form.residual_tokens else ()
        if full:
            layer.keys, layer.values = (_full_tokens(source[:full], form) for source in residual)
        template = templates.get(layer, form, tokens - full)
        leaves = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in _leaves(template)]
        rows = iter(content.tokens)
        for leaf in _placed(leaves, form, "row"):
            by_token(leaf).copy_(next(rows)[: tokens - full])
        spread = _placed(leaves, form, "spread")
        if spread:
            _gather(next(rows), spread)
        for leaf, source in zip(_placed(leaves, form, "state"), content.states[1 + len(residual) :], strict=True):
            as_integers(leaf).copy_(source)
        parts = iter(leaves)
        layer._quantized_keys, layer._quantized_values = (put_together(side, parts) for side in template)  # noqa: SLF001
        layer.cumulative_length = tokens


def settings_of(layer: Layer) -> tuple[tuple[str, str], ...]:
    """What a layer was made with: everything about it that is a plain value and does not follow its tokens."""
    plain = {
        name: repr(value)
        for name, value in vars(layer).items()
        if name not in _VARYING and isinstance(value, int | float | str | bool | None)
    }
    return tuple(sorted(plain.items()))


def _row_forms(
    layer: Layer, bare: QuantisedForm, leaves: Sequence[tuple[str, torch.Tensor, str]]
) -> tuple[TensorForm, ...]:
    """Forms of what has tokens, out of a container's leaves with their names and places."""
    rows = [
        TensorForm(name, bare.home, leaf.dtype, (leaf.shape[1], leaf.shape[3]))
        for name, leaf, place in leaves
        if place == "row"
    ]
    places = [place for _, _, place in leaves]
    if "spread" in places:
        rows.append(TensorForm("packed leaves", bare.home, torch.uint8, (_spread_width(layer, bare, places),)))
    return tuple(rows)


def _state_forms(bare: QuantisedForm, leaves: Sequence[tuple[str, torch.Tensor, str]]) -> tuple[TensorForm, ...]:
    """Forms of the tokens in full precision, and of what is the same whatever the number of tokens."""
    states = [TensorForm("full-precision tokens", bare.home, torch.int64, (1,))]
    if bare.residual_tokens:
        states += [
            TensorForm(f"full-precision {name}", bare.home, bare.dtype, (bare.residual_tokens, bare.heads, dim))
            for name, dim in zip(("keys", "values"), bare.dims, strict=True)
        ]
    states += [
        TensorForm(name, bare.home, leaf.dtype, tuple(leaf.shape)) for name, leaf, place in leaves if place == "state"
    ]
    return tuple(states)


def _containers(layer: Layer, where: str) -> tuple[object, object]:
    """What the layer keeps its keys and its values in."""
    if getattr(layer, "_pending_beam_idx", None) is not None:
        raise UsageError("bad_value", f"{where} is to be reordered for beams: it cannot be parked")
    beside = [name for name, value in vars(layer).items() if name not in _VARYING and isinstance(value, torch.Tensor)]
    if beside:
        raise UsageError(
            "bad_value", f"{where} keeps {', '.join(beside)} beside its keys and values: it cannot be parked"
        )
    containers = getattr(layer, "_quantized_keys", None), getattr(layer, "_quantized_values", None)
    if not layer.is_initialized or None in containers:
        raise UsageError("bad_value", f"{where} of the cache is empty")
    return containers


def _template(layer: Layer, form: QuantisedForm, tokens: int) -> tuple[object, object]:
    """Containers of any keys and values of so many tokens."""
    quantise = layer._quantize  # noqa: SLF001 - see above
    by_axis = "axis" in inspect.signature(quantise).parameters
    keys, values = (_any_tokens(form, dim, tokens) for dim in form.dims)
    if not by_axis:
        return quantise(keys), quantise(values)
    return quantise(keys, axis=layer.axis_key), quantise(values, axis=layer.axis_value)


def _any_tokens(form: QuantisedForm, dim: int, tokens: int) -> torch.Tensor:
    """Elements that no quantiser stumbles over: neither all alike nor large."""
    ramp = torch.arange(dim, device=form.home).remainder_(7).sub_(3).to(form.dtype)
    return ramp.expand(1, form.heads, tokens, dim).contiguous()


def _leaves(containers: tuple[object, object]) -> list[torch.Tensor]:
    return [leaf for side in containers for leaf in take_apart(side).leaves]


def _placed(leaves: Sequence[torch.Tensor], form: QuantisedForm, place: str) -> list[torch.Tensor]:
    return [leaf for leaf, where in zip(leaves, form.places, strict=True) if where == place]


def _place(short: torch.Tensor, long: torch.Tensor) -> str:
    """Where a leaf goes, from what it looks like at the two probed lengths."""
    if short.shape == long.shape:
        return "state"
    by_token = short.dim() == long.dim() == 4 and (short.shape[0], short.shape[2]) == (1, _PROBES[0])
    if by_token and long.shape == (1, short.shape[1], _PROBES[1], short.shape[3]):
        return "row"
    return "spread"


def _spread_width(layer: Layer, bare: QuantisedForm, places: Sequence[str]) -> int:
    """Bytes a token that hold the packed leaves, whatever the number of tokens."""
    width = 1
    for tokens in _WIDTH_PROBES:
        try:
            leaves = _leaves(_template(layer, bare, tokens))
        except (ValueError, RuntimeError):
            continue  # no whole group: such a cache cannot be, either
        nbytes = sum(leaf.nbytes for leaf, place in zip(leaves, places, strict=True) if place == "spread")
        width = max(width, -(-nbytes // tokens))
    return width


def _spread(leaves: Sequence[torch.Tensor], tokens: int, width: int, where: str) -> torch.Tensor:
    """The leaves' bytes one after the other, then zeros: ``[tokens, width]``."""
    spread = torch.zeros(tokens * width, dtype=torch.uint8, device=leaves[0].device)
    at = 0
    for leaf in leaves:
        if at + leaf.nbytes > spread.numel():
            raise UsageError("bad_value", f"{where}: {tokens} tokens are packed into more than {width} bytes each")
        spread[at : at + leaf.nbytes].copy_(leaf.detach().contiguous().view(-1).view(torch.uint8))
        at += leaf.nbytes
    return spread.view(tokens, width)


def _gather(rows: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """The reverse of `_spread`: into contiguous leaves."""
    spread, at = rows.reshape(-1), 0
    for leaf in leaves:
        leaf.view(-1).view(torch.uint8).copy_(spread[at : at + leaf.nbytes])
        at += leaf.nbytes


def _full_precision(layer: Layer) -> int:
    """How many of the newest tokens are not quantised yet."""
    return int(layer.keys.shape[-2]) if layer.keys.dim() == 4 else 0


def _residual(layer: Layer, form: QuantisedForm, full: int) -> list[torch.Tensor]:
    """Keys and values in full precision, ``[residual_tokens, heads, dim]`` as integers with zeros behind."""
    if not form.residual_tokens:
        return []
    residual: list[torch.Tensor] = []
    for tensor, dim in zip((layer.keys, layer.values), form.dims, strict=True):
        whole = torch.zeros((form.residual_tokens, form.heads, dim), dtype=form.dtype, device=form.home)
        if full:
            as_integers(whole)[:full].copy_(by_token(tensor))
        residual.append(as_integers(whole))
    return residual


def _full_tokens(source: torch.Tensor, form: QuantisedForm) -> torch.Tensor:
    """``[tokens, heads, dim]`` integers as ``[1, heads, tokens, dim]``, in memory of its own."""
    target = torch.empty((1, form.heads, source.shape[0], source.shape[2]), dtype=form.dtype, device=form.home)
    by_token(target).copy_(source)
    return target
