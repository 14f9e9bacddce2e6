"""One history: a seed's scheduler decides what happens next, until nothing more can."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from ipc.messages import CaptureJob
from stratad.core.state import WorkerState
from tests.support.simulation import succession
from tests.support.simulation.client import SimClient
from tests.support.simulation.content import InvariantViolated, Segment, check
from tests.support.simulation.faults import Faults
from tests.support.simulation.image_watch import Cause
from tests.support.simulation.tally import Tally
from tests.support.simulation.worker import SimWorker
from tests.support.simulation.world import CoreCrashed, World

SETTLE_ROUNDS: Final = 400


class History:
    """A world and its scheduler. `run` raises `Broken` with the seed, the step and what was found."""

    def __init__(self, seed: int, tally: Tally, story: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.world = World.make(seed, tally, story)
        self.rng = self.world.rng
        self.steps = self.rng.choice((180, 280, 420))
        self.faults = Faults(self.world, self.rng.choice((0.0, 0.01, 0.03, 0.06)))
        # What may happen next, and how far up to 1 the share of each reaches. Time can always pass.
        self._bounds = (0.22, 0.40, 0.48, 0.62, 0.78, 0.92, 0.97)
        self._kinds: tuple[Callable[[], bool], ...] = (
            self._client_acts,
            self._request_arrives,
            self._reply_arrives,
            self._command_arrives,
            self._lane_steps,
            self._report_arrives,
            self._process_lives,
            self._time_passes,
        )

    def run(self) -> None:
        """The whole history."""
        world = self.world
        try:
            world.start()
            for _ in range(self.steps):
                world.step_number += 1
                self._step()
            self._settle()
            self._end()
        except (InvariantViolated, CoreCrashed) as found:
            raise Broken(self.seed, world.step_number, found) from found
        except Exception as bug:
            bug.add_note(f"a bug of the simulator's own, in seed {self.seed}")
            raise
        world.tally.end(world.core.state)

    # --- the scheduler ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        rng = self.rng
        if self.faults.rate and self.faults.strike():
            return
        roll = rng.random()
        kinds = self._kinds
        at = bisect_right(self._bounds, roll)
        while not kinds[at]():
            at = (at + 1) % len(kinds)

    def _client_acts(self) -> bool:
        client = self.rng.choice(self.world.clients)
        if client.dead:
            return False
        if client.number == 0:
            self.world.connect(client)
            return True
        return client.act()

    def _request_arrives(self) -> bool:
        clients = [client for client in self.world.clients if client.inbox]
        if not clients:
            return False
        self._deliver(self.rng.choice(clients))
        return True

    def _deliver(self, client: SimClient) -> None:
        world = self.world
        request, number = client.inbox.popleft(), client.number
        world.guard.request_came(number, request)
        world.tally.counts[f"request:{type(request).__name__}"] += 1
        world.event(
            Cause(f"request of {number}", request, number), lambda: world.core.request(number, request, world.at)
        )

    def _reply_arrives(self) -> bool:
        clients = [client for client in self.world.clients if client.outbox]
        if not clients:
            return False
        self.rng.choice(clients).receive()
        return True

    def _processes(self, able: Callable[[SimWorker], object]) -> SimWorker | None:
        found = [process for process in self.world.processes if able(process)]
        return self.rng.choice(found) if found else None

    def _command_arrives(self) -> bool:
        process = self._processes(lambda p: p.alive and not p.hung and (not p.ready or p.inbox))
        if process is None:
            return False
        if process.ready:
            process.take()
        else:
            process.boot()
        return True

    def _lane_steps(self) -> bool:
        process = self._processes(lambda p: p.busy and (p.late_steps if p.doomed else p.alive and not p.hung))
        if process is None:
            return False
        lanes = [lane for lane, jobs in process.lanes.items() if jobs]
        lane = self.rng.choice(lanes)
        if process.doomed:
            process.late_steps -= 1
        jobs = process.lanes[lane]
        if len(jobs) > 1 and not process.doomed and self.rng.random() < 0.3:
            process.change(lane, self.rng.randrange(1, len(jobs)))
            self.world.tally.counts["lane:changed"] += 1
        job = jobs[0]
        if isinstance(job.message, CaptureJob) and not job.begun and self.rng.random() < 0.25:
            process.read_ahead(job)
        else:
            process.step(lane)
        return True

    def _report_arrives(self) -> bool:
        process = self._processes(lambda p: p.outbox)
        if process is None:
            return False
        self._hear(process)
        return True

    def _hear(self, process: SimWorker) -> None:
        world = self.world
        report = process.outbox.popleft()
        if world.current.get(process.name) is not process:
            return
        world.event(
            Cause(f"report of {process.name} {type(report).__name__}" + (f" {report}" if world.story else "")),
            lambda: world.core.report(process.name, process.generation, report, world.at),
        )
        if world.current.get(process.name) is process:
            world.guard.audit.damage_reported(process, report)

    def _process_lives(self) -> bool:
        """What processes come to: forked, ended for good, noticed."""
        world = self.world
        kinds: list[Callable[[], None]] = []
        if world.orders:
            kinds.append(lambda: world.fork(*world.orders.popleft()))
        lingers = self.rng.random() < 0.8  # a process that nobody can prove gone is worth waiting for
        orphans = [p for p in world.processes if p.orphan and p.alive and not (p.hung or (p.foreign and lingers))]
        if orphans:
            kinds.append(lambda: self.rng.choice(orphans).end("its supervisor is gone"))
        ending = [p for p in world.processes if p.exited or (p.doomed and p.dies_s <= world.now_s)]
        if ending:
            process = self.rng.choice(ending)
            kinds.append(lambda: world.vanish(process))
        if world.exits:
            kinds.append(self._notice)
        ended = [client for client, pid in world.awaited.items() if pid in world.dead]
        if ended:
            kinds.append(lambda: self._engine_ended(ended[0]))
        if not kinds:
            return False
        self.rng.choice(kinds)()
        return True

    def _engine_ended(self, client: int) -> None:
        world = self.world
        del world.awaited[client]
        world.event(Cause("process_ended"), lambda: world.core.process_ended(client, world.at))

    def _notice(self) -> None:
        process = self.world.exits.popleft()
        while process.outbox and self.rng.random() < 0.75:  # what a dead worker still said mostly counts
            self._hear(process)
        self.world.notice(process)

    def _time_passes(self) -> bool:
        world = self.world
        roll = self.rng.random()
        if roll < 0.8:
            world.now_s += roll * 0.1
        elif world.core.due_s - world.now_s < 2:
            world.now_s = max(world.now_s, world.core.due_s)
        else:
            world.now_s += 0.3
        if world.core.due_s <= world.now_s:
            self._tick()
        return True

    def _tick(self) -> None:
        world = self.world
        world.event(Cause("tick"), lambda: world.core.tick(world.at))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """No more faults and no more wishes: everything that is under way comes to its end."""
        world = self.world
        world.tell("settling")
        world.die_after = -1
        world.journal.broken = False
        stop = self.rng.random() < 0.25
        if stop:
            world.event(Cause("stop"), lambda: world.core.stop(world.at))
        for _ in range(SETTLE_ROUNDS):
            world.step_number += 1
            if self._settled_step():
                continue
            if not self._open() and not (stop and not world.core.stopped):
                break
            world.now_s += 1.0
            if stop and world.now_s % 16 < 1.0:
                world.event(Cause("kill_all"), lambda: world.core.kill_all("time is over", world.at))
            if world.core.due_s <= world.now_s:
                self._tick()
        check(not world.formers, f"workers of an earlier daemon never end: {sorted(world.formers)}")
        check(not self._open(), f"requests without an answer: {sorted(world.guard.waiting)[:5]}")
        check(not stop or world.core.stopped, "the daemon does not stop")

    def _open(self) -> bool:
        world = self.world
        return bool(world.guard.waiting or world.core.state.ops or world.formers)

    def _settled_step(self) -> bool:
        """Anything that moves things on. False: only time can."""
        acts = (
            self._request_arrives,
            self._command_arrives,
            self._lane_steps,
            self._report_arrives,
            self._reply_arrives,
            self._process_lives,
        )
        first = self.rng.randrange(len(acts))
        return any(acts[(first + turn) % len(acts)]() for turn in range(len(acts)))

    def _end(self) -> None:
        """Once everything is quiet: nothing is left over, and every image is what it stands for."""
        world = self.world
        world.guard.after_event(full=True)
        world.guard.audit.all()
        state = world.core.state
        check(not len(state.fences), "fences are left without an operation")
        if not state.stopping:
            for image in state.catalog.images.values():
                check(image.readers >= 0, f"image {image.image_id} is read by nobody")
        listed = world.listed_segments()
        unlisted = [n for n, one in world.shared.items() if n not in listed and one.maker not in world.unprovable]
        check(not unlisted, f"segments that nobody lists: {sorted(unlisted)}")
        if world.core.stopped:  # what is kept is what the next one finds
            world.guard.daemon_gone()
            succession.next_daemon(world)
            world.guard.audit.all()


class Broken(Exception):
    """A seed whose history broke an invariant, or crashed the core."""

    def __init__(self, seed: int, step: int, found: InvariantViolated | CoreCrashed) -> None:
        super().__init__(f"seed {seed}, step {step}: {found}")
        self.seed = seed
        self.step = step
        self.found = found

    @property
    def crashed(self) -> bool:
        """Whether the core raised, in place of doing what an invariant forbids."""
        return isinstance(self.found, CoreCrashed)


__all__ = ["Broken", "History", "Segment", "WorkerState"]
