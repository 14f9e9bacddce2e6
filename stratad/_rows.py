"""The rows that an operation names, stage by stage and group by group: parsed, checked, packed for the wire."""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from shm.layout import StageLayout
from shm.row_spaces import SpaceRows, distinct_rows
from shm.rows import RowRuns, pack_rows, row_count, runs_of
from stratad._arguments import RowsLike, parse_rows
from stratad.errors import UsageError


class GroupRows:
    """Rows of a stage with several row groups: one entry a group, in the order of the layout. Where all groups are
    addressed by the same rows (see `shm.layout.layer_groups`) those may be given once, without this.
    """

    __slots__ = ("rows",)

    def __init__(self, *rows: RowsLike) -> None:
        self.rows: Final = rows


StageRowsLike: TypeAlias = RowsLike | GroupRows
Checkpoints: TypeAlias = Sequence[tuple[int, int]]


class StageRows:
    """The rows of one operation on one stage, each group's `packed` in token order, and by space for comparing."""

    __slots__ = ("packed", "runs", "spaces")

    def __init__(self, layout: StageLayout, runs: tuple[RowRuns, ...]) -> None:
        try:
            self.spaces: Final[SpaceRows] = distinct_rows(layout, runs)
        except ValueError as exc:
            raise UsageError("bad_rows", f"rows of one operation must differ: {exc}") from exc
        self.runs: Final = runs
        packed = {id(group): pack_rows(group) for group in runs}  # groups may have one list of rows
        self.packed: Final = tuple(packed[id(group)] for group in runs)


class RowUse(NamedTuple):
    """What an operation does to rows: `rows` has one entry for all stages, or one a stage."""

    rows: tuple[StageRows, ...]
    writes: bool

    def on(self, stage: int) -> StageRows:
        """The rows of one stage."""
        return self.rows[stage if len(self.rows) > 1 else 0]

    @property
    def packed(self) -> tuple[tuple[bytes, ...], ...]:
        """Its form on the wire."""
        return tuple(entry.packed for entry in self.rows)


class RowsGiven(NamedTuple):
    """Rows as a caller names them: once for all stages, or once a stage."""

    rows: StageRowsLike | None
    rows_by_stage: Sequence[StageRowsLike] | None

    @property
    def entries(self) -> Sequence[StageRowsLike]:
        """One entry for all stages, or one a stage."""
        if self.rows_by_stage is not None:
            return self.rows_by_stage
        return () if self.rows is None else (self.rows,)


def check_checkpoints(layouts: Sequence[StageLayout], checkpoints: Checkpoints, tokens: int) -> tuple[int, ...]:
    """The positions of checkpoints ``(token position, state slot)``.

    Raises:
        UsageError: code ``bad_state``.
    """
    positions = tuple(position for position, _ in checkpoints)
    stateful = any(layout.states for layout in layouts)
    if bool(positions) != stateful:
        wanted = "stages have states: say at which positions (checkpoints)" if stateful else "no stage has states"
        raise UsageError("bad_state", f"{wanted}, got checkpoints {list(checkpoints)[:4]}")
    if positions and (sorted(set(positions)) != list(positions) or positions[0] < 1 or positions[-1] > tokens):
        raise UsageError("bad_state", f"checkpoints must ascend from 1 to {tokens} tokens, got {positions[:8]}")
    return positions


def stage_rows(
    layouts: Sequence[StageLayout], given: RowsGiven, tokens: int, slots: Sequence[int]
) -> tuple[StageRows, ...]:
    """Parsed and checked rows of an operation of `tokens` tokens (-1: as many as the image has, which the daemon
    checks); `slots` are the state slots of its checkpoints.

    Raises:
        UsageError: rows are given twice or not at all, or any stage's rows or slots are wrong.
    """
    if (given.rows is None) == (given.rows_by_stage is None):
        if given.rows is not None or any(layout.groups for layout in layouts):
            raise UsageError("bad_rows", "give either rows (for all stages) or rows_by_stage, not both and not neither")
        given = RowsGiven(GroupRows(), None)
    entries = given.entries
    if given.rows_by_stage is not None and len(entries) != len(layouts):
        raise UsageError("bad_rows", f"rows_by_stage has {len(entries)} entries for {len(layouts)} stages")
    parsed = [_parse_groups(entry) for entry in entries]
    once = len(parsed) == 1
    state_runs = runs_of(slots)
    # Of stages that are one object, as equal ones are in an engine, and are given one entry, one speaks for all.
    if once and all(layout is layouts[0] for layout in layouts):
        layouts = layouts[:1]
    shapes = {(layout.spaces, len(layout.groups)) for layout in layouts}
    made: list[StageRows] = []
    for stage, layout in enumerate(layouts):
        entry = 0 if once else stage
        runs = parsed[entry]
        if len(layout.groups) > 1 and not isinstance(entries[entry], GroupRows) and _are_alike(layout):
            runs *= len(layout.groups)
        if len(runs) != len(layout.groups):
            raise UsageError(
                "bad_rows", f"stage {stage} has {len(layout.groups)} row groups, rows were given for {len(runs)}"
            )
        _check_stage(stage, layout, runs, tokens)
        _check_slots(stage, layout, slots)
        if not (made and once and len(shapes) == 1):
            made.append(StageRows(layout, (*runs, *(state_runs for _ in layout.states))))
    return tuple(made)


def _parse_groups(entry: StageRowsLike) -> tuple[RowRuns, ...]:
    if isinstance(entry, GroupRows):
        return tuple(parse_rows(rows) for rows in entry.rows)
    return (parse_rows(entry),)


def _are_alike(layout: StageLayout) -> bool:
    """Whether one list of rows can be that of every group."""
    apart = len(layout.spaces) == len(layout.all_groups)
    return apart and len({(group.tokens_per_row, group.window_tokens) for group in layout.groups}) == 1


def _check_stage(stage: int, layout: StageLayout, runs: tuple[RowRuns, ...], tokens: int) -> None:
    for number, (group, rows) in enumerate(zip(layout.groups, runs, strict=True)):
        where = f"stage {stage}" if len(layout.groups) == 1 else f"stage {stage}, group {number}"
        end = max(map(sum, rows))
        if end > group.rows:
            raise UsageError("bad_rows", f"{where} has rows 0..{group.rows - 1}, got row {end - 1}")
        if tokens >= 0 and row_count(rows) != group.rows_for(tokens):
            raise UsageError(
                "bad_rows",
                f"{where}: {tokens} tokens at {group.tokens_per_row} a row need {group.rows_for(tokens)} rows, got "
                f"{row_count(rows)}",
            )


def _check_slots(stage: int, layout: StageLayout, slots: Sequence[int]) -> None:
    for group in layout.states:
        for slot in slots:
            if not 0 <= slot < group.rows:
                raise UsageError("bad_state", f"stage {stage} has states of slots 0..{group.rows - 1}, got {slot}")
