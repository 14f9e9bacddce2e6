"""Bytes in small: a row is one number, a granule the numbers of the rows that lie in it, a digest a real hash of them.

A row's number follows from what it stands for (the tokens up to it, and its stage), so anybody can say what must be in
a row or in a granule, and nobody has to be believed.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shm.extent import GRANULE_BYTES, ChunkPlace
from shm.layout import StageLayout

CHUNK_TOKENS: Final = 4
ROW_BYTES: Final = GRANULE_BYTES // 2
STATE_BYTES: Final = GRANULE_BYTES
KEY_ID: Final = b"simulate"
ALGORITHM: Final = "blake2b-128"
UNWRITTEN: Final = 0
_PRIME: Final = 0xFFFFFFFB
_TWIST: Final = 1 << 45

Granule: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[str, int, int]  # worker, shuttle, granule


class InvariantViolated(Exception):
    """What must never happen did: a finding of the simulator's own."""


def check(held: bool, what: str) -> None:
    """Raise `InvariantViolated` unless `held`."""
    if not held:
        raise InvariantViolated(what)


def prefix_numbers(tokens: Sequence[int]) -> list[int]:
    """For each token a number that stands for it and all before it."""
    numbers: list[int] = []
    number = 1
    for token in tokens:
        number = (number * 1_000_003 + token + 7) % _PRIME
        numbers.append(number)
    return numbers


def row_content(prefix: int, stage: int) -> int:
    """What a stage's row of a token holds; `prefix` is the token's number (see `prefix_numbers`)."""
    return prefix * 8 + stage + 1


def state_content(prefix: int, stage: int) -> int:
    """What a stage's state after a token holds."""
    return -(prefix * 8 + stage + 1)


def part_content(version: int, count: int) -> list[int]:
    """The rows of a part that was put; `version` stands for its bytes."""
    return [version * 4096 + number + 1 for number in range(count)]


def twisted(value: int) -> int:
    """What a row may hold in place of `value` for the same tokens: computed again, bytes may come out otherwise."""
    return value + _TWIST


def plain(value: int) -> int:
    """What a row holds, whatever changed it for the same tokens."""
    return value if value < 0 else value % _TWIST


def digest_of(rows: Sequence[int]) -> bytes:
    """The digest of a chunk."""
    return hashlib.blake2b(struct.pack(f"<{len(rows)}q", *rows), digest_size=16, key=KEY_ID).digest()


@dataclass(slots=True, eq=False)
class Segment:
    """A shared-memory segment: the granules that were ever written. `corrupted` are those whose bytes something that
    we do not control has changed since. Its maker has finished it when it is `whole`.
    """

    name: str
    worker: str
    index: int
    maker: int  # pid
    whole: bool = False
    granules: dict[int, Granule] = field(default_factory=dict)
    corrupted: set[int] = field(default_factory=set)

    def write(self, granule: int, content: Granule) -> None:
        """Overwrite a granule."""
        self.granules[granule] = content
        self.corrupted.discard(granule)


@dataclass(slots=True, eq=False)
class Pool:
    """Device memory of one stage of an engine: by group, the number in each row. It lives as long as anybody maps it.
    `mark` names the engine's own number of it.
    """

    layout: StageLayout
    stage: int
    rows: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [[UNWRITTEN] * group.rows for group in self.layout.all_groups]


def granules_of(place: ChunkPlace) -> list[tuple[int, int]]:
    """(shuttle, granule) of each granule of a place, in order."""
    found: list[tuple[int, int]] = []
    for shuttle, offset, length in place.extents:
        first = offset // GRANULE_BYTES
        found.extend((shuttle, granule) for granule in range(first, first + length // GRANULE_BYTES))
    return found


def cut(rows: Sequence[int], length_bytes: int, granules: int) -> list[Granule]:
    """The rows of a chunk as they lie in its granules; what is left of the last one stays out of account."""
    per = max(1, GRANULE_BYTES * len(rows) // length_bytes)
    pieces = [tuple(rows[at : at + per]) for at in range(0, len(rows), per)]
    check(len(pieces) <= granules, f"{len(rows)} rows of {length_bytes} bytes do not fit {granules} granules")
    return pieces


def join(granules: Iterable[Granule]) -> list[int]:
    """The rows of a chunk, from its granules."""
    return [row for granule in granules for row in granule]
