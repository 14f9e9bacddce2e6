"""Which earlier states of a slot's conversation are kept, and in which state slots of the pool.

A pool has one state slot for each slot's newest state, and `kept` more for each, of which the oldest is written over::

    state slot | 0 ... slots-1 | slot 0: kept | slot 1: kept | ...
"""

import hashlib
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import Cache


@dataclass(frozen=True)
class _Noted:
    """A state that was kept: whose, at which token position, after which tokens."""

    cache: "weakref.ref[Cache]"
    position: int
    tokens_digest: bytes
    state_slot: int


class KeptStates:
    """The kept states of every slot. Knows where they are, not what they hold."""

    def __init__(self, slots: int, kept: int) -> None:
        self._slots: Final = slots
        self._kept: Final = kept
        self._noted: Final[list[list[_Noted]]] = [[] for _ in range(slots)]

    @property
    def room(self) -> int:
        """How many states of a slot can be kept."""
        return self._kept

    @property
    def state_slots(self) -> int:
        """State slots that a pool needs."""
        return self._slots * (1 + self._kept)

    def note(self, slot: int, cache: Cache, token_ids: Sequence[int]) -> int:
        """The state slot for the state of `cache` after these tokens: a free one, that of the same position, or the
        oldest one's.
        """
        noted = self._noted[slot]
        position = len(token_ids)
        noted[:] = [entry for entry in noted if entry.cache() is cache and entry.position != position]
        if len(noted) == self._kept:
            del noted[0]
        used = {entry.state_slot for entry in noted}
        first = self._slots + slot * self._kept
        state_slot = next(number for number in range(first, first + self._kept) if number not in used)
        noted.append(_Noted(weakref.ref(cache), position, _digest(token_ids), state_slot))
        return state_slot

    def of(self, slot: int, cache: Cache, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Position and state slot of every state that was kept of this very cache at a beginning of these tokens, in
        ascending order. A cache of the same tokens that was read otherwise has other bytes.
        """
        found = [
            (entry.position, entry.state_slot)
            for entry in self._noted[slot]
            if entry.cache() is cache
            and entry.position < len(token_ids)
            and entry.tokens_digest == _digest(token_ids[: entry.position])
        ]
        return sorted(found)


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()
