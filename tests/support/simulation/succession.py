"""How one daemon follows another, and what each is told at its start."""

import random
from typing import TYPE_CHECKING, Final

from shm.extent import GRANULE_BYTES
from stratad.core.adoption import Legacy
from stratad.core.memory_tracks import MemorySettings
from stratad.core.records import replay
from stratad.core.restarts import RestartPolicy
from stratad.core.state import Settings
from tests.support.simulation.content import CHUNK_TOKENS, KEY_ID

if TYPE_CHECKING:
    from tests.support.simulation.world import World

MIB: Final = 1 << 20


def small_settings(rng: random.Random) -> Settings:
    """Small, and different from seed to seed."""
    shuttle_bytes = 8 * GRANULE_BYTES
    return Settings(
        instance="sim",
        uid=1000,
        pid=1,
        start_id=b"",
        package_hash="h",
        commit="c",
        parallel=rng.random() < 0.75,
        chunk_tokens=CHUNK_TOKENS,
        budget_bytes=rng.choice((28, 60, 200)) * GRANULE_BYTES,
        budget_images=rng.choice((3, 6, 100)),
        shuttle_bytes=shuttle_bytes,
        arena_bytes=rng.choice((2, 3, 4)) * shuttle_bytes,
        prefault=rng.random() < 0.2,
        max_message_bytes=MIB,
        max_clients=4,
        max_ops=rng.choice((5, 16, 16)),
        boot_s=10.0,
        job_floor_s=5.0,
        link_floor_bytes_per_s=1e9,
        restarts=RestartPolicy(0.1, 1.0, rng.choice((2, 4, 9))),
        reuse=rng.choice(("off", "storage", "verified", "verified", "verified")),
        stuck_s=rng.choice((1.0, 10.0)),
        lease_s=rng.choice((0.5, 2.0, 60.0)),
        memory=MemorySettings(sample_s=5.0 if rng.random() < 0.1 else 1e9, keep=4),
        trace=rng.random() < 0.3,
    )


def died(world: "World") -> None:
    """The daemon is no more: connections end, its template too, its workers soon; then the next one starts."""
    world.tell("!!! the supervisor is gone")
    world.tally.end(world.core.state)
    world.die_after = -1
    served_by = {(process.name, process.pid) for process in world.processes}
    for client in list(world.by_number.values()):
        client.lose_connection(served_by)
    world.by_number.clear()
    world.orders.clear()
    world.doomed_orders.clear()
    world.current.clear()
    world.formers.clear()
    world.awaited.clear()
    world.exits.clear()
    for process in world.processes:
        process.orphan = True
        process.outbox.clear()
        process.unprovable = process.unprovable or world.journal.workers.get(process.name) != process.pid
    world.guard.daemon_gone()
    next_daemon(world)


def next_daemon(world: "World") -> None:
    """It replays the journal, takes over what it can, and removes what it does not know."""
    same_pids = world.rng.random() < 0.85
    world.tally.counts["adoption:same pids" if same_pids else "adoption:other pids"] += 1
    # Which shuttles are sealed is not written down, so the next daemon but one relies on such a process having ended.
    for process in [process for process in world.processes if process.foreign]:
        process.gone = True
        world.processes.remove(process)
        for client in world.clients:
            client.process_gone((process.name, process.pid))
    for process in world.processes:
        process.foreign = process.foreign or not (same_pids or process.unprovable)
        process.unprovable = process.unprovable or process.foreign
        if process.unprovable:
            world.unprovable.add(process.pid)
    shuttles: dict[str, dict[int, int]] = {device: {} for device in world.devices}
    for segment in world.shared.values():
        if segment.whole:
            shuttles[segment.worker][segment.index] = world.settings.shuttle_bytes
    legacy = Legacy(replay(world.journal.records), shuttles, KEY_ID, same_pids)
    world.tally.begin()
    if world.rng.random() < 0.2:  # somebody has edited the configuration
        world.settings = small_settings(world.rng)
    world.core = world.new_core(legacy)
    world.guard.images.adopted()
    world.journal.begin_anew(world.core.records)
    for name in world.shared.keys() - world.core.segments:
        del world.shared[name]
    world.start()
