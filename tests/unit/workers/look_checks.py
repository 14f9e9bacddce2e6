"""What any device must do with chunks that may be there already, in a case of any shape."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from ipc.messages import CaptureJob, JobDone, JobFailed
from shm.extent import ChunkPlace
from shm.layout import ChunkSpan
from shm.rows import pack_numbers
from tests.support.shape_cases import Bytes, Case
from tests.unit.workers.shape_checks import Runner


def check_hinted_capture(runner: Runner, case: Case, hinted: Sequence[int], only: Sequence[int]) -> None:
    """Hinted chunks are digested and not copied, of `only` some chunks there is nothing else; then the same after a
    byte has changed.
    """
    for _ in range(2):
        whole = runner.run(case.capture_job(_places(runner, case.spans)))
        assert isinstance(whole, JobDone), whole
        before = runner.memory.copy()
        numbers = list(only) or list(range(len(case.spans)))
        known = [number for number in numbers if number in hinted]
        copied = [number for number in numbers if number not in hinted]
        places = _places(runner, [case.spans[number] for number in copied])
        job: CaptureJob = msgspec.structs.replace(
            case.capture_job(places), hinted=pack_numbers(known), chunks=pack_numbers(only)
        )
        done = runner.run(job)
        assert isinstance(done, JobDone), done
        assert done.digests == b"".join(whole.digests[16 * number : 16 * number + 16] for number in numbers)
        for number, place in zip(copied, places, strict=True):
            assert runner.stored(place) == case.chunk(before, case.spans[number])
        assert done.moved_bytes == sum(case.spans[number].length_bytes for number in copied)
        assert done.digested_bytes == sum(case.spans[number].length_bytes for number in numbers)
        assert np.array_equal(runner.memory, before)
        _change_source(runner, case, numbers[0])


def _places(runner: Runner, spans: Sequence[ChunkSpan]) -> list[ChunkPlace]:
    return [runner.place(span.length_bytes) for span in spans]


def _change_source(runner: Runner, case: Case, number: int) -> None:
    span = case.spans[number]
    plane = case.layout.all_groups[span.group].planes[0]
    runner.memory[plane.offset_bytes + case.rows[span.group][span.first_row] * plane.row_stride_bytes] ^= 1


def check_hints_that_cannot_be(runner: Runner, case: Case) -> None:
    """Numbers of no chunk, out of order, or of chunks that are not captured, are refused."""
    count = len(case.spans)
    for hinted, only in (([count], []), ([0, 0], []), ([], [count]), ([0], [count - 1] if count > 1 else [0, 0])):
        job = msgspec.structs.replace(case.capture_job([]), hinted=pack_numbers(hinted), chunks=pack_numbers(only))
        report = runner.run(job)
        assert isinstance(report, JobFailed)
        assert report.code == "bad_request"


def check_resident_restore(  # noqa: PLR0917 - what a test draws
    runner: Runner, case: Case, tokens: int, resident: int, changed: Sequence[int], algorithm: str
) -> None:
    """After bytes at `changed` have changed, a restore copies the chunks that are not whole or not there, and no other;
    the rows hold the image's bytes then.
    """
    image_of = runner.memory.copy()
    places = _places(runner, case.spans)
    captured = runner.run(case.capture_job(places))
    assert isinstance(captured, JobDone), captured
    job = case.restore_job(places, captured.digests, tokens, algorithm)
    assert isinstance(runner.run(job), JobDone)
    for at in changed:
        runner.memory[at % len(runner.memory)] ^= 0x41
    before = runner.memory.copy()
    looked, skipped, all_bytes = _in_place(case, image_of, before, tokens, resident)
    done = runner.run(msgspec.structs.replace(job, resident_tokens=resident))
    assert isinstance(done, JobDone), done
    assert np.array_equal(runner.memory, case.restored(before, image_of, tokens))
    assert (done.moved_bytes, done.skipped_bytes) == (all_bytes - skipped, skipped)
    assert done.digested_bytes == done.moved_bytes + looked


def _in_place(case: Case, image_of: Bytes, memory: Bytes, tokens: int, resident: int) -> tuple[int, int, int]:
    """Bytes of chunks that a restore should look at, those of them that are there, and all that it is to restore."""
    there = dataclasses.replace(case, rows=tuple(case.target_of(tokens)))
    looked = skipped = all_bytes = 0
    for span in case.spans:
        end = span.first_token + span.token_count
        if span.first_token != tokens if span.is_state else span.first_token >= tokens:
            continue
        all_bytes += span.length_bytes
        if end > min(resident, tokens):
            continue
        looked += span.length_bytes
        mine = span._replace(first_row=0) if span.is_state else span
        if there.chunk(memory, mine) == case.chunk(image_of, span):
            skipped += span.length_bytes
    return looked, skipped, all_bytes
