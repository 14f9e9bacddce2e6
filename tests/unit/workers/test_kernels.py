"""The kernels' own source, run thread after thread on the CPU, against the numpy reference and the byte model."""

import ctypes
import shutil

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from shm.extent import ChunkPlace
from shm.layout import Plane, StageLayout
from tests.support.layouts import stage_layout
from tests.support.shape_cases import Case, cases, pack_groups
from tests.unit.workers.emulate import build
from tests.unit.workers.rig import KEY
from workers.compiler import CompilerUnavailable, KernelCompiler
from workers.device import DevicePool, SliceWork
from workers.digest import BLOCK_BYTES, MLH, Bytes, Digester
from workers.jobs import capture_chunks, restore_chunks
from workers.kernel_source import COMPARE, COPY, SOURCE
from workers.rowmap import RowMap
from workers.slice_table import SliceTable, group_shapes, key_table, magic_of, plane_table, slice_table, vector_width

COMPILER = shutil.which("g++") or shutil.which("c++") or ""
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
DIGESTER = Digester(KEY)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("kernels"), COMPILER)


class HostPool:
    """Pool memory at a 256-byte boundary, as devices allocate it."""

    def __init__(self, layout: StageLayout, seed: int) -> None:
        self.layout = layout
        room = np.random.default_rng(seed).integers(0, 256, layout.end_bytes + 256, dtype=np.uint8)
        start = -room.ctypes.data % 256
        self.memory = room[start : start + layout.end_bytes]
        self.planes = plane_table(layout, self.memory.ctypes.data)


def pointer(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Emulated:
    """One slice on the emulated device."""

    def __init__(self, kernels: ctypes.CDLL, pool: HostPool, table: SliceTable) -> None:
        self.kernels, self.pool, self.table = kernels, pool, table
        self.width = vector_width(pool.planes)
        room = np.full(table.staging_bytes + 16, 0xEE, np.uint8)
        start = -room.ctypes.data % 16
        self.staging = room[start : start + table.staging_bytes]
        self.keys = np.concatenate([key_table(DIGESTER.mlh.first).reshape(-1), np.zeros(2, np.uint64)])
        shift = (-self.keys.ctypes.data % 16) // 8
        if shift:
            self.keys[shift:] = self.keys[:-shift].copy()
            self.keys = self.keys[shift:]

    def rows(self, kernel: str, *last: ctypes.c_void_p | ctypes.c_uint) -> None:
        function = getattr(self.kernels, f"run_{kernel}_{self.width}")
        table = self.table
        count = ctypes.c_uint(len(table.chunks))
        planes = pointer(self.pool.planes)
        blocks = ctypes.c_uint(table.grid.columns * table.grid.groups if kernel == "digest_rows" else table.tile_count)
        function(blocks, planes, pointer(table.chunks), count, pointer(table.rows), *last)

    def digests(self, *, staged: bool) -> list[bytes]:
        sums = np.zeros((self.table.block_count, 4), np.uint64)
        columns, groups, group = self.table.grid
        shares = ctypes.c_uint(self.table.block_count), ctypes.c_uint(groups), ctypes.c_uint(group)
        if staged:
            self.kernels.run_digest_staging(
                ctypes.c_uint(columns * groups),
                pointer(self.table.chunks),
                ctypes.c_uint(len(self.table.chunks)),
                pointer(self.keys),
                pointer(self.staging),
                pointer(sums),
                *shares,
            )
        else:
            self.rows("digest_rows", pointer(self.keys), pointer(sums), *shares)
        return [
            DIGESTER.mlh.finish(sums[c.first_block : c.first_block + c.block_count], c.work.span.length_bytes)
            for c in self.table.staged
        ]

    def staged(self, number: int) -> bytes:
        chunk = self.table.staged[number]
        return self.staging[chunk.staging_bytes : chunk.staging_bytes + chunk.work.span.length_bytes].tobytes()


def case_work(pool: HostPool, case: Case, prefix: int | None = None) -> SliceWork:
    """A capture of a case as one slice, or (with `prefix`) a restore of its first `prefix` tokens."""
    layout = pool.layout
    places = [ChunkPlace(span.length_bytes, ()) for span in case.spans]
    if prefix is None:
        chunks = capture_chunks(layout, case.tokens, case.positions, places).copied
    else:
        chunks = restore_chunks(
            layout, case.tokens, prefix, case.positions, places, digests=bytes(16 * len(places)), algorithms=(MLH,)
        )
    rows = pack_groups(case.rows if prefix is None else case.target_of(prefix))
    maps = tuple(RowMap.parse(entry, group.rows, 0) for entry, group in zip(rows, layout.all_groups, strict=True))
    unused: DevicePool = pool  # type: ignore[assignment]
    return SliceWork(unused, maps, tuple(chunks))


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases(), st.integers(0, 2**32))
def test_kernels_move_and_digest_what_the_model_says(kernels: ctypes.CDLL, case: Case, seed: int) -> None:
    layout = case.layout
    pool = HostPool(layout, seed)
    before = pool.memory.copy()
    expected = [case.chunk(before, span) for span in case.spans]
    device = Emulated(kernels, pool, slice_table(case_work(pool, case), group_shapes(layout)))
    reference = [DIGESTER.digest(MLH, array_of(chunk)) for chunk in expected]
    assert device.digests(staged=False) == reference
    device.rows("gather", pointer(device.staging))
    assert [device.staged(number) for number in range(len(expected))] == expected
    assert device.digests(staged=True) == reference
    assert np.array_equal(pool.memory, before)

    for prefix in {*case.prefixes[::7], *case.prefixes[-1:]}:
        work = case_work(pool, case, prefix)
        pool.memory[:] ^= 0x5A
        destroyed = pool.memory.copy()
        if work.chunks:
            back = Emulated(kernels, pool, slice_table(work, group_shapes(layout)))
            for chunk in back.table.staged:
                stored = expected[chunk.work.number]
                back.staging[chunk.staging_bytes : chunk.staging_bytes + len(stored)] = array_of(stored)
            back.rows("scatter", pointer(back.staging))
        assert np.array_equal(pool.memory, case.restored(destroyed, before, prefix))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases(), st.integers(0, 2**32))
