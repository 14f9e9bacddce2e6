"""The fault matrix's scenario: every operation once, and what must be there whenever the daemon dies meanwhile."""

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from ipc.messages import FAULT_OPS
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE
from stratad.bench.engine_wire import Line
from stratad.bench.line_process import EngineError
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_rig import CALL_S, PRIORS, SUBJECT_SLOT, TARGET_SLOT, Rig
from stratad.bench.matrix_wire import Do, Outcome, Registered, Tell, Told
from stratad.client import Client
from stratad.ctl.output import CommandError
from stratad.errors import StratadError

# A daemon that was hit ends at once; one that stops in order lets its workers end.
EXIT_S: Final = 20.0
_PUT: Final = "put"
_PART_BYTES: Final = 100_000
_EXCHANGE_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.01
_TRIES: Final = 3
_PENDING_S: Final = 60.0
AnswerT = TypeVar("AnswerT", bound=Line)


class Stopped(Exception):
    """The scenario cannot go on: the daemon is gone."""


class Scenario:
    """Every operation once. `certain` are the images that must be there whatever happens next (conversation to seed),
    `possible` those that may be: whoever asked for them, or asked to give them up, has no answer yet.
    """

    def __init__(self, rig: Rig) -> None:
        self.certain: Final = rig.images
        self.possible: Final[dict[str, int]] = {}
        self.put: bytes | None = None
        self.step = "start"
        self.pids = {"supervisor": rig.daemon.pid}
        self._rig = rig
        self._pending: Line | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is done, in order."""
        yield "connect", lambda: self._rig.connect(ready=False)
        yield "register", self._register
        for number in range(PRIORS):
            yield "capture", lambda name=f"prior-{number}": self._capture(name)  # type: ignore[misc]
        yield "restore", lambda: self._do(Do("restore", "prior-0", target=TARGET_SLOT, seed=self.certain["prior-0"]))
        yield "capture", lambda: self._capture("taken")
        yield "take", self._take
        yield "slots", self._slots
        yield "look up", self._look_up
        yield "put", self._put
        yield "get", self._get
        yield "look", self._look
        yield "fault", self._arm_and_disarm
        yield "cancel", self._cancel
        yield "drop", self._drop
        yield "hang", self._hang
        yield "restart", self._restart
        yield "declare", self._declare
        yield "abandon", self._abandon
        yield "unregister", lambda: self._tell(Tell("unregister"))
        yield "leave", self._leave

    def run(self, until: str = "") -> None:
        """Take all steps, or those before `until`.

        Raises:
            Stopped: the daemon died at one of them.
        """
        for step, act in self.steps():
            if step == until:
                return
            self.step = step
            try:
                act()
            except (CommandError, StratadError, EngineError) as exc:
                if self._rig.daemon.wait_ended(EXIT_S) is None:
                    raise EngineError(exc.code, f"step {step!r}: {exc}") from exc
                raise Stopped(step) from exc
            if self._rig.daemon.ended:
                raise Stopped(step)

    def end_pending(self, cell: Cell) -> None:
        """What the engine was asked when the daemon died must end now that there is a next one: a capture is asked
        again by the client itself, and may be published by now.
        """
        if self._pending is None:
            return
        order, self._pending = self._pending, None
        if not isinstance(order, Do):
            self._rig.engine.answer(Line, _PENDING_S)
            return
        outcome = self._rig.engine.answer(Outcome, _PENDING_S)
        cell.problems += outcome.problems
        cell.more["in_flight_ended"] = outcome.code or "done"
        if order.op in ("capture", "cancel") and not outcome.code:
            self.certain[order.conversation] = self.possible.pop(order.conversation)
        elif order.op == "take" and not outcome.code:
            self.possible.pop(order.conversation)

    def _ask(self, order: Line, expected: type[AnswerT]) -> AnswerT:
        """Give the engine an order, and look after the daemon while it is carried out.

        Raises:
            Stopped: the daemon died; the answer is still to come.
        """
        self._rig.engine.begin(order, CALL_S)
        return self._await(order, expected)

    def _await(self, order: Line | None, expected: type[AnswerT]) -> AnswerT:
        until_s = time.monotonic() + CALL_S
        while True:
            try:
                return self._rig.engine.answer(expected, _LOOK_S)
            except EngineError as exc:
                if exc.code != "deadline" or time.monotonic() > until_s:
                    raise
            if self._rig.daemon.ended:
                self._pending = order
                raise Stopped(self.step)

    def _restart(self) -> None:
        self._rig.client.restart_worker(self._rig.workers[-1])

    def _declare(self) -> None:
        """From here on the daemon may publish what was declared, whenever it believes its engine dead."""
        seed = self.possible["declared"] = self._rig.seed()
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        self._do(Do("declare", "declared", SUBJECT_SLOT, seed=seed))

    def _abandon(self) -> None:
        """An engine that has closed its lifeline lives on when the next one says hello."""
        former = self._rig.engine
        former.tell(Tell("abandon"))
        self._register()
        former.kill()

    def _leave(self) -> None:
        self._rig.client.close()
        self._rig.engine.quit()

    def _register(self) -> None:
        self._rig.begin_fresh_engine()
        self._await(Tell("register"), Registered)
        self.pids = self._rig.pids()

    def _answered(self, code: str, message: str = "", *expected: str) -> None:
        if code not in (expected or ("",)):
            raise StratadError(code or "internal", message or "unexpected answer")

    def _do(self, order: Do, *expected: str) -> None:
        outcome = self._ask(order, Outcome)
        for _ in range(_TRIES):
            if outcome.code != "worker_died":  # as one does in this scenario, at some time
                break
            outcome = self._ask(order, Outcome)
        if outcome.problems:
            raise EngineError("engine", "; ".join(outcome.problems))
        self._answered(outcome.code, outcome.message, *expected)

    def _tell(self, order: Tell, *expected: str) -> None:
        self._answered(self._ask(order, Told).code, "", *expected)

    def _capture(self, conversation: str) -> None:
        seed = self._rig.seed()
        self.possible[conversation] = seed
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        order = Do("capture", conversation, SUBJECT_SLOT, seed=seed)
        self._do(order)
        self.certain[conversation] = self.possible.pop(conversation)

    def _take(self) -> None:
        seed = self.possible["taken"] = self.certain.pop("taken")
        self._do(Do("take", "taken", target=TARGET_SLOT, seed=seed))
        del self.possible["taken"]

    def _slots(self) -> None:
        seed = self._rig.seed()
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        for op in ("slot_direct", "slot_to", "slot_from", "slot_to"):
            self._do(Do(op, slot=SUBJECT_SLOT, target=TARGET_SLOT, seed=seed))
        self._tell(Tell("slot_drop", SUBJECT_SLOT))

    def _look_up(self) -> None:
        self._tell(Tell("lookup", seed=self.certain["prior-0"]))
        self._tell(Tell("mark", SUBJECT_SLOT))
        self._do(Do("restore", "nobody", target=TARGET_SLOT), "unknown_conversation")

    def _put(self) -> None:
        rig = self._rig
        data = b"".join(number.to_bytes(4, "little") for number in range(_PART_BYTES // 4))
        self.put = b""  # it may be there from now on
        with rig.client.exchange(rig.devices[0], NAMESPACE, FINGERPRINT, _EXCHANGE_BYTES) as exchange:
            put = exchange.put(_PUT)
            put.add("part", data)
            put.commit()
        self.put = data

    def _get(self) -> None:
        if read_put(self._rig, self._rig.client) != self.put:
            raise EngineError("damaged", "the part that was got is not the one that was put")

    def _look(self) -> None:
        client = self._rig.client
        client.stats()
        client.memory()
        client.set_trace(on=True)
        client.pin(NAMESPACE, "prior-1")
        client.pin(NAMESPACE, "prior-1", pinned=False)
        client.show(NAMESPACE, client.list_images(NAMESPACE)[0].conversation)

    def _arm_and_disarm(self) -> None:
        client = self._rig.client
        client.disarm_fault(client.arm_fault(FAULT_OPS[0], 0, "slow", at=1000).fault)

    def _cancel(self) -> None:
        seed = self.possible["cancelled"] = self._rig.seed()
        self._rig.client.arm_fault("capture", 0, "slow")
        self._rig.engine.fill(SUBJECT_SLOT, seed)
        self._do(Do("cancel", "cancelled", SUBJECT_SLOT, seed=seed), "cancelled")
        del self.possible["cancelled"]

    def _drop(self) -> None:
        self._capture("dropped")
        self.possible["dropped"] = self.certain.pop("dropped")
        self._rig.client.drop(NAMESPACE, "dropped")
        del self.possible["dropped"]

    def _hang(self) -> None:
        seed = self.certain["prior-2"]
        order = Do("restore", "prior-2", target=TARGET_SLOT, seed=seed)
        self._rig.client.arm_fault("restore", 0, "hang", at=2)
        self._do(order, "worker_hung")
        self._do(order)  # it waits for the next process


def read_put(rig: Rig, client: Client) -> bytes:
    """The part of the image that was put, through an exchange of this client."""
    with (
        client.exchange(rig.devices[0], NAMESPACE, FINGERPRINT, _EXCHANGE_BYTES) as exchange,
        exchange.get(_PUT) as got,
    ):
        return bytes(got.read("part"))
