"""From a request to an operation: everything that can be refused before anything is touched."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ipc.messages import (
    SLOT_LIMIT,
    TOKEN_BYTES,
    Capture,
    CudaIpcPool,
    GetBegin,
    Mark,
    Restore,
    SlotDirect,
    SlotFrom,
    SlotTo,
)
from shm.layout import ChunkSpan, StageLayout
from shm.row_spaces import SpaceRows, distinct_rows, shared_row
from shm.rows import ROW_LIMIT, unpack_numbers
from stratad.core import leases
from stratad.core.blame import quarantine_text
from stratad.core.failures import Refusal
from stratad.core.fences import Fence
from stratad.core.fingerprints import differing_fields
from stratad.core.images import Image
from stratad.core.ops import Operation, OpKind, StageRun
from stratad.core.row_lists import CutRows, Need, cut_stages
from stratad.core.state import ClientRecord, Engine, State

NAME_LIMIT = 512
# Of one image over all stages: what a reply may list, and what the loop handles in a fraction of a second.
CHUNK_LIMIT = 32_768
# Each is a prefix of its own in the index.
CHECKPOINT_LIMIT = 64
# No operation waits longer, for its worker or for its engine's event, whatever its caller says.
DEADLINE_LIMIT_S = 3600.0


def check_name(what: str, name: str) -> None:
    """Refuse an empty, oversized or unprintable name. Names never become paths.

    Raises:
        Refusal: ``bad_value``.
    """
    if not name or len(name) > NAME_LIMIT or not name.isprintable():
        raise Refusal("bad_value", f"{what} must be 1 to {NAME_LIMIT} printable characters, got {name[:40]!r}")


def ends_s(state: State, deadline_s: float) -> float:
    """When what is asked for now with a deadline has waited long enough."""
    return state.now_s + min(deadline_s, DEADLINE_LIMIT_S)


def check_slot_number(what: str, slot: int) -> None:
    """Refuse a slot that could not be marked.

    Raises:
        Refusal: ``bad_value``.
    """
    if not 0 <= slot < SLOT_LIMIT:
        raise Refusal("bad_value", f"{what} must be 0 to {SLOT_LIMIT - 1}, got {slot}")


def engine_of(state: State, client: ClientRecord, engine_id: int) -> Engine:
    """The client's own registered engine.

    Raises:
        Refusal: ``not_registered``.
    """
    engine = state.engines.get(engine_id)
    if engine is None or engine.client != client.client or not engine.registered or engine.closing:
        raise Refusal("not_registered", f"engine {engine_id} is not registered by this client")
    return engine


def _check_order(engine: Engine, ordered: str) -> None:
    if ordered not in ("host", "event"):
        raise Refusal(
            "bad_value", f"ordered must be 'host' or 'event', got {ordered[:20]!r}: a copy is never unordered"
        )
    if ordered == "event":
        for number, stage in enumerate(engine.stages):
            pool = stage.stage.pool
            if isinstance(pool, CudaIpcPool) and not pool.event_handle:
                raise Refusal(
                    "bad_value", "ordered='event', but the stage was registered without an event", stage=number
                )


def spans_by_stage(engine: Engine, tokens: int, positions: Sequence[int]) -> list[tuple[ChunkSpan, ...]]:
    """The chunks of an image on every stage.

    Raises:
        Refusal: ``too_large``.
    """
    counts = {id(kind): kind.chunk_count(tokens, len(positions)) for kind in engine.kinds}
    count = sum(counts[id(layout)] for layout in engine.layouts)
    if count > CHUNK_LIMIT:
        stages = len(engine.layouts)
        raise Refusal("too_large", f"{tokens} tokens on {stages} stages are {count} chunks, over {CHUNK_LIMIT}")
    spans = {id(kind): tuple(kind.chunks(tokens, positions)) for kind in engine.kinds}
    return [spans[id(layout)] for layout in engine.layouts]


def _positions(engine: Engine, packed: bytes, tokens: int) -> tuple[int, ...]:
    """The checkpoints of an image of `tokens` tokens.

    Raises:
        Refusal: ``bad_state``.
    """
    try:
        positions = unpack_numbers(packed)
    except ValueError as exc:
        raise Refusal("bad_state", str(exc)) from exc
    if not engine.has_state:
        if positions:
            raise Refusal("bad_state", f"checkpoints at {positions[:4]}, but no stage has states")
    elif not positions or len(positions) > CHECKPOINT_LIMIT:
        raise Refusal(
            "bad_state", f"stages have states: 1 to {CHECKPOINT_LIMIT} checkpoints needed, got {len(positions)}"
        )
    ascending = all(one < other for one, other in pairwise(positions))
    if positions and not (ascending and positions[0] > 0 and positions[-1] <= tokens):
        raise Refusal("bad_state", f"checkpoints must ascend from 1 to {tokens} tokens, got {positions[:8]}")
    if any(position % engine.token_unit for position in positions):
        raise Refusal(
            "bad_state",
            f"checkpoints must be multiples of {engine.token_unit} tokens, since planes that cannot locate tokens hold "
            f"whole blocks, got {positions[:8]}",
        )
    if positions and not points_of(engine.kinds, tokens, positions):
        raise Refusal(
            "bad_state", f"windows of {tokens} tokens have passed what every checkpoint needs, got {positions[:8]}"
        )
    return positions


def points_of(kinds: Sequence[StageLayout], tokens: int, positions: tuple[int, ...]) -> tuple[int, ...] | None:
    """To which numbers of tokens an image can be restored; None: to any."""
    if positions:
        return tuple(p for p in positions if all(kind.holds_prefix(p, tokens) for kind in kinds))
    return None if all(kind.holds_prefix(1, tokens) for kind in kinds) else (tokens,)


def _run_stages(
    engine: Engine, cuts: Sequence[CutRows], spans: Sequence[tuple[ChunkSpan, ...]]
) -> tuple[StageRun, ...]:
    return tuple(
        StageRun(number, stage.worker, cuts[number], spans[number]) for number, stage in enumerate(engine.stages)
    )


def _check_slot(engine: Engine, slot: int) -> None:
    check_slot_number("slot", slot)
    if engine.marks.get(slot) == "poisoned":
        raise Refusal("poisoned", f"slot {slot} is marked poisoned (mark it clean first)")


class _Source(NamedTuple):
    """What a request wants read: `tokens` of the tokens it names."""

    tokens: int
    positions: tuple[int, ...]
    cuts: list[CutRows]
    spans: list[tuple[ChunkSpan, ...]]


def _source(engine: Engine, request: Capture | SlotTo | SlotDirect | Mark, asked: int) -> _Source:
    """Check the rows that a request reads.

    Raises:
        Refusal: names what was wrong and what was expected.
    """
    if isinstance(request, Capture):
        positions = _positions(engine, request.positions, asked)
    else:
        positions = (asked,) if engine.has_state else ()
    tokens = asked // engine.token_unit * engine.token_unit
    spans = spans_by_stage(engine, tokens, positions)  # before rows are unpacked: so large an image bounds those too
    cuts = cut_stages(engine.layouts, request.rows, Need(asked, len(positions)), tokens)
    _check_order(engine, request.ordered)
    if not isinstance(request, Mark):  # which may be what cleans it
        _check_slot(engine, request.slot)
    if tokens == 0:
        raise Refusal("bad_tokens", f"{asked} tokens fill no block, and the planes do not say where tokens lie")
    if tokens < asked and (positions or any(group.window_tokens for kind in engine.kinds for group in kind.groups)):
        raise Refusal(
            "bad_tokens", f"with states or windows, tokens must be a multiple of {engine.token_unit}, got {asked}"
        )
    return _Source(tokens, positions, cuts, spans)


def operation_of(
    state: State, client: ClientRecord, request: Capture | Restore | SlotDirect | SlotTo | SlotFrom | Mark
) -> Operation:
    """The checked operation that a request asks for (of a mark: what digests its contents).

    Raises:
        Refusal: names what was wrong and what was expected.
    """
    engine = engine_of(state, client, request.engine_id)
    if engine.exchange:
        raise Refusal("bad_request", f"engine {engine.engine_id} is an exchange: it puts and gets")
    match request:
        case Capture() | Mark():
            return _capture(state, engine, request)
        case Restore():
            return _restore_image(state, engine, request)
        case SlotDirect():
            return _slot_direct(state, engine, request)
        case SlotTo():
            source = _source(engine, request, _counted(request.tokens))
            return _operation(state, engine, request, OpKind.SLOT_TO, source)
        case SlotFrom():
            return _slot_from(state, engine, request)


def _capture(state: State, engine: Engine, request: Capture | Mark) -> Operation:
    check_name("conversation", request.conversation)
    if not request.tokens or len(request.tokens) % TOKEN_BYTES:
        raise Refusal("bad_tokens", f"tokens must be packed u32 and not empty, got {len(request.tokens)} bytes")
    source = _source(engine, request, len(request.tokens) // TOKEN_BYTES)
    kind = OpKind.CAPTURE if isinstance(request, Capture) else OpKind.MARK
    op = _operation(state, engine, request, kind, source)
    op.conversation = request.conversation
    op.tokens = request.tokens[: source.tokens * TOKEN_BYTES]
    return op


def _slot_direct(state: State, engine: Engine, request: SlotDirect) -> Operation:
    check_slot_number("target_slot", request.target_slot)
    source = _source(engine, request, _counted(request.tokens))
    need = Need(source.tokens, len(source.positions), exact=False)
    targets = cut_stages(engine.layouts, request.target_rows, need, source.tokens)
    op = _operation(state, engine, request, OpKind.SLOT_DIRECT, source)
    for run, target in zip(op.stages, targets, strict=True):
        run.target = target
    op.source_slot, op.slot = request.slot, request.target_slot
    return op


def _counted(tokens: int) -> int:
    if not 0 < tokens < ROW_LIMIT:
        raise Refusal("bad_tokens", f"tokens must be 1 to {ROW_LIMIT - 1}, got {tokens}")
    return tokens


def _operation(
    state: State, engine: Engine, request: Capture | SlotTo | SlotDirect | Mark, kind: OpKind, source: _Source
) -> Operation:
    """An operation that reads rows."""
    return Operation(
        state.number("op"),
        kind,
        engine.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        "",
        request.slot,
        source.tokens,
        request.ordered,
        state.now_s,
        ends_s(state, request.deadline_s),
        _run_stages(engine, source.cuts, source.spans),
        positions=source.positions,
        points=points_of(engine.kinds, source.tokens, source.positions),
        image_tokens=source.tokens,
    )


def find_image(state: State, engine: Engine, request: Restore | GetBegin) -> Image:
    """The image that a restore or get names, as far as this engine may have it.

    Raises:
        Refusal: ``unknown_image``, ``unknown_conversation``, ``fingerprint_mismatch``, ``foreign_device``, ``damaged``,
            ``quarantined``.
    """
    if request.image_id:
        image = state.catalog.images.get(request.image_id)
        if image is None or image.scope.namespace != engine.namespace:
            raise Refusal("unknown_image", f"there is no image {request.image_id} in namespace {engine.namespace!r}")
    else:
        image = state.catalog.find(engine.namespace, engine.scope.fingerprint, request.conversation)
        if image is None:
            others = state.catalog.named(engine.namespace, request.conversation)
            if not others:
                raise Refusal(
                    "unknown_conversation",
                    f"no image of conversation {request.conversation[:80]!r} in namespace {engine.namespace!r}",
                )
            image = others[-1]
    if image.scope.fingerprint != engine.scope.fingerprint:
        differing = differing_fields(state.fingerprint_fields.get(image.scope.fingerprint, {}), engine.fingerprint)
        if (image.parts is not None) is not engine.exchange:
            way = (
                "captured: restore it into an engine"
                if engine.exchange
                else "put as parts: read it through an exchange"
            )
            raise Refusal("fingerprint_mismatch", f"image {image.image_id} was {way}", detail=differing)
        raise Refusal(
            "fingerprint_mismatch",
            "the image was captured under another fingerprint: " + "; ".join(f"{k}: {v}" for k, v in differing.items()),
            detail=differing,
        )
    if image.scope.workers != engine.scope.workers:
        raise Refusal(
            "foreign_device",
            f"the image lies at workers {', '.join(image.scope.workers)}, the engine's stages are at "
            f"{', '.join(engine.scope.workers)}",
        )
    if image.damaged:
        raise Refusal("damaged", f"image {image.image_id} is flagged: a chunk of it lost its digest")
    if image.quarantined:
        raise Refusal("quarantined", quarantine_text(f"image {image.image_id}"))
    return image


def _restore_image(state: State, engine: Engine, request: Restore) -> Operation:
    if not request.image_id:
        check_name("conversation", request.conversation)
    image = find_image(state, engine, request)
    if request.take and image.pinned:
        raise Refusal("pinned", f"image {image.image_id} is pinned: it can be restored but not taken")
    op = _restore(state, engine, request, image, request.tokens)
    if request.take and image.taken and not leases.give_up_take(state, engine.client, image.image_id):
        raise Refusal("image_busy", f"image {image.image_id} is being taken by another call")
    if request.take:
        op.kind = OpKind.TAKE
    return op


def _slot_from(state: State, engine: Engine, request: SlotFrom) -> Operation:
    check_slot_number("source_slot", request.source_slot)
    image = engine.transits.get(request.source_slot)
    if image is None:
        text = f"slot {request.source_slot} has no transit image: slot_to makes one ({leases.why_gone(state)})"
        raise Refusal("unknown_image", text)
    if image.damaged:
        raise Refusal("damaged", f"the transit image of slot {request.source_slot} lost a digest")
    op = _restore(state, engine, request, image, -1)
    op.kind, op.keep, op.source_slot = OpKind.SLOT_FROM, request.keep, request.source_slot
    return op


def _restore(state: State, engine: Engine, request: Restore | SlotFrom, image: Image, asked: int) -> Operation:
    """An operation that writes rows from an image: the first `asked` tokens (-1: all).

    Raises:
        Refusal: names what was wrong and what was expected.
    """
    tokens = image.token_count if asked == -1 else asked
    _check_prefix(engine, image, tokens)
    check_slot_number("slot", request.slot)
    _check_order(engine, request.ordered)
    cuts = cut_stages(engine.layouts, request.rows, Need(tokens, 1, exact=asked != -1), tokens)
    spans = spans_by_stage(engine, image.token_count, image.positions)
    return Operation(
        state.number("op"),
        OpKind.RESTORE,
        engine.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        image.conversation,
        request.slot,
        tokens,
        request.ordered,
        state.now_s,
        ends_s(state, request.deadline_s),
        _run_stages(engine, cuts, spans),
        image=image,
        positions=image.positions,
        image_tokens=image.token_count,
        resident_tokens=_resident(state, request, tokens),
    )


def _resident(state: State, request: Restore | SlotFrom, tokens: int) -> int:
    """How many of the tokens may be in their rows, where digests are to find that out.

    Raises:
        Refusal: ``bad_tokens``.
    """
    if not 0 <= request.resident_tokens < ROW_LIMIT:
        raise Refusal("bad_tokens", f"resident_tokens must be 0 to {ROW_LIMIT - 1}, got {request.resident_tokens}")
    return min(request.resident_tokens, tokens) if state.settings.reuse == "verified" else 0


def _check_prefix(engine: Engine, image: Image, tokens: int) -> None:
    """Refuse a number of tokens to which the image cannot be restored.

    Raises:
        Refusal: ``bad_tokens`` or ``no_checkpoint``, naming the numbers that could be had.
    """
    if not 0 < tokens <= image.token_count:
        raise Refusal("bad_tokens", f"tokens must be 1 to {image.token_count} (the image's) or -1 (all), got {tokens}")
    if tokens < image.token_count and tokens % engine.token_unit:
        raise Refusal(
            "bad_tokens", f"{tokens} tokens end inside a block: planes that cannot locate tokens hold whole blocks"
        )
    whole = all(kind.holds_prefix(tokens, image.token_count) for kind in engine.kinds)
    if not whole or (image.positions and tokens not in image.positions):
        points = image.points or ()
        had = ", ".join(map(str, points[:16])) or "none"
        why = "a window has passed what it needs" if not whole else "its states were taken at other positions"
        detail = {"points": ",".join(map(str, points))}
        raise Refusal(
            "no_checkpoint",
            f"the image of {image.token_count} tokens cannot be restored to {tokens}: {why} (it can to: {had})",
            detail=detail,
        )


def raise_fences(state: State, op: Operation) -> None:
    """Fence the operation's rows and state slots on every stage, or none of them.

    Raises:
        Refusal: ``bad_rows`` (a row occurs twice) or ``rows_busy``.
    """
    known = _KnownRows()
    fences: list[tuple[int, Fence]] = []
    for run, layout in zip(op.stages, state.engines[op.engine_id].layouts, strict=True):
        written = op.written(run)
        mine: list[Fence] = []
        if op.reads_rows:
            mine.append(Fence(op.op_id, known.distinct(layout, run.rows, run.stage), writes=False, layout=layout))
        if written is not None:
            mine.append(Fence(op.op_id, known.distinct(layout, written, run.stage), writes=True, layout=layout))
        if len(mine) == 2:
            what = shared_row(layout, mine[0].rows, mine[1].rows)
            if what:
                raise Refusal("bad_rows", f"{what} is both source and target of the copy", stage=run.stage)
        for fence in mine:
            state.fences.check(op.engine_id, run.stage, fence)
            fences.append((run.stage, fence))
    for stage, fence in fences:
        state.fences.raise_fence(op.engine_id, stage, fence)
        op.fenced.add(stage)


class _KnownRows:
    """Rows that were proven distinct; stages whose groups share memory alike, and that share rows, share the proof."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]], SpaceRows] = {}

    def distinct(self, layout: StageLayout, rows: CutRows, stage: int) -> SpaceRows:
        key = (layout.spaces, tuple(map(id, rows.runs)))  # by identity: to hash them is to look at each row
        if key not in self._known:
            try:
                self._known[key] = distinct_rows(layout, rows.runs)
            except ValueError as exc:
                raise Refusal("bad_rows", str(exc), stage=stage) from exc
        return self._known[key]
