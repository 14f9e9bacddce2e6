"""The index that finds the longest published prefix of a token sequence."""

from bisect import bisect_left, insort
from collections.abc import Hashable

from ipc.messages import TOKEN_BYTES


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


class PrefixIndex:
    """Token sequences by scope, each in byte order.

    In a sorted list the sequence with the longest common prefix with a query stands next to the query's place, so a
    lookup is one bisection and two comparisons, and it is exact: tokens are compared, never hashes of them.
    """

    def __init__(self) -> None:
        self._sequences: dict[Hashable, list[tuple[bytes, int]]] = {}

    def add(self, scope: Hashable, tokens: bytes, image_id: int) -> None:
        """Add an image's tokens to a scope."""
        insort(self._sequences.setdefault(scope, []), (tokens, image_id))

    def remove(self, scope: Hashable, tokens: bytes, image_id: int) -> None:
        """Take an image out."""
        sequences = self._sequences[scope]
        at = bisect_left(sequences, (tokens, image_id))
        assert sequences[at] == (tokens, image_id)
        del sequences[at]
        if not sequences:
            del self._sequences[scope]

    def longest_common(self, scope: Hashable, tokens: bytes) -> tuple[int, int] | None:
        """``(image_id, shared tokens)`` of the sequence that shares most leading tokens with `tokens`, or None."""
        sequences = self._sequences.get(scope)
        if not sequences:
            return None
        at = bisect_left(sequences, (tokens, -1))
        best: tuple[int, int] | None = None
        for neighbour in sequences[max(at - 1, 0) : at + 1]:
            shared = common_tokens(neighbour[0], tokens)
            if shared and (best is None or shared > best[1]):
                best = (neighbour[1], shared)
        return best

    def longest_whole(self, scope: Hashable, tokens: bytes) -> tuple[int, int] | None:
        """Like `longest_common`, but only sequences that are a prefix of `tokens` as a whole."""
        sequences = self._sequences.get(scope, [])
        query = tokens
        while query and sequences:
            at = bisect_left(sequences, (query, 2**64)) - 1
            if at < 0:
                return None
            candidate, image_id = sequences[at]
            shared = common_tokens(candidate, query)
            if shared * TOKEN_BYTES == len(candidate):
                return image_id, shared
            query = query[: shared * TOKEN_BYTES]
        return None

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._sequences.values())
