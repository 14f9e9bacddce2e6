"""What a lane needs of a device: pools to read and write, shuttles to copy to, and slices copied with proof.

A *copier* serves one lane. It has two slots, so that the device work of the next slice can run under the copy of this
one; a slot is begun, then completed, in turn::

    begin(0, slice 0); begin(1, slice 1); complete(0); begin(0, slice 2); complete(1); ... ; drain()

One thread uses a copier at a time. Whoever calls has called `Device.bind_thread` on that thread before.
"""

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple, Protocol

from ipc.messages import CudaIpcPool, MemfdPool, Stage
from shm.layout import StageLayout
from workers.jobs import ChunkWork
from workers.rowmap import RowMap

# Of pools in host memory: what a restore stages should stay in the processor's cache between the check and the scatter.
HOST_SLICE_BYTES: Final = 1024 * 1024


class DeviceFailure(Exception):
    """The device refused or failed. `code` is a wire code; a `sticky` device is of no more use to this process. With
    ``out_of_memory`` it was asked for `wanted_bytes` and had `free_bytes` (0: unknown).
    """

    def __init__(
        self, code: str, message: str, *, sticky: bool = False, wanted_bytes: int = 0, free_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.sticky = sticky
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class PoolRefused(Exception):
    """A pool cannot be used: ``unshareable``, ``event_unshareable``, ``probe_failed``, ``bad_layout``,
    ``foreign_device`` or ``device_error``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SourceDiffers(Exception):
    """What was copied is not what was digested: the engine wrote while it was captured."""

    def __init__(self, chunk: int) -> None:
        super().__init__(f"chunk {chunk} changed while it was captured")
        self.chunk = chunk


class ChunkDamaged(Exception):
    """A chunk's bytes do not have the digest that they must have."""

    def __init__(self, chunk: int) -> None:
        super().__init__(f"chunk {chunk} does not have its digest any more")
        self.chunk = chunk


class LaneKind(Enum):
    """The two directions; each has its own copier, so that they overlap."""

    CAPTURE = "capture"
    RESTORE = "restore"


class CopyPath(Enum):
    """What moves rows of a GPU: kernels that gather and scatter them, its copy engines, or whichever suits a slice."""

    AUTO = "auto"
    GATHER = "gather"
    ENGINE = "engine"


class DevicePool(Protocol):
    """A mapped pool of an engine."""

    @property
    def layout(self) -> StageLayout:
        """What lies where in the pool."""
        ...

    @property
    def in_host_memory(self) -> bool:
        """Whether CPUs copy it: then its digests are XXH3, whatever the device."""
        ...

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of the pool, for the probe."""
        ...

    def event_reached(self) -> bool:
        """Whether the engine's event is complete (always so where the pool has none). Never waits.

        Raises:
            DeviceFailure: the event cannot be asked.
        """
        ...

    def flip_byte(self, offset_bytes: int) -> None:
        """Invert one byte in place (for `workers.faulty`)."""
        ...

    def close(self) -> None:
        """Give the mapping back. Idempotent; no job may use the pool any more."""
        ...


class SliceWork(NamedTuple):
    """Consecutive chunks of one job; `rows` has one entry a group of the pool's layout. `op` and `stage` say what the
    job is part of (for `workers.faulty`).
    """

    pool: DevicePool
    rows: tuple[RowMap, ...]
    chunks: tuple[ChunkWork, ...]
    op: str = ""
    stage: int = -1


class CopyTimes(NamedTuple):
    """Seconds spent since the copier was made. `gather_s` of `copy_s` went between rows and staging, not over the link;
    `verify_s` of `digest_s` proved bytes that were copied. A copier that cannot tell them apart leaves them 0.
    """

    digest_s: float
    copy_s: float
    gather_s: float = 0.0
    verify_s: float = 0.0


class Copier(Protocol):
    """Copies slices for one lane (see the module's text)."""

    before_copy: Callable[[SliceWork], None] | None
    """Called between the two readings of a source, one to copy and one to digest it, and before a verified slice is
    written to its rows; perhaps on a helper's thread. Only `workers.faulty` sets it.
    """

    @property
    def times(self) -> CopyTimes:
        """Totals; a lane takes differences."""
        ...

    def measure(self, *, exact: bool) -> None:
        """From the next slice on: take `times` on the device, or by what the host waits for. Any thread may call it."""
        ...

    @property
    def copies_behind(self) -> bool:
        """Whether a completed capture slice may still be on its way to the shuttles, its source already free."""
        ...

    def begin_capture(self, slot: int, work: SliceWork) -> None:
        """Start to digest and stage a slice.

        Raises:
            DeviceFailure: the device failed.
        """
        ...

    def complete_capture(self, slot: int) -> list[bytes]:
        """Prove and copy out what was begun; the digests in chunk order.

        Raises:
            SourceDiffers: the source changed.
            DeviceFailure: the device failed.
        """
        ...

    def begin_digest(self, slot: int, work: SliceWork) -> None:
        """Start to digest a slice where it lies.

        Raises:
            DeviceFailure: the device failed.
        """
        ...

    def complete_digest(self, slot: int) -> list[bytes]:
        """The digests of what was begun, in chunk order: of some moment since then, if the engine writes meanwhile.

        Raises:
            DeviceFailure: the device failed.
        """
        ...

    def begin_copy(self, slot: int, work: SliceWork, target: SliceWork) -> None:
        """Start to copy a slice to other rows: `target` has the same chunks and pool. A pool in device memory is
        written from now on, one in host memory only by `complete_copy`.

        Raises:
            DeviceFailure: the device failed; the slice's target rows are undefined.
        """
        ...

    def complete_copy(self, slot: int) -> None:
        """Prove, and where that is yet to be done write, what was begun.

        Raises:
            SourceDiffers: the source changed; what was begun is undefined.
            DeviceFailure: the device failed; the slice's target rows are undefined.
        """
        ...

    def begin_restore(self, slot: int, work: SliceWork) -> None:
        """Start to copy a slice into private staging.

        Raises:
            DeviceFailure: the device failed.
        """
        ...

    def verify_restore(self, slot: int) -> None:
        """Wait for the slice and check every chunk of it. Nothing is written to the pool.

        Raises:
            ChunkDamaged: a chunk does not have its digest.
            DeviceFailure: the device failed.
        """
        ...

    def scatter_restore(self, slot: int) -> None:
        """Write the verified slice to its rows.

        Raises:
            DeviceFailure: the device failed; the slice's rows are undefined.
        """
        ...

    def drain(self) -> None:
        """Wait until nothing of this copier runs any more, and let go of every view.

        Raises:
            DeviceFailure: the device failed.
        """
        ...


class Device(Protocol):
    """One device of a worker. Everything that it allocates it counts in `resources`."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def digest_algorithm(self) -> str:
        """How captures are digested here."""
        ...

    @property
    def digest_path(self) -> str:
        """Which implementation runs: ``numpy``, ``nvrtc`` or ``torch``."""
        ...

    @property
    def device_bytes(self) -> int:
        """Device memory that this process took, 0 on CPUs."""
        ...

    @property
    def slice_bytes(self) -> int:
        """Largest useful slice."""
        ...

    @property
    def slice_rows(self) -> int:
        """Most rows of a slice."""
        ...

    @property
    def direct_slice_bytes(self) -> int:
        """Largest useful slice of a copy from rows to rows."""
        ...

    @property
    def digest_slice_bytes(self) -> int:
        """Largest useful slice of what is only digested where it lies: nothing of it is staged."""
        ...

    @property
    def ramp_bytes(self) -> int:
        """Useful size of a slice of which nothing hides the time (0: any)."""
        ...

    def unstaged_bytes(self, pool: DevicePool, rows: tuple[RowMap, ...], chunk: ChunkWork) -> int:
        """Largest useful slice of captured chunks like this one, where they are not staged; else 0."""
        ...

    def bind_thread(self) -> None:
        """Make the device current on the calling thread."""
        ...

    def self_test(self) -> None:
        """Run every kernel on bytes whose answer is known.

        Raises:
            DeviceFailure: an answer was wrong.
        """
        ...

    def open_pool(self, stage: Stage, descriptor: int) -> DevicePool:
        """Map a pool. `descriptor` is the memfd of a `MemfdPool` (not closed here), else -1.

        Raises:
            PoolRefused: the pool cannot be used.
        """
        ...

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """Take a shuttle into use, page-locking it where the device needs that; whether it is page-locked. Runs on the
        thread that makes shuttles, in bounded steps.

        Raises:
            DeviceFailure: it cannot be page-locked.
        """
        ...

    def copier(self, lane: LaneKind) -> Copier:
        """The copier of a lane; called once for each."""
        ...

    def resources(self) -> dict[str, int]:
        """Counters that must not grow with the number of jobs."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


def check_probe(pool: DevicePool, stage: Stage) -> None:
    """Compare what the engine read at the probe's offsets with what this process reads there.

    Raises:
        PoolRefused: a place differs or is outside of the pool, or the probe itself is malformed.
    """
    if len(stage.probe_offsets) % 8 or len(stage.probe_bytes) != len(stage.probe_offsets) * 2:
        raise PoolRefused(
            "probe_failed", f"{len(stage.probe_bytes)} probe bytes for {len(stage.probe_offsets)} bytes of offsets"
        )
    pool_bytes = pool_length(stage.pool)
    for number in range(len(stage.probe_offsets) // 8):
        offset = int.from_bytes(stage.probe_offsets[number * 8 : number * 8 + 8], "little")
        if offset >= pool_bytes:
            raise PoolRefused(
                "probe_failed", f"the probe's offset {offset} is outside of the pool's {pool_bytes} bytes"
            )
        length = min(16, pool_bytes - offset)
        expected = stage.probe_bytes[number * 16 : number * 16 + length]
        if pool.read(offset, length) != expected:
            raise PoolRefused("probe_failed", f"the pool's bytes at {offset} are not those that the engine sees")


def pool_length(pool: MemfdPool | CudaIpcPool) -> int:
    """Bytes of a pool."""
    return pool.pool_bytes
