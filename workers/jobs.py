"""Copy jobs as values: the states of a job, its chunks and how they are cut into slices.

State machine of a job (`TRANSITIONS` is the only copy of it)::

    QUEUED --wait--> WAITING --ready--> QUEUED --start--> RUNNING --finish--> DONE
       |                |                                    | cancel
       | cancel         | cancel                             v
       +-> CANCELLED <--+---------------- stop ---------- STOPPING --finish--> DONE

Every state that is not an end can `fail`. A cancel that comes during the last slice is too late: the job is done.
"""

import operator
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from ipc.messages import DIGEST_BYTES
from shm.extent import ChunkPlace
from shm.layout import ChunkSpan, StageLayout


class JobRefused(Exception):
    """The job cannot be started as it was sent. `code` is a wire code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class InvalidTransition(Exception):
    """A bug of this package: an event met a state that has no use for it."""

    def __init__(self, job: int, state: "JobState", event: "JobEvent") -> None:
        super().__init__(f"job {job}: {event.name} in state {state.name}")
        self.state = state
        self.event = event


class JobState(Enum):
    """Where a job stands."""

    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobEvent(Enum):
    """What may happen to a job."""

    WAIT = "wait"
    READY = "ready"
    START = "start"
    CANCEL = "cancel"
    STOP = "stop"
    FINISH = "finish"
    FAIL = "fail"


TRANSITIONS: Final[dict[JobState, dict[JobEvent, JobState]]] = {
    JobState.QUEUED: {
        JobEvent.WAIT: JobState.WAITING,
        JobEvent.START: JobState.RUNNING,
        JobEvent.CANCEL: JobState.CANCELLED,
        JobEvent.FAIL: JobState.FAILED,
    },
    JobState.WAITING: {
        JobEvent.READY: JobState.QUEUED,
        JobEvent.CANCEL: JobState.CANCELLED,
        JobEvent.FAIL: JobState.FAILED,
    },
    JobState.RUNNING: {
        JobEvent.FINISH: JobState.DONE,
        JobEvent.CANCEL: JobState.STOPPING,
        JobEvent.FAIL: JobState.FAILED,
    },
    JobState.STOPPING: {
        JobEvent.STOP: JobState.CANCELLED,
        JobEvent.FINISH: JobState.DONE,
        JobEvent.CANCEL: JobState.STOPPING,
        JobEvent.FAIL: JobState.FAILED,
    },
    JobState.DONE: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
}


class JobRecord:
    """The state of one job; `apply` is the only way to change it."""

    __slots__ = ("job", "state")

    def __init__(self, job: int) -> None:
        self.job = job
        self.state = JobState.QUEUED

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to the job any more."""
        return not TRANSITIONS[self.state]

    def apply(self, event: JobEvent) -> JobState:
        """Move on.

        Raises:
            InvalidTransition: the table has no such move; the state is unchanged.
        """
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise InvalidTransition(self.job, self.state, event)
        self.state = after
        return after


_NO_PLACE: Final = ChunkPlace(0, ())


class ChunkWork(NamedTuple):
    """One chunk of a job.

    The chunk's bytes always cover `span.row_count` whole rows. Of these, `live_rows` rows of the pool are read or
    written, and of the last live row only the first `tail_tokens` tokens (0: the whole row). `digest` and `algorithm`
    are what a restore must find; both are empty in a capture.
    """

    number: int
    span: ChunkSpan
    place: ChunkPlace
    live_rows: int
    tail_tokens: int
    digest: bytes = b""
    algorithm: str = ""
    whole: bool = True  # of a restore: all tokens of the chunk are wanted


class SliceRange(NamedTuple):
    """Chunks ``first .. first + chunks`` of a job's list, copied and verified together."""

    first: int
    chunks: int


class CaptureChunks(NamedTuple):
    """The chunks of a capture: those to be copied, and those that are only digested; each in order."""

    copied: list[ChunkWork]
    hinted: list[ChunkWork]


