"""How much of a rescued slot is still what was declared: whole chunks from its beginning, on every stage."""

import math
from collections.abc import Sequence

from ipc.messages import TOKEN_BYTES
from shm.layout import ChunkSpan, StageLayout
from stratad.core.catalog import Catalog
from stratad.core.images import Draft, Scope, StageDigests
from stratad.core.ops import Operation


def longest_prefix(
    layouts: Sequence[StageLayout],
    spans: Sequence[Sequence[ChunkSpan]],
    declared: Sequence[StageDigests],
    found: Sequence[StageDigests],
    token_count: int,
) -> int:
    """The most leading tokens (0: none) of which every chunk on every stage has its declared digest.

    Short of all `token_count` tokens that is a place where a chunk of every group ends, since what lies behind it in
    the same chunk was never proven; no window may have passed what so few tokens need; and states are of the end only.
    """
    changed = token_count
    for mine, before, after in zip(spans, declared, found, strict=True):
        if (before.algorithm, before.key_id) != (after.algorithm, after.key_id):
            return 0
        for span, one, other in zip(mine, before.digests, after.digests, strict=True):
            if one != other:
                changed = min(changed, 0 if span.is_state else span.first_token)
    if changed == token_count:
        return token_count
    if any(layout.states for layout in layouts):
        return 0
    step = math.lcm(*(layout.chunk_step for layout in layouts))
    tokens = changed // step * step
    return tokens if tokens and all(layout.holds_prefix(tokens, token_count) for layout in layouts) else 0


def is_covered(catalog: Catalog, scope: Scope, conversation: str, tokens: bytes) -> bool:
    """Whether the conversation's image begins with these tokens, so that one of them alone would be a loss."""
    image = catalog.find(scope.namespace, scope.fingerprint, conversation)
    return (
        image is not None
        and not image.damaged
        and image.scope.workers == scope.workers
        and image.tokens.startswith(tokens)
    )


def shorten(
    catalog: Catalog, layouts: Sequence[StageLayout], op: Operation, tokens: int, points: tuple[int, ...] | None
) -> None:
    """Make the staged image of an operation, all of whose stages have answered, one of its first `tokens` tokens."""
    assert op.staged is not None
    kept: list[list[int]] = []
    for run, layout in zip(op.stages, layouts, strict=True):
        numbers = {span: number for number, span in enumerate(run.spans)}
        spans = tuple(layout.chunks(tokens, op.positions))
        kept.append([numbers[span] for span in spans])
        answer = run.answer
        assert answer is not None
        run.answer = StageDigests(answer.algorithm, answer.key_id, tuple(answer.digests[n] for n in kept[-1]))
        run.spans = spans
    op.tokens = op.tokens[: tokens * TOKEN_BYTES]
    op.token_count = op.image_tokens = tokens
    op.points = points
    draft = Draft(
        op.scope,
        op.conversation,
        op.tokens,
        tokens,
        op.positions,
        points,
        tuple(run.spans for run in op.stages),
    )
    catalog.shorten(op.staged, draft, kept)
