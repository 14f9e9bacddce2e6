"""Engines' arrays over a pool, and which part of them is a token's.

A `Shape` knows for every plane how to *read* it: the elements of one token of one row, as a view of the engine's array.
Everything else follows from that: what a conversation holds, and which bytes of the pool are its own.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shm.layout import Plane, RowGroup, StageLayout, StateGroup, check_layout

Bytes: TypeAlias = npt.NDArray[np.uint8]
Elements: TypeAlias = npt.NDArray[Any]
Read: TypeAlias = Callable[[Bytes, int, int], Elements]
"""Of a pool, a row and a token in that row."""
Rows: TypeAlias = tuple[tuple[int, ...], ...]


class Tensor:
    """A contiguous array of the engine at an offset of its pool."""

    def __init__(self, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> None:
        self.offset_bytes, self.shape, self.dtype = offset_bytes, shape, np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def __call__(self, pool: Bytes) -> Elements:
        """The array itself."""
        part: Elements = pool[self.offset_bytes : self.offset_bytes + self.nbytes].view(self.dtype)
        return part.reshape(self.shape)

    def bytes_of(self, *axes: int) -> int:
        """Bytes of the part that some of its axes span."""
        return math.prod(self.shape[axis] for axis in axes) * self.dtype.itemsize


class Maker:
    """Random sizes, and room for tensors in one pool."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.random = random.Random(seed)
        self.tokens = tokens
        self.at = 0

    def tensor(self, *shape: int, dtype: str = "<u4") -> Tensor:
        """A tensor behind the last one."""
        made = Tensor(self.at + self.random.choice([0, 16, 48]), shape, dtype)
        self.at = made.offset_bytes + -(-made.nbytes // 16) * 16
        return made

    def small(self) -> int:
        """Layers, heads: few."""
        return self.random.randint(1, 3)

    def dim(self) -> int:
        """Elements of a head."""
        return self.random.choice([1, 3, 4, 8])

    def block(self) -> int:
        """Tokens of a block."""
        return self.random.choice([4, 16, 32])

    def blocks(self, block: int) -> int:
        """Blocks for two conversations and a few more."""
        return 2 * (-(-self.tokens // block) + 1) + self.random.randint(1, 3)


@dataclass(frozen=True)
class Shape:
    """A layout, and for each plane of each of its groups how the engine reads it."""

    layout: StageLayout
    pool_bytes: int
    reads: tuple[tuple[Read, ...], ...]

    def parts(self, pool: Bytes, rows: Rows, tokens: int, image_tokens: int = -1) -> list[Elements]:
        """The engine's elements of the first `tokens` tokens in some rows, as views, plane by plane of each row group;
        of an image of `image_tokens` tokens (-1: as many), whose windows may have passed more.
        """
        found: list[Elements] = []
        for number, group in enumerate(self.layout.groups):
            per_row = group.tokens_per_row
            first = group.first_token(tokens if image_tokens < 0 else image_tokens)
            for plane, read in zip(group.planes, self.reads[number], strict=True):
                step = 1 if plane.locates_tokens else per_row
                for token in range(first, tokens, step):
                    found.append(read(pool, rows[number][(token - first) // per_row], token % per_row))
        return found

    def states(self, pool: Bytes, slots: Sequence[int]) -> list[Elements]:
        """The engine's states, as views: those in slot ``slots[n]`` of state group n."""
        start = len(self.layout.groups)
        return [read(pool, slot, 0) for n, slot in enumerate(slots) for read in self.reads[start + n]]

    def draw_rows(
        self, rng: random.Random, tokens: int, slots: Sequence[int], target_slots: Sequence[int]
    ) -> tuple[Rows, Rows]:
        """Rows of a conversation with states in `slots`, and as many others with states in `target_slots`, at random;
        groups of one space have none in common.
        """
        needed, first_state = self.layout.rows_for(tokens), len(self.layout.groups)
        rows, target = (
            [*(() for _ in self.layout.groups), *(tuple(mine) for _ in self.layout.states)]
            for mine in (slots, target_slots)
        )
        for space in self.layout.spaces:
            free = list(range(min(self.layout.all_groups[number].rows for number in space)))
            rng.shuffle(free)
            if any(number >= first_state for number in space):
                free = [row for row in free if row not in {*slots, *target_slots}]
            for made in (rows, target):
                for number in space:
                    if number < first_state:
                        made[number], free = tuple(free[: needed[number]]), free[needed[number] :]
                        assert len(made[number]) == needed[number], "too few rows for two conversations"
        return tuple(rows), tuple(target)

    def slots(self) -> int:
        """How many state slots there are (0: no states)."""
        return min((group.rows for group in self.layout.states), default=0)


def shape_of(
    made: Maker,
    groups: Sequence[tuple[Sequence[Plane], int, Sequence[Read]]],
    states: Sequence[tuple[Sequence[Plane], Sequence[Read]]] = (),
) -> Shape:
    """A shape of row groups (planes, window, reads) and state groups (planes, reads)."""
    layout = StageLayout(
        tuple(RowGroup(tuple(planes), window) for planes, window, _ in groups),
        tuple(StateGroup(tuple(planes)) for planes, _ in states),
    )
    reads = [*(tuple(entry[2]) for entry in groups), *(tuple(entry[1]) for entry in states)]
    check_layout(layout, made.at)
    return Shape(layout, made.at, tuple(reads))


def at(tensor: Tensor, *index: int | str) -> Read:
    """Indexing of a tensor, with "row" and "token" where the engine puts them."""

    def read(pool: Bytes, row: int, token: int) -> Elements:
        where = {"row": row, "token": token}
        # A range in place of a number in the last axis, so that even a single element is a view.
        view = tensor(pool)
        numbers = [where[part] if isinstance(part, str) else part for part in index]
        for number in numbers[:-1]:
            view = view[number]
        return view[numbers[-1] : numbers[-1] + 1]

    return read
