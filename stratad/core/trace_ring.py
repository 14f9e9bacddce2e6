"""What is kept of the latest operations: when each of their steps was, in a ring of bounded bytes.

An entry costs as little as can be while operations end; what people read is made of it when they ask. What the shell
does after an event (hand a command over, write a record, send a reply) the core does not see: the shell notes it here.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ipc.messages import StageOutcome

RING_BYTES: Final = 4 * 1024 * 1024
# What entries take, measured with ten thousand operations of one to eight stages (CPython 3.11, x86-64), rounded up.
# A character of a conversation's name has four bytes at most.
OP_BYTES: Final = 640
STAGE_BYTES: Final = 640
CHARACTER_BYTES: Final = 4
# Replies that the shell has not sent yet; more are waited for only if it never will.
UNANSWERED_LIMIT: Final = 256


# One stage: its worker, the bytes asked of it, when its job was sent and when that was answered (monotonic; 0: never),
# and its outcome, which has the worker's own times.
StageTrace: TypeAlias = tuple[str, int, float, float, StageOutcome]


@dataclass(slots=True, eq=False)
class OpTrace:
    """One operation that has ended, with `code` if it failed. Instants are monotonic; `replied_s` is its end until the
    shell has sent the reply. `journal_s` of the time from its last stage to the reply went into its record. It takes
    `held_bytes`.
    """

    op_id: int
    kind: str
    namespace: str
    conversation: str
    engine_id: int
    token_count: int
    code: str
    created_s: float
    replied_s: float
    journal_s: float
    stages: tuple[StageTrace, ...]
    held_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.held_bytes = OP_BYTES + CHARACTER_BYTES * len(self.conversation) + STAGE_BYTES * len(self.stages)

    @property
    def total_s(self) -> float:
        """From the turn in which it was taken in to its reply."""
        return self.replied_s - self.created_s


@dataclass(slots=True)
class TraceRing:
    """The entries, oldest first, and what the shell has noted of operations that have not ended. `forgotten` made room
    for later ones since it was switched on.
    """

    on: bool = False
    since_s: float = 0.0
    entries: deque[OpTrace] = field(default_factory=deque)
    held_bytes: int = 0
    forgotten: int = 0
    sent_s: dict[int, float] = field(default_factory=dict)  # of jobs under way
    append_s: float = 0.0
    unanswered: dict[tuple[int, int], OpTrace] = field(default_factory=dict)  # by client and request

    def switch(self, now_s: float, *, on: bool) -> bool:
        """Begin with an empty ring, or keep what there is and add no more; whether that is a change."""
        if on is self.on:
            return False
        self.on = on
        if on:
            self.since_s = now_s
            self.entries.clear()
            self.held_bytes = self.forgotten = 0
        self.sent_s.clear()
        self.unanswered.clear()
        return True

    def add(self, entry: OpTrace) -> None:
        """Keep an entry, and as many of those before it as there is room for."""
        self.entries.append(entry)
        self.held_bytes += entry.held_bytes
        while self.held_bytes > RING_BYTES:
            self.held_bytes -= self.entries.popleft().held_bytes
            self.forgotten += 1

    def await_reply(self, client: int, seq: int, entry: OpTrace) -> None:
        """The shell will say when the reply is sent."""
        if len(self.unanswered) >= UNANSWERED_LIMIT:
            self.unanswered.clear()
        self.unanswered[client, seq] = entry

    def note_sent(self, job: int, now_s: float) -> None:
        """A job is about to be handed over to its worker's socket."""
        self.sent_s[job] = now_s

    def note_append(self, took_s: float) -> None:
        """The record that the next event is about took so long to write."""
        self.append_s = took_s

    def take_append_s(self) -> float:
        """What was noted last, once."""
        took_s, self.append_s = self.append_s, 0.0
        return took_s

    def note_reply(self, client: int, seq: int, now_s: float) -> None:
        """A reply was sent."""
        entry = self.unanswered.pop((client, seq), None)
        if entry is not None:
            entry.replied_s = now_s

    def validate(self, jobs: frozenset[int]) -> None:
        """Check the ring by a recount; `jobs` are under way.

        Raises:
            AssertionError: our bug.
        """
        assert self.held_bytes == sum(entry.held_bytes for entry in self.entries) <= RING_BYTES
        assert self.sent_s.keys() <= jobs, f"noted of jobs that have ended: {set(self.sent_s) - jobs}"
        assert not self.sent_s or self.on
