"""A whole round of an engine with any of the named layouts: capture, other bytes, restore, and both kinds of slot copy.

What must be where afterwards is said by the engine's own indexing of its arrays (`tests.support.engine_arrays`), and
every other byte of every pool must be as it was.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from stratad.client import Client, CpuPool, Engine, GroupRows, StagePool
from tests.support.engine_arrays import Bytes, Rows, Shape
from tests.support.engine_shapes import make_shape

FINGERPRINT = {"model": "shapes", "revision": "1", "dtype": "u4", "kv_format": "any", "engine_build": "test"}
MAX_TOKENS = 300
_OTHER = 0x5A


class StageMemory(Protocol):
    """The pool of one stage, wherever it lies."""

    def stage_pool(self, shape: Shape) -> StagePool:
        """What is registered."""
        ...

    def read(self) -> Bytes:
        """A copy of all bytes."""
        ...

    def write(self, data: Bytes) -> None:
        """Set all bytes."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class CpuStage:
    """A pool of a `cpu` device."""

    def __init__(self, device: str, pool_bytes: int) -> None:
        self._device = device
        self._pool = CpuPool.allocate(pool_bytes)

    def stage_pool(self, shape: Shape) -> StagePool:
        """See `StageMemory`."""
        return StagePool(self._device, shape.layout, self._pool)

    def read(self) -> Bytes:
        """See `StageMemory`."""
        return np.frombuffer(bytes(self._pool.buffer), np.uint8).copy()

    def write(self, data: Bytes) -> None:
        """See `StageMemory`."""
        self._pool.buffer[:] = data.tobytes()

    def close(self) -> None:
        """See `StageMemory`."""
        self._pool.close()


class _Stage(NamedTuple):
    shape: Shape
    memory: StageMemory
    rows: Rows
    target: Rows


class _Checkpoint(NamedTuple):
    position: int
    slot: int
    target_slot: int


