"""What the adapters need of `stratad.client`, so that an adapter can be tried without a daemon."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ipc.messages import Captured, Restored, Welcome
from stratad.client import GroupRows
from stratad.pools import StagePool


class CaptureTicket(Protocol):
    """What the adapter and its callers need of `stratad.tickets.Ticket` for a capture."""

    def result(self, deadline_s: float | None = None) -> Captured:
        """Wait until the image is published."""
        ...

    def wait_source_free(self, deadline_s: float | None = None) -> None:
        """Wait until the rows may be written again."""
        ...

    def wait_rows_free(self, deadline_s: float) -> bool:
        """Wait until no worker can touch the rows; False when the time was up first."""
        ...


class RestoreTicket(Protocol):
    """What the adapter needs of `stratad.tickets.Ticket` for a restore."""

    def result(self, deadline_s: float | None = None) -> Restored:
        """Wait until the rows hold the tokens."""
        ...

    def wait_rows_free(self, deadline_s: float) -> bool:
        """Wait until no worker can touch the rows; False when the time was up first."""
        ...


class Found(Protocol):
    """What `lookup` found: the first `tokens` of the asked ones can be restored from the image of `conversation`."""

    @property
    def conversation(self) -> str:
        """Whose image it is."""
        ...

    @property
    def tokens(self) -> int:
        """Length of the common prefix."""
        ...


class ParkingEngine(Protocol):
    """What the adapter needs of a registered engine of `stratad.client`."""

    def capture(
        self,
        conversation: str,
        tokens: Sequence[int],
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        checkpoints: Sequence[tuple[int, int]] = (),
        deadline_s: float,
    ) -> CaptureTicket:
        """Start to capture rows, and the states that lie in the state slots of `checkpoints` (position, state slot)."""
        ...

    def restore(
        self,
        conversation: str,
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        tokens: int = -1,
        deadline_s: float,
    ) -> RestoreTicket:
        """Start to fill rows: exactly those of `tokens`, or as many of the first as all tokens (-1) need; the state at
        that position goes to state slot `slot`.
        """
        ...

    def take(
        self,
        conversation: str,
        rows: None,
        slot: int,
        *,
        rows_by_stage: Sequence[GroupRows],
        tokens: int = -1,
        deadline_s: float,
    ) -> RestoreTicket:
        """Like `restore`; the image is given up afterwards."""
        ...

    def lookup(self, tokens: Sequence[int], *, deadline_s: float | None = None) -> Found | None:
        """The longest published prefix that can be restored."""
        ...

    def unregister(self, *, deadline_s: float | None = None) -> None:
        """Have the daemon close the pools."""
        ...


class ParkingClient(Protocol):
    """What the adapter needs of `stratad.client.Client`."""

    @property
    def welcome(self) -> Welcome:
        """What the daemon said about itself."""
        ...

    def announce(self, namespace: str) -> int:
        """Say that memory is about to be allocated; back when that of dead engines of the namespace is free."""
        ...

    def register(
        self, *, engine: str, namespace: str, fingerprint: Mapping[str, str], stages: Sequence[StagePool]
    ) -> ParkingEngine:
        """Register an engine with its pools."""
        ...
