"""What the histories reached: every kind of operation, every fault, every move of every table."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

from ipc.messages import Failed, Progress, Reply
from stratad.core.ops import OP_MOVES, STAGE_MOVES, OpKind, OpState, StageState
from stratad.core.state import PoolState, State, WorkerState

StateT = TypeVar("StateT", bound=Enum)


@dataclass(slots=True)
class Tally:
    """Counts by name."""

    counts: Counter[str] = field(default_factory=Counter)
    _workers: dict[str, WorkerState] = field(default_factory=dict)
    _pools: dict[int, PoolState] = field(default_factory=dict)

    def event(self, name: str) -> None:
        """The core had an event."""
        self.counts[f"event:{name}"] += 1

    def fault(self, kind: str) -> None:
        """The world did something bad."""
        self.counts[f"fault:{kind}"] += 1

    def reply(self, reply: Reply) -> None:
        """The core told something."""
        if isinstance(reply, Failed):
            self.counts[f"refused:{reply.code}"] += 1
        elif isinstance(reply, Progress):
            self.counts[f"progress:{reply.state}"] += 1
        else:
            self.counts[f"reply:{type(reply).__name__}"] += 1

    def begin(self) -> None:
        """Another daemon: what was seen of the former one's records is forgotten."""
        self._workers.clear()
        self._pools.clear()

    def look(self, state: State) -> None:
        """Count what changed its state since the last event."""
        for name, worker in state.workers.items():
            if self._workers.get(name) is not worker.state:
                self._workers[name] = worker.state
                self.counts[f"worker:{worker.state.value}"] += 1
        pools = self._pools
        for number, stage in state.pools.items():
            if pools.get(number) is not stage.state:
                pools[number] = stage.state
                self.counts[f"pool:{stage.state.value}"] += 1

    def end(self, state: State) -> None:
        """Add what the core itself counted."""
        for name, count in state.counters.items():
            self.counts[f"core:{name}"] += count
        self.counts["core:evictions"] += state.catalog.evictions


class _CountedMoves(dict[str, StateT]):
    """The moves out of one state; each that is made is counted."""

    def __init__(self, moves: dict[str, StateT], counts: Counter[str], prefix: str) -> None:
        super().__init__(moves)
        self._counts = counts
        self._prefix = prefix

    def get(self, event: str, default: Any = None) -> Any:
        if event in self:
            self._counts[f"{self._prefix}:{event}"] += 1
        return super().get(event, default)


def _count(table: dict[StateT, dict[str, StateT]], counts: Counter[str], name: str) -> Callable[[], None]:
    """Have the moves of a table counted; returns what ends that."""
    before = dict(table)
    for state, moves in before.items():
        table[state] = _CountedMoves(moves, counts, f"{name}:{state.value}")
    return lambda: table.update(before)


@contextmanager
def counted_tables(counts: Counter[str]) -> Iterator[None]:
    """Count every move of the two tables of operations while this lasts."""
    ends = [_count(OP_MOVES, counts, "op"), _count(STAGE_MOVES, counts, "stage")]
    try:
        yield
    finally:
        for end in ends:
            end()


FAULTS: Final = (
    "worker_kill", "worker_exit", "worker_hang", "worker_boot", "device_lost", "device_error", "out_of_memory",
    "source_changed", "corrupt", "shuttle", "pool", "client_kill", "client_drop", "template_kill", "clock_step",
    "stall", "supervisor_kill", "supervisor_kill_later", "journal", "stood_still", "worker_stuck",
    "no_memory", "segment_lost",
)  # fmt: skip


def wanted() -> set[str]:
    """Every name that a run must have counted."""
    names = {f"fault:{fault}" for fault in FAULTS}
    names |= {f"op:{state.value}:{event}" for state in OpState for event in OP_MOVES[state]}
    names |= {f"stage:{state.value}:{event}" for state in StageState for event in STAGE_MOVES[state]}
    names |= {f"worker:{state.value}" for state in WorkerState}
    names |= {f"pool:{state.value}" for state in PoolState}
    names |= {f"core:{kind.value}s" for kind in OpKind} | {f"core:{kind.value}s_failed" for kind in OpKind}
    names |= {
        "core:evictions",
        "core:images_damaged",
        "core:workers_hung",
        "core:puts_ended",
        "core:drops",
        "core:journal_failures",
        "core:shuttles_lost",
        "core:images_lost",
        "core:chunks_hinted",
        "core:chunks_missed",
        "core:skipped_bytes",
    }
    names |= {"request:Lift", "reply:WorkerOrdered", "request:RestartWorker", "request:ResetWorker"}
    names |= {"request:Trace", "request:SetTrace", "reply:Traced"}
    names |= {"core:images_adopted", "adoption:same pids", "adoption:other pids"}
    names |= {"progress:accepted", "progress:source_free", "reply:WorkersChanged", "reply:Found", "reply:Parts"}
    return names
