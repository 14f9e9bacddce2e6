"""Tensors of a model's cache, and the planes of a pool that hold the same bytes.

Two sorts of tensors are parked. One with tokens lies in a plane whose rows are tokens; one without (a state) lies in a
plane whose rows are state slots. An engine keeps a head's tokens together, a pool a token's heads, so that a token is
one row in every plane::

    pool   | group: no window              | group: window w | ... | states                   planes, each at a
           | layer 0 keys | layer 0 values | layer 1 keys    | ... | layer 2 conv | ...       multiple of 256 bytes
    plane  | slot 0: row 0, row 1, ... row T-1 | slot 1: row T, ... |      T = tokens that a slot of this group holds
    row    | head 0: head_dim elements | head 1 | ...

Planes of layers with the same window form one row group. Its rows hold the last tokens only, from the first row of the
slot on: token `first_token` of an image of n tokens lies in row 0 of the slot.

Both ways copy integers of the element's size: no element is ever interpreted, so NaN payloads stay.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from shm.layout import Plane, RowGroup, StageLayout, StateGroup

# Keeps every plane aligned for the widest vector loads of CPUs and GPUs.
_ALIGN_BYTES: Final = 256
CHUNK_TOKENS: Final = 256
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorForm:
    """Form of a tensor that is parked; `shape` is that of one token where it has tokens, else of all of it."""

    name: str
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of its plane."""
        return self.shape_elements * self.dtype.itemsize

    @property
    def shape_elements(self) -> int:
        """Elements of one row."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class LayerForm:
    """What is parked of one layer: tensors with tokens, the last `window_tokens` of them (0: all), and states.

    `rewinds` says that the rows of n tokens are also those of fewer: a state of an earlier position goes with them.
    """

    kind: str
    tokens: tuple[TensorForm, ...] = ()
    states: tuple[TensorForm, ...] = ()
    window_tokens: int = 0
    rewinds: bool = True

    @property
    def device(self) -> torch.device | None:
        """Where it lies; None where it holds nothing."""
        for form in (*self.tokens, *self.states):
            return form.device
        return None


@dataclass(frozen=True)
class LayerContent:
    """The bytes of one layer's tensors as integers, in the order of its form.

    Tensors with tokens are ``[tokens, *shape]`` and may hold fewer tokens than are asked for: zeros follow.
    """

    tokens: Sequence[torch.Tensor] = ()
    states: Sequence[torch.Tensor] = ()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers of the element's size."""
    return tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])


def by_token(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, heads, tokens, dim]`` as ``[tokens, heads, dim]`` integers, the same memory."""
    return as_integers(tensor)[0].transpose(0, 1)


class StagePlanes:
    """The planes of one stage over its pool.

    Holds views of `pool` (uint8, one dimension, `pool_bytes_for(...)` long, owned by the caller) and nothing else.
    """

    def __init__(self, forms: Sequence[LayerForm], layout: StageLayout, pool: torch.Tensor, max_tokens: int) -> None:
        self.forms: Final = tuple(forms)
        self.layout: Final = layout
        self._max_tokens: Final = max_tokens
        self._group_of: Final = {window: number for number, window in enumerate(_windows(forms))}
        # By group, one tensor a plane: [rows, *shape] as integers; last the states, [state slots, *shape].
        self._rows: Final[list[list[torch.Tensor]]] = []
        groups = [*(_tokens_of(forms, window) for window in self._group_of), _states_of(forms)]
        for group, tensors in zip([*layout.groups, *layout.states], groups, strict=bool(layout.states)):
            self._rows.append([_view(pool, plane, form) for plane, form in zip(group.planes, tensors, strict=True)])

    def sign(self) -> None:
        """Put random bytes into the first and the last row of every plane.

        A probe of a pool that holds nothing but zeros would prove little about whose memory it is.
        """
        for rows in (plane for group in self._rows for plane in group):
            for row in (rows[0], rows[-1]):
                noise = torch.frombuffer(bytearray(os.urandom(row.nbytes)), dtype=rows.dtype)
                row.copy_(noise.view(row.shape))

    def rows(self, slot: int, tokens: int | None) -> list[tuple[int, int]]:
        """For each row group the run of rows that `tokens` tokens of a slot take (None: all rows of the slot)."""
        runs: list[tuple[int, int]] = []
        for group in self.layout.groups:
            held = slot_tokens(group.window_tokens, self._max_tokens)
            count = held if tokens is None else tokens - group.first_token(tokens)
            runs.append((slot * held, count))
        return runs

    def write(self, slot: int, tokens: int, layers: Sequence[LayerContent]) -> None:
        """Copy every layer's tensors into the rows of `tokens` tokens of a slot, and its states into state slot `slot`.

        On a GPU the copies are enqueued on the current stream, not waited for.
        """
        runs = self.rows(slot, tokens)
        for window, number in self._group_of.items():
            first, count = runs[number]
            pairs = zip(self.forms, layers, strict=True)
            sources = [tensor for form, layer in pairs if form.window_tokens == window for tensor in layer.tokens]
            for rows, source in zip(self._rows[number], sources, strict=True):
                held = source.shape[0]
                rows[first : first + held].copy_(source)
                rows[first + held : first + count].zero_()
        self.write_states(slot, layers)

    def write_states(self, state_slot: int, layers: Sequence[LayerContent]) -> None:
        """Copy every layer's states into a state slot."""
        if not self.layout.states:
            return
        states = [tensor for layer in layers for tensor in layer.states]
        for rows, source in zip(self._rows[-1], states, strict=True):
            rows[state_slot].copy_(source)

    def read(self, slot: int, tokens: int) -> list[LayerContent]:
        """Every layer's tensors out of the rows of `tokens` tokens and of state slot `slot`, as views of the pool."""
        runs = self.rows(slot, tokens)
        planes = [
            iter([rows[first : first + count] for rows in group])
            for (first, count), group in zip(runs, self._rows, strict=False)
        ]
        states = iter([rows[slot] for rows in self._rows[-1]] if self.layout.states else [])
        return [
            LayerContent(
                [next(planes[self._group_of[form.window_tokens]]) for _ in form.tokens],
                [next(states) for _ in form.states],
            )
            for form in self.forms
        ]


