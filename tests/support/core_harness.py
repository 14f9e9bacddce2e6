"""The core with scripted workers and clients: no process, no socket, no clock."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ipc.messages import (
    PROTOCOL_VERSION,
    Capture,
    CaptureJob,
    Census,
    ClosePool,
    Command,
    CopyCommand,
    CopyJob,
    DigestJob,
    Failed,
    Hello,
    JobDone,
    JobFailed,
    MakeShuttle,
    Mark,
    MemfdPool,
    OpenPool,
    PoolClosed,
    PoolOpened,
    Progress,
    Register,
    Registered,
    Reply,
    Report,
    Request,
    Restore,
    RestoreJob,
    ShuttleReady,
    SlotDirect,
    SlotFrom,
    SlotTo,
    Stage,
    StopWorker,
    TakeCensus,
    WorkerReady,
)
from shm.extent import unpack_places
from shm.layout import Plane, StageLayout
from shm.rows import pack_rows, unpack_numbers
from stratad.core.adoption import Legacy
from stratad.core.core import Core
from stratad.core.effects import Append, DropClient, Effect, KillWorker, ReplyTo, SampleMemory, SendTo, SpawnWorker
from stratad.core.memory_tracks import Reading, Role, Target
from stratad.core.records import Record, replay
from stratad.core.restarts import RestartPolicy
from stratad.core.state import Instant, Settings
from tests.support.layouts import stage_layout

KEY_ID = b"12345678"
FINGERPRINT = {"model": "m", "revision": "1", "dtype": "bf16", "kv_format": "rows", "engine_build": "e1"}
ROW_BYTES = 1024
ROWS = 4096
MIB = 1024 * 1024


def settings(**changes: object) -> Settings:
    """Settings of a small daemon."""
    values: dict[str, object] = {
        "instance": "unit",
        "uid": 1000,
        "pid": 1,
        "start_id": b"s" * 16,
        "package_hash": "h",
        "commit": "c",
        "parallel": True,
        "chunk_tokens": 256,
        "budget_bytes": 8 * MIB,
        "budget_images": 100,
        "shuttle_bytes": 2 * MIB,
        "arena_bytes": 4 * MIB,
        "prefault": False,
        "max_message_bytes": MIB,
        "max_clients": 4,
        "max_ops": 64,
        "boot_s": 10.0,
        "job_floor_s": 5.0,
        "link_floor_bytes_per_s": 1e9,
        "restarts": RestartPolicy(0.1, 10.0, 4),
    }
    values.update(changes)
    return Settings(**values)  # type: ignore[arg-type]


def layout(*, state: bool = False, rows: int = ROWS, tokens_per_row: int = 1, token_stride: int = 0) -> StageLayout:
    """One plane of `rows` rows, and 4 KiB of state a slot if asked for."""
    plane = Plane(0, ROW_BYTES, ROW_BYTES, rows, tokens_per_row, token_stride)
    return stage_layout((plane,), Plane(ROW_BYTES * rows, 4096, 4096, 8) if state else None, 256)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as they travel."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


@dataclass
class Harness:
    """A core, its workers' pending commands and its clients' replies. Workers answer when told to.

    The bytes of rows are not simulated: a capture's digests are derived from `content`, a function of (stage, chunk
    number), so that a test decides which chunks are equal.
    """

    core: Core
    now_s: float = 100.0
    sent: dict[str, list[Command]] = field(default_factory=dict)
    replies: dict[int, list[Reply]] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)
    content: Callable[[int, int], bytes] = lambda stage, chunk: bytes([stage, chunk % 256]) * 8
    dropped: set[int] = field(default_factory=set)
    memory: dict[tuple[Role, str], Reading | None] = field(default_factory=dict)  # by `Target.key`; others: `reading`
    seq: int = 0
    auto: bool = True
    wall_clock: Callable[[float], float] = lambda now_s: 1e9 + now_s
    make_shuttles: bool = True  # with `auto`: orders for shuttles are answered
    records: list[Record] = field(default_factory=list)  # the journal
    journal_error: str = ""  # why it cannot be written

    @classmethod
    def make(
        cls,
        workers: int = 2,
        devices: dict[str, str] | None = None,
        legacy: Legacy | None = None,
        **changes: object,
    ) -> "Harness":
        """A core whose workers have all become ready, but those that must wait for an earlier daemon's (`legacy`)."""
        devices = devices or {f"cpu:{n}": f"cpu:{n}" for n in range(workers)}
        harness = cls(Core(settings(**changes), devices, Instant(100.0, 1e9), legacy))
        harness.records.extend(harness.core.records)
        harness.perform(harness.core.start(harness.at))
        harness.tick()
        return harness

    def legacy(self, *, same_pids: bool = True, key_id: bytes = KEY_ID) -> Legacy:
        """What the next daemon finds when this one is killed now."""
        shuttles = {worker.name: dict(worker.sizes) for worker in self.core.state.workers.values()}
        return Legacy(replay(self.records), shuttles, key_id, same_pids)

    def former_gone(self, worker: str) -> None:
        """The process that served the worker's device for the earlier daemon is proven gone."""
        self.perform(self.core.former_gone(worker, self.at))
        self.tick()

    @property
    def at(self) -> Instant:
        """Now."""
        return Instant(self.now_s, self.wall_clock(self.now_s))

    # --- what the shell does ------------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """Note effects; with `auto` boot and administrative commands are answered at once, jobs never."""
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case DropClient():
                    self.dropped.add(effect.client)
                case ReplyTo() if effect.client not in self.dropped:
                    self.replies.setdefault(effect.client, []).append(effect.message)
                case SpawnWorker():
                    self.generations[effect.worker] = effect.generation
                    self.perform(self.core.worker_forked(effect.worker, effect.generation, 1000, 5, self.at))
                    if self.auto:
                        self.ready(effect.worker)
                case Append():
                    if not self.journal_error:
                        self.records.extend(effect.records)
                    self.perform(self.core.journaled(effect.serial, self.journal_error, self.at))
                case SampleMemory():
                    found = [(target, self.memory.get(target.key, self.reading(target))) for target in effect.targets]
                    self.perform(self.core.sampled(found, self.at))
                case SendTo():
                    self._command(effect.worker, effect.command)
                case _:
                    pass

    @staticmethod
    def reading(target: Target, anon: int = 10 * MIB, shmem: int = 0, file: int = MIB) -> Reading:
        """What the kernel says of a process that does nothing unusual."""
        return Reading(target.pid or 900, target.start_ticks or 1, anon, shmem, file)

    def _command(self, worker: str, command: Command) -> None:
        if not self.auto:
            self.sent.setdefault(worker, []).append(command)
            return
        match command:
            case MakeShuttle() if self.make_shuttles:
                self.report(worker, ShuttleReady(command.index, False, 0.0))
            case OpenPool():
                self.report(worker, PoolOpened(command.pool))
            case ClosePool():
                self.report(worker, PoolClosed(command.pool))
            case TakeCensus():
                self.report(worker, Census(command.census, {"staging_bytes": 2 * MIB}))
            case StopWorker():
                pass
            case _:
                self.sent.setdefault(worker, []).append(command)

    def ready(self, worker: str) -> None:
        """The worker's process is ready."""
        self.report(worker, WorkerReady(worker, "host", "xxh3-128", KEY_ID, "cpu", (0,), 0.01))

    def report(self, worker: str, report: Report) -> None:
        """The worker's current process says something."""
        self.perform(self.core.report(worker, self.generations[worker], report, self.at))

    def tick(self, by_s: float = 0.0) -> None:
        """Time passes."""
        self.now_s += by_s
        self.perform(self.core.tick(self.at))

    def worker_gone(self, worker: str, reason: str = "killed by SIGKILL") -> None:
        """The worker's process is proven gone."""
        self.sent.pop(worker, None)
        self.perform(self.core.worker_gone(worker, self.generations[worker], reason, self.at))

    @property
    def kills(self) -> list[KillWorker]:
        """Every kill asked for so far."""
        return [effect for effect in self.effects if isinstance(effect, KillWorker)]

    # --- what clients do ----------------------------------------------------------------------------------------------

    def connect(self, client: int = 1, uid: int = 1000) -> None:
        """A client with its hello."""
        self.perform(self.core.client_connected(client, 4000 + client, uid, 7, self.at))
        self.ask(client, Hello(self.next_seq(), PROTOCOL_VERSION, b""))

    def next_seq(self) -> int:
        """A fresh request number."""
        self.seq += 1
        return self.seq

    def ask(self, client: int, request: Request) -> list[Reply]:
        """Send a request; returns the replies to it so far."""
        self.perform(self.core.request(client, request, self.at))
        return self.answers(client, request.seq)

    def answers(self, client: int, seq: int) -> list[Reply]:
        """All replies with this number."""
        return [reply for reply in self.replies.get(client, []) if reply.seq == seq]

    def final(self, client: int, seq: int) -> Reply:
        """The one final reply of a request."""
        finals = [reply for reply in self.answers(client, seq) if not isinstance(reply, Progress)]
        assert len(finals) == 1, finals
        return finals[0]

    def register(
        self,
        client: int = 1,
        *,
        stages: int = 2,
        namespace: str = "ns",
        layouts: Sequence[StageLayout] | None = None,
        fingerprint: dict[str, str] | None = None,
    ) -> int:
        """A registered engine with one stage a worker; returns its number."""
        chosen = layouts or [layout()] * stages
        request = Register(
            self.next_seq(),
            namespace,
            "engine",
            fingerprint or FINGERPRINT,
            tuple(Stage(n, f"cpu:{n}", MemfdPool(n + 1, one.end_bytes), one) for n, one in enumerate(chosen)),
        )
        self.ask(client, request)
        reply = self.final(client, request.seq)
        assert isinstance(reply, Registered), reply
        return reply.engine_id

    def capture(
        self,
        engine: int,
        conversation: str = "a",
        tokens: Sequence[int] = tuple(range(600)),
        *,
        client: int = 1,
        first_row: int = 0,
        slot: int = 0,
        deadline_s: float = 30.0,
    ) -> int:
        """Submit a capture of token rows; returns its number."""
        request = Capture(
            self.next_seq(),
            engine,
            conversation,
            pack_tokens(tokens),
            ((pack_rows([(first_row, len(tokens))]),),),
            slot,
            "host",
            deadline_s=deadline_s,
        )
        self.ask(client, request)
        return request.seq

    def restore(
        self,
        engine: int,
        conversation: str = "a",
        rows: int = 600,
        *,
        client: int = 1,
        first_row: int = 0,
        tokens: int = -1,
        take: bool = False,
        slot: int = 0,
        resident_tokens: int = 0,
    ) -> int:
        """Submit a restore; returns its number."""
        request = Restore(
            self.next_seq(),
            engine,
            conversation,
            ((pack_rows([(first_row, rows)]),),),
            slot,
            "host",
            tokens=tokens,
            take=take,
            resident_tokens=resident_tokens,
        )
        self.ask(client, request)
        return request.seq

    def slot_copy(
        self,
        engine: int,
        kind: str,
        *,
        client: int = 1,
        tokens: int = 600,
        first_row: int = 0,
        slot: int = 0,
        target_row: int = 1000,
        target_slot: int = 1,
        keep: bool = False,
    ) -> int:
        """Submit a ``slot_direct``, ``slot_to`` or ``slot_from`` of plain rows; returns its number."""
        seq = self.next_seq()
        source, target = (((pack_rows([(first, tokens)]),),) for first in (first_row, target_row))
        requests: dict[str, Request] = {
            "slot_direct": SlotDirect(seq, engine, tokens, source, target, slot, target_slot, "host"),
            "slot_to": SlotTo(seq, engine, tokens, source, slot, "host"),
            "slot_from": SlotFrom(seq, engine, slot, target, target_slot, "host", keep),
        }
        self.ask(client, requests[kind])
        return seq

    def mark(
        self,
        engine: int,
        conversation: str = "a",
        tokens: Sequence[int] = tuple(range(600)),
        *,
        client: int = 1,
        first_row: int = 0,
        slot: int = 0,
        state_slot: int = -1,
        deadline_s: float = 30.0,
    ) -> int:
        """Mark a slot clean and say what it holds; returns the request's number."""
        rows = (pack_rows([(first_row, len(tokens))]), *((pack_rows([(state_slot, 1)]),) if state_slot >= 0 else ()))
        packed = pack_tokens(tokens)
        seq = self.next_seq()
        request = Mark(seq, engine, slot, "clean", conversation, packed, (rows,), "host", deadline_s)
        self.ask(client, request)
        return seq

    def plain_mark(self, engine: int, mark: str, *, client: int = 1, slot: int = 0) -> int:
        """Mark a slot and say nothing of its contents; returns the request's number."""
        seq = self.next_seq()
        self.ask(client, Mark(seq, engine, slot, mark))
        return seq

    def die(self, client: int = 1, *, proven: bool = True) -> None:
        """The client's process is killed: its lifeline ends, then (`proven`) its end is seen."""
        self.perform(self.core.client_gone(client, self.at))
        if proven:
            self.ended(client)

    def ended(self, client: int = 1, *, proven: bool = True) -> None:
        """The end of a client's process was seen, or (not `proven`) cannot be."""
        self.perform(self.core.process_ended(client, self.at, proven=proven))

    # --- what workers do with jobs ------------------------------------------------------------------------------------

    def jobs(self, worker: str) -> list[CopyCommand]:
        """Jobs that the worker has not answered."""
        return [c for c in self.sent.get(worker, []) if isinstance(c, CaptureJob | RestoreJob | CopyJob | DigestJob)]

    def finish(self, worker: str, stage: int | None = None) -> None:
        """The worker does its oldest job well."""
        job = self.jobs(worker)[0]
        self.sent[worker].remove(job)
        digests = b""
        number = int(worker.removeprefix("cpu:")) if stage is None else stage
        if isinstance(job, CaptureJob):
            every = range(len(unpack_places(job.places)) + len(unpack_numbers(job.hinted)))
            digests = b"".join(self.content(number, n) for n in unpack_numbers(job.chunks) or every)
        elif isinstance(job, DigestJob):
            digests = b"".join(self.content(number, n) for n in unpack_numbers(job.chunks))
        self.report(worker, JobDone(job.job, 1, 0.0, 0.0, digests))

    def fail(self, worker: str, code: str = "device_error", chunk: int = -1, rows: tuple[bytes, ...] = ()) -> None:
        """The worker fails its oldest job."""
        job = self.jobs(worker)[0]
        self.sent[worker].remove(job)
        self.report(worker, JobFailed(job.job, code, f"ordered {code}", chunk, rows))

    def finish_all(self) -> None:
        """All workers do all their jobs well, also those that follow."""
        while any(self.jobs(worker) for worker in self.sent):
            for worker in list(self.sent):
                if self.jobs(worker):
                    self.finish(worker)

    def failure(self, client: int, seq: int) -> Failed:
        """The final reply, which is a failure."""
        reply = self.final(client, seq)
        assert isinstance(reply, Failed), reply
        return reply
