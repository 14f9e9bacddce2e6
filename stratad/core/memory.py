"""The memory monitor: asks for samples in rounds, accounts for each, and tells once when a residual stays too large.

A round reads every watched process, a few at each wake-up, so that no wake-up takes long. The shell does the reading;
what it found comes back as `sampled` in the same turn, so bounds and readings are of one instant.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from ipc.messages import MemfdPool, TakeCensus
from stratad.core.effects import SampleMemory, SendTo
from stratad.core.memory_ring import Ring
from stratad.core.memory_tracks import (
    PROCESS_LIMIT,
    Baseline,
    Claim,
    Episode,
    Reading,
    Role,
    Target,
    Track,
    Turn,
)
from stratad.core.state import EngineStage, PoolState, State, Worker

# Read at one wake-up, and the pause before the next of a round.
BATCH = 4
STEP_S = 0.02
# While the daemon is young its processes still grow into their places, and a sample of some seconds ago says nothing of
# them: who asks then gets a round of its own. Later that would only fill the series with samples that nobody needs.
YOUNG_S = 60.0
FRESH_S = 1.0
# What the supervisor's records take, measured with 50 000 to 200 000 chunks (CPython 3.11, x86-64); tokens are counted.
CHUNK_RECORD_BYTES = 600
IMAGE_RECORD_BYTES = 1000

SUPERVISOR = (Role.SUPERVISOR, "")
TEMPLATE = (Role.TEMPLATE, "")


def tick(state: State) -> None:
    """Begin a round or go on with it, where it is time."""
    memory = state.memory
    if state.stopping:
        memory.due_s = math.inf
        memory.pending = []
        return
    if state.now_s < memory.due_s:
        return
    if not memory.pending:
        memory.began_s = state.now_s
        memory.last_round_s, memory.round_s = memory.round_s, 0.0
        memory.next_round_s = state.now_s + state.settings.memory.sample_s
        memory.pending, memory.unwatched = _targets(state)
        watched = {target.key for target in memory.pending}
        for key in [key for key in memory.tracks if key not in watched]:
            forget(state, key)
        _count_staging(state)
    batch, memory.pending = memory.pending[:BATCH], memory.pending[BATCH:]
    state.out.append(SampleMemory(tuple(batch)))
    memory.due_s = state.now_s + STEP_S if memory.pending else memory.next_round_s


def refresh(state: State) -> bool:
    """Somebody asks: whether the answer must wait for the end of a round. It is begun here where none is under way."""
    memory = state.memory
    if state.stopping or state.now_s - state.started_s > YOUNG_S:
        return False
    if not memory.pending:
        if state.now_s - memory.began_s <= FRESH_S:
            return False
        memory.due_s = state.now_s
        tick(state)
        state.wake_by(memory.due_s)
    return True


def worker_ready(state: State, worker: Worker) -> None:
    """Read a worker now, before it is given anything: that is its baseline."""
    if worker.start_ticks > 0:
        target = Target(Role.WORKER, worker.name, worker.pid, worker.start_ticks, fresh=True)
        state.out.append(SampleMemory((target,)))


def sampled(state: State, found: Iterable[tuple[Target, Reading | None]]) -> None:
    """Readings arrived; None stands for a process that is gone or hidden."""
    settings = state.settings.memory
    for target, reading in found:
        track = state.memory.tracks.get(target.key)
        if reading is None or (target.start_ticks and reading.start_ticks != target.start_ticks):
            # Gone, or the pid belongs to a later process. Its place may have been filled since it was asked for.
            if track is not None and target.start_ticks in (0, track.start_ticks):
                forget(state, target.key)
            continue
        if track is not None and (track.pid, track.start_ticks) != (reading.pid, reading.start_ticks):
            forget(state, target.key)
            track = None
        if track is None:
            track = Track(target, reading.pid, reading.start_ticks, Ring(settings.keep), Episode(settings.warn_after))
            state.memory.tracks[target.key] = track
        if track.baseline is None and _settled(state, target, reading):
            given_bytes = 0 if target.fresh else sum(c.bound_bytes for c in _claims(state, track) if c.part == "shmem")
            track.baseline = Baseline(reading.anon_bytes, max(reading.shmem_bytes - given_bytes, 0))
        files = Claim("files", "file", reading.file_bytes, "measured")
        track.add(reading, [*_claims(state, track), files], state.now_s)
        if track.judged:
            _judge(state, track)


def forget(state: State, key: tuple[Role, str]) -> None:
    """The process is gone, and what was known of it goes too."""
    track = state.memory.tracks.pop(key, None)
    if track is not None and track.episode.open:
        state.log("info", "memory warning ends with its process", process=label(track), pid=track.pid)


def label(track: Track) -> str:
    """A process in words: ``supervisor``, ``worker cpu:0``."""
    return f"{track.target.role.value} {track.target.name}".strip()


def process_bound(state: State) -> int:
    """Processes that are watched at most."""
    return max(PROCESS_LIMIT, len(state.workers) + 2)


def pool_bytes(stages: Iterable[EngineStage]) -> int:
    """Bytes of host memory that the pools of these stages may take."""
    return sum(s.stage.pool.pool_bytes for s in stages if isinstance(s.stage.pool, MemfdPool))


def validate(state: State) -> None:
    """Check what is kept of processes by a recount."""
    memory = state.memory
    assert len(memory.tracks) <= process_bound(state)
    for key, track in memory.tracks.items():
        assert track.target.key == key
        track.ring.validate()
        assert 0 < len(track.ring) <= state.settings.memory.keep
        assert track.last is not None
        assert track.residual_bytes >= 0
        assert not track.episode.open or track.judged


def _targets(state: State) -> tuple[list[Target], int]:
    """Every process to be read in a round, the daemon's own first, and how many engine processes were too many."""
    targets = [Target(*SUPERVISOR, state.settings.pid, 0), Target(*TEMPLATE, 0, 0)]
    for worker in state.workers.values():
        if worker.start_ticks > 0:
            targets.append(Target(Role.WORKER, worker.name, worker.pid, worker.start_ticks))
    engines: dict[int, Target] = {}
    for client in state.clients.values():
        if client.engines and client.pid > 0 and client.start_ticks > 0:  # 0: of another pid namespace, unseen
            engines[client.pid] = Target(Role.ENGINE, "", client.pid, client.start_ticks)
    room = process_bound(state) - 2 - len(state.workers)  # a worker that is not there now may come at any time
    return targets + list(engines.values())[:room], max(len(engines) - room, 0)


