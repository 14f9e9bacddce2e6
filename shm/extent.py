"""Extents: where the bytes of a chunk lie inside the shuttles of one worker.

A shuttle is divided into granules of 64 KiB. Granule 0 of every shuttle holds its header (see `shm.shuttle`) and is
never handed out. A chunk fills its extents in order; only the last granule of the last extent may be partly used.

Packed form of the places of several chunks (little-endian, as it travels in a job)::

    for each chunk:  length_bytes u64 | extent_count u32 | extent_count x (shuttle u32, first granule u32, granules u32)
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

GRANULE_BYTES: Final = 64 * 1024
_HEAD: Final = struct.Struct("<QI")
_EXTENT: Final = struct.Struct("<III")
_ONE: Final = struct.Struct("<QIIII")  # a head and the one extent that most chunks have


class Extent(NamedTuple):
    """A run of granules of one shuttle.

    `shuttle` is the index of the shuttle within its worker's arena, `offset_bytes` and `length_bytes` are multiples of
    `GRANULE_BYTES`.
    """

    shuttle: int
    offset_bytes: int
    length_bytes: int


class ChunkPlace(NamedTuple):
    """The exact length of a chunk and the extents that hold it; the extents are at least as long as the chunk."""

    length_bytes: int
    extents: tuple[Extent, ...]


def granules_for(length_bytes: int) -> int:
    """Number of granules that hold `length_bytes` bytes."""
    return -(-length_bytes // GRANULE_BYTES)


def pack_places(places: Iterable[ChunkPlace]) -> bytes:
    """Encode the places of a job's chunks, in order."""
    parts: list[bytes] = []
    for length_bytes, extents in places:
        if len(extents) == 1:
            ((shuttle, offset, length),) = extents
            parts.append(_ONE.pack(length_bytes, 1, shuttle, offset // GRANULE_BYTES, length // GRANULE_BYTES))
            continue
        parts.append(_HEAD.pack(length_bytes, len(extents)))
        for shuttle, offset, length in extents:
            parts.append(_EXTENT.pack(shuttle, offset // GRANULE_BYTES, length // GRANULE_BYTES))
    return b"".join(parts)


def unpack_places(packed: bytes) -> Sequence[ChunkPlace]:
    """Decode `pack_places`.

    Raises:
        ValueError: the buffer is cut short, or a chunk is longer than its extents.
    """
    places: list[ChunkPlace] = []
    at = 0
    try:
        while at < len(packed):
            length_bytes, count = _HEAD.unpack_from(packed, at)
            at += _HEAD.size
            extents: list[Extent] = []
            for _ in range(count):
                shuttle, first, granules = _EXTENT.unpack_from(packed, at)
                at += _EXTENT.size
                extents.append(Extent(shuttle, first * GRANULE_BYTES, granules * GRANULE_BYTES))
            if sum(e.length_bytes for e in extents) < length_bytes:
                raise ValueError(f"chunk of {length_bytes} bytes is longer than its extents")
            places.append(ChunkPlace(length_bytes, tuple(extents)))
    except struct.error as exc:
        raise ValueError(f"packed places are cut short at byte {at} of {len(packed)}") from exc
    return places
