"""Lanes: one direction of a device each, running one copy job at a time, slice by slice.

A slice that is only to be digested is read where it lies.

A capture slice is digested at its source, copied, and digested again before it counts. A restore slice is copied to
private staging and verified whole before any byte of it reaches a row. A copy from rows to rows is both: digested at
its source and in staging, then written. While one slice is copied the next one has begun (see `workers.device`), so a
job has at most two slices under way.

What may be there already (see `PlannedJob.look`) is digested first, all of it, where it lies.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from ipc.messages import JobDone, JobFailed
from workers.device import ChunkDamaged, Copier, DeviceFailure, LaneKind, SliceWork, SourceDiffers
from workers.jobs import JobRefused
from workers.plans import PlannedJob, bytes_of
from workers.rowmap import RowMap

_log: Final = logging.getLogger(__name__)


class JobHooks(NamedTuple):
    """How a running job talks to the loop: `stopped` is asked between slices, `source_free` told when a capture has
    read its last row before it has ended.
    """

    stopped: Callable[[], bool]
    source_free: Callable[[], None]


class _Stopped(Exception):
    """The job was cancelled between two slices."""


class Lane:
    """Runs planned jobs of one direction, one at a time, on whichever thread calls `run`."""

    def __init__(self, kind: LaneKind, copier: Copier) -> None:
        self.kind = kind
        self._copier = copier

    def measure(self, *, exact: bool) -> None:
        """How exactly the next jobs' times are taken (see `Copier.measure`)."""
        self._copier.measure(exact=exact)

    def run(self, plan: PlannedJob, hooks: JobHooks) -> JobDone | JobFailed:
        """Run a job to its end; whatever happens becomes its report. Nothing of the job is kept."""
        start_s = time.monotonic()
        before = self._copier.times
        run = _Run(self._copier, plan, hooks)
        report = run.let_go(self._carry_out(run, plan))
        after = self._copier.times
        return msgspec.structs.replace(
            report,
            lane_s=time.monotonic() - start_s,
            digest_s=after.digest_s - before.digest_s,
            copy_s=after.copy_s - before.copy_s,
            gather_s=after.gather_s - before.gather_s,
            verify_s=after.verify_s - before.verify_s,
        )

    def _carry_out(self, run: "_Run", plan: PlannedJob) -> JobDone | JobFailed:
        try:
            digests = run.carry_out()
        except _Stopped:
            return run.failed("cancelled", "cancelled between two slices")
        except JobRefused as exc:
            return run.failed(exc.code, exc.message)
        except SourceDiffers as exc:
            return run.failed("source_changed", str(exc), chunk=exc.chunk)
        except ChunkDamaged as exc:
            return run.failed("damaged", str(exc), chunk=exc.chunk)
        except DeviceFailure as exc:
            return run.failed(exc.code, exc.message, sticky=exc.sticky)
        except MemoryError as exc:
            return run.failed("out_of_memory", f"no host memory for a slice: {exc}")
        except Exception as exc:  # noqa: BLE001 - the lane must go on, and the job must get its report
            _log.exception("job failed job=%d", plan.job)
            return run.failed_whole("internal", f"{type(exc).__name__}: {exc}")
        return JobDone(
            plan.job,
            run.moved_bytes,
            0.0,
            0.0,
            b"".join(digests),
            algorithm=plan.algorithm if digests or plan.digests_only else "",
            digested_bytes=run.moved_bytes + run.looked_bytes,
            skipped_bytes=run.skipped_bytes,
        )


