"""`check_layout` against a model that writes down the owner of every byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.layout import LayoutError, Plane, StageLayout, check_layout
from tests.support.layouts import stage_layout

POOL_BYTES = 160


def owners(layout: StageLayout) -> tuple[dict[int, tuple[str, int]], bool]:
    """Owner of each byte that the layout names, and whether a byte has two."""
    owned: dict[int, tuple[str, int]] = {}
    runs = [
        (plane.offset_bytes + row * plane.row_stride_bytes, plane.row_bytes, (f"plane {number}", row))
        for number, plane in enumerate(layout.planes)
        for row in range(plane.rows)
    ]
    if layout.state is not None:
        state = layout.state
        runs += [
            (state.offset_bytes + slot * state.slot_stride_bytes, state.slot_bytes, ("state", slot))
            for slot in range(state.slots)
        ]
    twice = False
    for start, length, owner in runs:
        for byte in range(start, start + length):
            twice = twice or byte in owned
            owned[byte] = owner
    return owned, twice


SMALL = st.integers(-1, 12)
PLANES = st.builds(
    Plane, st.integers(-1, 120), SMALL, st.integers(-1, 24), st.integers(-1, 6), st.integers(0, 2), SMALL
)
STATES = st.none() | st.builds(StatePlane, st.integers(-1, 120), SMALL, st.integers(0, 16), st.integers(0, 4))
ANY = st.builds(StageLayout, st.lists(PLANES, max_size=4).map(tuple), STATES, st.integers(0, 4))


# Planes so small and close that many interleave, many collide and some only just miss each other.
CLOSE = st.builds(
    StageLayout,
    st.lists(
        st.builds(Plane, st.integers(0, 24), st.integers(1, 2), st.sampled_from([4, 6]), st.integers(1, 4)),
        min_size=2,
        max_size=4,
    ).map(tuple),
    st.none() | st.builds(StatePlane, st.integers(0, 40), st.integers(1, 2), st.just(3), st.integers(1, 3)),
    st.just(4),
)


@settings(max_examples=1500)
@given(ANY | CLOSE)
def test_what_is_accepted_owns_each_byte_once_and_lies_in_the_pool(layout: StageLayout) -> None:
    try:
        check_layout(layout, POOL_BYTES)
    except LayoutError:
        return
    owned, twice = owners(layout)
    assert not twice
    assert min(owned) >= 0
    assert max(owned) == layout.end_bytes - 1 < POOL_BYTES


@st.composite
def sound(draw: st.DrawFn) -> StageLayout:
    """Groups of planes, interleaved inside a group (one stride), one group after the other, then perhaps a state."""
    planes: list[Plane] = []
    at = draw(st.integers(0, 8))
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 4))
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        gaps = [draw(st.integers(0, 2)) for _ in sizes]
        stride = sum(sizes) + sum(gaps)
        inside = 0
        for size, gap in zip(sizes, gaps, strict=True):
            planes.append(Plane(at + inside, size, stride, rows))
            inside += size + gap
        at += rows * stride + draw(st.integers(0, 3))
    state = Plane(at, 3, 4, 2) if draw(st.booleans()) else None
    return stage_layout(tuple(draw(st.permutations(planes))), state, 4)


@given(sound())
def test_planes_that_lie_apart_or_interleave_are_accepted(layout: StageLayout) -> None:
    assert not owners(layout)[1]
    check_layout(layout, layout.end_bytes)
    with pytest.raises(LayoutError, match="the pool has"):
        check_layout(layout, layout.end_bytes - 1)


GOOD = Plane(0, 8, 8, 10)


@pytest.mark.parametrize(
    ("planes", "state", "chunk_tokens", "message"),
    [
        ((), None, 4, "at least one plane"),
        ((Plane(-1, 8, 8, 10),), None, 4, "plane 0"),
        ((Plane(0, 0, 8, 10),), None, 4, "plane 0"),
        ((GOOD, Plane(80, 8, 8, 0)), None, 4, "plane 1"),
        ((Plane(0, 8, 7, 10),), None, 4, "rows overlap"),
        ((Plane(0, 8, 8, 21),), None, 4, "ends at byte 168"),
        ((Plane(0, 8, 8, 10, 2, 3),), None, 4, "token_stride_bytes 3"),
        ((GOOD, Plane(80, 8, 8, 10, 2)), None, 4, "tokens_per_row 2 differs"),
        ((Plane(0, 8, 8, 10, 3),), None, 4, "chunk_tokens 4"),
        ((GOOD,), None, 0, "chunk_tokens 0"),
        ((GOOD, GOOD), None, 4, "shares bytes"),
        ((GOOD, Plane(79, 1, 1, 1)), None, 4, "shares bytes"),
        ((GOOD,), Plane(79, 1, 1, 1), 4, "shares bytes with the state"),
        ((GOOD,), Plane(80, 8, 4, 2), 4, "slot_stride_bytes 4"),
        ((GOOD,), Plane(80, 8, 8, 11), 4, "state: ends at byte 168"),
        ((GOOD,), Plane(80, 0, 8, 2), 4, "state: offset"),
    ],
)
def test_what_is_refused_is_named(
    planes: tuple[Plane, ...], state: StatePlane | None, chunk_tokens: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(stage_layout(planes, state, chunk_tokens), POOL_BYTES)


@given(st.integers(0, 70), st.sampled_from([1, 2, 4]), st.booleans())
def test_chunks_cover_all_tokens_in_order(tokens: int, tokens_per_row: int, with_state: bool) -> None:
    layout = stage_layout(
        (Plane(0, 8, 8, 100, tokens_per_row, 8 // tokens_per_row), Plane(800, 4, 4, 100, tokens_per_row)),
        Plane(2000, 5, 5, 1),
        8,
    )
    spans = layout.chunks(tokens, with_state=with_state)
    rows = [span for span in spans if not span.is_state]
    assert [span.first_token for span in rows] == list(range(0, tokens, 8))
    assert sum(span.token_count for span in rows) == tokens
    next_row = 0
    for span in rows:
        assert span.first_row == next_row
        next_row += span.row_count
        assert span.length_bytes == span.row_count * 12
    assert next_row == layout.rows_for(tokens)
    assert [span.length_bytes for span in spans if span.is_state] == ([5] if with_state else [])


@pytest.mark.parametrize(("stride", "tokens", "kept"), [(0, 7, 4), (0, 8, 8), (0, 3, 0), (2, 7, 7)])
def test_capturable_tokens(stride: int, tokens: int, kept: int) -> None:
    layout = stage_layout((Plane(0, 8, 8, 10, 4, stride),), None, 4)
    assert layout.capturable_tokens(tokens) == kept
