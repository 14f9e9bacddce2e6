"""What each request of a client does."""

from collections.abc import Callable, Sequence

from ipc.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Acknowledge,
    Announce,
    Cancel,
    Capture,
    Clear,
    Done,
    Drop,
    Failed,
    FaultArm,
    FaultDisarm,
    FaultList,
    Found,
    GetBegin,
    GetEnd,
    GetPart,
    Goodbye,
    Hello,
    Images,
    Lift,
    ListImages,
    Lookup,
    Mark,
    Memory,
    Pin,
    PutAbort,
    PutBegin,
    PutCommit,
    PutPart,
    Register,
    Release,
    Request,
    ResetWorker,
    RestartWorker,
    Restore,
    SetTrace,
    Show,
    SlotDirect,
    SlotDrop,
    SlotFrom,
    SlotTo,
    Stats,
    TakeCensus,
    Trace,
    Unregister,
    Welcome,
)
from stratad.core import (
    blame,
    ends,
    exchange,
    faults,
    jobs,
    journaling,
    leases,
    lives,
    marking,
    memory,
    memory_view,
    queue,
    registration,
    trace,
    views,
)
from stratad.core.effects import DropClient, SendTo
from stratad.core.failures import Refusal
from stratad.core.images import Image
from stratad.core.intake import check_slot_number, engine_of, operation_of
from stratad.core.ops import OpState
from stratad.core.state import ClientRecord, State, StatsRequest

CENSUS_WAIT_S = 0.25
LIST_LIMIT = 250  # each is counted chunk by chunk


def serve(state: State, client: ClientRecord, request: Request) -> None:
    """Serve one request of a greeted client.

    Raises:
        Refusal: it cannot be served; nothing was changed.
    """
    match request:
        case Capture() | Restore() | SlotDirect() | SlotTo() | SlotFrom():
            queue.submit(state, operation_of(state, client, request))
        case SlotDrop():
            _drop_transit(state, client, request)
        case PutBegin() | PutPart() | PutCommit() | PutAbort() | GetBegin() | GetPart() | GetEnd():
            exchange.serve(state, client, request)
        case Acknowledge() | Release():
            _end_hold(state, client, request)
        case Lookup():
            _lookup(state, client, request)
        case Mark():
            _mark(state, client, request)
        case Drop():
            _drop(state, client, request)
        case Clear():
            _clear(state, client, request)
        case Pin():
            _pin(state, client, request)
        case Lift() | RestartWorker() | ResetWorker():
            _administer(state, client, request)
        case Hello():
            _hello(state, client, request)
        case Register() | Unregister() | Announce():
            _serve_engine(state, client, request)
        case Cancel():
            _cancel(state, client, request)
        case Stats() | Memory() | Trace() | SetTrace():
            _tell(state, client, request)
        case ListImages():
            _list(state, client, request)
        case Show():
            image = _named(state, client, request)[-1]
            state.reply(client.client, views.image_detail(state, request.seq, image))
        case FaultArm() | FaultList() | FaultDisarm():
            faults.serve(state, client, request, admin=_is_admin(state, client))
        case Goodbye():
            client.polite = True
            state.reply(client.client, Done(request.seq))
            state.out.append(DropClient(client.client))


def _hello(state: State, client: ClientRecord, hello: Hello) -> None:
    settings = state.settings
    if hello.version != PROTOCOL_VERSION:
        text = f"the daemon speaks protocol version {PROTOCOL_VERSION}, the client {hello.version}"
        state.reply(client.client, Failed(hello.seq, "wrong_version", text, start_id=settings.start_id))
        state.out.append(DropClient(client.client))
        return
    if client.surplus:
        text = f"the daemon serves at most {settings.max_clients} clients at once"
        state.reply(client.client, Failed(hello.seq, "too_many", text, start_id=settings.start_id))
        state.out.append(DropClient(client.client))
        return
    client.greeted = True
    client.name = hello.client
    welcome = Welcome(
        hello.seq,
        PROTOCOL_VERSION,
        settings.start_id,
        settings.pid,
        settings.instance,
        settings.package_hash,
        settings.commit,
        settings.max_message_bytes,
        settings.chunk_tokens,
        settings.parallel,
        _is_admin(state, client),
    )
    state.reply(client.client, welcome)


def _is_admin(state: State, client: ClientRecord) -> bool:
    return client.uid in (0, state.settings.uid) or client.uid in state.settings.admins


def _administer(state: State, client: ClientRecord, request: Lift | RestartWorker | ResetWorker) -> None:
    if not _is_admin(state, client):
        raise Refusal("not_permitted", "only an admin of the daemon may order that")
    if isinstance(request, Lift):
        _lift(state, client, request)
    else:
        lives.order(state, client.client, request)
    queue.pump(state)


def _lift(state: State, client: ClientRecord, request: Lift) -> None:
    images = [
        image
        for image in (*state.catalog.images.values(), *state.catalog.transits.values())
        if image.suspect is not None
        and image.scope.namespace == request.namespace
        and (not request.conversation or image.conversation == request.conversation)
        and request.image_id in (0, image.image_id)
    ]
    conversation = request.conversation
    lifted = blame.lift(state, request.namespace, images, conversation, sources=not request.image_id)
    state.reply(client.client, Done(request.seq, lifted))


