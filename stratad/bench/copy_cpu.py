"""The copy benchmarks' engine on `cpu` devices; its limits are plain copies between two buffers of the same size."""

import time
from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from stratad.bench.copy_engine import CopyEngine, register
from stratad.bench.copy_layout import USUAL_FORM, CopyShape, PlaneForm, copy_shape
from stratad.client import Client, Engine
from stratad.pools import CpuPool, StagePool

# On the device the limit is what it can do, not what it did once.
_DIRECT_REPEATS: Final = 3


class CpuSource(CopyEngine):
    """Stages on `cpu` workers. Owns its pools, a copy of their bytes, and a buffer for the plain copy."""

    def __init__(self, engine: Engine, pools: Sequence[CpuPool], shape: CopyShape) -> None:
        super().__init__(engine, shape)
        self.device_name: Final = "cpu"
        self._pools = pools
        self._expected = [np.zeros(shape.pool_bytes, np.uint8) for _ in pools]
        self._plain = np.zeros(shape.pool_bytes, np.uint8)
        self._first_rows = np.array(shape.row_numbers(0))
        self._last_rows = np.array(shape.row_numbers(-1))

    @classmethod
    def register(
        cls,
        client: Client,
        layout: str,
        stages: int,
        slot_bytes: int,
        slots: int,
        *,
        cards: Sequence[str],
        form: PlaneForm = USUAL_FORM,
    ) -> Self:
        """Reserve the pools and register them, on the devices in turn. Raises what the client raises."""
        shape = copy_shape(layout, slot_bytes, client.welcome.chunk_tokens, slots, form)
        pools: list[CpuPool] = []
        try:
            pools += [CpuPool.allocate(shape.pool_bytes) for _ in range(stages)]
            stage_pools = [StagePool(cards[stage % len(cards)], shape.layout, pool) for stage, pool in enumerate(pools)]
            engine = register(client, stage_pools)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        return cls(engine, pools, shape)

    def refill(self, number: int, *, alike: bool = True) -> None:
        """New random bytes in every pool; `alike`: the last slot's like the first's."""
        generator = np.random.default_rng(number)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            expected[:] = np.frombuffer(generator.bytes(expected.nbytes), np.uint8)
            for plane in expected.reshape(self._shape.axes) if alike else ():
                plane[self._last_rows] = plane[self._first_rows]
            np.frombuffer(pool.buffer, np.uint8)[:] = expected

    def wipe(self, *, first: bool = False) -> None:
        """Zero the last slot of every pool, or the first."""
        rows = self._first_rows if first else self._last_rows
        for pool in self._pools:
            np.frombuffer(pool.buffer, np.uint8).reshape(self._shape.axes)[:, rows] = 0

    def rewrite(self, first_token: int, number: int) -> None:
        """See `CopySource`."""
        generator, rows = np.random.default_rng(number), self._shape.rows_from(first_token)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            for plane, held in zip(
                expected.reshape(self._shape.axes),
                np.frombuffer(pool.buffer, np.uint8).reshape(self._shape.axes),
                strict=True,
            ):
                plane[rows] = generator.integers(0, 256, (len(rows), plane.shape[1]), np.uint8)
                held[rows] = plane[rows]

    def wipe_from(self, first_token: int) -> None:
        """See `CopySource`."""
        rows = self._shape.rows_from(first_token)
        for pool in self._pools:
            np.frombuffer(pool.buffer, np.uint8).reshape(self._shape.axes)[:, rows] = 0

    def is_exact(self) -> bool:
        """Compare every byte."""
        return all(
            np.array_equal(np.frombuffer(pool.buffer, np.uint8), expected)
            for pool, expected in zip(self._pools, self._expected, strict=True)
        )

    def limit_bytes_per_s(self, direction: str) -> float:
        """A plain copy out of the first pool, or into it from its own bytes; ``direct``: between two buffers."""
        if direction == "direct":
            return self.image_bytes / min(self._direct_copy_s() for _ in range(_DIRECT_REPEATS))
        pool = np.frombuffer(self._pools[0].buffer, np.uint8)
        np.copyto(self._plain, pool)
        source, destination = (pool, self._plain) if direction == "capture" else (self._plain, pool)
        started_s = time.perf_counter()
        np.copyto(destination, source)
        return pool.nbytes / (time.perf_counter() - started_s)

    def _direct_copy_s(self) -> float:
        """Seconds of a plain copy of as many bytes as one slot has over all stages."""
        size_bytes = self._shape.slot_bytes
        pairs = [
            (np.frombuffer(pool.buffer, np.uint8)[:size_bytes], expected[:size_bytes])
            for pool, expected in zip(self._pools, self._expected, strict=True)
        ]
        started_s = time.perf_counter()
        for destination, source in pairs:
            np.copyto(destination, source)
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Unregister and give the pools back."""
        self.unregister()
        for pool in self._pools:
            pool.close()
