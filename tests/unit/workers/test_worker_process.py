"""A real worker process, forked by a real template, against a small supervisor."""

import mmap
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ipc.lifeline import MAX_DRAINED
from ipc.messages import (
    ArmFault,
    BootFailed,
    CancelJob,
    CaptureJob,
    Census,
    ClosePool,
    DisarmFault,
    EventAwaited,
    FaultStruck,
    Forked,
    JobDone,
    JobFailed,
    MakeShuttle,
    OpenPool,
    PoolClosed,
    PoolFailed,
    PoolOpened,
    RestoreJob,
    ShuttleFailed,
    ShuttleReady,
    StopWorker,
    TakeCensus,
    TemplateReady,
    TraceCopies,
    WorkerHello,
    WorkerReady,
)
from shm.digest_key import key_id
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent, granules_for, pack_places
from shm.layout import StageLayout
from shm.memfd import create_pool
from shm.shuttle import unlink
from tests.support.layouts import packed_rows
from tests.support.wait import wait_until
from tests.unit.workers.rig import slot_layout
from tests.unit.workers.supervisor import SmallSupervisor, own_process
from workers import exit_codes

SHUTTLE_BYTES = 64 * GRANULE_BYTES


class Pool:
    """A pool of ours that a worker maps."""

    def __init__(self, layout: StageLayout) -> None:
        self.layout = layout
        self.descriptor = create_pool("test", layout.end_bytes)
        self.memory = mmap.mmap(self.descriptor, layout.end_bytes)
        self.memory[:] = os.urandom(layout.end_bytes)

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[SmallSupervisor]:
    with SmallSupervisor(tmp_path) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(slot_layout())
    yield made
    made.close()


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"/stratad.t{os.getpid()}.cpu0.0"
    yield name
    unlink(name)


def fork_worker(supervisor: SmallSupervisor, **changes: object) -> Forked:
    supervisor.start()
    supervisor.heard(TemplateReady)
    supervisor.order(supervisor.spec(**changes))
    forked = supervisor.heard(Forked)
    hello = supervisor.report(WorkerHello)
    assert (hello.worker, hello.generation, hello.token, hello.pid) == ("cpu0", 1, bytes(16), forked.pid)
    return forked


def open_pool(supervisor: SmallSupervisor, pool: Pool, number: int = 1) -> None:
    supervisor.hand_over(number, pool.descriptor)
    stage = supervisor.stage(pool.layout, number, pool.memory[:16])
    assert supervisor.ask(OpenPool(number, stage, *own_process()), PoolOpened).pool == number


def maps_a_pool(pid: int) -> bool:
    return "/memfd:" in Path(f"/proc/{pid}/maps").read_text()


def places_of(layout: StageLayout, tokens: int) -> bytes:
    at = GRANULE_BYTES
    places: list[ChunkPlace] = []
    for span in layout.chunks(tokens):
        size = granules_for(span.length_bytes) * GRANULE_BYTES
        places.append(ChunkPlace(span.length_bytes, (Extent(0, at, size),)))
        at += size
    return pack_places(places)


def rows_of(layout: StageLayout, tokens: int) -> tuple[bytes, ...]:
    return packed_rows(layout, range(tokens))


def capture_job(layout: StageLayout, job: int, tokens: int = 64, *, poll_event: bool = False) -> CaptureJob:
    return CaptureJob(job, 1, rows_of(layout, tokens), tokens, places_of(layout, tokens), poll_event)


def restore_job(layout: StageLayout, job: int, digests: bytes, tokens: int = 64) -> RestoreJob:
    rows = rows_of(layout, tokens)
    return RestoreJob(job, 1, rows, tokens, tokens, places_of(layout, tokens), digests, ("xxh3-128",), False)


