"""The journal in small: records that stay when the daemon dies, and what they add up to, worked out independently."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from shm.extent import unpack_places
from stratad.core.records import DropRecord, ImageRecord, Record, WorkerRecord
from tests.support.simulation.content import granules_of


@dataclass(slots=True)
class SimJournal:
    """`records` are in the file; `live` are the images among them whose end is not, `places` what they lie in, and
    `workers` the process that each worker's device was last given to.

    While `broken`, nothing can be written. `in_hand` are records that were being written when the daemon died: nobody
    was told whether they are there.
    """

    records: list[Record] = field(default_factory=list)
    live: dict[int, ImageRecord] = field(default_factory=dict)
    places: dict[int, frozenset[tuple[str, int, int]]] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    in_hand: tuple[Record, ...] = ()
    broken: bool = False
    failures: int = 0

    def append(self, records: Sequence[Record]) -> str:
        """Write all of them; why not, or nothing."""
        if self.broken:
            self.failures += 1
            return "no space left on device"
        for record in records:
            self.records.append(record)
            self._apply(record)
        return ""

    def append_and_die(self, records: tuple[Record, ...], rng: random.Random) -> None:
        """The daemon dies while it writes: none, some, or all of them are there, and nobody was told."""
        if self.broken:
            return
        self.in_hand = records
        self.records.extend(records[: rng.randint(0, len(records))])

    def settle(self) -> None:
        """What was in hand is there now, or is not."""
        for record in self.in_hand:
            if any(record is there for there in self.records[-len(self.in_hand) :]):
                self._apply(record)
        self.in_hand = ()

    def begin_anew(self, records: Sequence[Record]) -> None:
        """The next daemon writes a journal of its own."""
        self.records, self.live, self.places, self.workers = [], {}, {}, {}
        for record in records:
            self.records.append(record)
            self._apply(record)

    def _apply(self, record: Record) -> None:
        match record:
            case ImageRecord():
                self._end(record.supersedes)
                self.live[record.image_id] = record
                self.places[record.image_id] = frozenset(
                    (worker, shuttle, granule)
                    for worker, stage in zip(record.workers, record.stages, strict=True)
                    for place in unpack_places(stage.places)
                    for shuttle, granule in granules_of(place)
                )
            case DropRecord():
                for image_id in record.image_ids:
                    self._end(image_id)
            case WorkerRecord():
                self.workers[record.worker] = record.pid

    def _end(self, image_id: int) -> None:
        self.live.pop(image_id, None)
        self.places.pop(image_id, None)
