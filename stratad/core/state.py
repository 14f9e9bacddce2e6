"""Everything the core knows: its settings, and its records of clients, engines and workers."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakSet

from ipc.messages import BootFailed, FaultInfo, Reply, Stage, WorkerProcess, WorkerReady
from shm.layout import StageLayout, interned
from stratad.core.arena import Arena
from stratad.core.catalog import Catalog
from stratad.core.clean_marks import CleanMarks, Rescue
from stratad.core.effects import Effect, LogLine, ReplyTo
from stratad.core.fences import RowFences
from stratad.core.images import Image, Scope, Suspect
from stratad.core.memory_tracks import MemorySettings, MemoryState
from stratad.core.ops import Operation
from stratad.core.puts import Get, Put
from stratad.core.restarts import RestartPolicy
from stratad.core.trace_ring import TraceRing


class Instant(NamedTuple):
    """When an event happened: monotonic seconds, by which everything is decided, and Unix seconds, which are shown."""

    now_s: float
    now_unix_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core is told at start. Sizes in bytes, times in seconds."""

    instance: str
    uid: int
    pid: int
    start_id: bytes
    package_hash: str
    commit: str
    parallel: bool
    chunk_tokens: int
    budget_bytes: int
    budget_images: int
    shuttle_bytes: int
    arena_bytes: int
    prefault: bool
    max_message_bytes: int
    max_clients: int
    max_ops: int
    boot_s: float
    job_floor_s: float
    link_floor_bytes_per_s: float
    restarts: RestartPolicy
    grow_again_s: float = 10.0  # between tries to make a shuttle for which something was missing
    lease_s: float = 60.0
    rescue_max_s: float = 2.0  # 0: nothing is rescued
    order_s: float = 30.0
    stuck_s: float = 10.0
    memory: MemorySettings = field(default_factory=MemorySettings)
    reuse: str = "storage"  # or "off" or "verified" (see the configuration)
    admins: frozenset[int] = frozenset()
    allow_faults: bool = False
    trace: bool = False
    shown: tuple[tuple[str, str], ...] = ()


class WorkerState(Enum):
    """Where a worker is. AWAITING: the process that served the device for an earlier daemon is not proven gone. KILLED:
    SIGKILL was asked for, its end is not proven yet; STUCK: nor was it 10 s later, so its device is out of service, its
    fences and operations stay as they are, and no other process is started there. DEAD, NO_MEMORY (its device had no
    memory for the last process), FAILED and STOPPED: it is proven gone.
    """

    AWAITING = "awaiting"
    STARTING = "starting"
    READY = "ready"
    KILLED = "killed"
    STUCK = "stuck"
    DEAD = "dead"
    NO_MEMORY = "no_memory"
    FAILED = "failed"
    STOPPED = "stopped"


ALIVE: Final = frozenset({WorkerState.STARTING, WorkerState.READY})
GONE: Final = frozenset({WorkerState.DEAD, WorkerState.NO_MEMORY, WorkerState.FAILED, WorkerState.STOPPED})
RETRIED: Final = frozenset({WorkerState.DEAD, WorkerState.NO_MEMORY})
# Nothing of these comes back by itself soon enough to be waited for.
UNAVAILABLE: Final = frozenset({WorkerState.STUCK, WorkerState.FAILED, WorkerState.STOPPED})

SuspectKey: TypeAlias = tuple[str, str]  # ("conversation" or "mark", its name) or ("slot", its number)


