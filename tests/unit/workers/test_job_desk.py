"""What jobs leave behind: the next one is always answered, and nothing of one that was answered is kept."""

import contextlib
import ctypes
import gc
import os
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import msgspec
import pytest

from ipc.credentials import Credentials
from ipc.lifeline import Lifeline
from ipc.messages import CaptureJob, CopyJob, EventAwaited, JobDone, JobFailed, RestoreJob
from shm.extent import ChunkPlace, pack_places
from shm.gpu_runtime import GpuRuntime
from tests.support.layouts import packed_rows
from tests.support.wait import wait_until
from tests.unit.workers.fake_gpu import AT_ONCE
from tests.unit.workers.gpu_rig import Gpu
from tests.unit.workers.rig import Rig, slot_layout
from tests.unit.workers.supervisor import own_process
from workers.cpu_device import CpuCopier
from workers.device import DevicePool
from workers.fault_orders import FaultBook
from workers.faulty import FaultyDevice, FaultyPool
from workers.job_desk import ActiveJob, DeviceLost, JobDesk, JobLetter, LaneEnded
from workers.orders import PoolLetter, PoolMade, PoolOrders
from workers.pool_book import EngineProcess, PoolEntry
from workers.rowmap import RowMap

Job: TypeAlias = CaptureJob | RestoreJob | CopyJob
Answer: TypeAlias = JobDone | JobFailed | EventAwaited
TOKENS = 40
INLINE, ON_ITS_THREAD = 1 << 30, 0


class Desk:
    """A desk over a device with one pool; letters and reports are taken in by `answer`."""

    def __init__(self, device: FaultyDevice, pool: DevicePool, inline_bytes: int) -> None:
        ours, self._theirs = socket.socketpair()
        self._lifeline = Lifeline(ours, Credentials(os.getpid(), os.getuid(), os.getgid(), 0), b"", b"")
        self._pool_letters: SimpleQueue[PoolLetter] = SimpleQueue()
        self._pools = PoolOrders(device, self._lifeline, self._pool_letters.put)
        self._pools.answer(PoolMade(PoolEntry(1, pool, EngineProcess(*own_process()))))
        self._letters: SimpleQueue[JobLetter] = SimpleQueue()
        self._answers: list[Answer] = []
        self.desk = JobDesk(device, self._pools, inline_bytes, post=self._letters.put, send=self._answers.append)
        self._threads = [*self.desk.threads, self._pools.thread]
        for thread in self._threads:
            thread.start()

    def answer(self, job: Job) -> Answer:
        """Start a job and wait for its answer."""
        self.desk.start(job)
        return self.wait(1)[0]

    def wait(self, count: int) -> list[Answer]:
        """The next answers. With the last one nothing is under way."""
        while len(self._answers) < count:
            letter = self._letters.get(timeout=10.0)
            if isinstance(letter, LaneEnded):
                self.desk.lane_ended(letter)
        taken, self._answers[:] = self._answers[:], []
        return taken

    def close(self) -> None:
        self._pools.close(1)
        self._pools.answer(self._pool_letters.get(timeout=10.0))
        assert all(thread.stop(5.0) for thread in self._threads)
        self._lifeline.close()
        self._theirs.close()


class Jobs:
    """Jobs of every kind over one layout: "capture" fills `places`, "restore" reads them."""

    def __init__(self, places: Sequence[ChunkPlace]) -> None:
        self.layout = slot_layout()
        self.places = pack_places(places)
        self.rows = packed_rows(self.layout, range(TOKENS))
        self.others = packed_rows(self.layout, [*range(63, 63 - 20, -1), *range(40, 44)][:20])
        self.digests = b""
        self.algorithm = ""

    def make(self, kind: str, job: int = 1) -> Job:
        if kind == "capture":
            return CaptureJob(job, 1, self.rows, TOKENS, self.places, False)
        if kind == "copy":
            return CopyJob(job, 1, packed_rows(self.layout, range(20)), self.others, 20, False)
        digests = self.digests if kind == "restore" else bytes(len(self.digests))  # "damaged"
        algorithms = (self.algorithm,)
        return RestoreJob(job, 1, self.rows, TOKENS, TOKENS, self.places, digests, algorithms, False)


@contextlib.contextmanager
def on_cpu(faults: dict[str, str], inline_bytes: int) -> Iterator[tuple[Desk, Jobs, Rig]]:
    rig = Rig(slot_layout(), faults={"leak_bytes": "0", **faults}, slice_bytes=1 << 20)
    assert isinstance(rig.device, FaultyDevice)
    jobs = Jobs(rig.places(TOKENS))
    jobs.algorithm = rig.device.digest_algorithm
    desk = Desk(rig.device, rig.pool, inline_bytes)
    try:
        yield desk, jobs, rig
    finally:
        desk.close()
        rig.close()


