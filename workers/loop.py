"""The only poll loop of a worker: commands in, jobs to the lanes, reports out.

Small jobs run right here while their lane is idle (a hand-over between threads costs more than their copy). Larger ones
go to the lane's thread, one at a time; shuttles and pools are made on threads of their own. A job whose engine's event
is not complete yet is set aside and asked about at each turn, so it holds up nobody.
"""

import gc
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, TypeAlias, assert_never

import zmq

from ipc.codec import BadFrame, decode, encode
from ipc.lifeline import Life, Lifeline
from ipc.link import Link, LinkError
from ipc.messages import (
    PROTOCOL_VERSION,
    CancelJob,
    CaptureJob,
    Census,
    ClosePool,
    Command,
    JobDone,
    JobFailed,
    MakeShuttle,
    MemfdPool,
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
    WorkerHello,
    WorkerReady,
    WorkerSpec,
)
from workers import exit_codes
from workers.device import Device, DeviceFailure, LaneKind, PoolRefused
from workers.digest import Digester
from workers.jobs import JobEvent, JobRecord, JobRefused, JobState
from workers.lanes import JobHooks, Lane, PlannedJob, plan_job
from workers.pool_book import EngineProcess, PoolBook, PoolEntry
from workers.shuttle_maker import ShuttleMaker
from workers.threads import Mailbox, TaskThread

_log: Final = logging.getLogger(__name__)
_CONNECT_S: Final = 10.0
# The daemon reads at least every few milliseconds; one that takes no report for this long is as good as gone.
_SEND_S: Final = 10.0
_FRAMES_A_TURN: Final = 64
# An event that is due is mostly due at once: ask without sleeping for this long, then once a millisecond.
_EAGER_S: Final = 0.0003
_STOP_S: Final = 5.0


class ActiveJob:
    """A job that has no final report yet. `stop` is set by the loop and read by the lane between slices."""

    __slots__ = ("entry", "plan", "record", "since_s", "stop")

    def __init__(self, plan: PlannedJob, entry: PoolEntry, since_s: float) -> None:
        self.plan = plan
        self.entry = entry
        self.record = JobRecord(plan.job)
        self.since_s = since_s
        self.stop = False


class _LaneEnded:
    """Letter: the lane's thread ended a job."""

    __slots__ = ("active", "report")

    def __init__(self, active: ActiveJob, report: JobDone | JobFailed) -> None:
        self.active = active
        self.report = report


class _PoolMade:
    """Letter: a pool was mapped."""

    __slots__ = ("entry",)

    def __init__(self, entry: PoolEntry) -> None:
        self.entry = entry


_Letter: TypeAlias = _LaneEnded | _PoolMade | SourceFree | ShuttleReady | ShuttleFailed | PoolFailed | PoolClosed


class _LaneState:
    """A lane with its thread and the jobs that wait for it."""

    __slots__ = ("lane", "queue", "running", "thread")

    def __init__(self, lane: Lane, thread: TaskThread) -> None:
        self.lane = lane
        self.thread = thread
        self.queue: deque[ActiveJob] = deque()
        self.running: ActiveJob | None = None


