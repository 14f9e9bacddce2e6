"""Lanes: one direction of a device each, running copy jobs slice by slice, in turns where there are several.

A slice that is only to be digested is read where it lies.

A capture slice is digested at its source, copied, and digested again before it counts. A restore slice is copied to
private staging and verified whole before any byte of it reaches a row. A copy from rows to rows is both: digested at
its source and in staging, then written. While one slice is copied the next one has begun (see `workers.device`), so a
job has at most two slices under way. When another job is next (see `workers.fair_queue`), those are completed first:
all that is under way on a lane belongs to one job, and so does whatever fails there.

What may be there already (see `PlannedJob.look`) is digested first, all of it, where it lies.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

import msgspec

from ipc.messages import JobDone, JobFailed
from workers.device import ChunkDamaged, Copier, CopyTimes, DeviceFailure, LaneKind, SliceWork, SourceDiffers
from workers.fair_queue import FairQueue
from workers.jobs import JobRefused
from workers.plans import PlannedJob, bytes_of
from workers.rowmap import RowMap

_log: Final = logging.getLogger(__name__)
# Jobs up to this size go first: about a slice of a GPU's, some 0.6 ms of its link.
SMALL_BYTES: Final = 32 * 1024 * 1024
# A change of jobs empties the pipeline: a few tenths of a millisecond, beside some 10 ms for so many slices of 64 MiB.
_QUANTUM_SLICES: Final = 8
# Some hundred small jobs. A large one that is held up this long gets the same time for itself.
_SHARE_S: Final = 0.05
# The supervisor takes a lane of which it hears nothing for hung, but that takes it far longer than this.
_TELL_S: Final = 0.05


class JobHooks(NamedTuple):
    """How a running job talks to the loop: `stopped` is asked between slices, `source_free` told when a capture has
    read its last row before it has ended, and `group_done` when all of a group is in its rows.
    """

    stopped: Callable[[], bool]
    source_free: Callable[[], None]
    group_done: Callable[[int], None] = lambda _: None


class _Stopped(Exception):
    """The job was cancelled between two slices."""


class LaneHooks(NamedTuple):
    """How a lane talks to its worker. `note` is told the job that it is about to work on, in place of any other (0:
    none); `moving` a job of several that went on, every 50 ms at most. On the thread that copies.
    """

    note: Callable[[int], None]
    moving: Callable[[int], None]


_ALONE: Final = LaneHooks(lambda _: None, lambda _: None)


class Lane:
    """Runs planned jobs of one direction: `run` does one to its end, `serve` takes slices of all that were added in
    turns. Only one thread may be in either of the two; `add` and `withdraw` are for the loop's.
    """

    def __init__(
        self, kind: LaneKind, copier: Copier, hooks: LaneHooks = _ALONE, small_bytes: int = SMALL_BYTES
    ) -> None:
        self.kind = kind
        self._copier = copier
        self._hooks = hooks
        self._small_bytes = small_bytes
        self._lock = threading.Lock()
        self._queue: FairQueue[_Run] = FairQueue(_QUANTUM_SLICES, _SHARE_S)
        self._waiting: dict[int, _Run] = {}  # those of the queue that have not begun, by job
        self._told_s = 0.0
        self._lost = False

    def measure(self, *, exact: bool) -> None:
        """How exactly the next slices' times are taken (see `Copier.measure`)."""
        self._copier.measure(exact=exact)

    def run(self, plan: PlannedJob, hooks: JobHooks) -> JobDone | JobFailed:
        """Run a job to its end; whatever happens becomes its report. Nothing of the job is kept. No other job may have
        been added and not ended.
        """
        run = _Run(self._copier, plan, hooks)
        self._hooks.note(plan.job)
        report = None
        while report is None:
            report = run.advance()
        self._hooks.note(0)
        return report

    def add(
        self, plan: PlannedJob, hooks: JobHooks, engine: Hashable, ended: Callable[[JobDone | JobFailed], None]
    ) -> None:
        """Have `serve` run a job in the name of an engine. `ended` gets its report, on that thread."""
        run = _Run(self._copier, plan, hooks, ended)
        with self._lock:
            self._queue.add(run, engine, small=plan.work_bytes <= self._small_bytes)
            self._waiting[plan.job] = run

    def withdraw(self, job: int) -> bool:
        """Take a job back that has not begun; whether it had not."""
        with self._lock:
            run = self._waiting.pop(job, None)
            if run is not None:
                self._queue.remove(run)
        return run is not None

    def serve(self) -> None:
        """Take slices of all jobs in turns until none is left. After a sticky report nothing is touched any more."""
        run = None if self._lost else self._next()
        while run is not None:
            self._hooks.note(run.job)
            follower, report = self._turn(run)
            if report is not None:
                self._hooks.note(0)
                self._lost = isinstance(report, JobFailed) and report.sticky
                run.ended(report)
                if self._lost:
                    return
            run = follower

    def _turn(self, run: "_Run") -> "tuple[_Run | None, JobDone | JobFailed | None]":
        """Take slices of a job until another is next or it has ended: who is next, and the report of its end."""
        while True:
            start_s = time.monotonic()
            report = run.advance()
            follower = self._after(run, time.monotonic() - start_s, report)
            if report is None and follower is not run:
                report = run.rest()
                if report is not None:
                    self._remove(run)
            if report is not None or follower is not run:
                return follower, report

    def _next(self) -> "_Run | None":
        with self._lock:
            return self._choose()

    def _choose(self) -> "_Run | None":
        run = self._queue.next()
        if run is not None:
            self._waiting.pop(run.job, None)
        return run

    def _after(self, run: "_Run", seconds: float, report: JobDone | JobFailed | None) -> "_Run | None":
        """Account for a slice of a job and say who is next."""
        with self._lock:
            alone = len(self._queue) == 1
            self._queue.ran(seconds)
            if report is not None:
                self._queue.remove(run)
            follower = self._choose()
        if report is None and not alone:
            now_s = time.monotonic()
            if now_s - self._told_s >= _TELL_S:
                self._told_s = now_s
                self._hooks.moving(run.job)
        return follower

    def _remove(self, run: "_Run") -> None:
        with self._lock:
            self._queue.remove(run)


