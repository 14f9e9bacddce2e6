"""Tokens and rows as callers may give them."""

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.layout import Plane, RowGroup, StageLayout, StateGroup, layer_groups
from shm.rows import pack_rows
from stratad._arguments import RowsLike, TokensLike, pack_tokens, parse_rows
from stratad._rows import GroupRows, RowsGiven, StageRows, StageRowsLike, check_checkpoints, stage_rows
from stratad.errors import UsageError
from tests.support.client_rig import rig
from tests.support.layouts import stage_layout

STAGE = stage_layout((Plane(0, 8, 8, 100),))
PAGED = stage_layout((Plane(0, 8, 8, 100, 4, 2),))
WINDOW = StageLayout((RowGroup((Plane(0, 8, 8, 100),)), RowGroup((Plane(800, 8, 8, 50, 4, 2),), window_tokens=10)))
STATEFUL = StageLayout((RowGroup((Plane(0, 8, 8, 100),)),), (StateGroup((Plane(800, 8, 8, 3),)),))


def given_for(
    layouts: tuple[StageLayout, ...],
    rows: StageRowsLike | None,
    by_stage: list[StageRowsLike] | None,
    tokens: int,
    slots: tuple[int, ...] = (),
) -> tuple[StageRows, ...]:
    return stage_rows(layouts, RowsGiven(rows, by_stage), tokens, slots)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 2**32 - 1],
        (1, 2, 2**32 - 1),
        array("I", [1, 2, 2**32 - 1]),
        array("q", [1, 2, 2**32 - 1]),
        np.array([1, 2, 2**32 - 1], dtype=np.int64),
        np.array([1, 2, 2**32 - 1], dtype=">u4"),
        bytes.fromhex("0100000002000000ffffffff"),
        bytearray.fromhex("0100000002000000ffffffff"),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_in_any_form_pack_alike(tokens: TokensLike) -> None:
    assert pack_tokens(tokens).hex() == "0100000002000000ffffffff"


