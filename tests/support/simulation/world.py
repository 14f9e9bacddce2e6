"""Everything around the core: processes, their memory, the connections between them; and the effects carried out."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from ipc.messages import CaptureJob, CopyJob, DigestJob, Failed, Progress, Reply, RestoreJob
from shm.header import segment_name
from stratad.core.adoption import Legacy
from stratad.core.core import Core
from stratad.core.effects import (
    Append,
    AwaitEnd,
    CloseDescriptor,
    DropClient,
    Effect,
    ForwardDescriptor,
    KillFormer,
    KillWorker,
    LogLine,
    ReplyTo,
    SampleMemory,
    SendTo,
    SpawnWorker,
    StopAwaiting,
    UnlinkSegment,
    WatchFormer,
)
from stratad.core.memory_tracks import Reading, Target
from stratad.core.state import Instant, Settings
from tests.support.simulation import succession
from tests.support.simulation.client import SimClient
from tests.support.simulation.content import InvariantViolated, Pool, Segment, check
from tests.support.simulation.engine import EXCHANGE, PLAIN, STATEFUL, SimEngine
from tests.support.simulation.guard import Guard
from tests.support.simulation.image_watch import Cause
from tests.support.simulation.journal import SimJournal
from tests.support.simulation.tally import Tally
from tests.support.simulation.worker import SimWorker

MIB: Final = 1 << 20
FIRST_PID: Final = 1000


class CoreCrashed(Exception):
    """The core raised something: a bug, but no invariant's finding."""


class SupervisorDied(Exception):
    """The daemon's process is no more; what it was about to do is not done."""


