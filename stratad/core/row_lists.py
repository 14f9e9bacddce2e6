"""The rows of a request: unpacked, counted and checked against the layouts of an engine's stages.

A request lists rows for every group of every stage. Stages that share the entry of a request share its unpacked form,
and so what is later made of it: an operation may name thousands of blocks for sixty-four stages.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shm.layout import StageLayout
from shm.rows import RUN_BYTES, RowList
from stratad.core.failures import Refusal

# Runs of one list of rows, counted once for every kind of stage that reads it: what the loop unpacks and compares
# in a fraction of a second. 262,144 tokens of two groups, each in a row that lies alone, are as many.
RUN_LIMIT = 524_288

PackedRows: TypeAlias = tuple[tuple[bytes, ...], ...]


class Need(NamedTuple):
    """For how many tokens, and how many states, rows must be given. Without `exact` there may be more rows, of which
    the first ones are used.
    """

    tokens: int
    checkpoints: int
    exact: bool = True


class CutRows(NamedTuple):
    """The rows of one stage that an operation uses, a list for each group, and their packed form."""

    lists: tuple[RowList, ...]
    packed: tuple[bytes, ...]

    @classmethod
    def of(cls, lists: tuple[RowList, ...]) -> "CutRows":
        """That of these lists."""
        return cls(lists, tuple([rows.packed for rows in lists]))

    @property
    def run_count(self) -> int:
        """Runs of all its lists."""
        return sum([rows.run_count for rows in self.lists])


class _Entries:
    """The entries of a request. Each is unpacked once and cut once to a length, however many kinds of layouts ask for
    it: equal rows are then one object, by which later steps know them.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows
        self._unpacked: dict[tuple[int, int, int], RowList] = {}
        self._cut: dict[tuple[int, int], RowList] = {}

    def run_count(self, which: int, group: int) -> int:
        """Runs that a group's entry has.

        Raises:
            ValueError: not a whole number.
        """
        length = len(self._rows[which][group])
        if length % RUN_BYTES:
            raise ValueError(f"packed rows have {length} bytes, expected a multiple of {RUN_BYTES}")
        return length // RUN_BYTES

    def unpack(self, which: int, group: int, run_count: int, limit: int) -> RowList:
        """The first `run_count` runs of a group that has `limit` rows.

        Raises:
            ValueError: they are no runs, or pass its last row.
        """
        key = (which, group, run_count)
        found = self._unpacked.get(key)
        if found is None:
            found = self._unpacked[key] = RowList.unpack(self._rows[which][group][: RUN_BYTES * run_count], limit)
        elif found.end > limit:
            RowList.unpack(found.packed, limit)  # says which
        return found

    def cut(self, unpacked: RowList, length: int) -> RowList:
        """The first `length` rows."""
        if length >= unpacked.count:
            return unpacked
        key = (id(unpacked), length)
        if key not in self._cut:
            self._cut[key] = unpacked.first(length)
        return self._cut[key]


def cut_stages(layouts: Sequence[StageLayout], rows: PackedRows, need: Need, kept: int) -> list[CutRows]:
    """The rows of every stage that hold the first `kept` tokens, out of those that a request gives for `need`. Equal
    layouts are one object (see `interned`).

    Raises:
        Refusal: ``bad_rows``, naming the stage and group, or ``too_large``.
    """
    count = len(layouts)
    once = len(rows) == 1
    if not once and len(rows) != count:
        raise Refusal("bad_rows", f"rows must be given once or once for each of {count} stages, got {len(rows)}")
    # By identity: to hash a layout is to look at all its planes.
    asked = [(0 if once else number, id(layout)) for number, layout in enumerate(layouts)]
    check_run_count(sum([len(entry) for which, _ in set(asked) for entry in rows[which]]))
    entries = _Entries(rows)
    known: dict[tuple[int, int], CutRows] = {}
    for number, key in enumerate(asked):
        if key not in known:
            known[key] = _cut_stage(entries, layouts[number], rows, key[0], number, need=need, kept=kept)
    return [known[key] for key in asked]


def _cut_stage(
    entries: _Entries, layout: StageLayout, rows: PackedRows, which: int, number: int, *, need: Need, kept: int
) -> CutRows:
    groups = len(layout.all_groups)
    if len(rows[which]) != groups:
        text = f"rows of {len(rows[which])} groups were given, the stage has {groups}"
        raise Refusal("bad_rows", text, stage=number)
    given = layout.rows_for(need.tokens, need.checkpoints)
    used = given if kept == need.tokens else layout.rows_for(kept, need.checkpoints)
    try:
        every = [_unpack(entries, layout, which, group, given[group], exact=need.exact) for group in range(groups)]
    except ValueError as exc:
        raise Refusal("bad_rows", str(exc), stage=number) from exc
    return CutRows.of(tuple([entries.cut(one, length) for one, length in zip(every, used, strict=True)]))


def check_run_count(packed_bytes: int) -> None:
    """Refuse rows in more runs than the loop has time for, before any is unpacked.

    Raises:
        Refusal: ``too_large``.
    """
    runs = packed_bytes // RUN_BYTES
    if runs > RUN_LIMIT:
        raise Refusal("too_large", f"the rows are {runs} runs over all kinds of stages, the limit is {RUN_LIMIT}")


def _unpack(entries: _Entries, layout: StageLayout, which: int, number: int, count: int, *, exact: bool) -> RowList:
    """The rows of one group of a stage that needs `count`.

    Raises:
        ValueError: what is wrong with them.
    """
    where = f"group {number}: " if len(layout.all_groups) > 1 else ""
    given = entries.run_count(which, number)
    # Before anything is built: every run has at least one row, so what follows `count` runs is too much or not used.
    if exact and given > count:
        raise ValueError(f"{where}{count} rows are needed, got {given} runs")
    try:
        unpacked = entries.unpack(which, number, min(given, count), layout.all_groups[number].rows)
    except ValueError as exc:
        raise ValueError(f"{where}{exc}") from exc
    if unpacked.count != count and (exact or unpacked.count < count):
        raise ValueError(f"{where}{count} rows are needed, got {unpacked.count}")
    return unpacked
