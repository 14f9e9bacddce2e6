"""An engine's standing with the daemon: on which connection it is registered, under which number, served by which
processes.

A registration outlives connections: on a new one the same stages are registered again, the marks are sent again, and
only then the calls that waited. Workers may be replaced on a living connection; the daemon says so before they get a
job.

A registration ends when no worker can have the stages mapped any more: the daemon said so, or its workers are gone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ipc.messages import Done, Mark, Register, Registered, Request, Unregister, WorkerProcess
from stratad._calls import Call
from stratad._proofs import WorkerProof
from stratad._pump import Pump
from stratad._stages import StageExport
from stratad.errors import Busy, DeadlineExceeded, Lost, PeerGone, ProtocolError, StratadError, UsageError

if TYPE_CHECKING:
    from stratad._connection import Connection

# Between two tries to register again where the daemon is not ready, or the probe met a write: twice as long each time.
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 2.0
# Marks that are sent again before a reply is waited for.
MARKS_AT_ONCE: Final = 256


class Session(NamedTuple):
    """One registration in one daemon: what was begun in it is unknown in any other."""

    start_id: bytes
    engine_id: int


class Marks:
    """The last mark of every slot that was marked. `turn` changes with each mark of a slot."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[str, int]] = {}

    def set(self, slot: int, mark: str | None) -> None:
        """Remember a mark; None forgets what there is."""
        turn = self.turn(slot) + 1
        self._marks[slot] = ("" if mark is None else mark, turn)

    def get(self, slot: int) -> str | None:
        """The last mark of a slot."""
        return self._marks.get(slot, ("", 0))[0] or None

    def turn(self, slot: int) -> int:
        """How often the slot was marked."""
        return self._marks.get(slot, ("", 0))[1]

    def all(self) -> list[tuple[int, str]]:
        """Every marked slot."""
        return [(slot, mark) for slot, (mark, _) in self._marks.items() if mark]


