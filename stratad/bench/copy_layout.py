"""The two layouts that the copy benchmarks move: a slot cache of token rows, and a paged cache with shuffled blocks."""

import random
from dataclasses import dataclass
from typing import Final, NamedTuple

from shm.layout import Plane, StageLayout, one_group
from shm.rows import RowRuns, runs_of

# A layer's K or V of a model with 8 K/V heads of 64 in bf16: small pieces are what makes this hard.
TOKEN_BYTES: Final = 1024
PLANES: Final = 64
BLOCK_TOKENS: Final = 16


class PlaneForm(NamedTuple):
    """How many planes a stage has, and the bytes of a token in each."""

    planes: int = PLANES
    token_bytes: int = TOKEN_BYTES


USUAL_FORM: Final = PlaneForm()


@dataclass(frozen=True)
class CopyShape:
    """Shape of one stage: its layout, each slot's rows in token order, and how many tokens a slot holds.

    The pool is exactly `pool_bytes` long, every byte of it is in one row of one slot, and it can be seen as an array of
    ``plane, row, byte``, whose lengths are `axes`.
    """

    layout: StageLayout
    slot_rows: tuple[RowRuns, ...]
    tokens: int
    form: PlaneForm = USUAL_FORM

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.tokens * self.form.planes * self.form.token_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * len(self.slot_rows)

    @property
    def axes(self) -> tuple[int, int, int]:
        """Planes, rows, bytes a row."""
        group = self.layout.groups[0]
        return self.form.planes, group.rows, group.planes[0].row_bytes

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
        ValueError: `layout` is neither ``slot`` nor ``paged``.
    """
    plane_count, token_bytes = form
    tokens = max(1, slot_bytes // (plane_count * token_bytes) // chunk_tokens) * chunk_tokens
    if layout == "slot":
        plane_bytes = slots * tokens * token_bytes
        planes = tuple(
            Plane(number * plane_bytes, token_bytes, token_bytes, slots * tokens) for number in range(plane_count)
        )
        slot_rows: tuple[RowRuns, ...] = tuple(((slot * tokens, tokens),) for slot in range(slots))
    elif layout == "paged":
        slot_blocks = tokens // BLOCK_TOKENS
        blocks = slots * slot_blocks
        row_bytes = BLOCK_TOKENS * token_bytes
        planes = tuple(
            Plane(number * blocks * row_bytes, row_bytes, row_bytes, blocks, BLOCK_TOKENS, token_bytes)
            for number in range(plane_count)
        )
        order = list(range(blocks))
        random.Random(blocks).shuffle(order)  # noqa: S311 - any order that is the same every time
        slot_rows = tuple(runs_of(order[first : first + slot_blocks]) for first in range(0, blocks, slot_blocks))
    else:
        raise ValueError(f"layout must be slot or paged, got {layout!r}")
    stage = StageLayout(one_group(planes), chunk_tokens=chunk_tokens)
    return CopyShape(stage, slot_rows, tokens, form)
