"""The torch fallback on host memory, against the byte model and the numpy reference."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shm.layout import StageLayout
from tests.support.layouts import positions, state_bytes
from tests.unit.workers.rig import KEY, model_chunk, paged_layout, slot_layout, written_bytes
from tests.unit.workers.test_kernels import HostPool, work_of
from workers.digest import MLH, Digester
from workers.gpu_kernels import LoadedSlice
from workers.slice_table import slice_table

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

from workers.torch_kernels import TorchKernels  # noqa: E402

DIGESTER = Digester(KEY)


class HostTorchKernels(TorchKernels):
    """The operations on the CPU's own memory."""

    def _on(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext(stream)

    def _bytes(self, address: int, size_bytes: int) -> "Tensor":
        made: Tensor = torch.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), dtype=torch.uint8)
        return made


def move(target: int, source: int, size_bytes: int, stream: int) -> None:
    ctypes.memmove(target, source, size_bytes)


@pytest.mark.parametrize(
    ("layout", "tokens", "slot"),
    [(slot_layout(), 60, 1), (slot_layout(row_bytes=77), 40, -1), (paged_layout(), 37, -1), (paged_layout(), 192, -1)],
)
def test_torch_operations_do_what_the_model_says(layout: StageLayout, tokens: int, slot: int) -> None:
    pool = HostPool(layout, 3)
    rows = list(range(layout.groups[0].rows))[::-1][: layout.groups[0].rows_for(tokens)]
    before = pool.memory.tobytes()
    spans = layout.chunks(tokens, positions(tokens, slot))
    expected = [model_chunk(before, layout, rows, span, slot) for span in spans]
    table = slice_table(work_of(pool, rows, tokens, -1, slot), layout)
    staging = np.full(table.staging_bytes, 0xEE, np.uint8)
    loaded = LoadedSlice(table, layout, pool.memory.ctypes.data, len(pool.memory), 0, 1, 0, 0, int(staging.ctypes.data))
    kernels = HostTorchKernels(torch.device("cpu"), DIGESTER.mlh, move)
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
    pool.memory[:] ^= 0x5A
    destroyed = pool.memory.tobytes()
    kernels.scatter(loaded, 0)
    touched = written_bytes(layout, rows, tokens)
    if slot >= 0:
        touched |= state_bytes(layout, slot)
    after = pool.memory.tobytes()
    assert all(after[n] == (before[n] if n in touched else destroyed[n]) for n in range(len(after)))