@contextlib.contextmanager
def on_gpu(
    runtime: GpuRuntime, faults: dict[str, str], inline_bytes: int = ON_ITS_THREAD, event_handle: bytes = b""
) -> Iterator[tuple[Desk, Jobs, DevicePool]]:
    gpu = Gpu(runtime, slot_layout(), slice_bytes=1 << 20)
    device = FaultyDevice(gpu.cuda, FaultBook({"leak_bytes": "0", **faults}))
    pool = device.open_pool(gpu.stage(event_handle=event_handle), -1)
    jobs = Jobs(gpu.places(TOKENS))
    jobs.algorithm = device.digest_algorithm
    desk = Desk(device, pool, inline_bytes)
    try:
        yield desk, jobs, pool
    finally:
        desk.close()
        gpu.close()


# --- the next ticket of the lane --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "inline_bytes", "fault"),
    [
        ("capture", INLINE, "copy_error"),
        ("restore", INLINE, "copy_oom"),
        ("capture", ON_ITS_THREAD, "copy_oom"),
        ("restore", ON_ITS_THREAD, "copy_error"),
        ("copy", ON_ITS_THREAD, "copy_error"),
        ("damaged", INLINE, "copy_error"),
    ],
)
def test_a_thousand_failures_in_a_row_and_each_next_job_is_answered(kind: str, inline_bytes: int, fault: str) -> None:
    """Of each lane's copies every second one fails (none of "damaged", which fails before it copies)."""
    with on_cpu({f"restore.{fault}": "2%", f"capture.{fault}": "2%"}, inline_bytes) as (desk, jobs, rig):
        first = desk.answer(jobs.make("capture"))
        assert isinstance(first, JobDone), first
        jobs.digests = first.digests
        before = rig.memory.tobytes()
        lane_is_fresh = kind in ("restore", "damaged")
        failed = 0
        for number in range(2000 if kind != "damaged" else 1000):
            answer = desk.answer(jobs.make(kind, number))
            assert answer.job == number
            failed += isinstance(answer, JobFailed)
            expect_failure = kind == "damaged" or number % 2 == (1 if lane_is_fresh else 0)
            assert isinstance(answer, JobFailed) is expect_failure, (number, answer)
            if isinstance(answer, JobDone) and kind == "capture":
                assert answer.digests == jobs.digests
        assert failed == 1000
        assert desk.desk.idle
        if kind in ("restore", "damaged"):
            assert rig.memory.tobytes() == before


# --- the engine's event -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", [AT_ONCE], indirect=True)
@pytest.mark.parametrize("inline_bytes", [INLINE, ON_ITS_THREAD])
@pytest.mark.parametrize("pending", [0, 1, 3])
@pytest.mark.usefixtures("clean")
def test_who_waits_for_an_event_says_so_once_and_that_it_is_reached_before_it_copies(
    library: ctypes.CDLL, runtime: GpuRuntime, inline_bytes: int, pending: int
) -> None:
    event = runtime.event_create(interprocess=True)
    with on_gpu(runtime, {}, inline_bytes, runtime.ipc_event_handle(event)) as (desk, jobs, _):
        library.event_waits(pending)
        desk.desk.start(msgspec.structs.replace(jobs.make("capture", 7), poll_event=True))
        for _ in range(pending):
            desk.desk.ask_events(time.monotonic() + 1.0)
        told = [EventAwaited(7), EventAwaited(7, reached=True)] if pending > 1 else []
        *waits, answer = desk.wait(len(told) + 1)
        assert waits == told
        assert isinstance(answer, JobDone), answer
        assert (answer.event_s > 0.0) == (pending > 0)
    runtime.event_destroy(event)


def test_a_report_says_how_long_the_job_waited_for_its_lane() -> None:
    with on_cpu({"capture.slow_copy_s": "0.02"}, ON_ITS_THREAD) as (desk, jobs, _):
        start_s = time.monotonic()
        desk.desk.start(jobs.make("capture", 1))
        desk.desk.start(jobs.make("capture", 2))
        between_s = time.monotonic() - start_s
        desk.desk.start(jobs.make("capture", 3))
        desk.desk.cancel(3)
        cancelled, first, second = sorted(desk.wait(3), key=lambda answer: answer.job % 3)
        assert isinstance(first, JobDone), first
        assert isinstance(second, JobDone), second
        assert isinstance(cancelled, JobFailed), cancelled
        assert second.queue_s >= first.lane_s - between_s
        assert cancelled.queue_s > 0.0
        assert (first.event_s, second.event_s, cancelled.event_s) == (0.0, 0.0, 0.0)
        start_s = time.monotonic()
        alone = desk.answer(jobs.make("capture", 4))
        assert isinstance(alone, JobDone), alone
        assert alone.queue_s + alone.lane_s <= time.monotonic() - start_s