@dataclass(slots=True, eq=False)
class World:
    """One history. `processes` are all workers' processes that are not gone, also those of a daemon that is."""

    rng: random.Random
    tally: Tally
    story: Callable[[str], None] | None = None
    now_s: float = 100.0
    clock_s: float = 1e9  # what the wall clock is ahead of the monotonic one
    devices: list[str] = field(default_factory=list)
    shared: dict[str, Segment] = field(default_factory=dict)
    processes: list[SimWorker] = field(default_factory=list)
    current: dict[str, SimWorker] = field(default_factory=dict)  # whom the supervisor talks to, by worker
    orders: deque[tuple[str, int]] = field(default_factory=deque)  # workers to be forked
    doomed_orders: set[tuple[str, int]] = field(default_factory=set)  # to be killed as soon as they are
    exits: deque[SimWorker] = field(default_factory=deque)  # ends that the supervisor has not noticed
    clients: list[SimClient] = field(default_factory=list)
    by_number: dict[int, SimClient] = field(default_factory=dict)
    next_client: int = 0
    next_pid: int = FIRST_PID
    events: int = 0
    step_number: int = 0
    recount_every: int = 1
    generations: dict[str, int] = field(default_factory=dict)
    conversations: set[str] = field(default_factory=set)
    journal: SimJournal = field(default_factory=SimJournal)
    formers: dict[str, SimWorker] = field(default_factory=dict)  # of an earlier daemon, whose end is waited for
    die_after: int = -1  # effects, until the daemon is killed; -1: it is not
    unprovable: set[int] = field(default_factory=set)  # pids of processes whose end no later daemon can prove
    awaited: dict[int, int] = field(default_factory=dict)  # pids of engines whose end is asked for, by client
    dead: set[int] = field(default_factory=set)  # pids of engines that are no more
    lost: set[tuple[str, int]] = field(default_factory=set)  # segments that somebody removed, by worker and number
    starting: bool = True  # it has not been told the time yet
    settings: Settings = field(init=False)
    core: Core = field(init=False)
    guard: Guard = field(init=False)
    _later: deque[Callable[[], None]] = field(default_factory=deque)

    @classmethod
    def make(cls, seed: int, tally: Tally, story: Callable[[str], None] | None = None) -> "World":
        """The world of a seed, with a daemon that has just been started."""
        rng = random.Random(seed)
        world = cls(rng, tally, story)
        world.guard = Guard(world)
        world.devices = [f"cpu:{n}" for n in range(rng.choice((2, 2, 3)))]
        build = STATEFUL if rng.random() < 0.3 else PLAIN
        for number in range(rng.choice((1, 2, 2))):
            engines = [SimEngine.make(world.devices, build, "e1" if rng.random() < 0.9 else "e2")]
            if rng.random() < 0.35:
                engines.append(SimEngine.make([rng.choice(world.devices)], EXCHANGE, "e1", exchange=True))
            world.clients.append(SimClient(f"engine {number}", 4000 + number, rng, engines, tally.counts))
        world.recount_every = rng.choice((1, 12, 12, 12, 12))
        world.settings = succession.small_settings(rng)
        world.core = world.new_core()
        return world

    def start(self) -> None:
        """The first two events of every daemon."""
        self.starting = True
        self.event(Cause("start"), lambda: self.core.start(self.at))
        self.event(Cause("tick"), lambda: self.core.tick(self.at))

    def new_core(self, legacy: Legacy | None = None) -> Core:
        """A daemon that has just been started: its first event is due."""
        self.settings = replace(self.settings, start_id=self.rng.randbytes(16))
        return Core(self.settings, {device: device for device in self.devices}, self.at, legacy)

    @property
    def at(self) -> Instant:
        """Now."""
        return Instant(self.now_s, self.clock_s + self.now_s)

    # --- events -------------------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """A line of the story."""
        if self.story is not None:
            self.story(f"{self.step_number:5d} {self.now_s:9.3f}  {text}")

    def event(self, cause: Cause, call: Callable[[], list[Effect]]) -> None:
        """Let the core have an event, do what it says, and check everything."""
        self.events += 1
        self.tally.event(cause.name)
        cause.running = tuple(self.core.state.ops.values())
        self.guard.images.cause = cause
        if self.story is not None:
            self.tell(f"--> {cause.name}" + (f" {cause.request}" if cause.request is not None else ""))
        try:
            self.perform(self.called(call))
        except SupervisorDied:
            self._later.clear()
            succession.died(self)
            return
        self.starting = self.starting and cause.name != "tick"
        self.guard.after_event(full=self.events % self.recount_every == 0 and not self.starting)
        self.guard.images.event_done()
        self.tally.look(self.core.state)
        while self._later:
            self._later.popleft()()

    def called(self, call: Callable[[], list[Effect]]) -> list[Effect]:
        """What the core answers; an exception of it is a finding of its own kind."""
        try:
            return call()
        except Exception as exc:
            raise CoreCrashed(f"{type(exc).__name__}: {exc}") from exc

    def perform(self, effects: list[Effect]) -> None:
        """Carry effects out, in order."""
        for effect in effects:
            if self.story is not None and not (isinstance(effect, LogLine) and effect.level == "info"):
                self.tell(f"      {effect}")
            if self.die_after >= 0:
                self._approach_death(effect)
            match effect:
                case Append():
                    self._append(effect)
                case WatchFormer():
                    self._watch_former(effect)
                case KillFormer():
                    self._kill_former(effect.worker)
                case AwaitEnd() | StopAwaiting():
                    self._await(effect)
                case SendTo():
                    self._send(effect)
                case ReplyTo():
                    self._reply(effect)
                case LogLine():
                    pass
                case ForwardDescriptor():
                    self._forward(effect)
                case CloseDescriptor():
                    client = self.by_number.get(effect.client)
                    if client is not None:
                        client.descriptors.pop(effect.descriptor, None)
                case SpawnWorker():
                    self.orders.append((effect.worker, effect.generation))
                case KillWorker():
                    self._kill(effect)
                case UnlinkSegment():
                    self._unlink(effect.segment)
                case SampleMemory():
                    self._sample(effect)
                case DropClient():
                    number = effect.client
                    self._later.append(lambda number=number: self.disconnect(number))  # type: ignore[misc]
                case _:
                    raise NotImplementedError(type(effect).__name__)

    def _approach_death(self, effect: Effect) -> None:
        """The supervisor is killed between two effects, or in the middle of a write."""
        self.die_after -= 1
        if self.die_after < 0:
            if isinstance(effect, Append):
                self.journal.append_and_die(effect.records, self.rng)
            raise SupervisorDied

    def _append(self, effect: Append) -> None:
        error = self.journal.append(effect.records)
        self.perform(self.called(lambda: self.core.journaled(effect.serial, error, self.at)))

    def _watch_former(self, effect: WatchFormer) -> None:
        process = next((p for p in self.processes if (p.pid, p.pid * 10) == (effect.pid, effect.start_ticks)), None)
        if process is None:
            self._later.append(lambda: self.former_gone(effect.worker))
        else:
            self.formers[effect.worker] = process

    def _kill_former(self, worker: str) -> None:
        if worker in self.formers:
            self.doom(self.formers[worker], "killed by the next daemon")

    def _await(self, effect: AwaitEnd | StopAwaiting) -> None:
        if isinstance(effect, AwaitEnd):
            self.awaited[effect.client] = effect.pid
        else:
            self.awaited.pop(effect.client, None)

    def former_gone(self, worker: str) -> None:
        """The proof that an earlier daemon's worker is gone."""
        self.event(Cause("former_gone"), lambda: self.core.former_gone(worker, self.at))

    def _send(self, effect: SendTo) -> None:
        process = self.current.get(effect.worker)
        if process is None:
            return
        command = effect.command
        if isinstance(command, CaptureJob | RestoreJob | CopyJob | DigestJob):
            self.guard.jobs.sent(process, command)
            self.tally.counts[f"job:{type(command).__name__}"] += 1
            if self.core.state.trace.on:
                self.core.state.trace.note_sent(command.job, self.now_s)
        if process.alive:
            process.inbox.append(command)

    def _reply(self, effect: ReplyTo) -> None:
        self.guard.replied(effect)
        client = self.by_number.get(effect.client)
        if client is None:
            return
        reply: Reply = effect.message
        self.tally.reply(reply)
        if not isinstance(reply, Progress | Failed) and reply.seq >= 0:
            request = client.pending[reply.seq].request
            self.conversations.add(getattr(request, "conversation", ""))
        client.outbox.append(reply)
        self.core.state.trace.note_reply(effect.client, reply.seq, self.now_s)

    def _forward(self, effect: ForwardDescriptor) -> None:
        client, process = self.by_number.get(effect.client), self.current.get(effect.worker)
        if client is not None and process is not None and effect.descriptor in client.descriptors:
            process.descriptors[effect.worker_tag] = client.descriptors[effect.descriptor]

    def _kill(self, effect: KillWorker) -> None:
        process = self.current.get(effect.worker)
        if process is not None and process.generation == effect.generation:
            process.condemned = True
            self.doom(process, "killed by SIGKILL")
        elif (effect.worker, effect.generation) in self.orders:
            if self.rng.random() < 0.5:  # the template has the order already
                self.doomed_orders.add((effect.worker, effect.generation))
                return
            self.orders.remove((effect.worker, effect.generation))
            self._later.append(lambda: self.never_forked(effect.worker, effect.generation))

    def never_forked(self, worker: str, generation: int) -> None:
        """An order that came to nothing."""
        self.event(
            Cause("worker_gone"), lambda: self.core.worker_gone(worker, generation, "it was never started", self.at)
        )

    def _unlink(self, name: str) -> None:
        self.shared.pop(name, None)

    def _sample(self, effect: SampleMemory) -> None:
        def reading(target: Target) -> Reading | None:
            if self.settings.memory.sample_s > 60 or self.rng.random() < 0.1:
                return None  # hidden from us; what the monitor keeps is checked in few seeds, for that takes its time
            return Reading(target.pid or 900, target.start_ticks or 1, 10 * MIB, 0, MIB)

        found = [(target, reading(target)) for target in effect.targets]
        self.perform(self.called(lambda: self.core.sampled(found, self.at)))

    # --- processes ----------------------------------------------------------------------------------------------------

    def doom(self, process: SimWorker, reason: str) -> None:
        """SIGKILL: it says nothing more; what is under way may still land for a while."""
        if process.alive:
            process.doomed = True
            process.reason = reason
            process.inbox.clear()
            process.dies_s = self.now_s + process.lingers_s
            process.late_steps = self.rng.choice((0, 1, 2, 4))

    def fork(self, name: str, generation: int) -> None:
        """The template carries an order out."""
        # One that no journal names was never given an arena, and one of another pid namespace can never be proven gone.
        check(
            all(other.name != name or other.unprovable for other in self.processes),
            f"a second process of {name} is started before the first is proven gone",
        )
        self.next_pid += 1
        process = SimWorker(name, generation, self.next_pid, self.shared, self.lost)
        self.processes.append(process)
        self.current[name] = process
        self.generations[name] = generation
        pid = process.pid
        self.event(Cause("worker_forked"), lambda: self.core.worker_forked(name, generation, pid, pid * 10, self.at))
        if (name, generation) in self.doomed_orders:
            self.doomed_orders.discard((name, generation))
            self.doom(process, "killed by SIGKILL")

    def vanish(self, process: SimWorker) -> None:
        """The kernel has ended a process for good: its mappings are gone, and the supervisor may notice."""
        for lane, jobs in process.lanes.items():
            if jobs and process.doomed and self.rng.random() < 0.7:
                process.tear(lane, self.rng.random())
        process.gone = True
        if process.takes_along in process.mapped and not process.orphan:
            self.lost.add((process.name, process.takes_along))
            self.shared.pop(segment_name("sim", process.name, process.takes_along), None)
        self.processes.remove(process)
        self.exits.append(process)
        for client in self.clients:
            client.process_gone((process.name, process.pid))
        self.guard.audit.all()

    def notice(self, process: SimWorker) -> None:
        """The supervisor sees that a process is gone."""
        if self.formers.get(process.name) is process:
            del self.formers[process.name]
            self.former_gone(process.name)
        elif self.current.get(process.name) is process:
            del self.current[process.name]
            self.event(
                Cause("worker_gone"),
                lambda: self.core.worker_gone(process.name, process.generation, process.reason, self.at),
            )

    def pool_at(self, process: SimWorker, pool: int) -> Pool | None:
        """The memory behind a worker's pool."""
        return process.pools.get(pool) or process.descriptors.get(pool)

    def segment_of(self, worker: str, shuttle: int) -> Segment | None:
        """The shared memory of a shuttle."""
        return self.shared.get(segment_name("sim", worker, shuttle))

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, client: SimClient) -> None:
        """A client opens its lifeline."""
        self.next_client += 1
        client.number = number = self.next_client
        self.by_number[number] = client
        pid = client.pid
        self.event(Cause("client_connected"), lambda: self.core.client_connected(number, pid, 1000, 7, self.at))

    def disconnect(self, number: int) -> None:
        """A connection ends, on whichever side."""
        client = self.by_number.pop(number, None)
        if client is None:
            return
        client.lose_connection({(process.name, process.pid) for process in self.processes})
        self.guard.client_gone(number)
        self.event(Cause("client_gone"), lambda: self.core.client_gone(number, self.at))

    # --- the end ------------------------------------------------------------------------------------------------------

    def listed_segments(self) -> set[str]:
        """Names that the core accounts for."""
        found: set[str] = set()
        for worker in self.core.state.workers.values():
            found.update(worker.segments.values())
            if worker.making is not None:
                found.add(segment_name("sim", worker.name, worker.making))
        return found


__all__ = ["CoreCrashed", "Counter", "InvariantViolated", "World"]
