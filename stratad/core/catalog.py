"""The catalog: images, their chunks, and who holds which extents. A pure state machine.

Life of a chunk's extents::

    free --stage--> staged --bind--> referenced by images and read by operations --last one ends--> free
                       `-----discard--------------------------------------------------------------> free

What a capture expects to be stored already (its *hints*) it holds, and reserves nothing for it. Once the digests have
proven it, the image references it; where they have not, it lets go (`miss`), and `fill` reserves extents after all.

An image is bound first, then its record is written to the journal, then it is published: nobody sees it before. What
makes room is ended in the same order: `room` names the images, their end is written down, then they are dropped, and
only then does `stage` find room.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ipc.messages import TOKEN_BYTES
from shm.extent import GRANULE_BYTES, ChunkPlace, Extent
from shm.layout import ChunkSpan
from stratad.core.arena import Arena
from stratad.core.images import (
    Chunk,
    ChunkKey,
    Draft,
    Hints,
    Image,
    ImagePart,
    Scope,
    Staged,
    StageDigests,
    StoredPiece,
)
from stratad.core.prefixes import PrefixIndex, common_tokens

_NO_PLACE: Final = ChunkPlace(0, ())


@dataclass(slots=True)
class Catalog:
    """All images under one byte budget and one image budget; least recently used images make room. The tokens of puts
    count against the byte budget, though they lie in the supervisor's own memory: there may be any number of them.
    Those of a capture are a small part of its rows.

    `transits` are images on their way from slot to slot: they belong to an engine, which drops them. Nobody finds them,
    and they are never evicted.
    """

    budget_bytes: int
    budget_images: int
    next_image_id: int = 1
    sharing: bool = True  # equal chunks of a scope are stored once
    arenas: dict[str, Arena] = field(default_factory=dict)
    images: dict[int, Image] = field(default_factory=dict)
    transits: dict[int, Image] = field(default_factory=dict)
    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    evictions: int = 0
    token_bytes: int = 0  # of all images
    open_puts: int = 0  # images in the making whose parts are staged one by one
    put_token_bytes: int = 0  # of those, and of the images that were put
    over_budget: bool = False  # adopted images pass the budget, which is smaller than it was, until there was room
    _by_name: dict[tuple[str, str], OrderedDict[str, Image]] = field(default_factory=dict)
    _recency: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _prefixes: PrefixIndex = field(default_factory=PrefixIndex)  # of images that can be restored to any length
    _points: PrefixIndex = field(default_factory=PrefixIndex)  # and where the others can be
    _loose: set[Chunk] = field(default_factory=set)
    _staged: dict[int, Staged] = field(default_factory=dict)
    _bound: dict[int, Image] = field(default_factory=dict)  # whose record is being written
    _partial: dict[int, Staged] = field(default_factory=dict)

    # --- space --------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of all granules that are handed out."""
        return sum(arena.used_granules for arena in self.arenas.values()) * GRANULE_BYTES

    @property
    def held_bytes(self) -> int:
        """What counts against the byte budget."""
        return self.used_bytes + self.put_token_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of granules held by captures in flight and by puts that are not committed."""
        return sum(
            extent.length_bytes
            for staged in self.staged
            for stage in staged.places
            for place in stage
            for extent in place.extents
        )

    @property
    def staged(self) -> tuple[Staged, ...]:
        """Everything that is neither published nor discarded yet."""
        return (*self._staged.values(), *self._partial.values())

    @property
    def held_images(self) -> int:
        """What counts against the budget of images: published or not yet, and on their way between slots."""
        return len(self.images) + len(self.transits) + len(self._bound) + len(self._staged) + self.open_puts

    @property
    def capturing_count(self) -> int:
        """Images that are being captured."""
        return len(self._staged)

    def by_age(self) -> Iterator[Image]:
        """The published images, those first whose last use is longest ago."""
        return (self.images[image_id] for image_id in self._recency)

    def stage(self, draft: Draft, hints: Hints | None = None) -> Staged:
        """Reserve extents for every chunk, but for those that are hinted, which are held. The caller has made room:
        there are no victims any more (see `room`).
        """
        places: list[tuple[ChunkPlace, ...]] = []
        hinted = hints.chunks if hints is not None else tuple({} for _ in draft.spans)
        for worker, stage_spans, chunks in zip(draft.scope.workers, draft.spans, hinted, strict=True):
            numbers = [number for number in range(len(stage_spans)) if number not in chunks]
            made = [_NO_PLACE] * len(stage_spans)
            for number, place in self._reserve(worker, stage_spans, numbers):
                made[number] = place
            places.append(tuple(made))
            for chunk in chunks.values():
                chunk.reads += 1
        staged = Staged(draft, tuple(places), tuple(map(dict, hinted)))
        self.over_budget = False
        self._book(draft)[id(staged)] = staged
        return staged

    def miss(self, staged: Staged, stage: int, numbers: Sequence[int]) -> None:
        """Hinted chunks of a stage turned out to be others: they are held no longer, and may make room themselves. The
        stage has no extents for them until `fill`.
        """
        for number in numbers:
            self._end_hold(staged.hinted[stage].pop(number))

    def fill(self, staged: Staged, stage: int, numbers: Sequence[int]) -> None:
        """Reserve extents for chunks of a stage that it has missed. The caller has made room."""
        draft = staged.draft
        places = list(staged.places[stage])
        for number, place in self._reserve(draft.scope.workers[stage], draft.spans[stage], numbers):
            places[number] = place
        staged.places = (*staged.places[:stage], tuple(places), *staged.places[stage + 1 :])
        self.over_budget = False

    def _reserve(
        self, worker: str, spans: Sequence[ChunkSpan], numbers: Sequence[int]
    ) -> Iterable[tuple[int, ChunkPlace]]:
        if not numbers:
            return ()
        lengths = [spans[number].length_bytes for number in numbers]
        extents = self.arenas[worker].allocate_all(lengths)
        assert extents is not None, "room was made before"
        return zip(numbers, map(ChunkPlace, lengths, extents), strict=True)

    def _end_hold(self, chunk: Chunk) -> None:
        assert chunk.reads > 0
        chunk.reads -= 1
        self._free_if_unheld(chunk)

    def _book(self, draft: Draft) -> dict[int, Staged]:
        return self._partial if draft.partial else self._staged

    def begin_put(self, draft: Draft) -> None:
        """Count one more image in the making against the budget of images; its parts will be staged one by one, each
        `partial`. Ends with `bind_parts` or `end_put`. The caller has made room: there are no victims any more.
        """
        self.open_puts += 1
        self.put_token_bytes += len(draft.tokens)
        self.over_budget = False

    def end_put(self, draft: Draft) -> None:
        """An image in the making comes to nothing; its parts were discarded."""
        assert self.open_puts > 0
        self.open_puts -= 1
        self.put_token_bytes -= len(draft.tokens)

    # --- publish ------------------------------------------------------------------------------------------------------

    def bind(self, staged: Staged, answers: Sequence[StageDigests], now_unix_s: float) -> tuple[Image, int]:
        """An image of what was staged, which nobody sees yet, and how many of its bytes are new. Chunks whose key is
        there already are referenced and their new extents freed. Ends with `publish` or `unbind`.
        """
        stages, new_bytes = self._reference_chunks(staged, answers)
        return self._bind(staged.draft, stages, now_unix_s), new_bytes

    def bind_parts(
        self, draft: Draft, pieces: Sequence[StoredPiece], parts: tuple[ImagePart, ...], now_unix_s: float
    ) -> tuple[Image, int]:
        """An image of all `pieces` of a put in order; else like `bind`."""
        self.end_put(draft)
        chunks: list[Chunk] = []
        new_bytes = 0
        for piece in pieces:
            (stage,), new = self._reference_chunks(piece.staged, (piece.answer,))
            chunks.extend(stage)
            new_bytes += new
        return self._bind(draft, (tuple(chunks),), now_unix_s, parts), new_bytes

    def publish(self, image: Image) -> Image | None:
        """Make a bound image visible in one step; the image that it supersedes is dropped in the same step, and
        returned.
        """
        del self._bound[image.image_id]
        if image.transit:
            self.transits[image.image_id] = image
            return None
        previous = self.find(image.scope.namespace, image.scope.fingerprint, image.conversation)
        if previous is not None:
            image.pinned = previous.pinned
            self.drop(previous)
        self._list(image)
        return previous

    def unbind(self, image: Image) -> None:
        """A bound image comes to nothing."""
        del self._bound[image.image_id]
        self.put_token_bytes -= image.put_token_bytes
        self._let_go(image)

    def _reference_chunks(
        self, staged: Staged, answers: Sequence[StageDigests]
    ) -> tuple[tuple[tuple[Chunk, ...], ...], int]:
        """The chunks of a staged draft by stage, each referenced once more, and how many bytes of them are new."""
        assert staged.open, "published or discarded before"
        self._close(staged)
        draft = staged.draft
        scope = draft.scope
        new_bytes = 0
        stages: list[tuple[Chunk, ...]] = []
        for stage, (worker, answer) in enumerate(zip(scope.workers, answers, strict=True)):
            chunks: list[Chunk] = []
            hinted = staged.hinted[stage]
            entries = zip(draft.spans[stage], staged.places[stage], answer.digests, strict=True)
            for number, (span, place, digest) in enumerate(entries):
                hint = hinted.get(number)
                if hint is not None:
                    chunks.append(self._reference_hint(hint))
                    continue
                key = ChunkKey(
                    scope.namespace,
                    scope.fingerprint,
                    worker,
                    stage,
                    span.group,
                    span.token_count,
                    span.length_bytes,
                    answer.algorithm,
                    answer.key_id,
                    digest,
                )
                chunk = self.chunks.get(key) if self.sharing else None
                if chunk is None:
                    chunk = Chunk(key, place, alone=not self.sharing)
                    if self.sharing:
                        self.chunks[key] = chunk
                    new_bytes += span.length_bytes
                else:
                    self.arenas[worker].free(place.extents)
                chunk.references += 1
                chunks.append(chunk)
            stages.append(tuple(chunks))
            for hint in hinted.values():
                self._end_hold(hint)
        return tuple(stages), new_bytes

    def _reference_hint(self, hint: Chunk) -> Chunk:
        """The chunk with the key of a hint that the digests have proven: that one, or one that has come since the last
        image with it was dropped.
        """
        assert not hint.damaged, "a hint that was not proven"
        chunk = hint if hint.alone else self.chunks.setdefault(hint.key, hint)
        chunk.references += 1
        self._loose.discard(chunk)
        return chunk

    def _bind(
        self,
        draft: Draft,
        stages: tuple[tuple[Chunk, ...], ...],
        now_unix_s: float,
        parts: tuple[ImagePart, ...] | None = None,
    ) -> Image:
        """A new image of chunks that are referenced already."""
        image = Image(
            self.next_image_id,
            draft.scope,
            draft.conversation,
            draft.tokens,
            draft.token_count,
            draft.positions,
            draft.points,
            stages,
            created_unix_s=now_unix_s,
            used_unix_s=now_unix_s,
            parts=parts,
            transit=draft.transit,
        )
        self.next_image_id += 1
        self._bound[image.image_id] = image
        self.put_token_bytes += image.put_token_bytes
        return image

    def _list(self, image: Image) -> None:
        self.images[image.image_id] = image
        self.token_bytes += len(image.tokens)
        self._recency[image.image_id] = None
        names = self._by_name.setdefault((image.scope.namespace, image.conversation), OrderedDict())
        names[image.scope.fingerprint] = image
        if image.findable:
            self._index(image)

    def previous(self, draft: Draft) -> Image | None:
        """The image that this one will supersede."""
        if draft.transit:
            return None
        return self.find(draft.scope.namespace, draft.scope.fingerprint, draft.conversation)

    def adopt(self, image: Image) -> None:
        """List an image of an earlier daemon. The caller vouches that its chunks' places are in the arenas and taken
        there, and that chunks of one key are one object.
        """
        for chunk in image.chunks():
            chunk.references += 1
            if not (chunk.damaged or chunk.alone):
                self.chunks[chunk.key] = chunk
        image.damaged = any(chunk.damaged for chunk in image.chunks())
        self.put_token_bytes += image.put_token_bytes
        self._list(image)

    def _index(self, image: Image) -> None:
        if image.points is None:
            self._prefixes.add(image.scope, image.tokens, image.image_id)
        for point in image.points or ():
            self._points.add(image.scope, image.tokens[: point * TOKEN_BYTES], image.image_id)

    def _unindex(self, image: Image) -> None:
        if image.points is None:
            self._prefixes.remove(image.scope, image.tokens, image.image_id)
        for point in image.points or ():
            self._points.remove(image.scope, image.tokens[: point * TOKEN_BYTES], image.image_id)

    def discard(self, staged: Staged) -> None:
        """Give a staged image's extents back. The caller vouches that no worker may still write them."""
        assert staged.open, "published or discarded before"
        self._close(staged)
        for worker, places in zip(staged.draft.scope.workers, staged.places, strict=True):
            for place in places:
                self.arenas[worker].free(place.extents)
        for chunks in staged.hinted:
            for chunk in chunks.values():
                self._end_hold(chunk)

    def shorten(self, staged: Staged, draft: Draft, kept: Sequence[Sequence[int]]) -> None:
        """A staged image becomes that of `draft`: of stage s it keeps the chunks number `kept[s]`, in the order of the
        draft's spans; the extents and hints of all others are let go. The caller vouches that no worker may still write
        them.
        """
        assert staged.open, "published or discarded before"
        places: list[tuple[ChunkPlace, ...]] = []
        hinted: list[dict[int, Chunk]] = []
        for stage, (worker, former, numbers) in enumerate(zip(draft.scope.workers, staged.places, kept, strict=True)):
            held = staged.hinted[stage]
            for number in set(range(len(former))).difference(numbers):
                self.arenas[worker].free(former[number].extents)
                if number in held:
                    self._end_hold(held.pop(number))
            places.append(tuple(former[number] for number in numbers))
            hinted.append({at: held[number] for at, number in enumerate(numbers) if number in held})
        staged.draft, staged.places, staged.hinted = draft, tuple(places), tuple(hinted)

    def _close(self, staged: Staged) -> None:
        staged.open = False
        del self._book(staged.draft)[id(staged)]

    # --- find ---------------------------------------------------------------------------------------------------------

    def find(self, namespace: str, fingerprint: str, conversation: str) -> Image | None:
        """The image of a conversation under one fingerprint."""
        names = self._by_name.get((namespace, conversation))
        return None if names is None else names.get(fingerprint)

    def named(self, namespace: str, conversation: str) -> tuple[Image, ...]:
        """The images of a conversation under every fingerprint, latest last."""
        return tuple(self._by_name.get((namespace, conversation), OrderedDict()).values())

    def lookup(self, scope: Scope, tokens: bytes) -> tuple[Image, int] | None:
        """The image that can be restored to most leading tokens of `tokens`, and how many those are. Damaged images are
        not found.
        """
        found = self._prefixes.longest_common(scope, tokens)
        point = self._points.longest_whole(scope, tokens)
        if found is None or (point is not None and point[1] > found[1]):
            found = point
        return None if found is None else (self.images[found[0]], found[1])

    def nearest(self, draft: Draft) -> tuple[Image, int] | None:
        """The image that shares most leading tokens with a draft, and how many those are."""
        scope, tokens = draft.scope, draft.tokens
        found: list[Image] = []
        previous = self.previous(draft)
        if previous is not None and previous.findable and previous.scope == scope and previous.parts is None:
            if tokens.startswith(previous.tokens):  # the usual case: it cannot be beaten by what stands in the index
                return previous, previous.token_count
            found.append(previous)
        for index in (self._prefixes, self._points):
            neighbour = index.longest_common(scope, tokens)
            if neighbour is not None:
                found.append(self.images[neighbour[0]])
        shared = [(common_tokens(image.tokens, tokens), image) for image in found if image.parts is None]
        common, image = max(shared, key=lambda entry: entry[0], default=(0, None))
        return None if image is None or not common else (image, common)

    def touch(self, image: Image, now_unix_s: float) -> None:
        """Note a use."""
        image.used_unix_s = now_unix_s
        self._recency.move_to_end(image.image_id)

    # --- hold and let go ----------------------------------------------------------------------------------------------

    def read(self, image: Image, chunks: tuple[Chunk, ...] | None = None) -> tuple[Chunk, ...]:
        """Hold an image and its chunks (None: all of them) for a restore; `end_read` lets go. The image cannot be
        evicted meanwhile, and a dropped image's extents stay until the readers have ended.
        """
        image.readers += 1
        chunks = tuple(image.chunks()) if chunks is None else chunks
        for chunk in chunks:
            chunk.reads += 1
        return chunks

    def end_read(self, image: Image, chunks: Iterable[Chunk]) -> None:
        """End of `read`, once no worker reads the extents any more."""
        assert image.readers > 0
        image.readers -= 1
        for chunk in chunks:
            assert chunk.reads > 0
            chunk.reads -= 1
            self._free_if_unheld(chunk)

    def drop(self, image: Image) -> None:
        """Remove an image. Its name is free at once; its extents as soon as no operation reads them."""
        del self.images[image.image_id]
        self.token_bytes -= len(image.tokens)
        self.put_token_bytes -= image.put_token_bytes
        del self._recency[image.image_id]
        names = self._by_name[image.scope.namespace, image.conversation]
        del names[image.scope.fingerprint]
        if not names:
            del self._by_name[image.scope.namespace, image.conversation]
        if image.findable:
            self._unindex(image)
        self._let_go(image)

    def drop_transit(self, image: Image) -> None:
        """Remove a transit image; its extents are free as soon as no operation reads them."""
        del self.transits[image.image_id]
        self._let_go(image)

    def _let_go(self, image: Image) -> None:
        for chunk in image.chunks():
            chunk.references -= 1
            assert chunk.references >= 0
            self._free_if_unheld(chunk)

    def _free_if_unheld(self, chunk: Chunk) -> None:
        if chunk.references:
            return
        if not chunk.damaged and self.chunks.get(chunk.key) is chunk:
            del self.chunks[chunk.key]
        if chunk.reads:
            self._loose.add(chunk)
            return
        self._loose.discard(chunk)
        self.arenas[chunk.key.worker].free(chunk.place.extents)

    def flag_damaged(self, chunk: Chunk) -> tuple[list[Image], list[Image]]:
        """A chunk failed its digest: it leaves the index at once, so the next capture of the same bytes stores them
        anew, and every image that holds it is flagged and no longer found. Returns the images that hold it, all of
        which have that to record, and those of them that were sound; nothing where it was known.
        """
        if chunk.damaged:
            return [], []
        chunk.damaged = True
        if self.chunks.get(chunk.key) is chunk:
            del self.chunks[chunk.key]
        every = (*self.images.values(), *self.transits.values(), *self._bound.values())
        holders = [image for image in every if any(c is chunk for c in image.chunks())]
        flagged = [image for image in holders if not image.damaged]
        for image in flagged:
            if image.findable and image.image_id in self.images:
                self._unindex(image)
            image.damaged = True
        return holders, flagged

    def all_chunks(self) -> Iterator[Chunk]:
        """Every chunk that an image references (as often as they do) or that is only read any more."""
        for image in (*self.images.values(), *self.transits.values(), *self._bound.values()):
            yield from image.chunks()
        yield from self._loose

    def lies_in(self, image: Image, worker: str, shuttle: int) -> bool:
        """Whether any byte of an image is in that shuttle."""
        return any(
            chunk.key.worker == worker and any(extent.shuttle == shuttle for extent in chunk.place.extents)
            for chunk in image.chunks()
        )

    def quarantine(self, image: Image) -> None:
        """A published or transit image of a suspect is no longer found."""
        assert image.suspect is not None
        if image.findable and image.image_id in self.images:
            self._unindex(image)
        image.suspect.quarantined = True

    def lift(self, image: Image) -> bool:
        """End the quarantine of an image; whether there was one."""
        lifted, image.suspect = image.quarantined, None
        if lifted and image.findable and image.image_id in self.images:
            self._index(image)
        return lifted

    def exclusive_bytes(self, image: Image) -> int:
        """Bytes of granules that only this image holds."""
        counts: dict[Chunk, int] = {}
        for chunk in image.chunks():
            counts[chunk] = counts.get(chunk, 0) + 1
        return sum(chunk.granule_bytes for chunk, count in counts.items() if count == chunk.references)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant by a full recount: each granule is free, staged or in exactly one chunk; references
        and reads are what the images say; the indexes hold exactly what they should.
        """
        references: dict[Chunk, int] = {}
        for image in (*self.images.values(), *self.transits.values(), *self._bound.values()):
            for chunk in image.chunks():
                references[chunk] = references.get(chunk, 0) + 1
        for chunk, count in references.items():
            assert chunk.references == count, f"{chunk.key}: {chunk.references} references, counted {count}"
            assert chunk.damaged or chunk.alone or self.chunks.get(chunk.key) is chunk
        for chunk in self.chunks.values():
            assert chunk in references, f"indexed chunk without image: {chunk.key}"
        for chunk in self._loose:
            assert chunk.reads > 0
            assert chunk.references == 0
        live: dict[str, list[Extent]] = {worker: [] for worker in self.arenas}
        for chunk in {*references, *self._loose}:
            live[chunk.key.worker].extend(chunk.place.extents)
        for staged in self.staged:
            for worker, places in zip(staged.draft.scope.workers, staged.places, strict=True):
                live[worker].extend(extent for place in places for extent in place.extents)
            for chunks in staged.hinted:
                for chunk in chunks.values():
                    assert chunk in references or chunk in self._loose, "a hint that is nobody's"
        for worker, arena in self.arenas.items():
            arena.validate(live[worker])
        for image in self.images.values():
            if image.parts is not None:
                assert len(image.stages) == 1
                assert sum(part.chunk_count for part in image.parts) == len(image.stages[0])
                assert all(
                    sum(c.place.length_bytes for c in image.stages[0][p.first_chunk :][: p.chunk_count]) >= p.nbytes
                    for p in image.parts
                ), "a part is longer than its chunks"
        assert self.open_puts >= 0
        assert set(self._recency) == set(self.images)
        assert self.token_bytes == sum(len(image.tokens) for image in self.images.values())
        assert sum(len(names) for names in self._by_name.values()) == len(self.images)
        found = [image for image in self.images.values() if image.findable]
        assert len(self._prefixes) == sum(image.points is None for image in found)
        assert len(self._points) == sum(len(image.points or ()) for image in found)
        assert self.put_token_bytes >= sum(image.put_token_bytes for image in self.images.values())
        assert self.over_budget or self.held_bytes <= self.budget_bytes
