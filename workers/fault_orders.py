"""Which copies fail on order: orders given at birth, and faults that are armed later.

Both are the same thing, an `Order` that counts the copies it concerns. One given at birth (`WorkerSpec.faults`)
concerns a lane, ``capture.copy_error=3``, or each lane by itself; an armed one concerns an operation and a stage, and
strikes once. ``3`` is the third copy, ``3+`` the third and all later ones, ``3%`` every third. A copy is one slice.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from workers.device import LaneKind

# What strikes a copy, in the order in which it is looked for, and what else can be ordered (see `workers.faulty`).
COPY_FAULTS: Final = (
    "slow_copy",
    "copy_error",
    "copy_exception",
    "copy_oom",
    "copy_sticky",
    "copy_stall",
    "copy_kill",
    "copy_exit",
    "flip_source",
    "flip_shuttle",
    "drain_error",
)
OTHER_FAULTS: Final = (
    "event_stuck",
    "shuttle_error",
    "shuttle_kill",
    "shuttle_stall",
    "pool_close_stall",
    "pool_error",
    "boot_error",
    "boot_oom",
    "boot_stall",
    "leak_bytes",
    "slow_copy_s",
    "slow_pool_s",
)
RESTORING: Final = frozenset({"restore", "take", "slot_from", "get_part"})
_KINDS: Final = {
    "error": "copy_error",
    "exception": "copy_exception",
    "oom": "copy_oom",
    "kill": "copy_kill",
    "hang": "copy_stall",
    "slow": "slow_copy",
}


class Order:
    """A fault of copies and when it strikes. `number` names an armed one (0: ordered at birth).

    `begun` and `done` count the copies that it concerns; a lane that gives a job up forgets what it had only begun.
    """

    __slots__ = ("at", "begun", "done", "fault", "form", "lane", "number", "op", "stage")

    def __init__(
        self,
        fault: str,
        at: int,
        *,
        lane: LaneKind,
        form: str = "",
        number: int = 0,
        op: str = "",
        stage: int = -1,
    ) -> None:
        self.fault = fault
        self.at = at
        self.lane = lane
        self.form = form
        self.number = number
        self.op = op
        self.stage = stage
        self.begun = 0
        self.done = 0

    def concerns(self, lane: LaneKind, op: str, stage: int) -> bool:
        """Whether it counts a copy of this lane."""
        return self.lane is lane and (not self.op or (self.op == op and self.stage == stage))

    def strikes(self, copy: int) -> bool:
        """Whether it strikes this copy of those that it concerns."""
        if self.form == "%":
            return copy % self.at == 0
        return copy >= self.at if self.form == "+" else copy == self.at


class Hit(NamedTuple):
    """A copy's number in the count of one order."""

    order: Order
    copy: int


class FaultBook:
    """The orders of one device. Lanes ask and count on their threads, the loop arms and disarms on its own.

    Raises:
        ValueError: an unknown fault, or no number where one must be.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        known = {*COPY_FAULTS, *OTHER_FAULTS}
        unknown = {name.rpartition(".")[2] for name in given} - known
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}, known are {sorted(known)}")
        self._given = dict(given)
        self._orders: list[Order] = []
        self._changing = threading.Lock()  # who walks the list needs none: it is never changed in place
        self.on_strike: Callable[[int], None] | None = None
        for name, when in given.items():
            prefix, _, fault = name.rpartition(".")
            if fault in COPY_FAULTS:
                form = when[-1:] if when.endswith(("+", "%")) else ""
                at = int(when.removesuffix(form))
                lanes = [lane for lane in LaneKind if prefix in ("", lane.value)]
                self._orders += [Order(fault, at, lane=lane, form=form) for lane in lanes]

    def setting(self, fault: str, lane: LaneKind | None = None) -> str | None:
        """What was ordered of a fault that strikes no single copy."""
        own = self._given.get(f"{lane.value}.{fault}") if lane is not None else None
        return own if own is not None else self._given.get(fault)

    def arm(self, number: int, op: str, stage: int, kind: str, at: int) -> None:
        """Have copy `at` from now of an operation and stage fail."""
        lane = LaneKind.RESTORE if op in RESTORING else LaneKind.CAPTURE
        corrupt = "flip_shuttle" if lane is LaneKind.RESTORE else "flip_source"
        fault = _KINDS.get(kind, corrupt)
        order = Order(fault, at, lane=lane, number=number, op=op, stage=stage)
        with self._changing:
            self._orders = [*self._orders, order]

    def disarm(self, number: int) -> None:
        """Forget an armed fault; one that has struck is forgotten already."""
        with self._changing:
            self._orders = [order for order in self._orders if order.number != number]

    def begin(self, lane: LaneKind, op: str, stage: int) -> tuple[Hit, ...]:
        """A copy begins; which orders count it, and as which."""
        hits: list[Hit] = []
        for order in self._orders:
            if order.concerns(lane, op, stage):
                order.begun += 1
                hits.append(Hit(order, order.begun))
        return tuple(hits)

    def settle(self, lane: LaneKind) -> None:
        """Nothing of the lane is under way any more: what was begun and never done is begun again."""
        for order in self._orders:
            if order.lane is lane:
                order.begun = order.done

    def struck(self, order: Order) -> None:
        """The order strikes: an armed one is over, and whoever armed it is told."""
        if order.number:
            self.disarm(order.number)
            if self.on_strike is not None:
                self.on_strike(order.number)

    def drain_fails(self, lane: LaneKind) -> bool:
        """Whether the lane's copies cannot be waited for after those that it has done."""
        return any(o.fault == "drain_error" and o.lane is lane and o.strikes(o.done) for o in self._orders)