def _may_touch(state: State, client: ClientRecord, namespace: str) -> bool:
    return _is_admin(state, client) or state.owners.get(namespace) == client.uid


def _named(state: State, client: ClientRecord, request: Show | Pin | Drop) -> tuple[Image, ...]:
    """The images that a request means, latest last: all of a conversation, one a fingerprint, or a single one of them.

    Raises:
        Refusal: ``not_permitted``, ``unknown_conversation`` or ``unknown_image``.
    """
    namespace, conversation, image_id = request.namespace, request.conversation, request.image_id
    if not _may_touch(state, client, namespace):
        raise Refusal("not_permitted", f"namespace {namespace[:80]!r} is not yours")
    images = state.catalog.named(namespace, conversation)
    if image_id:
        images = tuple(image for image in images if image.image_id == image_id)
        if not images:
            raise Refusal(
                "unknown_image",
                f"conversation {conversation[:80]!r} in namespace {namespace[:80]!r} has no image {image_id}",
            )
    if not images:
        raise Refusal(
            "unknown_conversation",
            f"no image of conversation {conversation[:80]!r} in namespace {namespace[:80]!r}",
        )
    return images


def _mark(state: State, client: ClientRecord, request: Mark) -> None:
    engine = engine_of(state, client, request.engine_id)
    marking.check(request)
    if request.conversation:
        op = operation_of(state, client, request)
        marking.prepare(state, engine, op)
        queue.submit(state, op)
        engine.marks[request.slot] = request.mark
        return
    marking.set_plain(engine, request.slot, request.mark)
    state.reply(client.client, Done(request.seq))


def _serve_engine(state: State, client: ClientRecord, request: Register | Unregister | Announce) -> None:
    match request:
        case Register():
            registration.register(state, client, request)
        case Unregister():
            registration.close(state, engine_of(state, client, request.engine_id), request.seq)
        case Announce():
            _announce(state, client, request)


def _announce(state: State, client: ClientRecord, request: Announce) -> None:
    owner = state.owners.get(request.namespace, client.uid)
    if owner != client.uid and not _is_admin(state, client):
        raise Refusal("not_permitted", f"namespace {request.namespace[:80]!r} belongs to uid {owner}")
    registration.announce(state, client, request)


def _pin(state: State, client: ClientRecord, request: Pin) -> None:
    images = _named(state, client, request)
    journaling.check_writable(state)

    def recorded(state: State) -> None:
        for image in images:
            image.pinned = request.pinned
        state.reply(client.client, Done(request.seq, len(images)))

    journaling.record_again(state, images, recorded, _refuse(client, request.seq), pinned=request.pinned)


def _lookup(state: State, client: ClientRecord, request: Lookup) -> None:
    engine = engine_of(state, client, request.engine_id)
    if len(request.tokens) % TOKEN_BYTES:
        raise Refusal("bad_tokens", f"tokens must be packed u32, got {len(request.tokens)} bytes")
    state.count("lookups")
    found = state.catalog.lookup(engine.scope, request.tokens)
    image, tokens = found or (None, 0)
    if image is not None and tokens < image.token_count:
        # Inside a block whose tokens cannot be located nothing can be restored.
        tokens = tokens // engine.token_unit * engine.token_unit
    if image is None or tokens == 0:
        state.reply(client.client, Found(request.seq, "miss"))
        return
    state.count("hits")
    state.reply(client.client, Found(request.seq, "hit", image.image_id, image.conversation, tokens, image.token_count))


def _end_take(state: State, client: ClientRecord, request: Acknowledge | Release) -> Image | None:
    """Ends the hold that an engine's take has on its image; None when the image was dropped meanwhile."""
    engine = engine_of(state, client, request.engine_id)
    if request.image_id not in engine.takes:
        raise Refusal("unknown_image", f"engine {engine.engine_id} has not taken image {request.image_id}")
    leases.end_take(state, engine, request.image_id)
    return state.catalog.images.get(request.image_id)


def _end_hold(state: State, client: ClientRecord, request: Acknowledge | Release) -> None:
    image = _end_take(state, client, request)
    if image is None or image.pinned or isinstance(request, Release):
        if image is not None and isinstance(request, Acknowledge):
            state.log("info", "taken image was pinned meanwhile and stays", image=image.image_id)
        state.reply(client.client, Done(request.seq, int(image is not None)))
        queue.pump(state)
        return
    _drop_all(state, client, request.seq, [image])


def _drop_transit(state: State, client: ClientRecord, request: SlotDrop) -> None:
    engine = engine_of(state, client, request.engine_id)
    check_slot_number("slot", request.slot)
    image = engine.transits.pop(request.slot, None)
    if image is None:
        raise Refusal("unknown_image", f"slot {request.slot} has no transit image")
    state.catalog.drop_transit(image)
    state.reply(client.client, Done(request.seq, 1))
    queue.pump(state)


