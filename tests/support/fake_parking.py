"""A client for adapters that keeps images in this process: it copies the bytes of pools and forgets nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ipc.messages import PROTOCOL_VERSION, Captured, Restored, Welcome
from shm.layout import Plane, RowGroup, StageLayout
from stratad._engine import Match
from stratad.client import GroupRows
from stratad.errors import UsageError
from stratad.pools import CpuPool, StagePool

ResultT = TypeVar("ResultT")
Run = tuple[int, int]


@dataclass
class FakeTicket(Generic[ResultT]):
    """A ticket that is done, whose rows stay busy as long as `rows_busy` says."""

    answer: ResultT
    rows_busy: bool = False

    def result(self, deadline_s: float | None = None) -> ResultT:
        return self.answer

    def wait_source_free(self, deadline_s: float | None = None) -> None:
        assert not self.rows_busy

    def wait_rows_free(self, deadline_s: float) -> bool:
        return not self.rows_busy


@dataclass
class FakeImage:
    """Tokens; by stage, group and plane the bytes of its rows; by position, stage and plane those of its states."""

    tokens: tuple[int, ...]
    rows: list[list[list[bytes]]]
    states: dict[int, list[list[bytes]]]


@dataclass
class FakeParkingEngine:
    """An engine whose stages lie in `CpuPool`s. `calls` are the operations with each stage's runs, and their slot."""

    stages: Sequence[StagePool]
    images: dict[str, FakeImage] = field(default_factory=dict)
    calls: list[tuple[str, str, list[list[Run]], int]] = field(default_factory=list)
    rows_busy: bool = False
    registered: bool = True

    def capture(
        self,
        conversation: str,
        tokens: Sequence[int],
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        checkpoints: Sequence[tuple[int, int]] = (),
        deadline_s: float,
    ) -> FakeTicket[Captured]:
        runs = self._note("capture", conversation, rows_by_stage, slot)
        positions = [position for position, _ in checkpoints]
        stateful = any(stage.layout.states for stage in self.stages)
        if stateful != bool(positions) or positions != sorted(set(positions)):
            raise UsageError("bad_state", f"checkpoints {checkpoints}")
        if positions and not 1 <= positions[0] <= positions[-1] <= len(tokens):
            raise UsageError("bad_state", f"checkpoints {checkpoints}")
        held: list[list[list[bytes]]] = []
        for stage, groups in zip(self.stages, runs, strict=True):
            for group, run in zip(stage.layout.groups, groups, strict=True):
                if run[1] != group.rows_for(len(tokens)):
                    raise UsageError("bad_rows", f"{len(tokens)} tokens, rows {run}")
            held.append(
                [group_bytes(stage, group, run) for group, run in zip(stage.layout.groups, groups, strict=True)]
            )
        states = {
            position: [[bytes(view) for view in state_views(stage, number)] for stage in self.stages]
            for position, number in checkpoints
        }
        self.images[conversation] = FakeImage(tuple(tokens), held, states)
        image_bytes = sum(len(part) for stage in held for group in stage for part in group)
        image_bytes += sum(len(part) for state in states.values() for stage in state for part in stage)
        return FakeTicket(Captured(0, 1, len(tokens), image_bytes, image_bytes, ()), self.rows_busy)

    def restore(
        self,
        conversation: str,
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        tokens: int = -1,
        deadline_s: float,
    ) -> FakeTicket[Restored]:
        runs = self._note("restore", conversation, rows_by_stage, slot)
        image = self.images.get(conversation)
        if image is None:
            raise UsageError("unknown_conversation", conversation)
        whole = len(image.tokens)
        count = whole if tokens == -1 else tokens
        if not self._holds(image, count):
            raise UsageError("no_checkpoint", f"{count} of {whole} tokens")
        for stage, groups in zip(self.stages, runs, strict=True):
            for group, (_, given) in zip(stage.layout.groups, groups, strict=True):
                needed = group.rows_for(count)
                if given < needed or (tokens != -1 and given != needed):
                    raise UsageError("bad_rows", f"{count} tokens, {given} rows")
        for stage, groups, held in zip(self.stages, runs, image.rows, strict=True):
            for group, (first, _), planes in zip(stage.layout.groups, groups, held, strict=True):
                for view, part in zip(group_views(stage, group, (first, group.rows_for(count))), planes, strict=True):
                    view[:] = part[: len(view)]
        if image.states:
            for stage, state in zip(self.stages, image.states[count], strict=True):
                for view, part in zip(state_views(stage, slot), state, strict=True):
                    view[:] = part
        return FakeTicket(Restored(0, 1, count, 0, ()), self.rows_busy)

    def take(
        self,
        conversation: str,
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        tokens: int = -1,
        deadline_s: float,
    ) -> FakeTicket[Restored]:
        ticket = self.restore(
            conversation, rows, slot, rows_by_stage=rows_by_stage, tokens=tokens, deadline_s=deadline_s
        )
        del self.images[conversation]
        return ticket

    def _note(self, name: str, conversation: str, rows: Sequence[GroupRows], slot: int) -> list[list[Run]]:
        """The single run of each group of each stage, as the adapter gives them."""
        runs: list[list[Run]] = []
        for stage in rows:
            runs.append([])
            for given in stage.rows:
                assert isinstance(given, list)
                ((first, count),) = given
                runs[-1].append((first, count))
        self.calls.append((name, conversation, runs, slot))
        return runs

    def _holds(self, image: FakeImage, count: int) -> bool:
        """Whether the image can be restored at so many tokens."""
        if not 0 < count <= len(image.tokens):
            return False
        if image.states and count not in image.states:
            return False
        return all(
            group.first_token(count) == group.first_token(len(image.tokens))
            for stage in self.stages
            for group in stage.layout.groups
        )

    def lookup(self, tokens: Sequence[int], *, deadline_s: float | None = None) -> Match | None:
        best: Match | None = None
        for conversation, image in self.images.items():
            common = 0
            while common < min(len(tokens), len(image.tokens)) and tokens[common] == image.tokens[common]:
                common += 1
            points = [count for count in range(1, common + 1) if self._holds(image, count)]
            if points and (best is None or points[-1] > best.tokens):
                best = Match(1, conversation, points[-1], len(image.tokens))
        return best

    def unregister(self, *, deadline_s: float | None = None) -> None:
        self.registered = False

    def pool_bytes(self) -> list[bytes]:
        """A copy of every pool."""
        return [bytes(stage.memory.buffer) for stage in self.stages if isinstance(stage.memory, CpuPool)]

    def scribble(self) -> None:
        """Fill every pool with 0xA5, as another conversation in the slot would."""
        for stage in self.stages:
            assert isinstance(stage.memory, CpuPool)
            stage.memory.buffer[:] = b"\xa5" * stage.memory.nbytes