class Registration:
    """See the module. Every method is called under the pump's lock.

    Attributes:
        engine_id: the daemon's number of the engine; changes with every registration.
        workers: the processes that serve the stages, one a stage; after the end those that may still have them mapped.
        marks: what is sent again to the next daemon; what a clean slot holds is not.
        closed: nothing will be registered any more.
    """

    def __init__(
        self,
        pump: Pump,
        *,
        namespace: str,
        name: str,
        fingerprint: Mapping[str, str],
        exports: tuple[StageExport, ...],
        deadline_s: float,
        exchange: bool = False,
    ) -> None:
        """`deadline_s` is what a repeated registration may take; `exchange`: the one stage is an exchange."""
        self.namespace: Final = namespace
        self.name: Final = name
        self.fingerprint: Final = dict(fingerprint)
        self.exports: Final = exports
        self.engine_id = 0
        self.workers: tuple[WorkerProof, ...] = ()
        self.marks: Final = Marks()
        self.closed = False
        self._pump = pump
        self._deadline_s = deadline_s
        self._exchange = exchange
        self._link: Connection | None = None
        self._in_flight: Call | None = None
        self._retry_due = False
        self._retry_s = FIRST_RETRY_S
        self._ending: Call | None = None
        self._marks_left: list[tuple[int, str]] = []
        # Every proof that is open, former ones too as long as a ticket needs them.
        self._proofs: list[WorkerProof] = []
        self.on_first: Callable[[], None] = _nothing
        self.on_unmapped: Callable[[], None] = _nothing
        self.needed_proofs: Callable[[], set[WorkerProof]] = set

    @property
    def registered(self) -> bool:
        """Whether the engine is registered on the connection that is open now."""
        return self._link is not None and self._link is self._pump.link

    def check_open(self) -> None:
        """Refuse calls of an engine that was unregistered.

        Raises:
            UsageError: it was (code ``not_registered``).
        """
        if self.closed:
            what = "is closed" if self._exchange else "is no longer registered"
            raise UsageError("not_registered", f"{'exchange' if self._exchange else 'engine'} {self.name!r} {what}")

    @property
    def session(self) -> Session | None:
        """The registration on the connection that is open now, if there is one."""
        link = self._link
        return Session(link.welcome.start_id, self.engine_id) if link is not None and self.registered else None

    def check_session(self, session: Session) -> None:
        """Refuse to send what was begun in another session: its numbers mean nothing here, or something else.

        Raises:
            Lost: it is over.
        """
        if self.session != session:
            raise Lost("lost", "what was put or got ended with the connection to its daemon: begin again")

    def ready_on(self, link: "Connection") -> bool:
        """Whether calls may be sent on `link`; if not, the registration is on its way."""
        if self._link is link:
            return not self._marks_left  # what is sent now must not overtake them: a slot may be poisoned
        self._register_again()
        return False

    def workers_changed(self, workers: Sequence[WorkerProcess]) -> bool:
        """The daemon started workers again, and tells so before they get any job; False: these cannot be ours."""
        by_stage = {process.stage: process for process in workers}
        link = self._link
        if link is None or sorted(by_stage) != list(range(len(self.exports))):
            return link is None
        self._know(by_stage, link)
        return True

    def link_opened(self) -> None:
        """There is a new connection."""
        self._retry_s = FIRST_RETRY_S
        self._retry_due = False  # what an earlier daemon had us wait for is no reason to keep this one waiting
        if self._in_flight is None or self._in_flight.name != "register":  # the first one is repeated by the pump
            self._register_again()

    def first_call(self, until_s: float) -> Call:
        """The first registration; to be submitted by the caller."""
        self._in_flight = self._make_call("register", until_s, retry=True)
        return self._in_flight

    def close(self) -> None:
        """Register no more. The daemon that has the stages mapped keeps them so until `unregister`."""
        self.closed = True

    def unregister(self, until_s: float) -> Call | None:
        """Register no more, and ask the daemon, where one knows us, to unmap the stages; returns that request."""
        self.closed = True
        if self._ending is None and self.registered:
            return self._send_unregister(self.engine_id, until_s)
        return self._ending

    @property
    def ending(self) -> Call | None:
        """The call whose final reply decides whether the stages are mapped, if one is in flight."""
        if self._ending is None and self._in_flight is not None and self._in_flight.was_sent:
            return self._in_flight
        return self._ending

    def mapped_on(self, stage: int) -> bool:
        """Whether a worker may still have the memory of a stage mapped."""
        return self.ending is not None or (bool(self.workers) and not self.workers[stage].gone())

    @property
    def mapped(self) -> bool:
        """Whether a worker may still have the memory of any stage mapped."""
        return any(self.mapped_on(stage) for stage in range(len(self.exports)))

    def prune_proofs(self) -> None:
        """Close the pidfds that nobody needs any more."""
        if self.closed and not self.mapped:
            self.workers = ()
        needed = self.needed_proofs().union(self.workers)
        for proof in self._proofs:
            if proof not in needed:
                proof.close()
        self._proofs = [proof for proof in self._proofs if proof in needed]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _register_again(self) -> None:
        if not self.closed and self._in_flight is None and not self._retry_due:
            self._in_flight = self._make_call("register again", time.monotonic() + self._deadline_s, retry=False)
            self._pump.submit(self._in_flight)

    def _make_call(self, name: str, until_s: float, *, retry: bool) -> Call:
        def build(link: "Connection", seq: int) -> Request:
            stages = tuple(export.wire(link, index) for index, export in enumerate(self.exports))
            left_s = call.remaining_s()
            return Register(seq, self.namespace, self.name, self.fingerprint, stages, left_s, self._exchange)

        call = Call(name, build, Registered, until_s, retry=retry, on_final=self._registered, mend=self._mend)
        return call

    def _mend(self, error: StratadError) -> bool:
        """Whether stages that were refused for their events can be registered without."""
        if self.closed or error.code != "event_unshareable":
            return False
        # One daemon's workers are one user's: what one of them cannot open, none can.
        with_event = [export for export in self.exports if export.ordered == "event"]
        try:
            for export in with_event:
                export.order_by_host()
        except StratadError:
            return False
        return bool(with_event)

    def _registered(self, call: Call) -> None:
        """The final reply of a registration, first or repeated."""
        if self._in_flight is call:
            self._in_flight = None
        link = self._pump.link
        if call.error is not None:
            if call.name != "register" and not call.lost:
                self._failed(call.error)
            self._perhaps_unmapped()
            return
        reply = cast("Registered", call.reply)
        assert link is not None
        by_stage = {process.stage: process for process in reply.workers}
        if sorted(by_stage) != list(range(len(self.exports))):
            call.error = ProtocolError("bad_frame", f"the daemon named workers for stages {sorted(by_stage)}")
            self._pump.fail(self, call.error)
            return
        first = self._link is None and not self._proofs
        self.engine_id = reply.engine_id
        self._know(by_stage, link)
        if call.abandoned or self.closed:  # nobody wants it any more
            self._send_unregister(reply.engine_id, time.monotonic())
            return
        self._link = link
        self._retry_s = FIRST_RETRY_S
        if first:
            self.on_first()
        self._marks_left = self.marks.all()
        self._send_marks(link)

    def _send_marks(self, link: "Connection") -> None:
        """Send some of the marks that the daemon of `link` has not been sent; the reply to the last of them brings the
        next, and after all of them goes what waits. At once they would be more than the queues of both sides hold.
        """
        if self._pump.link is not link or self._link is not link:
            return
        batch, self._marks_left = self._marks_left[:MARKS_AT_ONCE], self._marks_left[MARKS_AT_ONCE:]
        for slot, mark in batch[:-1]:
            self._send_now(_mark(self.engine_id, slot, mark))
        for slot, mark in batch[-1:]:
            last = _mark(self.engine_id, slot, mark)
            if self._marks_left:
                last.on_final = lambda _: self._send_marks(link)
            self._send_now(last)
        if not self._marks_left:
            self._pump.flush(self)

    def _know(self, by_stage: Mapping[int, WorkerProcess], link: "Connection") -> None:
        known = {proof.process: proof for proof in self.workers}
        wanted = [by_stage[stage] for stage in range(len(self.exports))]
        self.workers = tuple(
            known.get(process) or WorkerProof.open(process, same_pids=link.same_pids) for process in wanted
        )
        self._proofs.extend(proof for proof in self.workers if proof.process not in known)
        self.prune_proofs()

    def _failed(self, error: StratadError) -> None:
        if isinstance(error, Busy | PeerGone | DeadlineExceeded) or error.code == "probe_failed":
            # A daemon that has just started or waits for a worker of the former one to be gone, or an engine that
            # writes while both sides read the probe.
            self._try_later()
        else:
            self._pump.fail(self, error)

    def _try_later(self) -> None:
        self._retry_due = True
        self._pump.call_at(time.monotonic() + self._retry_s, self._retry)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _retry(self) -> None:
        self._retry_due = False
        if self._pump.link is not None and not self.registered and self._pump.has_queued(self):
            self._register_again()

    def _send_unregister(self, engine_id: int, until_s: float) -> Call:
        call = Call("unregister", lambda _, seq: Unregister(seq, engine_id), Done, until_s, on_final=self._unregistered)
        self._ending = call
        try:
            self._send_now(call)
        except StratadError:
            self._ending = None
            raise
        return call

    def _send_now(self, call: Call) -> None:
        """Send a call that names our engine on the connection that is open, or never: in the next daemon the number is
        somebody else's.
        """
        self._pump.submit(call)
        self._pump.end(call, Lost("lost", f"{call.name}: the daemon has gone"))

    def _unregistered(self, call: Call) -> None:
        """The daemon has unmapped the stages, or has gone: then the end of its workers tells."""
        self._ending = None
        if call.error is None:
            self._link = None
            self.workers = ()
        self._perhaps_unmapped()

    def _perhaps_unmapped(self) -> None:
        if self.closed:
            self.on_unmapped()


def _mark(engine_id: int, slot: int, mark: str) -> Call:
    return Call("mark again", lambda _, seq: Mark(seq, engine_id, slot, mark), Done, time.monotonic())


def _nothing() -> None:
    """Until the engine says otherwise."""
