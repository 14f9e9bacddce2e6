"""K/V tensors of attention layers, and the planes of a pool that hold the same bytes token by token.

An engine with tensors ``[1, kv_heads, tokens, head_dim]`` keeps a head's tokens together; a pool keeps a token's heads
together, so that a token is one row in every plane::

    pool   | layer 0 K | layer 0 V | layer 1 K | ...                       planes, each at a multiple of 256 bytes
    plane  | slot 0: row 0, row 1, ... row T-1 | slot 1: row T, ... |      T = tokens a slot can hold
    row    | head 0: head_dim elements | head 1 | ...                      kv_heads * head_dim * itemsize bytes

Both ways copy whole layers, as integers of the element's size: no element is ever interpreted, so NaN payloads stay.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from shm.layout import Plane, StageLayout, one_group

# Keeps every plane aligned for the widest vector loads of CPUs and GPUs.
_ALIGN_BYTES: Final = 256
CHUNK_TOKENS: Final = 256
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LayerForm:
    """Form of one layer's K/V: element type, device, and the widths of a token."""

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    key_dim: int
    value_dim: int


class StagePlanes:
    """The planes of one stage over its pool: K and V of each of its layers, in layer order.

    Holds views of `pool` (uint8, one dimension, `pool_bytes_for(...)` long, owned by the caller) and nothing else.
    """

    def __init__(self, forms: Sequence[LayerForm], rows: int, pool: torch.Tensor) -> None:
        self.forms: Final = tuple(forms)
        self._rows: Final[list[torch.Tensor]] = []  # one a plane: [rows, kv_heads, dim] as integers
        for plane, (form, dim) in zip(layout_for(forms, rows).planes, _planes_of(forms), strict=True):
            raw = pool[plane.offset_bytes : plane.end_bytes].view(_INTEGERS[form.dtype.itemsize])
            self._rows.append(raw.view(rows, form.kv_heads, dim))

    def sign(self) -> None:
        """Put random bytes into the first and the last row of every plane.

        A probe of a pool that holds nothing but zeros would prove little about whose memory it is.
        """
        for rows in self._rows:
            for row in (rows[0], rows[-1]):
                noise = torch.frombuffer(bytearray(os.urandom(row.nbytes)), dtype=rows.dtype)
                row.copy_(noise.view(row.shape))

    def write(self, first_row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy keys and values ``[1, kv_heads, tokens, dim]`` of every layer into rows ``first_row...``.

        On a GPU the copies are enqueued on the current stream, not waited for.
        """
        sources = (tensor for layer in layers for tensor in layer)
        for rows, source in zip(self._rows, sources, strict=True):
            tokens = source.shape[2]
            rows[first_row : first_row + tokens].copy_(source[0].view(rows.dtype).transpose(0, 1))

    def read(self, first_row: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer out of rows ``first_row...``, in memory of their own."""
        return [
            (
                self._read_plane(2 * number, form, form.key_dim, first_row, tokens),
                self._read_plane(2 * number + 1, form, form.value_dim, first_row, tokens),
            )
            for number, form in enumerate(self.forms)
        ]

    def _read_plane(self, plane: int, form: LayerForm, dim: int, first_row: int, tokens: int) -> torch.Tensor:
        rows = self._rows[plane]
        target = torch.empty((1, form.kv_heads, tokens, dim), dtype=form.dtype, device=form.device)
        target.view(rows.dtype)[0].copy_(rows[first_row : first_row + tokens].transpose(0, 1))
        return target


def layout_for(forms: Sequence[LayerForm], rows: int, chunk_tokens: int = CHUNK_TOKENS) -> StageLayout:
    """Layout of a pool that holds `rows` tokens of these layers."""
    planes: list[Plane] = []
    offset_bytes = 0
    for form, dim in _planes_of(forms):
        row_bytes = form.kv_heads * dim * form.dtype.itemsize
        planes.append(Plane(offset_bytes, row_bytes, row_bytes, rows))
        offset_bytes += -(-rows * row_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return StageLayout(groups=one_group(planes), chunk_tokens=chunk_tokens)


def pool_bytes_for(layout: StageLayout) -> int:
    """Length of the pool that a layout needs, a multiple of the alignment."""
    return -(-max(plane.end_bytes for plane in layout.planes) // _ALIGN_BYTES) * _ALIGN_BYTES


def _planes_of(forms: Sequence[LayerForm]) -> list[tuple[LayerForm, int]]:
    """The form and the head width of each plane, in order."""
    return [(form, dim) for form in forms for dim in (form.key_dim, form.value_dim)]
