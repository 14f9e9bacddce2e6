"""What an engine's process has and knows: its memory, its slots, and what it may do with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ipc.messages import EXCHANGE_ROW_BYTES, MemfdPool, Register, Request, Stage
from shm.layout import Plane, RowGroup, StageLayout, StateGroup
from shm.rows import pack_numbers, pack_rows
from tests.support.simulation.content import (
    CHUNK_TOKENS,
    ROW_BYTES,
    STATE_BYTES,
    Pool,
    plain,
    prefix_numbers,
    row_content,
    state_content,
    twisted,
)

CONVERSATIONS: Final = "abcdef"
SLOTS: Final = 3
SLOT_ROWS: Final = 12
EXCHANGE_ROWS: Final = 32
FINGERPRINT: Final = {"model": "m", "revision": "1", "dtype": "bf16", "kv_format": "rows"}


def plain_layout(*, state: bool) -> StageLayout:
    """Rows of all slots side by side; with `state` also a state for each slot."""
    rows = SLOTS * SLOT_ROWS
    groups = (RowGroup((Plane(0, ROW_BYTES, ROW_BYTES, rows),)),)
    states = (StateGroup((Plane(ROW_BYTES * rows, STATE_BYTES, STATE_BYTES, SLOTS),)),) if state else ()
    return StageLayout(groups, states, CHUNK_TOKENS)


PLAIN: Final = plain_layout(state=False)
STATEFUL: Final = plain_layout(state=True)
EXCHANGE: Final = StageLayout(
    (RowGroup((Plane(0, EXCHANGE_ROW_BYTES, EXCHANGE_ROW_BYTES, EXCHANGE_ROWS),)),), (), CHUNK_TOKENS
)


def tokens_of(conversation: str, count: int, version: int = 0) -> list[int]:
    """The first tokens of a conversation. Three conversations each begin alike; a new version differs in its end."""
    number = ord(conversation[0])
    shared = [number // 3 * 1000 + at for at in range(min(count, CHUNK_TOKENS + 1))]
    return shared + [number * 1000 + version * 100 + at for at in range(CHUNK_TOKENS + 1, count)]


def content_of(tokens: Sequence[int], stage: int) -> list[int]:
    """What the rows of these tokens hold on a stage."""
    return [row_content(number, stage) for number in prefix_numbers(tokens)]


def state_of(tokens: Sequence[int], stage: int) -> int:
    """What the state after these tokens holds on a stage."""
    return state_content(prefix_numbers(tokens)[-1], stage)


@dataclass(slots=True)
class Slot:
    """Rows of a conversation. `tokens`: what is in them; None: nobody knows. `busy` are the requests that may touch
    them; `held_by` the processes that may do so still although nobody will answer for them.
    """

    number: int
    tokens: list[int] | None = None
    conversation: str = ""
    busy: set[int] = field(default_factory=set)
    held_by: set[tuple[str, int]] = field(default_factory=set)
    poisoned: bool = False
    twisted: bool = False  # a row of it does not hold what it would for these tokens if it were computed once

    @property
    def first_row(self) -> int:
        """Where its rows begin."""
        return self.number * SLOT_ROWS


@dataclass(slots=True)
class SimPut:
    """An image that is being put part by part: (name, version, rows, rows that were sent)."""

    put_id: int
    conversation: str
    name: str = ""
    version: int = 0
    rows: int = 0
    sent: int = 0
    stored: int = 0
    parts: int = 0


@dataclass(slots=True)
class SimEngine:
    """A registered share of an engine's memory. `engine_id` 0: not registered now."""

    build: str
    pools: list[Pool]
    devices: list[str]
    exchange: bool = False
    engine_id: int = 0
    registering: int = 0
    slots: list[Slot] = field(default_factory=list)
    transits: dict[int, list[int]] = field(default_factory=dict)
    put: SimPut | None = None
    get: tuple[int, tuple[tuple[str, int, int], ...]] | None = None  # its number; name, version and rows of each part
    taken: list[int] = field(default_factory=list)
    taken_names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def make(cls, devices: Sequence[str], layout: StageLayout, build: str, *, exchange: bool = False) -> "SimEngine":
        """Memory with nothing in it."""
        pools = [Pool(layout, stage) for stage in range(len(devices))]
        slots = [Slot(number) for number in range(2 if exchange else SLOTS)]
        return cls(build, pools, list(devices), exchange, slots=slots)

    @property
    def has_state(self) -> bool:
        """Whether its stages have states."""
        return bool(self.pools[0].layout.states)

    def forget(self) -> None:
        """The daemon knows nothing of it any more."""
        self.engine_id = self.registering = 0
        self.transits.clear()
        self.taken.clear()
        self.put = self.get = None

    def die(self) -> None:
        """Its process is gone: whoever comes next has other memory."""
        self.pools = [Pool(pool.layout, pool.stage) for pool in self.pools]

    def register(self, seq: int, descriptors: Iterable[int]) -> Register:
        """The request that makes it known. Each pool travels as a descriptor."""
        stages = tuple(
            Stage(number, device, MemfdPool(descriptor, pool.layout.end_bytes), pool.layout)
            for number, (device, pool, descriptor) in enumerate(zip(self.devices, self.pools, descriptors, strict=True))
        )
        fields = {**FINGERPRINT, "engine_build": self.build}
        return Register(seq, "ns", "sim", fields, stages, 60.0, self.exchange)

    # --- its own memory -----------------------------------------------------------------------------------------------

    def fill(self, slot: Slot, tokens: list[int], conversation: str) -> None:
        """Compute K/V: write the rows of these tokens, and the state after them."""
        numbers = prefix_numbers(tokens)
        first = slot.first_row
        for pool in self.pools:
            stage = pool.stage
            pool.rows[0][first : first + len(tokens)] = [row_content(number, stage) for number in numbers]
            if self.has_state:
                pool.rows[1][slot.number] = state_content(numbers[-1], stage)
        slot.tokens, slot.conversation, slot.twisted = tokens, conversation, False

    def twist(self, slot: Slot, at: int, stage: int) -> None:
        """Other bytes in one row, for the same tokens."""
        row = slot.first_row + at
        self.pools[stage].rows[0][row] = twisted(self.pools[stage].rows[0][row])
        slot.twisted = True

    def snapshot(self, slot: Slot) -> list[tuple[list[int], int]]:
        """What the slot's memory holds on every stage: its rows, and its state."""
        first = slot.first_row
        return [
            (pool.rows[0][first : first + SLOT_ROWS], pool.rows[1][slot.number] if self.has_state else 0)
            for pool in self.pools
        ]

    def holds(self, slot: Slot, tokens: Sequence[int], *, exactly: bool = True) -> bool:
        """Whether the slot's memory holds what these tokens stand for, on every stage; or not `exactly`, but rows that
        were changed as they may be.
        """
        first = slot.first_row
        for pool in self.pools:
            rows = pool.rows[0][first : first + len(tokens)]
            if (rows if exactly else list(map(plain, rows))) != content_of(tokens, pool.stage):
                return False
            if self.has_state and pool.rows[1][slot.number] != state_of(tokens, pool.stage):
                return False
        return True

    # --- how it is named in requests ----------------------------------------------------------------------------------

    def rows(self, slot: Slot, count: int) -> tuple[tuple[bytes, ...], ...]:
        """The slot's first rows and its state, for all stages alike."""
        runs = (pack_rows([(slot.first_row, count)]),)
        return ((*runs, pack_rows([(slot.number, 1)])),) if self.has_state else (runs,)

    def positions(self, count: int) -> bytes:
        """The one checkpoint of an image of so many tokens."""
        return pack_numbers((count,)) if self.has_state else b""


@dataclass(slots=True)
class Pending:
    """A request that has no final reply yet. `slots` are those that it may touch; `target` the one that it writes,
    whose memory was `before` when it was sent; `tokens` what it is about.
    """

    request: Request
    engine: SimEngine | None = None
    slots: tuple[Slot, ...] = ()
    target: Slot | None = None
    before: list[tuple[list[int], int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: bool = False
    source_free: bool = False
