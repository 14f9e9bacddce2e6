"""Stages on their way to the daemon: checks of a `StagePool`, its probe, and its form on the wire."""

import re
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ipc.messages import MemfdPool, Stage
from shm.layout import LayoutError, StageLayout, check_layout
from stratad._probe import PROBE_BYTES, probe_offsets
from stratad.errors import UsageError
from stratad.pools import CpuPool, Hold, StagePool

if TYPE_CHECKING:
    from stratad._connection import Connection

_CPU_DEVICE: Final = re.compile(r"cpu:[0-9]+")


class StageExport(Protocol):
    """A checked stage that can be sent to a daemon any number of times. Owns what the export needs, not the memory."""

    @property
    def layout(self) -> StageLayout:
        """The stage's layout."""
        ...

    @property
    def ordered(self) -> str:
        """``event`` where the worker can poll an event of ours, ``host`` where `order` waits."""
        ...

    def wire(self, link: "Connection", index: int) -> Stage:
        """The stage for a `Register` that is sent on `link` right after, with a probe of the bytes of now.

        Raises:
            StratadError: the memory can no longer be exported.
        """
        ...

    def order(self) -> None:
        """Order what the worker will do after all that was submitted to the stage's current stream until now."""
        ...

    def order_by_host(self) -> None:
        """The daemon's workers cannot ask our event: from now on `ordered` is ``host``. Waits for what the event was
        recorded after.

        Raises:
            StratadError: the device failed.
        """
        ...

    def attach(self, hold: Hold) -> None:
        """Have the memory's owner ask `hold` before it releases the memory."""
        ...

    def close(self, hold: Hold) -> None:
        """Let go of the memory. Idempotent."""
        ...


class CpuExport:
    """A stage in a `CpuPool`."""

    def __init__(self, device: str, layout: StageLayout, pool: CpuPool) -> None:
        self.layout: Final = layout
        self.ordered: Final = "host"
        self._device = device
        self._pool = pool

    def wire(self, link: "Connection", index: int) -> Stage:
        """See `StageExport`."""
        offsets = probe_offsets(self.layout, self._pool.nbytes)
        buffer = self._pool.buffer
        read = b"".join([bytes(buffer[offset : offset + PROBE_BYTES]) for offset in offsets])
        packed = struct.pack(f"<{len(offsets)}Q", *offsets)
        tag = link.offer_descriptor(self._pool.descriptor)
        return Stage(index, self._device, MemfdPool(tag, self._pool.nbytes), self.layout, packed, read)

    def order(self) -> None:
        """Nothing to do: the engine's stores were made by its own program order."""

    def order_by_host(self) -> None:
        """Nothing to do."""

    def attach(self, hold: Hold) -> None:
        """See `StageExport`."""
        self._pool.hold(hold)

    def close(self, hold: Hold) -> None:
        """See `StageExport`."""
        self._pool.release(hold)


def export_stages(stages: Sequence[StagePool]) -> tuple[StageExport, ...]:
    """Check all stages of an engine and make them ready to be sent.

    Raises:
        UsageError: no stages, a layout that does not fit (``bad_layout``), a device that is not the memory's
            (``foreign_device``), memory that cannot be shared (``unshareable``).
    """
    if not stages:
        raise UsageError("bad_value", "an engine needs at least one stage, got none")
    exports: list[StageExport] = []
    try:
        for index, stage in enumerate(stages):
            exports.append(_export(index, stage))
    except BaseException:
        for export in exports:
            export.close(_Nobody())
        raise
    return tuple(exports)


def _export(index: int, stage: StagePool) -> StageExport:
    memory = stage.memory
    if isinstance(memory, CpuPool):
        if not _CPU_DEVICE.fullmatch(stage.device):
            raise UsageError(
                "foreign_device",
                f"stage {index}: a CpuPool lies on a device cpu:K, not on {stage.device!r}",
                stage=index,
            )
        _check_layout(index, stage.layout, memory.nbytes)
        return CpuExport(stage.device, stage.layout, memory)
    if not hasattr(memory, "data_ptr"):
        raise UsageError(
            "unshareable",
            f"stage {index}: memory must be a CpuPool or a torch tensor on a GPU, got {type(memory).__name__}: "
            "allocate with stratad.pools.CpuPool.allocate(nbytes)",
            stage=index,
        )
    if memory.device.type == "cpu":
        raise UsageError(
            "unshareable",
            f"stage {index}: a CPU tensor of this process cannot be shared with a worker: allocate with "
            "stratad.pools.CpuPool.allocate(nbytes) and take the tensor from pool.tensor(dtype, shape)",
            stage=index,
        )
    if not memory.is_contiguous():
        raise UsageError(
            "unshareable",
            f"stage {index}: the tensor of shape {tuple(memory.shape)} is not contiguous (strides {memory.stride()}): "
            "register the whole storage and describe the gaps in the layout",
            stage=index,
        )
    _check_layout(index, stage.layout, memory.numel() * memory.element_size())
    from stratad._gpu_stage import export_gpu_stage  # noqa: PLC0415 - engines without GPUs need none of it

    return export_gpu_stage(index, stage.device, stage.layout, memory)


def _check_layout(index: int, layout: StageLayout, pool_bytes: int) -> None:
    try:
        check_layout(layout, pool_bytes)
    except LayoutError as exc:
        raise UsageError("bad_layout", f"stage {index}: {exc}", stage=index) from exc


class _Nobody:
    """A hold that was never attached."""

    def reason(self) -> None:
        return None
