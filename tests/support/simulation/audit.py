"""The bytes of images: exact, or changed by somebody else; and what is known to be damaged is never called sound."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipc.messages import JobFailed, Report
from shm.rows import unpack_numbers
from stratad.core.images import Chunk, Image
from stratad.core.ops import Operation, OpState
from tests.support.simulation.content import Granule, Place, check, digest_of, granules_of, join, part_content, plain
from tests.support.simulation.engine import content_of, state_of
from tests.support.simulation.worker import SimWorker

if TYPE_CHECKING:
    from tests.support.simulation.world import World


@dataclass(slots=True)
class Audit:
    """Compares images with what they stand for. `reported` is what lay where a worker found damage. `read` is what the
    rows held, by stage, that an operation began to capture, and `truths` the same of the image that came of it.
    """

    world: "World"
    reported: dict[Place, Granule] = field(default_factory=dict)
    read: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    truths: dict[int, list[list[int]]] = field(default_factory=dict)

    def capture_sent(self, op: Operation, stage: int, rows: list[int]) -> None:
        """A stage of a capture is sent, perhaps again: until it has ended nobody may change its rows."""
        before = self.read.setdefault(op.op_id, {}).setdefault(stage, rows)
        check(rows == before, f"rows of operation {op.op_id} were changed before it had read all of them")

    def learn(self, image: Image, ended: Iterable[Operation]) -> None:
        """An image was published by one of these operations: it stands for what that one read."""
        for op in ended:
            mine = (op.scope, op.conversation, op.tokens) == (image.scope, image.conversation, image.tokens)
            if mine and op.captures and op.piece is None and op.state is OpState.PUBLISHED and op.op_id in self.read:
                self.truths[image.image_id] = [rows for _, rows in sorted(self.read.pop(op.op_id).items())]
                return

    def damage_reported(self, process: SimWorker, report: Report) -> None:
        """The core was told of a damaged chunk: no image that has it may be found sound, now or later."""
        if not isinstance(report, JobFailed) or report.code != "damaged" or report.job not in process.damaged:
            return
        real = False
        for shuttle, granule in process.damaged[report.job]:
            segment = process.mapped[shuttle]
            if granule in segment.corrupted:
                real = True
                self.reported[process.name, shuttle, granule] = segment.granules.get(granule, ())
        check(real, f"job {report.job} found damage where nobody has changed a byte")
        self.check_flags()

    def check_flags(self) -> None:
        """Whatever has a chunk that is known to be damaged says so."""
        catalog = self.world.core.state.catalog
        for image in (*catalog.images.values(), *catalog.transits.values()):
            for chunk in image.chunks():
                known = any(self._known_damaged((chunk.key.worker, *place)) for place in granules_of(chunk.place))
                flagged = image.damaged and chunk.damaged
                check(flagged or not known, f"image {image.image_id} has a chunk known damaged, and is not flagged")

    def _known_damaged(self, place: Place) -> bool:
        was = self.reported.get(place)
        segment = self.world.segment_of(place[0], place[1])
        if was is None or segment is None:
            return False
        return place[2] in segment.corrupted and segment.granules.get(place[2]) == was

    def all(self) -> None:
        """Every image that is visible can be had with exact bytes, but where somebody else changed them."""
        catalog = self.world.core.state.catalog
        for image in (*catalog.images.values(), *catalog.transits.values()):
            self.one(image, born=False)

    def one(self, image: Image, *, born: bool) -> None:
        """One image; with `born` it has just been published."""
        tokens = unpack_numbers(image.tokens)
        for stage, chunks in enumerate(image.stages):
            found = [self._rows(image, chunk, born=born) for chunk in chunks]
            truth = _truth(image, tokens, stage)
            if truth is None or any(rows is None for rows in found):
                continue
            rows = [row for part in found if part is not None for row in part]
            right = truth == [plain(row) for row in rows]
            if image.image_id in self.truths:  # of which a rescue may have kept the beginning only
                read = self.truths[image.image_id][stage]
                right = right and rows == (read if len(read) == len(rows) else read[: len(rows)])
            check(right, f"wrong bytes: image {image.image_id} does not hold on stage {stage} what it stands for")

    def _rows(self, image: Image, chunk: Chunk, *, born: bool) -> list[int] | None:
        """The rows of a chunk; None: somebody else has changed them, or removed their segment."""
        places = [(chunk.key.worker, *place) for place in granules_of(chunk.place)]
        where = f"image {image.image_id}: bytes of stage {chunk.key.stage}"
        content: list[Granule] = []
        changed = False
        for worker, shuttle, granule in places:
            if (worker, shuttle) in self.world.lost:
                return None
            segment = self.world.segment_of(worker, shuttle)
            there = segment is not None and granule in segment.granules
            check(there, f"{where} are nowhere")
            if segment is not None:
                content.append(segment.granules[granule])
                changed = changed or granule in segment.corrupted
        if changed:
            bad = born and any(self._known_damaged(place) for place in places)
            check(not bad, f"image {image.image_id} was published with a chunk known damaged")
            return None
        rows = join(content)
        check(digest_of(rows) == chunk.key.digest, f"{where} lost their digest")
        return rows


def _truth(image: Image, tokens: tuple[int, ...], stage: int) -> list[int] | None:
    """What the chunks of a stage must hold; None: only its engine could say (a transit image)."""
    if image.parts is not None:
        rows: list[int] = []
        for part in image.parts:
            version, count = map(int, part.meta.split())
            rows += part_content(version, count)
        return rows
    if not tokens:
        return None
    return content_of(tokens, stage) + [state_of(tokens[:position], stage) for position in image.positions]
