"""Operations in flight and their states.

::

    WAITING --start--> COPYING --publish--> PUBLISHED      (capture, slot_to, rescue)
       |                  |------store----> STORED         (put_part)
       |                  |-----restore---> RESTORED       (restore, take, slot_from, get_part)
       |                  |-----copy------> COPIED         (slot_direct)
       |                  |----declare----> DECLARED       (mark)
       '------fail--------'-----fail------> FAILED

    a stage:  PENDING --send--> SENT --free--> FREE --done--> DONE
                 |              ^ |'-----done---------------->'
                 |          send| |miss
                 |              MISSED
                 '--skip--> UNTOUCHED     SENT, FREE, MISSED --fail--> FAILED

A capture's stage that has missed waits for extents for chunks of which its worker has found that they are not what
they were expected to be; then it is sent again, with these alone.

An operation fails only after every stage that was sent has answered or its worker is proven gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ipc.messages import StageOutcome
from shm.extent import ChunkPlace
from shm.layout import ChunkSpan
from stratad.core.clean_marks import CleanMark, Marking
from stratad.core.failures import InvalidTransition
from stratad.core.images import Chunk, Hints, Image, Scope, Staged, StageDigests
from stratad.core.puts import Piece
from stratad.core.row_lists import CutRows


class OpKind(Enum):
    """What an operation does. The three slot copies move a conversation between rows of one engine: `SLOT_DIRECT` on
    the devices, `SLOT_TO` and `SLOT_FROM` by way of a transit image in shuttles. `PUT_PART` and `GET_PART` move a piece
    of a part between an exchange and shuttles. `MARK` digests a slot where it lies; `RESCUE` captures what a dead
    engine had marked, in nobody's name.
    """

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    CAPTURE = "capture"
    RESTORE = "restore"
    TAKE = "take"
    SLOT_DIRECT = "slot_direct"
    SLOT_TO = "slot_to"
    SLOT_FROM = "slot_from"
    PUT_PART = "put_part"
    GET_PART = "get_part"
    MARK = "mark"
    RESCUE = "rescue"


class OpState(Enum):
    """Where an operation is."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    WAITING = "waiting"
    COPYING = "copying"
    PUBLISHED = "published"
    STORED = "stored"
    RESTORED = "restored"
    COPIED = "copied"
    DECLARED = "declared"
    FAILED = "failed"


