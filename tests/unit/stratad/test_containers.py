"""Nested values are taken apart into tensors and put together again."""

from typing import Any

import pytest
import torch

from stratad.engines.containers import put_together, take_apart
from stratad.errors import UsageError


class Wrapper(torch.Tensor):
    """A tensor that wraps two, as quantising packages make them."""

    data_part: torch.Tensor
    scale_part: torch.Tensor
    bits: int

    @staticmethod
    def __new__(cls, data_part: torch.Tensor, scale_part: torch.Tensor, bits: int) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, data_part.shape, dtype=torch.float32)
        made.data_part, made.scale_part, made.bits = data_part, scale_part, bits
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["data_part", "scale_part"], {"bits": self.bits}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: dict[str, int], size: object, stride: object
    ) -> "Wrapper":
        return Wrapper(inner["data_part"], inner["scale_part"], meta["bits"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares its disabled form
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} needs its elements")


def _value(seed: float = 0.0, bits: int = 4) -> Any:
    wrapper = Wrapper(torch.full((2, 3), int(seed), dtype=torch.uint8), torch.tensor([seed]), bits)
    return (
        (wrapper, [torch.tensor(seed, dtype=torch.float64)]),
        {"shape": torch.Size([1, 2]), "zero": torch.ones(2), "x": None},
    )


def test_parts_are_found_in_order_and_come_back() -> None:
    taken = take_apart(_value(1.0))
    assert [tuple(leaf.shape) for leaf in taken.leaves] == [(2, 3), (1,), (), (2,)]
    again = put_together(_value(2.0), iter(taken.leaves))
    other = take_apart(again)
    assert [leaf.data_ptr() for leaf in other.leaves] == [leaf.data_ptr() for leaf in taken.leaves]
    assert other.skeleton == taken.skeleton
    ((wrapper, listed), table) = again
    assert type(wrapper) is Wrapper
    assert type(listed) is list
    assert table["shape"] == torch.Size([1, 2])


def test_whatever_is_no_tensor_shows_in_the_skeleton() -> None:
    base = take_apart(_value()).skeleton
    assert take_apart(_value(3.0)).skeleton == base
    assert take_apart(_value(bits=2)).skeleton != base
    assert take_apart((torch.ones(2), 0.5)).skeleton != take_apart((torch.ones(2), 0.25)).skeleton
    assert take_apart(torch.ones(2)).skeleton != take_apart(torch.ones(3)).skeleton
    assert take_apart(torch.ones(2)).skeleton != take_apart(torch.ones(2, dtype=torch.int32)).skeleton
    assert take_apart({"a": 1}).skeleton != take_apart({"b": 1}).skeleton


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    class Opaque:
        pass

    with pytest.raises(UsageError, match="Opaque"):
        take_apart((torch.ones(1), Opaque()))
    with pytest.raises(UsageError, match="Parameter"):
        take_apart([torch.nn.Parameter(torch.ones(1))])
