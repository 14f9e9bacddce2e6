"""Which devices there are, and which CPUs are near them. No torch and no CUDA: the supervisor runs this."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

PROC_NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
QUERY_TIMEOUT_S: Final = 20.0


class DeviceSpec(NamedTuple):
    """One device to serve: the worker's name, the device's name and the CPUs its worker is pinned to."""

    worker: str
    device: str
    cpus: tuple[int, ...]


class Gpu(NamedTuple):
    """A GPU as the driver lists it; `pci` is its bus address (lower case), or "" where it is not known."""

    uuid: str
    pci: str


class Place(NamedTuple):
    """Where a device is on the host: `numa_node` is -1, and `cpus` are empty, where the kernel does not say."""

    pci: str
    numa_node: int
    cpus: tuple[int, ...]


class TopologyError(ValueError):
    """A device that was asked for is not there."""


def cpu_devices(count: int, allowed: Sequence[int]) -> list[DeviceSpec]:
    """`count` host-memory devices; the allowed CPUs are dealt out so that each worker has a mask of its own, as far as
    there are enough of them.
    """
    shares: list[tuple[int, ...]] = []
    for number in range(count):
        share = tuple(allowed[number::count]) if count <= len(allowed) else (allowed[number % len(allowed)],)
        shares.append(share)
    return [DeviceSpec(f"cpu:{number}", f"cpu:{number}", share) for number, share in enumerate(shares)]


def gpu_devices(wanted: Sequence[str], gpus: Sequence[Gpu], allowed: Sequence[int]) -> list[DeviceSpec]:
    """The GPUs with the wanted UUIDs (all of them when `wanted` is empty).

    Raises:
        TopologyError: names the UUID that no GPU has, and those that there are.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    missing = [uuid for uuid in wanted if uuid not in by_uuid]
    if missing:
        known = ", ".join(by_uuid) or "none"
        raise TopologyError(f"no GPU has the UUID {missing[0]!r}; there are: {known}")
    chosen = [by_uuid[uuid] for uuid in wanted] if wanted else list(gpus)
    names = _short_names([gpu.uuid for gpu in chosen])
    return [DeviceSpec(name, gpu.uuid, near_cpus(gpu.pci, allowed)) for name, gpu in zip(names, chosen, strict=True)]


def _short_names(uuids: Sequence[str]) -> list[str]:
    """The shortest common cut (at least 12 characters) that keeps the names apart."""
    for length in range(12, 64):
        names = [uuid[:length] for uuid in uuids]
        if len(set(names)) == len(names):
            return names
    return list(uuids)


def near_cpus(pci: str, allowed: Sequence[int]) -> tuple[int, ...]:
    """CPUs on the device's NUMA node that this process may use; all allowed ones where the kernel does not say."""
    local = set(place_of(pci).cpus)
    near = tuple(cpu for cpu in allowed if cpu in local)
    return near or tuple(allowed)


def place_of(pci: str) -> Place:
    """What the kernel says of the device with a bus address ("": nothing)."""
    folder = PCI_DEVICES / pci
    try:
        cpus = parse_cpu_list((folder / "local_cpulist").read_text(encoding="ascii")) if pci else ()
    except (OSError, ValueError):
        cpus = ()
    try:
        node = int((folder / "numa_node").read_text(encoding="ascii")) if pci else -1
    except (OSError, ValueError):
        node = -1
    return Place(pci, node, cpus)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers of a kernel list like ``0-3,8``.

    Raises:
        ValueError: it is no such list.
    """
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def find_gpus() -> list[Gpu]:
    """The GPUs of this host: from the NVIDIA driver's /proc files, else from nvidia-smi, else (AMD) from torch in a
    process of its own.
    """
    gpus = listed_gpus() or _from_nvidia_smi()
    if gpus:
        return gpus
    return _from_torch() if Path("/dev/kfd").exists() else []


def allowed_cpus() -> tuple[int, ...]:
    """CPUs this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def listed_gpus() -> list[Gpu]:
    """The GPUs in the NVIDIA driver's /proc files: nothing is asked that could hang."""
    gpus: list[Gpu] = []
    try:
        folders = sorted(PROC_NVIDIA.iterdir())
    except OSError:
        return gpus
    for folder in folders:
        try:
            text = (folder / "information").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "GPU UUID" and "?" not in value:
                gpus.append(Gpu(value.strip(), folder.name.lower()))
    return gpus


def _from_nvidia_smi() -> list[Gpu]:
    text = _output(["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"])
    gpus: list[Gpu] = []
    for line in text.splitlines():
        uuid, _, pci = line.partition(",")
        if uuid.strip().startswith("GPU-"):
            address = pci.strip().lower()
            gpus.append(Gpu(uuid.strip(), address[4:] if len(address) == 16 else address))
    return gpus


def _from_torch() -> list[Gpu]:
    code = (
        "import torch\n"
        "for n in range(torch.cuda.device_count()):\n"
        "    print(torch.cuda.get_device_properties(n).uuid)\n"
    )
    uuids = _output([sys.executable, "-P", "-c", code]).split()
    return [Gpu(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", "") for uuid in uuids]


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