@dataclass
class FakeParkingClient:
    """Registers at most one engine; refuses with `refusal` if set."""

    refusal: Exception | None = None
    chunk_tokens: int = 256
    engine: FakeParkingEngine | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    announced: list[tuple[str, int]] = field(default_factory=list)  # namespaces, and how many memfds there were then

    @property
    def welcome(self) -> Welcome:
        return Welcome(0, PROTOCOL_VERSION, b"", 0, "fake", "", "", 1 << 26, self.chunk_tokens, True, True)

    def announce(self, namespace: str) -> int:
        self.announced.append((namespace, memfds()))
        return 0

    def register(
        self, *, engine: str, namespace: str, fingerprint: Mapping[str, str], stages: Sequence[StagePool]
    ) -> FakeParkingEngine:
        if self.refusal is not None:
            raise self.refusal
        self.fingerprint = fingerprint
        self.engine = FakeParkingEngine(stages)
        return self.engine


def memfds() -> int:
    """Memfds that this process has open."""
    return sum("memfd" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())


def group_views(stage: StagePool, group: RowGroup, run: Run) -> list[memoryview]:
    """The bytes of one run of rows in every plane of a group."""
    return [_view(stage, plane, run) for plane in group.planes]


def group_bytes(stage: StagePool, group: RowGroup, run: Run) -> list[bytes]:
    """A copy of them."""
    return [bytes(view) for view in group_views(stage, group, run)]


def state_views(stage: StagePool, state_slot: int) -> list[memoryview]:
    """The bytes of one state slot in every plane of states."""
    layout: StageLayout = stage.layout
    return [_view(stage, plane, (state_slot, 1)) for group in layout.states for plane in group.planes]


def _view(stage: StagePool, plane: Plane, run: Run) -> memoryview:
    assert isinstance(stage.memory, CpuPool)
    first, count = run
    assert plane.row_stride_bytes == plane.row_bytes
    assert first + count <= plane.rows
    start = plane.offset_bytes + first * plane.row_bytes
    return stage.memory.buffer[start : start + count * plane.row_bytes]
