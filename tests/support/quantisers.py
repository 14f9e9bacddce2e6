"""Backends of quantised caches that need no package: one packs token by token, one across tokens.

Both really quantise, so a model's tokens depend on the packed bytes and on the scales.
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import QuantizedLayer

RESIDUAL = 32


class Int8Layer(QuantizedLayer):  # type: ignore[no-untyped-call] # of transformers
    """8 bits an element, one scale a token and head: everything lies token by token."""

    def __init__(self) -> None:
        super().__init__(nbits=8, residual_length=RESIDUAL)

    def _quantize(  # type: ignore[override] # as transformers' own backends do
        self, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        return (tensor.float() / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        quantised, scale = q_tensor
        assert self.keys is not None
        return (quantised.float() * scale).to(self.keys.dtype)


class PackedLayer(QuantizedLayer):  # type: ignore[no-untyped-call] # of transformers
    """4 bits an element in groups over all tokens, two groups' elements in a byte, and what is needed to unpack them
    beside them in a dictionary: the way that `hqq` and `quanto` go.
    """

    def __init__(self, q_group_size: int = 16) -> None:
        super().__init__(nbits=4, q_group_size=q_group_size, residual_length=RESIDUAL)

    def _quantize(  # type: ignore[override] # as transformers' own backends do
        self, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        groups = tensor.float().reshape(-1, self.q_group_size)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low).clamp(min=1e-8) / 15
        codes = ((groups - low) / scale).round().to(torch.uint8)
        half = -(-codes.shape[0] // 2)
        packed = torch.zeros((half, codes.shape[1]), dtype=torch.uint8, device=codes.device)
        packed[: codes.shape[0] - half] = codes[half:] << 4
        packed |= codes[:half]
        overall = tensor.float().abs().amax().reshape(1)  # of the whole tensor: a state
        return packed, {"scale": scale, "low": low, "overall": overall, "shape": tensor.shape, "axis": axis}

    def _dequantize(self, q_tensor: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        packed, meta = q_tensor
        assert self.keys is not None
        codes = torch.cat([packed & 15, packed >> 4])[: meta["scale"].shape[0]]
        values = codes.float() * meta["scale"] + meta["low"]
        values = torch.minimum(torch.maximum(values, -meta["overall"]), meta["overall"])
        return values.reshape(meta["shape"]).to(self.keys.dtype)


class Int8Cache(Cache):
    """A cache of `Int8Layer`s."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=[Int8Layer() for _ in range(config.num_hidden_layers)])


class PackedCache(Cache):
    """A cache of `PackedLayer`s."""

    def __init__(self, config: PreTrainedConfig, q_group_size: int = 16) -> None:
        super().__init__(layers=[PackedLayer(q_group_size) for _ in range(config.num_hidden_layers)])