def make_shuttle(supervisor: SmallSupervisor, segment: str) -> None:
    ready = supervisor.ask(MakeShuttle(0, segment, SHUTTLE_BYTES, False), ShuttleReady)
    assert (ready.index, ready.locked) == (0, False)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_a_conversation_goes_and_comes_back(
    supervisor: SmallSupervisor, pool: Pool, segment: str, inline_bytes: int
) -> None:
    forked = fork_worker(supervisor, inline_bytes=inline_bytes)
    ready = supervisor.report(WorkerReady)
    assert (ready.device, ready.digest_algorithm, ready.digest_path) == ("cpu:0", "xxh3-128", "numpy")
    assert ready.key_id == key_id(bytes(range(32)))
    assert ready.cpus == (0,) == tuple(psutil.Process(forked.pid).cpu_affinity())
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    before = pool.memory[:]
    done = supervisor.ask(capture_job(pool.layout, 7), JobDone)
    assert done.job == 7
    pool.memory[:] = bytes(len(before))
    restored = supervisor.ask(restore_job(pool.layout, 8, done.digests), JobDone)
    assert restored.job == 8
    for plane in pool.layout.groups[0].planes:
        for row in range(plane.rows):
            start = plane.offset_bytes + row * plane.row_stride_bytes
            assert pool.memory[start : start + plane.row_bytes] == before[start : start + plane.row_bytes]
    first = supervisor.ask(TakeCensus(1), Census).resources
    for job in range(100, 160):
        assert supervisor.ask(capture_job(pool.layout, job), JobDone).digests == done.digests
    last = supervisor.ask(TakeCensus(2), Census).resources
    counts = ("jobs_done",)
    assert {k: v for k, v in last.items() if k not in counts} == {k: v for k, v in first.items() if k not in counts}
    assert last["jobs_done"] == first["jobs_done"] + 60
    assert supervisor.ask(ClosePool(1), PoolClosed).pool == 1
    assert supervisor.ask(TakeCensus(3), Census).resources["pools"] == 0
    supervisor.send(StopWorker())
    assert supervisor.exited().status == exit_codes.STOPPED


def test_a_damaged_shuttle_writes_no_row(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor)
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    done = supervisor.ask(capture_job(pool.layout, 1), JobDone)
    with Path(f"/dev/shm{segment}").open("r+b") as file:
        file.seek(GRANULE_BYTES + 100)
        byte = file.read(1)[0]
        file.seek(GRANULE_BYTES + 100)
        file.write(bytes([byte ^ 4]))
    pool.memory[:] = bytes(len(pool.memory))
    failed = supervisor.ask(restore_job(pool.layout, 2, done.digests), JobFailed)
    assert (failed.code, failed.chunk, failed.rows_undefined) == ("damaged", 0, ())
    assert not any(pool.memory[:])


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_a_fault_is_armed_and_disarmed_while_the_worker_runs(
    supervisor: SmallSupervisor, pool: Pool, segment: str, inline_bytes: int
) -> None:
    fork_worker(supervisor, inline_bytes=inline_bytes, allow_faults=True)
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    for fault, kind in ((1, "oom"), (2, "error")):
        supervisor.send(ArmFault(fault, "capture", 3, kind, 1))
    supervisor.send(DisarmFault(2))
    job = msgspec.structs.replace(capture_job(pool.layout, 7), op="capture", stage=3)
    assert supervisor.ask(job, JobFailed).code == "out_of_memory"
    assert supervisor.report(FaultStruck).fault == 1
    assert supervisor.ask(job, JobDone).job == 7


def test_a_worker_that_allows_no_faults_has_none(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor)
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    supervisor.send(ArmFault(1, "capture", 3, "kill", 1))
    job = msgspec.structs.replace(capture_job(pool.layout, 7), op="capture", stage=3)
    assert supervisor.ask(job, JobDone).job == 7


def test_pidfd_and_status_of_a_killed_worker(supervisor: SmallSupervisor) -> None:
    forked = fork_worker(supervisor)
    supervisor.report(WorkerReady)
    assert len(supervisor.pidfds) == 1
    signal.pidfd_send_signal(supervisor.pidfds[0], signal.SIGKILL)
    exited = supervisor.exited()
    assert (exited.pid, exited.status) == (forked.pid, -signal.SIGKILL)
    supervisor.order(supervisor.spec(generation=2))
    assert supervisor.heard(Forked).generation == 2


