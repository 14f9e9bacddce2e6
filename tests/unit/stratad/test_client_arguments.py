"""Tokens and rows as callers may give them."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.rows import unpack_rows
from stratad._arguments import RowsLike, StageLimits, TokensLike, pack_tokens, parse_rows, rows_per_stage
from stratad.errors import UsageError

STAGE = StageLimits(rows=100, tokens_per_row=1)
PAGED = StageLimits(rows=100, tokens_per_row=4)


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
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_in_any_form_pack_alike(tokens: TokensLike) -> None:
    assert pack_tokens(tokens).hex() == "0100000002000000ffffffff"


def test_torch_tokens_pack_alike() -> None:
    torch = pytest.importorskip("torch")
    assert pack_tokens(torch.tensor([1, 2, 70000])) == pack_tokens([1, 2, 70000])
    assert parse_rows(torch.tensor([4, 5, 6, 1])).packed == parse_rows([4, 5, 6, 1]).packed


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], "at least one"),
        (b"", "at least one"),
        (b"abc", "multiple of 4"),
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
    assert unpack_rows(parsed.packed) == ((7, 2), (3, 1))
    assert parsed.ascending == ((3, 1), (7, 2))
    assert parsed.count == 3


def test_a_range_is_rows() -> None:
    assert unpack_rows(parse_rows(range(4, 9)).packed) == ((4, 5),)
    assert unpack_rows(parse_rows(range(4, 9, 2)).packed) == ((4, 1), (6, 1), (8, 1))


@given(st.lists(st.integers(0, 60), min_size=1, unique=True))
def test_every_list_of_rows_survives(rows: list[int]) -> None:
    for given_rows in (rows, np.array(rows)):
        parsed = parse_rows(given_rows)
        unpacked = [row for first, count in unpack_rows(parsed.packed) for row in range(first, first + count)]
        assert unpacked == rows
        assert [row for first, count in parsed.ascending for row in range(first, first + count)] == sorted(rows)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((), "at least one"),
        (range(0), "at least one"),
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
        parse_rows(rows)
    assert caught.value.code == "bad_rows"


def test_rows_must_lie_in_the_stage() -> None:
    rows_per_stage((STAGE,), range(90, 100), None, 10)
    with pytest.raises(UsageError, match=r"rows 0\.\.99, got row 100"):
        rows_per_stage((STAGE,), range(91, 101), None, 10)


def test_rows_must_be_as_many_as_the_tokens_need() -> None:
    rows_per_stage((PAGED,), [9, 2], None, 5)
    for tokens in (4, 9):
        with pytest.raises(UsageError, match=f"{tokens} tokens at 4 a row"):
            rows_per_stage((PAGED,), [9, 2], None, tokens)
    rows_per_stage((PAGED,), [9, 2], None, -1)  # all tokens of an image: only the daemon knows how many


def test_rows_by_stage_are_one_entry_a_stage() -> None:
    parsed = rows_per_stage((STAGE, PAGED), None, [range(8), [3, 1]], 8)
    assert [entry.count for entry in parsed] == [8, 2]
    for rows, by_stage in ((None, None), (range(8), [range(8), [3, 1]]), (None, [range(8)])):
        with pytest.raises(UsageError, match="rows_by_stage"):
            rows_per_stage((STAGE, PAGED), rows, by_stage, 8)
