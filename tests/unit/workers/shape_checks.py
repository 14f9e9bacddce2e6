"""What any device must do with a case of any shape (`tests.support.shape_cases`)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ipc.messages import CopyCommand, JobDone, JobFailed
from shm.extent import ChunkPlace, granules_for
from shm.rows import unpack_rows
from tests.support.shape_cases import Bytes, Case, Rows
from workers.digest import Digester
from workers.lanes import JobHooks
from workers.plans import PlannedJob

SLICE_BYTES = 256
"""Slices so small that most jobs have several."""


class Runner(Protocol):
    """A device with its lanes, the memory of one pool, and shuttles."""

    memory: Bytes
    digester: Digester

    def place(self, length_bytes: int) -> ChunkPlace:
        """A fresh place."""
        ...

    def stored(self, place: ChunkPlace) -> bytes:
        """What lies in a place."""
        ...

    def plan(self, job: CopyCommand) -> PlannedJob:
        """Check a job and cut it into slices."""
        ...

    def run(self, job: CopyCommand, hooks: JobHooks = ...) -> JobDone | JobFailed:
        """Run a job."""
        ...


def granules_of(case: Case) -> int:
    """Granules of a shuttle that holds the case's image."""
    return 1 + sum(granules_for(span.length_bytes) for span in case.spans)


def rows_in(packed: Sequence[bytes]) -> Rows:
    """The rows of every group."""
    return tuple(tuple(row for first, n in unpack_rows(group) for row in range(first, first + n)) for group in packed)


def check_capture_and_restore(runner: Runner, case: Case, length: int, algorithm: str) -> None:
    """Stored is what the model says; a restore of `length` tokens writes what the model says, or is refused."""
    before = runner.memory.copy()
    places = [runner.place(span.length_bytes) for span in case.spans]
    done = runner.run(case.capture_job(places))
    assert isinstance(done, JobDone), done
    for number, (span, place) in enumerate(zip(case.spans, places, strict=True)):
        chunk = case.chunk(before, span)
        assert runner.stored(place) == chunk
        digest = runner.digester.digest(algorithm, np.frombuffer(chunk, np.uint8))
        assert done.digests[16 * number : 16 * number + 16] == digest
    assert done.moved_bytes == sum(span.length_bytes for span in case.spans)
    assert np.array_equal(runner.memory, before)
    for tokens in {length, *case.prefixes[-1:]}:
        runner.memory[:] ^= 0x5A
        destroyed = runner.memory.copy()
        job = case.restore_job(places, done.digests, tokens, algorithm)
        if tokens in case.prefixes:
            report = runner.run(job)
            assert isinstance(report, JobDone), report
            assert np.array_equal(runner.memory, case.restored(destroyed, before, tokens))
        else:
            report = runner.run(job)
            assert isinstance(report, JobFailed)
            assert report.code in {"bad_tokens", "no_checkpoint"}
            assert report.rows_undefined == ()
            assert np.array_equal(runner.memory, destroyed)


def check_digests(runner: Runner, case: Case, wanted: Sequence[int], algorithm: str) -> None:
    """Digested are the chunks that are asked for, as a capture digests them; nothing is written anywhere."""
    before = runner.memory.copy()
    done = runner.run(case.digest_job(wanted))
    assert isinstance(done, JobDone), done
    chunks = [case.chunk(before, case.spans[number]) for number in wanted]
    digests = [runner.digester.digest(algorithm, np.frombuffer(chunk, np.uint8)) for chunk in chunks]
    assert done.digests == b"".join(digests)
    assert done.moved_bytes == sum(map(len, chunks))
    assert np.array_equal(runner.memory, before)
    report = runner.run(case.digest_job([*wanted, len(case.spans)]))
    assert isinstance(report, JobFailed)
    assert report.code == "bad_request"


def check_digests_that_are_cancelled(runner: Runner, case: Case, after: int) -> None:
    """Digests that are cancelled after `after` slices are no digests, and the next ones are right."""
    job = case.digest_job(range(len(case.spans)))
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > after

    report = runner.run(job, JobHooks(stopped, lambda: None))
    if after >= len(runner.plan(job).slices):
        assert isinstance(report, JobDone)
        return
    assert isinstance(report, JobFailed)
    assert (report.code, report.rows_undefined) == ("cancelled", ())


def check_copy(runner: Runner, case: Case) -> None:
    """Targets have the sources' bytes; sources and all else are as they were."""
    before = runner.memory.copy()
    done = runner.run(case.copy_job())
    assert isinstance(done, JobDone), done
    assert np.array_equal(runner.memory, case.copied(before))
    assert (done.moved_bytes, done.digests) == (sum(span.length_bytes for span in case.spans), b"")


def check_copy_that_fails(runner: Runner, case: Case, slice_number: int, code: str, *, early: bool = False) -> None:
    """A copy that `code` ends at slice `slice_number` (where it has so many): slices before it are copied, of the rest
    nothing, or (`early`: on a device that writes what was begun) it and the one after it; what may be written is named.
    A changed source differs in its one byte.
    """
    before = runner.memory.copy()
    slices = runner.plan(case.copy_job()).slices
    report = runner.run(case.copy_job())
    if slice_number >= len(slices):
        assert isinstance(report, JobDone), report
        assert np.array_equal(runner.memory, case.copied(before))
        return
    assert isinstance(report, JobFailed)
    assert report.code == code
    first, count = slices[slice_number]
    if code == "source_changed":
        assert first <= report.chunk < first + count
    next_slice = slices[min(slice_number + 1, len(slices) - 1)]
    end = next_slice.first + next_slice.chunks if early else first
    expected = case.copied(before, case.spans[:end])
    assert int((runner.memory != expected).sum()) == (code == "source_changed")
    named = rows_in(report.rows_undefined) or tuple(() for _ in case.target)
    if early:
        assert named == case.targets(case.spans[:end])
        return
    written, begun = case.targets(case.spans[:first]), case.targets(case.spans[: first + count])
    for must, may, rows in zip(written, begun, named, strict=True):
        assert set(must) <= set(rows) <= set(may)
    if code not in {"source_changed", "cancelled"}:  # it struck while the slice was written
        assert named == begun


def check_copy_that_is_cancelled(runner: Runner, case: Case, after: int, *, early: bool = False) -> None:
    """A copy that is cancelled after `after` slices has copied those (`early`: and the one that was begun) and names
    their rows, and no others.
    """
    before = runner.memory.copy()
    slices = runner.plan(case.copy_job()).slices
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > after

    report = runner.run(case.copy_job(), JobHooks(stopped, lambda: None))
    if after >= len(slices):
        assert isinstance(report, JobDone)
        return
    assert isinstance(report, JobFailed)
    assert report.code == "cancelled"
    done = case.spans[: slices[after].first]
    begun = case.spans[: slices[after].first + slices[after].chunks] if early and after else done
    assert np.array_equal(runner.memory, case.copied(before, begun))
    assert (rows_in(report.rows_undefined) or tuple(() for _ in case.target)) == case.targets(begun)
    assert report.moved_bytes == sum(span.length_bytes for span in done)