def test_a_stop_that_is_sent_to_every_process_is_left_to_the_supervisor(supervisor: SmallSupervisor) -> None:
    forked = fork_worker(supervisor)
    supervisor.report(WorkerReady)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(forked.pid, number)
    assert supervisor.ask(TakeCensus(1), Census).census == 1
    supervisor.send(StopWorker())
    assert supervisor.exited().status == exit_codes.STOPPED


def test_the_end_of_the_lifeline_ends_the_worker(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor)
    supervisor.report(WorkerReady)
    assert supervisor.lifeline is not None
    supervisor.lifeline.close()
    assert supervisor.exited(1.0).status == exit_codes.SUPERVISOR_LOST


def test_the_end_of_the_template_ends_its_workers(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor)
    supervisor.report(WorkerReady)
    supervisor.pump()
    assert supervisor.channel is not None
    supervisor.channel.close()
    supervisor.channel = None
    poller = select.poll()
    poller.register(supervisor.pidfds[0], select.POLLIN)
    assert poller.poll(1000)
    assert supervisor.processes[0].wait(5) == exit_codes.STOPPED


def test_a_segment_that_exists_is_not_made_again(supervisor: SmallSupervisor, segment: str) -> None:
    fork_worker(supervisor)
    make_shuttle(supervisor, segment)
    again = supervisor.ask(MakeShuttle(1, segment, SHUTTLE_BYTES, False), ShuttleFailed)
    assert again.code == "exists"


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        ({"boot_error": "1"}, exit_codes.BOOT_FAILED),
        ({"boot_oom": str(5 << 20)}, exit_codes.BOOT_FAILED),
        ({"no such fault": "1"}, exit_codes.BOOT_FAILED),
    ],
)
def test_a_worker_that_cannot_start_says_so_by_its_status(
    supervisor: SmallSupervisor, faults: dict[str, str], status: int
) -> None:
    fork_worker(supervisor, faults=faults)
    said = supervisor.report(BootFailed)
    assert said.code == ("out_of_memory" if "boot_oom" in faults else "device_error")
    assert (said.wanted_bytes, said.free_bytes) == ((5 << 20, 1 << 20) if "boot_oom" in faults else (0, 0))
    supervisor.send(StopWorker())  # heard: it need not wait any longer
    assert supervisor.exited().status == status


def test_no_wanted_cpu_allowed_means_all(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor, cpus=(4095,))
    assert set(supervisor.report(WorkerReady).cpus) == os.sched_getaffinity(0)


def test_a_lost_device_is_reported_then_left(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor, faults={"copy_sticky": "1"})
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    failed = supervisor.ask(capture_job(pool.layout, 1), JobFailed)
    assert (failed.code, failed.sticky) == ("device_error", True)
    assert supervisor.exited().status == exit_codes.DEVICE_LOST


def test_a_waiting_event_holds_up_nobody(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor, faults={"event_stuck": "1"})
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    supervisor.send(capture_job(pool.layout, 1, poll_event=True))
    assert supervisor.ask(capture_job(pool.layout, 2), JobDone).job == 2
    assert supervisor.report(EventAwaited) == EventAwaited(1)  # or its time would be thought to be that of the copy
    supervisor.send(CancelJob(1))
    failed = supervisor.report(JobFailed)
    assert (failed.job, failed.code) == (1, "cancelled")


def test_an_event_of_a_dead_engine_is_given_up(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor, faults={"event_stuck": "1"})
    make_shuttle(supervisor, segment)
    supervisor.hand_over(1, pool.descriptor)
    stage = supervisor.stage(pool.layout, 1, pool.memory[:16])
    pid, ticks = own_process()
    supervisor.ask(OpenPool(1, stage, pid, ticks - 1), PoolOpened)  # a process that was there before us
    failed = supervisor.ask(capture_job(pool.layout, 1, poll_event=True), JobFailed)
    assert failed.code == "engine_gone"


