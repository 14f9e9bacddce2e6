"""The copy benchmark's engine on `cpu` devices; its limit is a plain copy between two buffers of the same size."""

import time
from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from stratad.bench.copy_engine import CopyEngine, register
from stratad.bench.copy_layout import CopyShape, copy_shape
from stratad.client import Client, Engine
from stratad.pools import CpuPool, StagePool


class CpuSource(CopyEngine):
    """Stages on one `cpu` worker. Owns its pools, a copy of their bytes, and a buffer for the plain copy."""

    def __init__(self, engine: Engine, pools: Sequence[CpuPool], shape: CopyShape) -> None:
        super().__init__(engine, shape)
        self.device_name: Final = "cpu"
        self._pools = pools
        self._expected = [np.zeros(shape.pool_bytes, np.uint8) for _ in pools]
        self._plain = np.zeros(shape.pool_bytes, np.uint8)

    @classmethod
    def register(cls, client: Client, layout: str, stages: int, image_bytes: int) -> Self:
        """Reserve the pools and register them. Raises what the client raises."""
        shape = copy_shape(layout, image_bytes // stages, client.welcome.chunk_tokens)
        pools: list[CpuPool] = []
        try:
            pools += [CpuPool.allocate(shape.pool_bytes) for _ in range(stages)]
            stage_pools = [StagePool("cpu:0", shape.layout, pool) for pool in pools]
            engine = register(client, stage_pools)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        return cls(engine, pools, shape)

    def refill(self, number: int) -> None:
        """New random bytes in every pool."""
        generator = np.random.default_rng(number)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            expected[:] = np.frombuffer(generator.bytes(expected.nbytes), np.uint8)
            np.frombuffer(pool.buffer, np.uint8)[:] = expected

    def wipe(self) -> None:
        """Zero every pool."""
        for pool in self._pools:
            np.frombuffer(pool.buffer, np.uint8)[:] = 0

    def is_exact(self) -> bool:
        """Compare every byte."""
        return all(
            np.array_equal(np.frombuffer(pool.buffer, np.uint8), expected)
            for pool, expected in zip(self._pools, self._expected, strict=True)
        )

    def limit_bytes_per_s(self, direction: str) -> float:
        """A plain copy out of the first pool, or into it from its own bytes."""
        pool = np.frombuffer(self._pools[0].buffer, np.uint8)
        np.copyto(self._plain, pool)
        source, destination = (pool, self._plain) if direction == "capture" else (self._plain, pool)
        started_s = time.perf_counter()
        np.copyto(destination, source)
        return pool.nbytes / (time.perf_counter() - started_s)

    def close(self) -> None:
        """Unregister and give the pools back."""
        self.unregister()
        for pool in self._pools:
            pool.close()
