"""From a request to an operation: everything that can be refused before anything is touched."""

from ipc.messages import TOKEN_BYTES, Capture, CudaIpcPool, Restore
from shm.layout import ChunkSpan, StageLayout
from shm.rows import RUN_BYTES, DistinctRows, RowRuns, first_rows, pack_rows, row_count, unpack_rows
from stratad.core.catalog import Image
from stratad.core.failures import Refusal
from stratad.core.fences import Fence
from stratad.core.fingerprints import differing_fields
from stratad.core.ops import Operation, OpKind, StageRun
from stratad.core.state import ClientRecord, Engine, State

NAME_LIMIT = 512
# Of one image over all stages: what a reply may list, and what the loop handles in a fraction of a second.
CHUNK_LIMIT = 32_768


def check_name(what: str, name: str) -> None:
    """Refuse an empty, oversized or unprintable name. Names never become paths.

    Raises:
        Refusal: ``bad_value``.
    """
    if not name or len(name) > NAME_LIMIT or not name.isprintable():
        raise Refusal("bad_value", f"{what} must be 1 to {NAME_LIMIT} printable characters, got {name[:40]!r}")


def engine_of(state: State, client: ClientRecord, engine_id: int) -> Engine:
    """The client's own registered engine.

    Raises:
        Refusal: ``not_registered``.
    """
    engine = state.engines.get(engine_id)
    if engine is None or engine.client != client.client or not engine.registered or engine.closing:
        raise Refusal("not_registered", f"engine {engine_id} is not registered by this client")
    return engine


def _runs_by_stage(engine: Engine, request: Capture | Restore, tokens: int, *, exact: bool) -> list[RowRuns]:
    """Unpack and check the rows of a request, one entry a stage; stages that share rows share the entry.

    Without `exact` there may be more rows than `tokens` tokens take: the first ones are used.
    """
    rows, stages = request.rows, engine.stages
    if len(rows) not in (1, len(stages)):
        raise Refusal("bad_rows", f"rows must be given once or once for each of {len(stages)} stages, got {len(rows)}")
    if request.slot < 0:
        raise Refusal("bad_value", f"slot must be >= 0, got {request.slot}")
    _check_order(engine, request.ordered)
    checked: dict[tuple[int, int, int], RowRuns] = {}
    runs_by_stage: list[RowRuns] = []
    for number, stage in enumerate(stages):
        layout = stage.stage.layout
        needed = layout.rows_for(tokens)
        which = min(number, len(rows) - 1)
        runs = checked.get((which, needed, layout.rows))
        if runs is None:
            runs = checked[which, needed, layout.rows] = _checked_runs(rows[which], needed, layout, number, exact=exact)
        runs_by_stage.append(runs)
    return runs_by_stage


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


def _checked_runs(packed: bytes, needed: int, layout: StageLayout, stage: int, *, exact: bool) -> RowRuns:
    if exact and len(packed) > RUN_BYTES * needed:  # before anything is built: every run has at least one row
        raise Refusal("bad_rows", f"{needed} rows are needed, got {len(packed) // RUN_BYTES} runs", stage=stage)
    try:
        runs = unpack_rows(packed, layout.rows)
    except ValueError as exc:
        raise Refusal("bad_rows", str(exc), stage=stage) from exc
    got = row_count(runs)
    if got != needed and (exact or got < needed):
        raise Refusal(
            "bad_rows",
            f"the tokens take {needed} rows of {layout.tokens_per_row} tokens, got {got} rows",
            stage=stage,
        )
    return runs


def _state_slot(layout: StageLayout, slot: int, stage: int) -> int:
    """The slot's number where the stage has state, else -1."""
    if layout.state is None:
        return -1
    if slot >= layout.state.slots:
        raise Refusal("bad_value", f"slot {slot} has no state, the stage has {layout.state.slots} slots", stage=stage)
    return slot


def _stage_runs(
    engine: Engine, runs_by_stage: list[RowRuns], tokens: int, image_tokens: int, *, with_state: bool, slot: int
) -> tuple[StageRun, ...]:
    """One `StageRun` a stage: rows cut to `tokens`, chunks of all `image_tokens`."""
    if sum(layout_chunks(stage.stage.layout, image_tokens) for stage in engine.stages) > CHUNK_LIMIT:
        raise Refusal(
            "too_large", f"{image_tokens} tokens on {len(engine.stages)} stages are over {CHUNK_LIMIT} chunks"
        )
    # By identity: to hash a layout or a list of runs is to hash all that is in it.
    spans_of: dict[int, tuple[ChunkSpan, ...]] = {}
    cut_of: dict[tuple[int, int], tuple[RowRuns, bytes]] = {}
    stages: list[StageRun] = []
    for number, (engine_stage, runs) in enumerate(zip(engine.stages, runs_by_stage, strict=True)):
        layout = engine_stage.stage.layout
        rows = layout.rows_for(tokens)
        cut = cut_of.get((id(runs), rows))
        if cut is None:
            kept = first_rows(runs, rows)
            cut = cut_of[id(runs), rows] = (kept, pack_rows(kept))
        spans = spans_of.get(id(layout))
        if spans is None:
            spans = spans_of[id(layout)] = tuple(layout.chunks(image_tokens, with_state=with_state))
        state_slot = _state_slot(layout, slot, number) if with_state else -1
        stages.append(StageRun(number, engine_stage.worker, cut[1], cut[0], spans, state_slot))
    return tuple(stages)


