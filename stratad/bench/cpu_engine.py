"""An engine without a model: known bytes in pools of `cpu` devices, registered with a daemon from this process."""

import hashlib
import os
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from shm.layout import Plane, StageLayout, one_group
from stratad.client import Client, Engine
from stratad.pools import CpuPool, StagePool

NAMESPACE: Final = "bench"
FINGERPRINT: Final = {
    "model": "known bytes",
    "revision": "0",
    "dtype": "uint8",
    "kv_format": "rows",
    "engine_build": "bench",
}
_STAMP: Final = struct.Struct("<Q")


class CpuEngine:
    """`slots` slots of `tokens` rows each, `row_bytes` a row, in one plane, on every stage.

    Owns its pools and its registration; the client is the caller's.
    """

    def __init__(self, engine: Engine, pools: Sequence[CpuPool], tokens: int, row_bytes: int, slots: int) -> None:
        self.tokens: Final = tokens
        self.slots: Final = slots
        self.slot_bytes: Final = tokens * row_bytes
        self.engine: Final = engine
        self._pools = pools
        # One list a slot, made once: what a measured loop passes must cost it nothing.
        self.rows: Final = tuple(((slot * tokens, tokens),) for slot in range(slots))

    @classmethod
    def register(cls, client: Client, devices: Sequence[str], *, tokens: int, row_bytes: int, slots: int) -> Self:
        """Reserve one pool a device, fill it with random bytes, and register all of them as the stages of one engine.

        Raises:
            StratadError: no memory, or the daemon refuses.
        """
        layout = StageLayout(
            groups=one_group([Plane(0, row_bytes, row_bytes, slots * tokens)]),
            chunk_tokens=client.welcome.chunk_tokens,
        )
        pools: list[CpuPool] = []
        try:
            for _ in devices:
                pool = CpuPool.allocate(slots * tokens * row_bytes)
                pools.append(pool)
                pool.buffer[:] = os.urandom(pool.nbytes)
            stages = [StagePool(device, layout, pool) for device, pool in zip(devices, pools, strict=True)]
            engine = client.register("bench", NAMESPACE, FINGERPRINT, stages)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        return cls(engine, pools, tokens, row_bytes, slots)

    def stamp(self, slot: int, number: int) -> None:
        """Make every stage's bytes of a slot unlike any captured before, so that nothing is skipped as known."""
        for pool in self._pools:
            for offset in range(slot * self.slot_bytes, (slot + 1) * self.slot_bytes, self._stamp_step_bytes):
                _STAMP.pack_into(pool.buffer, offset, number)

    @property
    def _stamp_step_bytes(self) -> int:
        """One stamp a chunk of 256 tokens at most: a chunk is the unit that could be known already."""
        row_bytes = self.slot_bytes // self.tokens
        return row_bytes * min(self.tokens, 256)

    def fill(self, slot: int, parts: Sequence[bytes]) -> None:
        """Write a slot: the bytes of every stage."""
        for pool, part in zip(self._pools, parts, strict=True):
            pool.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = part

    def holds(self, slot: int, parts: Sequence[bytes]) -> bool:
        """Whether a slot has exactly these bytes on every stage."""
        return all(
            pool.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] == part
            for pool, part in zip(self._pools, parts, strict=True)
        )

    def zero(self, slot: int) -> None:
        """Wipe every stage's bytes of a slot."""
        zeros = bytes(self.slot_bytes)
        for pool in self._pools:
            pool.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = zeros

    def digests(self, slot: int) -> tuple[bytes, ...]:
        """SHA-256 of every stage's bytes of a slot."""
        return tuple(
            hashlib.sha256(pool.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]).digest()
            for pool in self._pools
        )

    @property
    def image_bytes(self) -> int:
        """Bytes of one slot over all stages."""
        return self.slot_bytes * len(self._pools)

    def close(self) -> None:
        """Unregister and give the pools back. Raises what the client raises."""
        self.engine.unregister()
        for pool in self._pools:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def token_ids(tokens: int, conversation: int) -> bytes:
    """Packed token ids that differ between conversations from the first token on."""
    return struct.pack(f"<{tokens}I", *range(conversation * tokens, (conversation + 1) * tokens))