class _Run:
    """One job on its way, a slice at a time: those of its look, if it has one, then those that are copied. `scattered`
    counts the latter that may have been written to rows; the bytes are those of the slices that are done.

    A slice is begun before the one before it is completed, in the copier's two slots; `rest` completes what was begun,
    so that another job may use both.
    """

    def __init__(
        self,
        copier: Copier,
        plan: PlannedJob,
        hooks: JobHooks,
        ended: Callable[[JobDone | JobFailed], None] = lambda _: None,
    ) -> None:
        self.job = plan.job
        self.ended = ended
        self._copier = copier
        self._plan = plan
        self._hooks = hooks
        self._looking = plan.look is not None
        self._steps = plan.look if plan.look is not None else plan  # whose slices are taken now
        self._begun = 0
        self._completed = 0
        self._scattered = 0
        self._moved_bytes = 0
        self._looked_bytes = 0
        self._skipped_bytes = 0
        self._digests: list[bytes] = []
        self._look: dict[int, bytes] = {}  # digests by chunk
        self._lane_s = 0.0
        self._times = CopyTimes(0.0, 0.0)
        self._since: tuple[float, CopyTimes] | None = None  # since when its turn lasts

    def advance(self) -> JobDone | JobFailed | None:
        """Complete one slice more and begin the one behind it; the report once the job has ended."""
        return self._attempt(self._one_slice)

    def rest(self) -> JobDone | JobFailed | None:
        """Complete what was begun, and wait for it: what fails later is another job's. The report if it has ended."""
        report = self._attempt(self._what_was_begun)
        if report is None:
            report = self._attempt(self._copier.drain)
        self._end_turn()
        return report

    def _attempt(self, step: Callable[[], None]) -> JobDone | JobFailed | None:
        if self._since is None:
            self._since = time.monotonic(), self._copier.times
        try:
            step()
            if self._looking and self._completed == len(self._steps.slices):
                self._has_looked()
            if self._looking or self._completed < len(self._steps.slices):
                return None
            self._finish()
            report: JobDone | JobFailed = self._done()
        except Exception as exc:  # noqa: BLE001 - the lane must go on, and the job must get its report
            report = self._failure(exc)
        return self._let_go(report)

    def _end_turn(self) -> None:
        if self._since is not None:
            start_s, before = self._since
            parts = zip(self._times, self._copier.times, before, strict=True)
            self._times = CopyTimes(*(total + after - at_first for total, after, at_first in parts))
            self._lane_s += time.monotonic() - start_s
            self._since = None

    def _one_slice(self) -> None:
        if self._hooks.stopped():
            raise _Stopped
        count = len(self._steps.slices)
        while self._begun < min(self._completed + 2, count) and not self._at_group_end():
            self._begin(self._begun % 2, self._steps.slice_work(self._begun))
            self._begun += 1
        if self._completed < count:
            self._next_slice()

    def _at_group_end(self) -> bool:
        """Whether the last slice that was begun ends a group: that is waited for before the next group begins."""
        return self._begun > self._completed and self._begun - 1 in self._steps.group_ends

    def _what_was_begun(self) -> None:
        while self._completed < self._begun:
            self._next_slice()

    def _begin(self, slot: int, work: SliceWork) -> None:
        if self._steps.digests_only:
            self._copier.begin_digest(slot, work)
        elif self._plan.lane is LaneKind.RESTORE:
            self._copier.begin_restore(slot, work)
        elif self._plan.written:
            # Counted before it is written, as in a restore: in device memory that is from now on.
            if not self._plan.pool.in_host_memory:
                self._scattered = self._begun + 1
            self._copier.begin_copy(slot, work, self._plan.slice_work(self._begun, written=True))
        else:
            self._copier.begin_capture(slot, work)

    def _next_slice(self) -> None:
        number, steps = self._completed, self._steps
        self._complete(number)
        self._completed += 1
        first, count = steps.slices[number]
        size_bytes = bytes_of(steps.chunks[first : first + count])
        if self._looking:
            self._looked_bytes += size_bytes
        else:
            self._moved_bytes += size_bytes
        if number in steps.group_ends:
            self._copier.drain()
            self._hooks.group_done(steps.group_ends[number])

    def _complete(self, number: int) -> None:
        copier, plan, slot = self._copier, self._plan, number % 2
        if self._steps.digests_only:
            self._digests.extend(copier.complete_digest(slot))
        elif plan.lane is LaneKind.RESTORE:
            copier.verify_restore(slot)
            # Counted before the first byte is written: a scatter that fails halfway has touched its rows.
            self._scattered = number + 1
            copier.scatter_restore(slot)
        elif plan.written:
            self._scattered = max(self._scattered, number + 1)
            copier.complete_copy(slot)
        else:
            self._digests.extend(copier.complete_capture(slot))

    def _has_looked(self) -> None:
        """The look is digested: go on with what is to be copied, but for what a restore has found in its rows."""
        plan = self._plan
        numbers = (chunk.number for chunk in self._steps.chunks)
        self._look = dict(zip(numbers, self._digests, strict=True))
        if plan.lane is LaneKind.RESTORE:
            missing = [chunk for chunk in plan.chunks if self._look.get(chunk.number) != chunk.digest]
            self._plan = plan.of(missing, plan.sizes)
            self._skipped_bytes = plan.moved_bytes - self._plan.moved_bytes
        self._steps, self._digests = self._plan, []
        self._looking = False
        self._begun = self._completed = 0
        for group in plan.group_ends.values():
            if group not in self._plan.group_ends.values():
                self._hooks.group_done(group)

    def _finish(self) -> None:
        plan = self._plan
        captures = plan.lane is LaneKind.CAPTURE and not (plan.digests_only or plan.written)
        if captures and self._copier.copies_behind:
            self._hooks.source_free()
        self._copier.drain()

    def _done(self) -> JobDone:
        plan, digests = self._plan, self._digests
        if self._look and plan.lane is LaneKind.CAPTURE:
            copied = zip((chunk.number for chunk in plan.chunks), digests, strict=True)
            digests = [digest for _, digest in sorted({**self._look, **dict(copied)}.items())]
        return JobDone(
            plan.job,
            self._moved_bytes,
            0.0,
            0.0,
            b"".join(digests),
            algorithm=plan.algorithm if digests or plan.digests_only else "",
            digested_bytes=self._moved_bytes + self._looked_bytes,
            skipped_bytes=self._skipped_bytes,
        )

    def _failure(self, error: Exception) -> JobFailed:
        """The report of a failure."""
        match error:
            case _Stopped():
                return self.failed("cancelled", "cancelled between two slices")
            case JobRefused():
                return self.failed(error.code, error.message)
            case SourceDiffers():
                return self.failed("source_changed", str(error), chunk=error.chunk)
            case ChunkDamaged():
                return self.failed("damaged", str(error), chunk=error.chunk)
            case DeviceFailure():
                return self.failed(error.code, error.message, sticky=error.sticky)
            case MemoryError():
                return self.failed("out_of_memory", f"no host memory for a slice: {error}")
            case _:
                _log.error("job failed job=%d", self.job, exc_info=error)
                return self.failed_whole("internal", f"{type(error).__name__}: {error}")

    def failed(self, code: str, message: str, *, chunk: int = -1, sticky: bool = False) -> JobFailed:
        """The report of a failure, with every row that may have been written."""
        plan = self._plan
        return JobFailed(
            plan.job,
            code,
            message,
            chunk=chunk,
            rows_undefined=plan.rows_touched(self._scattered),
            sticky=sticky,
            moved_bytes=self._moved_bytes,
        )

    def failed_whole(self, code: str, message: str, *, sticky: bool = False) -> JobFailed:
        """The report where our own account of what was written cannot be trusted: all that the job was to write is
        undefined.
        """
        plan = self._plan
        return JobFailed(
            plan.job,
            code,
            message,
            rows_undefined=_packed(plan.written),
            sticky=sticky,
            moved_bytes=self._moved_bytes,
        )

    def _let_go(self, report: JobDone | JobFailed) -> JobDone | JobFailed:
        """Wait for what still runs and drop all views; the job's final report.

        A device that cannot be waited for may still write to rows and shuttles that are about to be given to others:
        nobody may use it any more, so the report becomes sticky.
        """
        try:
            self._copier.drain()
        except Exception as exc:  # noqa: BLE001 - whatever it was, the device is in an unknown state
            _log.exception("device cannot be waited for job=%d", self.job)
            text = f"the device cannot be waited for: {exc}"
            if isinstance(report, JobFailed):
                report = msgspec.structs.replace(report, message=f"{report.message}; {text}", sticky=True)
            else:
                report = self.failed_whole("device_error", text, sticky=True)
        self._end_turn()
        times = self._times
        return msgspec.structs.replace(
            report,
            lane_s=self._lane_s,
            digest_s=times.digest_s,
            copy_s=times.copy_s,
            gather_s=times.gather_s,
            verify_s=times.verify_s,
        )


def _packed(rows: Sequence[RowMap]) -> tuple[bytes, ...]:
    """All rows of each group's list, or nothing where no group has any."""
    packed = tuple(group.packed_between(0, group.count) for group in rows)
    return packed if any(packed) else ()
