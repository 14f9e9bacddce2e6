"""Layouts: which bytes of a pool belong to which rows and tokens of a stage.

A *plane* is one strided byte array in a pool::

    offset_bytes            row 0            row 1
         |---- row_bytes ----|....|---- row_bytes ----|....     rows times, row_stride_bytes apart

The bytes of a chunk in *gathered order* are: plane after plane as registered, and inside a plane row after row in the
order of the tokens. A slot cache has one token a row, a paged cache `tokens_per_row` (a row is its block): token t of a
block then lies at ``t * token_stride_bytes`` inside the row and is `token_stride_bytes` long. A token stride of 0
says that the plane cannot tell where its tokens lie: such a stage is captured to its last full block only.

A block-major cache whose heads lie apart inside a block is described by one plane a head.
"""

import functools
from typing import NamedTuple

import msgspec


class LayoutError(ValueError):
    """A layout that cannot be: names the plane, what was given and what was expected."""


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """One strided byte array of a pool (see the module's drawing). All sizes are bytes."""

    offset_bytes: int
    row_bytes: int
    row_stride_bytes: int
    rows: int
    tokens_per_row: int = 1
    token_stride_bytes: int = 0

    @property
    def end_bytes(self) -> int:
        """First byte after the plane's last row, counted from the start of the pool."""
        return self.offset_bytes + (self.rows - 1) * self.row_stride_bytes + self.row_bytes

    @property
    def locates_tokens(self) -> bool:
        """Whether a token's bytes inside a row are known."""
        return self.tokens_per_row == 1 or self.token_stride_bytes > 0


class StatePlane(msgspec.Struct, frozen=True, array_like=True):
    """Per-slot bytes that are not indexed by token (recurrent or convolution state): slot s lies at
    ``offset_bytes + s * slot_stride_bytes`` and is `slot_bytes` long.
    """

    offset_bytes: int
    slot_bytes: int
    slot_stride_bytes: int
    slots: int

    @property
    def end_bytes(self) -> int:
        """First byte after the last slot, counted from the start of the pool."""
        return self.offset_bytes + (self.slots - 1) * self.slot_stride_bytes + self.slot_bytes


class ChunkSpan(NamedTuple):
    """What one chunk of a stage covers.

    Row chunks: rows ``first_row .. first_row + row_count`` of the operation's row list (not of the pool), and
    `token_count` tokens starting at token `first_token`. The state chunk has `is_state` set and no rows.
    """

    is_state: bool
    first_row: int
    row_count: int
    first_token: int
    token_count: int
    length_bytes: int


class StageLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All planes of one stage. Every plane is addressed by the same rows, so `tokens_per_row` is one for the stage."""

    planes: tuple[Plane, ...]
    state: StatePlane | None
    chunk_tokens: int

    @functools.cached_property
    def tokens_per_row(self) -> int:
        """Tokens of one row (1 for slot caches, the block size for paged caches)."""
        return self.planes[0].tokens_per_row

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @functools.cached_property
    def rows(self) -> int:
        """Rows that an operation may name: those that every plane has."""
        return min(plane.rows for plane in self.planes)

    @functools.cached_property
    def end_bytes(self) -> int:
        """First byte after everything the layout names; the pool must be at least this long."""
        ends = [plane.end_bytes for plane in self.planes]
        if self.state is not None:
            ends.append(self.state.end_bytes)
        return max(ends)

    @functools.cached_property
    def locates_tokens(self) -> bool:
        """Whether every plane says where a token's bytes lie inside a row."""
        return all(plane.locates_tokens for plane in self.planes)

    def capturable_tokens(self, tokens: int) -> int:
        """How many of the first `tokens` tokens can be captured: all, or those in full blocks."""
        if self.locates_tokens:
            return tokens
        return tokens // self.tokens_per_row * self.tokens_per_row

    def rows_for(self, tokens: int) -> int:
        """Rows that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_row)

    def chunks(self, tokens: int, *, with_state: bool) -> list[ChunkSpan]:
        """The chunks of `tokens` tokens in order, then the state chunk where the stage has one and `with_state`."""
        spans: list[ChunkSpan] = []
        row_bytes = self.row_bytes
        for first_token in range(0, tokens, self.chunk_tokens):
            count = min(self.chunk_tokens, tokens - first_token)
            rows = self.rows_for(count)
            spans.append(
                ChunkSpan(False, first_token // self.tokens_per_row, rows, first_token, count, rows * row_bytes)
            )
        if with_state and self.state is not None:
            spans.append(ChunkSpan(True, 0, 0, tokens, 0, self.state.slot_bytes))
        return spans


def check_layout(layout: StageLayout, pool_bytes: int) -> None:
    """Refuse a layout that does not fit its pool or contradicts itself.

    Raises:
        LayoutError: names the plane, the value and what was expected.
    """
    if not layout.planes:
        raise LayoutError("a stage needs at least one plane, got none")
    tokens_per_row = layout.planes[0].tokens_per_row
    for number, plane in enumerate(layout.planes):
        where = f"plane {number}"
        if plane.offset_bytes < 0 or plane.row_bytes <= 0 or plane.rows <= 0 or plane.tokens_per_row <= 0:
            raise LayoutError(f"{where}: offset must be >= 0, row_bytes, rows and tokens_per_row > 0, got {plane}")
        if plane.row_stride_bytes < plane.row_bytes:
            raise LayoutError(
                f"{where}: row_stride_bytes {plane.row_stride_bytes} is below row_bytes {plane.row_bytes}: rows overlap"
            )
        if plane.tokens_per_row != tokens_per_row:
            raise LayoutError(f"{where}: tokens_per_row {plane.tokens_per_row} differs from plane 0's {tokens_per_row}")
        if plane.token_stride_bytes < 0 or (
            plane.token_stride_bytes > 0 and plane.token_stride_bytes * plane.tokens_per_row != plane.row_bytes
        ):
            raise LayoutError(
                f"{where}: token_stride_bytes {plane.token_stride_bytes} x tokens_per_row {plane.tokens_per_row} "
                f"must be row_bytes {plane.row_bytes} (or 0: unknown)"
            )
        if plane.end_bytes > pool_bytes:
            raise LayoutError(f"{where}: ends at byte {plane.end_bytes}, the pool has {pool_bytes}")
    if layout.chunk_tokens <= 0 or layout.chunk_tokens % tokens_per_row:
        raise LayoutError(
            f"chunk_tokens {layout.chunk_tokens} must be a positive multiple of tokens_per_row {tokens_per_row}"
        )
    state = layout.state
    if state is not None:
        if state.offset_bytes < 0 or state.slot_bytes <= 0 or state.slots <= 0:
            raise LayoutError(f"state: offset must be >= 0, slot_bytes and slots > 0, got {state}")
        if state.slot_stride_bytes < state.slot_bytes:
            raise LayoutError(
                f"state: slot_stride_bytes {state.slot_stride_bytes} is below slot_bytes {state.slot_bytes}"
            )
        if state.end_bytes > pool_bytes:
            raise LayoutError(f"state: ends at byte {state.end_bytes}, the pool has {pool_bytes}")
    _check_apart(layout)


def _check_apart(layout: StageLayout) -> None:
    """Planes may interleave (equal stride) or lie apart; sharing bytes would write one row's bytes into another's."""
    planes = layout.planes
    order = sorted(range(len(planes)), key=lambda n: planes[n].offset_bytes)
    first = before = order[0]
    group_end_bytes = planes[first].end_bytes
    for number in order[1:]:
        plane = planes[number]
        if plane.offset_bytes >= group_end_bytes:
            first = number
        elif not all(_interleaved(planes[other], plane) for other in (first, before)):
            raise LayoutError(f"plane {number} shares bytes with plane {before}")
        before = number
        group_end_bytes = max(group_end_bytes, plane.end_bytes)
    state = layout.state
    if state is not None:
        for number, plane in enumerate(planes):
            if plane.offset_bytes < state.end_bytes and state.offset_bytes < plane.end_bytes:
                raise LayoutError(f"plane {number} shares bytes with the state")


def _interleaved(a: Plane, b: Plane) -> bool:
    """Whether the rows of `b` lie between the rows of `a`, which starts no later."""
    return (
        a.row_stride_bytes == b.row_stride_bytes
        and a.offset_bytes + a.row_bytes <= b.offset_bytes
        and b.offset_bytes + b.row_bytes <= a.offset_bytes + a.row_stride_bytes
    )