class _Run:
    """One job on its way. `scattered` counts the slices that may have been written to rows; the bytes are those of the
    slices that are done.
    """

    def __init__(self, copier: Copier, plan: PlannedJob, hooks: JobHooks) -> None:
        self._copier = copier
        self._plan = plan
        self._hooks = hooks
        self._scattered = 0
        self.moved_bytes = 0
        self.looked_bytes = 0
        self.skipped_bytes = 0

    def carry_out(self) -> list[bytes]:
        """Do the job; the digests of all chunks where it makes any."""
        plan = self._plan
        look = self.look(plan.look) if plan.look is not None else {}
        if plan.lane is LaneKind.RESTORE:
            return self.restore(look)
        if plan.digests_only:
            return self.digest()
        return self.copy() if plan.written else self.capture(look)

    def look(self, plan: PlannedJob) -> dict[int, bytes]:
        """The digests, by chunk, of what may be there already."""
        copier = self._copier
        digests: list[bytes] = []

        def complete(number: int) -> None:
            digests.extend(copier.complete_digest(number % 2))

        self._slices(plan, copier.begin_digest, complete)
        return {chunk.number: digest for chunk, digest in zip(plan.chunks, digests, strict=True)}

    def capture(self, look: dict[int, bytes]) -> list[bytes]:
        """Capture every slice; the digests of all chunks, with those of the look."""
        copier, plan = self._copier, self._plan
        digests: list[bytes] = []

        def complete(number: int) -> None:
            digests.extend(copier.complete_capture(number % 2))

        self._slices(plan, copier.begin_capture, complete)
        if copier.copies_behind:
            self._hooks.source_free()
        copier.drain()
        if not look:
            return digests
        look.update(zip((chunk.number for chunk in plan.chunks), digests, strict=True))
        return [look[number] for number in sorted(look)]

    def digest(self) -> list[bytes]:
        """Digest every slice where it lies; the digests of all chunks."""
        copier = self._copier
        digests: list[bytes] = []

        def complete(number: int) -> None:
            digests.extend(copier.complete_digest(number % 2))

        self._slices(self._plan, copier.begin_digest, complete)
        copier.drain()
        return digests

    def copy(self) -> list[bytes]:
        """Copy every slice from rows to rows."""
        copier, plan = self._copier, self._plan
        begun = 0

        def begin(slot: int, work: SliceWork) -> None:
            nonlocal begun
            number, begun = begun, begun + 1
            # Counted before it is written, as in a restore: in device memory that is from now on.
            if not plan.pool.in_host_memory:
                self._scattered = begun
            copier.begin_copy(slot, work, plan.slice_work(number, written=True))

        def complete(number: int) -> None:
            self._scattered = max(self._scattered, number + 1)
            copier.complete_copy(number % 2)

        self._slices(plan, begin, complete)
        copier.drain()
        return []

    def restore(self, look: dict[int, bytes]) -> list[bytes]:
        """Restore every slice, but for chunks that the look has found in their rows."""
        copier, plan = self._copier, self._plan
        if look:
            wanted_bytes = plan.moved_bytes
            missing = [chunk for chunk in plan.chunks if look.get(chunk.number) != chunk.digest]
            plan = self._plan = plan.of(missing, plan.sizes)
            self.skipped_bytes = wanted_bytes - plan.moved_bytes

        def complete(number: int) -> None:
            copier.verify_restore(number % 2)
            # Counted before the first byte is written: a scatter that fails halfway has touched its rows.
            self._scattered = number + 1
            copier.scatter_restore(number % 2)

        self._slices(plan, copier.begin_restore, complete)
        copier.drain()
        return []

    def _slices(
        self, plan: PlannedJob, begin: Callable[[int, SliceWork], None], complete: Callable[[int], None]
    ) -> None:
        """Take every slice through the copier's two slots, the next one begun before each is completed."""
        count = len(plan.slices)
        for number in range(count):
            self._between_slices()
            if number == 0:
                begin(0, plan.slice_work(0))
            if number + 1 < count:
                begin((number + 1) % 2, plan.slice_work(number + 1))
            complete(number)
            first, chunks = plan.slices[number]
            size_bytes = bytes_of(plan.chunks[first : first + chunks])
            if plan is self._plan.look:
                self.looked_bytes += size_bytes
            else:
                self.moved_bytes += size_bytes

    def _between_slices(self) -> None:
        if self._hooks.stopped():
            raise _Stopped

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
            moved_bytes=self.moved_bytes,
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
            moved_bytes=self.moved_bytes,
        )

    def let_go(self, report: JobDone | JobFailed) -> JobDone | JobFailed:
        """Wait for what still runs and drop all views; the job's final report.

        A device that cannot be waited for may still write to rows and shuttles that are about to be given to others:
        nobody may use it any more, so the report becomes sticky.
        """
        try:
            self._copier.drain()
        except Exception as exc:  # noqa: BLE001 - whatever it was, the device is in an unknown state
            _log.exception("device cannot be waited for job=%d", report.job)
            text = f"the device cannot be waited for: {exc}"
            if isinstance(report, JobFailed):
                return msgspec.structs.replace(report, message=f"{report.message}; {text}", sticky=True)
            return self.failed_whole("device_error", text, sticky=True)
        return report


def _packed(rows: Sequence[RowMap]) -> tuple[bytes, ...]:
    """All rows of each group's list, or nothing where no group has any."""
    packed = tuple(group.packed_between(0, group.count) for group in rows)
    return packed if any(packed) else ()
