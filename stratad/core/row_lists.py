"""The rows of a request: unpacked, counted and checked against the layouts of an engine's stages.

A request lists rows for every group of every stage. Stages that share the entry of a request share its unpacked form,
and so what is later made of it: an operation may name thousands of blocks for sixty-four stages.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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


class CutRows(NamedTuple):
    """The rows of one stage that an operation uses, and their packed form."""

    runs: GroupRuns
    packed: tuple[bytes, ...]


def cut_stages(layouts: Sequence[StageLayout], rows: PackedRows, need: Need, kept: int) -> list[CutRows]:
    """The rows of every stage that hold the first `kept` tokens, out of those that a request gives for `need`.

    Raises:
        Refusal: ``bad_rows``, naming the stage and group.
    """
    count = len(layouts)
    if len(rows) not in (1, count):
        raise Refusal("bad_rows", f"rows must be given once or once for each of {count} stages, got {len(rows)}")
    known: dict[tuple[int, int], CutRows] = {}  # layouts by identity: to hash one is to look at all its planes
    found: list[CutRows] = []
    for number, layout in enumerate(layouts):
        which = min(number, len(rows) - 1)
        cut = known.get((which, id(layout)))
        if cut is None:
            given = layout.rows_for(need.tokens, need.checkpoints)
            used = given if kept == need.tokens else layout.rows_for(kept, need.checkpoints)
            unpacked = _unpack_groups(layout, rows[which], given, number, exact=need.exact)
            cut = known[which, id(layout)] = _cut(unpacked, used)
        found.append(cut)
    return found


def _cut(unpacked: CutRows, used: tuple[int, ...]) -> CutRows:
    kept = tuple(map(first_rows, unpacked.runs, used))
    # What is used whole is packed already: `first_rows` gives back the very tuple then.
    return CutRows(
        kept, tuple(old if cut is all_ else pack_rows(cut) for cut, all_, old in zip(kept, *unpacked, strict=True))
    )


def _unpack_groups(
    layout: StageLayout, packed: tuple[bytes, ...], needed: tuple[int, ...], stage: int, *, exact: bool
) -> CutRows:
    groups = layout.all_groups
    if len(packed) != len(groups):
        raise Refusal("bad_rows", f"rows of {len(packed)} groups were given, the stage has {len(groups)}", stage=stage)
    unpacked: list[RowRuns] = []
    entries: list[bytes] = []
    for number, (group, given, count) in enumerate(zip(groups, packed, needed, strict=True)):
        where = f"group {number}: " if len(groups) > 1 else ""
        entry = given
        if len(given) > RUN_BYTES * count and not len(given) % RUN_BYTES:  # before anything is built
            if exact:
                text = f"{where}{count} rows are needed, got {len(given) // RUN_BYTES} runs"
                raise Refusal("bad_rows", text, stage=stage)
            entry = given[: RUN_BYTES * count]  # every run has at least one row: what follows is not used
        try:
            runs = unpack_rows(entry, group.rows)
        except ValueError as exc:
            raise Refusal("bad_rows", f"{where}{exc}", stage=stage) from exc
        got = row_count(runs)
        if got != count and (exact or got < count):
            raise Refusal("bad_rows", f"{where}{count} rows are needed, got {got}", stage=stage)
        unpacked.append(runs)
        entries.append(entry)
    return CutRows(tuple(unpacked), tuple(entries))
