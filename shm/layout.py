"""Layouts: which bytes of a pool belong to which rows, tokens and states of a stage.

A *plane* is one strided byte array in a pool::

    offset_bytes            row 0            row 1
         |---- row_bytes ----|....|---- row_bytes ----|....     rows times, row_stride_bytes apart

Planes that are addressed by one list of rows form a *row group*: a slot cache has one token a row, a paged cache
`tokens_per_row` (a row is its block). Token t of a block then lies at ``t * token_stride_bytes`` inside the row and is
`token_stride_bytes` long. A token stride of 0 says that the plane cannot tell where its tokens lie: such a stage is
captured to its last full block only. Heads that lie apart (head-major caches) are one plane a head.

A row group with a window keeps only the last tokens of a conversation, and so does its image::

    image of n tokens       |  gone  |<-- window_tokens -->|          first token: n - window_tokens, rounded
                            0        first_token(n)        n          down to a whole row (0 where all fits)

Planes that are addressed by *state slot* (recurrent or convolution state) form a *state group*. A slot's state belongs
to one token position; an image holds it at every position that was captured, its *checkpoints*.

Groups are numbered through a stage, row groups first, then state groups. Bytes of a chunk in *gathered order* are:
plane after plane of its group, inside a plane row after row in the order of the tokens.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

# What workers can address: a row is one item of an array, and strides are signed 64-bit numbers there.
ROW_BYTES_LIMIT: Final = 2**31
NUMBER_LIMIT: Final = 2**62
# A worker copies a chunk as a whole and keeps it in private memory meanwhile, on the host or on its GPU: an engine must
# not be able to make that memory as large as a sparse pool. (GPU kernels count the bytes of a chunk in 32 bits, too.)
CHUNK_BYTES_LIMIT: Final = 2**30


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


class _Group(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Planes that one list of rows addresses."""

    planes: tuple[Plane, ...]

    @functools.cached_property
    def rows(self) -> int:
        """Rows (of a state group: slots) that an operation may name: those that every plane has."""
        return min(plane.rows for plane in self.planes)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes of the group."""
        return sum(plane.row_bytes for plane in self.planes)

    @functools.cached_property
    def tokens_per_row(self) -> int:
        """Tokens of one row: 1 for slot caches, the block size for paged caches, without meaning for states."""
        return self.planes[0].tokens_per_row


class RowGroup(_Group, frozen=True, array_like=True, dict=True):
    """Planes whose rows hold tokens. `window_tokens` above 0: the group keeps only the last so many tokens."""

    window_tokens: int = 0

    @functools.cached_property
    def locates_tokens(self) -> bool:
        """Whether every plane says where a token's bytes lie inside a row."""
        return all(plane.locates_tokens for plane in self.planes)

    def first_token(self, tokens: int) -> int:
        """The first token that an image of `tokens` tokens holds of this group; it begins a row."""
        if not self.window_tokens or tokens <= self.window_tokens:
            return 0
        return (tokens - self.window_tokens) // self.tokens_per_row * self.tokens_per_row

    def rows_for(self, tokens: int) -> int:
        """Rows that hold what an image of `tokens` tokens holds of this group."""
        return -(-tokens // self.tokens_per_row) - self.first_token(tokens) // self.tokens_per_row


class StateGroup(_Group, frozen=True, array_like=True, dict=True):
    """Planes that hold one state a slot: `rows` of its planes are slots, `row_bytes` the bytes of a slot's state."""


class ChunkSpan(NamedTuple):
    """What one chunk of a stage covers.

    `first_row` and `row_count` count in the operation's list of rows for group number `group`, not in the pool. A row
    chunk has `token_count` tokens from `first_token` on. A state chunk (`is_state`) is the state at token position
    `first_token`; its one row is the slot that the operation names for its checkpoint number `first_row`.
    """

    group: int
    is_state: bool
    first_row: int
    row_count: int
    first_token: int
    token_count: int
    length_bytes: int


class StageLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All groups of one stage. A chunk of rows holds about `chunk_tokens` tokens: a whole number of rows."""

    groups: tuple[RowGroup, ...]
    states: tuple[StateGroup, ...] = ()
    chunk_tokens: int = 256

    @functools.cached_property
    def all_groups(self) -> tuple[RowGroup | StateGroup, ...]:
        """Every group by its number."""
        return (*self.groups, *self.states)

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Every plane, group after group."""
        return tuple(plane for group in self.all_groups for plane in group.planes)

    @functools.cached_property
    def end_bytes(self) -> int:
        """First byte after everything the layout names; the pool must be at least this long."""
        return max(plane.end_bytes for plane in self.planes)

    @functools.cached_property
    def token_unit(self) -> int:
        """Images of this stage hold a multiple of so many tokens: 1 where every plane can locate tokens."""
        return math.lcm(*(group.tokens_per_row for group in self.groups if not group.locates_tokens))

    @functools.cached_property
    def spaces(self) -> tuple[tuple[int, ...], ...]:
        """Groups (by number) whose rows are the same memory, together: a row of one is the row of that number of the
        others, and an operation may name it for one of them only. Mostly each group stands alone.
        """
        space_of = list(range(len(self.all_groups)))
        for one, other in shared_planes(self.all_groups):
            low, high = sorted((space_of[one.group], space_of[other.group]))
            if low != high:
                space_of = [low if space == high else space for space in space_of]
        return tuple(tuple(n for n, s in enumerate(space_of) if s == space) for space in sorted(set(space_of)))

    @functools.cached_property
    def chunk_step(self) -> int:
        """At multiples of so many tokens a chunk of every row group ends."""
        return math.lcm(*map(self._tokens_per_chunk, self.groups))

    def capturable_tokens(self, tokens: int) -> int:
        """How many of the first `tokens` tokens can be captured: all, or those in full blocks."""
        return tokens // self.token_unit * self.token_unit

    def rows_for(self, tokens: int, checkpoints: int = 0) -> tuple[int, ...]:
        """Rows of each group that hold an image of `tokens` tokens and `checkpoints` states."""
        return (*(group.rows_for(tokens) for group in self.groups), *(checkpoints for _ in self.states))

    def holds_prefix(self, tokens: int, image_tokens: int) -> bool:
        """Whether the rows of an image of `image_tokens` tokens are also those of its first `tokens` tokens: no window
        may have passed what the shorter one needs.
        """
        return all(group.first_token(tokens) == group.first_token(image_tokens) for group in self.groups)

    def chunk_count(self, tokens: int, checkpoints: int = 0) -> int:
        """Number of `chunks`, without making them."""
        count = checkpoints * len(self.states)
        for group in self.groups:
            step = self._tokens_per_chunk(group)
            count += -(-tokens // step) - group.first_token(tokens) // step
        return count

    def chunks(self, tokens: int, positions: Sequence[int] = ()) -> list[ChunkSpan]:
        """The chunks of an image of `tokens` tokens, group after group in the order of the tokens; then, for every
        checkpoint position, one of each state group. Chunks of rows end at multiples of their token count, so that
        conversations with a common beginning have common chunks.
        """
        spans: list[ChunkSpan] = []
        for number, group in enumerate(self.groups):
            step, per_row, row_bytes = self._tokens_per_chunk(group), group.tokens_per_row, group.row_bytes
            first = group.first_token(tokens)
            first_row = first // per_row
            while first < tokens:
                end = min((first // step + 1) * step, tokens)
                row = first // per_row
                rows = -(-end // per_row) - row
                spans.append(ChunkSpan(number, False, row - first_row, rows, first, end - first, rows * row_bytes))
                first = end
        for checkpoint, position in enumerate(positions):
            for number, state in enumerate(self.states, len(self.groups)):
                spans.append(ChunkSpan(number, True, checkpoint, 1, position, 0, state.row_bytes))
        return spans

    def chunk_rows(self, group: RowGroup | StateGroup) -> int:
        """Rows that a chunk of the group has at most: no more than its planes have."""
        if isinstance(group, StateGroup):
            return 1
        return min(self._tokens_per_chunk(group) // group.tokens_per_row, group.rows)

    def _tokens_per_chunk(self, group: RowGroup) -> int:
        return max(1, self.chunk_tokens // group.tokens_per_row) * group.tokens_per_row


def check_layout(layout: StageLayout, pool_bytes: int) -> None:
    """Refuse a layout that does not fit its pool or contradicts itself.

    Raises:
        LayoutError: names the plane, the value and what was expected.
    """
    if not layout.all_groups or not all(group.planes for group in layout.all_groups):
        raise LayoutError("a stage needs at least one group, and a group at least one plane")
    if layout.chunk_tokens <= 0:
        raise LayoutError(f"chunk_tokens must be above 0, got {layout.chunk_tokens}")
    for number, group in enumerate(layout.all_groups):
        for plane_number, plane in enumerate(group.planes):
            where = f"group {number}, plane {plane_number}"
            _check_plane(where, plane, pool_bytes)
            if plane.tokens_per_row != group.tokens_per_row:
                raise LayoutError(
                    f"{where}: tokens_per_row {plane.tokens_per_row} differs from plane 0's {group.tokens_per_row}"
                )
        if isinstance(group, StateGroup):
            if group.tokens_per_row != 1:
                raise LayoutError(f"group {number}: a state has no tokens, got tokens_per_row {group.tokens_per_row}")
        elif group.window_tokens < 0:
            raise LayoutError(f"group {number}: window_tokens must be >= 0, got {group.window_tokens}")
        rows = layout.chunk_rows(group)
        if rows * group.row_bytes > CHUNK_BYTES_LIMIT:
            raise LayoutError(
                f"group {number}: a chunk has {rows} rows of {group.row_bytes} bytes, it may have {CHUNK_BYTES_LIMIT} "
                "bytes: use several groups or smaller rows"
            )
    for one, other in shared_planes(layout.all_groups):
        if one.group == other.group:
            raise LayoutError(f"group {one.group}: plane {one.number} shares bytes with plane {other.number}")


def _check_plane(where: str, plane: Plane, pool_bytes: int) -> None:
    if plane.offset_bytes < 0 or plane.row_bytes <= 0 or plane.rows <= 0 or plane.tokens_per_row <= 0:
        raise LayoutError(f"{where}: offset must be >= 0, row_bytes, rows and tokens_per_row > 0, got {plane}")
    if plane.row_bytes >= ROW_BYTES_LIMIT or max(plane.row_stride_bytes, plane.tokens_per_row) >= NUMBER_LIMIT:
        raise LayoutError(
            f"{where}: row_bytes must be below {ROW_BYTES_LIMIT}, row_stride_bytes and tokens_per_row below "
            f"{NUMBER_LIMIT}, got {plane}"
        )
    if plane.row_stride_bytes < plane.row_bytes:
        raise LayoutError(
            f"{where}: row_stride_bytes {plane.row_stride_bytes} is below row_bytes {plane.row_bytes}: rows overlap"
        )
    if plane.token_stride_bytes < 0 or (
        plane.token_stride_bytes > 0 and plane.token_stride_bytes * plane.tokens_per_row != plane.row_bytes
    ):
        raise LayoutError(
            f"{where}: token_stride_bytes {plane.token_stride_bytes} x tokens_per_row {plane.tokens_per_row} "
            f"must be row_bytes {plane.row_bytes} (or 0: unknown)"
        )
    if plane.end_bytes > pool_bytes:
        raise LayoutError(f"{where}: ends at byte {plane.end_bytes}, the pool has {pool_bytes}")


class _Placed(NamedTuple):
    """A plane, its group's number and its own in the group."""

    plane: Plane
    group: int
    number: int

    @property
    def name(self) -> str:
        return f"plane {self.number} of group {self.group}"


def shared_planes(groups: Sequence[RowGroup | StateGroup]) -> Iterator[tuple[_Placed, _Placed]]:
    """Pairs of planes that share bytes: at least one of every set of groups that do, and of every group whose own do.

    Planes may lie apart, or interleave: equal strides, and row r of each within the same stride. Anything else that
    overlaps would have row r of one plane in row s of another.

    Raises:
        LayoutError: planes overlap in another way.
    """
    placed = sorted(
        (_Placed(plane, g, p) for g, group in enumerate(groups) for p, plane in enumerate(group.planes)),
        key=lambda entry: entry.plane.offset_bytes,
    )
    first = last = placed[0]  # of the planes that overlap: the one that begins first, the one whose rows end last
    widest: dict[int, _Placed] = {}  # and that of each group
    end_bytes = first.plane.end_bytes
    for entry in placed:
        plane = entry.plane
        if plane.offset_bytes >= end_bytes:
            first, last, widest = entry, entry, {}
        elif not _in_stride(first.plane, plane):
            raise LayoutError(
                f"{entry.name} shares bytes with {first.name}: overlapping planes must have one row_stride_bytes, and "
                "row r of each must lie within the same stride"
            )
        # Planes that reach this one's first byte share that byte, so they have been paired with each other: one pair
        # with the last of them joins it to all, and thousands of planes cost no more than thousands of pairs.
        own = widest.get(entry.group)
        for other in (own, last if last is not own else None):
            if other is not None and other is not entry and plane.offset_bytes < _row_end(other.plane):
                yield entry, other
        if own is None or _row_end(plane) > _row_end(own.plane):
            widest[entry.group] = entry
        if _row_end(plane) > _row_end(last.plane):
            last = entry
        end_bytes = max(end_bytes, plane.end_bytes)


def _row_end(plane: Plane) -> int:
    """First byte after row 0."""
    return plane.offset_bytes + plane.row_bytes


def _in_stride(first: Plane, plane: Plane) -> bool:
    """Whether every row of `plane` lies within the stride that begins with the same row of `first`."""
    return (
        first.row_stride_bytes == plane.row_stride_bytes
        and _row_end(plane) <= first.offset_bytes + first.row_stride_bytes
    )


def interned(layouts: Sequence[StageLayout]) -> tuple[StageLayout, ...]:
    """The same layouts, equal ones as one object: most engines have one or two kinds of stages, and what an operation
    asks of a layout can then be asked once a kind.
    """
    kinds: list[StageLayout] = []
    found: list[StageLayout] = []
    for layout in layouts:
        known = next((kind for kind in kinds if kind == layout), None)
        if known is None:
            kinds.append(known := layout)
        found.append(known)
    return tuple(found)


def layer_groups(planes: Sequence[Plane], count: int, planes_per_layer: int = 1) -> tuple[RowGroup, ...]:
    """The planes of a stage, layer after layer, as `count` groups of neighbouring layers, for a restore that tells of
    each (or as many as there are layers, where those are fewer). All are addressed by the same rows.

    Raises:
        ValueError: the planes are no whole number of layers, or there are none, or `count` is below 1.
    """
    layers, rest = divmod(len(planes), max(planes_per_layer, 1))
    if rest or not layers or count < 1 or planes_per_layer < 1:
        raise ValueError(
            f"{len(planes)} planes of {planes_per_layer} a layer cannot make {count} groups of whole layers"
        )
    count = min(count, layers)
    ends = [layers * number // count * planes_per_layer for number in range(count + 1)]
    return tuple(RowGroup(tuple(planes[start:end])) for start, end in itertools.pairwise(ends))


def one_group(planes: Iterable[Plane]) -> tuple[RowGroup, ...]:
    """The groups of a stage all of whose planes are addressed by the same rows, without a window."""
    return (RowGroup(tuple(planes)),)
