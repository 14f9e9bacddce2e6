"""`check_layout` against a model that writes down who owns every byte, and chunks against the tokens they cover."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shm.layout import (
    LayoutError,
    Plane,
    RowGroup,
    StageLayout,
    StateGroup,
    check_layout,
    layer_groups,
    one_group,
    shared_planes,
)
from tests.support.layouts import stage_layout

POOL_BYTES = 160

Owner = tuple[int, int, int]
"""Group, plane in the group, row."""


def owners(layout: StageLayout) -> dict[int, set[Owner]]:
    """Who owns each byte that the layout names."""
    owned: dict[int, set[Owner]] = {}
    for number, group in enumerate(layout.all_groups):
        for plane_number, plane in enumerate(group.planes):
            for row in range(plane.rows):
                start = plane.offset_bytes + row * plane.row_stride_bytes
                for byte in range(start, start + plane.row_bytes):
                    owned.setdefault(byte, set()).add((number, plane_number, row))
    return owned


def spaces(layout: StageLayout) -> set[frozenset[int]]:
    """Groups that share bytes, in steps, together."""
    found = [frozenset([number]) for number in range(len(layout.all_groups))]
    for names in owners(layout).values():
        together = {group for group, _, _ in names}
        joined = frozenset().union(*(space for space in found if space & together))
        found = [space for space in found if not space & together] + [joined]
    return set(found)


SMALL = st.integers(-1, 12)
PLANES = st.builds(
    Plane, st.integers(-1, 120), SMALL, st.integers(-1, 24), st.integers(-1, 6), st.integers(0, 2), SMALL
)
STATES = st.builds(Plane, st.integers(-1, 120), SMALL, st.integers(0, 16), st.integers(0, 4))


def layouts(planes: st.SearchStrategy[Plane], states: st.SearchStrategy[Plane]) -> st.SearchStrategy[StageLayout]:
    return st.builds(
        StageLayout,
        st.lists(
            st.builds(RowGroup, st.lists(planes, max_size=3).map(tuple), st.integers(-1, 3)), min_size=0, max_size=3
        ).map(tuple),
        st.lists(st.builds(StateGroup, st.lists(states, max_size=2).map(tuple)), max_size=2).map(tuple),
        st.integers(0, 4),
    )


ANY = layouts(PLANES, STATES)


# Planes so small and close that many interleave, many collide and some only just miss each other.
CHUNKS = [  # group of 1024 rows, bytes of its largest chunk
    (RowGroup((Plane(0, 2**20, 2**20, 1024),)), 256 * 2**20),
    (RowGroup((Plane(0, 2**22, 2**22, 1024),)), 2**30),
    (RowGroup((Plane(0, 2**22, 2**22, 1024), Plane(2**32, 1, 1, 1024))), 2**30 + 256),
    (RowGroup((Plane(0, 2**26, 2**26, 1024, 16),)), 2**30),
    (RowGroup((Plane(0, 2**26 + 1, 2**27, 1024, 16),)), 2**30 + 16),
    (RowGroup((Plane(0, 2**30, 2**30, 1024, 512),)), 2**30),
    (RowGroup((Plane(0, 2**30 + 1, 2**31, 1024, 512),)), 2**30 + 1),
    (RowGroup((Plane(0, 2**23, 2**23, 128),)), 2**30),  # no list of rows names one of them twice
    (RowGroup((Plane(0, 2**23, 2**23, 129),)), 129 * 2**23),
    (StateGroup((Plane(0, 2**30, 2**30, 4),)), 2**30),
    (StateGroup((Plane(0, 2**30, 2**30, 4), Plane(2**32, 1, 1, 4))), 2**30 + 1),
]


@pytest.mark.parametrize(("group", "largest"), CHUNKS)
def test_a_chunk_has_at_most_a_gibibyte(group: RowGroup | StateGroup, largest: int) -> None:
    """A worker keeps a whole chunk in its own memory, and the pool may be sparse."""
    row = RowGroup((Plane(2**41, 8, 8, 4),))
    layout = StageLayout((row, group), (), 256) if isinstance(group, RowGroup) else StageLayout((row,), (group,), 256)
    assert layout.chunk_rows(group) * group.row_bytes == largest
    if largest <= 2**30:
        check_layout(layout, 2**42)
    else:
        with pytest.raises(LayoutError, match=f"group 1: a chunk has .* it may have {2**30} bytes"):
            check_layout(layout, 2**42)


@st.composite
def close(draw: st.DrawFn) -> StageLayout:
    stride = draw(st.sampled_from([6, 8, 12]))
    plane = st.builds(Plane, st.integers(0, 14), st.integers(1, 5), st.just(stride), st.integers(1, 4))
    groups = draw(st.lists(st.lists(plane, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    states = draw(st.lists(st.lists(plane, min_size=1, max_size=2).map(tuple), max_size=1))
    return StageLayout(tuple(map(RowGroup, groups)), tuple(map(StateGroup, states)), 4)


# Between two planes of one group that share a byte begins one of another group that reaches farther than the first.
HIDDEN = StageLayout((RowGroup((Plane(0, 4, 12, 2), Plane(3, 2, 12, 2))), RowGroup((Plane(2, 8, 12, 2),))), (), 4)


@settings(max_examples=800)
@given(ANY | close())
@example(HIDDEN)
def test_what_is_accepted_owns_its_bytes_once_or_shares_them_row_by_row(layout: StageLayout) -> None:
    try:
        check_layout(layout, POOL_BYTES)
    except LayoutError:
        return
    owned = owners(layout)
    for names in owned.values():
        assert len({group for group, _, _ in names}) == len(names)
        assert len({row for _, _, row in names}) == 1
    assert min(owned) >= 0
    assert max(owned) == layout.end_bytes - 1 < POOL_BYTES
    assert sorted(number for space in layout.spaces for number in space) == list(range(len(layout.all_groups)))
    assert set(map(frozenset, layout.spaces)) == spaces(layout)


def test_groups_that_share_bytes_are_paired_once_a_plane() -> None:
    """Not once for every group that a plane shares bytes with: the daemon's loop waits for this."""
    wide = tuple(RowGroup((Plane(0, 500, 500, 1),)) for _ in range(63))
    layout = StageLayout((*wide, RowGroup(tuple(Plane(byte, 1, 500, 1) for byte in range(500)))))
    check_layout(layout, 500)
    assert layout.spaces == (tuple(range(64)),)
    assert sum(1 for _ in shared_planes(layout.all_groups)) <= len(layout.planes)


