"""The memory of the fault matrix's engine: one pool a stage, on a `cpu` device or on a GPU, read and written by slots.

::

    pool    plane 0: | slot 0 | slot 1 | ...   plane 1: | slot 0 | slot 1 | ...
    slot    `tokens` rows of `row_bytes` in every plane; its bytes are those of plane 0, then of plane 1, ...
"""

import random
from typing import Final, Protocol

from shm.layout import Plane, StageLayout, one_group
from stratad.pools import CpuPool, StagePool


class Shape:
    """Sizes of one stage; all stages have the same."""

    def __init__(self, slots: int, tokens: int, planes: int, row_bytes: int, chunk_tokens: int) -> None:
        self.tokens: Final = tokens
        self.planes: Final = planes
        self.row_bytes: Final = row_bytes
        self.plane_bytes: Final = slots * tokens * row_bytes
        self.slot_bytes: Final = planes * tokens * row_bytes
        rows = slots * tokens
        made = [Plane(number * self.plane_bytes, row_bytes, row_bytes, rows) for number in range(planes)]
        self.layout: Final = StageLayout(groups=one_group(made), chunk_tokens=chunk_tokens)

    def parts(self, slot: int) -> list[int]:
        """Where a slot's bytes begin in each plane of the pool."""
        first = slot * self.tokens * self.row_bytes
        return [plane * self.plane_bytes + first for plane in range(self.planes)]

    def contents(self, seed: int, stage: int) -> bytes:
        """What a slot of a stage holds: of another seed, or stage, other bytes."""
        return random.Random(f"{seed}/{stage}").randbytes(self.slot_bytes)  # noqa: S311 - known bytes are wanted


class Memory(Protocol):
    """One stage's pool."""

    @property
    def pool(self) -> StagePool:
        """As it is registered."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the pool."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes and wait until they are there."""
        ...


class HostMemory:
    """A stage on a `cpu` device."""

    def __init__(self, device: str, shape: Shape) -> None:
        self._memory = CpuPool.allocate(shape.plane_bytes * shape.planes)
        self.pool = StagePool(device, shape.layout, self._memory)

    def read(self, offset: int, size: int) -> bytes:
        """See `Memory`."""
        return bytes(self._memory.buffer[offset : offset + size])

    def write(self, offset: int, data: bytes) -> None:
        """See `Memory`."""
        self._memory.buffer[offset : offset + len(data)] = data


class GpuMemory:
    """A stage on a GPU, which `device` names by its UUID."""

    def __init__(self, device: str, shape: Shape) -> None:
        import torch  # noqa: PLC0415 - only for GPUs

        self._torch = torch
        count = torch.cuda.device_count()
        ordinal = next(n for n in range(count) if f"GPU-{torch.cuda.get_device_properties(n).uuid}" == device)
        self._device = f"cuda:{ordinal}"
        self._memory = torch.empty(shape.plane_bytes * shape.planes, dtype=torch.uint8, device=self._device)
        self.pool = StagePool(device, shape.layout, self._memory)

    def read(self, offset: int, size: int) -> bytes:
        """See `Memory`."""
        return bytes(self._memory[offset : offset + size].cpu().numpy().tobytes())

    def write(self, offset: int, data: bytes) -> None:
        """See `Memory`."""
        source = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._memory[offset : offset + len(data)].copy_(source)
        self._torch.cuda.synchronize(self._device)


def allocate(device: str, shape: Shape) -> Memory:
    """A pool on the device. Raises what the allocation raises."""
    return HostMemory(device, shape) if device.startswith("cpu:") else GpuMemory(device, shape)


def read_slot(memory: Memory, shape: Shape, slot: int) -> bytes:
    """All bytes of a slot."""
    part_bytes = shape.tokens * shape.row_bytes
    return b"".join(memory.read(offset, part_bytes) for offset in shape.parts(slot))


def write_slot(memory: Memory, shape: Shape, slot: int, data: bytes) -> None:
    """Write all bytes of a slot."""
    part_bytes = shape.tokens * shape.row_bytes
    for plane, offset in enumerate(shape.parts(slot)):
        memory.write(offset, data[plane * part_bytes : (plane + 1) * part_bytes])
