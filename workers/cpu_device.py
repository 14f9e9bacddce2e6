"""The `cpu` device: pools are memfds of the engine, copies are numpy's, digests XXH3."""

import os
import platform
from typing import Final

import numpy as np

from ipc.messages import CudaIpcPool, Stage
from workers.cpu_copier import SHARED_BYTES, CpuCopier
from workers.cpu_pool import CpuPool, open_host_pool
from workers.device import HOST_SLICE_BYTES, DeviceFailure, DevicePool, LaneKind, PoolRefused
from workers.digest import XXH3, Digester
from workers.helper import Helper
from workers.jobs import ChunkWork
from workers.limiter import LinkLimiter
from workers.rowmap import RowMap
from workers.shuttle_map import ShuttleMap

_SLICE_ROWS: Final = 1 << 20
# XXH3-128 of nothing with seed 0, from the algorithm's own test vectors.
_XXH3_OF_NOTHING: Final = bytes.fromhex("99aa06d3014798d86001c324468d497f")
# Of a worker that has fewer CPUs to itself, the helper would only take the lane's.
_HELPER_CPUS: Final = 2


class CpuDevice:
    """See `workers.device.Device`. Slices of at least `shared_bytes` may go to a helper, if it `shares` (default: where
    this process has two CPUs, which a worker has been given before it makes its device).
    """

    def __init__(
        self,
        digester: Digester,
        *,
        slice_bytes: int,
        link_bytes_per_s: float,
        shares: bool | None = None,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self._digester = digester
        self._link_bytes_per_s = link_bytes_per_s
        self._shuttles = ShuttleMap()
        self._copiers: dict[LaneKind, CpuCopier] = {}
        self._pools = 0
        self._helper = Helper(shares=len(os.sched_getaffinity(0)) >= _HELPER_CPUS if shares is None else shares)
        self._shared_bytes = shared_bytes
        self.slice_bytes = min(slice_bytes, HOST_SLICE_BYTES)
        self.slice_rows = _SLICE_ROWS
        self.direct_slice_bytes = self.slice_bytes
        self.ramp_bytes = 0
        self.digest_slice_bytes = max(slice_bytes, HOST_SLICE_BYTES)
        self.name = platform.processor() or platform.machine()
        self.digest_algorithm = XXH3
        self.digest_path = "numpy"
        self.device_bytes = 0

    def unstaged_bytes(self, pool: DevicePool, rows: tuple[RowMap, ...], chunk: ChunkWork) -> int:
        """See `Device`."""
        return 0

    def bind_thread(self) -> None:
        """See `Device`."""

    def self_test(self) -> None:
        """See `Device`."""
        answer = Digester.plain_xxh3(b"")
        if answer != _XXH3_OF_NOTHING:
            raise DeviceFailure("internal", f"XXH3-128 of nothing is {answer.hex()}, not {_XXH3_OF_NOTHING.hex()}")
        row = np.arange(64, dtype=np.uint8)
        if self._digester.digest(XXH3, row) == self._digester.digest(XXH3, row[::-1].copy()):
            raise DeviceFailure("internal", "two different rows have one digest")

    def open_pool(self, stage: Stage, descriptor: int) -> CpuPool:
        """See `Device`."""
        if isinstance(stage.pool, CudaIpcPool):
            raise PoolRefused("foreign_device", "a GPU's pool was sent to a cpu worker")
        pool = open_host_pool(stage, descriptor, self._pool_closed)
        self._pools += 1
        self._helper.put(lambda: self._map(pool))
        return pool

    def _map(self, pool: CpuPool) -> None:
        """Map a pool step by step: slices that wait for the helper come in between."""
        if pool.map_some():
            self._helper.put(lambda: self._map(pool))

    def _pool_closed(self) -> None:
        self._pools -= 1

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """See `Device`."""
        self._shuttles.add(index, memory)
        return False

    def copier(self, lane: LaneKind) -> CpuCopier:
        """See `Device`."""
        staging_bytes = self.slice_bytes if lane is LaneKind.RESTORE else 0
        limiter = LinkLimiter(self._link_bytes_per_s)
        made = CpuCopier(
            self._shuttles,
            self._digester,
            limiter,
            staging_bytes,
            helper=self._helper,
            shared_bytes=self._shared_bytes,
        )
        self._copiers[lane] = made
        return made

    def resources(self) -> dict[str, int]:
        """See `Device`."""
        return {
            "streams": 0,
            "events": 0,
            "staging_bytes": sum(copier.staging_bytes for copier in self._copiers.values()),
            "registrations": 0,
            "pools": self._pools,
            "mappings": self._pools,
            "shuttles": len(self._shuttles),
        }

    def close(self) -> None:
        """See `Device`."""
        self._helper.close()
        self._shuttles.clear()
