"""Kernels over slices on a GPU: compiled at run time and launched through the driver."""

from collections.abc import Mapping, Sequence
from ctypes import c_uint, c_void_p
from typing import Final, NamedTuple, Protocol

from shm.gpu_runtime import GpuRuntime, KernelArgument
from shm.layout import StageLayout
from workers.compiler import KernelCompiler
from workers.cuda_memory import SlotMemory
from workers.cuda_pool import CudaPool
from workers.kernel_source import KERNELS, MOVE_BYTES, SOURCE, THREADS
from workers.slice_table import SliceTable


class LoadedSlice(NamedTuple):
    """A slice whose tables are (or will be, in stream order) in device memory. All addresses are the device's.

    `pool` is the pool's first byte and `width` its vector width; `sums` has room for four u64 a block.
    """

    table: SliceTable
    layout: StageLayout
    pool: int
    pool_bytes: int
    planes: int
    width: int
    rows: int
    chunks: int
    staging: int

    @classmethod
    def of(cls, pool: CudaPool, memory: SlotMemory, table: SliceTable, stream: int) -> "LoadedSlice":
        """A slice of `pool` in a slot's memory; its tables are on their way on `stream`."""
        rows, chunks = memory.load(table, stream)
        return cls(
            table=table,
            layout=pool.layout,
            pool=pool.address,
            pool_bytes=pool.size_bytes,
            planes=pool.planes,
            width=pool.width,
            rows=rows,
            chunks=chunks,
            staging=memory.staging.address,
        )


class SliceKernels(Protocol):
    """What a copier needs done on the device. Every call only enqueues on `stream`."""

    @property
    def path(self) -> str:
        """``nvrtc`` or ``torch``."""
        ...

    def digest_rows(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """Add the block sums of the rows, read in place, to `sums`."""
        ...

    def gather(self, loaded: LoadedSlice, stream: int) -> None:
        """Copy the rows to staging in gathered order, zeros where no token is."""
        ...

    def digest_staging(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """Add the block sums of what lies in staging to `sums`."""
        ...

    def scatter(self, loaded: LoadedSlice, stream: int) -> None:
        """Copy staging to the rows that are live."""
        ...

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy a table or sums between page-locked host and device memory; addresses and size are multiples of 16."""
        ...

    def close(self) -> None:
        """Unload."""
        ...


# Compiled kernels by (runtime, architecture); what the template put there, forked workers find.
_images: Final[dict[tuple[str, str], bytes]] = {}


def compiled(kind: str, architecture: str) -> bytes:
    """The kernels for one architecture (``sm_90``, ``gfx942``), compiled once in a process.

    Raises:
        CompilerUnavailable: no compiler, or it refused.
    """
    image = _images.get((kind, architecture))
    if image is None:
        options = [f"--gpu-architecture={architecture}" if kind == "cuda" else f"--offload-arch={architecture}"]
        image = _images[kind, architecture] = KernelCompiler.load(kind).compile(SOURCE, [*options, "--std=c++17"])
    return image


def remember(kind: str, images: Mapping[str, bytes]) -> None:
    """Take in kernels that another process compiled, by architecture."""
    _images.update({(kind, name): image for name, image in images.items()})


class CompiledKernels:
    """Kernels of `workers.kernel_source` in the current context. `keys` is the device address of the digest's keys."""

    path = "nvrtc"

    def __init__(self, runtime: GpuRuntime, image: bytes, keys: int) -> None:
        self._runtime = runtime
        self._keys = keys
        self._module = runtime.module_load(image)
        self._functions = {name: runtime.module_function(self._module, name) for name in KERNELS}

    def digest_rows(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """See `SliceKernels`."""
        self._rows("digest_rows", loaded, stream, self._keys, sums)

    def gather(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        self._rows("gather", loaded, stream, loaded.staging)

    def scatter(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        self._rows("scatter", loaded, stream, loaded.staging)

    def digest_staging(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """See `SliceKernels`."""
        count = c_uint(len(loaded.table.chunks))
        arguments: list[KernelArgument] = [c_void_p(loaded.chunks), count]
        arguments += [c_void_p(address) for address in (self._keys, loaded.staging, sums)]
        self._launch("digest_staging", loaded, stream, arguments)

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `SliceKernels`."""
        count = size_bytes // MOVE_BYTES
        arguments: list[KernelArgument] = [c_void_p(source), c_void_p(target), c_uint(count)]
        self._runtime.launch(self._functions["move"], -(-count // THREADS), THREADS, stream, arguments)

    def _rows(self, kernel: str, loaded: LoadedSlice, stream: int, *last: int) -> None:
        count = c_uint(len(loaded.table.chunks))
        arguments: list[KernelArgument] = [c_void_p(loaded.planes), c_void_p(loaded.chunks), count]
        arguments.append(c_void_p(loaded.rows))
        arguments += [c_void_p(address) for address in last]
        self._launch(f"{kernel}_{loaded.width}", loaded, stream, arguments)

    def _launch(self, kernel: str, loaded: LoadedSlice, stream: int, arguments: Sequence[KernelArgument]) -> None:
        if loaded.table.tile_count:
            self._runtime.launch(self._functions[kernel], loaded.table.tile_count, THREADS, stream, arguments)

    def close(self) -> None:
        """See `SliceKernels`."""
        if self._module:
            self._runtime.module_unload(self._module)
            self._module = 0
