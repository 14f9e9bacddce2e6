"""A worker's process in small: its loop, its two lanes, and what its copies leave behind when it dies in the middle."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ipc.messages import (
    BootFailed,
    CancelJob,
    CaptureJob,
    Census,
    ClosePool,
    Command,
    CopyJob,
    DigestJob,
    GroupRestored,
    JobDone,
    JobFailed,
    LaneMoving,
    MakeShuttle,
    OpenPool,
    PoolClosed,
    PoolFailed,
    PoolOpened,
    Report,
    RestoreJob,
    ShuttleFailed,
    ShuttleReady,
    SourceFree,
    StopWorker,
    TakeCensus,
    TraceCopies,
    WorkerReady,
)
from shm.extent import unpack_places
from shm.rows import pack_rows, runs_of, unpack_numbers, unpack_rows
from tests.support.simulation.content import (
    ALGORITHM,
    KEY_ID,
    Granule,
    Pool,
    Segment,
    check,
    cut,
    digest_of,
    granules_of,
    join,
)
from workers.jobs import ChunkWork, JobRefused, capture_chunks, copy_chunks, resident_chunks, restore_chunks

AnyJob: TypeAlias = CaptureJob | RestoreJob | CopyJob | DigestJob


@dataclass(slots=True, eq=False)
class LaneJob:
    """A job at its worker, a chunk at a time. `rows` and `written` are by group, in the order of the tokens."""

    message: AnyJob
    pool: Pool
    works: list[ChunkWork]
    rows: list[list[int]]
    written: list[list[int]]
    at: int = 0
    looks: list[ChunkWork] = field(default_factory=list)  # of a restore: what may be in its rows already
    digests: dict[int, bytes] = field(default_factory=dict)
    staging: list[list[int]] | None = None  # of a capture that has read all its rows already
    stop: bool = False
    skipped: int = 0
    fault: tuple[str, bool] | None = None  # how its next step fails: code, and whether the device is lost

    @property
    def begun(self) -> bool:
        """Whether any of its bytes was copied."""
        return self.at > 0 or self.staging is not None

    def chunk_rows(self, lists: list[list[int]], work: ChunkWork, *, live: bool) -> list[int]:
        """The pool's rows of a chunk."""
        first = work.span.first_row
        return lists[work.span.group][first : first + (work.live_rows if live else work.span.row_count)]