@st.composite
def sound(draw: st.DrawFn) -> StageLayout:
    """Sets of planes, interleaved inside a set (one stride), one set after the other; each set a group, or all one."""
    sets: list[list[Plane]] = []
    at = draw(st.integers(0, 8))
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 4))
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        gaps = [draw(st.integers(0, 2)) for _ in sizes]
        stride = sum(sizes) + sum(gaps)
        inside = 0
        sets.append([])
        for size, gap in zip(sizes, gaps, strict=True):
            sets[-1].append(Plane(at + inside, size, stride, rows))
            inside += size + gap
        at += rows * stride + draw(st.integers(0, 3))
    state = (StateGroup((Plane(at, 3, 4, 2),)),) if draw(st.booleans()) else ()
    if draw(st.booleans()):
        sets = [[plane for planes in sets for plane in planes]]
    groups = tuple(RowGroup(tuple(draw(st.permutations(planes)))) for planes in sets)
    return StageLayout(tuple(draw(st.permutations(groups))), state, 4)


@given(sound())
def test_planes_that_lie_apart_or_interleave_are_accepted(layout: StageLayout) -> None:
    check_layout(layout, layout.end_bytes)
    assert all(len(space) == 1 for space in layout.spaces)
    with pytest.raises(LayoutError, match="the pool has"):
        check_layout(layout, layout.end_bytes - 1)


@given(sound(), st.data())
def test_groups_may_share_the_same_rows(layout: StageLayout, data: st.DataObject) -> None:
    """As engines do that give the blocks of one tensor to layers of several kinds."""
    group = data.draw(st.sampled_from(layout.groups))
    lowest = min(group.planes, key=lambda plane: plane.offset_bytes)
    room = lowest.row_stride_bytes
    begin = data.draw(st.integers(0, lowest.row_bytes - 1))
    size = data.draw(st.integers(1, room - begin))
    twin = RowGroup((Plane(lowest.offset_bytes + begin, size, room, lowest.rows),))
    shared = StageLayout((*layout.groups, twin), (), 4)
    check_layout(shared, shared.end_bytes)
    assert set(map(frozenset, shared.spaces)) == spaces(shared)


