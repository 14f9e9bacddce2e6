"""A client for adapters that keeps images in this process: it copies the bytes of pools and forgets nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ipc.messages import PROTOCOL_VERSION, Captured, Restored, Welcome
from shm.layout import StageLayout
from stratad._engine import Match
from stratad.errors import UsageError
from stratad.pools import CpuPool, StagePool

ResultT = TypeVar("ResultT")
Runs = Sequence[tuple[int, int]]


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
    """Tokens, and one `bytes` a stage and plane."""

    tokens: tuple[int, ...]
    planes: list[list[bytes]]


@dataclass
class FakeParkingEngine:
    """An engine whose stages lie in `CpuPool`s. `calls` are the operations with their rows and slot."""

    stages: Sequence[StagePool]
    images: dict[str, FakeImage] = field(default_factory=dict)
    calls: list[tuple[str, str, tuple[tuple[int, int], ...], int]] = field(default_factory=list)
    rows_busy: bool = False
    registered: bool = True

    def capture(
        self, conversation: str, tokens: Sequence[int], rows: Runs, slot: int, *, deadline_s: float
    ) -> FakeTicket[Captured]:
        self.calls.append(("capture", conversation, tuple(rows), slot))
        planes = [[bytes(view) for view in plane_views(stage, rows)] for stage in self.stages]
        self.images[conversation] = FakeImage(tuple(tokens), planes)
        image_bytes = sum(len(part) for stage in planes for part in stage)
        return FakeTicket(Captured(0, 1, len(tokens), image_bytes, image_bytes, ()), self.rows_busy)

    def restore(
        self, conversation: str, rows: Runs, slot: int, *, tokens: int = -1, deadline_s: float
    ) -> FakeTicket[Restored]:
        self.calls.append(("restore", conversation, tuple(rows), slot))
        image = self.images.get(conversation)
        if image is None:
            raise UsageError("unknown_conversation", conversation)
        count = len(image.tokens) if tokens == -1 else tokens
        given = sum(length for _, length in rows)
        if given < count or (tokens != -1 and given != count):
            raise UsageError("bad_rows", f"{count} tokens, rows {rows}")
        for stage, planes in zip(self.stages, image.planes, strict=True):
            first = [(rows[0][0], count)]
            for view, part in zip(plane_views(stage, first), planes, strict=True):
                view[:] = part[: len(view)]
        return FakeTicket(Restored(0, 1, count, 0, ()), self.rows_busy)

    def take(
        self, conversation: str, rows: Runs, slot: int, *, tokens: int = -1, deadline_s: float
    ) -> FakeTicket[Restored]:
        ticket = self.restore(conversation, rows, slot, tokens=tokens, deadline_s=deadline_s)
        del self.images[conversation]
        return ticket

    def lookup(self, tokens: Sequence[int], *, deadline_s: float | None = None) -> Match | None:
        for conversation, image in self.images.items():
            if tuple(tokens[: len(image.tokens)]) == image.tokens:
                return Match(1, conversation, len(image.tokens), len(image.tokens))
        return None

    def unregister(self, *, deadline_s: float | None = None) -> None:
        self.registered = False

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

    @property
    def welcome(self) -> Welcome:
        return Welcome(0, PROTOCOL_VERSION, b"", 0, "fake", "", "", 1 << 26, self.chunk_tokens, True, True)

    def register(
        self, *, engine: str, namespace: str, fingerprint: Mapping[str, str], stages: Sequence[StagePool]
    ) -> FakeParkingEngine:
        if self.refusal is not None:
            raise self.refusal
        self.fingerprint = fingerprint
        self.engine = FakeParkingEngine(stages)
        return self.engine


def plane_views(stage: StagePool, rows: Runs) -> list[memoryview]:
    """The bytes of one run of rows in every plane of a stage."""
    assert isinstance(stage.memory, CpuPool)
    layout: StageLayout = stage.layout
    ((first, count),) = rows
    views: list[memoryview] = []
    for plane in layout.planes:
        assert plane.row_stride_bytes == plane.row_bytes
        assert first + count <= plane.rows
        start = plane.offset_bytes + first * plane.row_bytes
        views.append(stage.memory.buffer[start : start + count * plane.row_bytes])
    return views
