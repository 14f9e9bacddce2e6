"""A GPU's lane that also serves pools in host memory: each slice goes to the copier of its pool's memory.

Both copiers use the same page-locked shuttles. All slices that are under way on a lane belong to one job (see
`workers.lanes`) and a job has one pool, so they belong to the same copier.
"""

from collections.abc import Callable

from workers.cpu_copier import CpuCopier
from workers.cuda_copier import CudaCopier
from workers.device import Copier, CopyTimes, SliceWork


class MixedCopier:
    """See `workers.device.Copier`. Owns both copiers."""

    before_copy: Callable[[SliceWork], None] | None = None

    def __init__(self, device: CudaCopier, host: CpuCopier) -> None:
        self._device = device
        self._host = host
        self._current: Copier = device

    @property
    def times(self) -> CopyTimes:
        """See `Copier`."""
        device, host = self._device.times, self._host.times
        return CopyTimes(*map(sum, zip(device, host, strict=True)))

    def measure(self, *, exact: bool) -> None:
        """See `Copier`."""
        self._device.measure(exact=exact)
        self._host.measure(exact=exact)

    @property
    def copies_behind(self) -> bool:
        """See `Copier`."""
        return self._current.copies_behind

    @property
    def host_bytes(self) -> int:
        """Private memory of the copier for host memory."""
        return self._host.staging_bytes

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._choose(work).begin_capture(slot, work)

    def complete_capture(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        return self._current.complete_capture(slot)

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._choose(work).begin_digest(slot, work)

    def complete_digest(self, slot: int) -> list[bytes]:
        """See `Copier`."""
        return self._current.complete_digest(slot)

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """See `Copier`."""
        self._choose(work).begin_copy(slot, work, target)

    def complete_copy(self, slot: int) -> None:
        """See `Copier`."""
        self._current.complete_copy(slot)

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """See `Copier`."""
        self._choose(work).begin_restore(slot, work)

    def verify_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._current.verify_restore(slot)

    def scatter_restore(self, slot: int) -> None:
        """See `Copier`."""
        self._current.scatter_restore(slot)

    def drain(self) -> None:
        """See `Copier`."""
        try:
            self._host.drain()
        finally:
            self._device.drain()

    def close(self) -> None:
        """Free everything of this lane."""
        self._device.close()

    def _choose(self, work: SliceWork) -> Copier:
        self._current = self._host if work.pool.in_host_memory else self._device
        self._current.before_copy = self.before_copy
        return self._current