class StageState(Enum):
    """Where one stage of an operation is."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    PENDING = "pending"
    SENT = "sent"
    FREE = "free"
    MISSED = "missed"
    DONE = "done"
    FAILED = "failed"
    UNTOUCHED = "untouched"


OP_MOVES: Final[dict[OpState, dict[str, OpState]]] = {
    OpState.WAITING: {"start": OpState.COPYING, "fail": OpState.FAILED},
    OpState.COPYING: {
        "publish": OpState.PUBLISHED,
        "store": OpState.STORED,
        "restore": OpState.RESTORED,
        "copy": OpState.COPIED,
        "declare": OpState.DECLARED,
        "fail": OpState.FAILED,
    },
    OpState.PUBLISHED: {},
    OpState.STORED: {},
    OpState.RESTORED: {},
    OpState.COPIED: {},
    OpState.DECLARED: {},
    OpState.FAILED: {},
}

STAGE_MOVES: Final[dict[StageState, dict[str, StageState]]] = {
    StageState.PENDING: {"send": StageState.SENT, "skip": StageState.UNTOUCHED},
    StageState.SENT: {
        "free": StageState.FREE,
        "miss": StageState.MISSED,
        "done": StageState.DONE,
        "fail": StageState.FAILED,
    },
    StageState.FREE: {"done": StageState.DONE, "fail": StageState.FAILED},
    StageState.MISSED: {"send": StageState.SENT, "fail": StageState.FAILED},
    StageState.DONE: {},
    StageState.FAILED: {},
    StageState.UNTOUCHED: {},
}

RUNNING: Final = frozenset({StageState.SENT, StageState.FREE})  # at their worker
ACTIVE: Final = RUNNING | {StageState.MISSED}
CAPTURING: Final = frozenset({OpKind.CAPTURE, OpKind.SLOT_TO, OpKind.PUT_PART, OpKind.RESCUE})
READING: Final = CAPTURING | {OpKind.SLOT_DIRECT, OpKind.MARK}
WRITING: Final = frozenset({OpKind.RESTORE, OpKind.TAKE, OpKind.SLOT_FROM, OpKind.SLOT_DIRECT, OpKind.GET_PART})


@dataclass(slots=True, eq=False)
class StageRun:
    """One stage of an operation. `rows` are in token order, `spans` the chunks of the image. `target` are the rows
    that a copy from rows to rows writes; `generation` is its worker's when the operation began. `missed` are the
    numbers of the chunks that its second job has, or will have; `former` is how its first one ended.
    """

    stage: int
    worker: str
    rows: CutRows
    spans: tuple[ChunkSpan, ...]
    target: CutRows | None = None
    state: StageState = StageState.PENDING
    generation: int = 0
    job: int = 0
    deadline_s: float = 0.0
    patience_s: float = 0.0  # from its sending to `deadline_s`
    job_bytes: int = 0
    answer: StageDigests | None = None
    missed: tuple[int, ...] = ()
    former: StageOutcome | None = None
    outcome: StageOutcome | None = None
    sent_s: float = 0.0  # when it was sent and answered; 0: never
    done_s: float = 0.0

    @property
    def image_bytes(self) -> int:
        """Bytes of all its chunks."""
        return sum(span.length_bytes for span in self.spans)

    def take_answer(self, answer: StageDigests) -> None:
        """Note the digests of its job: of all chunks, or of those that it has missed, by the same worker."""
        if self.answer is None or not self.missed:
            self.answer = answer
            return
        digests = list(self.answer.digests)
        for number, digest in zip(self.missed, answer.digests, strict=True):
            digests[number] = digest
        self.answer = StageDigests(answer.algorithm, answer.key_id, tuple(digests))

    def advance(self, event: str) -> None:
        """Make a move of the table.

        Raises:
            InvalidTransition: the table has no such move; nothing was changed.
        """
        state = STAGE_MOVES[self.state].get(event)
        if state is None:
            raise InvalidTransition(f"stage {self.stage}", self.state.value, event)
        self.state = state


@dataclass(slots=True, eq=False)
class Operation:
    """What a client asked to have copied. `deadline_s` is when the caller stops waiting (monotonic seconds).
    `token_count` tokens of the image's `image_tokens` are copied; `positions` are those of its states, and `points` the
    numbers of tokens to which it can be restored (see `Image`). `chunks` are those of the image that it reads; of a
    `PUT_PART` `piece` is the piece that it stores, of a `MARK` `marking` what it is to declare, of a `RESCUE` `mark`
    what was declared. `hints` are what a capture that waits expects to be stored already, once it was `looked` for.
    A restore may find the first `resident_tokens` tokens in their rows. `need` are the granules that it has to reserve,
    by worker, and `shuttles` those that hold what it reads, by worker, once either was counted.
    """

    op_id: int
    kind: OpKind
    client: int
    seq: int
    engine_id: int
    scope: Scope
    conversation: str
    slot: int
    token_count: int
    ordered: str
    created_s: float
    deadline_s: float
    stages: tuple[StageRun, ...]
    tokens: bytes = b""
    positions: tuple[int, ...] = ()
    points: tuple[int, ...] | None = None
    keep: bool = False
    layered: bool = False
    source_slot: int = -1
    staged: Staged | None = None
    image: Image | None = None
    chunks: tuple[Chunk, ...] = ()
    image_tokens: int = 0
    state: OpState = OpState.WAITING
    cancelled: bool = False
    told_free: bool = False
    waits_for: str = ""
    fenced: set[int] = field(default_factory=set)
    runs_held: int = 0  # of `run_count`, while it is in flight
    hints: Hints | None = None
    looked: bool = False
    resident_tokens: int = 0
    need: dict[str, int] = field(default_factory=dict)
    shuttles: dict[str, set[int]] = field(default_factory=dict)
    piece: Piece | None = None
    lost: tuple[str, str] | None = None  # code and message: bytes that it counts on are gone
    marking: Marking | None = None
    mark: CleanMark | None = None
    code: str = ""  # why it failed

    def advance(self, event: str) -> None:
        """Make a move of the table.

        Raises:
            InvalidTransition: the table has no such move; nothing was changed.
        """
        state = OP_MOVES[self.state].get(event)
        if state is None:
            raise InvalidTransition(f"operation {self.op_id}", self.state.value, event)
        self.state = state

    def skip_pending(self) -> None:
        """Stages that were not sent yet never will be."""
        for run in self.stages:
            if run.state is StageState.PENDING:
                run.advance("skip")

    def forget_hints(self) -> None:
        """Look for hints again; what it needs is counted anew."""
        self.hints, self.looked, self.need = None, False, {}

    @property
    def captures(self) -> bool:
        """Whether it makes an image, or a piece of one."""
        return self.kind in CAPTURING

    @property
    def reads_rows(self) -> bool:
        """Whether it reads rows of a pool."""
        return self.kind in READING

    @property
    def writes_rows(self) -> bool:
        """Whether it writes rows of a pool."""
        return self.kind in WRITING

    def written(self, run: StageRun) -> CutRows | None:
        """The rows that a stage of it writes, if any."""
        return run.target or (run.rows if self.writes_rows else None)

    @property
    def run_count(self) -> int:
        """Runs of all its lists of rows; stages of one kind share theirs."""
        lists = {id(run.rows): run.rows for run in self.stages}
        lists.update({id(run.target): run.target for run in self.stages if run.target is not None})
        return sum([cut.run_count for cut in lists.values()])

    @property
    def outcomes(self) -> tuple[StageOutcome, ...]:
        """How every stage ended so far."""
        return tuple(
            run.outcome if run.outcome is not None else StageOutcome(run.stage, "untouched") for run in self.stages
        )

    def bytes_to_move(self, run: StageRun) -> int:
        """Bytes of the chunks that a stage copies. Of an image that has more tokens, or states at several positions, a
        restore leaves some out; a mark reads those that it has to digest.
        """
        if self.marking is not None or run.missed:
            return sum(span.length_bytes for span in self.digested(run))
        if self.image is None or (self.token_count == self.image_tokens and not self.positions):
            return sum(span.length_bytes for span in run.spans)
        end = self.token_count
        return sum(s.length_bytes for s in run.spans if (s.first_token == end if s.is_state else s.first_token < end))

    def digested(self, run: StageRun) -> Sequence[ChunkSpan]:
        """The chunks of a stage of which its worker answers the digests."""
        if self.marking is not None:
            return [run.spans[number] for number in self.marking.asked[run.stage]]
        if run.missed:
            return [run.spans[number] for number in run.missed]
        return run.spans if self.captures else ()

    def places(self, run: StageRun) -> tuple[ChunkPlace, ...]:
        """Where the chunks of a stage lie."""
        if self.staged is not None:
            return self.staged.places[run.stage]
        return tuple(chunk.place for chunk in self.stored(run))

    def count_shuttles(self) -> None:
        """Find out which shuttles hold the image that it reads. Chunks that are held stay where they are."""
        for run in self.stages:
            found = self.shuttles.setdefault(run.worker, set())
            found.update(extent.shuttle for place in self.places(run) for extent in place.extents)

    def stored(self, run: StageRun) -> tuple[Chunk, ...]:
        """The chunks of its image that a stage reads."""
        if self.kind is OpKind.GET_PART:
            return self.chunks
        assert self.image is not None
        return self.image.stages[run.stage]
