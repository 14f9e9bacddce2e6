"""Operations in flight and their states.

::

    WAITING --start--> COPYING --publish--> PUBLISHED      (capture)
       |                  |-----restore---> RESTORED       (restore, take)
       '------fail--------'-----fail------> FAILED

    a stage:  PENDING --send--> SENT --free--> FREE --done--> DONE
                 |                '------done---------------->'
                 '--skip--> UNTOUCHED     SENT, FREE --fail--> FAILED

An operation fails only after every stage that was sent has answered or its worker is proven gone.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ipc.messages import StageOutcome
from shm.extent import ChunkPlace
from shm.layout import ChunkSpan
from shm.rows import RowRuns
from stratad.core.catalog import Chunk, Image, Scope, Staged, StageDigests
from stratad.core.failures import InvalidTransition


class OpKind(Enum):
    """What an operation does."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    CAPTURE = "capture"
    RESTORE = "restore"
    TAKE = "take"


class OpState(Enum):
    """Where an operation is."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    WAITING = "waiting"
    COPYING = "copying"
    PUBLISHED = "published"
    RESTORED = "restored"
    FAILED = "failed"


class StageState(Enum):
    """Where one stage of an operation is."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every table look-up

    PENDING = "pending"
    SENT = "sent"
    FREE = "free"
    DONE = "done"
    FAILED = "failed"
    UNTOUCHED = "untouched"


OP_MOVES: Final[dict[OpState, dict[str, OpState]]] = {
    OpState.WAITING: {"start": OpState.COPYING, "fail": OpState.FAILED},
    OpState.COPYING: {"publish": OpState.PUBLISHED, "restore": OpState.RESTORED, "fail": OpState.FAILED},
    OpState.PUBLISHED: {},
    OpState.RESTORED: {},
    OpState.FAILED: {},
}

STAGE_MOVES: Final[dict[StageState, dict[str, StageState]]] = {
    StageState.PENDING: {"send": StageState.SENT, "skip": StageState.UNTOUCHED},
    StageState.SENT: {"free": StageState.FREE, "done": StageState.DONE, "fail": StageState.FAILED},
    StageState.FREE: {"done": StageState.DONE, "fail": StageState.FAILED},
    StageState.DONE: {},
    StageState.FAILED: {},
    StageState.UNTOUCHED: {},
}

RUNNING: Final = frozenset({StageState.SENT, StageState.FREE})


@dataclass(slots=True, eq=False)
class StageRun:
    """One stage of an operation. `packed_rows` and `runs` are in token order; `spans` are the chunks of the image."""

    stage: int
    worker: str
    packed_rows: bytes
    runs: RowRuns
    spans: tuple[ChunkSpan, ...]
    state_slot: int
    state: StageState = StageState.PENDING
    job: int = 0
    deadline_s: float = 0.0
    job_bytes: int = 0
    answer: StageDigests | None = None
    outcome: StageOutcome | None = None

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
    """A capture, restore or take. `deadline_s` is when the caller stops waiting (monotonic seconds)."""

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
    state_position: int = -1
    staged: Staged | None = None
    image: Image | None = None
    chunks: tuple[Chunk, ...] = ()
    image_tokens: int = 0
    state: OpState = OpState.WAITING
    cancelled: bool = False
    told_accepted: bool = False
    told_free: bool = False
    waits_for: str = ""
    fenced: set[int] = field(default_factory=set)

    def advance(self, event: str) -> None:
        """Make a move of the table.

        Raises:
            InvalidTransition: the table has no such move; nothing was changed.
        """
        state = OP_MOVES[self.state].get(event)
        if state is None:
            raise InvalidTransition(f"operation {self.op_id}", self.state.value, event)
        self.state = state

    @property
    def writes_rows(self) -> bool:
        """Whether it writes device rows (restore, take) or reads them (capture)."""
        return self.kind is not OpKind.CAPTURE

    @property
    def outcomes(self) -> tuple[StageOutcome, ...]:
        """How every stage ended so far."""
        return tuple(
            run.outcome if run.outcome is not None else StageOutcome(run.stage, "untouched") for run in self.stages
        )

    def places(self, run: StageRun) -> tuple[ChunkPlace, ...]:
        """Where the chunks of a stage lie."""
        if self.staged is not None:
            return self.staged.places[run.stage]
        assert self.image is not None
        return tuple(chunk.place for chunk in self.image.stages[run.stage])