def layout_chunks(layout: StageLayout, tokens: int) -> int:
    """Number of row chunks of `tokens` tokens."""
    return -(-tokens // layout.chunk_tokens)


def capture_operation(state: State, client: ClientRecord, request: Capture) -> Operation:
    """Check a capture.

    Raises:
        Refusal: names what was wrong and what was expected.
    """
    engine = engine_of(state, client, request.engine_id)
    check_name("conversation", request.conversation)
    if not request.tokens or len(request.tokens) % TOKEN_BYTES:
        raise Refusal("bad_tokens", f"tokens must be packed u32 and not empty, got {len(request.tokens)} bytes")
    asked = len(request.tokens) // TOKEN_BYTES
    runs_by_stage = _runs_by_stage(engine, request, asked, exact=True)
    if engine.marks.get(request.slot) == "poisoned":
        raise Refusal("poisoned", f"slot {request.slot} is marked poisoned")
    tokens = min(stage.stage.layout.capturable_tokens(asked) for stage in engine.stages)
    if tokens == 0:
        raise Refusal("bad_tokens", f"{asked} tokens fill no block, and the planes do not say where tokens lie")
    with_state = engine.has_state
    if with_state and (request.state_position != asked or tokens != asked):
        raise Refusal(
            "bad_state",
            f"the state is at token {request.state_position}, the rows end at token {tokens}: they must agree",
        )
    if not with_state and request.state_position != -1:
        raise Refusal("bad_state", f"state_position {request.state_position}, but no stage has state")
    stages = _stage_runs(engine, runs_by_stage, tokens, tokens, with_state=with_state, slot=request.slot)
    return Operation(
        state.number("op"),
        OpKind.CAPTURE,
        client.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        request.conversation,
        request.slot,
        tokens,
        request.ordered,
        state.now_s,
        state.now_s + request.deadline_s,
        stages,
        tokens=request.tokens[: tokens * TOKEN_BYTES],
        state_position=request.state_position,
        image_tokens=tokens,
    )


def find_image(state: State, engine: Engine, request: Restore) -> Image:
    """The image that a restore names, as far as this engine may have it.

    Raises:
        Refusal: ``unknown_image``, ``unknown_conversation``, ``fingerprint_mismatch``, ``foreign_device``, ``damaged``.
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
    return image


def restore_operation(state: State, client: ClientRecord, request: Restore) -> Operation:
    """Check a restore or take.

    Raises:
        Refusal: names what was wrong and what was expected.
    """
    engine = engine_of(state, client, request.engine_id)
    if not request.image_id:
        check_name("conversation", request.conversation)
    image = find_image(state, engine, request)
    image_tokens = len(image.tokens) // TOKEN_BYTES
    tokens = image_tokens if request.tokens == -1 else request.tokens
    if not 0 < tokens <= image_tokens:
        raise Refusal(
            "bad_tokens", f"tokens must be 1 to {image_tokens} (the image's) or -1 (all), got {request.tokens}"
        )
    with_state = engine.has_state
    if with_state and tokens != image.state_position:
        raise Refusal("bad_state", f"the image's state is at token {image.state_position}, asked for {tokens} tokens")
    if request.take and image.pinned:
        raise Refusal("pinned", f"image {image.image_id} is pinned: it can be restored but not taken")
    if request.take and image.taken:
        raise Refusal("image_busy", f"image {image.image_id} is being taken by another call")
    runs_by_stage = _runs_by_stage(engine, request, tokens, exact=request.tokens != -1)
    stages = _stage_runs(engine, runs_by_stage, tokens, image_tokens, with_state=with_state, slot=request.slot)
    return Operation(
        state.number("op"),
        OpKind.TAKE if request.take else OpKind.RESTORE,
        client.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        image.conversation,
        request.slot,
        tokens,
        request.ordered,
        state.now_s,
        state.now_s + request.deadline_s,
        stages,
        image=image,
        image_tokens=image_tokens,
    )


def raise_fences(state: State, op: Operation) -> None:
    """Fence the operation's rows and state slots on every stage, or none of them.

    Raises:
        Refusal: ``bad_rows`` (a row occurs twice) or ``rows_busy``.
    """
    fences: list[Fence] = []
    distinct: dict[int, DistinctRows] = {}  # by identity: stages that share rows share the check
    for run in op.stages:
        rows = distinct.get(id(run.runs))
        if rows is None:
            try:
                rows = distinct[id(run.runs)] = DistinctRows(run.runs)
            except ValueError as exc:
                raise Refusal("bad_rows", str(exc), stage=run.stage) from exc
        fence = Fence(op.op_id, rows, run.state_slot, op.writes_rows)
        state.fences.check(op.engine_id, run.stage, fence)
        fences.append(fence)
    for run, fence in zip(op.stages, fences, strict=True):
        state.fences.raise_fence(op.engine_id, run.stage, fence)
        op.fenced.add(run.stage)
