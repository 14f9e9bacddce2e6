"""Taking a nested value apart into plain tensors, and putting it together with others.

Quantised keys and values come as tensors, tensor subclasses that wrap tensors, tuples, lists and dicts. The plain
tensors in one are its *leaves*, what lies between them its *skeleton*.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from stratad.errors import UsageError

_PLAIN: Final = (int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Taken(NamedTuple):
    """A container taken apart: `skeleton` is equal for containers that differ in their leaves' bytes only."""

    leaves: list[torch.Tensor]
    skeleton: list[str]


def is_wrapper(value: object) -> bool:
    """Whether it is a tensor that wraps others and can name them, as `torch.compile` asks of tensor subclasses."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def take_apart(value: Any) -> Taken:
    """Take a container apart.

    Raises:
        UsageError: it holds something that is neither a tensor nor a plain value.
    """
    leaves: list[torch.Tensor] = []
    skeleton: list[str] = []
    _walk(value, leaves, skeleton)
    return Taken(leaves, skeleton)


def _walk(value: Any, leaves: list[torch.Tensor], skeleton: list[str]) -> None:
    name = type(value).__name__
    if is_wrapper(value):
        inner, meta = value.__tensor_flatten__()
        skeleton.append(f"{name} {inner} {meta}")
        for attribute in inner:
            _walk(getattr(value, attribute), leaves, skeleton)
    elif type(value) is torch.Tensor:
        skeleton.append(f"tensor {tuple(value.shape)} {value.dtype} {value.device}")
        leaves.append(value)
    elif type(value) in (tuple, list):
        skeleton.append(f"{name} of {len(value)}")
        for part in value:
            _walk(part, leaves, skeleton)
    elif type(value) is dict:
        skeleton.append(f"dict of {list(value)}")
        for part in value.values():
            _walk(part, leaves, skeleton)
    elif isinstance(value, _PLAIN):
        skeleton.append(repr(value))
    else:
        raise UsageError("bad_value", f"a quantised container holds a {name}: it cannot be parked")


def put_together(value: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """The same container with other leaves."""
    if is_wrapper(value):
        inner, meta = value.__tensor_flatten__()
        parts = {attribute: put_together(getattr(value, attribute), leaves) for attribute in inner}
        return type(value).__tensor_unflatten__(parts, meta, value.size(), value.stride())
    if isinstance(value, torch.Tensor):
        return next(leaves)
    if type(value) is tuple:  # not its subclasses: `torch.Size` is a plain value
        return tuple(put_together(part, leaves) for part in value)
    if type(value) is list:
        return [put_together(part, leaves) for part in value]
    if type(value) is dict:
        return {key: put_together(part, leaves) for key, part in value.items()}
    return value
