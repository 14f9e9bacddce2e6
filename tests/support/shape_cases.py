"""Whole cases for whoever moves bytes: a layout of any shape, an operation on it, and what that must do, byte by byte.

The model knows nothing of runs, pieces, tables or kernels. It asks of each byte of a row which token it belongs to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from ipc.messages import CaptureJob, CopyJob, DigestJob, RestoreJob
from shm.extent import ChunkPlace, pack_places
from shm.layout import ChunkSpan, Plane, RowGroup, StageLayout, StateGroup, check_layout
from shm.rows import pack_numbers, pack_rows, runs_of

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]


def pack_groups(rows: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    """Rows of every group as they travel."""
    return tuple(pack_rows(runs_of(group)) for group in rows)


@dataclass(frozen=True)
class Case:
    """An operation on `tokens` tokens with states at `positions`.

    `rows` has the rows of each group in the order of the tokens (of a state group: the slot of each checkpoint),
    `target` as many others for copies and restores. A restore may stop at any of `prefixes`.
    """

    layout: StageLayout
    pool_bytes: int
    tokens: int
    positions: tuple[int, ...]
    rows: Rows
    target: Rows
    prefixes: tuple[int, ...]

    @property
    def spans(self) -> list[ChunkSpan]:
        """The chunks of the image."""
        return self.layout.chunks(self.tokens, self.positions)

    def target_of(self, tokens: int) -> Rows:
        """Rows of a restore of the first `tokens` tokens: one slot a state, if there is one at all."""
        groups = self.layout.groups
        rows = [target[: group.rows_for(tokens)] for group, target in zip(groups, self.target, strict=False)]
        return (*rows, *(slots[:1] for slots in self.target[len(groups) :]))

    def capture_job(self, places: Sequence[ChunkPlace]) -> CaptureJob:
        """The capture of `rows`."""
        points = pack_numbers(self.positions)
        return CaptureJob(1, 1, pack_groups(self.rows), self.tokens, pack_places(places), False, points)

    def restore_job(
        self, places: Sequence[ChunkPlace], digests: bytes, tokens: int, algorithm: str = "xxh3-128"
    ) -> RestoreJob:
        """The restore of the first `tokens` tokens to `target`."""
        return RestoreJob(
            2,
            1,
            pack_groups(self.target_of(tokens)),
            self.tokens,
            tokens,
            pack_places(places),
            digests,
            (algorithm,),
            False,
            pack_numbers(self.positions),
        )

    def copy_job(self) -> CopyJob:
        """The copy of `rows` to `target`."""
        points = pack_numbers(self.positions)
        return CopyJob(3, 1, pack_groups(self.rows), pack_groups(self.target), self.tokens, False, points)

    def digest_job(self, wanted: Sequence[int]) -> DigestJob:
        """Digests of some chunks of `rows`."""
        points = pack_numbers(self.positions)
        return DigestJob(4, 1, pack_groups(self.rows), self.tokens, pack_numbers(wanted), False, points)

    def chunk(self, memory: Bytes, span: ChunkSpan) -> bytes:
        """What a chunk of the image holds: the tokens' bytes in gathered order, zeros after the last one."""
        group = self.layout.all_groups[span.group]
        out = bytearray()
        for plane in group.planes:
            for nth in range(span.row_count):
                start = plane.offset_bytes + self.rows[span.group][span.first_row + nth] * plane.row_stride_bytes
                for byte in range(plane.row_bytes):
                    live = span.is_state or nth * plane.tokens_per_row + _token(plane, byte) < span.token_count
                    out.append(memory[start + byte] if live else 0)
        return bytes(out)

    def restored(self, memory: Bytes, image_of: Bytes, tokens: int) -> Bytes:
        """`memory` after a restore of the first `tokens` tokens of an image of `rows` in `image_of`."""
        out = memory.copy()
        self._move(out, image_of, tokens, self.target_of(tokens))
        if self.positions:
            checkpoint = self.positions.index(tokens)
            for number, group in self._states():
                _move_row(group, out, self.target[number][0], image_of, self.rows[number][checkpoint])
        return out

    def copied(self, memory: Bytes, spans: Sequence[ChunkSpan] | None = None) -> Bytes:
        """`memory` after the copy of some chunks (None: all) from `rows` to `target`."""
        out = memory.copy()
        for span in self.spans if spans is None else spans:
            rows = slice(span.first_row, span.first_row + span.row_count)
            pairs = list(zip(self.rows[span.group][rows], self.target[span.group][rows], strict=True))
            for plane in self.layout.all_groups[span.group].planes:
                for nth, (source, target) in enumerate(pairs):
                    for byte in range(plane.row_bytes):
                        if span.is_state or nth * plane.tokens_per_row + _token(plane, byte) < span.token_count:
                            start = plane.offset_bytes + byte
                            out[start + target * plane.row_stride_bytes] = memory[
                                start + source * plane.row_stride_bytes
                            ]
        return out

    def targets(self, spans: Sequence[ChunkSpan]) -> Rows:
        """Rows of each group that a copy of some chunks writes."""
        numbers = range(len(self.target))
        ends = [max((s.first_row + s.row_count for s in spans if s.group == number), default=0) for number in numbers]
        return tuple(rows[:end] for rows, end in zip(self.target, ends, strict=True))

    def _states(self) -> list[tuple[int, StateGroup]]:
        return list(enumerate(self.layout.states, len(self.layout.groups)))

    def _move(self, out: Bytes, image_of: Bytes, tokens: int, target: Rows) -> None:
        for number, group in enumerate(self.layout.groups):
            first = max(0, self.tokens - group.window_tokens) if group.window_tokens else 0
            first_row = first // group.tokens_per_row
            for nth, (source, to) in enumerate(zip(self.rows[number], target[number], strict=False)):
                for plane in group.planes:
                    for byte in range(plane.row_bytes):
                        if (first_row + nth) * plane.tokens_per_row + _token(plane, byte) < tokens:
                            start = plane.offset_bytes + byte
                            out[start + to * plane.row_stride_bytes] = image_of[start + source * plane.row_stride_bytes]


