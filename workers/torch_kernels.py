"""The kernels as torch operations: the slow way that works wherever torch does, when run-time compilation does not."""

from contextlib import AbstractContextManager
from typing import Final, cast

import torch

from workers.cuda_memory import Move
from workers.digest import BLOCK_BYTES, BLOCK_WORDS, SUMS, MlhKeys
from workers.gpu_kernels import LoadedSlice
from workers.kernel_source import COMPARE, COPY
from workers.rowmap import Index
from workers.slice_table import StagedChunk

_LOW_32: Final = 0xFFFFFFFF


class _DeviceBytes:
    """Device memory of others in the form that torch takes over without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class TorchKernels:
    """See `workers.gpu_kernels.SliceKernels`. Needs torch's own device memory beside staging: about four slices."""

    path = "torch"

    def __init__(self, device: torch.device, keys: MlhKeys, move: Move) -> None:
        self._device = device
        self._move = move
        self._keys = torch.from_numpy(keys.first.view("<i8")).to(self._device)

    def digest_rows(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """See `SliceKernels`."""
        with self._on(stream):
            for number, chunk in enumerate(loaded.table.staged):
                self._add_sums(self._gathered(loaded, chunk, number, loaded.table.rows), chunk, sums)

    def gather(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        with self._on(stream):
            for number, chunk in enumerate(loaded.table.staged):
                self._staged(loaded, chunk).copy_(self._gathered(loaded, chunk, number, loaded.table.rows))

    def digest_staging(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """See `SliceKernels`."""
        with self._on(stream):
            for chunk in loaded.table.staged:
                self._add_sums(self._staged(loaded, chunk), chunk, sums)

    def scatter(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        with self._on(stream):
            for number, chunk in enumerate(loaded.table.staged):
                self._scatter(loaded, chunk, number, loaded.table.rows, self._staged(loaded, chunk))

    def copy_rows(self, loaded: LoadedSlice, differs: int, what: int, stream: int) -> None:
        """See `SliceKernels`."""
        table = loaded.table
        with self._on(stream):
            for number, chunk in enumerate(table.staged):
                if what & COPY:
                    source = self._gathered(loaded, chunk, number, table.rows)
                    self._scatter(loaded, chunk, number, table.targets, source)
                if what & COMPARE:
                    source = self._gathered(loaded, chunk, number, table.rows)
                    unequal = (source != self._gathered(loaded, chunk, number, table.targets)).any()
                    mark = self._bytes(differs + chunk.first_block * SUMS * 8, 1)
                    mark.copy_(unequal.to(torch.uint8).view(1))

    def load(self, target: int, source: int, size_bytes: int, *, sums: int, sums_bytes: int, stream: int) -> None:
        """See `SliceKernels`."""
        self._move(target, source, size_bytes, stream)
        with self._on(stream):
            self._bytes(sums, sums_bytes).zero_()

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `SliceKernels`."""
        self._move(target, source, size_bytes, stream)

    def close(self) -> None:
        """See `SliceKernels`."""

    def _on(self, stream: int) -> "AbstractContextManager[object]":
        outer = torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[object]", torch.cuda.stream(outer))

    def _bytes(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, size_bytes), device=self._device)

    def _staged(self, loaded: LoadedSlice, chunk: StagedChunk) -> torch.Tensor:
        return self._bytes(loaded.staging + chunk.staging_bytes, chunk.work.span.length_bytes)

    def _planes(self, loaded: LoadedSlice, chunk: StagedChunk) -> list[tuple[torch.Tensor, int]]:
        """Each plane as (rows, row_bytes) bytes, with its bytes a token."""
        pool = self._bytes(loaded.pool, loaded.pool_bytes)
        return [
            (
                pool.as_strided((plane.rows, plane.row_bytes), (plane.row_stride_bytes, 1), plane.offset_bytes),
                plane.token_stride_bytes or plane.row_bytes,
            )
            for plane in loaded.layout.all_groups[chunk.work.span.group].planes
        ]

    def _index(self, loaded: LoadedSlice, chunk: StagedChunk, number: int, rows: Index) -> torch.Tensor:
        first = int(loaded.table.chunks[number]["first_row"])
        wanted = rows[first : first + chunk.work.live_rows]
        return torch.from_numpy(wanted.astype("<i8")).to(self._device)

    def _gathered(self, loaded: LoadedSlice, chunk: StagedChunk, number: int, rows: Index) -> torch.Tensor:
        work = chunk.work
        index = self._index(loaded, chunk, number, rows)
        out = torch.zeros(work.span.length_bytes, dtype=torch.uint8, device=self._device)
        at = 0
        row_count = work.span.row_count
        for plane, token_bytes in self._planes(loaded, chunk):
            size = row_count * plane.shape[1]
            part = out[at : at + size].view(row_count, plane.shape[1])
            part[: work.live_rows] = plane.index_select(0, index)
            if work.tail_tokens:
                part[work.live_rows - 1, work.tail_tokens * token_bytes :] = 0
            at += size
        return out

    def _scatter(self, loaded: LoadedSlice, chunk: StagedChunk, number: int, rows: Index, staged: torch.Tensor) -> None:
        work = chunk.work
        index = self._index(loaded, chunk, number, rows)
        at = 0
        row_count = work.span.row_count
        whole = work.live_rows - (1 if work.tail_tokens else 0)
        for plane, token_bytes in self._planes(loaded, chunk):
            size = row_count * plane.shape[1]
            part = staged[at : at + size].view(row_count, plane.shape[1])
            plane.index_copy_(0, index[:whole], part[:whole])
            if work.tail_tokens:
                tail_bytes = work.tail_tokens * token_bytes
                plane[index[whole], :tail_bytes] = part[whole, :tail_bytes]
            at += size

    def _add_sums(self, data: torch.Tensor, chunk: StagedChunk, sums: int) -> None:
        count = chunk.block_count
        out = self._bytes(sums + chunk.first_block * SUMS * 8, count * SUMS * 8).view(torch.int64).view(count, SUMS)
        for block in range(count):
            part = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            padding = -len(part) % 4
            if padding or part.data_ptr() % 4:
                part = torch.nn.functional.pad(part, (0, padding)).clone()
            words = part.view(torch.int32).to(torch.int64) & _LOW_32
            assert len(words) <= BLOCK_WORDS, "a block is at most 1 MiB"
            # Multiplication and sum of int64 wrap around, as those of u64 do.
            out[block] += (self._keys[: len(words)] * words[:, None]).sum(dim=0)
