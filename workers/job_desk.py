"""The jobs of a worker from their message to their report. For the loop's thread.

Small jobs run right here while their lane is idle (a hand-over between threads costs more than their copy). Larger ones
go to the lane's thread, one at a time. A job whose engine's event is not complete yet is set aside and asked about at
each turn, so it holds up nobody.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from ipc.messages import CopyCommand, EventAwaited, JobDone, JobFailed, SourceFree
from workers.device import Device, DeviceFailure, LaneKind
from workers.jobs import JobEvent, JobRecord, JobRefused, JobState
from workers.lanes import JobHooks, Lane
from workers.orders import PoolOrders
from workers.plans import PlannedJob, plan_job
from workers.pool_book import PoolEntry
from workers.threads import TaskThread

_log: Final = logging.getLogger(__name__)
# An event that is due is mostly due at once: ask without sleeping for this long, then once a millisecond.
_EAGER_S: Final = 0.0003
# The supervisor is told of an event that was not reached after this long: much less than the least time for a copy.
_TELL_S: Final = 0.05


class DeviceLost(Exception):
    """The device is of no more use to this process; the report that says so was sent."""


class ActiveJob:
    """A job that has no final report yet. It came at `since_s` and may wait for its engine's event for `event_wait_s`;
    from `ready_s` it waited for its lane, which has begun it at `begun_s` (infinite: not yet). `stop` is set by the
    loop and read by the lane between slices.
    """

    __slots__ = ("begun_s", "entry", "event_wait_s", "plan", "ready_s", "record", "since_s", "stop", "told_waiting")

    def __init__(self, plan: PlannedJob, entry: PoolEntry, since_s: float, event_wait_s: float) -> None:
        self.plan = plan
        self.entry = entry
        self.record = JobRecord(plan.job)
        self.since_s = since_s
        self.ready_s = self.begun_s = math.inf
        self.event_wait_s = event_wait_s
        self.told_waiting = False
        self.stop = False

    def with_waits(self, report: JobDone | JobFailed) -> JobDone | JobFailed:
        """Its final report, made now, with how long it waited for what."""
        now_s = time.monotonic()
        ready_s = min(self.ready_s, now_s)
        queue_s = max(min(self.begun_s, now_s) - ready_s, 0.0)
        return msgspec.structs.replace(report, event_s=ready_s - self.since_s, queue_s=queue_s)


class LaneEnded:
    """Letter: the lane's thread ended a job."""

    __slots__ = ("active", "report")

    def __init__(self, active: ActiveJob, report: JobDone | JobFailed) -> None:
        self.active = active
        self.report = report


JobLetter: TypeAlias = LaneEnded | SourceFree


class _LaneState:
    """A lane with its thread and the jobs that wait for it."""

    __slots__ = ("lane", "queue", "running", "thread")

    def __init__(self, lane: Lane, thread: TaskThread) -> None:
        self.lane = lane
        self.thread = thread
        self.queue: deque[ActiveJob] = deque()
        self.running: ActiveJob | None = None


