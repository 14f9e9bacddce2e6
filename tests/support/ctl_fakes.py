"""A daemon that exists only as values, for the tests of stratactl."""

from dataclasses import dataclass, field

import msgspec

from ipc.messages import (
    ChunkInfo,
    EngineInfo,
    FaultInfo,
    Faults,
    ImageDetail,
    ImageInfo,
    MemoryArena,
    MemoryProcess,
    MemoryReply,
    MemorySeries,
    MemoryTerm,
    MemoryWarning,
    OpInfo,
    ProcessMemory,
    StatsReply,
    Traced,
    TracedOp,
    TracedStage,
    TraceKind,
    Welcome,
    WorkerInfo,
    WorkerOrdered,
)
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, pack_places
from stratad.ctl.connection import DaemonClient, Target
from stratad.ctl.trace import STEPS
from stratad.errors import StratadError, UsageError, error_for
from stratad.version import package_hash

WELCOME = Welcome(
    seq=1,
    version=1,
    start_id=b"s" * 16,
    pid=100,
    instance="default",
    package_hash=package_hash(),
    commit="unknown",
    max_message_bytes=1 << 20,
    chunk_tokens=256,
    parallel=True,
    admin=True,
)
WORKER = WorkerInfo(
    worker="cpu:0",
    device="cpu:0",
    state="ready",
    pid=101,
    generation=1,
    deaths=0,
    cpus=(0, 1, 2, 5),
    shuttles=2,
    shuttle_bytes=2 << 30,
    locked_bytes=0,
    free_bytes=1 << 30,
    used_bytes=1 << 30,
    jobs=0,
    digest_algorithm="xxh3-128",
    resources={"streams": 2},
)
ENGINE = EngineInfo(
    engine_id=7,
    namespace="tenant",
    engine="an-engine",
    pid=102,
    uid=1000,
    stages=("cpu:0",),
    fingerprint="f" * 32,
    fingerprint_fields={"model": "m"},
    ops=1,
    marks={"clean": 3},
)
OP = OpInfo(
    op_id=9,
    kind="capture",
    state="copying",
    namespace="tenant",
    conversation="chat",
    engine_id=7,
    age_s=1.5,
    stages_pending=(0,),
)
STATS = StatsReply(
    seq=2,
    instance="default",
    pid=100,
    uptime_s=3700.0,
    health="ok",
    workers=(WORKER,),
    engines=(ENGINE,),
    ops=(OP,),
    images=1,
    chunks=4,
    budget_bytes=4 << 30,
    budget_images=100,
    published_bytes=1 << 20,
    staged_bytes=0,
    free_bytes=3 << 30,
    memory=(
        ProcessMemory(role="supervisor", pid=100, rss_bytes=40 << 20, anon_bytes=30 << 20, shmem_bytes=0),
        ProcessMemory(role="worker", pid=101, rss_bytes=2100 << 20, anon_bytes=50 << 20, shmem_bytes=2 << 30),
    ),
    counters={"captures": 5},
    settings={"copy.parallel": "true"},
)
MIB = 1 << 20
WORKER_MEMORY = MemoryProcess(
    role="worker",
    name="cpu:0",
    pid=101,
    start_ticks=7,
    age_s=1.25,
    resident_bytes=2200 * MIB,
    anon_bytes=130 * MIB,
    shmem_bytes=2050 * MIB,
    file_bytes=20 * MIB,
    terms=(
        MemoryTerm("shuttles", "shmem", 2048 * MIB, 2048 * MIB, "counted"),
        MemoryTerm("pools", "shmem", 2 * MIB, 8 * MIB, "at most"),
        MemoryTerm("baseline", "anon", 50 * MIB, 50 * MIB, "measured"),
        MemoryTerm("staging", "anon", 0, 0, "at most"),
        MemoryTerm("files", "file", 20 * MIB, 20 * MIB, "measured"),
    ),
    residual_bytes=80 * MIB,
    tolerance_bytes=66 * MIB,
    judged=True,
    samples=720,
    window_s=3595.0,
    first_bytes=2100 * MIB,
    least_bytes=2099 * MIB,
    most_bytes=2201 * MIB,
    slope_bytes_per_hour=100.0 * MIB,
    residual_slope_bytes_per_hour=None,
    series=MemorySeries((), (), (), (), ()),
)
ENGINE_MEMORY = MemoryProcess(
    role="engine",
    name="an-engine",
    pid=102,
    start_ticks=8,
    age_s=1.5,
    resident_bytes=500 * MIB,
    anon_bytes=490 * MIB,
    shmem_bytes=8 * MIB,
    file_bytes=2 * MIB,
    terms=(MemoryTerm("pools", "shmem", 8 * MIB, 8 * MIB, "at most"),),
    residual_bytes=492 * MIB,
    tolerance_bytes=64 * MIB,
    judged=False,
    samples=2,
    window_s=5.0,
    first_bytes=500 * MIB,
    least_bytes=500 * MIB,
    most_bytes=500 * MIB,
    slope_bytes_per_hour=None,
    residual_slope_bytes_per_hour=None,
    series=MemorySeries(
        (0.0, 5.0), (400 * MIB, 500 * MIB), (390 * MIB, 490 * MIB), (8 * MIB, 8 * MIB), (8 * MIB, 8 * MIB)
    ),
)
MEMORY_WARNING = MemoryWarning("worker cpu:0", 101, 3661.0, 2200 * MIB, 2120 * MIB, 80 * MIB, 66 * MIB)
MEMORY = MemoryReply(
    seq=4,
    now_unix_s=4000.0,
    sample_s=5.0,
    keep=720,
    samples_bytes=57_600,
    samples_bound_bytes=1_843_200,
    unwatched=0,
    round_s=0.0004,
    longest_s=0.0009,
    processes=(WORKER_MEMORY, ENGINE_MEMORY),
    arenas=(MemoryArena("cpu:0", 2 << 30, 1 << 30, 1 << 30),),
    warnings=(),
    journal_bytes=3 * 1024**2,
)
IMAGE = ImageInfo(
    image_id=3,
    namespace="tenant",
    conversation="chat",
    tokens=300,
    stages=1,
    image_bytes=1000,
    stored_bytes=GRANULE_BYTES,
    exclusive_bytes=GRANULE_BYTES,
    chunks=1,
    pinned=True,
    damaged=False,
    created_unix_s=1000.0,
    used_unix_s=1100.0,
    restores=2,
)
DETAIL = ImageDetail(
    seq=3,
    image=IMAGE,
    fingerprint={"model": "m"},
    chunks=(
        ChunkInfo(
            stage=0,
            group=0,
            is_state=False,
            token_count=256,
            length_bytes=1000,
            references=1,
            algorithm="xxh3-128",
            digest=bytes(range(16)),
            extents=pack_places([ChunkPlace(1000, (Extent(0, GRANULE_BYTES, GRANULE_BYTES),))]),
            segments=("/stratad.default.cpu_0.0",),
        ),
    ),
)


