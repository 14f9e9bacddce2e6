"""The two layouts that the copy benchmark moves: a slot cache of token rows, and a paged cache with shuffled blocks."""

import random
from dataclasses import dataclass
from typing import Final

from shm.layout import Plane, StageLayout, one_group
from shm.rows import RowRuns, runs_of

# A layer's K or V of a model with 8 K/V heads of 64 in bf16: small pieces are what makes this hard.
TOKEN_BYTES: Final = 1024
PLANES: Final = 64
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True)
class CopyShape:
    """Shape of one stage: its layout, the rows to move in token order, and how many tokens they hold.

    The pool is exactly `pool_bytes` long and every byte of it is in one of the rows.
    """

    layout: StageLayout
    rows: RowRuns
    tokens: int
    pool_bytes: int


def copy_shape(layout: str, stage_bytes: int, chunk_tokens: int) -> CopyShape:
    """A stage of about `stage_bytes` bytes, a whole number of chunks.

    Raises:
        ValueError: `layout` is neither ``slot`` nor ``paged``.
    """
    tokens = max(1, stage_bytes // (PLANES * TOKEN_BYTES) // chunk_tokens) * chunk_tokens
    if layout == "slot":
        plane_bytes = tokens * TOKEN_BYTES
        planes = tuple(Plane(number * plane_bytes, TOKEN_BYTES, TOKEN_BYTES, tokens) for number in range(PLANES))
        rows: RowRuns = ((0, tokens),)
    elif layout == "paged":
        blocks = tokens // BLOCK_TOKENS
        row_bytes = BLOCK_TOKENS * TOKEN_BYTES
        planes = tuple(
            Plane(number * blocks * row_bytes, row_bytes, row_bytes, blocks, BLOCK_TOKENS, TOKEN_BYTES)
            for number in range(PLANES)
        )
        order = list(range(blocks))
        random.Random(blocks).shuffle(order)  # noqa: S311 - any order that is the same every time
        rows = runs_of(order)
    else:
        raise ValueError(f"layout must be slot or paged, got {layout!r}")
    return CopyShape(
        StageLayout(one_group(planes), chunk_tokens=chunk_tokens), rows, tokens, tokens * PLANES * TOKEN_BYTES
    )
