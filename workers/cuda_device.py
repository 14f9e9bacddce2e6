"""A GPU of CUDA or HIP, found by its UUID: engines' pools by IPC, page-locked shuttles, kernels, streams for life."""

import contextlib
import logging
import os
import resource
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from ipc.messages import CudaIpcPool, Stage
from shm.gpu_runtime import ANY_DIRECTION, HOST_TO_DEVICE, GpuError, GpuRuntime, GpuUnavailable
from shm.layout import LayoutError, check_layout
from workers.compiler import CompilerUnavailable
from workers.cpu_copier import CpuCopier
from workers.cpu_pool import CpuPool, open_host_pool
from workers.cuda_copier import LOCK_STEP_BYTES, CudaCopier
from workers.cuda_engine import strips_on_path
from workers.cuda_memory import Counts, DeviceMemory, SlotMemory, translated
from workers.cuda_pool import AllocationBook, CudaPool, PoolMemory
from workers.cuda_self_test import run_self_test
from workers.device import (
    HOST_SLICE_BYTES,
    CopyPath,
    DeviceFailure,
    DevicePool,
    LaneKind,
    PoolRefused,
    SliceWork,
    check_probe,
)
from workers.digest import MLH, Digester
from workers.gpu_kernels import CompiledKernels, SliceKernels, compiled
from workers.jobs import ChunkWork
from workers.limiter import LinkLimiter
from workers.mixed_copier import MixedCopier
from workers.rowmap import RowMap
from workers.shuttle_map import ShuttleMap
from workers.slice_table import key_table

_log: Final = logging.getLogger(__name__)
_SLICE_ROWS: Final = 65536
# Of copies from rows to rows, which a launch carries out at the memory's speed: some of the time of a cancellation.
DIRECT_SLICE_BYTES: Final = 1024 * 1024 * 1024
_UNSTAGED_SLICE_BYTES: Final = 512 * 1024 * 1024
# Kernels over so much take a tenth of a millisecond. With less, slices at the ends of a job would have more to wait for
# where kernels wait for their turn: two processes that use one GPU have it in turns of some milliseconds.
_RAMP_BYTES: Final = 64 * 1024 * 1024
# Some hundred microseconds of a GPU's reading: long enough to hide what the host does for the next slice.
_DIGEST_SLICE_BYTES: Final = 512 * 1024 * 1024
# Of one process on a GPU, measured: 480 to 560 MiB on an H200, whatever it does.
CONTEXT_BYTES: Final = 512 * 1024 * 1024


