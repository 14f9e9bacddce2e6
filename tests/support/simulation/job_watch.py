"""What jobs may touch, from the moment they are sent until their process has finished them or is gone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipc.messages import CaptureJob, CopyJob, DigestJob, RestoreJob
from shm.extent import unpack_places
from shm.rows import unpack_numbers, unpack_rows
from stratad.core.ops import Operation
from tests.support.simulation.content import Place, Pool, check, granules_of
from tests.support.simulation.worker import AnyJob, SimWorker

if TYPE_CHECKING:
    from tests.support.simulation.world import World

# Rows of group N are numbered from N times this.
GROUP = 1 << 20


def row_numbers(packed: Iterable[bytes]) -> frozenset[int]:
    """Rows of all groups as one set of numbers."""
    return frozenset(
        group * GROUP + row
        for group, rows in enumerate(packed)
        for first, count in unpack_rows(rows)
        for row in range(first, first + count)
    )


def rows_of(pool: Pool, op: Operation, stage: int) -> list[int]:
    """What the rows hold that a stage of a capture reads, in the order of its chunks."""
    run = op.stages[stage]
    found: list[int] = []
    for span in run.spans:
        rows = [row for first, count in run.rows.runs[span.group] for row in range(first, first + count)]
        found += [pool.rows[span.group][row] for row in rows[span.first_row : span.first_row + span.row_count]]
    return found


@dataclass(slots=True, eq=False)
class JobNote:
    """A job that was sent: whose it is, and what it may touch until its process has finished it or is gone."""

    process: SimWorker
    job: int
    client: int
    seq: int
    pool: Pool | None
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[Place]
    holds: frozenset[Place]

    @property
    def over(self) -> bool:
        """Whether nothing of it can happen any more."""
        return self.process.gone or self.process.exited or self.job in self.process.finished

    @property
    def source_read(self) -> bool:
        """Whether it reads no row any more."""
        return self.over or self.job in self.process.source_read


@dataclass(slots=True)
class JobWatch:
    """All jobs that are not over; `fresh` are those of the event in hand."""

    world: "World"
    notes: list[JobNote] = field(default_factory=list)
    fresh: list[JobNote] = field(default_factory=list)

    def sent(self, process: SimWorker, command: AnyJob) -> None:
        """A job is on its way: nothing else may touch what it touches."""
        world = self.world
        self.notes = [note for note in self.notes if not note.over]
        op, stage = world.core.state.workers[process.name].jobs[command.job]
        named = row_numbers(command.rows)
        targets = row_numbers(command.target_rows) if isinstance(command, CopyJob) else frozenset()
        places: frozenset[Place] = frozenset()
        if not isinstance(command, CopyJob | DigestJob):
            places = frozenset(
                (process.name, shuttle, granule)
                for place in unpack_places(command.places)
                for shuttle, granule in granules_of(place)
            )
        unmapped = {shuttle for _, shuttle, _ in places} - process.mapped.keys()
        check(not unmapped, f"job {command.job} names shuttles {unmapped}, which its process does not map")
        check(command.pool in process.pools, f"job {command.job} names pool {command.pool}, which is not open")
        if isinstance(command, CaptureJob):
            named_pid = world.journal.workers.get(process.name)
            check(
                named_pid == process.pid,
                f"{process.pid} writes the arena of {process.name}, the journal names {named_pid}",
            )
        reads, writes = (frozenset(), named) if isinstance(command, RestoreJob) else (named, targets)
        fills, holds = (places, frozenset()) if isinstance(command, CaptureJob) else (frozenset(), places)
        pool = world.pool_at(process, command.pool)
        if isinstance(command, CaptureJob):
            holds = self._hinted(process, command, op, stage)
            if pool is not None:
                world.guard.audit.capture_sent(op, stage, rows_of(pool, op, stage))
        note = JobNote(process, command.job, op.client, op.seq, pool, reads, writes, fills, holds)
        check(not process.condemned, f"a job is sent to {process.name}, which was told to die")
        for other in world.processes:
            alone = other is process or other.gone or other.name != process.name or other.unprovable
            check(alone, f"a job is sent to {process.name} while its former process {other.pid} is not proven gone")
            if other.foreign and other.name == process.name:
                for _, shuttle, _ in fills:
                    sealed = process.mapped[shuttle] is not other.mapped.get(shuttle)
                    check(sealed, f"process {other.pid}, whose end nobody can prove, may write shuttle {shuttle}, too")
        for other_note in self.notes:
            self._check_apart(note, other_note)
        self.notes.append(note)
        self.fresh.append(note)

    @staticmethod
    def _hinted(process: SimWorker, command: CaptureJob, op: Operation, stage: int) -> frozenset[Place]:
        """The places of what a capture expects to be stored: nobody may write there before it has ended."""
        hinted = op.staged.hinted[stage] if op.staged is not None else {}
        numbers = unpack_numbers(command.chunks) or unpack_numbers(command.hinted)
        check(bool(command.chunks) or numbers == tuple(hinted), f"job {command.job} is not told what is hinted")
        return frozenset(
            (process.name, shuttle, granule)
            for chunk in hinted.values()
            for shuttle, granule in granules_of(chunk.place)
        )

    @staticmethod
    def _check_apart(note: JobNote, other: JobNote) -> None:
        both = note.fills & (other.fills | other.holds) or note.holds & other.fills
        mine, theirs = note.process.mapped, other.process.mapped
        same = {place for place in both if mine[place[1]] is theirs[place[1]]}  # a name may stand for other memory now
        check(not same, f"extents {sorted(same)[:3]} of job {note.job} are also used by job {other.job}")
        if note.pool is None or note.pool is not other.pool:
            return
        used = other.writes if other.source_read else other.writes | other.reads
        both_rows = note.writes & used or note.reads & other.writes
        check(not both_rows, f"rows {sorted(both_rows)[:3]} of job {note.job} are still used by job {other.job}")

    def of_request(self, client: int, seq: int) -> list[JobNote]:
        """The jobs of a request that are not over."""
        return [note for note in self.notes if (note.client, note.seq) == (client, seq) and not note.over]

    def after_event(self, published: dict[Place, int]) -> None:
        """What captures fill holds no image, neither here nor in the journal: asked only now, since the same event may
        have evicted what lay there.
        """
        for note in self.fresh:
            for place in note.fills & published.keys():
                check(False, f"extent {place} of job {note.job} holds image {published[place]}")
            for image_id, places in self.world.journal.places.items():
                apart = not note.fills & places
                check(apart, f"extents of job {note.job} hold image {image_id}, whose end is not recorded")
        self.fresh = []


def who(notes: list[JobNote]) -> str:
    """Jobs and their processes, in words."""
    return ", ".join(f"job {n.job} of {n.process.name} (pid {n.process.pid})" for n in notes)
