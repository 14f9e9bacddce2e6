"""The rows of an operation by space: groups whose rows are the same memory are looked at together (see
`StageLayout.spaces`).
"""

from typing import TypeAlias

from shm.layout import StageLayout
from shm.rows import DistinctRows, RowList

SpaceRows: TypeAlias = tuple[DistinctRows, ...]


def distinct_rows(layout: StageLayout, lists: tuple[RowList, ...]) -> SpaceRows:
    """The rows of every space, out of the lists of every group.

    Raises:
        ValueError: a row occurs twice.
    """
    return tuple(DistinctRows(RowList.join([lists[group] for group in space])) for space in layout.spaces)


def shared_row(layout: StageLayout, a: SpaceRows, b: SpaceRows) -> str:
    """Names a row or slot that two operations on one stage have in common; empty: none."""
    for space, mine, theirs in zip(layout.spaces, a, b, strict=True):
        row = mine.shared(theirs)
        if row is None:
            continue
        if space[0] >= len(layout.groups):
            return f"the state of slot {row}"
        return f"row {row}" if len(layout.groups) == 1 else f"row {row} of group {space[0]}"
    return ""
