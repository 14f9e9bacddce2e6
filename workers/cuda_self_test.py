"""Known answers: every kernel, at every vector width, against numpy before a GPU worker calls itself ready."""

from typing import Final

import numpy as np

from shm.gpu_runtime import DEVICE_TO_HOST, GpuRuntime
from shm.layout import Plane, RowGroup, StageLayout, StateGroup
from shm.rows import pack_rows
from workers.cuda_memory import Counts, DeviceMemory, PinnedMemory, SlotMemory
from workers.cuda_pool import CudaPool, PoolMemory
from workers.device import DeviceFailure, SliceWork
from workers.digest import MLH, SUMS, Bytes, Digester
from workers.gpu_kernels import LoadedSlice, SliceKernels
from workers.jobs import copy_chunks
from workers.kernel_source import COMPARE, COPY
from workers.pieces import PoolView
from workers.rowmap import RowMap
from workers.slice_table import slice_table

_BLOCK_TOKENS: Final = 4
_BLOCKS: Final = 16
_TOKENS: Final = 30
_RUNS: Final = ((7, 3), (1, 2), (11, 1), (4, 2))
_OTHER_RUNS: Final = ((12, 4), (0, 1), (10, 1), (6, 1), (3, 1))
# Token bytes that lead to vectors of 16, 4 and 1 bytes; the first makes a chunk longer than one block of the digest.
_TOKEN_BYTES: Final = (48 * 1024, 20, 7)


def run_self_test(runtime: GpuRuntime, counts: Counts, kernels: SliceKernels, digester: Digester, stream: int) -> None:
    """Gather, digest in place and in staging, scatter, and copy from rows to rows; compare all of it.

    Raises:
        DeviceFailure: a kernel's answer is wrong.
        GpuError: the device failed.
    """
    for token_bytes in _TOKEN_BYTES:
        layout = _layout(token_bytes)
        memory = DeviceMemory(runtime, counts, layout.end_bytes)
        try:
            pool = CudaPool(
                runtime, counts, PoolMemory(memory.address, memory.size_bytes, _nothing), layout, event=0, stream=stream
            )
            slot = SlotMemory(runtime, counts, 2 * layout.end_bytes, kernels)
            try:
                _Trial(runtime, counts, kernels, digester, stream).run(pool, slot)
            finally:
                slot.close()
                pool.close()
        finally:
            memory.close()


def _nothing() -> None:
    """The memory is freed by who allocated it."""