@pytest.mark.parametrize("direction", ["capture", "restore"])
def test_an_event_that_is_not_reached_in_time_ends_its_job_alone(
    supervisor: SmallSupervisor, pool: Pool, segment: str, direction: str
) -> None:
    fork_worker(supervisor, faults={"event_stuck": "1"})
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    done = supervisor.ask(capture_job(pool.layout, 1), JobDone)
    job = capture_job(pool.layout, 2) if direction == "capture" else restore_job(pool.layout, 2, done.digests)
    pool.memory[:] = os.urandom(len(pool.memory))
    before = pool.memory[:]
    supervisor.send(msgspec.structs.replace(job, poll_event=True, event_wait_s=0.2))
    supervisor.send(msgspec.structs.replace(job, job=3, poll_event=True, event_wait_s=600.0))
    assert supervisor.ask(capture_job(pool.layout, 4), JobDone).job == 4
    failed = supervisor.report(JobFailed)
    assert (failed.job, failed.code, failed.message) == (
        2,
        "deadline",
        "the engine's event was not reached within 0.2 s",
    )
    assert (failed.rows_undefined, failed.sticky) == ((), False)
    assert supervisor.ask(TakeCensus(1), Census).resources["jobs"] == 1
    assert pool.memory[:] == before
    supervisor.send(CancelJob(3))
    assert supervisor.report(JobFailed).job == 3


def test_a_pool_that_is_closed_while_it_opens(supervisor: SmallSupervisor, pool: Pool) -> None:
    forked = fork_worker(supervisor, faults={"slow_pool_s": "0.2"})
    supervisor.hand_over(1, pool.descriptor)
    supervisor.send(OpenPool(1, supervisor.stage(pool.layout, 1, pool.memory[:16]), *own_process()))
    assert supervisor.ask(ClosePool(1), PoolClosed).pool == 1
    assert not maps_a_pool(forked.pid)
    assert [report.pool for _, report in supervisor.reports if isinstance(report, PoolOpened)] == [1]
    assert supervisor.ask(TakeCensus(1), Census).resources["mappings"] == 0


def test_a_pool_is_closed_when_its_last_job_has_ended(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    forked = fork_worker(supervisor, inline_bytes=0, slice_bytes=1, faults={"slow_copy_s": "0.05"})
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    assert maps_a_pool(forked.pid)
    supervisor.send(capture_job(pool.layout, 1))
    assert supervisor.ask(ClosePool(1), PoolClosed).pool == 1
    assert not maps_a_pool(forked.pid)
    assert [report.job for _, report in supervisor.reports if isinstance(report, JobDone)] == [1]


def test_it_is_told_how_to_take_times(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor)
    for on in (True, False):
        supervisor.send(TraceCopies(on))
        assert supervisor.ask(TakeCensus(1), Census).resources["exact_times"] == on


def test_closing_a_pool_that_nobody_knows_is_answered(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor)
    assert supervisor.ask(ClosePool(77), PoolClosed).pool == 77


def test_cancel_and_stop_while_a_copy_runs(supervisor: SmallSupervisor, pool: Pool, segment: str) -> None:
    fork_worker(supervisor, inline_bytes=0, slice_bytes=1, faults={"slow_copy_s": "0.05"})
    make_shuttle(supervisor, segment)
    open_pool(supervisor, pool)
    supervisor.send(capture_job(pool.layout, 1))
    supervisor.send(capture_job(pool.layout, 2))
    supervisor.send(CancelJob(1))
    failed = supervisor.report(JobFailed)
    assert (failed.job, failed.code) == (1, "cancelled")
    supervisor.send(capture_job(pool.layout, 3))
    supervisor.send(StopWorker())
    queued = supervisor.report(JobFailed)
    assert (queued.job, queued.code) == (3, "stopping")
    assert supervisor.report(JobDone).job == 2
    assert supervisor.exited().status == exit_codes.STOPPED


def test_bad_pools_are_refused(supervisor: SmallSupervisor, pool: Pool) -> None:
    fork_worker(supervisor)
    stage = supervisor.stage(pool.layout, 9, pool.memory[:16])
    assert supervisor.ask(OpenPool(1, stage, *own_process()), PoolFailed).code == "unshareable"
    supervisor.hand_over(9, pool.descriptor)
    wrong = supervisor.stage(pool.layout, 9, bytes(16))
    assert supervisor.ask(OpenPool(1, wrong, *own_process()), PoolFailed).code == "probe_failed"
    supervisor.hand_over(9, pool.descriptor)
    outside = msgspec.structs.replace(stage, probe_offsets=pool.layout.end_bytes.to_bytes(8, "little"))
    assert supervisor.ask(OpenPool(1, outside, *own_process()), PoolFailed).code == "probe_failed"
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, pool.layout.end_bytes)
    supervisor.hand_over(9, unsealed)
    os.close(unsealed)
    assert supervisor.ask(OpenPool(1, stage, *own_process()), PoolFailed).code == "unshareable"
    assert supervisor.ask(TakeCensus(1), Census).resources["mappings"] == 0
    assert supervisor.ask(capture_job(pool.layout, 1), JobFailed).code == "not_registered"


