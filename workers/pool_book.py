"""The pools that a worker has mapped, and who uses them."""

from typing import Final, NamedTuple

from shm.process import is_gone
from workers.device import DevicePool

# Asking the kernel about a process costs some 20 us; an engine's death need not be seen sooner.
_ALIVE_CHECK_S: Final = 0.02


class EngineProcess(NamedTuple):
    """The process that owns a pool, as `shm.process` names it."""

    pid: int
    start_ticks: int


class PoolEntry:
    """One pool. `jobs` are under way with it; a pool that is `closing` goes when the last of them has ended.
    `engine_id` is the engine's number at the supervisor.
    """

    __slots__ = ("_checked_s", "closing", "engine", "engine_id", "jobs", "number", "pool")

    def __init__(self, number: int, pool: DevicePool, engine: EngineProcess, engine_id: int = 0) -> None:
        self.number = number
        self.pool = pool
        self.engine = engine
        self.engine_id = engine_id
        self.jobs = 0
        self.closing = False
        self._checked_s = -1.0

    def engine_gone(self, now_s: float) -> bool:
        """Whether the engine is proven gone; asked at most every 20 ms, False in between."""
        if now_s - self._checked_s < _ALIVE_CHECK_S:
            return False
        self._checked_s = now_s
        return is_gone(self.engine.pid, self.engine.start_ticks)


class PoolBook:
    """Pools by number. For the loop's thread."""

    def __init__(self) -> None:
        self._entries: dict[int, PoolEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: PoolEntry) -> None:
        """Enter a pool."""
        self._entries[entry.number] = entry

    def find(self, number: int) -> PoolEntry | None:
        """The entry of a pool that may be used."""
        entry = self._entries.get(number)
        return None if entry is None or entry.closing else entry

    def close(self, number: int) -> PoolEntry | None:
        """Mark a pool as closing; the entry where there was one."""
        entry = self._entries.get(number)
        if entry is not None:
            entry.closing = True
        return entry

    def remove(self, number: int) -> None:
        """Forget a pool whose mapping is gone."""
        self._entries.pop(number, None)

    def all(self) -> list[PoolEntry]:
        """Every entry."""
        return list(self._entries.values())
