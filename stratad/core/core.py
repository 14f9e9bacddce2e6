"""The core: events and a time in, effects out.

Every public method is one event. It may change the state and returns the effects to perform, in order. Nothing here
waits, and a request that cannot be served becomes a coded reply at one border, `Core.request`.
"""

from collections.abc import Mapping, Sequence

from ipc.messages import (
    BootFailed,
    Census,
    EventAwaited,
    Failed,
    FaultStruck,
    GroupRestored,
    Hello,
    JobDone,
    JobFailed,
    LaneMoving,
    PoolClosed,
    PoolFailed,
    PoolOpened,
    Register,
    Report,
    Request,
    ShuttleFailed,
    ShuttleReady,
    SourceFree,
    StopWorker,
    WorkerHello,
    WorkerReady,
)
from stratad.core import (
    adoption,
    arenas,
    deadlines,
    ends,
    faults,
    invariants,
    jobs,
    journaling,
    lives,
    losses,
    memory,
    queue,
    registration,
    rescue,
    service,
    trace,
)
from stratad.core.arena import Arena
from stratad.core.catalog import Catalog
from stratad.core.effects import DropClient, Effect, KillWorker, SendTo
from stratad.core.failures import Refusal
from stratad.core.memory_tracks import Reading, Role, Target
from stratad.core.records import Record
from stratad.core.state import ALIVE, GONE, RETRIED, ClientRecord, Instant, Settings, State, Worker, WorkerState

# How long a lifeline may stay without its hello.
HELLO_S = 10.0
# Clients beyond the limit get a log line together: nobody else's disk is theirs to fill.
SURPLUS_TOLD_EVERY_S = 10.0
# Image ids of one start differ in these bits.
ID_BITS = 20