class Round:
    """One engine of 1 to 3 stages, whose sizes, rows, lengths and checkpoints a seed decides."""

    def __init__(self, name: str, seed: int, memory: Callable[[int, int], StageMemory]) -> None:
        """`memory` makes the pool of stage number n with so many bytes."""
        rng = random.Random(f"{name} {seed}")
        shapes = [make_shape(name, rng.randrange(2**32), MAX_TOKENS) for _ in range(rng.randint(1, 3))]
        self.unit = math.lcm(*(shape.layout.token_unit for shape in shapes))
        self.tokens = self.unit * rng.randint(1, MAX_TOKENS // self.unit)
        slots = min((shape.slots() for shape in shapes if shape.slots()), default=0)
        self.checkpoints: list[_Checkpoint] = []
        if slots:
            points = sorted({self.tokens, *(rng.randint(1, self.tokens) for _ in range(rng.randint(0, 2)))})
            chosen = rng.sample(range(slots), 2 * len(points))
            self.checkpoints = [_Checkpoint(p, *chosen[2 * n : 2 * n + 2]) for n, p in enumerate(points)]
        self.stages: list[_Stage] = []
        for number, shape in enumerate(shapes):
            made = [[point.slot for point in self.checkpoints], [point.target_slot for point in self.checkpoints]]
            rows = shape.draw_rows(rng, self.tokens, *made)
            self.stages.append(_Stage(shape, memory(number, shape.pool_bytes), *rows))
        self.token_ids = [rng.randrange(2**32) for _ in range(self.tokens)]
        self.rng = rng

    def run(self, client: Client) -> None:
        """The whole round; everything is given back."""
        pools = [stage.memory.stage_pool(stage.shape) for stage in self.stages]
        engine = client.register("shapes", "shapes", FINGERPRINT, pools)
        self._capture_and_restore(engine)
        self._copy(engine)
        self._copy_through_memory(engine)
        engine.unregister()
        client.clear("shapes")
        for stage in self.stages:
            stage.memory.close()

    def prefixes(self) -> list[int]:
        """Lengths to which the daemon restores the image: where it has states or windows that have passed something,
        the checkpoints that need nothing of what is gone, or all of it; else any number of whole units.
        """
        if self.checkpoints:
            return [point.position for point in self.checkpoints if self._held(point.position)]
        return list(range(self.unit, self.tokens + 1, self.unit)) if self._held(1) else [self.tokens]

    def _held(self, tokens: int) -> bool:
        return all(stage.shape.layout.holds_prefix(tokens, self.tokens) for stage in self.stages)

    def _capture_and_restore(self, engine: Engine) -> None:
        before = self._fill()
        captured = engine.capture(
            "chat",
            self.token_ids,
            rows_by_stage=self._rows([stage.rows for stage in self.stages]),
            checkpoints=[(point.position, point.slot) for point in self.checkpoints],
        ).result()
        assert captured.tokens == self.tokens
        self._check(before)
        for tokens in {self.tokens, self.rng.choice(self.prefixes())}:
            destroyed = [data ^ np.uint8(_OTHER) for data in before]
            self._write(destroyed)
            point = next((point for point in self.checkpoints if point.position == tokens), None)
            targets = [self._cut(stage, tokens) for stage in self.stages]
            engine.restore(
                "chat", rows_by_stage=self._rows(targets), slot=point.target_slot if point else 0, tokens=tokens
            ).result()
            self._check(self._moved(destroyed, before, targets, tokens, point))

    def _copy(self, engine: Engine) -> None:
        before = self._fill()
        point = self.checkpoints[-1] if self.checkpoints else None
        targets = [stage.target for stage in self.stages]
        engine.slot_direct(
            self.tokens,
            None,
            None,
            slot=point.slot if point else 0,
            target_slot=point.target_slot if point else 1,
            rows_by_stage=self._rows([stage.rows for stage in self.stages]),
            target_rows_by_stage=self._rows(targets),
        ).result()
        self._check(self._moved(before, before, targets, self.tokens, point))

    def _copy_through_memory(self, engine: Engine) -> None:
        before = self._fill()
        point = self.checkpoints[-1] if self.checkpoints else None
        slot = point.slot if point else 0
        engine.slot_to(self.tokens, slot=slot, rows_by_stage=self._rows([stage.rows for stage in self.stages])).result()
        self._check(before)
        destroyed = [data ^ np.uint8(_OTHER) for data in before]
        self._write(destroyed)
        targets = [stage.target for stage in self.stages]
        engine.slot_from(slot, slot=point.target_slot if point else 1, rows_by_stage=self._rows(targets)).result()
        self._check(self._moved(destroyed, before, targets, self.tokens, point))

    def _rows(self, rows: Sequence[Rows]) -> list[GroupRows]:
        return [
            GroupRows(*mine[: len(stage.shape.layout.groups)]) for stage, mine in zip(self.stages, rows, strict=True)
        ]

    @staticmethod
    def _cut(stage: _Stage, tokens: int) -> Rows:
        groups = stage.shape.layout.groups
        return tuple(rows[: group.rows_for(tokens)] for group, rows in zip(groups, stage.target, strict=False))

    def _moved(
        self,
        pools: Sequence[Bytes],
        sources: Sequence[Bytes],
        targets: Sequence[Rows],
        tokens: int,
        point: _Checkpoint | None,
    ) -> list[Bytes]:
        """`pools` with the first `tokens` tokens of the conversation in `sources` at `targets`, and its state."""
        made: list[Bytes] = []
        for stage, pool, source, target in zip(self.stages, pools, sources, targets, strict=True):
            out, shape = pool.copy(), stage.shape
            parts = zip(
                shape.parts(out, target, tokens, self.tokens),
                shape.parts(source, stage.rows, tokens, self.tokens),
                strict=True,
            )
            for to, part in parts:
                to[...] = part
            if point is not None:
                count = len(shape.layout.states)
                states = shape.states(out, [point.target_slot] * count), shape.states(source, [point.slot] * count)
                for to, part in zip(*states, strict=True):
                    to[...] = part
            made.append(out)
        return made

    def _fill(self) -> list[Bytes]:
        data = [np.frombuffer(self.rng.randbytes(stage.shape.pool_bytes), np.uint8).copy() for stage in self.stages]
        self._write(data)
        return data

    def _write(self, data: Sequence[Bytes]) -> None:
        for stage, mine in zip(self.stages, data, strict=True):
            stage.memory.write(mine)

    def _check(self, expected: Sequence[Bytes]) -> None:
        for number, (stage, mine) in enumerate(zip(self.stages, expected, strict=True)):
            wrong = np.flatnonzero(stage.memory.read() != mine)
            assert not len(wrong), f"stage {number}: {len(wrong)} bytes differ, the first one at {wrong[0]}"