class JobDesk:
    """Starts, cancels and ends jobs. `post` leaves a letter for the loop from any thread, `send` sends a final report.

    Jobs of up to `inline_bytes` bytes run on the calling thread. Every method that may end a job raises `DeviceLost`
    after a sticky report.
    """

    def __init__(
        self,
        device: Device,
        pools: PoolOrders,
        inline_bytes: int,
        *,
        post: Callable[[JobLetter], None],
        send: Callable[[JobDone | JobFailed | EventAwaited], None],
    ) -> None:
        self._device = device
        self._pools = pools
        self._inline_bytes = inline_bytes
        self._post = post
        self._send = send
        self._jobs: dict[int, ActiveJob] = {}
        self._waiting: list[ActiveJob] = []
        self._done = 0
        self._failed = 0
        self._stopping = False
        self._exact = False
        self._lanes = {
            kind: _LaneState(Lane(kind, device.copier(kind)), TaskThread(kind.value, device.bind_thread))
            for kind in LaneKind
        }

    @property
    def threads(self) -> list[TaskThread]:
        """The lanes' threads."""
        return [state.thread for state in self._lanes.values()]

    @property
    def idle(self) -> bool:
        """Whether no job is under way."""
        return not self._jobs

    @property
    def counts(self) -> dict[str, int]:
        """Jobs under way, totals since the start, and whether times are taken on the device."""
        return {
            "jobs": len(self._jobs),
            "jobs_done": self._done,
            "jobs_failed": self._failed,
            "exact_times": int(self._exact),
        }

    def measure(self, *, exact: bool) -> None:
        """How exactly the times of copies are taken from now on."""
        self._exact = exact
        for state in self._lanes.values():
            state.lane.measure(exact=exact)

    def timeout_ms(self) -> int | None:
        """How long the loop may sleep: a millisecond at most while a job waits for its event, which serves events,
        engines' deaths and deadlines alike.
        """
        if not self._waiting:
            return None
        youngest_s = self._waiting[-1].since_s
        return 0 if time.monotonic() - youngest_s < _EAGER_S else 1

    def stop(self) -> None:
        """Let the current copies end, refuse everything else."""
        self._stopping = True
        for active in [*self._waiting, *(job for state in self._lanes.values() for job in state.queue)]:
            self._give_up(active, "stopping", "the worker stops")
        self._waiting.clear()
        for state in self._lanes.values():
            state.queue.clear()

    def start(self, message: CopyCommand) -> None:
        """Take in a job; whatever is wrong with it becomes its report."""
        now_s = time.monotonic()
        entry = self._pools.find(message.pool)
        refused: JobRefused
        try:
            if self._stopping:
                raise JobRefused("stopping", "the worker stops")
            if entry is None:
                raise JobRefused("not_registered", f"pool {message.pool} is not open")
            active = ActiveJob(plan_job(self._device, entry.pool, message), entry, now_s, message.event_wait_s)
        except JobRefused as exc:
            refused = exc
        else:
            entry.jobs += 1
            self._jobs[message.job] = active
            if message.poll_event:
                active.record.apply(JobEvent.WAIT)
                self._waiting.append(active)
                self.ask_events(now_s)
            else:
                active.ready_s = now_s
                self._dispatch(active)
            return
        self._failed += 1
        self._send(JobFailed(message.job, refused.code, refused.message))

    def ask_events(self, now_s: float) -> None:
        """Move on with every waiting job whose engine has finished writing, and give up those whose engine is gone or
        lets them wait too long. None of these has touched a row yet.
        """
        waiting, self._waiting = self._waiting, []
        for active in waiting:
            try:
                if active.entry.pool.event_reached():
                    if active.told_waiting:
                        self._send(EventAwaited(active.plan.job, reached=True))
                    active.record.apply(JobEvent.READY)
                    active.ready_s = now_s
                    self._dispatch(active)
                elif active.entry.engine_gone(now_s):
                    self._give_up(active, "engine_gone", "the engine died before its event")
                elif now_s - active.since_s > active.event_wait_s:
                    waited = f"the engine's event was not reached within {active.event_wait_s:g} s"
                    self._give_up(active, "deadline", waited)
                else:
                    self._waiting.append(active)
                    self._tell_waiting(active, now_s)
            except DeviceFailure as exc:
                self._give_up(active, exc.code, exc.message, sticky=exc.sticky)

    def _tell_waiting(self, active: ActiveJob, now_s: float) -> None:
        """The supervisor takes a job for copying unless it is told, and most events are reached at the first look."""
        if not active.told_waiting and now_s - active.since_s >= _TELL_S:
            active.told_waiting = True
            self._send(EventAwaited(active.plan.job))

    def cancel(self, job: int) -> None:
        """Stop a job between two slices, or before its first."""
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

    def lane_ended(self, letter: LaneEnded) -> None:
        """Report a job that ended on its lane's thread and start the next one there."""
        state = self._lanes[letter.active.plan.lane]
        state.running = None
        self._finish(letter.active, letter.report)
        while state.queue and state.running is None:
            active = state.queue.popleft()
            if not state.queue:
                self._dispatch(active)
            else:
                self._hand_over(state, active)

    def _dispatch(self, active: ActiveJob) -> None:
        state = self._lanes[active.plan.lane]
        if state.running is not None or state.queue:
            state.queue.append(active)
        elif active.plan.work_bytes <= self._inline_bytes:
            active.record.apply(JobEvent.START)
            active.begun_s = time.monotonic()
            self._finish(active, state.lane.run(active.plan, JobHooks(lambda: False, lambda: None)))
        else:
            self._hand_over(state, active)

    def _hand_over(self, state: _LaneState, active: ActiveJob) -> None:
        active.record.apply(JobEvent.START)
        state.running = active
        job = active.plan.job
        hooks = JobHooks(lambda: active.stop, lambda: self._post(SourceFree(job)))

        def task() -> None:
            active.begun_s = time.monotonic()
            self._post(LaneEnded(active, state.lane.run(active.plan, hooks)))

        state.thread.put(task)

    def _give_up(self, active: ActiveJob, code: str, message: str, *, sticky: bool = False) -> None:
        """End a job that has not started."""
        active.record.apply(JobEvent.FAIL)
        self._end(active, JobFailed(active.plan.job, code, message, sticky=sticky))

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
        self._send(active.with_waits(report))
        self._pools.job_ended(active.entry)
        if isinstance(report, JobDone):
            self._done += 1
            return
        self._failed += 1
        _log.warning("job failed job=%d code=%s error=%s", report.job, report.code, report.message)
        if report.sticky:
            raise DeviceLost
