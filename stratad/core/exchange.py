"""What the requests of an exchange do: put an image part by part, get it part by part."""

from typing import NamedTuple

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    PART_META_CHARS,
    PART_NAME_CHARS,
    TOKEN_BYTES,
    Captured,
    Done,
    Failed,
    GetBegin,
    GetEnd,
    GetPart,
    MemfdPool,
    PartLoaded,
    Parts,
    PartStored,
    PutAbort,
    PutBegin,
    PutBegun,
    PutCommit,
    PutPart,
    Stage,
)
from shm.rows import RowList
from stratad.core import ends, jobs, journaling, leases, queue, room
from stratad.core.failures import Refusal
from stratad.core.images import Chunk, Draft, Image
from stratad.core.intake import CHUNK_LIMIT, check_name, ends_s, engine_of, find_image
from stratad.core.leases import end_get, end_put
from stratad.core.ops import Operation, OpKind, OpState, StageRun
from stratad.core.puts import Get, Part, Piece, Put
from stratad.core.row_lists import CutRows, check_run_count
from stratad.core.state import ClientRecord, Engine, State
from stratad.core.views import part_table

# Puts, and gets, that an engine may have open at once.
SESSION_LIMIT = 64


def check_exchange(stages: tuple[Stage, ...]) -> None:
    """Refuse stages that are no exchange (see `Register`).

    Raises:
        Refusal: ``bad_layout``.
    """
    layout = stages[0].layout
    groups = layout.all_groups
    plane = groups[0].planes[0]
    plain = (
        len(stages) == 1
        and isinstance(stages[0].pool, MemfdPool)
        and len(layout.groups) == len(groups) == len(groups[0].planes) == 1
        and plane.row_bytes == plane.row_stride_bytes == EXCHANGE_ROW_BYTES
        and plane.tokens_per_row == 1
        and layout.groups[0].window_tokens == 0
    )
    if not plain:
        raise Refusal(
            "bad_layout",
            f"an exchange is one memfd with one row group of one plane, rows of {EXCHANGE_ROW_BYTES} bytes side by "
            f"side, got {len(stages)} stages of which the first has {len(groups)} groups",
        )


def serve(
    state: State,
    client: ClientRecord,
    request: PutBegin | PutPart | PutCommit | PutAbort | GetBegin | GetPart | GetEnd,
) -> None:
    """Serve one request.

    Raises:
        Refusal: it cannot be served; nothing was changed (of a part that had failed, nothing may be left).
    """
    engine = engine_of(state, client, request.engine_id)
    if not engine.exchange:
        raise Refusal("bad_request", f"engine {engine.engine_id} is no exchange: it captures and restores")
    match request:
        case PutBegin():
            _put_begin(state, engine, request)
        case PutPart():
            _put_part(state, engine, request)
        case PutCommit():
            _put_commit(state, engine, request)
        case PutAbort():
            _put_abort(state, engine, request)
        case GetBegin():
            _get_begin(state, engine, request)
        case GetPart():
            _get_part(state, engine, request)
        case GetEnd():
            end_get(state, engine, _get_of(state, engine, request.get_id))
            state.reply(engine.client, Done(request.seq))
            queue.pump(state)


# --- puts -------------------------------------------------------------------------------------------------------------


def _put_begin(state: State, engine: Engine, request: PutBegin) -> None:
    if state.stopping:
        raise Refusal("stopping", "the daemon is stopping")
    check_name("conversation", request.conversation)
    if len(request.tokens) % TOKEN_BYTES:
        raise Refusal("bad_tokens", f"tokens must be packed u32, got {len(request.tokens)} bytes")
    _check_sessions("puts", len(engine.puts))
    count = len(request.tokens) // TOKEN_BYTES
    # No prefix of it can be restored: it is found by all its tokens, or by its name alone.
    points = (count,) if count else ()
    draft = Draft(engine.scope, request.conversation, request.tokens, count, (), points, (), partial=True)
    victims = leases.with_room(state, engine.client, lambda: room.put_victims(state.catalog, draft))
    if victims:
        journaling.check_writable(state)
        journaling.evict(state, victims, lambda state: _begin_put(state, engine, request, draft))
    else:
        _begin_put(state, engine, request, draft)


