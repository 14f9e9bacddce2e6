"""The rows of an operation by space: groups whose rows are the same memory are looked at together (see
`StageLayout.spaces`).
"""

from typing import TypeAlias

from shm.layout import StageLayout
from shm.rows import DistinctRows, RowRuns, overlap

SpaceRows: TypeAlias = tuple[DistinctRows, ...]


def distinct_rows(layout: StageLayout, runs: tuple[RowRuns, ...]) -> SpaceRows:
    """The rows of every space, out of the runs of every group.

    Raises:
        ValueError: a row occurs twice.
    """
    return tuple(
        DistinctRows(runs[space[0]] if len(space) == 1 else tuple(run for group in space for run in runs[group]))
        for space in layout.spaces
    )


def shared_row(layout: StageLayout, a: SpaceRows, b: SpaceRows) -> str:
    """Names a row or slot that two operations on one stage have in common; empty: none."""
    for space, mine, theirs in zip(layout.spaces, a, b, strict=True):
        row = overlap(mine.ascending, theirs.ascending)
        if row is None:
            continue
        if space[0] >= len(layout.groups):
            return f"the state of slot {row}"
        return f"row {row}" if len(layout.groups) == 1 else f"row {row} of group {space[0]}"
    return ""