def _layout(token_bytes: int) -> StageLayout:
    row_bytes = token_bytes * _BLOCK_TOKENS
    planes = (
        Plane(0, row_bytes, row_bytes, _BLOCKS, _BLOCK_TOKENS, token_bytes),
        Plane(row_bytes * _BLOCKS, row_bytes, 2 * row_bytes, _BLOCKS, _BLOCK_TOKENS, token_bytes),
    )
    end = -(-planes[-1].end_bytes // 16) * 16
    states = (
        Plane(end, 3 * token_bytes, 8 * token_bytes, 2),
        Plane(end + 4 * token_bytes, token_bytes, 8 * token_bytes, 2),
    )
    return StageLayout((RowGroup(planes),), (StateGroup(states),), 16)


class _Trial:
    """One layout's answers."""

    def __init__(
        self, runtime: GpuRuntime, counts: Counts, kernels: SliceKernels, digester: Digester, stream: int
    ) -> None:
        self._runtime = runtime
        self._counts = counts
        self._kernels = kernels
        self._digester = digester
        self._stream = stream

    def run(self, pool: CudaPool, slot: SlotMemory) -> None:
        layout = pool.layout
        source = np.random.default_rng(layout.end_bytes).integers(0, 256, pool.size_bytes, dtype=np.uint8)
        pool.write(0, source.tobytes())
        chunks = copy_chunks(layout, _TOKENS, (_TOKENS,))
        rows = (RowMap.parse(pack_rows(_RUNS), _BLOCKS, 8), RowMap.parse(pack_rows(((1, 1),)), 2, 1))
        work = SliceWork(pool, rows, tuple(chunks))
        table = slice_table(work, pool.shapes)
        loaded = LoadedSlice.of(pool, slot, table, self._stream)
        expected = _gathered(source, work)
        self._kernels.digest_rows(loaded, slot.source_sums, self._stream)
        self._kernels.gather(loaded, self._stream)
        self._kernels.digest_staging(loaded, slot.copy_sums, self._stream)
        slot.fetch_sums(self._stream)
        staged = self._fetch(slot.staging.address, table.staging_bytes)
        for number, chunk in enumerate(table.staged):
            end = chunk.staging_bytes + chunk.work.span.length_bytes
            if not np.array_equal(staged[chunk.staging_bytes : end], expected[number]):
                raise DeviceFailure("internal", f"gather at width {pool.width} gave a wrong answer")
            digest = self._digester.digest(MLH, expected[number])
            blocks = slice(chunk.first_block, chunk.first_block + chunk.block_count)
            for name, sums in zip(("rows", "staging"), slot.sums, strict=True):
                found = self._digester.mlh.finish(sums[blocks].reshape(-1, SUMS), chunk.work.span.length_bytes)
                if found != digest:
                    raise DeviceFailure("internal", f"digest of {name} at width {pool.width} gave a wrong answer")
        self._scatter(pool, loaded, work, expected, source)
        self._copy(pool, slot, work)

    def _scatter(
        self, pool: CudaPool, loaded: LoadedSlice, work: SliceWork, expected: list[Bytes], source: Bytes
    ) -> None:
        destroyed = source ^ np.uint8(0x5A)
        pool.write(0, destroyed.tobytes())
        self._kernels.scatter(loaded, self._stream)
        after = self._fetch(pool.address, pool.size_bytes)
        view = PoolView(destroyed, pool.layout)
        for chunk, data in zip(work.chunks, expected, strict=True):
            at = 0
            for piece in view.pieces(chunk, work.rows):
                piece.scatter(data[at : at + piece.size_bytes])
                at += piece.size_bytes
        if not np.array_equal(after, destroyed):
            raise DeviceFailure("internal", f"scatter at width {pool.width} gave a wrong answer")

    def _copy(self, pool: CudaPool, slot: SlotMemory, work: SliceWork) -> None:
        """To other rows and another slot; then a byte that changes must be seen."""
        others = RowMap.parse(pack_rows(_OTHER_RUNS), _BLOCKS, 8), RowMap.parse(pack_rows(((0, 1),)), 2, 1)
        target = work._replace(rows=others)
        loaded = LoadedSlice.of(pool, slot, slice_table(work, pool.shapes, target), self._stream)
        self._kernels.copy_rows(loaded, slot.source_sums, COPY | COMPARE, self._stream)
        self._kernels.copy_rows(loaded, slot.source_sums, COMPARE, self._stream)
        slot.fetch_sums(self._stream)
        memory = self._fetch(pool.address, pool.size_bytes)
        copied = all(map(np.array_equal, _gathered(memory, target), _gathered(memory, work)))
        if not copied or slot.sums[0].any():
            raise DeviceFailure("internal", f"copy at width {pool.width} gave a wrong answer")
        pool.flip_byte(pool.layout.all_groups[1].planes[1].offset_bytes)
        self._kernels.copy_rows(loaded, slot.source_sums, COMPARE, self._stream)
        slot.fetch_sums(self._stream)
        self._runtime.stream_synchronize(self._stream)
        if np.flatnonzero(slot.sums[0][:, 0]).tolist() != [loaded.table.block_count - 1]:
            raise DeviceFailure("internal", f"compare at width {pool.width} gave a wrong answer")

    def _fetch(self, address: int, size_bytes: int) -> Bytes:
        pinned = PinnedMemory(self._runtime, self._counts, size_bytes)
        try:
            self._runtime.memcpy_async(pinned.address, address, size_bytes, DEVICE_TO_HOST, self._stream)
            self._runtime.stream_synchronize(self._stream)
            return pinned.array[:size_bytes].copy()
        finally:
            pinned.close()


def _gathered(source: Bytes, work: SliceWork) -> list[Bytes]:
    view = PoolView(source, work.pool.layout)
    found: list[Bytes] = []
    for chunk in work.chunks:
        out = np.empty(chunk.span.length_bytes, np.uint8)
        at = 0
        for piece in view.pieces(chunk, work.rows):
            piece.gather(out[at : at + piece.size_bytes])
            at += piece.size_bytes
        found.append(out)
    return found
