"""From a worker's spec to its device."""

from ipc.messages import WorkerSpec
from workers.cpu_device import CpuDevice
from workers.device import CopyPath, Device
from workers.digest import Digester
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice


def fault_book(spec: WorkerSpec) -> FaultBook | None:
    """The faults that are ordered, and may be armed later, where the spec has or allows any.

    Raises:
        ValueError: an order that cannot be.
    """
    return FaultBook(spec.faults) if spec.faults or spec.allow_faults else None


def make_device(spec: WorkerSpec, digester: Digester, faults: FaultBook | None = None) -> Device:
    """The device that a spec names, wrapped where there may be faults.

    Raises:
        DeviceFailure: it cannot be had.
    """
    device: Device
    if spec.device.startswith("cpu:"):
        device = CpuDevice(digester, slice_bytes=spec.slice_bytes, link_bytes_per_s=spec.link_bytes_per_s)
    else:
        from workers.cuda_device import CudaDevice  # noqa: PLC0415 - needs libraries that cpu hosts do not have

        device = CudaDevice.open(
            spec.device,
            digester,
            slice_bytes=spec.slice_bytes,
            staging_bytes=spec.staging_bytes,
            direct_slice_bytes=spec.direct_slice_bytes,
            path=CopyPath(spec.copy_path),
            urgent=spec.urgent_streams,
        )
    return FaultyDevice(device, faults) if faults is not None else device
