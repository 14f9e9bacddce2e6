"""Tensors of a cache and the rows of a pool hold the same bytes."""

from collections.abc import Sequence

import pytest
import torch

from shm.layout import StageLayout, check_layout
from stratad.engines.kv_planes import (
    LayerContent,
    LayerForm,
    StagePlanes,
    TensorForm,
    as_integers,
    layout_for,
    pool_bytes_for,
    state_bytes,
    token_bytes,
)

CPU = torch.device("cpu")
SLOTS, MAX_TOKENS = 3, 20
KEYS = TensorForm("keys", CPU, torch.bfloat16, (3, 8))
VALUES = TensorForm("values", CPU, torch.bfloat16, (3, 4))
STATE = TensorForm("conv_states 0", CPU, torch.float32, (1, 5, 2))
FORMS = [
    LayerForm("full", (KEYS, VALUES)),
    LayerForm("window", (KEYS, VALUES), window_tokens=6),
    LayerForm("keeps nothing"),
    LayerForm("linear", (), (STATE,)),
    LayerForm("both", (KEYS,), (STATE,)),
]


def _stage(
    forms: Sequence[LayerForm], fill: int = 0, state_slots: int = SLOTS
) -> tuple[StagePlanes, StageLayout, torch.Tensor]:
    layout = layout_for(forms, slots=SLOTS, max_tokens=MAX_TOKENS, state_slots=state_slots)
    check_layout(layout, pool_bytes_for(layout))
    pool = torch.full((pool_bytes_for(layout),), fill, dtype=torch.uint8)
    return StagePlanes(forms, layout, pool, MAX_TOKENS), layout, pool