def _token(plane: Plane, byte: int) -> int:
    """Which token of its row a byte belongs to; the first one where that is not known (rows are then taken whole)."""
    return byte // plane.token_stride_bytes if plane.token_stride_bytes else 0


def _move_row(group: StateGroup, out: Bytes, target: int, image_of: Bytes, source: int) -> None:
    for plane in group.planes:
        for byte in range(plane.offset_bytes, plane.offset_bytes + plane.row_bytes):
            out[byte + target * plane.row_stride_bytes] = image_of[byte + source * plane.row_stride_bytes]


class _Wish(NamedTuple):
    """A group to be placed: its planes' row bytes and where tokens lie in them."""

    is_state: bool
    tokens_per_row: int
    window_tokens: int
    rows: list[tuple[int, int]]

    @property
    def locates(self) -> bool:
        return self.tokens_per_row == 1 or all(stride for _, stride in self.rows)


@st.composite
def _row_wishes(draw: st.DrawFn, grain: int) -> _Wish:
    per_row = draw(st.integers(1, 16))
    heads = draw(st.sampled_from([1, 1, 2, 4]))  # above 1: head-major, so many planes for each of K and V
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3 if heads == 1 else 1))
    locating = per_row == 1 or draw(st.integers(0, 3)) > 0
    rows = [(per_row * size * grain, size * grain if locating else 0) for size in sizes for _ in range(heads)]
    return _Wish(False, per_row, draw(st.sampled_from([0, 0, 1, 7, 20])), rows)


@st.composite
def _state_wishes(draw: st.DrawFn, grain: int) -> _Wish:
    return _Wish(True, 1, 0, [(size * grain, 0) for size in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))])


def _unit(wishes: Sequence[_Wish]) -> int:
    return math.lcm(*(wish.tokens_per_row for wish in wishes if not wish.is_state and not wish.locates))


