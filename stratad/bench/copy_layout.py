"""The layouts that the copy benchmarks move: a slot cache of token rows, and caches with shuffled rows of any size."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shm.layout import Plane, StageLayout, one_group
from shm.rows import RowRuns, runs_of
from stratad.config import CopyConfig

# A layer's K or V of a model with 8 K/V heads of 64 in bf16: small pieces are what makes this hard.
TOKEN_BYTES: Final = 1024
PLANES: Final = 64
BLOCK_TOKENS: Final = 16


class PlaneForm(NamedTuple):
    """How many planes a stage has, and the bytes of a token in each."""

    planes: int = PLANES
    token_bytes: int = TOKEN_BYTES


USUAL_FORM: Final = PlaneForm()


class _Kind(NamedTuple):
    """Planes of so many tokens a row, a token's bytes in one plane, and whether a slot's rows lie in random order."""

    planes: int
    token_bytes: int
    row_tokens: int
    shuffled: bool


# All of them have the same bytes a token. The name of shuffled rows is their size.
_KINDS: Final = {
    "slot": _Kind(PLANES, TOKEN_BYTES, 1, shuffled=False),
    "paged": _Kind(PLANES, TOKEN_BYTES, BLOCK_TOKENS, shuffled=True),
    "rows-4k": _Kind(PLANES, TOKEN_BYTES, 4, shuffled=True),
    "rows-64k": _Kind(PLANES, TOKEN_BYTES, 64, shuffled=True),
    "rows-256k": _Kind(PLANES, TOKEN_BYTES, 256, shuffled=True),
    "rows-1m": _Kind(PLANES, TOKEN_BYTES, 1024, shuffled=True),
    # A plane for each head: four to a plane of the others.
    "heads-256": _Kind(4 * PLANES, TOKEN_BYTES // 4, 1, shuffled=True),
}
LAYOUTS: Final = tuple(_KINDS)
# All of them take a while on a CPU, and say there what these two say.
PLAIN_LAYOUTS: Final = ("slot", "paged")


@dataclass(frozen=True)
class CopyShape:
    """Shape of one stage: its layout, each slot's rows in token order, and how many tokens a slot holds.

    The pool is exactly `pool_bytes` long, every byte of it is in one row of one slot, and it can be seen as an array of
    ``plane, row, byte``, whose lengths are `axes`.
    """

    layout: StageLayout
    slot_rows: tuple[RowRuns, ...]
    tokens: int

    @property
    def piece_bytes(self) -> int:
        """Bytes of one row in one plane."""
        return self.layout.groups[0].planes[0].row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        group = self.layout.groups[0]
        return self.tokens * group.row_bytes // group.tokens_per_row

    @property
    def pool_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * len(self.slot_rows)

    @property
    def axes(self) -> tuple[int, int, int]:
        """Planes, rows, bytes a row."""
        group = self.layout.groups[0]
        return len(group.planes), group.rows, group.planes[0].row_bytes

    def row_numbers(self, slot: int) -> list[int]:
        """A slot's rows one by one, in token order."""
        return [row for first, count in self.slot_rows[slot] for row in range(first, first + count)]

    def rows_from(self, token: int) -> list[int]:
        """The first slot's rows from that of a token on, one by one."""
        return self.row_numbers(0)[token // self.layout.groups[0].tokens_per_row :]


def copy_shape(
    layout: str, slot_bytes: int, chunk_tokens: int, slots: int = 1, form: PlaneForm = USUAL_FORM
) -> CopyShape:
    """A stage of `slots` slots of about `slot_bytes` bytes each, a whole number of chunks.

    Raises:
        ValueError: `layout` is none of `LAYOUTS`.
    """
    kind = _KINDS.get(layout)
    if kind is None:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    step = math.lcm(chunk_tokens, kind.row_tokens)
    count, token_bytes = kind.planes * form.planes // PLANES, kind.token_bytes * form.token_bytes // TOKEN_BYTES
    tokens = max(1, slot_bytes // (count * token_bytes) // step) * step
    slot_rows, row_bytes = tokens // kind.row_tokens, kind.row_tokens * token_bytes
    rows = slots * slot_rows
    paged = (kind.row_tokens, token_bytes) if kind.row_tokens > 1 else ()
    planes = tuple(Plane(number * rows * row_bytes, row_bytes, row_bytes, rows, *paged) for number in range(count))
    if kind.shuffled:
        order = list(range(rows))
        random.Random(rows).shuffle(order)  # noqa: S311 - any order that is the same every time
        runs: tuple[RowRuns, ...] = tuple(runs_of(order[at : at + slot_rows]) for at in range(0, rows, slot_rows))
    else:
        runs = tuple(((slot * slot_rows, slot_rows),) for slot in range(slots))
    return CopyShape(StageLayout(one_group(planes), chunk_tokens=chunk_tokens), runs, tokens)


def largest_slot_bytes(layouts: Sequence[str], slot_bytes: int, form: PlaneForm = USUAL_FORM) -> int:
    """What a slot of about `slot_bytes` bytes takes in the layout in which it takes most, at least `slot_bytes`: the
    budget of a daemon whose chunks have the usual length is made of it.
    """
    chunk_tokens = CopyConfig().chunk_tokens
    return max(slot_bytes, *(copy_shape(name, slot_bytes, chunk_tokens, 1, form).slot_bytes for name in layouts))
