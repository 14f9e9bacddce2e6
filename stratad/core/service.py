"""What each request of a client does."""

from ipc.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Acknowledge,
    Cancel,
    CancelJob,
    Capture,
    Clear,
    Done,
    Drop,
    Found,
    Goodbye,
    Hello,
    Images,
    ListImages,
    Lookup,
    Mark,
    Pin,
    Register,
    Request,
    Restore,
    Show,
    Stats,
    TakeCensus,
    Unregister,
    Welcome,
)
from stratad.core import jobs, queue, registration, views
from stratad.core.catalog import Image
from stratad.core.effects import DropClient, SendTo
from stratad.core.failures import Refusal
from stratad.core.intake import capture_operation, engine_of, restore_operation
from stratad.core.ops import RUNNING, OpState
from stratad.core.state import ClientRecord, State, StatsRequest

CENSUS_WAIT_S = 0.25
LIST_LIMIT = 1000
MARKS = ("clean", "dirty", "poisoned")


def serve(state: State, client: ClientRecord, request: Request) -> None:
    """Serve one request of a greeted client.

    Raises:
        Refusal: it cannot be served; nothing was changed.
    """
    match request:
        case Capture():
            queue.submit(state, capture_operation(state, client, request))
        case Restore():
            queue.submit(state, restore_operation(state, client, request))
        case Acknowledge():
            _acknowledge(state, client, request)
        case Lookup():
            _lookup(state, client, request)
        case Mark():
            engine = engine_of(state, client, request.engine_id)
            if request.mark not in MARKS or request.slot < 0:
                raise Refusal("bad_value", f"mark must be one of {', '.join(MARKS)} and slot >= 0, got {request}")
            engine.marks[request.slot] = request.mark
            state.reply(client.client, Done(request.seq))
        case Drop():
            _drop(state, client, request)
        case Clear():
            _clear(state, client, request)
        case Pin():
            images = _named(state, client, request.namespace, request.conversation)
            for image in images:
                image.pinned = request.pinned
            state.reply(client.client, Done(request.seq, len(images)))
            queue.pump(state)
        case Hello():
            _hello(state, client, request)
        case Register():
            registration.register(state, client, request)
        case Unregister():
            engine = engine_of(state, client, request.engine_id)
            registration.close(state, engine)
            state.reply(client.client, Done(request.seq))
        case Cancel():
            _cancel(state, client, request)
        case Stats():
            _stats(state, client, request)
        case ListImages():
            _list(state, client, request)
        case Show():
            image = _named(state, client, request.namespace, request.conversation)[-1]
            state.reply(client.client, views.image_detail(state, request.seq, image))
        case Goodbye():
            state.reply(client.client, Done(request.seq))
            state.out.append(DropClient(client.client))


def _hello(state: State, client: ClientRecord, hello: Hello) -> None:
    settings = state.settings
    if hello.version != PROTOCOL_VERSION:
        state.out.append(DropClient(client.client))
        raise Refusal(
            "wrong_version", f"the daemon speaks protocol version {PROTOCOL_VERSION}, the client {hello.version}"
        )
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
    return client.uid in (0, state.settings.uid)


def _may_touch(state: State, client: ClientRecord, namespace: str) -> bool:
    return _is_admin(state, client) or state.owners.get(namespace) == client.uid


def _named(state: State, client: ClientRecord, namespace: str, conversation: str) -> tuple[Image, ...]:
    if not _may_touch(state, client, namespace):
        raise Refusal("not_permitted", f"namespace {namespace[:80]!r} is not yours")
    images = state.catalog.named(namespace, conversation)
    if not images:
        raise Refusal(
            "unknown_conversation",
            f"no image of conversation {conversation[:80]!r} in namespace {namespace[:80]!r}",
        )
    return images


def _lookup(state: State, client: ClientRecord, request: Lookup) -> None:
    engine = engine_of(state, client, request.engine_id)
    if len(request.tokens) % TOKEN_BYTES:
        raise Refusal("bad_tokens", f"tokens must be packed u32, got {len(request.tokens)} bytes")
    state.count("lookups")
    found = state.catalog.lookup(engine.scope, request.tokens, whole=engine.has_state)
    if found is None:
        state.reply(client.client, Found(request.seq, "miss"))
        return
    state.count("hits")
    image, tokens = found
    state.reply(
        client.client,
        Found(request.seq, "hit", image.image_id, image.conversation, tokens, len(image.tokens) // TOKEN_BYTES),
    )


def _acknowledge(state: State, client: ClientRecord, request: Acknowledge) -> None:
    engine = engine_of(state, client, request.engine_id)
    if request.image_id not in engine.takes:
        raise Refusal("unknown_image", f"engine {engine.engine_id} has not taken image {request.image_id}")
    engine.takes.discard(request.image_id)
    image = state.catalog.images.get(request.image_id)
    if image is not None:
        image.taken -= 1
        if image.pinned:
            state.log("info", "taken image was pinned meanwhile and stays", image=image.image_id)
        else:
            state.catalog.drop(image)
    state.reply(client.client, Done(request.seq, int(image is not None)))
    queue.pump(state)


def _drop(state: State, client: ClientRecord, request: Drop) -> None:
    images = _named(state, client, request.namespace, request.conversation)
    for image in images:
        if image.pinned and not request.force:
            raise Refusal("pinned", f"image {image.image_id} is pinned; drop it with force or unpin it first")
    for image in images:
        state.catalog.drop(image)
    state.count("drops", len(images))
    state.reply(client.client, Done(request.seq, len(images)))
    queue.pump(state)


def _clear(state: State, client: ClientRecord, request: Clear) -> None:
    if not _may_touch(state, client, request.namespace):
        raise Refusal("not_permitted", f"namespace {request.namespace[:80]!r} is not yours")
    images = [i for i in state.catalog.images.values() if i.scope.namespace == request.namespace and not i.pinned]
    for image in images:
        state.catalog.drop(image)
    state.count("drops", len(images))
    state.reply(client.client, Done(request.seq, len(images)))
    queue.pump(state)


def _cancel(state: State, client: ClientRecord, request: Cancel) -> None:
    op = state.ops.get(client.seqs.get(request.target_seq, -1))
    if op is None:
        raise Refusal("bad_value", f"request {request.target_seq} is not in flight")
    op.cancelled = True
    if op.state is OpState.WAITING:
        jobs.fail(state, op, "cancelled", "the operation was cancelled before it started")
    else:
        for run in op.stages:
            if run.state in RUNNING:
                state.out.append(SendTo(run.worker, CancelJob(run.job)))
    state.reply(client.client, Done(request.seq))


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
            state.reply(request.client, views.stats(state, request.seq))
    state.stats_requests = waiting


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
    infos = tuple(views.image_info(state, image) for image in listed[:limit])
    state.reply(client.client, Images(request.seq, infos, len(listed) > limit))