_TRACED_STAGE = TracedStage(
    0, "cpu:0", "done", "", 3000, 2000, 1000, 0.001, 0.0002, 0.0, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008, 0.0009
)
_PERCENTILES: tuple[float, ...] = (0.001, 0.002, 0.003, 0.004)
_TIMES = dict.fromkeys(("total", *STEPS, "journal"), _PERCENTILES)
TRACED = Traced(
    7,
    True,
    3661.0,
    2,
    1,
    2560,
    4 * MIB,
    (
        TraceKind("capture", 1, 0, 2000, 1000, _TIMES),
        TraceKind("restore", 0, 1, 0, 0),
    ),
    (
        TracedOp(41, "capture", "ns", "a\x1bb", 3, 256, "", 3662.5, 0.0054, 0.0001, (_TRACED_STAGE,)),
        TracedOp(
            42,
            "restore",
            "ns",
            "b",
            3,
            256,
            "damaged",
            3663.5,
            0.002,
            0.0,
            (
                msgspec.structs.replace(_TRACED_STAGE, state="failed", code="damaged"),
                msgspec.structs.replace(_TRACED_STAGE, stage=1, worker="cpu:1"),
            ),
        ),
    ),
)


@dataclass
class FakeClient:
    """Answers like a daemon that holds one image; `calls` records what was asked."""

    welcome: Welcome = WELCOME
    reply: StatsReply = STATS
    memory_reply: MemoryReply = MEMORY
    traced: Traced = TRACED
    images: tuple[ImageInfo, ...] = (IMAGE,)
    detail: ImageDetail = DETAIL
    armed: tuple[FaultInfo, ...] = (FaultInfo(5, "take", 1, "kill", 2, "cpu:1"),)
    quarantines: int = 1
    fails_with: StratadError | None = None
    interrupted: bool = False
    calls: list[tuple[object, ...]] = field(default_factory=list)
    closed: int = 0

    def _asked(self, *call: object) -> None:
        self.calls.append(call)
        if self.interrupted:
            raise KeyboardInterrupt
        if self.fails_with is not None:
            raise self.fails_with

    def stats(self) -> StatsReply:
        self._asked("stats")
        return self.reply

    def memory(self, *, history: int = 0) -> MemoryReply:
        self._asked("memory", history)
        return self.memory_reply

    def trace(self, *, limit: int = 20, op: str = "", slowest: bool = False) -> Traced:
        self._asked("trace", limit, op, slowest)
        return self.traced

    def set_trace(self, *, on: bool) -> Traced:
        self._asked("set_trace", on)
        return msgspec.structs.replace(self.traced, on=on, ops=(), kinds=())

    def list_images(self, namespace: str = "") -> tuple[ImageInfo, ...]:
        self._asked("list", namespace)
        return tuple(image for image in self.images if namespace in ("", image.namespace))

    def show(self, namespace: str, conversation: str, *, image_id: int = 0) -> ImageDetail:
        self._asked("show", namespace, conversation, image_id)
        self._known(namespace, conversation)
        return self.detail

    def drop(self, namespace: str, conversation: str, *, force: bool = False, image_id: int = 0) -> int:
        self._asked("drop", namespace, conversation, force, image_id)
        image = self._known(namespace, conversation)
        if image.pinned and not force:
            raise error_for("pinned", "the image is pinned")
        return 1

    def pin(self, namespace: str, conversation: str, *, pinned: bool = True, image_id: int = 0) -> None:
        self._asked("pin", namespace, conversation, pinned, image_id)
        self._known(namespace, conversation)

    def lift(self, namespace: str, conversation: str = "", *, image_id: int = 0) -> int:
        self._asked("lift", namespace, conversation, image_id)
        return self.quarantines

    def restart_worker(self, worker: str) -> WorkerOrdered:
        self._asked("restart_worker", worker)
        return WorkerOrdered(1, worker, "failed", 9)

    def reset_worker(self, worker: str, *, force: bool = False) -> WorkerOrdered:
        self._asked("reset_worker", worker, force)
        if not force:
            raise UsageError("arena_in_use", "3 images lie there")
        return WorkerOrdered(1, worker, "ready", 2, 3)

    def clear(self, namespace: str) -> int:
        self._asked("clear", namespace)
        return sum(image.namespace == namespace and not image.pinned for image in self.images)

    def arm_fault(self, op: str, stage: int, kind: str, *, at: int = 1, engine_id: int = 0) -> FaultInfo:
        self._asked("arm_fault", op, stage, kind, at, engine_id)
        return FaultInfo(5, op, stage, kind, at, "cpu:0")

    def faults(self) -> Faults:
        self._asked("faults")
        return Faults(6, self.armed, {"SendTo.CaptureJob:before": 3})

    def disarm_fault(self, fault: int = 0) -> int:
        self._asked("disarm_fault", fault)
        return len(self.armed)

    def close(self) -> None:
        self.closed += 1

    def _known(self, namespace: str, conversation: str) -> ImageInfo:
        for image in self.images:
            if (image.namespace, image.conversation) == (namespace, conversation):
                return image
        raise error_for("unknown_conversation", f"no image of {conversation!r} in {namespace!r}")

    def connect(self, target: Target) -> DaemonClient:
        """What `main` is given in place of the real way to a daemon."""
        self.calls.append(("connect", target))
        return self


def with_health(health: str) -> FakeClient:
    """A daemon whose health is `health`."""
    return FakeClient(reply=msgspec.structs.replace(STATS, health=health))


def another_build() -> FakeClient:
    """A daemon that runs other files."""
    return FakeClient(welcome=msgspec.structs.replace(WELCOME, package_hash="0" * 32))