def _begin_put(state: State, engine: Engine, request: PutBegin, draft: Draft) -> None:
    try:
        if room.put_victims(state.catalog, draft):  # their end could not be recorded
            raise journaling.unwritable(state.journal_error)
    except Refusal as refusal:
        state.reply(engine.client, Failed(request.seq, refusal.code, refusal.message, start_id=state.settings.start_id))
        return
    state.catalog.begin_put(draft)
    put = Put(state.number("put"), draft, EXCHANGE_ROW_BYTES, engine.layouts[0].chunk_tokens, used_s=state.now_s)
    engine.puts[put.put_id] = put
    state.reply(engine.client, PutBegun(request.seq, put.put_id))


def _put_of(state: State, engine: Engine, put_id: int) -> Put:
    put = engine.puts.get(put_id)
    if put is None:
        raise Refusal("unknown_put", f"engine {engine.engine_id} has no put {put_id} ({leases.why_gone(state)})")
    return put


def _put_part(state: State, engine: Engine, request: PutPart) -> None:
    put = _put_of(state, engine, request.put_id)
    cut = _check_part(engine, put, request)
    put.used_s = state.now_s
    if request.first_row == 0:
        if put.restartable(request.name):
            for staged in put.drop_part(request.name):
                state.catalog.discard(staged)
        part = put.begin_part(request.name, request.nbytes, request.meta)
    else:
        part = _begun_part(put, request)
    if cut is None:
        state.reply(engine.client, PartStored(request.seq, 0, ()))
        return
    piece = put.begin_piece(part, request.first_row, cut.row_count)
    try:
        queue.submit(state, _storing(state, engine, request, cut.rows, piece))
    except Refusal:
        put.remove(piece)
        raise


class _Cut(NamedTuple):
    """The rows of the exchange that a piece names."""

    rows: CutRows
    row_count: int


