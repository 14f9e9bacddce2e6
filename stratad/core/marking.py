"""How marks with contents begin and end to hold, and what of them a rescue may publish."""

from collections.abc import Sequence

from ipc.messages import TOKEN_BYTES, Mark
from shm.row_spaces import distinct_rows, shared_row
from stratad.core import prefix_cut
from stratad.core.clean_marks import CLEAN_BYTES_LIMIT, CleanMark, Marking, plan_marking
from stratad.core.failures import Refusal
from stratad.core.images import StageDigests
from stratad.core.intake import check_slot_number, points_of
from stratad.core.ops import Operation
from stratad.core.state import Engine, State

MARKS = ("clean", "dirty", "poisoned")


def check(request: Mark) -> None:
    """Refuse a mark that cannot be.

    Raises:
        Refusal: ``bad_value``.
    """
    if request.mark not in MARKS:
        raise Refusal("bad_value", f"mark must be one of {', '.join(MARKS)}, got {request.mark[:20]!r}")
    check_slot_number("slot", request.slot)
    contents = bool(request.tokens or request.rows)
    if request.conversation and request.mark != "clean":
        raise Refusal("bad_value", f"only a clean slot has contents, this one is marked {request.mark}")
    if contents and not request.conversation:
        raise Refusal("bad_value", "tokens and rows were given, but no conversation")


def set_plain(engine: Engine, slot: int, mark: str) -> None:
    """A slot is marked without contents: what was declared of it holds no more."""
    engine.marks[slot] = mark
    engine.clean.by_slot.pop(slot, None)


def prepare(state: State, engine: Engine, op: Operation) -> None:
    """Find out what a checked `MARK` operation has to digest.

    Raises:
        Refusal: ``bad_rows`` (a row occurs twice) or ``too_many``.
    """
    try:
        spaces = tuple(
            distinct_rows(layout, run.rows.lists) for layout, run in zip(engine.layouts, op.stages, strict=True)
        )
    except ValueError as exc:
        raise Refusal("bad_rows", str(exc)) from exc
    mark = CleanMark(
        state.number("mark"),
        op.slot,
        op.conversation,
        op.tokens,
        op.positions,
        op.points,
        tuple(run.rows for run in op.stages),
        spaces,
        sum(len(run.spans) for run in op.stages),
        op.run_count,
    )
    former = engine.clean.by_slot.get(op.slot)
    _check_room(state, mark, former)
    op.marking = plan_marking(engine.layouts, [run.spans for run in op.stages], mark, former)


def _check_room(state: State, mark: CleanMark, former: CleanMark | None) -> None:
    held_bytes = sum(engine.clean.cost_bytes for engine in state.engines.values())
    held_bytes -= 0 if former is None else former.cost_bytes
    if held_bytes + mark.cost_bytes > CLEAN_BYTES_LIMIT:
        raise Refusal(
            "too_many",
            f"the marks of clean slots take {held_bytes} bytes, this one would take {mark.cost_bytes}: the limit is "
            f"{CLEAN_BYTES_LIMIT}",
        )


def declare(state: State, op: Operation, made: Marking, answers: Sequence[StageDigests]) -> None:
    """Every stage has digested what it was asked for: the mark holds from now on.

    Raises:
        Refusal: it does not: the slot was marked otherwise meanwhile, or there is no room for it.
    """
    engine, slot = state.engines[op.engine_id], op.slot
    named = engine.marks.get(slot)
    if named != "clean":
        code = "poisoned" if named == "poisoned" else "cancelled"
        raise Refusal(code, f"slot {slot} was marked {named} while it was digested")
    former = engine.clean.by_slot.get(slot)
    if former is not None and former.order > made.mark.order:
        return  # a later mark of the slot was faster
    _check_room(state, made.mark, former)
    digests = made.whole(answers)
    if digests is None:
        engine.clean.by_slot.pop(slot, None)
        raise Refusal("internal", f"slot {slot} was digested in another way than before: mark it again")
    made.mark.digests = digests
    engine.clean.by_slot[slot] = made.mark


def end_written(state: State, op: Operation) -> None:
    """An operation begins to write rows: what was declared of any of them holds no more."""
    engine = state.engines[op.engine_id]
    for slot, mark in list(engine.clean.by_slot.items()):
        for run, layout in zip(op.stages, engine.layouts, strict=True):
            written = state.fences.written(op.engine_id, run.stage, op.op_id)
            if any(shared_row(layout, mark.spaces[run.stage], fence.rows) for fence in written):
                del engine.clean.by_slot[slot]
                break


def cut(state: State, op: Operation, mark: CleanMark, answers: Sequence[StageDigests]) -> None:
    """Shorten the staged image of a rescue to what is still as it was declared.

    Raises:
        Refusal: nothing of it is, or the conversation's image has as much.
    """
    engine = state.engines[op.engine_id]
    spans = [run.spans for run in op.stages]
    tokens = prefix_cut.longest_prefix(engine.layouts, spans, mark.digests, answers, mark.token_count)
    if not tokens:
        raise Refusal("source_changed", f"slot {mark.slot} was written after it was marked clean")
    if prefix_cut.is_covered(state.catalog, op.scope, op.conversation, mark.tokens[: tokens * TOKEN_BYTES]):
        raise Refusal("source_changed", f"slot {mark.slot} was written after token {tokens}, and the image has those")
    if tokens < mark.token_count:
        points = points_of(engine.kinds, tokens, op.positions)
        prefix_cut.shorten(state.catalog, engine.layouts, op, tokens, points)
