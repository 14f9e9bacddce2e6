"""What is watched of one process's memory: who it is, what is explained of it, and whether the rest is too much.

At one instant ``explained + residual = resident``. Each part (anonymous, shared, of files) is explained by claims in
order; a claim explains the least of its bound and what is left of its part, so the residual is never negative and a
bound that was not touched explains nothing that is not there.
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias

from ipc.messages import Memory
from stratad.core.memory_ring import Ring, Sample, series_bytes

# Watched at most; further engines are counted only. The daemon's own processes come first.
PROCESS_LIMIT: Final = 64
# Beside its fixed part, the tolerance is this share of the baseline: caches and arenas of the allocator grow with it.
BASELINE_SHARE: Final = 0.05

Part: TypeAlias = Literal["anon", "shmem", "file"]
PARTS: Final[tuple[Part, ...]] = ("anon", "shmem", "file")


class Role(Enum):
    """Kinds of processes."""

    SUPERVISOR = "supervisor"
    TEMPLATE = "template"
    WORKER = "worker"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """A sample every `sample_s` seconds, `keep` of them a process; a residual above `residual_warn_bytes` plus a share
    of the baseline for `warn_after` samples in a row is told.
    """

    sample_s: float = 5.0
    keep: int = 720
    residual_warn_bytes: int = 64 * 1024 * 1024
    warn_after: int = 3


class Target(NamedTuple):
    """A process to be read. Where `pid` is 0 the shell knows it (the template); `start_ticks` 0 takes any start.
    `fresh`: it has been given nothing yet, so all that it has is its own.
    """

    role: Role
    name: str
    pid: int
    start_ticks: int
    fresh: bool = False

    @property
    def key(self) -> tuple[Role, str]:
        """Names the place that the process fills, over restarts; engines are named by their process."""
        return (self.role, str(self.pid) if self.role is Role.ENGINE else self.name)


class Reading(NamedTuple):
    """What the kernel says of one process at this instant (bytes). `settled`: it has imported what it needs."""

    pid: int
    start_ticks: int
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    settled: bool = True

    @property
    def resident_bytes(self) -> int:
        """All parts."""
        return self.anon_bytes + self.shmem_bytes + self.file_bytes

    def part(self, part: Part) -> int:
        """One part."""
        match part:
            case "anon":
                return self.anon_bytes
            case "shmem":
                return self.shmem_bytes
            case "file":
                return self.file_bytes


class Claim(NamedTuple):
    """What we hold to be in one part of a process's memory, at most; `basis` as in `MemoryTerm`."""

    name: str
    part: Part
    bound_bytes: int
    basis: str


class Explained(NamedTuple):
    """A claim and the bytes that it explains."""

    claim: Claim
    explained_bytes: int


def explain(reading: Reading, claims: list[Claim]) -> list[Explained]:
    """Hand the resident bytes of each part out to its claims, in order."""
    left = {part: reading.part(part) for part in PARTS}
    terms: list[Explained] = []
    for claim in claims:
        taken = min(claim.bound_bytes, left[claim.part])
        left[claim.part] -= taken
        terms.append(Explained(claim, taken))
    return terms


class Baseline(NamedTuple):
    """What a process had resident when it had started up and served nobody yet."""

    anon_bytes: int
    shmem_bytes: int


class Turn(Enum):
    """What a judgement changed."""

    NONE = 0
    OPENED = 1
    CLOSED = 2


@dataclass(slots=True)
class Episode:
    """Whether a residual has been too large for long: it opens after `after` samples in a row above the tolerance and
    closes after as many in a row that are not. `since_unix_s` is the first of those that opened it.
    """

    after: int
    open: bool = False
    since_unix_s: float = 0.0
    _row: int = 0

    def judge(self, *, above: bool, now_unix_s: float) -> Turn:
        """One more sample."""
        if above is self.open:
            self._row = 0
            return Turn.NONE
        self._row += 1
        if above and self._row == 1:
            self.since_unix_s = now_unix_s
        if self._row < self.after:
            return Turn.NONE
        self._row = 0
        self.open = above
        return Turn.OPENED if above else Turn.CLOSED


@dataclass(slots=True, eq=False)
class Track:
    """One watched process. Its samples go with it: a later process in its place begins anew."""

    target: Target
    pid: int
    start_ticks: int
    ring: Ring
    episode: Episode
    baseline: Baseline | None = None
    last: Reading | None = None
    last_s: float = 0.0
    terms: list[Explained] = field(default_factory=list)

    @property
    def explained_bytes(self) -> int:
        """Of the last sample."""
        return sum(term.explained_bytes for term in self.terms)

    @property
    def residual_bytes(self) -> int:
        """Of the last sample."""
        return self.last.resident_bytes - self.explained_bytes if self.last is not None else 0

    @property
    def judged(self) -> bool:
        """Whether its residual may lead to a warning: engines have no baseline, their memory is their own business."""
        return self.baseline is not None

    def tolerance_bytes(self, settings: MemorySettings) -> int:
        """Residual up to which nothing is said."""
        base = self.baseline.anon_bytes if self.baseline is not None else 0
        return settings.residual_warn_bytes + int(base * BASELINE_SHARE)

    def add(self, reading: Reading, claims: list[Claim], now_s: float) -> None:
        """Account for one reading and keep it."""
        self.last, self.last_s = reading, now_s
        self.terms = explain(reading, claims)
        self.ring.add(
            Sample(
                int(now_s * 1000),
                reading.resident_bytes,
                reading.anon_bytes,
                reading.shmem_bytes,
                self.explained_bytes,
            )
        )


@dataclass(slots=True)
class MemoryState:
    """All watched processes, and what of the round in hand is still to be read. `due_s`: when to go on."""

    tracks: dict[tuple[Role, str], Track] = field(default_factory=dict)
    pending: list[Target] = field(default_factory=list)
    asked: list[tuple[int, Memory]] = field(default_factory=list)  # client and request, to be answered after the round
    due_s: float = 0.0
    began_s: float = -math.inf  # the last round
    next_round_s: float = 0.0
    unwatched: int = 0
    most_held_bytes: int = 0  # of tokens and catalog, at any sample
    round_s: float = 0.0  # what the round in hand took so far, and what the last one took
    last_round_s: float = 0.0
    longest_s: float = 0.0

    def note_cost(self, took_s: float) -> None:
        """One wake-up's share of a round was read and accounted for in this time."""
        self.round_s += took_s
        self.longest_s = max(self.longest_s, took_s)

    def samples_bytes(self, keep: int) -> int:
        """Bytes that the samples of all processes take now."""
        return len(self.tracks) * series_bytes(keep)
