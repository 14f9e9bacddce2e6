"""What the copy benchmarks' engines have in common, whatever device their stages lie on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from ipc.messages import TOKEN_BYTES, Captured, Copied, Restored
from shm.rows import RowRuns, first_rows
from stratad.bench.copy_layout import CopyShape
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE, token_ids
from stratad.client import Client, Engine, Ticket
from stratad.pools import StagePool

_DEADLINE_S: Final = 120.0


class CopyEngine:
    """A registered engine of which whole slots are moved, out of the first, into the last. The maker owns memory."""

    def __init__(self, engine: Engine, shape: CopyShape) -> None:
        self.image_bytes: Final = shape.slot_bytes * len(engine.layouts)
        self._engine = engine
        self._shape = shape
        self._last = len(shape.slot_rows) - 1
        # Of each slot its own: nothing of one is known from another.
        self._tokens = tuple(token_ids(shape.tokens, slot) for slot in range(len(shape.slot_rows)))
        self._rows = tuple(_as_engines_have_them(shape, slot) for slot in range(len(shape.slot_rows)))

    def capture(self, conversation: str) -> Captured:
        """Capture the first slot."""
        return self.begin_capture(conversation).result()

    def restore(self, conversation: str) -> Restored:
        """Restore into the last slot."""
        return self.begin_restore(conversation).result()

    def begin_capture(self, conversation: str, slot: int = 0) -> Ticket[Captured]:
        """Start to capture a slot."""
        rows = self._rows[slot]
        return self._engine.capture(conversation, self._tokens[slot], rows=rows, slot=slot, deadline_s=_DEADLINE_S)

    def begin_restore(self, conversation: str, slot: int = -1) -> Ticket[Restored]:
        """Start to restore into a slot (-1: the last)."""
        number = self._last if slot < 0 else slot
        rows = self._rows[number]
        return self._engine.restore(conversation, rows=rows, slot=number, deadline_s=_DEADLINE_S)

    @property
    def tokens(self) -> int:
        """Tokens of a slot."""
        return self._shape.tokens

    def capture_tokens(self, conversation: str, tokens: bytes) -> Captured:
        """Capture the first slot's first rows as what these tokens have."""
        per_row = self._shape.layout.groups[0].tokens_per_row
        count = -(-len(tokens) // TOKEN_BYTES // per_row)
        rows = first_rows(self._shape.slot_rows[0], count)
        return self._engine.capture(conversation, tokens, rows=rows, slot=0, deadline_s=_DEADLINE_S).result()

    def restore_first(self, conversation: str, resident_tokens: int = 0) -> Restored:
        """Restore over the first slot, which may still hold so many tokens."""
        rows = self._rows[0]
        ticket = self._engine.restore(
            conversation, rows=rows, slot=0, resident_tokens=resident_tokens, deadline_s=_DEADLINE_S
        )
        return ticket.result()

    def slot_direct(self) -> Copied:
        """Copy the first slot to the last on the device."""
        source, target = self._rows[0], self._rows[-1]
        ticket = self._engine.slot_direct(
            self._shape.tokens, source, target, slot=0, target_slot=self._last, deadline_s=_DEADLINE_S
        )
        return ticket.result()

    def slot_to(self) -> Captured:
        """Copy the first slot into its transit image."""
        rows = self._rows[0]
        return self._engine.slot_to(self._shape.tokens, rows, slot=0, deadline_s=_DEADLINE_S).result()

    def slot_from(self) -> Restored:
        """Copy the first slot's transit image into the last slot."""
        rows = self._rows[-1]
        return self._engine.slot_from(0, rows, slot=self._last, deadline_s=_DEADLINE_S).result()

    def baselines(self) -> dict[str, float]:
        """See `CopySource`: on a CPU the limit is what people do."""
        return {}

    @contextmanager
    def saturated(self) -> Iterator[None]:
        """Nothing else to do, on a CPU."""
        yield

    def unregister(self) -> None:
        """Have the daemon let go of the memory."""
        self._engine.unregister()


def _as_engines_have_them(shape: CopyShape, slot: int) -> "RowRuns | np.ndarray":
    """A slot's rows: a slot cache knows one run, a paged cache has an array of block numbers."""
    runs = shape.slot_rows[slot]
    return runs if len(runs) == 1 else np.array(shape.row_numbers(slot), np.int64)


def register(client: Client, stages: list[StagePool]) -> Engine:
    """Register the stages. Raises what the client raises."""
    return client.register("bench", NAMESPACE, FINGERPRINT, stages)
