"""Clean marks: what the slots of an engine hold by its own word, and which bytes those were.

A mark with contents declares that a slot's rows hold a conversation up to some token. Its digests are made when it is
marked, chunk by chunk; what a chunk holds later is known only by digesting it again. Chunks that an earlier mark of
the same slot and conversation declared are taken over, but for those with its last token: engines compute that token
once more when they go on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ipc.messages import TOKEN_BYTES
from shm.layout import ChunkSpan, StageLayout
from shm.row_spaces import SpaceRows
from shm.rows import RUN_BYTES, RowList, RowRuns, row_count, unpack_rows
from stratad.core.images import StageDigests
from stratad.core.row_lists import CutRows

# What all marks may take of the supervisor's memory: some fifty conversations of 100,000 tokens in single blocks.
CLEAN_BYTES_LIMIT: Final = 64 * 1024 * 1024
# Of one digest, of one run of rows in its forms, and of all else that a stage has (as Python objects). The last
# also bounds how many marks there can be: each is compared with the rows of every operation that writes.
_DIGEST_BYTES: Final = 64
_RUN_BYTES: Final = 256
_STAGE_BYTES: Final = 4096


@dataclass(slots=True, eq=False)
class CleanMark:
    """The declared contents of a slot. `order` counts the marks of a daemon; `digests` are there, for every stage, once
    the mark holds. `rows` and `spaces` (the same for comparing) have one entry a stage.
    """

    order: int
    slot: int
    conversation: str
    tokens: bytes
    positions: tuple[int, ...]
    points: tuple[int, ...] | None
    rows: tuple[CutRows, ...]
    spaces: tuple[SpaceRows, ...]
    chunk_count: int
    run_count: int
    digests: tuple[StageDigests, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens that it declares."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def cost_bytes(self) -> int:
        """What it takes of the supervisor's memory, about."""
        lists_bytes = self.chunk_count * _DIGEST_BYTES + self.run_count * _RUN_BYTES
        return len(self.tokens) + lists_bytes + len(self.rows) * _STAGE_BYTES


class Marking(NamedTuple):
    """A mark in the making: by stage, which chunks have to be digested, and the digests of all others (of those that
    are `asked` for: none).
    """

    mark: CleanMark
    former: CleanMark | None
    asked: tuple[tuple[int, ...], ...]
    known: tuple[tuple[bytes, ...], ...]

    def whole(self, answers: Sequence[StageDigests]) -> tuple[StageDigests, ...] | None:
        """The digests of every chunk, out of the stages' answers; None where those were made in another way than the
        digests that are known.
        """
        found: list[StageDigests] = []
        for stage, (asked, known, answer) in enumerate(zip(self.asked, self.known, answers, strict=True)):
            if self.former is not None and any(known):
                before = self.former.digests[stage]
                if (before.algorithm, before.key_id) != (answer.algorithm, answer.key_id):
                    return None
            every = list(known)
            for number, digest in zip(asked, answer.digests, strict=True):
                every[number] = digest
            found.append(StageDigests(answer.algorithm, answer.key_id, tuple(every)))
        return tuple(found)


@dataclass(slots=True, eq=False)
class Rescue:
    """The rescue of an engine whose client has gone. Until the process (`pid`) is `proven` gone nothing is read; it
    ends at `end_s`. `waiting` are the marks still to be looked at, latest first; None: not begun. `over` says that
    nothing more is to be started.
    """

    pid: int
    end_s: float
    proven: bool = False
    over: bool = False
    waiting: list[CleanMark] | None = None
    slots: int = 0
    images: int = 0

    def describe(self) -> str:
        """How far it is, in words."""
        if not self.proven:
            return f"waits for the end of process {self.pid}"
        if self.over:
            return "ends"
        left = self.slots if self.waiting is None else len(self.waiting)
        return f"{self.slots - left} of {self.slots} slots, {self.images} images"


@dataclass(slots=True)
class CleanMarks:
    """The marks of one engine that hold, by slot."""

    by_slot: dict[int, CleanMark] = field(default_factory=dict)

    @property
    def cost_bytes(self) -> int:
        """What they take of the supervisor's memory, about."""
        return sum(mark.cost_bytes for mark in self.by_slot.values())

    @property
    def tokens(self) -> int:
        """Tokens that they declare."""
        return sum(mark.token_count for mark in self.by_slot.values())

    def latest_first(self) -> list[CleanMark]:
        """All of them in the order of a rescue."""
        return sorted(self.by_slot.values(), key=lambda mark: -mark.order)


