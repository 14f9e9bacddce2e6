"""The memory monitor as clients see it."""

from collections.abc import Iterable

from ipc.messages import (
    Memory,
    MemoryArena,
    MemoryProcess,
    MemoryReply,
    MemorySeries,
    MemoryTerm,
    MemoryWarning,
)
from shm.extent import GRANULE_BYTES
from stratad.core.memory import label, process_bound
from stratad.core.memory_ring import Sample, series_bytes
from stratad.core.memory_tracks import Reading, Role, Track
from stratad.core.state import Engine, State

NAME_CHARS = 64
# Room in a frame, by excess: the reply itself, and one of each of its parts.
REPLY_BYTES = 512
PROCESS_BYTES = 1024
ARENA_BYTES = 192
WARNING_BYTES = 384
POINT_BYTES = 48


def warnings(state: State) -> tuple[MemoryWarning, ...]:
    """What is resident and not accounted for now, for too long already."""
    return tuple(
        MemoryWarning(
            label(track),
            track.pid,
            track.episode.since_unix_s,
            track.last.resident_bytes,
            track.explained_bytes,
            track.residual_bytes,
            track.tolerance_bytes(state.settings.memory),
        )
        for track in state.memory.tracks.values()
        if track.episode.open and track.last is not None
    )


def memory_reply(state: State, request: Memory, client: int, visible: frozenset[str]) -> MemoryReply:
    """The daemon's own processes, and those engine processes that hold an engine of the client itself or of one of the
    `visible` namespaces. The frame stays within the daemon's limit: series are thinned out for it, and processes are
    left out only where even their present values would not fit.
    """
    settings = state.settings.memory
    told = warnings(state)
    shown: list[tuple[Track, str]] = []
    for track in state.memory.tracks.values():
        if track.target.role is not Role.ENGINE:
            shown.append((track, track.target.name))
        elif names := _names(_engines_of(state, track), client, visible):
            shown.append((track, names))
    shown.sort(key=lambda entry: _ORDER[entry[0].target.role])
    room = state.settings.max_message_bytes - REPLY_BYTES
    room -= len(state.workers) * ARENA_BYTES + len(told) * WARNING_BYTES
    fitting = shown[: max(room // PROCESS_BYTES, 0)]
    room -= len(fitting) * PROCESS_BYTES
    limit = max(min(request.limit, room // (POINT_BYTES * max(len(fitting), 1))), 0) if request.history else 0
    return MemoryReply(
        request.seq,
        state.now_unix_s,
        settings.sample_s,
        settings.keep,
        state.memory.samples_bytes(settings.keep),
        process_bound(state) * series_bytes(settings.keep),
        state.memory.unwatched + len(shown) - len(fitting),
        state.memory.last_round_s,
        state.memory.longest_s,
        tuple(_process(state, track, track.last, name, limit) for track, name in fitting if track.last is not None),
        tuple(
            MemoryArena(
                worker.name,
                sum(worker.sizes.values()),
                worker.arena.used_granules * GRANULE_BYTES,
                worker.arena.free_granules * GRANULE_BYTES,
            )
            for worker in state.workers.values()
        ),
        told,
    )


_ORDER = {role: number for number, role in enumerate(Role)}


def _engines_of(state: State, track: Track) -> list[Engine]:
    """Engines that a watched process has registered."""
    clients = {c.client for c in state.clients.values() if c.pid == track.pid}
    return [engine for engine in state.engines.values() if engine.client in clients]


def _names(engines: Iterable[Engine], client: int, visible: frozenset[str]) -> str:
    names = ", ".join(e.name for e in engines if e.client == client or e.namespace in visible)
    return names if len(names) <= NAME_CHARS else f"{names[: NAME_CHARS - 3]}..."


def _process(state: State, track: Track, last: Reading, name: str, limit: int) -> MemoryProcess:
    ring = track.ring
    return MemoryProcess(
        track.target.role.value,
        name,
        track.pid,
        track.start_ticks,
        state.now_s - track.last_s,
        last.resident_bytes,
        last.anon_bytes,
        last.shmem_bytes,
        last.file_bytes,
        tuple(
            MemoryTerm(t.claim.name, t.claim.part, t.explained_bytes, t.claim.bound_bytes, t.claim.basis)
            for t in track.terms
        ),
        track.residual_bytes,
        track.tolerance_bytes(state.settings.memory),
        track.judged,
        len(ring),
        ring.window_ms / 1000,
        ring.at(0).resident_bytes,
        ring.least_bytes,
        ring.most_bytes,
        ring.slope_per_hour,
        ring.residual_slope_per_hour,
        _series(state, ring.thinned(limit)),
    )


def _series(state: State, samples: list[Sample]) -> MemorySeries:
    return MemorySeries(
        tuple(round(state.now_unix_s - state.now_s + sample.time_ms / 1000, 3) for sample in samples),
        tuple(sample.resident_bytes for sample in samples),
        tuple(sample.anon_bytes for sample in samples),
        tuple(sample.shmem_bytes for sample in samples),
        tuple(sample.explained_bytes for sample in samples),
    )
