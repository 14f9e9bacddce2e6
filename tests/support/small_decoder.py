"""A decoder small enough to be read: two layers of attention over a cache that lies in pools, one layer a stage.

The weights are random and fixed. What the next token is depends on every byte of keys and values, so an engine that
continues from a restored cache says the same tokens only if all of them are back.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shm.layout import Plane, StageLayout
from tests.support.layouts import stage_layout

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

LAYERS: Final = 2
WIDTH: Final = 24
VOCABULARY: Final = 97
ROW_BYTES: Final = 4 * WIDTH


def layer_layout(rows: int) -> StageLayout:
    """Keys and values of one layer, one token a row."""
    return stage_layout(tuple(Plane(n * rows * ROW_BYTES, ROW_BYTES, ROW_BYTES, rows) for n in range(2)), None)


class Cache:
    """Keys and values of every layer, `rows` rows of `pools` from `first_row` on."""

    def __init__(self, pools: Sequence[Bytes], first_row: int, rows: int) -> None:
        planes = [pool.view(np.float32).reshape(2, -1, WIDTH) for pool in pools]
        self.keys: list[Floats] = [plane[0, first_row : first_row + rows] for plane in planes]
        self.values: list[Floats] = [plane[1, first_row : first_row + rows] for plane in planes]

    def fill(self, seed: int) -> None:
        """Other numbers in every row."""
        rng = np.random.default_rng(seed)
        for part in (*self.keys, *self.values):
            part[:] = rng.standard_normal(part.shape, np.float32)

    def content(self) -> bytes:
        """Every byte."""
        return b"".join(part.tobytes() for part in (*self.keys, *self.values))


class SmallDecoder:
    """The model."""

    def __init__(self, longest: int, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self._words: Floats = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        self._places: Floats = rng.standard_normal((longest, WIDTH), np.float32)
        self._layers: list[list[Floats]] = [
            [rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5) for _ in range(4)]
            for _ in range(LAYERS)
        ]

    def read(self, tokens: Sequence[int], cache: Cache, at: int = 0) -> int:
        """Put tokens into the cache from place `at` on; the token that follows the last one."""
        said = -1
        for place, token in enumerate(tokens, at):
            x = self._words[token] + self._places[place]
            for number, (ask, key, value, out) in enumerate(self._layers):
                cache.keys[number][place] = x @ key
                cache.values[number][place] = x @ value
                weights = np.exp(np.tanh(cache.keys[number][: place + 1] @ (x @ ask)))
                seen = (weights / weights.sum()) @ cache.values[number][: place + 1]
                x = np.tanh(x + seen @ out)
            said = int((self._words @ x).argmax())
        return said

    def go_on(self, token: int, cache: Cache, at: int, count: int) -> list[int]:
        """`token`, which stands at place `at`, and what the model says after it: `count` tokens in all."""
        said = [token]
        while len(said) < count:
            said.append(self.read(said[-1:], cache, at + len(said) - 1))
        return said
