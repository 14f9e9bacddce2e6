"""The rows of an exchange: which are free, and what is on its way in the others.

A piece of a part on its way (a *transfer*) is a ticket with the rows that it reads or writes. Any thread that needs
room may wait for any transfer whose rows nobody else will still look at: those of puts, and those that a get asked for
ahead. So a thread that waits for room never waits for a thread that waits for room.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from ipc.messages import PartLoaded, PartStored
from shm.rows import RowRuns, first_rows, row_count
from stratad.errors import Busy, StratadError
from stratad.tickets import Ticket

PartTicket: TypeAlias = Ticket[PartStored] | Ticket[PartLoaded]

# More would only wait at the daemon, which serves one piece a direction at a time.
TRANSFER_LIMIT: Final = 32
# How long a wait for another thread, or for the end of a lost worker, goes without looking again.
_LOOK_S: Final = 0.05


class Transfer:
    """A piece on its way. `on_end` hears, outside of any lock, how it ended. One that is `spare` may be given up by
    whoever needs its rows; `given_up` tells its owner so.
    """

    __slots__ = ("ended", "given_up", "on_end", "rows", "spare", "ticket")

    def __init__(
        self, rows: RowRuns, ticket: PartTicket, on_end: Callable[[StratadError | None], None], *, spare: bool
    ) -> None:
        self.rows = rows
        self.ticket = ticket
        self.on_end = on_end
        self.spare = spare
        self.given_up = False
        self.ended = False

    def wait(self) -> StratadError | None:
        """Wait for its end, up to its own deadline; why it failed, or None."""
        try:
            self.ticket.result()
        except StratadError as exc:
            return exc
        return None


class Room:
    """Rows ``0 .. rows - 1``. Thread-safe."""

    def __init__(self, rows: int) -> None:
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, rows)]
        self._transfers: list[Transfer] = []
        # Ended for their owners, but a worker may still touch their rows (see `Ticket.rows_busy`).
        self._stuck: list[Transfer] = []

    @property
    def free_rows(self) -> int:
        """Rows that nobody uses."""
        with self._changed:
            return row_count(self._free)

    def try_take(self, count: int) -> RowRuns | None:
        """Take `count` rows if that many are free, and not too much is on its way."""
        self._unstick()
        with self._changed:
            if row_count(self._free) < count or len(self._transfers) >= TRANSFER_LIMIT:
                return None
            runs = next(((run,) for run in self._free if run[1] >= count), tuple(self._free))
            taken = first_rows(runs, count)
            self._free = _without(self._free, taken)
            return taken

    def take(self, count: int, until_s: float) -> RowRuns:
        """Take `count` rows, waiting for transfers to end; there must be that many in all.

        Raises:
            Busy: others kept their rows beyond `until_s` (code ``rows_busy``).
        """
        while (rows := self.try_take(count)) is None:
            transfer = self._pick()
            if transfer is not None:
                self.settle(transfer)
                continue
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Busy("rows_busy", f"no room in the exchange: {count} rows wanted, {self.free_rows} free in time")
            stuck = self._stuck[:1]
            if stuck:
                stuck[0].ticket.wait_rows_free(min(left_s, _LOOK_S))
            else:
                with self._changed:
                    self._changed.wait(min(left_s, _LOOK_S))
        return rows

    def give(self, rows: RowRuns) -> None:
        """Rows that nobody uses any more."""
        with self._changed:
            self._free = _merged([*self._free, *rows])
            self._changed.notify_all()

    def begin(
        self, rows: RowRuns, ticket: PartTicket, on_end: Callable[[StratadError | None], None], *, spare: bool
    ) -> Transfer:
        """A transfer was sent."""
        transfer = Transfer(rows, ticket, on_end, spare=spare)
        with self._changed:
            self._transfers.append(transfer)
        return transfer

    def claim(self, transfer: Transfer) -> bool:
        """Keep a spare transfer for its owner; False: it was given up."""
        with self._changed:
            transfer.spare = False
            return not transfer.given_up

    def settle(self, transfer: Transfer) -> None:
        """Wait for the end of a transfer and let go of its rows."""
        self.end(transfer, transfer.wait())

    def end(self, transfer: Transfer, error: StratadError | None) -> None:
        """The transfer ended and nobody looks at its rows any more. Only the first call counts."""
        busy = transfer.ticket.rows_busy
        with self._changed:
            if transfer not in self._transfers:
                return
            self._transfers.remove(transfer)
            transfer.ended = True
            if busy:
                self._stuck.append(transfer)
            self._changed.notify_all()
        if not busy:
            self.give(transfer.rows)
        transfer.on_end(error)

    def _pick(self) -> Transfer | None:
        """The oldest transfer whose rows nobody but its worker needs; a spare one is given up."""
        with self._changed:
            for transfer in self._transfers:
                if transfer.spare or transfer.ticket.kind == "put_part":
                    transfer.given_up = transfer.spare
                    return transfer
        return None

    def _unstick(self) -> None:
        if self._stuck:
            free = [transfer for transfer in list(self._stuck) if not transfer.ticket.rows_busy]
            for transfer in free:
                with self._changed:
                    if transfer not in self._stuck:
                        continue
                    self._stuck.remove(transfer)
                self.give(transfer.rows)


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged


def _without(runs: list[tuple[int, int]], taken: RowRuns) -> list[tuple[int, int]]:
    """`runs` without those that were taken off the front of each."""
    lengths = dict(taken)
    left = [(first + lengths.get(first, 0), count - lengths.get(first, 0)) for first, count in runs]
    return [(first, count) for first, count in left if count]
