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

    `pool` is the pool's first byte and `width` its vector width.
    """

    table: SliceTable
    layout: StageLayout
    pool: int
    pool_bytes: int
    planes: int
    width: int
    rows: int
    targets: int
    chunks: int
    staging: int

    @classmethod
    def of(cls, pool: CudaPool, memory: SlotMemory, table: SliceTable, stream: int) -> "LoadedSlice":
        """A slice of `pool` in a slot's memory; its tables are on their way on `stream`."""
        rows, targets, chunks = memory.load(table, stream)
        return cls(
            table=table,
            layout=pool.layout,
            pool=pool.address,
            pool_bytes=pool.size_bytes,
            planes=pool.planes,
            width=pool.width,
            rows=rows,
            targets=targets,
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

    def copy_rows(self, loaded: LoadedSlice, differs: int, what: int, stream: int) -> None:
        """Copy the rows to the target rows (`COPY`), compare the two (`COMPARE`), or both. Where they differ, the first
        sum of a block in `differs` becomes 1; bytes that hold no token are not looked at.
        """
        ...

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy a table or sums between page-locked host and device memory; addresses and size are multiples of 16."""
        ...

    def load(self, target: int, source: int, size_bytes: int, *, sums: int, sums_bytes: int, stream: int) -> None:
        """`move`, and set sums to zero."""
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
        arguments = [*self._rows(loaded), c_void_p(self._keys), c_void_p(sums)]
        self._digest(f"digest_rows_{loaded.width}", loaded, stream, arguments)

    def gather(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        self._walk("gather", loaded, stream, [*self._rows(loaded), c_void_p(loaded.staging)])

    def scatter(self, loaded: LoadedSlice, stream: int) -> None:
        """See `SliceKernels`."""
        self._walk("scatter", loaded, stream, [*self._rows(loaded), c_void_p(loaded.staging)])

    def copy_rows(self, loaded: LoadedSlice, differs: int, what: int, stream: int) -> None:
        """See `SliceKernels`."""
        arguments = [*self._rows(loaded), c_void_p(loaded.targets), c_void_p(differs), c_uint(what)]
        self._walk("copy_rows", loaded, stream, arguments)

    def digest_staging(self, loaded: LoadedSlice, sums: int, stream: int) -> None:
        """See `SliceKernels`."""
        arguments: list[KernelArgument] = [c_void_p(loaded.chunks), c_uint(len(loaded.table.chunks))]
        arguments += [c_void_p(address) for address in (self._keys, loaded.staging, sums)]
        self._digest("digest_staging", loaded, stream, arguments)

    def move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `SliceKernels`."""
        count = size_bytes // MOVE_BYTES
        arguments: list[KernelArgument] = [c_void_p(source), c_void_p(target), c_uint(count)]
        self._runtime.launch(self._functions["move"], -(-count // THREADS), THREADS, stream, arguments)

    def load(self, target: int, source: int, size_bytes: int, *, sums: int, sums_bytes: int, stream: int) -> None:
        """See `SliceKernels`."""
        count, sums_count = size_bytes // MOVE_BYTES, sums_bytes // MOVE_BYTES
        arguments: list[KernelArgument] = [c_void_p(source), c_void_p(target), c_uint(count)]
        arguments += [c_void_p(sums), c_uint(sums_count)]
        blocks = -(-max(count, sums_count) // THREADS)
        self._runtime.launch(self._functions["load_tables"], blocks, THREADS, stream, arguments)

    @staticmethod
    def _rows(loaded: LoadedSlice) -> list[KernelArgument]:
        count = c_uint(len(loaded.table.chunks))
        return [c_void_p(loaded.planes), c_void_p(loaded.chunks), count, c_void_p(loaded.rows)]

    def _walk(self, kernel: str, loaded: LoadedSlice, stream: int, arguments: Sequence[KernelArgument]) -> None:
        function, tiles = self._functions[f"{kernel}_{loaded.width}"], loaded.table.tile_count
        if tiles:
            self._runtime.launch(function, tiles, THREADS, stream, arguments)

    def _digest(self, kernel: str, loaded: LoadedSlice, stream: int, arguments: Sequence[KernelArgument]) -> None:
        columns, groups, group = loaded.table.grid
        if columns:
            every = [*arguments, c_uint(loaded.table.block_count), c_uint(groups), c_uint(group)]
            self._runtime.launch(self._functions[kernel], columns * groups, THREADS, stream, every)

    def close(self) -> None:
        """See `SliceKernels`."""
        if self._module:
            self._runtime.module_unload(self._module)
            self._module = 0