def _count_staging(state: State) -> None:
    """Have the `cpu` workers count their private buffers (a GPU's lie on the device), unless a count is under way."""
    for worker in state.workers.values():
        if worker.can_serve and worker.device.startswith("cpu:") and worker.counted == worker.census:
            worker.census = state.number("census")
            state.out.append(SendTo(worker.name, TakeCensus(worker.census)))


def _settled(state: State, target: Target, reading: Reading) -> bool:
    """Whether what is resident now is a baseline. An engine's is its own business."""
    match target.role:
        case Role.SUPERVISOR:
            return True
        case Role.TEMPLATE:
            return reading.settled
        case Role.WORKER:
            return state.workers[target.name].can_serve
        case Role.ENGINE:
            return False


def _claims(state: State, track: Track) -> list[Claim]:
    """What we hold to be in a process's memory, all but its files."""
    claims: list[Claim] = []
    if track.baseline is not None:
        claims.append(Claim("baseline", "anon", track.baseline.anon_bytes, "measured"))
        if track.baseline.shmem_bytes:
            claims.append(Claim("baseline", "shmem", track.baseline.shmem_bytes, "measured"))
    match track.target.role:
        case Role.SUPERVISOR:
            claims += _supervisor_claims(state)
        case Role.WORKER:
            claims += _worker_claims(state, state.workers[track.target.name])
        case Role.ENGINE:
            mine = [engine for engine in state.engines.values() if _pid_of(state, engine.client) == track.pid]
            stages = (stage for engine in mine for stage in engine.stages)
            claims.append(Claim("pools", "shmem", pool_bytes(stages), "at most"))
        case Role.TEMPLATE:
            pass
    return claims


def _supervisor_claims(state: State) -> list[Claim]:
    """What the supervisor has to remember. Where records were dropped, the allocator keeps most of their memory for the
    next ones (measured: 42 of 57 MB after 8 184 images were cleared).
    """
    catalog, memory = state.catalog, state.memory
    records_bytes = len(catalog.chunks) * CHUNK_RECORD_BYTES + len(catalog.images) * IMAGE_RECORD_BYTES
    # Published images are counted as they come and go; the tokens of an open put are its image's only once it is one.
    open_bytes = sum(len(put.draft.tokens) for engine in state.engines.values() for put in engine.puts.values())
    tokens_bytes = catalog.token_bytes + open_bytes
    held_bytes = tokens_bytes + records_bytes
    memory.most_held_bytes = max(memory.most_held_bytes, held_bytes)
    return [
        Claim("tokens", "anon", tokens_bytes, "counted"),
        Claim("catalog", "anon", records_bytes, "estimate"),
        Claim("samples", "anon", memory.samples_bytes(state.settings.memory.keep), "counted"),
        Claim("trace", "anon", state.trace.held_bytes, "estimate"),
        Claim("dropped records", "anon", memory.most_held_bytes - held_bytes, "at most"),
    ]


def _worker_claims(state: State, worker: Worker) -> list[Claim]:
    """What a worker maps, and its private buffers. The pages of a shuttle are entered before it is ready, those of a
    pool when they are first copied; buffers of a GPU's worker lie on the device.
    """
    claims = [Claim("shuttles", "shmem", sum(worker.sizes[index] for index in worker.mapped), "counted")]
    if worker.making is not None:
        size_bytes = worker.sizes.get(worker.making, state.settings.shuttle_bytes)
        claims.append(Claim("shuttle in the making", "shmem", size_bytes, "at most"))
    mapped = [
        stage
        for engine in state.engines.values()
        for stage in engine.stages
        if stage.worker == worker.name
        and (stage.state in (PoolState.OPENING, PoolState.OPEN) or stage.pool in engine.unmapping)
    ]
    claims.append(Claim("pools", "shmem", pool_bytes(mapped), "at most"))
    if worker.device.startswith("cpu:"):
        claims.append(Claim("staging", "anon", worker.resources.get("staging_bytes", 0), "at most"))
    return claims


def _pid_of(state: State, client: int) -> int:
    record = state.clients.get(client)
    return record.pid if record is not None else -1


def _judge(state: State, track: Track) -> None:
    """Tell when a residual has been too large for long, and when it is back."""
    tolerance_bytes = track.tolerance_bytes(state.settings.memory)
    turn = track.episode.judge(above=track.residual_bytes > tolerance_bytes, now_unix_s=state.now_unix_s)
    if turn is Turn.NONE or track.last is None:
        return
    opened = turn is Turn.OPENED
    state.count("memory_warnings", int(opened))
    state.log(
        "warning" if opened else "info",
        "resident memory is not accounted for" if opened else "resident memory is accounted for again",
        process=label(track),
        pid=track.pid,
        resident_bytes=track.last.resident_bytes,
        explained_bytes=track.explained_bytes,
        residual_bytes=track.residual_bytes,
        tolerance_bytes=tolerance_bytes,
        since=datetime.fromtimestamp(track.episode.since_unix_s, UTC).isoformat(timespec="seconds"),
    )