def plan_marking(
    layouts: Sequence[StageLayout],
    spans: Sequence[Sequence[ChunkSpan]],
    mark: CleanMark,
    former: CleanMark | None,
) -> Marking:
    """Which chunks of a new mark must be digested. `spans` are its chunks by stage."""
    if former is not None and former.conversation != mark.conversation:
        former = None
    common = 0 if former is None else min(_common_tokens(former.tokens, mark.tokens), former.token_count - 1)
    asked: list[tuple[int, ...]] = []
    known: list[tuple[bytes, ...]] = []
    before: dict[int, list[ChunkSpan]] = {}  # the former mark's chunks, by the layout that they are of
    for stage, (layout, mine) in enumerate(zip(layouts, spans, strict=True)):
        found: dict[tuple[int, int, int], bytes] = {}
        if former is not None:
            if id(layout) not in before:
                before[id(layout)] = layout.chunks(former.token_count, former.positions)
            agreed = [
                min(common, _agreed_tokens(layout, number, former, mark, stage)) for number in range(len(layout.groups))
            ]
            found = _declared(before[id(layout)], former.digests[stage], agreed)
        digests = tuple(found.get(_same(span), b"") for span in mine)
        asked.append(tuple(number for number, digest in enumerate(digests) if not digest))
        known.append(digests)
    return Marking(mark, former, tuple(asked), tuple(known))


def _same(span: ChunkSpan) -> tuple[int, int, int]:
    """What two chunks of rows have in common that hold the same tokens."""
    return span.group, span.first_token, span.token_count


def _declared(
    spans: Sequence[ChunkSpan], digests: StageDigests, agreed: Sequence[int]
) -> dict[tuple[int, int, int], bytes]:
    """The digests of those chunks of rows that end within the first ``agreed[group]`` tokens."""
    return {
        _same(span): digest
        for span, digest in zip(spans, digests.digests, strict=True)
        if not span.is_state and span.first_token + span.token_count <= agreed[span.group]
    }


def _agreed_tokens(layout: StageLayout, number: int, former: CleanMark, mark: CleanMark, stage: int) -> int:
    """The first token that lies in another row than before, of those that both marks hold of a group."""
    group = layout.groups[number]
    starts = [group.first_token(one.token_count) // group.tokens_per_row for one in (former, mark)]
    start = max(starts)
    mine, theirs = (one.rows[stage].lists[number] for one in (former, mark))
    same = _same_rows(mine, start - starts[0], theirs, start - starts[1])
    return (start + same) * group.tokens_per_row


def _same_rows(mine: RowList, skip_a: int, theirs: RowList, skip_b: int) -> int:
    """How many rows two lists have in common, after so many rows of each."""
    same = 0
    equal = RUN_BYTES * max(min(mine.run_count, theirs.run_count) - 1, 0)
    a: RowRuns
    b: RowRuns
    if not (skip_a or skip_b) and mine.packed[:equal] == theirs.packed[:equal]:
        # The usual case, without a line of Python for each run.
        same = row_count(unpack_rows(mine.packed[:equal]))
        a, b = unpack_rows(mine.packed[equal:]), unpack_rows(theirs.packed[equal:])
    else:
        a, b = mine.runs, theirs.runs
    at_a, at_b = iter(a), iter(b)
    (first_a, left_a), (first_b, left_b) = _skip(at_a, skip_a), _skip(at_b, skip_b)
    while left_a and left_b and first_a == first_b:
        step = min(left_a, left_b)
        same += step
        first_a, left_a = (first_a + step, left_a - step) if left_a > step else next(at_a, (0, 0))
        first_b, left_b = (first_b + step, left_b - step) if left_b > step else next(at_b, (0, 0))
    return same


def _skip(runs: Iterator[tuple[int, int]], rows: int) -> tuple[int, int]:
    """The rest of the run that holds the row after `rows` rows; (0, 0) past the end."""
    for first, count in runs:
        if rows < count:
            return first + rows, count - rows
        rows -= count
    return 0, 0


def _common_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens that two packed lists share."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // TOKEN_BYTES
    low, high = 0, shorter // TOKEN_BYTES  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
