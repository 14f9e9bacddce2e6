"""What a caller may pass as tokens and as rows, and its packed form.

Everything is checked here, before a byte leaves the process, so that the message names the caller's own value. numpy
and torch are never imported for a caller who does not use them: their objects are known by their methods.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter, sub
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from ipc.messages import TOKEN_BYTES
from shm.rows import RowList
from stratad.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

U32_LIMIT: Final = 2**32


class ArrayLike(Protocol):
    """What numpy arrays and torch tensors have in common here."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of every axis."""
        ...

    @property
    def ndim(self) -> int:
        """Number of axes."""
        ...


TokensLike: TypeAlias = Sequence[int] | bytes | ArrayLike
RowsLike: TypeAlias = Sequence[tuple[int, int]] | Sequence[int] | range | ArrayLike


def pack_tokens(tokens: TokensLike) -> bytes:
    """Token ids as little-endian u32.

    `tokens` is a sequence of ints, an integer array or tensor of one axis, an `array.array`, or bytes that are packed
    already.

    Raises:
        UsageError: none at all, no integers, below 0 or above 2^32 - 1 (code ``bad_tokens``).
    """
    if isinstance(tokens, bytes | bytearray):
        packed = bytes(tokens)
        if len(packed) % TOKEN_BYTES:
            raise UsageError("bad_tokens", f"packed tokens have {len(packed)} bytes, expected a multiple of 4")
    elif isinstance(tokens, array) and tokens.typecode in "IL" and tokens.itemsize == TOKEN_BYTES:
        packed = _little(tokens)
    elif hasattr(tokens, "ndim"):
        packed = _integers(cast("ArrayLike", tokens), "bad_tokens", "token").astype("<u4").tobytes()
    else:
        packed = _pack_sequence(tokens)
    if not packed:
        raise UsageError("bad_tokens", "at least one token is needed, got none")
    return packed


def parse_rows(rows: RowsLike) -> RowList:
    """Runs, in token order, of rows given as runs ``((first, count), ...)``, row numbers, a `range`, or an integer
    array of one axis. An array of two axes holds runs, one a line.

    Raises:
        UsageError: none at all, negative, an empty run (code ``bad_rows``).
    """
    if isinstance(rows, range):
        found = _rows_of_range(rows)
    elif hasattr(rows, "ndim"):
        found = _rows_of_array(cast("ArrayLike", rows))
    else:
        found = _rows_of_sequence(rows)
    if not found.run_count:
        raise UsageError("bad_rows", "at least one row is needed, got none")
    return found


def _checked(runs: Sequence[tuple[int, int]]) -> RowList:
    if not runs:
        return RowList(b"", 0, 0, single=True)
    if min(map(itemgetter(0), runs)) >= 0 and min(map(itemgetter(1), runs)) > 0 and max(map(sum, runs)) <= U32_LIMIT:
        return RowList.of(runs)
    for first, count in runs:
        if first < 0 or count <= 0 or first + count > U32_LIMIT:
            raise UsageError(
                "bad_rows", f"run ({first}, {count}): first must be >= 0, count > 0 and the end at most {U32_LIMIT}"
            )
    raise AssertionError("one of them is wrong")


def _little(tokens: "array[int]") -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _pack_sequence(given: object) -> bytes:
    tokens = cast("Sequence[int]", given)
    try:
        return _little(array("I", tokens))
    except OverflowError:
        for place, token in enumerate(tokens):
            if not 0 <= token < U32_LIMIT:
                raise UsageError("bad_tokens", f"token {place} is {token}, expected 0..{U32_LIMIT - 1}") from None
        raise
    except TypeError as exc:
        raise UsageError("bad_tokens", f"tokens must be integers: {exc}") from exc


def _rows_of_range(rows: range) -> RowList:
    if rows and not (0 <= rows[0] < U32_LIMIT and 0 <= rows[-1] < U32_LIMIT):  # before so many are counted, or made
        raise UsageError("bad_rows", f"rows must be 0..{U32_LIMIT - 1}, got {rows}")
    if rows.step == 1:
        return _checked(((rows.start, len(rows)),) if len(rows) else ())
    return _rows_of_numbers(array("q", rows))


