"""What the core shows of itself: answers to `Stats`, `ListImages` and `Show`."""

from ipc.messages import (
    ChunkInfo,
    EngineInfo,
    ImageDetail,
    ImageInfo,
    OpInfo,
    PartInfo,
    StatsReply,
    WorkerInfo,
)
from shm.extent import GRANULE_BYTES, pack_places
from stratad.core import memory_view
from stratad.core.blame import quarantined_sources
from stratad.core.images import Image
from stratad.core.leases import leases
from stratad.core.ops import ACTIVE
from stratad.core.state import RETRIED, Engine, State, Worker, WorkerState


def image_info(state: State, image: Image) -> ImageInfo:
    """One image as clients see it."""
    chunks = list(image.chunks())
    return ImageInfo(
        image.image_id,
        image.scope.namespace,
        image.conversation,
        image.token_count,
        len(image.stages),
        sum(chunk.place.length_bytes for chunk in chunks),
        sum(chunk.granule_bytes for chunk in chunks),
        state.catalog.exclusive_bytes(image),
        len(chunks),
        image.pinned,
        image.damaged,
        image.created_unix_s,
        image.used_unix_s,
        image.restores,
        image.positions,
        len(image.parts or ()),
        image.quarantined,
    )


def image_detail(state: State, seq: int, image: Image) -> ImageDetail:
    """One image with all its chunks, and the numbers of the conversation's other ones."""
    chunks = tuple(
        ChunkInfo(
            stage,
            chunk.key.group,
            chunk.key.token_count == 0,
            chunk.key.token_count,
            chunk.key.length_bytes,
            chunk.references,
            chunk.key.algorithm,
            chunk.key.digest,
            pack_places([chunk.place]),
            tuple(state.workers[chunk.key.worker].segments.get(extent.shuttle, "") for extent in chunk.place.extents),
        )
        for stage, stage_chunks in enumerate(image.stages)
        for chunk in stage_chunks
    )
    fields = state.fingerprint_fields.get(image.scope.fingerprint, {})
    named = state.catalog.named(image.scope.namespace, image.conversation)
    others = tuple(other.image_id for other in named if other is not image)
    return ImageDetail(seq, image_info(state, image), fields, chunks, part_table(image), others)


def part_table(image: Image) -> tuple[PartInfo, ...]:
    """The parts of an image that was put, as clients see them; of one that was captured none."""
    return tuple(PartInfo(part.name, part.nbytes, part.meta) for part in image.parts or ())


def worker_info(worker: Worker, now_s: float) -> WorkerInfo:
    """One worker."""
    ready = worker.ready
    return WorkerInfo(
        worker.name,
        worker.device,
        worker.state.value,
        worker.pid,
        worker.generation,
        worker.deaths,
        ready.cpus if ready else (),
        len(worker.sizes),
        sum(worker.sizes.values()),
        sum(worker.sizes[index] for index in worker.locked),
        worker.arena.free_granules * GRANULE_BYTES,
        worker.arena.used_granules * GRANULE_BYTES,
        len(worker.jobs),
        ready.digest_algorithm if ready else "",
        dict(worker.resources),
        worker.detail,
        mapped=len(worker.mapped),
        digest_path=ready.digest_path if ready else "",
        device_name=ready.device_name if ready else "",
        start_s=ready.start_s if ready else 0.0,
        missing_bytes=worker.missing_bytes,
        deaths_in_row=worker.deaths_in_row,
        starts_in_s=max(worker.next_start_s - now_s, 0.0) if worker.state in RETRIED else 0.0,
    )


def engine_info(state: State, engine: Engine) -> EngineInfo:
    """One engine."""
    client = state.clients.get(engine.client)
    marks: dict[str, int] = {}
    for mark in engine.marks.values():
        marks[mark] = marks.get(mark, 0) + 1
    held = list(leases(engine))
    kinds = [lease.kind for lease in held]
    return EngineInfo(
        engine.engine_id,
        engine.namespace,
        engine.name,
        client.pid if client else 0,
        client.uid if client else -1,
        tuple(f"{stage.worker} {stage.state.value}" for stage in engine.stages),
        engine.scope.fingerprint,
        engine.fingerprint,
        engine.ops,
        marks,
        len(engine.transits),
        sum(chunk.granule_bytes for image in engine.transits.values() for chunk in image.chunks()),
        {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        max((state.now_s - lease.used_s for lease in held), default=0.0),
        len(engine.clean.by_slot),
        engine.clean.tokens,
        engine.rescue.describe() if engine.rescue is not None else "",
        quarantined_sources(engine),
    )


def health(state: State) -> str:
    """``ok``: every worker serves and the journal can be written; ``degraded``: some do; ``starting``: none does yet;
    ``failed``: none does.
    """
    serving = [worker.state is WorkerState.READY and not worker.grow_failed for worker in state.workers.values()]
    if all(serving) and not state.journal_error:
        return "ok"
    if any(worker.can_serve for worker in state.workers.values()):
        return "degraded"
    first_start = any(
        w.state in (WorkerState.AWAITING, WorkerState.STARTING, WorkerState.DEAD) and not (w.deaths or w.refusals)
        for w in state.workers.values()
    )
    return "starting" if first_start else "failed"


def status_line(state: State) -> str:
    """How the daemon is, in one line, for the service manager."""
    ready = sum(worker.can_serve for worker in state.workers.values())
    catalog = state.catalog
    line = (
        f"{ready} of {len(state.workers)} workers ready, {len(catalog.images)} images, "
        f"{catalog.used_bytes >> 20} of {catalog.budget_bytes >> 20} MiB"
    )
    return f"stopping: {line}" if state.stopping else line


def stats(state: State, seq: int, client: int, visible: frozenset[str]) -> StatsReply:
    """Everything at this instant; of engines and operations only those of the `visible` namespaces and of the client
    itself. The shell adds the processes' resident memory, which only it can see.
    """
    catalog = state.catalog
    staged_bytes = catalog.staged_bytes
    counters = dict(state.counters)
    counters["evictions"] = catalog.evictions
    return StatsReply(
        seq,
        state.settings.instance,
        state.settings.pid,
        state.now_s - state.started_s,
        health(state),
        tuple(worker_info(worker, state.now_s) for worker in state.workers.values()),
        tuple(
            engine_info(state, engine)
            for engine in state.engines.values()
            if engine.client == client or engine.namespace in visible
        ),
        tuple(
            OpInfo(
                op.op_id,
                op.kind.value,
                op.state.value + (f": {op.waits_for}" if op.waits_for else ""),
                op.scope.namespace,
                op.conversation,
                op.engine_id,
                state.now_s - op.created_s,
                tuple(run.stage for run in op.stages if run.state in ACTIVE),
            )
            for op in state.ops.values()
            if op.client == client or op.scope.namespace in visible
        ),
        len(catalog.images),
        len(catalog.chunks),
        catalog.budget_bytes,
        catalog.budget_images,
        catalog.used_bytes - staged_bytes,
        staged_bytes,
        sum(arena.free_granules for arena in catalog.arenas.values()) * GRANULE_BYTES,
        (),
        counters,
        {**dict(state.settings.shown), "copy.trace": str(state.trace.on).lower()},
        memory_view.warnings(state),
        journal_error=state.journal_error,
    )
