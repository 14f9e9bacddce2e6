"""Hints: what a capture expects to be stored already, since an image begins with the same tokens.

::

    find --stage: hints are held--> the worker digests them where they lie --equal--> referenced by the new image
                                                                 '--others--> missed --room, fill--> copied after all

Tokens suggest, digests prove: whatever a worker answers is compared here, and nothing is taken for granted.
"""

from collections.abc import Sequence

from ipc.messages import MemfdPool
from shm.layout import ChunkSpan, StageLayout
from stratad.core.images import Chunk, Draft, Hints, Image, StageDigests
from stratad.core.ops import Operation, OpKind, StageRun
from stratad.core.state import Engine, State

# Copies that say which tokens they are of. A transit image does not; a part of a put has none of its own.
_HINTED = frozenset({OpKind.CAPTURE, OpKind.RESCUE})


def find(state: State, op: Operation, draft: Draft) -> Hints | None:
    """What of a draft an image may have already. All workers are ready. Kept with the operation: as long as it waits it
    is asked for at every event.
    """
    if state.settings.reuse != "verified" or op.kind not in _HINTED:
        return None
    known = op.hints
    if known is not None and (
        state.catalog.images.get(known.image.image_id) is not known.image or not known.image.findable
    ):
        op.looked, op.hints = False, None
    if not op.looked:
        op.looked = True
        nearest = state.catalog.nearest(draft)
        if nearest is not None:
            op.hints = _hints(state, state.engines[op.engine_id], draft, *nearest)
    return op.hints


def _hints(state: State, engine: Engine, draft: Draft, image: Image, common: int) -> Hints | None:
    """The chunks of an image that lie within the `common` first tokens, by their numbers in the draft."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    found: list[dict[int, Chunk]] = []
    for stage, (layout, spans) in enumerate(zip(engine.layouts, draft.spans, strict=True)):
        if id(layout) not in pairs:
            pairs[id(layout)] = _pairs(layout, spans, image, common)
        ready = state.workers[draft.scope.workers[stage]].ready
        chunks = image.stages[stage]
        if ready is None or len(chunks) != layout.chunk_count(image.token_count, len(image.positions)):
            return None
        in_host_memory = isinstance(engine.stages[stage].stage.pool, MemfdPool)  # whose digests CPUs make
        found.append(
            {
                number: chunk
                for number, theirs in pairs[id(layout)]
                if (chunk := chunks[theirs]).key.key_id == ready.key_id
                and (in_host_memory or chunk.key.algorithm == ready.digest_algorithm)
            }
        )
    return Hints(image, tuple(found)) if any(found) else None


def _pairs(layout: StageLayout, spans: Sequence[ChunkSpan], image: Image, common: int) -> list[tuple[int, int]]:
    """Numbers of equal chunks: here and in the image."""
    theirs = {_identity(span): number for number, span in enumerate(layout.chunks(image.token_count, image.positions))}
    return [
        (number, other)
        for number, span in enumerate(spans)
        if span.first_token + span.token_count <= common and (other := theirs.get(_identity(span))) is not None
    ]


def _identity(span: ChunkSpan) -> tuple[int, int, int]:
    """What two chunks of one layout have in common that stand for the same tokens. (Only states have none.)"""
    return span.group, span.first_token, span.token_count


def missed(hinted: dict[int, Chunk], run: StageRun, answer: StageDigests) -> tuple[int, ...]:
    """The numbers of those hinted chunks that are not what was expected, or cannot be relied on any more."""
    algorithm, key_id, digests = answer.algorithm, answer.key_id, answer.digests
    return tuple(
        number
        for number, chunk in hinted.items()
        if chunk.damaged
        or chunk.key.digest != digests[number]
        or chunk.key.algorithm != algorithm
        or chunk.key.key_id != key_id
        or chunk.key.length_bytes != run.spans[number].length_bytes
        or chunk.key.token_count != run.spans[number].token_count
        or chunk.key.group != run.spans[number].group
    )
