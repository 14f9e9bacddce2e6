"""Fences: the rows of an engine that workers may still touch, and what therefore must wait."""

from collections.abc import Sequence
from typing import TypeAlias

from ipc.messages import Captured, Copied, Marked, PartLoaded, PartStored, Restored
from shm.layout import StageLayout
from shm.row_spaces import shared_row
from stratad._proofs import WorkerProof
from stratad._pump import Pump
from stratad.errors import Busy
from stratad.tickets import Ticket

AnyTicket: TypeAlias = Ticket[Captured | Restored | Copied | Marked | PartStored | PartLoaded]


class Fences:
    """The tickets of one engine whose rows are busy. Every method is called under the pump's lock."""

    def __init__(self, pump: Pump, layouts: Sequence[StageLayout]) -> None:
        self._pump = pump
        self._layouts = tuple(layouts)
        self._tickets: list[AnyTicket] = []

    def add(self, ticket: AnyTicket, name: str) -> None:
        """Fence the rows of a ticket that is about to be sent.

        Raises:
            Busy: another ticket fences one of its rows or state slots on the same stage, and one of the two writes it
                (code ``rows_busy``).
        """
        if self.busy():
            # Their end may have come and lie unread.
            self._pump.poll()
            for other in self.busy():
                self._refuse_overlap(ticket, other, name)
        self._tickets.append(ticket)

    def busy(self) -> list[AnyTicket]:
        """Tickets with busy rows, oldest first."""
        if self._tickets:
            self._tickets = [ticket for ticket in self._tickets if ticket.busy_stage(None)]
        return self._tickets

    def on_stage(self, stage: int) -> AnyTicket | None:
        """A ticket with busy rows on `stage`, if there is one."""
        return next((ticket for ticket in self.busy() if ticket.busy_stage(stage)), None)

    def proofs(self) -> set[WorkerProof]:
        """The proofs that busy tickets need."""
        return {worker for ticket in self.busy() for worker in ticket.workers}

    def workers_changed(self, engine_id: int, workers: tuple[WorkerProof, ...]) -> None:
        """Operations in flight may from now on be served by `workers`."""
        for ticket in self._tickets:
            ticket.workers_changed(engine_id, workers)

    def unresolved(self, start_id: bytes) -> bool:
        """Whether a lost operation may still run in the living daemon `start_id`."""
        return any(ticket.unresolved(start_id) for ticket in self._tickets)

    def disown(self, start_id: bytes, engine_ids_in_flight: set[int]) -> None:
        """Pass on which engines have operations in flight in the daemon `start_id`."""
        for ticket in self._tickets:
            ticket.disown(start_id, engine_ids_in_flight)

    def _refuse_overlap(self, ticket: AnyTicket, other: AnyTicket, name: str) -> None:
        for stage, layout in enumerate(self._layouts):
            for mine in ticket.uses:
                for theirs in other.uses:
                    if not (mine.writes or theirs.writes):
                        continue
                    shared = shared_row(layout, mine.on(stage).spaces, theirs.on(stage).spaces)
                    if shared and other.busy_stage(stage):
                        raise rows_busy(other, name, stage, shared)


def rows_busy(other: AnyTicket, name: str, stage: int = -1, what: str = "rows") -> Busy:
    """The refusal of `name` because the ticket `other` uses `what`."""
    where = "" if stage == -1 else f" of stage {stage}"
    text = f"{name}: {what}{where} may still be used by a {other.kind} (request {other.seq}, {other.state})"
    return Busy("rows_busy", text, stage=stage, detail={"request": str(other.seq), "kind": other.kind})
