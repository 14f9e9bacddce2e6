"""Which devices the daemon serves, as the configuration spells it."""

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

MAX_CPU_WORKERS: Final = 64
# NVIDIA: GPU-<uuid>, MIG-<uuid>, and the older MIG-GPU-<uuid>/<instance>/<part>; AMD: GPU-<16 hex digits>.
_UUID: Final = re.compile(
    r"(GPU|MIG)-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{16})"
    r"|MIG-GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]{1,3}/[0-9]{1,3}",
    re.IGNORECASE,
)
_FORMS: Final = '"auto", "cpu:N", "cuda:all" or UUIDs such as "GPU-..." and "MIG-..."'


class Devices(msgspec.Struct, frozen=True):
    """The choice: ``auto`` (every GPU, without one `cpu` workers), ``cpu`` (`cpu_count` workers), ``cuda`` (every GPU)
    or ``uuids`` (these GPUs, in this order).
    """

    kind: Literal["auto", "cpu", "cuda", "uuids"]
    cpu_count: int = 0
    uuids: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The spelling that `parse_devices` reads."""
        match self.kind:
            case "auto":
                return "auto"
            case "cpu":
                return f"cpu:{self.cpu_count}"
            case "cuda":
                return "cuda:all"
            case "uuids":
                return ",".join(self.uuids)


def parse_devices(value: str | Sequence[object]) -> Devices:
    """Read ``auto``, ``cpu:N``, ``cuda:all``, or UUIDs (separated by commas, or as a list).

    Raises:
        ValueError: it is none of these, names a device twice, or is empty.
    """
    items = [str(item).strip() for item in (value.split(",") if isinstance(value, str) else value)]
    if items == ["auto"]:
        return Devices("auto")
    if items == ["cuda:all"]:
        return Devices("cuda")
    if len(items) == 1 and (cpu := re.fullmatch(r"cpu:(-?[0-9]{1,9})", items[0])):
        count = int(cpu[1])
        if not 1 <= count <= MAX_CPU_WORKERS:
            raise ValueError(f"cpu:N needs N from 1 to {MAX_CPU_WORKERS}, got {count}")
        return Devices("cpu", cpu_count=count)
    seen: set[str] = set()
    for item in items:
        if re.fullmatch(r"cuda:[0-9]+|-?[0-9]+", item):
            raise ValueError(f"{item!r} is an index: name GPUs by UUID, indices differ between processes")
        if not _UUID.fullmatch(item):
            raise ValueError(f"{item!r} is no device, expected {_FORMS}")
        if item.lower() in seen:
            raise ValueError(f"{item} is named twice")
        seen.add(item.lower())
    if not items:
        raise ValueError(f"no device is named, expected {_FORMS}")
    return Devices("uuids", uuids=tuple(items))