class Worker:
    """One worker's loop. `forked_s` is the monotonic time of its birth."""

    def __init__(self, spec: WorkerSpec, device: Device, digester: Digester, lifeline: Lifeline, link: Link) -> None:
        self._spec = spec
        self._device = device
        self._digester = digester
        self._lifeline = lifeline
        self._link = link
        self._mailbox: Mailbox[_Letter] = Mailbox()
        self._pools = PoolBook()
        self._jobs: dict[int, ActiveJob] = {}
        self._waiting: list[ActiveJob] = []
        self._jobs_done = 0
        self._jobs_failed = 0
        self._stopping = False
        self._maker = ShuttleMaker(device, lambda: self._stopping)
        self._maker_thread = TaskThread("shuttles", device.bind_thread)
        self._pool_thread = TaskThread("pools", device.bind_thread)
        self._lanes = {
            kind: _LaneState(Lane(kind, device.copier(kind)), TaskThread(kind.value, device.bind_thread))
            for kind in LaneKind
        }

    def start(self, forked_s: float) -> None:
        """Start the threads and say that this worker is ready."""
        for thread in self._threads():
            thread.start()
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._send(
            WorkerReady(
                self._spec.device,
                self._device.name,
                self._device.digest_algorithm,
                self._digester.key_id,
                self._device.digest_path,
                cpus,
                time.monotonic() - forked_s,
                self._device.device_bytes,
            )
        )
        # What is here now stays: no later collection has to look at it again.
        gc.freeze()

    def _threads(self) -> list[TaskThread]:
        return [self._maker_thread, self._pool_thread, *(state.thread for state in self._lanes.values())]

    def request_stop(self) -> None:
        """Finish the current copies, refuse everything else, then end `run`."""
        if self._stopping:
            return
        self._stopping = True
        for active in [*self._waiting, *(job for state in self._lanes.values() for job in state.queue)]:
            active.record.apply(JobEvent.FAIL)
            self._end(active, JobFailed(active.plan.job, "stopping", "the worker stops"))
        self._waiting.clear()
        for state in self._lanes.values():
            state.queue.clear()

    def run(self, wakeup_fd: int, stop_wanted: threading.Event) -> int:
        """Serve until told to stop; the exit status. `wakeup_fd` becomes readable on a signal."""
        lifeline_fd, mailbox_fd, socket = self._lifeline.fileno(), self._mailbox.fileno(), self._link.socket
        poller = zmq.Poller()
        for source in (socket, lifeline_fd, mailbox_fd, wakeup_fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not (self._stopping and not self._jobs):
                ready = [source for source, _ in poller.poll(self._timeout_ms())]
                if lifeline_fd in ready and self._lifeline.drain() is Life.ENDED:
                    _log.error("the supervisor is gone")
                    return exit_codes.SUPERVISOR_LOST
                if wakeup_fd in ready:
                    os.read(wakeup_fd, 4096)
                if stop_wanted.is_set():
                    self.request_stop()
                if mailbox_fd in ready:
                    self._read_mailbox()
                if self._waiting:
                    self._ask_events(time.monotonic())
                if socket in ready:
                    for frame in self._link.recv_all(_FRAMES_A_TURN):
                        self._handle(decode(frame, Command))
            return exit_codes.STOPPED
        except BadFrame as exc:
            _log.error("no command of this version code=%s error=%s", exc.code, exc.message)
            return exit_codes.BAD_COMMAND
        except LinkError as exc:
            _log.error("the supervisor takes no reports error=%s", exc)
            return exit_codes.SUPERVISOR_LOST
        except _DeviceLost:
            return exit_codes.DEVICE_LOST

    def close(self) -> None:
        """After a clean stop: end the threads, then give everything back."""
        ended = [thread.stop(_STOP_S) for thread in self._threads()]
        for entry in self._pools.all():
            entry.pool.close()
        if all(ended):
            self._device.close()
            self._maker.close()
        self._link.close()
        self._lifeline.close()
        self._mailbox.close()

    def _timeout_ms(self) -> int | None:
        if not self._waiting:
            return None
        youngest_s = self._waiting[-1].since_s
        return 0 if time.monotonic() - youngest_s < _EAGER_S else 1

    # --- commands ----------------------------------------------------------------------------------------------------

    def _handle(self, command: Command) -> None:
        match command:
            case CaptureJob() | RestoreJob():
                self._start_job(command)
            case CancelJob():
                self._cancel(command.job)
            case MakeShuttle():
                self._make_shuttle(command)
            case OpenPool():
                self._open_pool(command)
            case ClosePool():
                self._close_pool(command.pool)
            case TakeCensus():
                self._send(Census(command.census, self._resources()))
            case StopWorker():
                self.request_stop()
            case _:
                assert_never(command)

    def _start_job(self, message: CaptureJob | RestoreJob) -> None:
        now_s = time.monotonic()
        entry = self._pools.find(message.pool)
        refused: JobRefused
        try:
            if self._stopping:
                raise JobRefused("stopping", "the worker stops")
            if entry is None:
                raise JobRefused("not_registered", f"pool {message.pool} is not open")
            active = ActiveJob(plan_job(self._device, entry.pool, message), entry, now_s)
        except JobRefused as exc:
            refused = exc
        else:
            entry.jobs += 1
            self._jobs[message.job] = active
            if message.poll_event:
                active.record.apply(JobEvent.WAIT)
                self._waiting.append(active)
                self._ask_events(now_s)
            else:
                self._dispatch(active)
            return
        self._jobs_failed += 1
        self._send(JobFailed(message.job, refused.code, refused.message))

    def _ask_events(self, now_s: float) -> None:
        """Move on with every waiting job whose engine has finished writing, and give up those whose engine is gone."""
        waiting, self._waiting = self._waiting, []
        for active in waiting:
            try:
                if active.entry.pool.event_reached():
                    active.record.apply(JobEvent.READY)
                    self._dispatch(active)
                elif active.entry.engine_gone(now_s):
                    active.record.apply(JobEvent.FAIL)
                    self._end(active, JobFailed(active.plan.job, "engine_gone", "the engine died before its event"))
                else:
                    self._waiting.append(active)
            except DeviceFailure as exc:
                active.record.apply(JobEvent.FAIL)
                self._end(active, JobFailed(active.plan.job, exc.code, exc.message, sticky=exc.sticky))

    def _dispatch(self, active: ActiveJob) -> None:
        state = self._lanes[active.plan.lane]
        if state.running is not None or state.queue:
            state.queue.append(active)
        elif active.plan.moved_bytes <= self._spec.inline_bytes:
            active.record.apply(JobEvent.START)
            self._finish(active, _run_guarded(state.lane, active, JobHooks(lambda: False, lambda: None)))
        else:
            self._hand_over(state, active)

    def _hand_over(self, state: _LaneState, active: ActiveJob) -> None:
        active.record.apply(JobEvent.START)
        state.running = active
        job = active.plan.job
        hooks = JobHooks(lambda: active.stop, lambda: self._mailbox.put(SourceFree(job)))

        def task() -> None:
            self._mailbox.put(_LaneEnded(active, _run_guarded(state.lane, active, hooks)))

        state.thread.put(task)

    def _cancel(self, job: int) -> None:
        active = self._jobs.get(job)
        if active is None:
            return
        active.record.apply(JobEvent.CANCEL)
        if active.record.state is JobState.STOPPING:
            active.stop = True
            return
        if active in self._waiting:
            self._waiting.remove(active)
        else:
            self._lanes[active.plan.lane].queue.remove(active)
        self._end(active, JobFailed(job, "cancelled", "cancelled before it started"))

    def _make_shuttle(self, order: MakeShuttle) -> None:
        def task() -> None:
            try:
                answer = self._maker.make(order)
            except Exception as exc:  # noqa: BLE001 - the thread must go on, and the order must get its answer
                _log.exception("shuttle failed shuttle=%d", order.index)
                text = f"{type(exc).__name__}: {exc}"
                answer = ShuttleFailed(order.index, "internal", text, order.shuttle_bytes, 0)
            self._mailbox.put(answer)

        self._maker_thread.put(task)

    def _open_pool(self, order: OpenPool) -> None:
        descriptor = -1
        if isinstance(order.stage.pool, MemfdPool):
            self._lifeline.drain()
            try:
                descriptor = self._lifeline.take(order.stage.pool.descriptor)
            except KeyError:
                self._send(PoolFailed(order.pool, "unshareable", "the pool's descriptor did not come"))
                return

        def task() -> None:
            try:
                pool = self._device.open_pool(order.stage, descriptor)
            except PoolRefused as exc:
                self._mailbox.put(PoolFailed(order.pool, exc.code, exc.message))
            except Exception as exc:  # noqa: BLE001 - the thread must go on, and the order must get its answer
                _log.exception("pool failed pool=%d", order.pool)
                self._mailbox.put(PoolFailed(order.pool, "internal", f"{type(exc).__name__}: {exc}"))
            else:
                engine = EngineProcess(order.engine_pid, order.engine_start_ticks)
                self._mailbox.put(_PoolMade(PoolEntry(order.pool, pool, engine)))
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

        self._pool_thread.put(task)

    def _close_pool(self, number: int) -> None:
        entry = self._pools.close(number)
        if entry is None:
            # Perhaps it is being opened: the answer must come after that one's, so it takes the same way.
            self._pool_thread.put(lambda: self._mailbox.put(PoolClosed(number)))
        elif entry.jobs == 0:
            self._unmap(entry)

    def _unmap(self, entry: PoolEntry) -> None:
        def task() -> None:
            entry.pool.close()
            self._mailbox.put(PoolClosed(entry.number))

        self._pool_thread.put(task)

    def _resources(self) -> dict[str, int]:
        counted = dict(self._device.resources())
        counted.update(
            jobs=len(self._jobs),
            jobs_done=self._jobs_done,
            jobs_failed=self._jobs_failed,
            threads=threading.active_count(),
            fds=len(os.listdir("/proc/self/fd")) - 1,  # noqa: PTH208 - the listing itself is one of them
        )
        return counted

    # --- answers -----------------------------------------------------------------------------------------------------

    def _read_mailbox(self) -> None:
        for letter in self._mailbox.take():
            match letter:
                case _LaneEnded():
                    state = self._lanes[letter.active.plan.lane]
                    state.running = None
                    self._finish(letter.active, letter.report)
                    self._next_job(state)
                case _PoolMade():
                    self._pools.add(letter.entry)
                    self._send(PoolOpened(letter.entry.number))
                case PoolClosed():
                    # One that was opened while its closing was on the way is closed now.
                    entry = self._pools.find(letter.pool)
                    if entry is not None:
                        self._close_pool(letter.pool)
                        continue
                    self._pools.remove(letter.pool)
                    self._send(letter)
                case SourceFree() | ShuttleReady() | ShuttleFailed() | PoolFailed():
                    self._send(letter)
                case _:
                    assert_never(letter)

    def _next_job(self, state: _LaneState) -> None:
        while state.queue and state.running is None:
            active = state.queue.popleft()
            if not state.queue:
                self._dispatch(active)
            else:
                self._hand_over(state, active)

    def _finish(self, active: ActiveJob, report: JobDone | JobFailed) -> None:
        if isinstance(report, JobDone):
            active.record.apply(JobEvent.FINISH)
        elif report.code == "cancelled":
            active.record.apply(JobEvent.STOP)
        else:
            active.record.apply(JobEvent.FAIL)
        self._end(active, report)

    def _end(self, active: ActiveJob, report: JobDone | JobFailed) -> None:
        """Send a job's final report and let go of it."""
        self._jobs.pop(active.plan.job, None)
        self._send(report)
        entry = active.entry
        entry.jobs -= 1
        if entry.closing and entry.jobs == 0:
            self._unmap(entry)
        if isinstance(report, JobDone):
            self._jobs_done += 1
            return
        self._jobs_failed += 1
        _log.warning("job failed job=%d code=%s error=%s", report.job, report.code, report.message)
        if report.sticky:
            raise _DeviceLost

    def _send(self, report: Report) -> None:
        self._link.send(encode(report), _SEND_S)


class _DeviceLost(Exception):
    """The device is of no more use to this process; the report that says so was sent."""


def _run_guarded(lane: Lane, active: ActiveJob, hooks: JobHooks) -> JobDone | JobFailed:
    """Run a job; a bug of ours ends the job, not the worker."""
    try:
        return lane.run(active.plan, hooks)
    except Exception as exc:  # noqa: BLE001 - the lane must go on, and the job must get its report
        _log.exception("job failed job=%d", active.plan.job)
        text = f"{type(exc).__name__}: {exc}"
        return JobFailed(active.plan.job, "internal", text, rows_undefined=_all_rows(active))


def _all_rows(active: ActiveJob) -> bytes:
    if active.plan.lane is LaneKind.CAPTURE:
        return b""
    return active.plan.rows.packed_prefix(active.plan.rows.count)


def connect(spec: WorkerSpec) -> tuple[Lifeline, Link]:
    """Connect to the supervisor and say hello.

    Raises:
        LifelineError, LinkError: nobody is there.
    """
    lifeline = Lifeline.connect(Path(spec.life_socket), _CONNECT_S)
    identity = f"{spec.worker}#{spec.generation}".encode()
    link = Link.connect(
        Path(spec.worker_socket), identity, max_message_bytes=spec.max_message_bytes, timeout_s=_CONNECT_S
    )
    link.send(encode(WorkerHello(spec.worker, spec.generation, spec.token, os.getpid(), PROTOCOL_VERSION)), _SEND_S)
    return lifeline, link