@dataclass(slots=True, eq=False)
class Life:
    """What is known of one process of a worker. Times are monotonic; infinite: nothing is due.

    `leaving_s`: it said or showed that it ends, and is killed then. `making_by_s`, `pools_by_s`: by when the shuttle in
    the making, and the next of the `pool_orders` it was given, must be answered. `culprit`: what is to blame for its
    end, by its operation `culprit_op`; `excused`: nothing of what it copies is. `hung`: lanes that let a deadline pass,
    by `Operation.reads_rows`; `under_way`: the jobs that it was copying when it ended (None: nobody knows).
    """

    killed_s: float = 0.0
    killed_for: str = ""
    leaving_s: float = math.inf
    making_by_s: float = math.inf
    pools_by_s: float = math.inf
    pool_orders: int = 0
    did_well: bool = False
    excused: bool = False
    culprit: Suspect | None = None
    culprit_op: Operation | None = None
    boot_failed: BootFailed | None = None
    ordered: bool = False  # its end was ordered by an admin
    hung: frozenset[bool] = frozenset()
    under_way: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """The process that serves one device, over all its generations. Its arena outlives its processes."""

    name: str
    device: str
    arena: Arena
    state: WorkerState = WorkerState.DEAD
    generation: int = 0
    pid: int = 0
    start_ticks: int = 0
    born_s: float = 0.0
    next_start_s: float = 0.0
    deaths: int = 0
    deaths_in_row: int = 0
    kill_code: str = ""
    life: Life = field(default_factory=Life)
    last_culprit: Suspect | None = None
    refusals: int = 0  # starts in a row that found no memory on the device
    missing_bytes: int = 0
    making_deaths: int = 0  # in a row, while the same new shuttle was made
    rests_until_s: float = 0.0  # no new shuttle is made before
    resetting: bool = False  # starts again once its arena is empty
    former: tuple[int, int] | None = None  # pid and start ticks of the earlier daemon's process, not proven gone
    former_by_s: float = math.inf  # when that is killed
    former_shuttles: int = 0  # it had no more than this: those that we do not know were made after we had looked
    recorded: bool = False  # the journal names its present process
    detail: str = ""
    ready: WorkerReady | None = None
    segments: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)
    locked: set[int] = field(default_factory=set)
    making: int | None = None
    first_shuttle: int = 0  # no new shuttle has a number below: somebody who may still live may go by such names
    retired: set[int] = field(default_factory=set)  # numbers that no new shuttle may have
    skipped: int = 0  # names in a row that somebody else had taken
    grow_failed: str = ""
    grow_again_s: float = 0.0
    jobs: dict[int, tuple[Operation, int]] = field(default_factory=dict)
    job_bytes: int = 0
    moved_s: list[float] = field(
        default_factory=lambda: [0.0, 0.0]
    )  # last sign of a lane's going on, by `Operation.reads_rows`
    resources: dict[str, int] = field(default_factory=dict)
    census: int = 0
    counted: int = 0  # the latest census that was answered

    @property
    def can_serve(self) -> bool:
        """Whether it takes jobs now."""
        return self.state is WorkerState.READY and self.life.leaving_s == math.inf

    @property
    def why_unavailable(self) -> str:
        """For people who ask for one of `UNAVAILABLE`, with what would mend it."""
        text = f"worker {self.name} is {self.state.value}: {self.detail}"
        if self.state is WorkerState.FAILED:
            text += (
                f"; `stratactl worker restart {self.name}` starts it again, or `stratactl worker reset {self.name}` "
                "with an empty arena"
            )
        return text

    @property
    def next_index(self) -> int:
        """The number of the next new shuttle."""
        used = self.sizes.keys() | self.retired
        return next(number for number in itertools.count(self.first_shuttle) if number not in used)

    def runs_short(self, now_s: float) -> bool:
        """Whether something that a shuttle needs was missing a moment ago."""
        return bool(self.grow_failed) and now_s < self.grow_again_s

    def can_grow(self, settings: Settings, now_s: float) -> bool:
        """Whether another shuttle is on its way or allowed."""
        if self.state in UNAVAILABLE or self.runs_short(now_s) or now_s < self.rests_until_s:
            return False
        return self.making is not None or sum(self.sizes.values()) + settings.shuttle_bytes <= settings.arena_bytes


class PoolState(Enum):
    """Where a stage's pool is at its worker."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class EngineStage:
    """One registered stage. `pool` is the number under which the worker knows it."""

    stage: Stage
    worker: str
    pool: int
    state: PoolState = PoolState.WAITING
    code: str = ""
    message: str = ""


@dataclass(slots=True, eq=False)
class Engine:
    """A registered engine. Until `registered`, request `register_seq` waits for its pools."""

    engine_id: int
    client: int
    namespace: str
    name: str
    scope: Scope
    fingerprint: dict[str, str]
    stages: tuple[EngineStage, ...]
    register_seq: int
    register_deadline_s: float
    registered: bool = False
    closing: bool = False
    marks: dict[int, str] = field(default_factory=dict)
    clean: CleanMarks = field(default_factory=CleanMarks)
    rescue: Rescue | None = None
    ops: int = 0
    takes: dict[int, float] = field(default_factory=dict)  # images taken and not acknowledged, and since when
    transits: dict[int, Image] = field(default_factory=dict)  # transit images by slot
    exchange: bool = False
    puts: dict[int, Put] = field(default_factory=dict)
    gets: dict[int, Get] = field(default_factory=dict)
    unmapping: set[int] = field(default_factory=set)  # pools whose worker has been told to close them
    unregister_seq: int | None = None  # request that waits for that
    stop_copies_s: float = math.inf  # of one whose process is gone: when what is still copied for it is stopped
    suspects: dict[SuspectKey, Suspect] = field(default_factory=dict)  # what of its own killed workers
    # Read off the stages, which never change. Equal layouts are one object here: most engines have one or two kinds of
    # stages, and what an operation asks of a layout is then asked once a kind.
    layouts: tuple[StageLayout, ...] = field(init=False)
    kinds: tuple[StageLayout, ...] = field(init=False)
    has_state: bool = field(init=False)  # any stage carries states
    token_unit: int = field(init=False)  # images hold a multiple of so many tokens

    def __post_init__(self) -> None:
        self.layouts = interned([stage.stage.layout for stage in self.stages])
        self.kinds = tuple({id(layout): layout for layout in self.layouts}.values())
        self.has_state = any(layout.states for layout in self.kinds)
        self.token_unit = math.lcm(*(layout.token_unit for layout in self.kinds))


@dataclass(slots=True, eq=False)
class ClientRecord:
    """A connected client, as the kernel vouches for it."""

    client: int
    pid: int
    uid: int
    start_ticks: int
    hello_by_s: float
    surplus: bool = False  # one too many: its hello is answered with that, and it is dropped
    greeted: bool = False
    polite: bool = False  # it said goodbye
    name: str = ""
    engines: set[int] = field(default_factory=set)
    seqs: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class StatsRequest:
    """A `Stats` request that waits for the workers' counters."""

    client: int
    seq: int
    waiting: set[str]
    deadline_s: float


