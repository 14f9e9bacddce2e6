"""The torch fallback on host memory, against the byte model and the numpy reference."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.shape_cases import Case, cases
from tests.unit.workers.rig import KEY
from tests.unit.workers.test_kernels import HostPool, case_work
from workers.device import SliceWork
from workers.digest import MLH, Bytes, Digester
from workers.gpu_kernels import LoadedSlice
from workers.slice_table import group_shapes, slice_table

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

from workers.torch_kernels import TorchKernels  # noqa: E402

DIGESTER = Digester(KEY)
KEYS = DIGESTER.mlh


class HostTorchKernels(TorchKernels):
    """The operations on the CPU's own memory."""

    def _on(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext(stream)

    def _bytes(self, address: int, size_bytes: int) -> "Tensor":
        made: Tensor = torch.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), dtype=torch.uint8)
        return made


def move(target: int, source: int, size_bytes: int, stream: int) -> None:
    ctypes.memmove(target, source, size_bytes)


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**32))
def test_torch_operations_do_what_the_model_says(case: Case, seed: int) -> None:
    layout = case.layout
    pool = HostPool(layout, seed)
    before = pool.memory.copy()
    expected = [case.chunk(before, span) for span in case.spans]
    kernels = HostTorchKernels(torch.device("cpu"), KEYS, move)
    loaded, staging = loaded_slice(pool, case_work(pool, case))
    table = loaded.table
    sums = np.zeros((2, table.block_count, 4), np.uint64)
    kernels.digest_rows(loaded, int(sums[0].ctypes.data), 0)
    kernels.gather(loaded, 0)
    kernels.digest_staging(loaded, int(sums[1].ctypes.data), 0)
    for number, chunk in enumerate(table.staged):
        length = chunk.work.span.length_bytes
        assert staging[chunk.staging_bytes : chunk.staging_bytes + length].tobytes() == expected[number]
        digest = DIGESTER.digest(MLH, np.frombuffer(expected[number], np.uint8))
        for half in sums:
            blocks = half[chunk.first_block : chunk.first_block + chunk.block_count]
            assert DIGESTER.mlh.finish(blocks, length) == digest
    assert np.array_equal(pool.memory, before)

    for prefix in {*case.prefixes[::7], *case.prefixes[-1:]}:
        work = case_work(pool, case, prefix)
        pool.memory[:] ^= 0x5A
        destroyed = pool.memory.copy()
        if work.chunks:
            loaded, staging = loaded_slice(pool, work)
            for chunk in loaded.table.staged:
                stored = np.frombuffer(expected[chunk.work.number], np.uint8)
                staging[chunk.staging_bytes : chunk.staging_bytes + len(stored)] = stored
            kernels.scatter(loaded, 0)
        assert np.array_equal(pool.memory, case.restored(destroyed, before, prefix))


def loaded_slice(pool: HostPool, work: SliceWork) -> tuple[LoadedSlice, Bytes]:
    """A slice as the kernels see it, and its staging."""
    table = slice_table(work, group_shapes(pool.layout))
    staging = np.full(table.staging_bytes, 0xEE, np.uint8)
    address, size = int(pool.memory.ctypes.data), len(pool.memory)
    return LoadedSlice(table, pool.layout, address, size, 0, 1, 0, 0, 0, int(staging.ctypes.data)), staging
