"""The rows of a request: unpacked, counted and checked against the layouts of an engine's stages.

A request lists rows for every group of every stage. Stages that share the entry of a request share its unpacked form,
and so what is later made of it: an operation may name thousands of blocks for sixty-four stages.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shm.layout import StageLayout
from shm.rows import RUN_BYTES, RowRuns, first_rows, pack_rows, row_count, unpack_rows
from stratad.core.failures import Refusal

# Runs of one list of rows, counted once for every kind of stage that reads it: what the loop unpacks and compares
# in a fraction of a second. 262,144 tokens of two groups, each in a row that lies alone, are as many.
RUN_LIMIT = 524_288

PackedRows: TypeAlias = tuple[tuple[bytes, ...], ...]
GroupRuns: TypeAlias = tuple[RowRuns, ...]


class Need(NamedTuple):
    """For how many tokens, and how many states, rows must be given. Without `exact` there may be more rows, of which
    the first ones are used.
    """

    tokens: int
    checkpoints: int
    exact: bool = True


class CutRows(NamedTuple):
    """The rows of one stage that an operation uses, and their packed form."""

    runs: GroupRuns
    packed: tuple[bytes, ...]


def cut_stages(layouts: Sequence[StageLayout], rows: PackedRows, need: Need, kept: int) -> list[CutRows]:
    """The rows of every stage that hold the first `kept` tokens, out of those that a request gives for `need`.

    Raises:
        Refusal: ``bad_rows``, naming the stage and group, or ``too_large``.
    """
    count = len(layouts)
    if len(rows) not in (1, count):
        raise Refusal("bad_rows", f"rows must be given once or once for each of {count} stages, got {len(rows)}")
    _check_run_count(layouts, rows)
    known: dict[tuple[int, int], CutRows] = {}  # layouts by identity: to hash one is to look at all its planes
    found: list[CutRows] = []
    for number, layout in enumerate(layouts):
        which = min(number, len(rows) - 1)
        cut = known.get((which, id(layout)))
        if cut is None:
            given = layout.rows_for(need.tokens, need.checkpoints)
            used = given if kept == need.tokens else layout.rows_for(kept, need.checkpoints)
            runs = _unpack_groups(layout, rows[which], given, number, exact=need.exact)
            cut = known[which, id(layout)] = _cut(runs, rows[which], used)
        found.append(cut)
    return found


def _check_run_count(layouts: Sequence[StageLayout], rows: PackedRows) -> None:
    lists = {(min(number, len(rows) - 1), id(layout)) for number, layout in enumerate(layouts)}
    check_run_count(sum(len(entry) for which, _ in lists for entry in rows[which]))


def check_run_count(packed_bytes: int) -> None:
    """Refuse rows in more runs than the loop has time for, before any is unpacked.

    Raises:
        Refusal: ``too_large``.
    """
    runs = packed_bytes // RUN_BYTES
    if runs > RUN_LIMIT:
        raise Refusal("too_large", f"the rows are {runs} runs over all kinds of stages, the limit is {RUN_LIMIT}")


def _cut(runs: GroupRuns, packed: tuple[bytes, ...], used: tuple[int, ...]) -> CutRows:
    kept = tuple(map(first_rows, runs, used))
    # What is used whole is packed already: `first_rows` gives back the very tuple then.
    return CutRows(
        kept, tuple(old if cut is all_ else pack_rows(cut) for cut, all_, old in zip(kept, runs, packed, strict=True))
    )


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