def capture_chunks(  # noqa: PLR0917 - what a job's message says of its chunks
    layout: StageLayout,
    tokens: int,
    positions: Sequence[int],
    places: Sequence[ChunkPlace],
    hinted: Sequence[int] = (),
    only: Sequence[int] = (),
) -> CaptureChunks:
    """The chunks of a capture (those number `only`; empty: all). Those number `hinted` have no place.

    Raises:
        JobRefused: the places do not fit the layout, there are no such chunks, or the last block's tokens cannot be
            located.
    """
    spans = _spans(layout, tokens, positions)
    numbers = _ascending(only, len(spans)) or range(len(spans))
    known = set(_ascending(hinted, len(spans)))
    if not known.issubset(numbers):
        raise JobRefused("bad_request", f"chunk {min(known.difference(numbers))} is hinted and not captured")
    copied = [number for number in numbers if number not in known]
    _check_places([spans[number] for number in copied], places)
    return CaptureChunks(
        [_work(layout, spans, number, place) for number, place in zip(copied, places, strict=True)],
        [_work(layout, spans, number, _NO_PLACE) for number in hinted],
    )


def _work(layout: StageLayout, spans: Sequence[ChunkSpan], number: int, place: ChunkPlace) -> ChunkWork:
    span = spans[number]
    return ChunkWork(number, span, place, *_live(layout, span, span.token_count))