def test_both_lanes_are_told_how_to_take_times(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[CpuCopier, bool]] = []
    monkeypatch.setattr(CpuCopier, "measure", lambda copier, *, exact: told.append((copier, exact)))
    with on_cpu({}, INLINE) as (desk, _, _):
        desk.desk.measure(exact=True)
        desk.desk.measure(exact=False)
        assert [exact for _, exact in told] == [True, True, False, False]
        assert len({id(copier) for copier, _ in told}) == 2


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept(but: Sequence[object] = ()) -> list[object]:
    """Everything of jobs that lives, without a collection: what only that frees is kept for who knows how long."""
    known = set(map(id, but))
    # By its type: `isinstance` reads the `__class__` of everything there is, and what libraries have deprecated warns.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), RowMap | ActiveJob)]
    return [thing for thing in found if id(thing) not in known]


def ends(desk: Desk, jobs: Jobs, kind: str, end: str) -> Answer:
    """Bring a job to the given end."""
    if end == "cancelled":
        desk.desk.start(jobs.make(kind, 7))
        desk.desk.cancel(7)
        return desk.wait(1)[0]
    if end == "sticky":
        with pytest.raises(DeviceLost):
            desk.answer(jobs.make(kind, 7))
        return desk.wait(1)[0]
    return desk.answer(jobs.make(kind, 7))


FAULTS = {"done": "", "failed": "copy_error", "cancelled": "slow_copy_s", "sticky": "copy_sticky"}
CODES = {"done": "", "failed": "device_error", "cancelled": "cancelled", "sticky": "device_error"}


def check_nothing_is_kept(desk: Desk, jobs: Jobs, kind: str, end: str) -> None:
    of_other_tests = kept()
    answer = ends(desk, jobs, kind, end)
    if end == "done":
        assert isinstance(answer, JobDone), answer
    else:
        assert isinstance(answer, JobFailed), answer
        assert answer.code == CODES[end]
    del answer
    wait_until(lambda: not kept(of_other_tests), 2.0)  # the lane's thread lets go right after it has told the loop


def faults_for(kind: str, end: str) -> dict[str, str]:
    """Strikes at the second copy of the kind's lane: its first one is of the capture that comes before each trial."""
    copy = "1" if kind == "restore" else "2"
    lane = "restore" if kind == "restore" else "capture"
    return {f"{lane}.{FAULTS[end]}": "0.02" if end == "cancelled" else copy} if FAULTS[end] else {}


@pytest.mark.parametrize("kind", ["capture", "restore", "copy"])
@pytest.mark.parametrize(
    ("end", "inline_bytes"),
    [(end, ON_ITS_THREAD) for end in CODES] + [(end, INLINE) for end in CODES if end != "cancelled"],
)
def test_nothing_of_an_answered_job_is_kept(kind: str, end: str, inline_bytes: int) -> None:
    with on_cpu(faults_for(kind, end), inline_bytes) as (desk, jobs, rig):
        before = kept()
        control = rig.plan(jobs.make("capture"))
        assert kept(before), "the check itself must see what is there"
        del control, before
        first = desk.answer(jobs.make("capture"))
        assert isinstance(first, JobDone), first
        jobs.digests = first.digests
        check_nothing_is_kept(desk, jobs, kind, end)
        pool = weakref.ref(rig.pool)
        assert isinstance(pool(), FaultyPool)
    del desk, jobs, rig, first
    assert pool() is None, "whoever unmapped it still has it"


@pytest.mark.parametrize("runtime", [AT_ONCE], indirect=True)
@pytest.mark.parametrize("kind", ["capture", "restore", "copy"])
@pytest.mark.parametrize("end", CODES)
@pytest.mark.usefixtures("clean")
def test_nothing_of_an_answered_job_is_kept_on_a_gpu(runtime: GpuRuntime, kind: str, end: str) -> None:
    with on_gpu(runtime, faults_for(kind, end)) as (desk, jobs, opened):
        first = desk.answer(jobs.make("capture"))
        assert isinstance(first, JobDone), first
        jobs.digests = first.digests
        check_nothing_is_kept(desk, jobs, kind, end)
        pool = weakref.ref(opened)
    del desk, jobs, opened, first
    assert pool() is None, "whoever unmapped it still has it"
