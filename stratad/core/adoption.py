"""What a new daemon takes over from an earlier one: shuttles, the images in them, and workers that may still live.

An image is adopted whole or not at all. What cannot be adopted is named in the log and counted: a worker that is not
served any more, a segment that is gone, another digest key, a record that contradicts itself or a later one. Reading
begins as soon as a worker is there. That is only once the device's former worker is proven gone, and with it everybody
who may write into the arena; a former worker that could never be proven gone (its pid means nothing here) leaves its
shuttles sealed, so that nothing is ever written there again. It may still attach or remove by name what it was ordered
to: new shuttles have numbers that it was never told.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shm.extent import GRANULE_BYTES, ChunkPlace, Extent
from shm.header import segment_name
from stratad.core import journaling, room
from stratad.core.arena import HEADER_GRANULES
from stratad.core.effects import KillFormer, UnlinkSegment, WatchFormer
from stratad.core.images import Chunk, ChunkKey, Image
from stratad.core.records import ImageRecord, Record, RecordError, Replayed, WorkerRecord, image_of, stage_chunks
from stratad.core.state import State, Worker, WorkerState

# Numbers that a former daemon may have passed over or lost, and that its workers' latest shuttles come after. One that
# comes later still is removed by the next start.
PASSED_OVER = 16
# A former worker ends with its daemon; one that does not is killed after this long.
FORMER_S = 2.0


class Legacy(NamedTuple):
    """What an earlier daemon left: its journal, summed up; the whole, good shuttles of /dev/shm as worker -> index ->
    bytes; the id of the digest key in use; and whether its pids mean the same here.
    """

    journal: Replayed
    shuttles: Mapping[str, Mapping[int, int]]
    key_id: bytes
    same_pids: bool = True


@dataclass(slots=True)
class _Claims:
    """Granules of the shuttles that are there, each claimed by at most one chunk."""

    shuttles: Mapping[str, Mapping[int, int]]
    taken: dict[tuple[str, int], bytearray] = field(default_factory=dict)
    extents: dict[tuple[str, int], list[Extent]] = field(default_factory=dict)
    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    places: dict[tuple[str, ChunkPlace], Chunk] = field(default_factory=dict)

    def why_not(self, worker: str, place: ChunkPlace) -> str:
        """What stands against a place, or ""."""
        for extent in place.extents:
            size_bytes = self.shuttles.get(worker, {}).get(extent.shuttle, 0)
            start, count = extent.offset_bytes // GRANULE_BYTES, extent.length_bytes // GRANULE_BYTES
            if not size_bytes:
                return "a segment is gone"
            if start < HEADER_GRANULES or count < 1 or extent.offset_bytes + extent.length_bytes > size_bytes:
                return "a place outside of its segment"
            taken = self.taken.setdefault((worker, extent.shuttle), bytearray(size_bytes // GRANULE_BYTES))
            if any(taken[start : start + count]):
                return "its memory was given to a later image"
        return "" if place.extents else "a chunk without a place"

    def claim(self, key: ChunkKey, place: ChunkPlace, *, damaged: bool) -> Chunk:
        """The chunk at a place that nothing stands against."""
        for extent in place.extents:
            start, count = extent.offset_bytes // GRANULE_BYTES, extent.length_bytes // GRANULE_BYTES
            self.taken[key.worker, extent.shuttle][start : start + count] = b"\1" * count
            self.extents.setdefault((key.worker, extent.shuttle), []).append(extent)
        alone = not damaged and key in self.chunks  # an earlier daemon shared nothing
        chunk = self.places[key.worker, place] = Chunk(key, place, damaged=damaged, alone=alone)
        if not (damaged or alone):
            self.chunks[key] = chunk
        return chunk

    def known(self, key: ChunkKey, place: ChunkPlace) -> Chunk | None:
        """The chunk that a record means, where another image holds it too. One elsewhere with the same key is another:
        the record will say so again to the next daemon.
        """
        there = self.places.get((key.worker, place))
        return there if there is not None and there.key == key else None


def adopt(state: State, legacy: Legacy) -> None:
    """Take over what can be; once, before the first event."""
    claims = _Claims(legacy.shuttles)
    adopted: list[Image] = []
    lost: Counter[str] = Counter()
    # From the latest back: where two records claim the same memory, the end of the earlier was not written down.
    for record in reversed(legacy.journal.images.values()):
        why = _why_not(state, legacy, record) or _claim(claims, record, adopted)
        if why:
            lost[why] += 1
    for name, worker in state.workers.items():
        _adopt_shuttles(state, worker, legacy, claims)
        former = legacy.journal.workers.get(name)
        if former is None:
            continue
        latest = max(legacy.shuttles.get(name, {}), default=-1)
        beyond = max(latest + 1, former.first_shuttle) + 1 + PASSED_OVER
        if legacy.same_pids:
            worker.former = (former.pid, former.start_ticks)
            worker.first_shuttle, worker.former_shuttles = former.first_shuttle, beyond
            worker.state = WorkerState.AWAITING
            worker.detail = f"its former process {former.pid} is not proven gone yet"
        else:
            worker.first_shuttle = beyond
            state.log("warning", "former worker of another pid namespace: its shuttles are sealed", worker=name)
    for image in sorted(adopted, key=lambda image: image.created_unix_s):
        record = legacy.journal.images[image.image_id]
        state.owners.setdefault(record.namespace, record.owner)
        state.fingerprint_fields.setdefault(record.fingerprint, record.fields)
        state.catalog.adopt(image)
    state.count("images_adopted", len(adopted))
    state.count("images_lost", lost.total())
    if legacy.journal.images:
        state.log("info", "images of an earlier daemon", adopted=len(adopted), lost=lost.total())
    for why, count in lost.items():
        state.log("error", "images cannot be adopted", images=count, why=why)


def _why_not(state: State, legacy: Legacy, record: ImageRecord) -> str:
    missing = [worker for worker in record.workers if worker not in state.workers]
    if missing:
        return f"worker {missing[0]} is not served any more"
    if any(key_id != legacy.key_id for stage in record.stages for _, key_id in stage.makers):
        return "made under another digest key"
    return ""


def _claim(claims: _Claims, record: ImageRecord, adopted: list[Image]) -> str:
    """Claim the places of an image, all or none; the reason against it, or ""."""
    damaged = set(record.damaged)
    listed: list[list[tuple[ChunkKey, ChunkPlace, bool]]] = []
    try:
        for stage in range(len(record.stages)):
            pairs = stage_chunks(record, stage)
            listed.append([(key, place, (stage, n) in damaged) for n, (key, place) in enumerate(pairs)])
    except RecordError as exc:
        return f"a bad record ({exc})"
    for entries in listed:
        for key, place, _ in entries:
            if claims.known(key, place) is None and (why := claims.why_not(key.worker, place)):
                return why
    stages: list[tuple[Chunk, ...]] = []
    for entries in listed:
        chunks: list[Chunk] = []
        for key, place, bad in entries:
            chunk = claims.known(key, place)
            chunks.append(chunk if chunk is not None else claims.claim(key, place, damaged=bad))
        stages.append(tuple(chunks))
    adopted.append(image_of(record, tuple(stages)))
    return ""


def _adopt_shuttles(state: State, worker: Worker, legacy: Legacy, claims: _Claims) -> None:
    """All shuttles that hold images, and empty ones as far as the arena may be that large."""
    sealed = worker.name in legacy.journal.workers and not legacy.same_pids
    mine = legacy.shuttles.get(worker.name, {})
    held = {index for index in mine if (worker.name, index) in claims.extents}
    total_bytes = sum(mine[index] for index in held)
    for index in sorted(mine):
        if index not in held and (sealed or total_bytes + mine[index] > state.settings.arena_bytes):
            continue
        total_bytes += 0 if index in held else mine[index]
        worker.sizes[index] = mine[index]
        worker.segments[index] = segment_name(state.settings.instance, worker.name, index)
        worker.arena.add_shuttle(index, mine[index], claims.extents.get((worker.name, index), ()), sealed=sealed)


def begin(state: State) -> None:
    """The first event: watch the former workers, and end what is over the budget now."""
    for worker in state.workers.values():
        if worker.former is not None:
            worker.former_by_s = state.now_s + FORMER_S
            state.wake_by(worker.former_by_s)
            state.out.append(WatchFormer(worker.name, *worker.former))
    excess = room.excess(state.catalog)
    if excess:
        state.log("warning", "adopted images are over the budget: the oldest are evicted", images=len(excess))
        journaling.evict(state, excess, lambda _: None)


def expire(state: State) -> None:
    """Kill former workers that outlive their daemon."""
    for worker in state.workers.values():
        if worker.former is not None and worker.former_by_s <= state.now_s:
            worker.life.killed_s = state.now_s
            state.wake_by(state.now_s + state.settings.stuck_s)
            _kill_former(state, worker)


def stop(state: State) -> None:
    """The daemon stops: nobody will look at former workers any more, so that none may outlive it."""
    for worker in state.workers.values():
        if worker.former is not None and worker.former_by_s < math.inf:
            _kill_former(state, worker)


def _kill_former(state: State, worker: Worker) -> None:
    worker.former_by_s = math.inf
    state.out.append(KillFormer(worker.name))


def former_gone(state: State, worker: Worker) -> None:
    """Proof that a worker's former process is gone: nobody else writes into its arena any more. It may have made
    another shuttle after we had looked at what is there.
    """
    worker.former = None
    for index in range(worker.first_shuttle, worker.former_shuttles):
        if index not in worker.sizes:
            state.out.append(UnlinkSegment(segment_name(state.settings.instance, worker.name, index)))
    if worker.state in (WorkerState.AWAITING, WorkerState.STUCK):
        worker.state = WorkerState.DEAD
        worker.detail = ""
        worker.next_start_s = state.now_s
        state.wake_by(state.now_s)


def all_records(state: State) -> tuple[Record, ...]:
    """Everything that a journal has to say now: to write it anew."""
    images = [journaling.record_of(state, image) for image in state.catalog.images.values()]
    processes = {
        name: worker.former if worker.former is not None else (worker.pid, worker.start_ticks)
        for name, worker in state.workers.items()
    }
    workers = (
        WorkerRecord(name, *process, state.workers[name].first_shuttle)
        for name, process in processes.items()
        if process[0]
    )
    return (*images, *workers)


def snapshot(state: State, legacy: Legacy | None) -> tuple[Record, ...]:
    """The records that a fresh journal must begin with, right after `adopt`."""
    if legacy is None:
        return ()
    images = [r for image_id, r in legacy.journal.images.items() if image_id in state.catalog.images]
    workers = [r for name, r in legacy.journal.workers.items() if name in state.workers]
    return (*images, *workers)