def _rows_of_sequence(given: object) -> RowList:
    rows = cast("Sequence[tuple[int, int]] | Sequence[int]", given)
    try:
        if len(rows) and hasattr(rows[0], "__len__"):
            pairs = cast("Sequence[tuple[int, int]]", rows)
            if (
                type(pairs) is tuple
                and set(map(type, pairs)) == {tuple}
                and set(map(len, pairs)) == {2}
                and set(map(type, chain.from_iterable(pairs))) == {int}
            ):
                return _checked(pairs)  # what `shm.rows` makes, and what thousands of runs come as
            return _checked([(first.__index__(), count.__index__()) for first, count in pairs])
        if isinstance(rows, bytes | bytearray):
            rows = list(rows)  # an array would take eight of them for one number
        return _rows_of_numbers(array("q", cast("Sequence[int]", rows)))
    except (TypeError, ValueError, AttributeError) as exc:
        raise UsageError(
            "bad_rows", f"rows must be runs ((first, count), ...) or row numbers, got {type(rows).__name__}: {exc}"
        ) from exc
    except OverflowError as exc:
        raise UsageError("bad_rows", f"a row must be 0..{U32_LIMIT - 1}: {exc}") from exc


def _rows_of_numbers(numbers: "array[int]") -> RowList:
    """Single row numbers, joined to runs where they follow each other."""
    if not numbers:
        return RowList(b"", 0, 0, single=True)
    low, high, rows = min(numbers), max(numbers), len(numbers)
    steps = array("q", map(sub, numbers[1:], numbers))
    single = _lie_alone(rows - steps.count(1), rows)
    firsts: Iterable[int] = numbers
    counts: Iterable[int] = repeat(1, rows)
    runs = rows
    if not single:
        breaks = [at for at, step in enumerate(steps, 1) if step != 1]
        firsts = [numbers[at] for at in (0, *breaks)]
        counts = list(map(sub, (*breaks, rows), (0, *breaks)))
        runs = len(breaks) + 1
    if low < 0 or high >= U32_LIMIT:
        return _checked(tuple(zip(firsts, counts, strict=True)))  # says which
    pairs = array("I", bytes(8 * runs))
    pairs[0::2], pairs[1::2] = array("I", firsts), array("I", counts)
    return RowList(_little(pairs), rows, high + 1, single=single or runs == rows)


def _lie_alone(runs: int, rows: int) -> bool:
    """Whether rows that could be joined to so many runs are better left alone: a list in which each row is a run of its
    own is checked and compared at a fraction of the price, and here and there two rows of a shuffled pool are
    neighbours.
    """
    return 4 * runs > 3 * rows


def _rows_of_array(rows: ArrayLike) -> RowList:
    import numpy as np  # noqa: PLC0415 - only callers who pass arrays pay for it

    if rows.ndim == 2:
        if rows.shape[1] != 2:
            raise UsageError("bad_rows", f"an array of runs has shape (runs, 2), got {tuple(rows.shape)}")
        pairs = _integers(rows, "bad_rows", "row", axes=2).astype("int64")
        ends = pairs.sum(axis=1)
        if len(pairs) and (int(pairs[:, 1].min()) == 0 or int(ends.max()) > U32_LIMIT):
            return _checked([(int(first), int(count)) for first, count in pairs.tolist()])  # says which
        end = int(ends.max()) if len(pairs) else 0
        single = bool((pairs[:, 1] == 1).all())
        return RowList(pairs.astype("<u4").tobytes(), int(pairs[:, 1].sum()), end, single=single)
    numbers = _integers(rows, "bad_rows", "row").astype("int64")
    if not len(numbers):
        return RowList(b"", 0, 0, single=True)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    single = _lie_alone(len(starts), len(numbers))
    firsts, counts = (numbers, np.ones_like(numbers)) if single else (numbers[starts], counts)
    packed = np.column_stack((firsts, counts)).astype("<u4").tobytes()
    return RowList(packed, len(numbers), int(numbers.max()) + 1, single=single)


def _integers(values: ArrayLike, code: str, what: str, axes: int = 1) -> "np.ndarray":
    """An integer numpy array of the values of an array or tensor, each within u32."""
    import numpy as np  # noqa: PLC0415 - only callers who pass arrays pay for it

    detach = getattr(values, "detach", None)
    array_ = np.asarray(detach().cpu().numpy() if detach is not None else values)
    if array_.dtype.kind not in "iu" or array_.ndim != axes:
        raise UsageError(code, f"{what}s must be integers along one axis, got {array_.dtype} of shape {array_.shape}")
    if array_.size:
        low, high = int(array_.min()), int(array_.max())
        if low < 0 or high >= U32_LIMIT:
            raise UsageError(code, f"{what} {low if low < 0 else high} is outside 0..{U32_LIMIT - 1}")
    return array_
