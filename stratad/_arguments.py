"""What a caller may pass as tokens and as rows, and its packed form.

Everything is checked here, before a byte leaves the process, so that the message names the caller's own value. numpy
and torch are never imported for a caller who does not use them: their objects are known by their methods.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from ipc.messages import TOKEN_BYTES
from shm.rows import RowRuns, runs_of
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
    if isinstance(tokens, bytes):
        packed = tokens
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


def parse_rows(rows: RowsLike) -> RowRuns:
    """Runs, in token order, of rows given as runs ``((first, count), ...)``, row numbers, a `range`, or an integer
    array of one axis. An array of two axes holds runs, one a line.

    Raises:
        UsageError: none at all, negative, an empty run (code ``bad_rows``).
    """
    if isinstance(rows, range):
        runs = _runs_of_range(rows)
    elif hasattr(rows, "ndim"):
        runs = _runs_of_array(cast("ArrayLike", rows))
    else:
        runs = _runs_of_sequence(rows)
    if not runs:
        raise UsageError("bad_rows", "at least one row is needed, got none")
    if min(map(itemgetter(0), runs)) >= 0 and min(map(itemgetter(1), runs)) > 0 and max(map(sum, runs)) <= U32_LIMIT:
        return runs
    for first, count in runs:
        if first < 0 or count <= 0 or first + count > U32_LIMIT:
            raise UsageError(
                "bad_rows", f"run ({first}, {count}): first must be >= 0, count > 0 and the end at most {U32_LIMIT}"
            )
    return runs


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


def _runs_of_range(rows: range) -> RowRuns:
    if rows.step == 1:
        return ((rows.start, len(rows)),) if len(rows) else ()
    return tuple((row, 1) for row in rows)


def _runs_of_sequence(given: object) -> RowRuns:
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
                return pairs  # what `shm.rows` makes, and what thousands of runs come as
            return tuple([(first.__index__(), count.__index__()) for first, count in pairs])
        numbers = cast("Sequence[int]", rows)
        return runs_of([row.__index__() for row in numbers])
    except (TypeError, ValueError, AttributeError) as exc:
        raise UsageError(
            "bad_rows", f"rows must be runs ((first, count), ...) or row numbers, got {type(rows).__name__}: {exc}"
        ) from exc


def _runs_of_array(rows: ArrayLike) -> RowRuns:
    if rows.ndim == 2:
        if rows.shape[1] != 2:
            raise UsageError("bad_rows", f"an array of runs has shape (runs, 2), got {tuple(rows.shape)}")
        pairs = _integers(rows, "bad_rows", "row", axes=2)
        return tuple([(int(first), int(count)) for first, count in pairs.tolist()])
    numbers = _integers(rows, "bad_rows", "row").astype("int64")
    if not len(numbers):
        return ()
    import numpy as np  # noqa: PLC0415 - only callers who pass arrays pay for it

    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return tuple(zip(numbers[starts].tolist(), counts.tolist(), strict=True))


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
