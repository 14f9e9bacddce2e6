"""Bytes of a caller's objects: whatever has the buffer protocol, numpy arrays of any type, torch tensors on the CPU.

Nothing is ever copied here, so what is not contiguous is refused: a copy of a layer that nobody asked for would cost as
much as the put itself. numpy and torch are never imported for a caller who does not use them.
"""

from typing import Protocol, TypeAlias, cast

from stratad.errors import UsageError


class HasBuffer(Protocol):
    """An object whose bytes can be seen: numpy's arrays and torch's tensors."""

    @property
    def dtype(self) -> object:
        """Type of an element."""
        ...


BufferLike: TypeAlias = "bytes | bytearray | memoryview | HasBuffer"


def byte_view(data: object, what: str, *, writable: bool = False) -> memoryview:
    """The bytes of `data` as one flat view. `what` names it in messages.

    Raises:
        UsageError: it has no buffer, is not contiguous in C order, lies on a GPU, or is read-only and must not be.
    """
    try:
        view = _torch_view(data, what) if hasattr(data, "data_ptr") else _plain_view(data, what)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UsageError(
            "bad_value", f"{what}: a {type(data).__name__} is neither a buffer nor a CPU tensor: {exc}"
        ) from exc
    if writable and view.readonly:
        raise UsageError("bad_value", f"{what}: the {type(data).__name__} is read-only, something writable is needed")
    return view


def describe(data: object) -> str:
    """What a part's note says by default: element type and shape, where `data` has them."""
    shape = getattr(data, "shape", None)
    dtype = getattr(data, "dtype", None)
    if dtype is None or shape is None:
        return ""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


def _plain_view(data: object, what: str) -> memoryview:
    try:
        view = memoryview(cast("bytes", data))
    except (TypeError, ValueError):
        if not hasattr(data, "__array_interface__"):
            raise
        # An element type that the buffer protocol has no letter for (bfloat16 of ml_dtypes, datetime64).
        view = _as_bytes(data, what)
    if not view.c_contiguous:
        raise _not_contiguous(what, f"array of shape {view.shape} and strides {view.strides}")
    if view.nbytes == 0:
        return memoryview(b"") if view.readonly else memoryview(bytearray())
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # a structure, or foreign byte order
        return _as_bytes(data, what)


def _as_bytes(data: object, what: str) -> memoryview:
    import numpy as np  # noqa: PLC0415 - only for what is numpy's own

    array = np.asarray(data)
    if not array.flags.c_contiguous:
        raise _not_contiguous(what, f"array of shape {array.shape} and strides {array.strides}")
    return array.reshape(-1).view(np.uint8).data


def _torch_view(data: object, what: str) -> memoryview:
    import torch  # noqa: PLC0415 - the caller has imported it already

    tensor = cast("torch.Tensor", data)
    if tensor.device.type != "cpu":
        raise UsageError(
            "bad_value",
            f"{what}: the tensor lies on {tensor.device}: register it as a pool, or bring it to the CPU first",
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"its layout is {tensor.layout}")
    if not tensor.is_contiguous():
        raise _not_contiguous(what, f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}")
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.data if flat.nbytes else memoryview(bytearray())


def _not_contiguous(what: str, of: str) -> UsageError:
    return UsageError("bad_value", f"{what}: the {of} is not contiguous: pass a contiguous copy of it")
