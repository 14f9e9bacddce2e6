"""The index that finds the longest published prefix of a token sequence."""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import TypeAlias

from ipc.messages import TOKEN_BYTES

# Entries of a block. In one list of a hundred thousand, every insertion moves half a megabyte of references.
BLOCK_LIMIT = 1024

_Entry: TypeAlias = tuple[bytes, int]


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two packed token sequences share."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class _Sorted:
    """Entries in order, in blocks of up to `limit`. `_lasts` holds the last entry of each block."""

    __slots__ = ("_blocks", "_lasts", "_limit", "count")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[list[_Entry]] = []
        self._lasts: list[_Entry] = []
        self.count = 0

    def add(self, entry: _Entry) -> None:
        self.count += 1
        if not self._blocks:
            self._blocks.append([entry])
            self._lasts.append(entry)
            return
        at = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        block = self._blocks[at]
        insort(block, entry)
        if len(block) > self._limit:
            half = len(block) // 2
            self._blocks.insert(at, block[:half])
            self._lasts.insert(at, block[half - 1])
            del block[:half]
            at += 1
        self._lasts[at] = block[-1]

    def remove(self, entry: _Entry) -> None:
        number = bisect_left(self._lasts, entry)
        block = self._blocks[number]
        at = bisect_left(block, entry)
        assert block[at] == entry
        del block[at]
        self.count -= 1
        if not block:
            del self._blocks[number], self._lasts[number]
        elif at == len(block):
            self._lasts[number] = block[-1]

    def around(self, entry: _Entry) -> tuple[_Entry | None, _Entry | None]:
        """The last entry before, and the first one that is not before `entry`."""
        number = bisect_left(self._lasts, entry)
        if number == len(self._blocks):
            return (self._lasts[-1] if self._lasts else None), None
        block = self._blocks[number]
        at = bisect_left(block, entry)
        before = block[at - 1] if at else self._lasts[number - 1] if number else None
        return before, block[at]


class PrefixIndex:
    """Token sequences by scope, each in byte order.

    In a sorted list the sequence with the longest common prefix with a query stands next to the query's place, so a
    lookup is two bisections and two comparisons, and it is exact: tokens are compared, never hashes of them.
    """

    def __init__(self, block_limit: int = BLOCK_LIMIT) -> None:
        self._block_limit = block_limit
        self._sequences: dict[Hashable, _Sorted] = {}

    def add(self, scope: Hashable, tokens: bytes, image_id: int) -> None:
        """Add an image's tokens to a scope."""
        sequences = self._sequences.get(scope)
        if sequences is None:
            sequences = self._sequences[scope] = _Sorted(self._block_limit)
        sequences.add((tokens, image_id))

    def remove(self, scope: Hashable, tokens: bytes, image_id: int) -> None:
        """Take an image out."""
        sequences = self._sequences[scope]
        sequences.remove((tokens, image_id))
        if not sequences.count:
            del self._sequences[scope]

    def longest_common(self, scope: Hashable, tokens: bytes) -> tuple[int, int] | None:
        """``(image_id, shared tokens)`` of the sequence that shares most leading tokens with `tokens`, or None."""
        sequences = self._sequences.get(scope)
        if sequences is None:
            return None
        best: tuple[int, int] | None = None
        for neighbour in sequences.around((tokens, -1)):
            shared = 0 if neighbour is None else common_tokens(neighbour[0], tokens)
            if neighbour is not None and shared and (best is None or shared > best[1]):
                best = (neighbour[1], shared)
        return best

    def longest_whole(self, scope: Hashable, tokens: bytes) -> tuple[int, int] | None:
        """Like `longest_common`, but only sequences that are a prefix of `tokens` as a whole."""
        sequences = self._sequences.get(scope)
        query = tokens
        while query and sequences is not None:
            before, _ = sequences.around((query, 2**64))
            if before is None:
                return None
            candidate, image_id = before
            shared = common_tokens(candidate, query)
            if shared * TOKEN_BYTES == len(candidate):
                return image_id, shared
            query = query[: shared * TOKEN_BYTES]
        return None

    def __len__(self) -> int:
        return sum(sequences.count for sequences in self._sequences.values())
