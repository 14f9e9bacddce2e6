"""The kernels' own source, run thread after thread on the CPU, against the numpy reference and the byte model."""

import ctypes
import shutil
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from shm.extent import ChunkPlace
from shm.layout import Plane, StageLayout
from tests.support.layouts import packed_rows, positions, stage_layout, state_bytes
from tests.unit.workers.emulate import build
from tests.unit.workers.rig import KEY, model_chunk, written_bytes
from workers.compiler import CompilerUnavailable, KernelCompiler
from workers.device import DevicePool, SliceWork
from workers.digest import BLOCK_BYTES, MLH, Bytes, Digester
from workers.jobs import capture_chunks, restore_chunks
from workers.kernel_source import SOURCE
from workers.rowmap import RowMap
from workers.slice_table import SliceTable, plane_table, slice_table, vector_width

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
        self.keys = np.concatenate([DIGESTER.mlh.first.reshape(-1), np.zeros(2, np.uint64)])
        shift = (-self.keys.ctypes.data % 16) // 8
        if shift:
            self.keys[shift:] = self.keys[:-shift].copy()
            self.keys = self.keys[shift:]

    def rows(self, kernel: str, *last: ctypes.c_void_p) -> None:
        function = getattr(self.kernels, f"run_{kernel}_{self.width}")
        table = self.table
        count = ctypes.c_uint(len(table.chunks))
        planes = pointer(self.pool.planes)
        function(ctypes.c_uint(table.tile_count), planes, pointer(table.chunks), count, pointer(table.rows), *last)

    def digests(self, *, staged: bool) -> list[bytes]:
        sums = np.zeros((self.table.block_count, 4), np.uint64)
        if staged:
            self.kernels.run_digest_staging(
                ctypes.c_uint(self.table.tile_count),
                pointer(self.table.chunks),
                ctypes.c_uint(len(self.table.chunks)),
                pointer(self.keys),
                pointer(self.staging),
                pointer(sums),
            )
        else:
            self.rows("digest_rows", pointer(self.keys), pointer(sums))
        return [
            DIGESTER.mlh.finish(sums[c.first_block : c.first_block + c.block_count], c.work.span.length_bytes)
            for c in self.table.staged
        ]

    def staged(self, number: int) -> bytes:
        chunk = self.table.staged[number]
        return self.staging[chunk.staging_bytes : chunk.staging_bytes + chunk.work.span.length_bytes].tobytes()


def work_of(pool: HostPool, rows: Sequence[int], tokens: int, prefix: int, slot: int) -> SliceWork:
    layout = pool.layout
    spans = layout.chunks(tokens, positions(tokens, slot))
    places = [ChunkPlace(span.length_bytes, ()) for span in spans]
    if prefix < 0:
        chunks = capture_chunks(layout, tokens, positions(tokens, slot), places)
    else:
        digests = bytes(16 * len(spans))
        chunks = restore_chunks(
            layout, tokens, prefix, positions(tokens, slot), places, digests=digests, algorithms=(MLH,)
        )
    unused: DevicePool = pool  # type: ignore[assignment]
    return SliceWork(unused, row_maps(layout, rows, slot), tuple(chunks))


def row_maps(layout: StageLayout, rows: Sequence[int], slot: int) -> tuple[RowMap, ...]:
    """What the lanes make of the rows of an operation."""
    packed = packed_rows(layout, rows, slot)
    return tuple(RowMap.parse(entry, group.rows, 0) for entry, group in zip(packed, layout.all_groups, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[StageLayout, list[int], int, int]:
    tokens_per_row = draw(st.sampled_from([1, 1, 3, 16]))
    token_bytes = draw(st.sampled_from([1, 4, 6, 16, 64, 1200]))
    row_bytes = tokens_per_row * token_bytes
    rows = draw(st.integers(2, 30))
    grain = draw(st.sampled_from([1, 4, 16]))
    planes: list[Plane] = []
    at = draw(st.integers(0, 3)) * grain
    for _ in range(draw(st.integers(1, 5))):
        stride = row_bytes + draw(st.integers(0, 3)) * grain
        planes.append(Plane(at, row_bytes, stride, rows, tokens_per_row, token_bytes if tokens_per_row > 1 else 0))
        at = -(-planes[-1].end_bytes // grain) * grain + draw(st.integers(0, 3)) * grain
    state = Plane(at, grain * draw(st.integers(1, 40)), 40 * 16, 3) if draw(st.booleans()) else None
    layout = stage_layout(tuple(planes), state, tokens_per_row * draw(st.sampled_from([1, 2, 7, 16])))
    tokens = draw(st.integers(1, rows * tokens_per_row))
    order = list(draw(st.permutations(range(rows))))
    return layout, order[: layout.groups[0].rows_for(tokens)], tokens, draw(st.integers(0, tokens))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(cases(), st.integers(0, 2**32))
def test_kernels_move_and_digest_what_the_model_says(
    kernels: ctypes.CDLL, case: tuple[StageLayout, list[int], int, int], seed: int
) -> None:
    layout, rows, tokens, prefix = case
    slot = 2 if layout.states else -1
    pool = HostPool(layout, seed)
    before = pool.memory.tobytes()
    expected = [
        model_chunk(before, layout, rows, span, slot) for span in layout.chunks(tokens, positions(tokens, slot))
    ]
    device = Emulated(kernels, pool, slice_table(work_of(pool, rows, tokens, -1, slot), layout))
    reference = [DIGESTER.digest(MLH, array_of(chunk)) for chunk in expected]
    assert device.digests(staged=False) == reference
    device.rows("gather", pointer(device.staging))
    assert [device.staged(number) for number in range(len(expected))] == expected
    assert device.digests(staged=True) == reference

    back = Emulated(kernels, pool, slice_table(work_of(pool, rows, tokens, tokens, slot), layout))
    back.staging[:] = device.staging
    pool.memory[:] ^= 0x5A
    destroyed = pool.memory.tobytes()
    back.rows("scatter", pointer(back.staging))
    touched = written_bytes(layout, rows, tokens)
    touched |= state_bytes(layout, slot)
    after = pool.memory.tobytes()
    assert all(after[n] == (before[n] if n in touched else destroyed[n]) for n in range(len(after)))

    chunks = work_of(pool, rows, tokens, prefix, -1)
    if chunks.chunks:
        part = Emulated(kernels, pool, slice_table(chunks, layout))
        part.staging[:] = device.staging[: len(part.staging)]
        pool.memory[:] ^= 0x21
        destroyed = pool.memory.tobytes()
        part.rows("scatter", pointer(part.staging))
        touched = written_bytes(layout, rows, prefix)
        after = pool.memory.tobytes()
        assert all(after[n] == (before[n] if n in touched else destroyed[n]) for n in range(len(after)))


def array_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("row_bytes", [64 * 1024, 65_540])
def test_chunks_of_several_blocks(kernels: ctypes.CDLL, row_bytes: int) -> None:
    layout = stage_layout(
        (Plane(0, row_bytes, row_bytes, 40), Plane(40 * row_bytes, row_bytes, row_bytes, 40)), None, 20
    )
    pool = HostPool(layout, 5)
    rows = [*range(17, 40), *range(17)]
    device = Emulated(kernels, pool, slice_table(work_of(pool, rows, 40, -1, -1), layout))
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