@dataclass(slots=True, eq=False)
class SimWorker:
    """One process. `inbox` and `outbox` are its connection to the supervisor, in order.

    `doomed`: SIGKILL has reached it: it says nothing more, but what was under way may still land. `gone`: nothing of it
    happens any more, and that can be proven.
    """

    name: str
    generation: int
    pid: int
    shared: dict[str, Segment]
    lost: set[tuple[str, int]]
    inbox: deque[Command] = field(default_factory=deque)
    outbox: deque[Report] = field(default_factory=deque)
    descriptors: dict[int, Pool] = field(default_factory=dict)
    pools: dict[int, Pool] = field(default_factory=dict)
    closing: set[int] = field(default_factory=set)
    mapped: dict[int, Segment] = field(default_factory=dict)
    lanes: dict[bool, deque[LaneJob]] = field(default_factory=lambda: {True: deque(), False: deque()})
    ready: bool = False
    hung: bool = False
    stopping: bool = False
    exited: bool = False  # ended by itself
    doomed: bool = False
    condemned: bool = False  # the supervisor has asked for its end
    orphan: bool = False  # its supervisor is gone
    unprovable: bool = False  # the next daemon does not know it, or cannot prove that it is gone
    foreign: bool = False  # the latter: its pid means nothing there
    gone: bool = False
    reason: str = ""
    no_memory: bool = False  # it will find none on its device
    lingers_s: float = 0.0  # after SIGKILL, until it is gone
    dies_s: float = 0.0  # not before this
    late_steps: int = 0  # that may still land once it is doomed
    takes_along: int = -1  # a segment that somebody removes when it is gone
    begun: Segment | None = None  # a shuttle that it has made the name of, and no more
    shuttle_fault: str = ""
    pool_fault: str = ""
    op_of: dict[int, int] = field(default_factory=dict)  # operations, by job
    lost_by: int = 0  # the job that reported a lost device
    finished: set[int] = field(default_factory=set)  # jobs that it will touch no byte for any more
    source_read: set[int] = field(default_factory=set)  # captures that read no row any more
    damaged: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by job, what it could not read

    @property
    def alive(self) -> bool:
        """Whether it runs its own code."""
        return not (self.doomed or self.exited or self.gone)

    @property
    def busy(self) -> bool:
        """Whether a lane has a job."""
        return bool(self.lanes[True] or self.lanes[False])

    @property
    def under_way(self) -> tuple[int, ...]:
        """The jobs that its lanes copy: the first of each."""
        return tuple(jobs[0].message.job for jobs in self.lanes.values() if jobs)

    def boot(self) -> None:
        """Get ready, or say why not and wait to be stopped."""
        self.ready = True
        if self.no_memory:
            self.outbox.append(BootFailed("out_of_memory", "no device memory", 1 << 30, 1 << 20))
            return
        self.outbox.append(WorkerReady(self.name, "host", ALGORITHM, KEY_ID, "simulated", (0,), 0.01))

    def end(self, reason: str) -> None:
        """Exit by itself, after what was being copied has ended."""
        self.exited = True
        self.reason = reason

    # --- commands -----------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Read one command."""
        command = self.inbox[0]
        if isinstance(command, MakeShuttle) and self._begin_shuttle(command):
            return
        self.inbox.popleft()
        match command:
            case MakeShuttle():
                self._make_shuttle(command)
            case OpenPool():
                self._open_pool(command)
            case ClosePool():
                self.descriptors.pop(command.pool, None)
                if self._in_use(command.pool):
                    self.closing.add(command.pool)
                else:
                    self._close_pool(command.pool)
            case CaptureJob() | RestoreJob() | CopyJob() | DigestJob():
                self._start(command)
            case CancelJob():
                for lane in self.lanes.values():
                    for job in lane:
                        job.stop = job.stop or job.message.job == command.job
            case TakeCensus():
                self.outbox.append(Census(command.census, {"staging_bytes": 1 << 20}))
            case TraceCopies():
                pass
            case StopWorker():
                self.stopping = True
                for lane in self.lanes.values():
                    for job in [job for job in list(lane)[1:] if not job.begun]:
                        lane.remove(job)
                        self._end(job, JobFailed(0, "stopping", "the worker stops"))
                self._exit_if_idle()
            case _:
                raise NotImplementedError(type(command).__name__)

    def _begin_shuttle(self, order: MakeShuttle) -> bool:
        """Make the name of a new shuttle: to reserve its memory takes a while, in which anything may happen."""
        if order.adopt or order.segment in self.shared or self.shuttle_fault:
            return False
        self.begun = self.shared[order.segment] = Segment(order.segment, self.name, order.index, self.pid)
        self.lost.discard((self.name, order.index))
        return True

    def _make_shuttle(self, order: MakeShuttle) -> None:
        segment = self.shared.get(order.segment) if order.adopt else self.begun  # whatever became of the latter's name
        begun, self.begun = self.begun, None
        if self.shuttle_fault or segment is None or (order.adopt and not segment.whole):
            gone = order.adopt and segment is None
            code, self.shuttle_fault = self.shuttle_fault or ("missing" if gone else "exists"), ""
            if begun is not None:
                named = self.shared.pop(order.segment, begun)  # by name: it does not look whose that is now
                check(named is begun, f"{self.pid} gives {order.segment} up and removes what {named.maker} made")
            self.outbox.append(ShuttleFailed(order.index, code, f"no shuttle: {code}", order.shuttle_bytes, 0))
            return
        segment.whole = True
        self.mapped[order.index] = segment
        self.outbox.append(ShuttleReady(order.index, False, 0.0))

    def _open_pool(self, order: OpenPool) -> None:
        pool = self.descriptors.get(order.pool)
        if pool is None or self.pool_fault:
            code, self.pool_fault = self.pool_fault or "probe_failed", ""
            self.outbox.append(PoolFailed(order.pool, code, f"no pool: {code}"))
            return
        self.pools[order.pool] = pool
        self.outbox.append(PoolOpened(order.pool))

    def _close_pool(self, pool: int) -> None:
        self.closing.discard(pool)
        self.pools.pop(pool, None)
        self.outbox.append(PoolClosed(pool))

    def _in_use(self, pool: int) -> bool:
        return any(job.message.pool == pool for lane in self.lanes.values() for job in lane)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _start(self, message: AnyJob) -> None:
        pool = self.pools.get(message.pool)
        try:
            if self.stopping:
                raise JobRefused("stopping", "the worker stops")
            if pool is None:
                raise JobRefused("not_registered", f"pool {message.pool} is not open")
            job = self._plan(message, pool)
        except JobRefused as refused:
            self.finished.add(message.job)
            self.outbox.append(JobFailed(message.job, refused.code, refused.message))
            return
        self.lanes[not isinstance(message, RestoreJob)].append(job)

    def _plan(self, message: AnyJob, pool: Pool) -> LaneJob:
        layout = pool.layout
        positions = unpack_numbers(message.positions)
        rows = [_rows(packed) for packed in message.rows]
        written: list[list[int]] = []
        looks: list[ChunkWork] = []
        match message:
            case CaptureJob():
                hinted, only = unpack_numbers(message.hinted), unpack_numbers(message.chunks)
                places = unpack_places(message.places)
                found = capture_chunks(layout, message.tokens, positions, places, hinted, only)
                works = [*found.hinted, *found.copied]
            case CopyJob():
                works = copy_chunks(layout, message.tokens, positions)
                written = [_rows(packed) for packed in message.target_rows]
            case DigestJob():
                every = copy_chunks(layout, message.tokens, positions)
                works = [every[number] for number in unpack_numbers(message.chunks)]
            case RestoreJob():
                works = restore_chunks(
                    layout,
                    message.image_tokens,
                    message.tokens,
                    positions,
                    unpack_places(message.places),
                    digests=message.digests,
                    algorithms=message.algorithms,
                )
                written = rows
                looks = resident_chunks(works, message.resident_tokens, ALGORITHM)
        return LaneJob(message, pool, works, rows, written, looks=looks)

    def read_ahead(self, job: LaneJob) -> None:
        """A capture whose copies run behind: all its rows are read, and the engine may have them back."""
        job.staging = [self._read_rows(job, work) for work in job.works]
        self.source_read.add(job.message.job)
        if not self.doomed:
            self.outbox.append(SourceFree(job.message.job))

    def change(self, lane: bool, at: int) -> None:
        """The lane goes on with another of its jobs, which may have come later; the one before rests."""
        jobs = self.lanes[lane]
        self.outbox.append(LaneMoving(jobs[0].message.job))
        job = jobs[at]
        del jobs[at]
        jobs.appendleft(job)

    def step(self, lane: bool) -> None:
        """Copy the next chunk of a lane's job, or end the job."""
        job = self.lanes[lane][0]
        if job.fault is not None and not self.doomed:
            code, sticky = job.fault
            self.lanes[lane].popleft()
            self._end(job, JobFailed(0, code, f"ordered {code}", self._offender(job, code), sticky=sticky))
            if sticky:
                self.lost_by = job.message.job
                self.end("exit status 70")
        elif job.stop and not self.doomed:
            self.lanes[lane].popleft()
            self._end(job, JobFailed(0, "cancelled", "cancelled between two slices"))
        elif job.looks:
            work = job.looks.pop(0)
            if digest_of(self._read_rows(job, work)) == work.digest:
                job.works.remove(work)
                job.skipped += 1
        elif job.at == len(job.works):
            if not self.doomed:
                self.lanes[lane].popleft()
                digests = b"".join(digest for _, digest in sorted(job.digests.items()))
                self._end(job, JobDone(0, 1, 0.0, 0.0, digests, skipped_bytes=job.skipped))
        else:
            self._copy(lane, job, job.works[job.at])

    def _offender(self, job: LaneJob, code: str) -> int:
        return job.works[job.at].number if code == "source_changed" and job.at < len(job.works) else -1

    def tear(self, lane: bool, share: float) -> None:
        """Leave the next chunk half done: the process died in the middle of its copy."""
        job = self.lanes[lane][0]
        if job.at == len(job.works) or isinstance(job.message, DigestJob) or job.looks:
            return
        work = job.works[job.at]
        if isinstance(job.message, CaptureJob):
            content = job.staging[job.at] if job.staging is not None else self._read_rows(job, work)
            pieces = self._pieces(work, content)
            for (shuttle, granule), piece in pieces[: int(share * len(pieces))]:
                self._write_granule(shuttle, granule, piece)
        else:
            content = self._read_chunk(work) if isinstance(job.message, RestoreJob) else self._read_rows(job, work)
            targets = job.chunk_rows(job.written, work, live=True)
            if len(content) >= len(targets):
                self._write_rows(job, work, content[: int(share * len(targets))])

    @staticmethod
    def _pieces(work: ChunkWork, content: list[int]) -> list[tuple[tuple[int, int], Granule]]:
        """What a capture writes where; of a chunk that is only digested nothing."""
        places = granules_of(work.place)
        return list(zip(places, cut(content, work.place.length_bytes, len(places)), strict=False)) if places else []

    def _copy(self, lane: bool, job: LaneJob, work: ChunkWork) -> None:
        job.at += 1
        if isinstance(job.message, CaptureJob):
            content = job.staging[job.at - 1] if job.staging is not None else self._read_rows(job, work)
            for (shuttle, granule), piece in self._pieces(work, content):
                self._write_granule(shuttle, granule, piece)
            job.digests[work.number] = digest_of(content)
        elif isinstance(job.message, RestoreJob):
            content = self._read_chunk(work)
            if digest_of(content) != work.digest:
                job.at -= 1  # no row of it was touched
                if not self.doomed:
                    self.lanes[lane].popleft()
                    self.damaged[job.message.job] = granules_of(work.place)
                    self._end(job, JobFailed(0, "damaged", f"chunk {work.number} is damaged", work.number))
                return
            self._write_rows(job, work, content[: work.live_rows])
            ends = job.at == len(job.works) or job.works[job.at].span.group != work.span.group
            if job.message.layered and ends and not self.doomed:
                self.outbox.append(GroupRestored(job.message.job, work.span.group))
        elif isinstance(job.message, DigestJob):
            job.digests[work.number] = digest_of(self._read_rows(job, work))
        else:
            self._write_rows(job, work, self._read_rows(job, work))

    def _read_rows(self, job: LaneJob, work: ChunkWork) -> list[int]:
        rows = job.pool.rows[work.span.group]
        return [rows[row] for row in job.chunk_rows(job.rows, work, live=False)]

    def _write_rows(self, job: LaneJob, work: ChunkWork, content: Sequence[int]) -> None:
        rows = job.pool.rows[work.span.group]
        for row, value in zip(job.chunk_rows(job.written, work, live=True), content, strict=False):
            rows[row] = value

    def _read_chunk(self, work: ChunkWork) -> list[int]:
        """The rows of a chunk; what was never written, or is not mapped here, has none."""
        found = []
        for shuttle, granule in granules_of(work.place):
            segment = self.mapped.get(shuttle)
            found.append(segment.granules.get(granule, ()) if segment is not None else ())
        return join(found)[: work.span.row_count]

    def _write_granule(self, shuttle: int, granule: int, content: tuple[int, ...]) -> None:
        segment = self.mapped.get(shuttle)
        if segment is not None:
            segment.write(granule, content)

    def _end(self, job: LaneJob, report: JobDone | JobFailed) -> None:
        number = job.message.job
        if isinstance(report, JobDone):
            report = JobDone(number, 1, 0.0, 0.0, report.digests, skipped_bytes=report.skipped_bytes)
        else:
            undefined = self._undefined(job)
            report = JobFailed(number, report.code, report.message, report.chunk, undefined, report.sticky)
        self.finished.add(number)
        self.outbox.append(report)
        if job.message.pool in self.closing and not self._in_use(job.message.pool):
            self._close_pool(job.message.pool)
        self._exit_if_idle()

    def _undefined(self, job: LaneJob) -> tuple[bytes, ...]:
        """The rows that a job that failed has written, by group."""
        touched: list[list[int]] = [[] for _ in job.written]
        for work in job.works[: job.at]:
            if job.written:
                touched[work.span.group].extend(job.chunk_rows(job.written, work, live=True))
        return tuple(pack_rows(runs_of(rows)) for rows in touched) if any(touched) else ()

    def _exit_if_idle(self) -> None:
        if self.stopping and not self.busy and not self.exited:
            self.end("exit status 0")


def _rows(packed: bytes) -> list[int]:
    return [row for first, count in unpack_rows(packed) for row in range(first, first + count)]