def test_torch_tokens_pack_alike() -> None:
    torch = pytest.importorskip("torch")
    assert pack_tokens(torch.tensor([1, 2, 70000])) == pack_tokens([1, 2, 70000])
    assert parse_rows(torch.tensor([4, 5, 6, 1])).runs == ((4, 3), (1, 1))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], "at least one"),
        (b"", "at least one"),
        (b"abc", "multiple of 4"),
        (bytearray(b"abc"), "multiple of 4"),
        ([5, -1], "token 1 is -1"),
        ([2**32], "token 0 is 4294967296"),
        ([1.5], "integers"),
        ("text", "integers"),
        (np.array([0.5]), "integers"),
        (np.array([[1, 2]]), "one axis"),
        (np.array([3, -7]), "-7"),
        (np.array([2**32]), "4294967296"),
        (np.array([], dtype=np.int64), "at least one"),
    ],
)
def test_bad_tokens_are_named(tokens: TokensLike, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        pack_tokens(tokens)
    assert caught.value.code == "bad_tokens"


@pytest.mark.parametrize(
    "rows",
    [
        ((7, 2), (3, 1)),
        [(7, 2), (3, 1)],
        [7, 8, 3],
        np.array([7, 8, 3]),
        np.array([[7, 2], [3, 1]]),
        [np.int64(7), np.int64(8), np.int64(3)],
    ],
)
def test_rows_in_any_form_pack_alike(rows: RowsLike) -> None:
    parsed = parse_rows(rows)
    assert parsed.runs == ((7, 2), (3, 1))
    assert (parsed.run_count, parsed.count, parsed.end, parsed.single) == (2, 3, 9, False)
    (stage,) = given_for((STAGE,), rows, None, 3)
    assert stage.packed == (pack_rows([(7, 2), (3, 1)]),)
    assert stage.spaces[0].ascending == ((3, 1), (7, 2))


def test_a_range_is_rows() -> None:
    assert parse_rows(range(4, 9)).runs == ((4, 5),)
    assert parse_rows(range(4, 9, 2)).runs == ((4, 1), (6, 1), (8, 1))
    assert parse_rows(range(5, 2, -1)).runs == ((5, 1), (4, 1), (3, 1))


def test_bytes_are_one_row_each() -> None:
    for rows in (bytes([7, 8, 3, 0, 2, 4, 6, 9]), bytearray([7, 8, 3, 0, 2, 4, 6, 9])):
        assert parse_rows(rows).runs == parse_rows([7, 8, 3, 0, 2, 4, 6, 9]).runs


@given(st.lists(st.integers(0, 60), min_size=1, unique=True))
def test_every_list_of_rows_survives(rows: list[int]) -> None:
    for given_rows in (rows, np.array(rows)):
        parsed = parse_rows(given_rows)
        assert parsed.single == all(count == 1 for _, count in parsed.runs)
        assert (parsed.count, parsed.end) == (len(rows), max(rows) + 1)
        assert [row for first, count in parsed.runs for row in range(first, first + count)] == rows
        (stage,) = given_for((STAGE,), given_rows, None, len(rows))
        assert [row for first, count in stage.spaces[0].ascending for row in range(first, first + count)] == sorted(
            rows
        )


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((), "at least one"),
        (range(0), "at least one"),
        (range(2**70), "rows must be 0..4294967295"),
        (range(0, 2**66, 2**65), "rows must be 0..4294967295"),
        (range(3, -3, -2), "rows must be 0..4294967295"),
        ([1, 2, 1], "row 1 occurs twice"),
        (((0, 4), (3, 1)), "row 3 occurs twice"),
        (np.array([5, 5]), "row 5 occurs twice"),
        (((0, 0),), "count > 0"),
        (((-1, 2),), "first must be >= 0"),
        ([-1], "first must be >= 0"),
        (np.array([-1]), "-1 is outside"),
        (((0, 1, 2),), "runs"),
        ([1.5], "row numbers"),
        ("text", "row"),
        (((2**32 - 1, 2),), "end at most"),
    ],
)
def test_bad_rows_are_named(rows: RowsLike, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        given_for((STAGE,), rows, None, -1)
    assert caught.value.code == "bad_rows"


def test_rows_must_lie_in_the_stage() -> None:
    given_for((STAGE,), range(90, 100), None, 10)
    with pytest.raises(UsageError, match=r"rows 0\.\.99, got row 100"):
        given_for((STAGE,), range(91, 101), None, 10)


def test_rows_must_be_as_many_as_the_tokens_need() -> None:
    given_for((PAGED,), [9, 2], None, 5)
    for tokens in (4, 9):
        with pytest.raises(UsageError, match=f"{tokens} tokens at 4 a row"):
            given_for((PAGED,), [9, 2], None, tokens)
    given_for((PAGED,), [9, 2], None, -1)  # all tokens of an image: only the daemon knows how many


def test_rows_by_stage_are_one_entry_a_stage() -> None:
    parsed = given_for((STAGE, PAGED), None, [range(8), [3, 1]], 8)
    assert [entry.packed for entry in parsed] == [(pack_rows([(0, 8)]),), (pack_rows([(3, 1), (1, 1)]),)]
    both: list[StageRowsLike] = [range(8), [3, 1]]
    cases: list[tuple[StageRowsLike | None, list[StageRowsLike] | None]]
    cases = [(None, None), (range(8), both), (None, [range(8)])]
    for rows, by_stage in cases:
        with pytest.raises(UsageError, match="rows_by_stage"):
            given_for((STAGE, PAGED), rows, by_stage, 8)


def test_rows_of_groups_are_those_that_each_group_holds() -> None:
    (stage,) = given_for((WINDOW,), GroupRows(range(31), [4, 9, 2]), None, 31)  # tokens 20 to 30: three blocks
    assert stage.packed == (pack_rows([(0, 31)]), pack_rows([(4, 1), (9, 1), (2, 1)]))
    for rows, text in (
        (GroupRows(range(31), [4, 9]), r"stage 0, group 1: 31 tokens at 4 a row need 3 rows, got 2"),
        (GroupRows(range(31)), "2 row groups, rows were given for 1"),
        (range(31), "2 row groups, rows were given for 1"),
        (GroupRows(range(31), [4, 9, 50]), r"group 1 has rows 0\.\.49, got row 50"),
    ):
        with pytest.raises(UsageError, match=text):
            given_for((WINDOW,), rows, None, 31)


def test_rows_of_groups_that_are_alike_may_be_given_once() -> None:
    planes = [Plane(n * 800, 8, 8, 100) for n in range(6)]
    three, two = (StageLayout(layer_groups(planes[:count], count)) for count in (3, 2))
    rows = pack_rows([(4, 8)])
    first, second = given_for((three, two), range(4, 12), None, 8)
    assert (first.packed, second.packed) == ((rows,) * 3, (rows,) * 2)
    first, second = given_for((STAGE, two), None, [range(4, 12), range(8)], 8)
    assert (first.packed, second.packed) == ((rows,), (pack_rows([(0, 8)]),) * 2)
    with pytest.raises(UsageError, match=r"group 0 has rows 0\.\.99, got row 100"):
        given_for((three,), range(93, 101), None, 8)
    with pytest.raises(UsageError, match="3 row groups, rows were given for 2"):
        given_for((three,), GroupRows(range(8), range(8)), None, 8)
    # Groups that lie in one memory take no row twice.
    shared = StageLayout((RowGroup((planes[0],)), RowGroup((planes[0],))))
    with pytest.raises(UsageError, match="2 row groups, rows were given for 1"):
        given_for((shared,), range(8), None, 8)


def test_states_take_the_slots_of_their_checkpoints() -> None:
    plain, stateful = given_for((STAGE, STATEFUL), range(5), None, 5, (2, 0))
    assert plain.packed == (pack_rows([(0, 5)]),)
    assert stateful.packed == (pack_rows([(0, 5)]), pack_rows([(2, 1), (0, 1)]))
    with pytest.raises(UsageError, match=r"states of slots 0\.\.2, got 3"):
        given_for((STAGE, STATEFUL), range(5), None, 5, (3,))


def test_a_stage_may_have_no_rows_at_all() -> None:
    alone = StageLayout((), (StateGroup((Plane(0, 8, 8, 3),)),))
    for rows in (None, GroupRows()):
        (stage,) = given_for((alone,), rows, None, 7, (1,))
        assert stage.packed == (pack_rows([(1, 1)]),)


def test_checkpoints_ascend_and_are_there_where_states_are() -> None:
    assert check_checkpoints((STAGE, STATEFUL), [(2, 0), (5, 1)], 5) == (2, 5)
    assert check_checkpoints((STAGE,), [], 5) == ()
    for layouts, checkpoints in (
        ((STAGE,), [(5, 0)]),
        ((STATEFUL,), []),
        ((STATEFUL,), [(6, 0)]),
        ((STATEFUL,), [(0, 0)]),
        ((STATEFUL,), [(3, 0), (3, 1)]),
        ((STATEFUL,), [(3, 0), (2, 1)]),
    ):
        with pytest.raises(UsageError) as caught:
            check_checkpoints(layouts, checkpoints, 5)
        assert caught.value.code == "bad_state"


def test_a_slot_copy_takes_a_number_of_tokens_and_says_so(tmp_path: Path) -> None:
    with rig(tmp_path) as parts, pytest.raises(UsageError, match="how many there are, an int, got range"):
        parts.engine.slot_to(range(5), range(5), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.array([[3, 1], [5, 0]]), r"run \(5, 0\)"),
        (np.array([[3, 1], [2**32 - 1, 2]]), r"run \(4294967295, 2\)"),
        ([3, -1], r"run \(-1, 1\)"),
        ([2**32], r"run \(4294967296, 1\)"),
        ([2**70], "a row must be 0"),
    ],
)
def test_runs_of_arrays_and_lists_are_checked_before_they_are_packed(rows: RowsLike, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        parse_rows(rows)
    assert caught.value.code == "bad_rows"


def test_a_shuffled_list_with_few_neighbours_stays_single() -> None:
    """Joined to runs it would be one of the lists that are dear to check; the packed form says the same rows."""
    rows = [9, 4, 5, 1, 7, 12, 20]
    for given_rows in (rows, np.array(rows)):
        parsed = parse_rows(given_rows)
        assert parsed.single
        assert parsed.runs == tuple((row, 1) for row in rows)
    assert parse_rows([4, 5, 6, 7, 1]).runs == ((4, 4), (1, 1))