def test_the_descriptors_of_many_pools_may_come_at_once(supervisor: SmallSupervisor, pool: Pool) -> None:
    """As after a worker's restart: all of them lie in the lifeline when the first pool is opened."""
    forked = fork_worker(supervisor)
    supervisor.report(WorkerReady)
    count = MAX_DRAINED + 10
    os.kill(forked.pid, signal.SIGSTOP)
    for tag in range(count):
        supervisor.hand_over(tag, pool.descriptor)
    # The last one first: by then everything else waits to be taken.
    for tag in reversed(range(count)):
        stage = supervisor.stage(pool.layout, tag, pool.memory[:16])
        supervisor.send(OpenPool(tag, stage, *own_process()))
    os.kill(forked.pid, signal.SIGCONT)
    assert [supervisor.report(PoolOpened).pool for _ in range(count)] == list(reversed(range(count)))


def test_the_spec_may_name_the_identity(supervisor: SmallSupervisor, pool: Pool) -> None:
    fork_worker(supervisor, identity=b"cpu0#1#secret")
    supervisor.report(WorkerReady)
    supervisor.send(TakeCensus(1), b"cpu0#1#secret")
    supervisor.report(Census)


def test_what_is_no_command_ends_the_worker(supervisor: SmallSupervisor) -> None:
    fork_worker(supervisor)
    supervisor.report(WorkerReady)
    supervisor.router.send(b"cpu0#1", b"\x81\xa1t\xa3xyz")
    assert supervisor.exited().status == exit_codes.BAD_COMMAND


def test_a_worker_does_nothing_before_the_supervisor_can_know_of_it(supervisor: SmallSupervisor) -> None:
    """The template gets stuck between a fork and its news, as on a busy host it may."""
    template = supervisor.start(send_buffer_bytes=1)
    supervisor.heard(TemplateReady)
    for number in range(20):
        supervisor.order(supervisor.spec(worker=f"cpu{number}", identity=f"cpu{number}".encode()))

    def untold() -> psutil.Process | None:
        """The child whose fork the template is about to tell."""
        if not waits_in(template.pid, "sock"):
            return None
        return max(psutil.Process(template.pid).children(), key=lambda child: (child.create_time(), child.pid))

    stuck = wait_until(untold)
    assert stuck is not None
    wait_until(lambda: waits_in(stuck.pid, "pipe"))
    told = [supervisor.heard(Forked).pid for _ in range(20)]
    assert stuck.pid in told
    assert len(set(told)) == 20
    wait_until(lambda: not waits_in(stuck.pid, "pipe"))


def waits_in(pid: int, what: str) -> bool:
    """Whether a process sleeps in a function of the kernel whose name holds this."""
    return what in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
