"""K/V tensors and the rows of a pool hold the same bytes."""

import pytest
import torch

from shm.layout import check_layout
from stratad.engines.kv_planes import LayerForm, StagePlanes, layout_for, pool_bytes_for

CPU = torch.device("cpu")
ROWS = 40


def _noise(form: LayerForm, tokens: int, dim: int, seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads too."""
    shape = (1, form.kv_heads, tokens, dim * form.dtype.itemsize)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(form.dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_what_was_written_is_read_bit_for_bit(dtype: torch.dtype) -> None:
    forms = [LayerForm(CPU, dtype, 3, 8, 8), LayerForm(CPU, dtype, 2, 4, 16)]
    layout = layout_for(forms, ROWS)
    check_layout(layout, pool_bytes_for(layout))
    planes = StagePlanes(forms, ROWS, torch.zeros(pool_bytes_for(layout), dtype=torch.uint8))
    written = [(_noise(f, 7, f.key_dim, 2 * n), _noise(f, 7, f.value_dim, 2 * n + 1)) for n, f in enumerate(forms)]
    planes.write(20, written)
    for (keys, values), (read_keys, read_values) in zip(written, planes.read(20, 7), strict=True):
        assert (_bytes(read_keys), _bytes(read_values)) == (_bytes(keys), _bytes(values))
        assert read_keys.shape == keys.shape
        assert read_values.shape == values.shape
        assert read_keys.is_contiguous()


def test_a_row_holds_one_token_of_all_heads() -> None:
    """The drawing in the module: token after token, head after head inside."""
    form = LayerForm(CPU, torch.bfloat16, 2, 4, 4)
    layout = layout_for([form], ROWS)
    pool = torch.zeros(pool_bytes_for(layout), dtype=torch.uint8)
    keys, values = _noise(form, 3, 4, 1), _noise(form, 3, 4, 2)
    StagePlanes([form], ROWS, pool).write(5, [(keys, values)])
    for plane, tensor in zip(layout.planes, (keys, values), strict=True):
        for token in range(3):
            start = plane.offset_bytes + (5 + token) * plane.row_stride_bytes
            expected = b"".join(_bytes(tensor[0, head, token]) for head in range(2))
            assert pool[start : start + plane.row_bytes].numpy().tobytes() == expected


def test_only_the_named_rows_are_written() -> None:
    form = LayerForm(CPU, torch.float32, 2, 4, 4)
    layout = layout_for([form], ROWS)
    pool = torch.full((pool_bytes_for(layout),), 0xEE, dtype=torch.uint8)
    StagePlanes([form], ROWS, pool).write(8, [(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4))])
    touched = {
        plane.offset_bytes + row * plane.row_stride_bytes + byte
        for plane in layout.planes
        for row in range(8, 12)
        for byte in range(plane.row_bytes)
    }
    assert {int(place) for place in (pool != 0xEE).nonzero()} == touched


def test_what_was_read_is_no_view_of_the_pool() -> None:
    form = LayerForm(CPU, torch.bfloat16, 2, 4, 4)
    pool = torch.zeros(pool_bytes_for(layout_for([form], ROWS)), dtype=torch.uint8)
    planes = StagePlanes([form], ROWS, pool)
    keys = _noise(form, 3, 4, 1)
    planes.write(0, [(keys, keys)])
    ((read, _),) = planes.read(0, 3)
    pool.fill_(0xA5)
    assert _bytes(read) == _bytes(keys)


def test_a_signed_pool_differs_from_every_other() -> None:
    form = LayerForm(CPU, torch.bfloat16, 2, 8, 8)
    layout = layout_for([form], ROWS)
    pools = [torch.zeros(pool_bytes_for(layout), dtype=torch.uint8) for _ in range(2)]
    state = torch.get_rng_state()
    for pool in pools:
        StagePlanes([form], ROWS, pool).sign()
    assert torch.equal(torch.get_rng_state(), state)  # the engine's sampling must not change
    for plane in layout.planes:
        for row in (0, ROWS - 1):
            start = plane.offset_bytes + row * plane.row_stride_bytes
            first, second = (pool[start : start + plane.row_bytes].numpy().tobytes() for pool in pools)
            assert first != second
            assert any(first)


def test_planes_are_aligned_and_apart() -> None:
    forms = [LayerForm(CPU, torch.float32, 1, 3, 5)] * 3
    layout = layout_for(forms, 7, chunk_tokens=128)
    check_layout(layout, pool_bytes_for(layout))
    assert [plane.row_bytes for plane in layout.planes] == [12, 20] * 3
    assert all(plane.offset_bytes % 256 == 0 for plane in layout.planes)
    assert pool_bytes_for(layout) % 256 == 0
    assert layout.chunk_tokens == 128