def _noise(form: TensorForm, tokens: int | None, seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads too."""
    shape = form.shape if tokens is None else (tokens, *form.shape)
    raw_shape = (*shape[:-1], shape[-1] * form.dtype.itemsize)
    raw = torch.randint(0, 256, raw_shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return as_integers(raw.view(form.dtype))


def _contents(forms: Sequence[LayerForm], tokens: int, seed: int = 1) -> list[LayerContent]:
    made: list[LayerContent] = []
    for form in forms:
        kept = min(tokens, form.window_tokens) if form.window_tokens else tokens
        seed += 10
        parts = [_noise(part, kept, seed + n) for n, part in enumerate(form.tokens)]
        made.append(LayerContent(parts, [_noise(part, None, seed + 5) for part in form.states]))
    return made


def _flat(contents: Sequence[LayerContent]) -> list[bytes]:
    return [_bytes(part) for layer in contents for part in (*layer.tokens, *layer.states)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, MAX_TOKENS])
def test_what_was_written_is_read_bit_for_bit(tokens: int) -> None:
    stage, _, _ = _stage(FORMS)
    written = [_contents(FORMS, tokens, seed) for seed in (100, 200, 300)]
    for slot, contents in enumerate(written):
        stage.write(slot, tokens, contents)
    for slot, contents in enumerate(written):
        read = stage.read(slot, tokens)
        assert _flat(read) == _flat(contents)
        assert [part.shape for layer in read for part in layer.tokens] == [
            part.shape for layer in contents for part in layer.tokens
        ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64])
def test_elements_of_every_size_are_copied_as_they_are(dtype: torch.dtype) -> None:
    forms = [LayerForm("full", (TensorForm("keys", CPU, dtype, (2, 4)),))]
    stage, _, _ = _stage(forms)
    contents = _contents(forms, 7)
    stage.write(1, 7, contents)
    assert _flat(stage.read(1, 7)) == _flat(contents)


def test_a_row_holds_one_token_of_all_heads() -> None:
    """The drawing in the module: token after token, head after head inside."""
    forms = [FORMS[0]]
    stage, layout, pool = _stage(forms)
    ((keys, values),) = [layer.tokens for layer in _contents(forms, 3)]
    stage.write(2, 3, [LayerContent((keys, values))])
    for plane, tensor in zip(layout.groups[0].planes, (keys, values), strict=True):
        for token in range(3):
            start = plane.offset_bytes + (2 * MAX_TOKENS + token) * plane.row_stride_bytes
            expected = b"".join(_bytes(tensor[token, head]) for head in range(3))
            assert pool[start : start + plane.row_bytes].numpy().tobytes() == expected


def test_a_window_has_rows_of_its_own() -> None:
    stage, layout, _ = _stage(FORMS)
    assert [group.window_tokens for group in layout.groups] == [0, 6]
    assert [len(group.planes) for group in layout.groups] == [3, 2]
    assert [group.rows for group in layout.groups] == [SLOTS * MAX_TOKENS, SLOTS * 6]
    assert stage.rows(2, 4) == [(40, 4), (12, 4)]
    assert stage.rows(2, 19) == [(40, 19), (12, 6)]
    assert stage.rows(1, None) == [(20, 20), (6, 6)]
    assert len(layout.states) == 1
    assert [plane.row_bytes for plane in layout.states[0].planes] == [40, 40]


def test_a_window_longer_than_the_slot_takes_no_more_than_the_slot() -> None:
    forms = [LayerForm("window", (KEYS,), window_tokens=100)]
    stage, layout, _ = _stage(forms)
    assert layout.groups[0].rows == SLOTS * MAX_TOKENS
    assert stage.rows(1, None) == [(MAX_TOKENS, MAX_TOKENS)]


def test_a_stage_may_hold_states_only() -> None:
    forms = [FORMS[3]]
    stage, layout, _ = _stage(forms)
    assert layout.groups == ()
    assert stage.rows(0, 9) == []
    contents = _contents(forms, 9)
    stage.write(1, 9, contents)
    assert _flat(stage.read(1, 9)) == _flat(contents)


def test_a_kept_state_lies_in_a_slot_of_its_own() -> None:
    stage, _, _ = _stage(FORMS, state_slots=2 * SLOTS)
    first, second = _contents(FORMS, 4, 100), _contents(FORMS, 4, 200)
    stage.write(1, 4, first)
    stage.write_states(4, second)
    assert _flat(stage.read(1, 4)) == _flat(first)


def test_only_the_named_rows_are_written() -> None:
    stage, layout, pool = _stage(FORMS, fill=0xEE)
    zeros = [
        LayerContent([torch.zeros_like(part) for part in layer.tokens], [torch.zeros_like(s) for s in layer.states])
        for layer in _contents(FORMS, 8)
    ]
    stage.write(1, 8, zeros)
    touched: set[int] = set()
    for group, (first, count) in zip(layout.groups, stage.rows(1, 8), strict=True):
        for plane in group.planes:
            start = plane.offset_bytes + first * plane.row_bytes
            touched.update(range(start, start + count * plane.row_bytes))
    for plane in layout.states[0].planes:
        touched.update(range(plane.offset_bytes + plane.row_bytes, plane.offset_bytes + 2 * plane.row_bytes))
    assert {int(place) for place in (pool != 0xEE).nonzero()} == touched


def test_rows_that_a_tensor_does_not_fill_are_zero() -> None:
    """What another conversation left there would go into the image."""
    forms = [LayerForm("quantised", (KEYS,))]
    stage, _, _ = _stage(forms, fill=0xEE)
    short = _noise(KEYS, 3, 1)
    stage.write(0, 5, [LayerContent([short])])
    ((read,),) = [layer.tokens for layer in stage.read(0, 5)]
    assert _bytes(read[:3]) == _bytes(short)
    assert not read[3:].any()


def test_a_signed_pool_differs_from_every_other() -> None:
    made = [_stage(FORMS) for _ in range(2)]
    state = torch.get_rng_state()
    for stage, _, _ in made:
        stage.sign()
    assert torch.equal(torch.get_rng_state(), state)  # the engine's sampling must not change
    for plane in made[0][1].planes:
        for row in (0, plane.rows - 1):
            start = plane.offset_bytes + row * plane.row_stride_bytes
            first, second = (pool[start : start + plane.row_bytes].numpy().tobytes() for _, _, pool in made)
            assert first != second
            assert any(first)


def test_planes_are_aligned_and_apart() -> None:
    forms = [
        LayerForm(
            "odd", (TensorForm("keys", CPU, torch.float32, (1, 3)), TensorForm("values", CPU, torch.float32, (1, 5)))
        )
    ] * 3
    layout = layout_for(forms, slots=1, max_tokens=7, state_slots=1, chunk_tokens=128)
    check_layout(layout, pool_bytes_for(layout))
    assert [plane.row_bytes for plane in layout.planes] == [12, 20] * 3
    assert all(plane.offset_bytes % 256 == 0 for plane in layout.planes)
    assert pool_bytes_for(layout) % 256 == 0
    assert layout.chunk_tokens == 128


def test_bytes_of_tokens_and_states_are_those_of_all_layers() -> None:
    assert token_bytes(FORMS) == 2 * (24 + 12) * 2 + 24 * 2
    assert state_bytes(FORMS) == 80
