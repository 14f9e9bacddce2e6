"""What people do without a daemon, on the same bytes: a copy a block, all in one call, `.cpu()`, pageable memory."""

import mmap
import time
from collections.abc import Callable
from typing import Final

import torch

from shm.gpu_runtime import DEVICE_TO_HOST, GpuRuntime
from stratad.bench.copy_layout import CopyShape

# Bytes a second do not depend on how many there are; these take some seconds at worst.
_PIECES: Final = 16384
_PLAIN_BYTES: Final = 256 << 20


def baselines(pool: torch.Tensor, shape: CopyShape, page_locked: torch.Tensor) -> dict[str, float]:
    """Bytes a second of each way to bring the first slot's rows to the host. What was copied block by block is compared
    with the rows in gathered order.
    """
    rows = torch.tensor(shape.row_numbers(0), device=pool.device)
    planes, _, row_bytes = shape.axes
    count = max(1, min(_PIECES, page_locked.numel() // row_bytes, planes * len(rows)))
    plane_count = -(-count // len(rows))
    numbers = [(plane, row) for plane in range(plane_count) for row in rows.tolist()][:count]
    expected = torch.cat([plane[rows].reshape(-1) for plane in pool.view(shape.axes)[:plane_count].unbind()])
    expected = expected[: count * row_bytes]
    source, target = pool.data_ptr(), page_locked.data_ptr()
    per_plane = shape.axes[1] * row_bytes
    copies = [
        (target + at * row_bytes, source + plane * per_plane + row * row_bytes, row_bytes)
        for at, (plane, row) in enumerate(numbers)
    ]
    runtime = GpuRuntime.load()
    stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def one_by_one() -> None:
        for to, start, size in copies:
            runtime.memcpy_async(to, start, size, DEVICE_TO_HOST, stream.cuda_stream)

    ways: dict[str, Callable[[], None]] = {"block_copies": one_by_one}
    if runtime.copies_in_batches:
        ways["batch_copies"] = lambda: runtime.memcpy_many_async(copies, DEVICE_TO_HOST, stream.cuda_stream)
    found: dict[str, float] = {}
    for name, way in ways.items():
        page_locked[: len(expected)].zero_()
        found[name] = len(expected) / _timed(way, stream)
        if not torch.equal(page_locked[: len(expected)].to(pool.device), expected):
            raise RuntimeError(f"{name} brought other bytes")
    plain = pool[:_PLAIN_BYTES]
    found["to_cpu"] = len(plain) / _timed(plain.cpu, stream)
    shared = torch.frombuffer(mmap.mmap(-1, len(plain)), dtype=torch.uint8).zero_()
    found["pageable_copy"] = len(plain) / _timed(lambda: shared.copy_(plain), stream)
    return found


def _timed(way: Callable[[], object], stream: torch.cuda.Stream) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    way()
    stream.synchronize()
    return time.perf_counter() - started_s
