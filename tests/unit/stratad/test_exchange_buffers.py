"""Whose bytes a part may be: whatever has a buffer, as it is, and nothing that would have to be copied first."""

import array

import numpy as np
import pytest

from stratad._buffers import byte_view, describe
from stratad.errors import UsageError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        bytearray(b"abcd"),
        memoryview(b"abcdef")[1:4],
        array.array("d", [1.5, 2.5]),
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(6, dtype=">i4"),
        np.array(3.5),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(3, [("a", "i2"), ("b", "f8")]),
        np.arange(20)[5:10],
        np.zeros((3, 0, 2)),
        b"",
    ],
    ids=lambda data: f"{type(data).__name__}-{getattr(data, 'dtype', '')}",
)
def test_bytes_of_buffers(data: object) -> None:
    wanted = data.tobytes() if hasattr(data, "tobytes") else bytes(data)  # type: ignore[call-overload]
    view = byte_view(data, "x")
    assert (view.format, view.ndim, bytes(view)) == ("B", 1, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64", "bool", "uint8", "float8_e4m3fn"])
def test_bytes_of_tensors(dtype: str) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    wanted = tensor.view(torch.uint8).numpy().tobytes()
    assert bytes(byte_view(tensor, "x")) == wanted
    assert bytes(byte_view(tensor.requires_grad_() if tensor.is_floating_point() else tensor, "x")) == wanted
    assert describe(tensor) == f"{dtype}[3,4]"
    target = torch.zeros_like(tensor.detach())
    byte_view(target, "y", writable=True)[:] = wanted
    assert target.view(torch.uint8).numpy().tobytes() == wanted
    assert byte_view(torch.tensor(1.5, dtype=torch.bfloat16), "x").nbytes == 2
    assert byte_view(torch.empty(0, 3), "x").nbytes == 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (np.arange(12).reshape(3, 4).T, r"shape \(4, 3\) and strides \(8, 32\) is not contiguous"),
        (np.arange(10)[::2], "not contiguous"),
        (np.array(["2020-01-01"] * 4, "datetime64[D]")[::2], "not contiguous"),
        pytest.param(memoryview(b"abcdef")[::2], "not contiguous", id="memoryview"),
        (torch.arange(12).reshape(3, 4).T, r"tensor of shape \(4, 3\) and strides \(1, 4\) is not contiguous"),
        (torch.zeros(2, device="meta"), "lies on meta"),
        (torch.zeros(2).to_sparse(), "neither a buffer nor a CPU tensor"),
        ("text", "a str is neither a buffer nor a CPU tensor"),
        ([1, 2], "a list is neither"),
        (None, "a NoneType is neither"),
    ],
    ids=str,
)
def test_what_is_no_buffer_is_refused_by_name(data: object, why: str) -> None:
    with pytest.raises(UsageError, match=f"the part: .*{why}") as refused:
        byte_view(data, "the part")
    assert refused.value.code == "bad_value"


def test_read_only_is_fine_to_read_and_not_to_write() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    for data in (b"abc", frozen):
        assert byte_view(data, "x").readonly
        with pytest.raises(UsageError, match="read-only"):
            byte_view(data, "x", writable=True)
    assert not byte_view(bytearray(), "x", writable=True).readonly
    assert describe(b"abc") == ""
    assert describe(np.zeros((2, 3), "<f4")) == "float32[2,3]"
