"""The rows of a request: unpacked, counted and checked against the layouts of an engine's stages.

A request lists rows for every group of every stage. Stages that share the entry of a request share its unpacked form,
and so what is later made of it: an operation may name thousands of blocks for sixty-four stages.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from shm.layout import StageLayout
from shm.rows import RUN_BYTES, RowRuns, first_rows, pack_rows, row_count, unpack_rows
from stratad.core.failures import Refusal

PackedRows: TypeAlias = tuple[tuple[bytes, ...], ...]
GroupRuns: TypeAlias = tuple[RowRuns, ...]


class Need(NamedTuple):
    """For how many tokens, and how many states, rows must be given. Without `exact` there may be more rows, of which
    the first ones are used.
    """

    tokens: int
    checkpoints: int
    exact: bool = True


def unpack_stages(layouts: Sequence[StageLayout], rows: PackedRows, need: Need) -> list[GroupRuns]:
    """Runs of every group of every stage.

    Raises:
        Refusal: ``bad_rows``, naming the stage and group.
    """
    count = len(layouts)
    if len(rows) not in (1, count):
        raise Refusal("bad_rows", f"rows must be given once or once for each of {count} stages, got {len(rows)}")
    known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], GroupRuns] = {}
    found: list[GroupRuns] = []
    for number, layout in enumerate(layouts):
        which = min(number, len(rows) - 1)
        needed = layout.rows_for(need.tokens, need.checkpoints)
        key = (which, needed, tuple(group.rows for group in layout.all_groups))
        runs = known.get(key)
        if runs is None:
            runs = known[key] = _unpack_groups(layout, rows[which], needed, number, exact=need.exact)
        found.append(runs)
    return found


def _unpack_groups(
    layout: StageLayout, packed: tuple[bytes, ...], needed: tuple[int, ...], stage: int, *, exact: bool
) -> GroupRuns:
    groups = layout.all_groups
    if len(packed) != len(groups):
        raise Refusal("bad_rows", f"rows of {len(packed)} groups were given, the stage has {len(groups)}", stage=stage)
    unpacked: list[RowRuns] = []
    for number, (group, entry, count) in enumerate(zip(groups, packed, needed, strict=True)):
        where = f"group {number}: " if len(groups) > 1 else ""
        if exact and len(entry) > RUN_BYTES * count:  # before anything is built: every run has at least one row
            raise Refusal(
                "bad_rows", f"{where}{count} rows are needed, got {len(entry) // RUN_BYTES} runs", stage=stage
            )
        try:
            runs = unpack_rows(entry, group.rows)
        except ValueError as exc:
            raise Refusal("bad_rows", f"{where}{exc}", stage=stage) from exc
        got = row_count(runs)
        if got != count and (exact or got < count):
            raise Refusal("bad_rows", f"{where}{count} rows are needed, got {got}", stage=stage)
        unpacked.append(runs)
    return tuple(unpacked)


class CutRows(NamedTuple):
    """The rows of one stage that an operation uses, and their packed form."""

    runs: GroupRuns
    packed: tuple[bytes, ...]


class RowCutter:
    """Cuts the rows of stages to those that are needed; stages that share rows share the result."""

    def __init__(self, tokens: int, checkpoints: int) -> None:
        self._tokens: Final = tokens
        self._checkpoints: Final = checkpoints
        self._known: dict[tuple[int, tuple[int, ...]], CutRows] = {}

    def cut(self, layout: StageLayout, runs: GroupRuns) -> CutRows:
        """The first rows of every group, as many as the tokens and states take."""
        needed = layout.rows_for(self._tokens, self._checkpoints)
        key = (id(runs), needed)  # by identity: to hash a list of runs is to hash all that is in it
        found = self._known.get(key)
        if found is None:
            kept = tuple(map(first_rows, runs, needed))
            found = self._known[key] = CutRows(kept, tuple(map(pack_rows, kept)))
        return found