GOOD = Plane(0, 8, 8, 10)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (StageLayout(()), "at least one group"),
        (StageLayout((RowGroup(()),)), "at least one plane"),
        (StageLayout((RowGroup((GOOD,)),), (StateGroup(()),)), "at least one plane"),
        (stage_layout((Plane(-1, 8, 8, 10),)), "group 0, plane 0: offset"),
        (stage_layout((Plane(0, 0, 8, 10),)), "group 0, plane 0: offset"),
        (stage_layout((GOOD, Plane(80, 8, 8, 0))), "group 0, plane 1: offset"),
        (stage_layout((Plane(0, 8, 7, 10),)), "rows overlap"),
        (stage_layout((Plane(0, 8, 8, 21),)), "ends at byte 168"),
        (stage_layout((Plane(0, 8, 2**62, 1),)), "row_bytes must be below 2147483648, row_stride_bytes and"),
        (stage_layout((Plane(0, 2**31, 2**31, 1),)), "row_bytes must be below 2147483648"),
        (stage_layout((Plane(0, 8, 8, 1, 2**62),)), "tokens_per_row below 4611686018427387904"),
        (stage_layout((Plane(0, 8, 8, 10, 2, 3),)), "token_stride_bytes 3"),
        (stage_layout((GOOD, Plane(80, 8, 8, 10, 2))), "tokens_per_row 2 differs from plane 0's 1"),
        (stage_layout((GOOD,), None, 0), "chunk_tokens must be above 0, got 0"),
        (stage_layout((GOOD, GOOD)), "group 0: plane 1 shares bytes with plane 0"),
        (HIDDEN, "group 0: plane 1 shares bytes with plane 0"),
        (stage_layout((GOOD, Plane(79, 1, 1, 1))), "plane 1 of group 0 shares bytes with plane 0 of group 0"),
        (stage_layout((GOOD,), Plane(79, 1, 1, 1)), "plane 0 of group 1 shares bytes with plane 0 of group 0"),
        (stage_layout((GOOD,), Plane(4, 8, 8, 2)), "row r of each must lie within the same stride"),
        (stage_layout((GOOD,), Plane(80, 8, 4, 2)), "group 1, plane 0: row_stride_bytes 4"),
        (stage_layout((GOOD,), Plane(80, 8, 8, 11)), "group 1, plane 0: ends at byte 168"),
        (stage_layout((GOOD,), Plane(80, 0, 8, 2)), "group 1, plane 0: offset"),
        (stage_layout((GOOD,), Plane(80, 8, 8, 2, 2, 4)), "group 1: a state has no tokens, got tokens_per_row 2"),
        (StageLayout((RowGroup((GOOD,), -1),)), "group 0: window_tokens must be >= 0, got -1"),
    ],
)
def test_what_is_refused_is_named(layout: StageLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(layout, POOL_BYTES)


@st.composite
def token_layouts(draw: st.DrawFn) -> StageLayout:
    """Groups of any rows and windows; where they lie does not matter here."""
    groups: list[RowGroup] = []
    for _ in range(draw(st.integers(0, 3))):
        per_row = draw(st.integers(1, 16))
        planes = tuple(Plane(0, size * per_row, 4096, 9, per_row, size) for size in draw(SIZES))
        groups.append(RowGroup(planes, draw(st.sampled_from([0, 0, 1, 5, 16, 33]))))
    states = tuple(
        StateGroup(tuple(Plane(0, size, 4096, 9) for size in draw(SIZES)))
        for _ in range(draw(st.integers(0 if groups else 1, 2)))
    )
    return StageLayout(tuple(groups), states, draw(st.integers(1, 40)))


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def held_rows(group: RowGroup, tokens: int) -> list[int]:
    """Rows of the tokens that a group keeps of a conversation, counted from its beginning."""
    kept = range(max(0, tokens - group.window_tokens) if group.window_tokens else 0, tokens)
    return sorted({token // group.tokens_per_row for token in kept})


@settings(max_examples=250)
@given(token_layouts(), st.integers(0, 90), st.sets(st.integers(1, 90), max_size=3))
def test_chunks_cover_every_token_that_is_kept_once_and_in_order(
    layout: StageLayout, tokens: int, points: set[int]
) -> None:
    positions = sorted(points)
    spans = layout.chunks(tokens, positions)
    assert [span.group for span in spans if not span.is_state] == sorted(s.group for s in spans if not s.is_state)
    for number, group in enumerate(layout.groups):
        rows = held_rows(group, tokens)
        mine = [span for span in spans if span.group == number]
        first = rows[0] * group.tokens_per_row if rows else 0
        covered = [t for span in mine for t in range(span.first_token, span.first_token + span.token_count)]
        assert covered == list(range(first, tokens))
        taken = [row for span in mine for row in range(span.first_row, span.first_row + span.row_count)]
        assert taken == list(range(len(rows)))
        step = max(1, layout.chunk_tokens // group.tokens_per_row) * group.tokens_per_row
        ends = [span.first_token + span.token_count for span in mine]
        assert ends == ([end for end in range(step, tokens, step) if end > first] + [tokens] if rows else [])
        for span in mine:
            assert not span.is_state
            assert (span.first_token - first) // group.tokens_per_row == span.first_row
            assert span.length_bytes == span.row_count * sum(plane.row_bytes for plane in group.planes)
        assert rows == [] or group.first_token(tokens) == first
        assert group.rows_for(tokens) == len(rows)
    states = [span for span in spans if span.is_state]
    assert [(s.first_token, s.group, s.first_row, s.row_count, s.length_bytes) for s in states] == [
        (position, number, checkpoint, 1, sum(plane.row_bytes for plane in group.planes))
        for checkpoint, position in enumerate(positions)
        for number, group in enumerate(layout.all_groups)
        if isinstance(group, StateGroup)
    ]
    assert spans == sorted(spans, key=lambda span: span.is_state)
    assert layout.chunk_count(tokens, len(positions)) == len(spans)
    rows_for = [len(held_rows(group, tokens)) for group in layout.groups]
    assert layout.rows_for(tokens, len(positions)) == (*rows_for, *(len(positions) for _ in layout.states))


@settings(max_examples=250)
@given(token_layouts(), st.integers(1, 90), st.integers(0, 20))
def test_a_prefix_is_held_where_no_row_that_it_needs_is_gone(layout: StageLayout, tokens: int, more: int) -> None:
    needed = [set(held_rows(group, tokens)) for group in layout.groups]
    held = [set(held_rows(group, tokens + more)) for group in layout.groups]
    assert layout.holds_prefix(tokens, tokens + more) == all(a <= b for a, b in zip(needed, held, strict=True))


@given(token_layouts(), st.integers(1, 90), st.integers(1, 90))
def test_a_longer_conversation_has_the_full_chunks_of_its_beginning(
    layout: StageLayout, tokens: int, more: int
) -> None:
    for number, group in enumerate(layout.groups):
        if not group.window_tokens:
            short, long = ([s for s in layout.chunks(n) if s.group == number] for n in (tokens, tokens + more))
            assert long[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize(("stride", "tokens", "kept"), [(0, 7, 4), (0, 8, 8), (0, 3, 0), (2, 7, 7)])
def test_capturable_tokens(stride: int, tokens: int, kept: int) -> None:
    layout = stage_layout((Plane(0, 8, 8, 10, 4, stride),), None, 4)
    assert layout.capturable_tokens(tokens) == kept


def test_groups_that_cannot_locate_tokens_end_their_blocks_together() -> None:
    groups = tuple(RowGroup((Plane(0, 24, 24, 9, per_row, stride),)) for per_row, stride in ((4, 0), (6, 0), (8, 3)))
    assert StageLayout(groups).token_unit == 12
    assert StageLayout(groups[2:]).token_unit == 1


def test_layers_are_split_evenly_and_whole() -> None:
    planes = [Plane(n * 4096, 64, 64, 16) for n in range(20)]
    assert layer_groups(planes, 1) == one_group(planes)
    assert [len(group.planes) for group in layer_groups(planes, 4, 2)] == [4, 6, 4, 6]
    assert [plane for group in layer_groups(planes, 3, 4) for plane in group.planes] == planes
    assert [len(group.planes) for group in layer_groups(planes, 99, 4)] == [4] * 5
    for count, per_layer in ((0, 1), (2, 3), (2, 0), (-1, 2)):
        with pytest.raises(ValueError, match="whole layers"):
            layer_groups(planes, count, per_layer)
    with pytest.raises(ValueError, match="0 planes"):
        layer_groups([], 1)
