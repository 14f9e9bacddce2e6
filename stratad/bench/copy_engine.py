"""What the copy benchmark's engines have in common, whatever device their stages lie on."""

from typing import Final

from ipc.messages import Captured, Restored
from stratad.bench.copy_layout import CopyShape
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE, token_ids
from stratad.client import Client, Engine
from stratad.pools import StagePool

_DEADLINE_S: Final = 120.0


class CopyEngine:
    """A registered engine of which everything is captured and restored at once. The memory is its maker's."""

    def __init__(self, engine: Engine, shape: CopyShape) -> None:
        self.image_bytes: Final = shape.pool_bytes * len(engine.layouts)
        self._engine = engine
        self._shape = shape
        self._tokens = token_ids(shape.tokens, 0)

    def capture(self, conversation: str) -> Captured:
        """Capture everything."""
        ticket = self._engine.capture(conversation, self._tokens, rows=self._shape.rows, slot=0, deadline_s=_DEADLINE_S)
        return ticket.result()

    def restore(self, conversation: str) -> Restored:
        """Restore everything."""
        return self._engine.restore(conversation, rows=self._shape.rows, slot=0, deadline_s=_DEADLINE_S).result()

    def unregister(self) -> None:
        """Have the daemon let go of the memory."""
        self._engine.unregister()


def register(client: Client, stages: list[StagePool]) -> Engine:
    """Register the stages. Raises what the client raises."""
    return client.register("bench", NAMESPACE, FINGERPRINT, stages)
