"""Many copies in one call of the CUDA runtime, by ctypes. The call came with CUDA 12.8 and lost a parameter with 13.

A runtime that has it refuses it under a driver that is older than the call, although all else works there.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from typing import Final, TypeAlias

BatchCopy: TypeAlias = Callable[[Sequence[tuple[int, int, int]], int], int]
_SINCE: Final = 12080
_WITHOUT_FAILED_INDEX_SINCE: Final = 13000
# The sources are read in the order of the stream, as every other copy's.
_IN_STREAM_ORDER: Final = 1


class _Location(ctypes.Structure):
    """cudaMemLocation; type 0: the runtime tells from the address."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("order", c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", c_uint),
    )


def batch_copy(kind: str, runtime: ctypes.CDLL) -> BatchCopy | None:
    """The call, which takes (target, source, bytes) of every copy and the stream, and gives the runtime's code. None
    where the runtime or its driver has none.
    """
    function = getattr(runtime, "cudaMemcpyBatchAsync", None) if kind == "cuda" else None
    if function is None:
        return None
    version = _version(runtime.cudaRuntimeGetVersion)
    if min(version, _version(runtime.cudaDriverGetVersion)) < _SINCE:
        return None
    failed_index = version < _WITHOUT_FAILED_INDEX_SINCE
    last: list[object] = [POINTER(c_size_t), c_void_p] if failed_index else [c_void_p]
    function.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, *last]
    function.restype = c_int

    def copy(copies: Sequence[tuple[int, int, int]], stream: int) -> int:
        count = len(copies)
        targets = (c_void_p * count)(*[target for target, _, _ in copies])
        sources = (c_void_p * count)(*[source for _, source, _ in copies])
        sizes = (c_size_t * count)(*[size for _, _, size in copies])
        attributes, first = _Attributes(order=_IN_STREAM_ORDER), c_size_t(0)
        failed = (byref(c_size_t(0)),) if failed_index else ()
        code: int = function(targets, sources, sizes, count, byref(attributes), byref(first), 1, *failed, stream)
        return code

    return copy


def _version(ask: Callable[..., int]) -> int:
    """What a call says of a version, 0 where it fails."""
    version = c_int()
    return 0 if ask(byref(version)) else version.value
