"""A stage in a GPU tensor, as it is handed to the daemon: IPC handle of its allocation, interprocess event, probe."""

import ctypes
import functools
import struct
import sys
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from ipc.messages import CudaIpcPool, Stage
from shm.gpu_runtime import DEVICE_TO_HOST, GpuError, GpuRuntime, GpuUnavailable
from shm.layout import StageLayout
from stratad._probe import PROBE_BYTES, probe_offsets
from stratad.errors import PeerGone, StratadError, UsageError
from stratad.pools import Hold

if TYPE_CHECKING:
    import torch

    from stratad._connection import Connection

_EXPANDABLE_HINT: Final = (
    "memory of expandable segments cannot be handed to another process: start the engine with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or allocate the pool before they are switched on"
)


class GpuExport:
    """A contiguous tensor on a GPU. Owns an interprocess event and keeps the tensor alive."""

    def __init__(
        self,
        runtime: GpuRuntime,
        uuid: str,
        layout: StageLayout,
        tensor: "torch.Tensor",
        *,
        pool: CudaIpcPool,
        event: int,
    ) -> None:
        """`pool` is complete; `event` is 0 where the runtime shares no events."""
        self.layout: Final = layout
        self.ordered = "event" if event else "host"
        # An event must not be recorded once nobody asks it any more.
        self._ordering = threading.Lock()
        self._runtime = runtime
        self._uuid = uuid
        self._tensor: torch.Tensor | None = tensor
        self._pool = pool
        self._event = event

    def wire(self, link: "Connection", index: int) -> Stage:
        """See `StageExport`."""
        offsets = probe_offsets(self.layout, self._pool.pool_bytes)
        try:
            read = self._read(offsets)
        except GpuError as exc:
            raise PeerGone("device_error", f"stage {index}: the probe cannot be read: {exc}", stage=index) from exc
        packed = struct.pack(f"<{len(offsets)}Q", *offsets)
        return Stage(index, self._uuid, self._pool, self.layout, packed, read)

    def order(self) -> None:
        """Record the event on the stage's current stream, or wait for that stream where there is no event.

        Raises:
            PeerGone: the device failed (code ``device_error``).
        """
        torch, tensor = sys.modules["torch"], self._tensor
        assert tensor is not None
        try:
            # The default stream is the current device's: without this the event would be recorded on another GPU.
            with torch.cuda.device(tensor.device):
                stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
                with self._ordering:
                    if self.ordered == "event":
                        self._runtime.event_record(self._event, stream)
                        return
                self._runtime.stream_synchronize(stream)
        except GpuError as exc:
            raise PeerGone("device_error", f"the operation cannot be ordered: {exc}") from exc

    def order_by_host(self) -> None:
        """See `StageExport`."""
        with self._ordering:
            if self.ordered == "host":
                return
            try:
                self._runtime.event_synchronize(self._event)
            except GpuError as exc:
                raise PeerGone("device_error", f"the event cannot be waited for: {exc}") from exc
            self.ordered = "host"
            self._pool = msgspec.structs.replace(self._pool, event_handle=b"")

    def attach(self, hold: Hold) -> None:
        """Nothing to do: the tensor is kept alive until `close`."""

    def close(self, hold: Hold) -> None:
        """See `StageExport`."""
        tensor, self._tensor = self._tensor, None
        event, self._event = self._event, 0
        if event and tensor is not None:
            try:
                with sys.modules["torch"].cuda.device(tensor.device):
                    self._runtime.event_destroy(event)
            except GpuError:
                pass  # the device is lost, and the event with it

    def _read(self, offsets: list[int]) -> bytes:
        """The probed bytes. Copied one by one: gathering them with torch would need device memory on a full card."""
        torch, tensor = sys.modules["torch"], self._tensor
        assert tensor is not None
        buffer = ctypes.create_string_buffer(max(len(offsets) * PROBE_BYTES, 1))
        with torch.cuda.device(tensor.device):
            stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
            for number, offset in enumerate(offsets):
                target = ctypes.addressof(buffer) + number * PROBE_BYTES
                self._runtime.memcpy_async(target, tensor.data_ptr() + offset, PROBE_BYTES, DEVICE_TO_HOST, stream)
            self._runtime.stream_synchronize(stream)
        return buffer.raw[: len(offsets) * PROBE_BYTES]


def export_gpu_stage(index: int, device: str, layout: StageLayout, tensor: "torch.Tensor") -> GpuExport:
    """Make a checked, contiguous tensor on a GPU ready to be sent.

    Raises:
        UsageError: no GPU, another one than `device` names (``foreign_device``), memory that cannot be shared
            (``unshareable``).
    """
    if not tensor.is_cuda:
        raise _unshareable(index, f"a tensor on {tensor.device} cannot be shared: only CUDA and ROCm devices can")
    torch = sys.modules["torch"]
    try:
        runtime = _runtime()
        ordinal: int = tensor.device.index
        uuid = runtime.device_uuid(ordinal)
        _check_device(index, device, ordinal, uuid)
        if _expandable(tensor.data_ptr()):
            raise _unshareable(index, _EXPANDABLE_HINT)
        with torch.cuda.device(tensor.device):
            pool, event = _share(runtime, index, tensor)
    except GpuUnavailable as exc:
        raise _unshareable(index, f"no GPU runtime could be loaded: {exc}") from exc
    except GpuError as exc:
        raise PeerGone("device_error", f"stage {index}: {exc}", stage=index) from exc
    return GpuExport(runtime, uuid, layout, tensor, pool=pool, event=event)


def _share(runtime: GpuRuntime, index: int, tensor: "torch.Tensor") -> tuple[CudaIpcPool, int]:
    address = tensor.data_ptr()
    base, allocation_bytes = runtime.allocation_of(address)
    pool_bytes = tensor.numel() * tensor.element_size()
    if address + pool_bytes > base + allocation_bytes:
        # Only memory mapped piece by piece looks like that.
        raise _unshareable(index, f"the tensor is spread over several allocations; {_EXPANDABLE_HINT}")
    try:
        handle = runtime.ipc_mem_handle(base)
    except GpuError as exc:
        raise _unshareable(index, f"the allocation cannot be shared ({exc}); {_EXPANDABLE_HINT}") from exc
    event, event_handle = _make_event(runtime)
    return CudaIpcPool(handle, allocation_bytes, address - base, pool_bytes, event_handle), event


def _make_event(runtime: GpuRuntime) -> tuple[int, bytes]:
    """An interprocess event with its handle; 0 and nothing where the platform has none."""
    try:
        event = runtime.event_create(interprocess=True)
    except GpuError:
        return 0, b""
    try:
        return event, runtime.ipc_event_handle(event)
    except GpuError:
        runtime.event_destroy(event)
        return 0, b""


def _check_device(index: int, device: str, ordinal: int, uuid: str) -> None:
    wanted = device.lower()
    mine = {f"cuda:{ordinal}", uuid.lower(), uuid.lower().removeprefix("gpu-")}
    if wanted.removeprefix("mig-") not in mine and wanted not in mine:
        raise UsageError(
            "foreign_device", f"stage {index}: the tensor is on cuda:{ordinal} ({uuid}), not on {device!r}", stage=index
        )


def _expandable(address: int) -> bool:
    """Whether torch's allocator holds the address in an expandable segment."""
    for segment in sys.modules["torch"].cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return False


@functools.cache
def _runtime() -> GpuRuntime:
    return GpuRuntime.load()


def _unshareable(index: int, why: str) -> StratadError:
    return UsageError("unshareable", f"stage {index}: {why}", stage=index)
