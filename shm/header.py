"""The header of a shuttle: who made it, which one it is and how long, in the first bytes of granule 0.

::

    0      8       12      16           24         40            72           136
    | magic | version | index | shuttle_bytes | boot id | instance     | worker      | crc32 of all before |
"""

import re
import struct
import zlib
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"stratad\0"
VERSION: Final = 1
_BODY: Final = struct.Struct("<8sIIQ16s32s64s")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _BODY.size + _CHECK.size
INSTANCE_PATTERN: Final = r"[a-z0-9_-]{1,32}"
_WORKER_PATTERN: Final = r"[A-Za-z0-9_-]{1,64}"
_SEGMENT: Final = re.compile(rf"/stratad\.({INSTANCE_PATTERN})\.({_WORKER_PATTERN})\.(0|[1-9][0-9]{{0,8}})")


@dataclass(frozen=True, slots=True)
class ShuttleHeader:
    """What a shuttle says about itself. `worker` is spelled as in the segment's name; `boot_id` has 16 bytes."""

    instance: str
    worker: str
    index: int
    shuttle_bytes: int
    boot_id: bytes

    @property
    def segment(self) -> str:
        """The POSIX name that belongs to this header."""
        return f"/stratad.{self.instance}.{self.worker}.{self.index}"


def segment_name(instance: str, worker: str, index: int) -> str:
    """POSIX name of a shuttle; a ``:`` in the worker's name becomes ``_``.

    Raises:
        ValueError: the instance or the worker cannot be part of such a name.
    """
    name = f"/stratad.{instance}.{worker.replace(':', '_')}.{index}"
    if not _SEGMENT.fullmatch(name):
        raise ValueError(f"{name!r} is no segment name: instance {INSTANCE_PATTERN}, worker {_WORKER_PATTERN} or ':'")
    return name


def split_segment_name(segment: str) -> tuple[str, str, int] | None:
    """Instance, worker and index of a segment name; None for a name that is not ours."""
    match = _SEGMENT.fullmatch(segment)
    return None if match is None else (match[1], match[2], int(match[3]))


def pack_header(header: ShuttleHeader) -> bytes:
    """Encode a header."""
    body = _BODY.pack(
        MAGIC,
        VERSION,
        header.index,
        header.shuttle_bytes,
        header.boot_id,
        header.instance.encode(),
        header.worker.encode(),
    )
    return body + _CHECK.pack(zlib.crc32(body))


def unpack_header(packed: bytes) -> ShuttleHeader:
    """Decode `pack_header`.

    Raises:
        ValueError: cut short, not ours, of another version, or damaged.
    """
    if len(packed) < HEADER_BYTES:
        raise ValueError(f"{len(packed)} bytes are no shuttle header of {HEADER_BYTES}")
    magic, version, index, shuttle_bytes, boot_id, instance, worker = _BODY.unpack_from(packed)
    if magic != MAGIC:
        raise ValueError("there is no shuttle header")
    if version != VERSION:
        raise ValueError(f"the shuttle header has version {version}, expected {VERSION}")
    if _CHECK.unpack_from(packed, _BODY.size) != (zlib.crc32(packed[: _BODY.size]),):
        raise ValueError("the shuttle header is damaged")
    return ShuttleHeader(instance.rstrip(b"\0").decode(), worker.rstrip(b"\0").decode(), index, shuttle_bytes, boot_id)