def _lock_limit() -> str:
    """What the kernel lets this process lock, for the text of a failure; drivers go by it or by their own rules."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit_bytes == resource.RLIM_INFINITY else f" (the limit of locked memory is {limit_bytes} bytes)"


class CudaDevice:
    """See `workers.device.Device`."""

    def __init__(
        self,
        runtime: GpuRuntime,
        index: int,
        digester: Digester,
        *,
        slice_bytes: int,
        staging_bytes: int,
        direct_slice_bytes: int = DIRECT_SLICE_BYTES,
        path: CopyPath = CopyPath.AUTO,
        urgent: bool = True,
    ) -> None:
        self._runtime = runtime
        self._index = index
        self._digester = digester
        self._counts = Counts()
        self._shuttles = ShuttleMap()
        self._locked: dict[int, list[int]] = {}
        self._allocations = AllocationBook(runtime, self._counts)
        self._copiers: list[MixedCopier] = []
        self._keys: DeviceMemory | None = None
        self._kernels: SliceKernels | None = None
        self._setup_stream = 0
        self._staging_bytes = staging_bytes
        self._host_pools = 0
        self._path = path
        self._urgent = urgent
        self.slice_bytes = min(slice_bytes, staging_bytes)
        self.slice_rows = _SLICE_ROWS
        self.direct_slice_bytes = direct_slice_bytes
        # Rows that are not staged may be many at once, so that kernels which wait for their turn wait less often.
        self.unstaged_slice_bytes = min(max(slice_bytes, _UNSTAGED_SLICE_BYTES), direct_slice_bytes)
        self.ramp_bytes = min(_RAMP_BYTES, self.slice_bytes)
        self.digest_slice_bytes = max(_DIGEST_SLICE_BYTES, self.slice_bytes)
        self.digest_algorithm = MLH
        self.name = ""

    @classmethod
    def open(
        cls,
        uuid: str,
        digester: Digester,
        *,
        slice_bytes: int,
        staging_bytes: int,
        kernels: str = "auto",
        direct_slice_bytes: int = DIRECT_SLICE_BYTES,
        path: CopyPath = CopyPath.AUTO,
        urgent: bool = True,
    ) -> "CudaDevice":
        """Open the GPU with this UUID. `kernels`: ``auto`` (compiled, torch where that fails), ``nvrtc`` or ``torch``.

        Raises:
            DeviceFailure: no runtime, no such GPU, or it cannot be used.
        """
        try:
            runtime = GpuRuntime.load()
        except GpuUnavailable as exc:
            raise DeviceFailure("device_error", str(exc)) from exc
        with translated():
            index = runtime.find_device(uuid)
        if index is None:
            raise DeviceFailure("device_error", f"no GPU {uuid} is visible to this process")
        device = cls(
            runtime,
            index,
            digester,
            slice_bytes=slice_bytes,
            staging_bytes=staging_bytes,
            direct_slice_bytes=direct_slice_bytes,
            path=path,
            urgent=urgent,
        )
        with device._starting():
            device.prepare(kernels)
        return device

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """`translated`; where device memory was missing, with what the rest of the start needs and what there is."""
        try:
            with translated():
                yield
        except DeviceFailure as exc:
            if exc.code == "out_of_memory":
                exc.wanted_bytes = self._start_bytes() - self._counts.device_bytes
                with contextlib.suppress(GpuError):  # without a context nobody can tell
                    exc.free_bytes = self._runtime.memory_info()[0]
            raise

    def _start_bytes(self) -> int:
        """Device memory that a start takes in all: two slots a lane, and before there is anything the context."""
        return 2 * len(LaneKind) * SlotMemory.needed_bytes(self._staging_bytes) + (
            0 if self._counts.device_bytes else CONTEXT_BYTES
        )

    def prepare(self, kernels: str) -> None:
        """Create context, keys and kernels.

        Raises:
            GpuError, DeviceFailure: the device cannot be used.
        """
        runtime = self._runtime
        runtime.set_device(self._index)
        runtime.memory_info()  # the first call that needs the primary context creates it
        self.name = runtime.device_name(self._index)
        self._setup_stream = runtime.stream_create(urgent=False)
        self._counts.streams += 1
        keys = key_table(self._digester.mlh.first)
        self._keys = DeviceMemory(runtime, self._counts, keys.nbytes)
        runtime.memcpy_async(self._keys.address, int(keys.ctypes.data), keys.nbytes, HOST_TO_DEVICE, self._setup_stream)
        runtime.stream_synchronize(self._setup_stream)
        self._kernels = self._choose_kernels(kernels, self._keys.address)

    def _choose_kernels(self, wanted: str, keys: int) -> SliceKernels:
        if wanted != "torch":
            try:
                image = compiled(self._runtime.kind, self._architecture())
                return CompiledKernels(self._runtime, image, keys)
            except (CompilerUnavailable, GpuError) as exc:
                if wanted != "auto":
                    raise DeviceFailure("device_error", str(exc)) from exc
                _log.warning("kernels are torch operations, slow reason=%s", exc)
        try:
            import torch  # noqa: PLC0415 - takes seconds, and may be missing

            from workers.torch_kernels import TorchKernels  # noqa: PLC0415
        except ImportError as exc:
            raise DeviceFailure("device_error", f"neither compiled kernels nor torch: {exc}") from exc
        return TorchKernels(torch.device("cuda", self._index), self._digester.mlh, self._move_by_copy_engine)

    def _move_by_copy_engine(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Waits behind bulk copies that are under way, but works everywhere."""
        self._runtime.memcpy_async(target, source, size_bytes, ANY_DIRECTION, stream)

    def _architecture(self) -> str:
        if self._runtime.kind == "cuda":
            major, minor = self._runtime.compute_capability(self._index)
            return f"sm_{major}{minor}"
        try:
            import torch  # noqa: PLC0415 - as above
        except ImportError as exc:
            raise CompilerUnavailable(f"the architecture is asked of torch: {exc}") from exc
        name = str(getattr(torch.cuda.get_device_properties(self._index), "gcnArchName", ""))
        return name.split(":", maxsplit=1)[0]

    @property
    def digest_path(self) -> str:
        """See `Device`."""
        return self.kernels.path

    @property
    def kernels(self) -> SliceKernels:
        """The kernels in use."""
        assert self._kernels is not None, "the device was prepared"
        return self._kernels

    @property
    def device_bytes(self) -> int:
        """See `Device`: what was allocated, without the context itself."""
        return self._counts.device_bytes

    def unstaged_bytes(self, pool: DevicePool, rows: tuple[RowMap, ...], chunk: ChunkWork) -> int:
        """See `Device`."""
        if not isinstance(pool, CudaPool):
            return 0
        work = SliceWork(pool, rows, (chunk,))
        return 0 if strips_on_path(self._path, work, pool.address) is None else self.unstaged_slice_bytes

    def bind_thread(self) -> None:
        """See `Device`."""
        with translated():
            self._runtime.set_device(self._index)

    def self_test(self) -> None:
        """See `Device`."""
        with self._starting():
            run_self_test(self._runtime, self._counts, self.kernels, self._digester, self._setup_stream)

    def open_pool(self, stage: Stage, descriptor: int) -> CudaPool | CpuPool:
        """See `Device`: a memfd is opened as a `cpu` worker does, and copied by the CPU."""
        wanted = stage.pool
        if isinstance(wanted, CudaIpcPool):
            return self._open_device_pool(stage, wanted)
        pool = open_host_pool(stage, descriptor, self._host_pool_closed)
        self._counts.pools += 1
        self._host_pools += 1
        return pool

    def _host_pool_closed(self) -> None:
        self._counts.pools -= 1
        self._host_pools -= 1

    def _open_device_pool(self, stage: Stage, wanted: CudaIpcPool) -> CudaPool:
        self._check(stage, wanted)
        base = self._allocations.open(wanted)
        release = _once(lambda: self._allocations.release(wanted.handle))
        event = 0
        try:
            if wanted.event_handle:
                event = self._open_event(wanted.event_handle)
            memory = PoolMemory(base + wanted.offset_bytes, wanted.pool_bytes, release)
            pool = CudaPool(self._runtime, self._counts, memory, stage.layout, event=event, stream=self._setup_stream)
        except (GpuError, ValueError) as exc:
            if event:
                with contextlib.suppress(GpuError):
                    self._runtime.event_destroy(event)
            release()
            raise PoolRefused("device_error", str(exc)) from exc
        except PoolRefused:
            release()
            raise
        try:
            check_probe(pool, stage)
        except DeviceFailure as exc:
            pool.close()
            raise PoolRefused("device_error", exc.message) from exc
        except PoolRefused:
            pool.close()
            raise
        return pool

    def _open_event(self, handle: bytes) -> int:
        """The engine's event. CUDA lets a process map another user's memory, but not open another user's event.

        Raises:
            GpuError: the device is of no more use.
            PoolRefused: the pool can only be used without an event.
        """
        try:
            return self._runtime.ipc_open_event(handle)
        except (GpuError, ValueError) as exc:
            if isinstance(exc, GpuError) and exc.sticky:
                raise
            why = f"the event cannot be opened by uid {os.geteuid()}: {exc}"
            raise PoolRefused("event_unshareable", f"{why}; register without one, and order by host") from exc

    def _check(self, stage: Stage, wanted: CudaIpcPool) -> None:
        try:
            check_layout(stage.layout, wanted.pool_bytes)
        except LayoutError as exc:
            raise PoolRefused("bad_layout", str(exc)) from exc
        for number, group in enumerate(stage.layout.all_groups):
            rows = stage.layout.chunk_rows(group)
            if rows > _SLICE_ROWS:
                raise PoolRefused(
                    "bad_layout", f"a chunk of group {number} has {rows} rows, of a GPU it has at most {_SLICE_ROWS}"
                )
        if wanted.offset_bytes < 0 or wanted.offset_bytes + wanted.pool_bytes > wanted.allocation_bytes:
            raise PoolRefused("bad_layout", f"the pool does not lie in its allocation: {wanted.allocation_bytes} bytes")

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        """See `Device`: page-locked in steps of 64 MiB, so that copies of others get in between."""
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        steps: list[int] = []
        try:
            with translated():
                for start in range(0, len(memory), LOCK_STEP_BYTES):
                    self._runtime.host_register(address + start, min(LOCK_STEP_BYTES, len(memory) - start))
                    steps.append(address + start)
        except DeviceFailure as exc:
            for step in steps:
                with contextlib.suppress(GpuError):
                    self._runtime.host_unregister(step)
            done = len(steps) * LOCK_STEP_BYTES
            text = f"page-locking stopped after {done} of {len(memory)} bytes: {exc.message}{_lock_limit()}"
            raise DeviceFailure(exc.code, text, sticky=exc.sticky) from exc
        self._locked[index] = steps
        self._counts.registrations += len(steps)
        self._shuttles.add(index, memory)
        return True

    def copier(self, lane: LaneKind) -> MixedCopier:
        """See `Device`."""
        with self._starting():
            on_device = CudaCopier(
                self._runtime,
                self._counts,
                self.kernels,
                self._shuttles,
                self._digester,
                lane=lane,
                staging_bytes=self._staging_bytes,
                path=self._path,
                urgent=self._urgent,
            )
        in_host = CpuCopier(
            self._shuttles, self._digester, LinkLimiter(0.0), HOST_SLICE_BYTES if lane is LaneKind.RESTORE else 0
        )
        made = MixedCopier(on_device, in_host)
        self._copiers.append(made)
        return made

    def resources(self) -> dict[str, int]:
        """See `Device`."""
        counts = self._counts
        return {
            "streams": counts.streams,
            "events": counts.events,
            "staging_bytes": counts.staging_bytes,
            "device_bytes": counts.device_bytes,
            "registrations": counts.registrations,
            "pools": counts.pools,
            "mappings": counts.mappings + self._host_pools,
            "host_staging_bytes": sum(copier.host_bytes for copier in self._copiers),
            "shuttles": len(self._shuttles),
        }

    def close(self) -> None:
        """See `Device`."""
        with contextlib.suppress(GpuError):
            while self._copiers:
                self._copiers.pop().close()
            self._shuttles.clear()
            while self._locked:
                for step in self._locked.popitem()[1]:
                    self._runtime.host_unregister(step)
                    self._counts.registrations -= 1
            if self._kernels is not None:
                self._kernels.close()
                self._kernels = None
            if self._keys is not None:
                self._keys.close()
                self._keys = None
            if self._setup_stream:
                self._runtime.stream_destroy(self._setup_stream)
                self._setup_stream = 0
                self._counts.streams -= 1


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """The action, at most once."""
    pending = [action]

    def run() -> None:
        if pending:
            pending.pop()()

    return run