def layout_for(
    forms: Sequence[LayerForm], *, slots: int, max_tokens: int, state_slots: int, chunk_tokens: int = CHUNK_TOKENS
) -> StageLayout:
    """Layout of a pool that holds `slots` times `max_tokens` tokens of these layers, and `state_slots` states."""
    offset_bytes = 0

    def place(tensors: Sequence[TensorForm], rows: int) -> tuple[Plane, ...]:
        nonlocal offset_bytes
        planes: list[Plane] = []
        for form in tensors:
            planes.append(Plane(offset_bytes, form.row_bytes, form.row_bytes, rows))
            offset_bytes += -(-rows * form.row_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return tuple(planes)

    groups = [
        RowGroup(place(_tokens_of(forms, window), slots * slot_tokens(window, max_tokens)), window)
        for window in _windows(forms)
    ]
    states = _states_of(forms)
    state_groups = (StateGroup(place(states, state_slots)),) if states else ()
    return StageLayout(tuple(groups), state_groups, chunk_tokens)


def pool_bytes_for(layout: StageLayout) -> int:
    """Length of the pool that a layout needs, a multiple of the alignment."""
    return -(-layout.end_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def token_bytes(forms: Sequence[LayerForm]) -> int:
    """Bytes of one token over all layers."""
    return sum(tensor.row_bytes for form in forms for tensor in form.tokens)


def state_bytes(forms: Sequence[LayerForm]) -> int:
    """Bytes of one state over all layers."""
    return sum(tensor.row_bytes for form in forms for tensor in form.states)


def slot_tokens(window_tokens: int, max_tokens: int) -> int:
    """Tokens that a slot of `max_tokens` tokens holds of a group with this window."""
    return min(window_tokens, max_tokens) if window_tokens else max_tokens


def _windows(forms: Sequence[LayerForm]) -> list[int]:
    """The windows of the row groups, in order."""
    return sorted({form.window_tokens for form in forms if form.tokens})


def _tokens_of(forms: Sequence[LayerForm], window: int) -> list[TensorForm]:
    return [tensor for form in forms if form.window_tokens == window for tensor in form.tokens]


def _states_of(forms: Sequence[LayerForm]) -> list[TensorForm]:
    return [tensor for form in forms for tensor in form.states]


def _view(pool: torch.Tensor, plane: Plane, form: TensorForm) -> torch.Tensor:
    raw = pool[plane.offset_bytes : plane.end_bytes].view(_INTEGERS[form.dtype.itemsize])
    return raw.view(plane.rows, *form.shape)