def _drop(state: State, client: ClientRecord, request: Drop) -> None:
    images = _named(state, client, request)
    for image in images:
        if image.pinned and not request.force:
            raise Refusal("pinned", f"image {image.image_id} is pinned; drop it with force or unpin it first")
    journaling.check_writable(state)
    state.count("drops", len(images))
    _drop_all(state, client, request.seq, images)


def _clear(state: State, client: ClientRecord, request: Clear) -> None:
    if not _may_touch(state, client, request.namespace):
        raise Refusal("not_permitted", f"namespace {request.namespace[:80]!r} is not yours")
    images = [i for i in state.catalog.images.values() if i.scope.namespace == request.namespace and not i.pinned]
    journaling.check_writable(state)
    state.count("drops", len(images))
    _drop_all(state, client, request.seq, images)


def _drop_all(state: State, client: ClientRecord, seq: int, images: Sequence[Image]) -> None:
    """Record the end of images, drop them, and answer with their number."""
    done = Done(seq, len(images))
    journaling.drop(state, images, lambda state: state.reply(client.client, done), _refuse(client, seq))


def _refuse(client: ClientRecord, seq: int) -> Callable[[State, str], None]:
    """What answers a request whose change could not be recorded; nothing was changed."""

    def refuse(state: State, error: str) -> None:
        refusal = journaling.unwritable(error)
        state.reply(client.client, Failed(seq, refusal.code, refusal.message, start_id=state.settings.start_id))

    return refuse


def _cancel(state: State, client: ClientRecord, request: Cancel) -> None:
    op = state.ops.get(client.seqs.get(request.target_seq, -1))
    if op is None:
        raise Refusal("bad_value", f"request {request.target_seq} is not in flight")
    if op.state is OpState.WAITING:
        ends.fail(state, op, "cancelled", "the operation was cancelled before it started")
    else:
        jobs.cancel(state, op)
    state.reply(client.client, Done(request.seq))


def _tell(state: State, client: ClientRecord, request: Stats | Memory | Trace | SetTrace) -> None:
    match request:
        case Stats():
            _stats(state, client, request)
        case Memory():
            _ask_memory(state, client, request)
        case Trace() | SetTrace():
            admin = _is_admin(state, client)
            trace.serve(state, client, request, admin=admin, may_see=lambda name: _may_touch(state, client, name))


def _stats(state: State, client: ClientRecord, request: Stats) -> None:
    asked: set[str] = set()
    for worker in state.workers.values():
        if worker.can_serve:
            worker.census = state.number("census")
            asked.add(worker.name)
            state.out.append(SendTo(worker.name, TakeCensus(worker.census)))
    state.wake_by(state.now_s + CENSUS_WAIT_S)
    state.stats_requests.append(StatsRequest(client.client, request.seq, asked, state.now_s + CENSUS_WAIT_S))
    answer_stats(state, late=False)


def answer_stats(state: State, *, late: bool) -> None:
    """Answer the `Stats` requests whose workers have all counted, or (`late`) that have waited long enough."""
    waiting: list[StatsRequest] = []
    for request in state.stats_requests:
        if request.waiting and not (late and request.deadline_s <= state.now_s):
            waiting.append(request)
        else:
            client = state.clients[request.client]
            visible = _visible(state, client)
            state.reply(request.client, views.stats(state, request.seq, request.client, visible))
    state.stats_requests = waiting


def _ask_memory(state: State, client: ClientRecord, request: Memory) -> None:
    state.memory.asked.append((client.client, request))
    if not memory.refresh(state):
        answer_memory(state)


def answer_memory(state: State) -> None:
    """Answer the `Memory` requests that waited for a round."""
    asked, state.memory.asked = state.memory.asked, []
    for number, request in asked:
        visible = _visible(state, state.clients[number])
        state.reply(number, memory_view.memory_reply(state, request, number, visible))


def _visible(state: State, client: ClientRecord) -> frozenset[str]:
    return frozenset(name for name in _namespaces(state) if _may_touch(state, client, name))


def _namespaces(state: State) -> set[str]:
    """Every namespace that an engine or an operation names."""
    return {engine.namespace for engine in state.engines.values()} | {op.scope.namespace for op in state.ops.values()}


def _list(state: State, client: ClientRecord, request: ListImages) -> None:
    if request.namespace and not _may_touch(state, client, request.namespace):
        raise Refusal("not_permitted", f"namespace {request.namespace[:80]!r} is not yours")
    limit = max(1, min(request.limit, LIST_LIMIT))
    listed = [
        image
        for image in state.catalog.images.values()
        if image.image_id > request.after_image_id
        and (
            image.scope.namespace == request.namespace
            if request.namespace
            else _may_touch(state, client, image.scope.namespace)
        )
    ]
    listed.sort(key=lambda image: image.image_id)  # those of an earlier daemon may have higher numbers than ours
    infos = tuple(views.image_info(state, image) for image in listed[:limit])
    state.reply(client.client, Images(request.seq, infos, len(listed) > limit))
