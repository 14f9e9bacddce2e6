"""Row fences: rows and slots that a worker may still read or write."""

from dataclasses import dataclass

from shm.layout import StageLayout
from shm.row_spaces import SpaceRows, shared_row
from stratad.core.failures import Refusal


@dataclass(frozen=True, slots=True)
class Fence:
    """Rows and slots that one stage of an operation uses."""

    op_id: int
    rows: SpaceRows
    writes: bool
    layout: StageLayout


class RowFences:
    """The fences of every (engine, stage). Readers share rows; a writer shares with nobody."""

    def __init__(self) -> None:
        self._fences: dict[tuple[int, int], list[Fence]] = {}

    def check(self, engine_id: int, stage: int, fence: Fence) -> None:
        """Refuse a fence that meets one in force.

        Raises:
            Refusal: ``rows_busy``, naming the row or slot and the operation that holds it.
        """
        for other in self._fences.get((engine_id, stage), ()):
            if not (fence.writes or other.writes):
                continue
            what = shared_row(fence.layout, fence.rows, other.rows)
            if what:
                verb = "written" if other.writes else "read"
                raise Refusal("rows_busy", f"{what} is still {verb} by operation {other.op_id}", stage=stage)

    def raise_fence(self, engine_id: int, stage: int, fence: Fence) -> None:
        """Put a checked fence into force."""
        self._fences.setdefault((engine_id, stage), []).append(fence)

    def written(self, engine_id: int, stage: int, op_id: int) -> list[Fence]:
        """What one operation writes on one stage."""
        fences = self._fences.get((engine_id, stage), ())
        return [fence for fence in fences if fence.op_id == op_id and fence.writes]

    def lower(self, engine_id: int, stage: int, op_id: int) -> None:
        """End the fence of one operation on one stage; nothing happens when there is none."""
        fences = self._fences.get((engine_id, stage))
        if fences is None:
            return
        left = [fence for fence in fences if fence.op_id != op_id]
        if left:
            fences[:] = left
        else:
            del self._fences[engine_id, stage]

    def __len__(self) -> int:
        """Operations with a fence, counted on each stage."""
        return sum(len({fence.op_id for fence in fences}) for fences in self._fences.values())
