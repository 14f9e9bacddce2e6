"""A fake engine in this process: pools of random bytes on `cpu` devices, and a model of what they should hold."""

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shm.layout import Plane, StageLayout
from stratad.client import Captured, Client, CpuPool, Engine, Restored, StagePool
from tests.support.layouts import stage_layout

FINGERPRINT = {"model": "fake", "revision": "1", "dtype": "u8", "kv_format": "rows", "engine_build": "test"}


def slot_layout(rows: int = 2048, planes: int = 4, row_bytes: int = 96, *, state_bytes: int = 0) -> StageLayout:
    """Planes one after another, one token a row; some state for four slots behind them."""
    made = tuple(Plane(n * rows * row_bytes, row_bytes, row_bytes, rows) for n in range(planes))
    state = Plane(planes * rows * row_bytes, state_bytes, state_bytes, 4) if state_bytes else None
    return stage_layout(made, state)


def paged_layout(blocks: int = 64, planes: int = 3, token_bytes: int = 48, block: int = 16) -> StageLayout:
    """Interleaved planes of blocks, `block` tokens each, tokens at known places."""
    row = token_bytes * block
    stride = row * planes
    return stage_layout(
        tuple(Plane(n * row, row, stride, blocks, block, token_bytes) for n in range(planes)), None, 256
    )


def token_bytes_of(layout: StageLayout, buffer: memoryview, rows: Sequence[int], tokens: int) -> list[bytes]:
    """What a stage holds for `tokens` tokens in `rows`, byte for byte, read in the plainest way: one entry a plane."""
    found: list[bytes] = []
    for plane in layout.groups[0].planes:
        parts: list[bytes] = []
        for token in range(tokens):
            row, inside = rows[token // plane.tokens_per_row], token % plane.tokens_per_row
            start = plane.offset_bytes + row * plane.row_stride_bytes
            size = plane.row_bytes // plane.tokens_per_row
            parts.append(bytes(buffer[start + inside * size : start + (inside + 1) * size]))
        found.append(b"".join(parts))
    return found


class FakeEngine:
    """An engine with one pool a stage. Owns its pools; the client is the caller's."""

    def __init__(self, client: Client, layouts: Sequence[StageLayout], seed: int = 1, namespace: str = "ns") -> None:
        self.client = client
        self.layouts = layouts
        self.namespace = namespace
        self.random = random.Random(seed)
        self.pools = [CpuPool.allocate(layout.end_bytes) for layout in layouts]
        self.engine: Engine

    def fill(self) -> None:
        """New random bytes everywhere."""
        for pool in self.pools:
            pool.buffer[:] = self.random.randbytes(pool.nbytes)

    def register(self, fingerprint: dict[str, str] | None = None) -> None:
        """Register at the daemon."""
        stages = [
            StagePool(f"cpu:{n}", lay, pool) for n, (lay, pool) in enumerate(zip(self.layouts, self.pools, strict=True))
        ]
        self.engine = self.client.register("fake", self.namespace, fingerprint or FINGERPRINT, stages)

    def contents(self, rows: Sequence[int], tokens: int) -> list[list[bytes]]:
        """Bytes of the tokens on every stage."""
        return [
            token_bytes_of(layout, pool.buffer, rows, tokens)
            for layout, pool in zip(self.layouts, self.pools, strict=True)
        ]

    def everything(self) -> list[bytes]:
        """All bytes of all pools."""
        return [bytes(pool.buffer) for pool in self.pools]

    def capture(self, conversation: str, tokens: Sequence[int], rows: Sequence[int], *, slot: int = 0) -> Captured:
        """Capture and wait."""
        checkpoints = [(len(tokens), slot)] if any(layout.states for layout in self.layouts) else []
        return self.engine.capture(conversation, tokens, rows=rows, slot=slot, checkpoints=checkpoints).result()

    def restore(self, conversation: str, rows: Sequence[int], *, slot: int = 0, tokens: int = -1) -> Restored:
        """Restore and wait."""
        return self.engine.restore(conversation, rows=rows, slot=slot, tokens=tokens).result()

    def close(self) -> None:
        """Give the pools back."""
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> Self:
        self.fill()
        self.register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.unregister()
            self.close()
