"""Layouts for tests, and what an operation on them names."""

from collections.abc import Iterable, Sequence

from shm.layout import Plane, RowGroup, StageLayout, StateGroup
from shm.rows import pack_numbers, pack_rows, runs_of


def stage_layout(planes: Iterable[Plane], state: Plane | None = None, chunk_tokens: int = 256) -> StageLayout:
    """One row group, and one state of one plane if given."""
    states = (StateGroup((state,)),) if state is not None else ()
    return StageLayout((RowGroup(tuple(planes)),), states, chunk_tokens)


def packed_rows(layout: StageLayout, rows: Sequence[int], state_slot: int = -1) -> tuple[bytes, ...]:
    """Rows of the only row group, and (not -1) the slot of every state, as they travel."""
    states = pack_rows([(state_slot, 1)]) if state_slot >= 0 else b""
    return (pack_rows(runs_of(rows)), *(states for _ in layout.states))


def positions(tokens: int, state_slot: int = -1) -> tuple[int, ...]:
    """The checkpoint at the end, if there is a state."""
    return (tokens,) if state_slot >= 0 else ()


def packed_positions(tokens: int, state_slot: int = -1) -> bytes:
    """`positions` as they travel."""
    return pack_numbers(positions(tokens, state_slot))


def state_bytes(layout: StageLayout, state_slot: int) -> set[int]:
    """Offsets in the pool of a slot's states."""
    found: set[int] = set()
    for group in layout.states:
        for plane in group.planes:
            start = plane.offset_bytes + state_slot * plane.row_stride_bytes
            found.update(range(start, start + plane.row_bytes))
    return found
