"""Every (state, event) pair of the two machines: the table's moves happen, all others raise and change nothing."""

import pytest

from stratad.core.failures import InvalidTransition
from stratad.core.images import Scope
from stratad.core.ops import OP_MOVES, STAGE_MOVES, Operation, OpKind, OpState, StageRun, StageState
from stratad.core.row_lists import CutRows

OP_EVENTS = {event for moves in OP_MOVES.values() for event in moves}
STAGE_EVENTS = {event for moves in STAGE_MOVES.values() for event in moves}


def operation(state: OpState) -> Operation:
    scope = Scope("n", "f", ("w",))
    op = Operation(1, OpKind.CAPTURE, 1, 1, 1, scope, "c", 0, 1, "host", 0.0, 1.0, ())
    op.state = state
    return op


@pytest.mark.parametrize("event", sorted(OP_EVENTS))
@pytest.mark.parametrize("state", list(OpState))
def test_operation(state: OpState, event: str) -> None:
    op = operation(state)
    expected = OP_MOVES[state].get(event)
    if expected is None:
        with pytest.raises(InvalidTransition):
            op.advance(event)
        assert op.state is state
    else:
        op.advance(event)
        assert op.state is expected


@pytest.mark.parametrize("event", sorted(STAGE_EVENTS))
@pytest.mark.parametrize("state", list(StageState))
def test_stage(state: StageState, event: str) -> None:
    run = StageRun(0, "w", CutRows((), ()), (), state=state)
    expected = STAGE_MOVES[state].get(event)
    if expected is None:
        with pytest.raises(InvalidTransition):
            run.advance(event)
        assert run.state is state
    else:
        run.advance(event)
        assert run.state is expected


def test_every_state_is_in_its_table() -> None:
    assert set(OP_MOVES) == set(OpState)
    assert set(STAGE_MOVES) == set(StageState)