def test_rows_are_copied_to_rows_and_every_difference_is_told(kernels: ctypes.CDLL, case: Case, seed: int) -> None:
    pool = HostPool(case.layout, seed)
    before = pool.memory.copy()
    work = case_work(pool, case)
    packed = pack_groups(case.target)
    targets = tuple(RowMap.parse(e, group.rows, 0) for e, group in zip(packed, case.layout.all_groups, strict=True))
    device = Emulated(kernels, pool, slice_table(work, group_shapes(case.layout), work._replace(rows=targets)))

    def differs(what: int) -> list[int]:
        sums = np.zeros((device.table.block_count, 4), np.uint64)
        device.rows("copy_rows", pointer(device.table.targets), pointer(sums), ctypes.c_uint(what))
        return np.flatnonzero(sums[:, 0]).tolist()

    assert differs(COPY | COMPARE) == []
    assert np.array_equal(pool.memory, case.copied(before))
    assert differs(COMPARE) == []
    # A byte of the last token of a chunk, in its last plane.
    number = seed % len(case.spans)
    span = case.spans[number]
    plane = case.layout.all_groups[span.group].planes[-1]
    row = case.rows[span.group][span.first_row]
    pool.memory[plane.offset_bytes + row * plane.row_stride_bytes] ^= 1
    assert differs(COMPARE) == [int(device.table.chunks["first_block"][number])]
    assert differs(COPY) == []


@pytest.mark.parametrize("row_bytes", [1, 3, 16, 136, 4096, 65_540, 2**20, 2**31, 2**32 - 1])
def test_a_multiplication_divides_exactly(row_bytes: int) -> None:
    magic = magic_of(row_bytes)
    assert magic < 2**64
    if row_bytes == 1:
        assert magic == 0
        return
    for near in {
        0,
        1,
        *(k * row_bytes + d for k in (1, 2, 7, (2**32 - 1) // row_bytes) for d in (-1, 0, 1)),
        2**32 - 1,
    }:
        if 0 <= near < 2**32:
            assert near * magic >> 64 == near // row_bytes


@pytest.mark.parametrize("grain", [1, 4, 16])
@pytest.mark.parametrize("gap", [0, 3])
def test_kernels_take_rows_that_cross_tiles(kernels: ctypes.CDLL, grain: int, gap: int) -> None:
    """A tile ends at any byte of a row, and a row in any tile of its chunk."""
    block, rows = 74, 24
    size = grain * (96 // grain + 1) * block
    first = Plane(grain, size, size + gap * grain, rows, block, size // block)
    second = Plane(first.end_bytes, 2 * size, 2 * size + gap * grain, rows, block, 2 * size // block)
    layout = stage_layout((first, second), None, 1024)
    tokens = rows // 2 * block - 5
    order = np.random.default_rng(grain).permutation(rows).tolist()
    case = Case(layout, layout.end_bytes, tokens, (), (tuple(order[:12]),), (tuple(order[12:]),), (tokens,))
    pool = HostPool(layout, gap)
    before = pool.memory.copy()
    device = Emulated(kernels, pool, slice_table(case_work(pool, case), group_shapes(layout)))
    assert device.width == grain
    assert device.table.tile_count > 3
    device.rows("gather", pointer(device.staging))
    assert [device.staged(number) for number in range(len(case.spans))] == [case.chunk(before, s) for s in case.spans]
    assert device.digests(staged=False) == device.digests(staged=True)
    back = Emulated(kernels, pool, slice_table(case_work(pool, case, tokens), group_shapes(layout)))
    back.staging[:] = device.staging
    pool.memory[:] ^= 0x5A
    destroyed = pool.memory.copy()
    back.rows("scatter", pointer(back.staging))
    assert np.array_equal(pool.memory, case.restored(destroyed, before, tokens))


def array_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("row_bytes", [64 * 1024, 65_540])
def test_chunks_of_several_blocks(kernels: ctypes.CDLL, row_bytes: int) -> None:
    layout = stage_layout(
        (Plane(0, row_bytes, row_bytes, 40), Plane(40 * row_bytes, row_bytes, row_bytes, 40)), None, 20
    )
    pool = HostPool(layout, 5)
    case = Case(layout, layout.end_bytes, 40, (), ((*range(17, 40), *range(17)),), ((),), ())
    device = Emulated(kernels, pool, slice_table(case_work(pool, case), group_shapes(layout)))
    assert device.table.block_count >= 2 * (40 * row_bytes // BLOCK_BYTES)
    device.rows("gather", pointer(device.staging))
    reference = [DIGESTER.digest(MLH, array_of(device.staged(number))) for number in range(2)]
    assert device.digests(staged=False) == reference == device.digests(staged=True)


def test_nvrtc_takes_the_source() -> None:
    try:
        compiler = KernelCompiler.load("cuda")
    except CompilerUnavailable as exc:
        pytest.skip(str(exc))
    image = compiler.compile(SOURCE, ["--gpu-architecture=sm_90", "--std=c++17"])
    assert image[:4] == b"\x7fELF"