def _located(wishes: list[_Wish]) -> list[_Wish]:
    """The same, but where blocks that cannot locate tokens never end together within a short image, they can."""
    while _unit(wishes) > 32:
        number = next(n for n, wish in enumerate(wishes) if not wish.is_state and not wish.locates)
        wish = wishes[number]
        wishes[number] = wish._replace(rows=[(size, size // wish.tokens_per_row) for size, _ in wish.rows])
    return wishes


class _Placing:
    """Places groups one space after another."""

    def __init__(self, draw: st.DrawFn, grain: int) -> None:
        self.draw, self.grain = draw, grain
        self.at = draw(st.integers(0, 3)) * grain
        self.planes: dict[int, list[Plane]] = {}
        self._gaps: dict[int, list[int]] = {}

    def place(self, members: Sequence[tuple[int, _Wish]], rows: int) -> None:
        """Place the groups of one space, numbered, with `rows` rows; several of them begin at the same byte."""
        if len(members) > 1 or self.draw(st.booleans()):
            inside = [self._inside(number, wish) for number, wish in members]
            stride = max(inside) + self._gap()
            for number, wish in members:
                self._interleave(number, wish, stride, rows)
            self.at += rows * stride
        else:
            for number, wish in members:
                for size, token in wish.rows:
                    stride = size + self._gap()
                    self._add(number, Plane(self.at, size, stride, rows, wish.tokens_per_row, token))
                    self.at += rows * stride + self._gap()

    def _inside(self, number: int, wish: _Wish) -> int:
        self._gaps[number] = [self._gap() for _ in wish.rows]
        return sum(size for size, _ in wish.rows) + sum(self._gaps[number])

    def _interleave(self, number: int, wish: _Wish, stride: int, rows: int) -> None:
        inside = 0
        for (size, token), gap in zip(wish.rows, self._gaps[number], strict=True):
            self._add(number, Plane(self.at + inside, size, stride, rows, wish.tokens_per_row, token))
            inside += size + gap

    def _add(self, number: int, plane: Plane) -> None:
        self.planes.setdefault(number, []).append(plane)

    def _gap(self) -> int:
        return self.draw(st.sampled_from([0, 0, 1, 3])) * self.grain


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 48) -> Case:
    """Any case; see the module's text."""
    grain = draw(st.sampled_from([1, 4, 16]))
    wishes = draw(st.lists(_row_wishes(grain), max_size=3))
    wishes = _located(wishes + draw(st.lists(_state_wishes(grain), min_size=0 if wishes else 1, max_size=2)))
    states = any(wish.is_state for wish in wishes)
    unit = _unit(wishes)
    tokens = draw(st.integers(1, max(1, max_tokens // unit))) * unit
    places = st.integers(1, tokens // unit).map(lambda n: n * unit)
    positions = tuple(sorted(draw(st.sets(places, min_size=1, max_size=3)))) if states else ()
    needed = [_rows_for(wish, tokens, len(positions)) for wish in wishes]

    # Which groups share their rows: mostly none do.
    space_of = [draw(st.sampled_from([number, number, 0])) for number in range(len(wishes))]
    placing = _Placing(draw, grain)
    rows: list[tuple[int, ...]] = [()] * len(wishes)
    target: list[tuple[int, ...]] = [()] * len(wishes)
    for space in draw(st.permutations(sorted(set(space_of)))):
        members = [number for number in range(len(wishes)) if space_of[number] == space]
        count = 2 * sum(needed[number] for number in members) + draw(st.integers(0, 2))
        placing.place([(number, wishes[number]) for number in members], max(1, count))
        free = list(range(count)) if draw(st.booleans()) else list(draw(st.permutations(range(count))))
        for number in members:
            rows[number], free = tuple(free[: needed[number]]), free[needed[number] :]
        for number in members:
            target[number], free = tuple(free[: needed[number]]), free[needed[number] :]
    groups = [(n, RowGroup(tuple(placing.planes[n]), w.window_tokens)) for n, w in enumerate(wishes) if not w.is_state]
    layout = StageLayout(
        tuple(group for _, group in groups),
        tuple(StateGroup(tuple(placing.planes[n])) for n, wish in enumerate(wishes) if wish.is_state),
        draw(st.integers(1, 40)),
    )
    pool_bytes = layout.end_bytes + draw(st.integers(0, 3))
    check_layout(layout, pool_bytes)
    lengths = positions or tuple(range(0, tokens + 1, unit))
    prefixes = tuple(n for n in lengths if _holds(wishes, n, tokens))
    return Case(layout, pool_bytes, tokens, positions, tuple(rows), tuple(target), prefixes)


def _held(wish: _Wish, tokens: int) -> range:
    """Rows of the tokens that a group keeps, counted from the beginning of the conversation."""
    first = max(0, tokens - wish.window_tokens) if wish.window_tokens else 0
    return range(first // wish.tokens_per_row, -(-tokens // wish.tokens_per_row))


def _rows_for(wish: _Wish, tokens: int, checkpoints: int) -> int:
    return checkpoints if wish.is_state else len(_held(wish, tokens))


def _holds(wishes: Sequence[_Wish], tokens: int, image_tokens: int) -> bool:
    """Whether no row that `tokens` tokens need has left a window."""
    return all(_held(wish, tokens).start == _held(wish, image_tokens).start for wish in wishes if not wish.is_state)
