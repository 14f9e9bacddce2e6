"""Images and what they are made of: the values that the catalog keeps, the operations read and the journal records."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shm.extent import ChunkPlace, granules_for
from shm.layout import ChunkSpan


class ChunkKey(NamedTuple):
    """What makes two chunks the same bytes. `worker` is part of it: an arena is mapped by one worker only. A state's
    chunk has no tokens.
    """

    namespace: str
    fingerprint: str
    worker: str
    stage: int
    group: int
    token_count: int
    length_bytes: int
    algorithm: str
    key_id: bytes
    digest: bytes


@dataclass(slots=True, eq=False)
class Chunk:
    """Published bytes. The extents go back to the arena when neither an image references nor an operation reads it. One
    that stands `alone` is not found by its key: a later image shares it only where that gave it as a hint.
    """

    key: ChunkKey
    place: ChunkPlace
    references: int = 0
    reads: int = 0
    damaged: bool = False
    alone: bool = False

    @property
    def granule_bytes(self) -> int:
        """Bytes of the granules it occupies."""
        return sum(extent.length_bytes for extent in self.place.extents)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Suspect:
    """Something whose copies were under way when workers died: an image, or what an engine has captured.

    `deaths` in a row are held against it, the last one of operation `last_op`. While `alone` its copies have a worker
    to themselves, so that the next death tells.
    """

    deaths: int = 0
    last_op: int = 0
    alone: bool = False
    quarantined: bool = False


class ImagePart(NamedTuple):
    """A named part of an image that was put: bytes in `chunk_count` chunks of its one stage, from `first_chunk` on."""

    name: str
    nbytes: int
    meta: str
    first_chunk: int
    chunk_count: int


class Scope(NamedTuple):
    """Images that an engine may restore: same namespace, same fingerprint, stages served by the same workers."""

    namespace: str
    fingerprint: str
    workers: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Image:
    """One published conversation, or a transit image (see `Catalog.transits`), whose `tokens` are empty.

    `stages[s]` lists the chunks of stage s in order (see `StageLayout.chunks`), of `token_count` tokens and the states
    at `positions`. It can be restored to any number of tokens (`points` None), or to these only. An image that was put
    has `parts`; others have None.
    """

    image_id: int
    scope: Scope
    conversation: str
    tokens: bytes
    token_count: int
    positions: tuple[int, ...]
    points: tuple[int, ...] | None
    stages: tuple[tuple[Chunk, ...], ...]
    created_unix_s: float
    used_unix_s: float
    pinned: bool = False
    taken: int = 0
    readers: int = 0
    restores: int = 0
    damaged: bool = False
    parts: tuple[ImagePart, ...] | None = None
    transit: bool = False
    held_s: float = 0.0  # of a transit image: when its engine last did something with it (monotonic)
    suspect: Suspect | None = None

    @property
    def quarantined(self) -> bool:
        """Whether its restores killed workers twice in a row."""
        return self.suspect is not None and self.suspect.quarantined

    @property
    def findable(self) -> bool:
        """Whether a lookup may find it."""
        return not (self.damaged or self.quarantined)

    @property
    def evictable(self) -> bool:
        """Whether nobody needs it: not pinned, not being restored or taken."""
        return not (self.pinned or self.readers or self.taken)

    @property
    def put_token_bytes(self) -> int:
        """What its tokens take of the byte budget: all of them where it was put."""
        return 0 if self.parts is None else len(self.tokens)

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, stage after stage."""
        for stage in self.stages:
            yield from stage


class Draft(NamedTuple):
    """What a capture is to become: an image (see there) of `conversation` with the chunks `spans[s]` on stage s. With
    `partial` these are only some of an image that is put.
    """

    scope: Scope
    conversation: str
    tokens: bytes
    token_count: int
    positions: tuple[int, ...]
    points: tuple[int, ...] | None
    spans: tuple[tuple[ChunkSpan, ...], ...]
    transit: bool = False
    partial: bool = False


class Hints(NamedTuple):
    """What an image has that a draft may have, too: chunks of it by their number in the draft, ascending, of every
    stage. Tokens suggest that; only digests prove it.
    """

    image: Image
    chunks: tuple[dict[int, Chunk], ...]


@dataclass(slots=True, eq=False)
class Staged:
    """A draft with extents for every chunk, `places[s]` on stage s, but for those in `hinted[s]` (see `Hints`), which
    are held. Nobody sees it before it is published.
    """

    draft: Draft
    places: tuple[tuple[ChunkPlace, ...], ...]
    hinted: tuple[dict[int, Chunk], ...]
    open: bool = True

    @property
    def damaged(self) -> bool:
        """Whether a hinted chunk has lost its digest meanwhile."""
        return any(chunk.damaged for chunks in self.hinted for chunk in chunks.values())

    def all_places(self, stage: int) -> Iterator[ChunkPlace]:
        """Where the chunks of a stage lie, or will."""
        yield from self.places[stage]
        yield from (chunk.place for chunk in self.hinted[stage].values())


@dataclass(frozen=True, slots=True)
class StageDigests:
    """What a stage's worker answered: 16 bytes a chunk, and how they were made."""

    algorithm: str
    key_id: bytes
    digests: tuple[bytes, ...]


class StoredPiece(NamedTuple):
    """Chunks of a part of a put: copied, digested, not published."""

    staged: Staged
    answer: StageDigests


def needed_granules(draft: Draft, hints: Hints | None = None) -> dict[str, int]:
    """Granules that the chunks take, but for those that are hinted, by worker."""
    need: dict[str, int] = {}
    counted: dict[int, int] = {}  # stages of one kind share their spans
    for stage, (worker, stage_spans) in enumerate(zip(draft.scope.workers, draft.spans, strict=True)):
        hinted = hints.chunks[stage] if hints is not None else ()
        if hinted:
            granules = sum(granules_for(s.length_bytes) for number, s in enumerate(stage_spans) if number not in hinted)
        elif id(stage_spans) in counted:
            granules = counted[id(stage_spans)]
        else:
            granules = counted[id(stage_spans)] = sum([granules_for(span.length_bytes) for span in stage_spans])
        need[worker] = need.get(worker, 0) + granules
    return need