def _check_part(engine: Engine, put: Put, request: PutPart) -> _Cut | None:
    """Check a piece against its part and the put; its rows, None for a part of no bytes."""
    name, meta = request.name, request.meta
    if not name or len(name) > PART_NAME_CHARS or not name.isprintable() or len(meta) > PART_META_CHARS:
        raise Refusal(
            "bad_value",
            f"a part's name has 1 to {PART_NAME_CHARS} printable characters and its note at most {PART_META_CHARS}, "
            f"got {name[:40]!r} and {len(meta)}",
        )
    step = put.chunk_rows
    if not 0 <= request.nbytes <= CHUNK_LIMIT * step * put.row_bytes:
        raise Refusal("too_large", f"part {name[:80]!r} has {request.nbytes} bytes, over {CHUNK_LIMIT} chunks")
    total = -(-request.nbytes // put.row_bytes)
    cut = _cut_rows(engine, request.rows, request.first_row, total, step)
    if cut is not None and put.chunk_count - (-cut.row_count // step) > CHUNK_LIMIT:
        raise Refusal("too_large", f"the put has more than {CHUNK_LIMIT} chunks of {step * put.row_bytes} bytes")
    return cut


def _cut_rows(engine: Engine, packed: bytes, first_row: int, total: int, step: int) -> _Cut | None:
    """The rows of a piece that begins at row `first_row` of a part of `total` rows; None where that has none.

    Raises:
        Refusal: ``bad_rows`` or ``too_large``.
    """
    check_run_count(len(packed))
    try:
        rows = RowList.unpack(packed, engine.layouts[0].groups[0].rows)
    except ValueError as exc:
        raise Refusal("bad_rows", str(exc), stage=0) from exc
    count = rows.count
    if total == 0 and first_row == 0 and count == 0:
        return None
    end = first_row + count
    if first_row < 0 or count == 0 or end > total:
        raise Refusal("bad_rows", f"rows {first_row} to {end} are not in the part, which has {total}")
    if first_row % step or (end % step and end != total):
        raise Refusal(
            "bad_rows", f"a piece must lie between multiples of {step} rows or end the part, got {first_row} to {end}"
        )
    return _Cut(CutRows.of((rows,)), count)


def _begun_part(put: Put, request: PutPart) -> Part:
    part = put.parts.get(request.name)
    if part is None or (part.nbytes, part.meta) != (request.nbytes, request.meta):
        raise Refusal(
            "unknown_part", f"part {request.name[:80]!r} was not begun with {request.nbytes} bytes and this note"
        )
    return part


def _storing(state: State, engine: Engine, request: PutPart, rows: CutRows, piece: Piece) -> Operation:
    spans = tuple(engine.layouts[0].chunks(piece.row_count))
    return Operation(
        state.number("op"),
        OpKind.PUT_PART,
        engine.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        piece.put.draft.conversation,
        -1,
        piece.row_count,
        "host",
        state.now_s,
        ends_s(state, request.deadline_s),
        (StageRun(0, engine.stages[0].worker, rows, spans),),
        image_tokens=piece.row_count,
        piece=piece,
    )


def _put_commit(state: State, engine: Engine, request: PutCommit) -> None:
    put = _put_of(state, engine, request.put_id)
    parts = put.table()
    stored = [piece.stored for piece in put.pieces() if piece.stored is not None]
    journaling.check_writable(state)
    image, new_bytes = state.catalog.bind_parts(put.draft, stored, parts, state.now_unix_s)
    put.ended = True
    del engine.puts[put.put_id]
    image_bytes = sum(part.nbytes for part in parts)
    captured = Captured(request.seq, image.image_id, image.token_count, image_bytes, new_bytes, ())

    def published(state: State) -> None:
        state.count("puts")
        state.count("new_bytes", new_bytes)
        state.reply(engine.client, captured)

    def not_published(state: State, error: str) -> None:
        refusal = journaling.unwritable(error)
        state.count("puts_ended")
        state.reply(engine.client, Failed(request.seq, refusal.code, refusal.message, start_id=state.settings.start_id))

    journaling.publish(state, image, published, not_published)


def _put_abort(state: State, engine: Engine, request: PutAbort) -> None:
    put = _put_of(state, engine, request.put_id)
    end_put(state, engine, put)
    for op in [op for op in state.ops.values() if op.piece is not None and op.piece.put is put]:
        if op.state is OpState.WAITING:
            ends.fail(state, op, "cancelled", "the put was given up")
        else:
            jobs.cancel(state, op)
    state.reply(engine.client, Done(request.seq))
    queue.pump(state)


# --- gets -------------------------------------------------------------------------------------------------------------


def _get_begin(state: State, engine: Engine, request: GetBegin) -> None:
    if not request.image_id:
        check_name("conversation", request.conversation)
    _check_sessions("gets", len(engine.gets))
    image = find_image(state, engine, request)
    assert image.parts is not None, "only what was put has the fingerprint of an exchange"
    get = Get(state.number("get"), image, state.catalog.read(image), state.now_s)
    engine.gets[get.get_id] = get
    image.restores += 1
    state.catalog.touch(image, state.now_unix_s)
    state.count("gets")
    table = part_table(image)
    state.reply(
        engine.client,
        Parts(request.seq, get.get_id, image.image_id, image.conversation, image.tokens, table),
    )


def _get_of(state: State, engine: Engine, get_id: int) -> Get:
    get = engine.gets.get(get_id)
    if get is None:
        raise Refusal("unknown_get", f"engine {engine.engine_id} has no get {get_id} ({leases.why_gone(state)})")
    get.used_s = state.now_s
    return get


def _get_part(state: State, engine: Engine, request: GetPart) -> None:
    get = _get_of(state, engine, request.get_id)
    parts = get.image.parts or ()
    if not 0 <= request.part < len(parts):
        raise Refusal("unknown_part", f"the image has parts 0..{len(parts) - 1}, not {request.part}")
    part = parts[request.part]
    step = engine.layouts[0].chunk_tokens
    total = -(-part.nbytes // EXCHANGE_ROW_BYTES)
    cut = _cut_rows(engine, request.rows, request.first_row, total, step)
    if cut is None:
        state.reply(engine.client, PartLoaded(request.seq, 0, ()))
    else:
        first = part.first_chunk + request.first_row // step
        chunks = get.image.stages[0][first : first - (-cut.row_count // step)]
        queue.submit(state, _loading(state, engine, request, cut, image=get.image, chunks=chunks))


def _loading(
    state: State, engine: Engine, request: GetPart, cut: _Cut, *, image: Image, chunks: tuple[Chunk, ...]
) -> Operation:
    spans = tuple(engine.layouts[0].chunks(cut.row_count))
    return Operation(
        state.number("op"),
        OpKind.GET_PART,
        engine.client,
        request.seq,
        engine.engine_id,
        engine.scope,
        image.conversation,
        -1,
        cut.row_count,
        "host",
        state.now_s,
        ends_s(state, request.deadline_s),
        (StageRun(0, engine.stages[0].worker, cut.rows, spans),),
        image=image,
        chunks=chunks,
        image_tokens=cut.row_count,
    )


def _check_sessions(what: str, count: int) -> None:
    if count >= SESSION_LIMIT:
        raise Refusal("too_many", f"an engine has at most {SESSION_LIMIT} {what} open")