@dataclass(slots=True, eq=False)
class Announced:
    """An `Announce` request that waits until the memory of dead engines is unmapped. `count` rescues were ended."""

    client: int
    seq: int
    waiting: set[int]
    count: int
    deadline_s: float


@dataclass(slots=True)
class State:
    """The core's whole state. `out` collects the effects of the event in hand."""

    settings: Settings
    catalog: Catalog
    fences: RowFences = field(default_factory=RowFences)
    workers: dict[str, Worker] = field(default_factory=dict)
    clients: dict[int, ClientRecord] = field(default_factory=dict)
    engines: dict[int, Engine] = field(default_factory=dict)
    pools: dict[int, EngineStage] = field(default_factory=dict)
    ops: dict[int, Operation] = field(default_factory=dict)
    waiting: dict[int, Operation] = field(default_factory=dict)  # those of `ops` that have not started, oldest first
    short: dict[int, Operation] = field(default_factory=dict)  # those that need extents for hints that were wrong
    runs_in_flight: int = 0  # runs of rows of all `ops`
    closing: set[int] = field(default_factory=set)  # engines that go when their last operation ends
    suspects: WeakSet[Suspect] = field(default_factory=WeakSet)  # those whose copies have a worker to themselves
    resets: set[str] = field(default_factory=set)  # workers whose arena is to be emptied
    surplus_count: int = 0  # clients beyond the limit of whom no log line has told
    surplus_told_s: float = -math.inf
    stats_requests: list[StatsRequest] = field(default_factory=list)
    faults: dict[int, FaultInfo] = field(default_factory=dict)  # armed, not struck yet
    announced: list[Announced] = field(default_factory=list)
    memory: MemoryState = field(default_factory=MemoryState)
    trace: TraceRing = field(default_factory=TraceRing)
    owners: dict[str, int] = field(default_factory=dict)
    fingerprint_fields: dict[str, dict[str, str]] = field(default_factory=dict)
    # Appends that are not answered, by serial: what follows a good answer, and a bad one (see `journaling`).
    appends: dict[int, "tuple[Callable[[State], None], Callable[[State, str], None]]"] = field(default_factory=dict)
    journal_error: str = ""  # why the latest append failed
    journal_again_s: float = 0.0
    journal_probe_s: float = 0.0  # when it is asked whether it can be written again
    counters: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    now_unix_s: float = 0.0
    started_s: float = 0.0
    stopping: bool = False
    let_go: bool = False  # an operation has ended since those that wait were looked at
    due_s: float = math.inf
    out: list[Effect] = field(default_factory=list)

    def wake_by(self, when_s: float) -> None:
        """Something falls due at `when_s`: `due_s` is a lower bound of all such times, made exact at each tick."""
        self.due_s = min(self.due_s, when_s)

    def number(self, kind: str) -> int:
        """The next number of a kind (engine, pool, op, job, census), from 1."""
        self.numbers[kind] = self.numbers.get(kind, 0) + 1
        return self.numbers[kind]

    def count(self, counter: str, by: int = 1) -> None:
        """Add to a counter since start."""
        self.counters[counter] = self.counters.get(counter, 0) + by

    def log(self, level: str, message: str, **fields: str | int | float) -> None:
        """Ask for a log line."""
        self.out.append(LogLine(level, message, tuple(fields.items())))

    def reply(self, client: int, message: Reply) -> None:
        """Ask for a message to a client; one that is gone gets none."""
        if client in self.clients:
            self.out.append(ReplyTo(client, message))

    def worker_processes(self, engine: Engine) -> tuple[WorkerProcess, ...]:
        """Who serves the stages of an engine now."""
        return tuple(
            WorkerProcess(number, stage.worker, self.workers[stage.worker].pid, self.workers[stage.worker].start_ticks)
            for number, stage in enumerate(engine.stages)
        )