class Core:
    """The daemon's state machine. `devices` maps worker names to device names (``cpu:K`` or a GPU's UUID)."""

    def __init__(
        self, settings: Settings, devices: Mapping[str, str], at: Instant, legacy: adoption.Legacy | None = None
    ) -> None:
        self.state = State(
            settings,
            Catalog(
                settings.budget_bytes,
                settings.budget_images,
                _first_id(settings, legacy),
                sharing=settings.reuse != "off",
            ),
        )
        self.state.started_s = self.state.now_s = at.now_s
        self.state.now_unix_s = at.now_unix_s
        self.state.trace.switch(at.now_s, on=settings.trace)
        for name, device in devices.items():
            arena = Arena()
            self.state.catalog.arenas[name] = arena
            self.state.workers[name] = Worker(name, device, arena, next_start_s=at.now_s)
        if legacy is not None:
            adoption.adopt(self.state, legacy)
        self._adoption_log = self._end()
        self.records = adoption.snapshot(self.state, legacy)
        self.state.wake_by(at.now_s)

    # --- start --------------------------------------------------------------------------------------------------------

    def start(self, at: Instant) -> list[Effect]:
        """The first event: what the earlier daemon left is taken over."""
        state = self._begin(at)
        state.out.extend(self._adoption_log)
        self._adoption_log = []
        self.records = ()
        adoption.begin(state)
        return self._end()

    def former_gone(self, name: str, at: Instant) -> list[Effect]:
        """Proof that the process which served a worker's device for an earlier daemon is gone."""
        state = self._begin(at)
        adoption.former_gone(state, state.workers[name])
        return self._end()

    def journaled(self, serial: int, error: str, at: Instant) -> list[Effect]:
        """An `Append` was carried out; `error` says why not."""
        state = self._begin(at)
        journaling.answered(state, serial, error)
        if state.closing:
            registration.remove_idle(state)
        queue.pump(state)
        return self._end()

    def all_records(self) -> tuple[Record, ...]:
        """What a journal must hold that is written anew."""
        return adoption.all_records(self.state)

    @property
    def segments(self) -> frozenset[str]:
        """The names of all segments that the arenas hold."""
        return frozenset(s for worker in self.state.workers.values() for s in worker.segments.values())

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, at: Instant) -> list[Effect]:
        """Time passed: start workers that are due, end what ran out of time."""
        state = self._begin(at)
        stuck = state.counters.get("workers_stuck")
        lives.tick(state)
        for worker in state.workers.values():
            arenas.try_again(state, worker)
        adoption.expire(state)
        journaling.try_again(state)
        jobs.check_deadlines(state)
        if stuck != state.counters.get("workers_stuck"):
            queue.pump(state)  # who waits for that worker is told
        queue.expire(state)
        registration.expire(state)
        registration.stop_copies(state)
        rescue.expire(state)
        registration.answer_announced(state)
        service.answer_stats(state, late=True)
        memory.tick(state)
        if state.stopping:
            service.answer_memory(state)  # the round in hand was given up
        for client in state.clients.values():
            if not client.greeted and client.hello_by_s <= state.now_s:
                state.out.append(DropClient(client.client))
        state.due_s = deadlines.exact_due_s(state)
        return self._end()

    def stood_still(self, lost_s: float, at: Instant) -> list[Effect]:
        """The daemon itself did nothing for so long: that is not held against its workers, whose answers may lie
        unread, and who may have been stopped with it; nor is it against any process whose end may not have been seen.
        """
        state = self._begin(at)
        state.count("stood_still")
        for worker in state.workers.values():
            lives.stood_still(worker, lost_s)
            worker.moved_s = [moved_s + lost_s for moved_s in worker.moved_s]
            for op, stage in worker.jobs.values():
                op.stages[stage].deadline_s += lost_s
        rescue.stood_still(state, lost_s)
        return self._end()

    @property
    def due_s(self) -> float:
        """When `tick` is due (monotonic; infinite: nothing waits for time). It may be early, never late."""
        return self.state.due_s

    def sampled(self, found: Sequence[tuple[Target, Reading | None]], at: Instant) -> list[Effect]:
        """What `SampleMemory` asked for was read; None: the process is gone or hidden."""
        state = self._begin(at)
        memory.sampled(state, found)
        if not state.memory.pending:
            service.answer_memory(state)
        return self._end()

    # --- clients ------------------------------------------------------------------------------------------------------

    def client_connected(self, client: int, pid: int, uid: int, start_ticks: int, at: Instant) -> list[Effect]:
        """A lifeline was opened; the kernel vouches for pid and uid."""
        state = self._begin(at)
        record = ClientRecord(client, pid, uid, start_ticks, hello_by_s=at.now_s + HELLO_S)
        state.wake_by(record.hello_by_s)
        if len(state.clients) >= state.settings.max_clients:
            _tell_surplus(state, client, pid)
            if len(state.clients) >= 2 * state.settings.max_clients:
                state.out.append(DropClient(client))  # not even an answer: they come faster than they can be told
                return self._end()
            record.surplus = True
        state.clients[client] = record
        return self._end()

    def client_gone(self, client: int, at: Instant) -> list[Effect]:
        """A lifeline ended: the client's engines are closed, its images stay."""
        state = self._begin(at)
        record = state.clients.pop(client, None)
        if record is not None:
            state.stats_requests = [r for r in state.stats_requests if r.client != client]
            state.memory.asked = [entry for entry in state.memory.asked if entry[0] != client]
            state.announced = [entry for entry in state.announced if entry.client != client]
            for engine_id in tuple(record.engines):
                rescue.client_gone(state, record, state.engines[engine_id])
                registration.orphan(state, state.engines[engine_id])
            queue.pump(state)
        return self._end()

    def process_ended(self, client: int, at: Instant, *, proven: bool = True) -> list[Effect]:
        """The process of a client that has gone is proven gone (`AwaitEnd`); or it cannot be watched."""
        state = self._begin(at)
        rescue.process_ended(state, client, proven=proven)
        return self._end()

    def request(self, client: int, request: Request, at: Instant) -> list[Effect]:
        """A client asks. Exactly one final reply follows, now or later."""
        state = self._begin(at)
        record = state.clients.get(client)
        if record is None:
            return self._end()
        try:
            if not record.greeted and not isinstance(request, Hello):
                raise Refusal("hello_first", "the first message of a connection must be 'hello'")
            if request.seq in record.seqs:
                raise Refusal("bad_request", f"request {request.seq} is still in flight")
            service.serve(state, record, request)
        except Refusal as refusal:
            state.count("refusals")
            if isinstance(request, Register):
                registration.forget_descriptors(state, client, request.stages)
            state.reply(
                client,
                Failed(
                    request.seq,
                    refusal.code,
                    refusal.message,
                    refusal.stage,
                    (),
                    state.settings.start_id,
                    refusal.detail,
                ),
            )
        return self._end()

    # --- workers ------------------------------------------------------------------------------------------------------

    def worker_forked(self, name: str, generation: int, pid: int, start_ticks: int, at: Instant) -> list[Effect]:
        """A worker's process exists."""
        state = self._begin(at)
        worker = state.workers[name]
        if worker.generation == generation:
            worker.pid, worker.start_ticks = pid, start_ticks
            journaling.record_worker(state, worker)
            unwanted = worker.state in (WorkerState.KILLED, WorkerState.STUCK) or state.stopping
            if unwanted:  # it was not there yet when its end was wanted
                state.out.append(KillWorker(name, generation, "its end was asked for before it was forked"))
        return self._end()

    def report(self, name: str, generation: int, report: Report, at: Instant) -> list[Effect]:
        """A worker's process of the given generation says something."""
        state = self._begin(at)
        worker = state.workers.get(name)
        if worker is None or worker.generation != generation or worker.state in GONE:
            state.log("warning", "report of a worker that is no more", worker=name, generation=generation)
            return self._end()
        match report:
            case JobDone():
                jobs.job_done(state, worker, report)
            case EventAwaited() | GroupRestored() | LaneMoving() | SourceFree():
                jobs.moves_on(state, worker, report)
                return self._end()
            case JobFailed():
                jobs.job_failed(state, worker, report)
            case WorkerReady():
                self._worker_ready(worker, report)
            case BootFailed():
                lives.boot_failed(state, worker, report)
            case ShuttleReady():
                arenas.shuttle_ready(state, worker, report)
            case ShuttleFailed():
                losses.shuttle_failed(state, worker, report)
            case PoolOpened():
                registration.order_answered(state, worker)
                registration.pool_opened(state, report.pool)
            case PoolFailed():
                registration.order_answered(state, worker)
                registration.pool_failed(state, report)
            case Census():
                worker.counted = max(worker.counted, report.census)
                if report.census == worker.census:
                    worker.resources = report.resources
                    for request in state.stats_requests:
                        request.waiting.discard(worker.name)
                    service.answer_stats(state, late=False)
                return self._end()
            case FaultStruck():
                faults.struck(state, worker, report)
                return self._end()
            case PoolClosed():
                registration.order_answered(state, worker)
                registration.pool_closed(state, report.pool)
            case WorkerHello():
                return self._end()
        if state.closing:
            registration.remove_idle(state)
        if state.waiting or state.short:
            queue.pump(state)
        return self._end()

    def _worker_ready(self, worker: Worker, report: WorkerReady) -> None:
        state = self.state
        if worker.state is not WorkerState.STARTING:
            return
        worker.state = WorkerState.READY
        worker.ready = report
        worker.detail = ""
        worker.refusals = worker.missing_bytes = 0
        arenas.rest_from_growing(state, worker)
        state.log(
            "info",
            "worker ready",
            worker=worker.name,
            pid=worker.pid,
            generation=worker.generation,
            start_s=round(report.start_s, 3),
        )
        memory.worker_ready(state, worker)
        trace.worker_ready(state, worker)
        arenas.tend(state, worker, self._needed_shuttles(worker))
        registration.worker_ready(state, worker)

    def _needed_shuttles(self, worker: Worker) -> set[int] | None:
        """Shuttles of this worker that waiting restores read: they are attached first."""
        needed = {
            extent.shuttle
            for op in self.state.waiting.values()
            if op.image is not None
            for run in op.stages
            if run.worker == worker.name
            for place in op.places(run)
            for extent in place.extents
        }
        return needed or None

    def worker_hung_up(self, name: str, generation: int, at: Instant) -> list[Effect]:
        """A worker's lifeline ended."""
        state = self._begin(at)
        worker = state.workers[name]
        if worker.generation == generation:
            lives.hung_up(state, worker)
        return self._end()

    def worker_unfit(self, name: str, generation: int, reason: str, at: Instant) -> list[Effect]:
        """A worker's process takes no commands or says what cannot be: it must go."""
        state = self._begin(at)
        worker = state.workers[name]
        if worker.generation == generation and worker.state in ALIVE:
            arenas.kill(state, worker, "worker_died", reason)
        return self._end()

    def worker_gone(
        self, name: str, generation: int, reason: str, at: Instant, *, under_way: tuple[int, ...] | None = None
    ) -> list[Effect]:
        """Proof that a worker's process is gone. Its jobs fail, its extents and rows are free, it is started again.
        `under_way` are the jobs that it was copying; None: any may have been.
        """
        state = self._begin(at)
        worker = state.workers[name]
        if worker.generation != generation or worker.state in GONE:
            return self._end()
        code = worker.kill_code or "worker_died"
        worker.kill_code = ""
        worker.life.under_way = under_way
        lives.ended(state, worker, reason)
        worker.mapped.clear()
        worker.locked.clear()
        worker.ready = None
        worker.resources = {}
        worker.counted = worker.census
        memory.forget(state, (Role.WORKER, name))
        faults.worker_gone(state, worker)
        jobs.worker_gone(state, worker, code, f"worker {name} (pid {worker.pid}): {reason}")
        worker.pid = worker.start_ticks = 0
        worker.recorded = False
        registration.worker_lost(state, worker)
        if worker.state is WorkerState.FAILED:
            registration.worker_given_up(state, worker)
        for request in state.stats_requests:
            request.waiting.discard(name)
        service.answer_stats(state, late=False)
        queue.pump(state)
        return self._end()

    # --- stop ---------------------------------------------------------------------------------------------------------

    def stop(self, at: Instant) -> list[Effect]:
        """Begin to stop: nothing new is taken in, what is being copied ends, then the workers exit."""
        state = self._begin(at)
        if not state.stopping:
            state.stopping = True
            rescue.stop(state)
            adoption.stop(state)
            registration.stop(state)
            for op in list(state.waiting.values()):
                ends.fail(state, op, "stopping", "the daemon is stopping")
            queue.pump(state)
            for worker in state.workers.values():
                if worker.state in (WorkerState.READY, WorkerState.STARTING):
                    state.out.append(SendTo(worker.name, StopWorker()))
                elif worker.state in (*RETRIED, WorkerState.AWAITING):
                    worker.state = WorkerState.STOPPED
        return self._end()

    def kill_all(self, reason: str, at: Instant) -> list[Effect]:
        """The time for a graceful stop is over."""
        state = self._begin(at)
        for worker in state.workers.values():
            if worker.state in (WorkerState.READY, WorkerState.STARTING):
                arenas.kill(state, worker, "worker_died", reason)
        return self._end()

    @property
    def stopped(self) -> bool:
        """Whether every worker's process is gone, or stuck: that one is not waited for."""
        if not self.state.stopping:
            return False
        ended = {*GONE, WorkerState.STUCK}
        return all(worker.state in ended for worker in self.state.workers.values())

    @property
    def stuck(self) -> frozenset[str]:
        """Workers whose process outlives SIGKILL."""
        return frozenset(w.name for w in self.state.workers.values() if w.state is WorkerState.STUCK)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, at: Instant) -> State:
        state = self.state
        state.now_s, state.now_unix_s = at
        state.out = []
        return state

    def _end(self) -> list[Effect]:
        state = self.state
        # Whatever ended an operation: its engine may have been closed, and others may have waited for its end.
        if state.closing:
            registration.remove_idle(state)
        while state.let_go and (state.waiting or state.short):
            queue.pump(state)
            registration.remove_idle(state)
        state.let_go = False
        if state.resets:
            lives.finish_resets(state)
        out, state.out = state.out, []
        return out

    def validate(self) -> None:
        """Check every invariant of the core by a full recount.

        Raises:
            AssertionError: our bug; the text says what is out of step.
        """
        invariants.check(self.state)


def _first_id(settings: Settings, legacy: adoption.Legacy | None) -> int:
    """Where this daemon's image ids begin. One that somebody kept from an earlier daemon must name the same image or
    none, so each start begins elsewhere, and not where adopted ones lie.
    """
    begin = int.from_bytes(settings.start_id[:5], "little")
    taken = {image_id >> ID_BITS for image_id in legacy.journal.images} if legacy is not None else set[int]()
    while begin in taken:
        begin += 1
    return (begin << ID_BITS) + 1


def _tell_surplus(state: State, client: int, pid: int) -> None:
    """Log that there are too many clients, a line a while."""
    state.surplus_count += 1
    if state.now_s - state.surplus_told_s < SURPLUS_TOLD_EVERY_S:
        return
    limit, count = state.settings.max_clients, state.surplus_count
    state.log("warning", "too many clients", client=client, pid=pid, limit=limit, count=count)
    state.surplus_count, state.surplus_told_s = 0, state.now_s