def _ascending(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Numbers of chunks as they came, checked.

    Raises:
        JobRefused: they do not ascend, or there are not so many chunks.
    """
    if any(map(operator.ge, numbers, numbers[1:])) or (numbers and numbers[-1] >= count):
        raise JobRefused("bad_request", f"numbers of chunks must ascend and be below {count}, got {numbers[:8]}")
    return numbers


def copy_chunks(layout: StageLayout, tokens: int, positions: Sequence[int]) -> list[ChunkWork]:
    """The chunks of a copy from rows to rows in order; they have no place.

    Raises:
        JobRefused: the last block's tokens cannot be located.
    """
    return [
        ChunkWork(number, span, _NO_PLACE, *_live(layout, span, span.token_count))
        for number, span in enumerate(_spans(layout, tokens, positions))
    ]


def digest_chunks(layout: StageLayout, tokens: int, positions: Sequence[int], wanted: Sequence[int]) -> list[ChunkWork]:
    """Those chunks that `wanted` numbers, in that order; they have no place.

    Raises:
        JobRefused: there is no such chunk, or the last block's tokens cannot be located.
    """
    spans = _spans(layout, tokens, positions)
    for number in wanted:
        if number >= len(spans):
            raise JobRefused("bad_request", f"chunk {number} of {len(spans)}")
    return [_work(layout, spans, number, _NO_PLACE) for number in wanted]


def _spans(layout: StageLayout, tokens: int, positions: Sequence[int]) -> list[ChunkSpan]:
    if tokens < 0 or layout.capturable_tokens(tokens) != tokens:
        raise JobRefused("bad_tokens", f"{tokens} tokens end inside a block whose tokens cannot be located")
    return layout.chunks(tokens, positions)


def restore_chunks(
    layout: StageLayout,
    image_tokens: int,
    tokens: int,
    positions: Sequence[int],
    places: Sequence[ChunkPlace],
    *,
    digests: bytes,
    algorithms: Sequence[str],
) -> list[ChunkWork]:
    """The chunks that hold the first `tokens` tokens of an image of `image_tokens`, then the states at that position.

    A state chunk's row is the first one of its list: a restore names one slot, whichever checkpoint it is for.

    Raises:
        JobRefused: places, digests or algorithms do not fit the layout, the cut lies inside a block whose tokens
            cannot be located, a window has passed, or there is no checkpoint.
    """
    if not 0 <= tokens <= image_tokens:
        raise JobRefused("bad_tokens", f"{tokens} tokens of an image of {image_tokens}")
    if tokens < image_tokens and layout.capturable_tokens(tokens) != tokens:
        raise JobRefused("bad_tokens", f"{tokens} tokens end inside a block whose tokens cannot be located")
    if not layout.holds_prefix(tokens, image_tokens) or (positions and tokens not in positions):
        raise JobRefused("no_checkpoint", f"the image of {image_tokens} tokens does not hold what {tokens} tokens need")
    spans = layout.chunks(image_tokens, positions)
    _check_places(spans, places)
    if len(digests) != len(spans) * DIGEST_BYTES:
        raise JobRefused("bad_request", f"{len(digests)} digest bytes for {len(spans)} chunks")
    if len(algorithms) not in (1, len(spans)):
        raise JobRefused("bad_request", f"{len(algorithms)} algorithms for {len(spans)} chunks")
    works: list[ChunkWork] = []
    for number, (span, place) in enumerate(zip(spans, places, strict=True)):
        wanted = min(span.token_count, tokens - span.first_token)
        if span.first_token != tokens if span.is_state else wanted <= 0:
            continue
        digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        algorithm = algorithms[number] if len(algorithms) > 1 else algorithms[0]
        live = _live(layout, span, wanted)
        works.append(
            ChunkWork(
                number,
                span._replace(first_row=0) if span.is_state else span,
                place,
                *live,
                digest,
                algorithm,
                whole=span.is_state or wanted == span.token_count,
            )
        )
    return works


def resident_chunks(chunks: Sequence[ChunkWork], tokens: int, algorithm: str) -> list[ChunkWork]:
    """Which chunks of a restore may be in their rows already, as far as `tokens` tokens are: those that it restores as
    a whole and whose digest `algorithm` makes.
    """
    return [
        chunk
        for chunk in chunks
        if chunk.span.first_token + chunk.span.token_count <= tokens and chunk.whole and chunk.algorithm == algorithm
    ]


def _check_places(spans: Sequence[ChunkSpan], places: Sequence[ChunkPlace]) -> None:
    if len(spans) != len(places):
        raise JobRefused("bad_request", f"{len(places)} places for {len(spans)} chunks")
    for number, (span, place) in enumerate(zip(spans, places, strict=True)):
        if place.length_bytes != span.length_bytes:
            raise JobRefused(
                "bad_request", f"chunk {number} has {span.length_bytes} bytes, its place {place.length_bytes}"
            )


def _live(layout: StageLayout, span: ChunkSpan, tokens: int) -> tuple[int, int]:
    """Rows and tail tokens (see `ChunkWork`) of the first `tokens` tokens of a chunk."""
    if span.is_state:
        return 1, 0
    tokens_per_row = layout.groups[span.group].tokens_per_row
    return -(-tokens // tokens_per_row), tokens % tokens_per_row


def rows_needed(chunks: Sequence[ChunkWork], groups: int) -> list[int]:
    """How many rows of each group's list a job touches."""
    needed = [0] * groups
    for chunk in chunks:
        group = chunk.span.group
        needed[group] = max(needed[group], chunk.span.first_row + chunk.live_rows)
    return needed


class SliceSizes(NamedTuple):
    """How a job is cut: slices of at most `most_bytes` bytes and `most_rows` rows. With `first_bytes` the first slice
    has about so many bytes and sizes double from there, with `last_bytes` they halve to there at the end. Chunks of
    which every byte belongs to a token make slices of `whole_bytes` among themselves (0: they are as all others).
    """

    most_bytes: int
    most_rows: int
    first_bytes: int = 0
    last_bytes: int = 0
    whole_bytes: int = 0


def plan_slices(chunks: Sequence[ChunkWork], sizes: SliceSizes) -> list[SliceRange]:
    """Cut chunks, in order, into slices. A chunk is never cut: one that is larger than a slice is one by itself."""
    slices: list[SliceRange] = []
    first = size = rows = most = 0
    left = sum(chunk.span.length_bytes for chunk in chunks)
    grown = sizes.first_bytes
    whole = False
    for at, chunk in enumerate(chunks):
        length, count = chunk.span.length_bytes, max(1, chunk.span.row_count)
        other = sizes.whole_bytes and whole != is_whole(chunk)
        if at > first and (size + length > most or rows + count > sizes.most_rows or other):
            slices.append(SliceRange(first, at - first))
            left -= size
            grown *= 2
            first, size, rows = at, 0, 0
        if at == first:
            whole = is_whole(chunk)
            most = sizes.whole_bytes if whole and sizes.whole_bytes else sizes.most_bytes
            if grown:
                most = min(most, grown)
            if sizes.last_bytes:
                most = min(most, max(sizes.last_bytes, left // 2))
        size += length
        rows += count
    if first < len(chunks):
        slices.append(SliceRange(first, len(chunks) - first))
    return slices


def is_whole(chunk: ChunkWork) -> bool:
    """Whether every byte of a chunk belongs to a token."""
    return chunk.live_rows == chunk.span.row_count and not chunk.tail_tokens
