"""What may go wrong, at any step."""

from collections.abc import Callable

from tests.support.simulation import succession
from tests.support.simulation.image_watch import Cause
from tests.support.simulation.worker import SimWorker
from tests.support.simulation.world import World


class Faults:
    """Strikes with probability `rate` a step. Each strike returns False where there was nothing to hit."""

    def __init__(self, world: World, rate: float) -> None:
        self.world = world
        self.rate = rate
        self._mended_at = 0
        self._kinds: dict[str, Callable[[], bool]] = {
            "worker_kill": self._worker_kill,
            "worker_exit": self._worker_exit,
            "worker_hang": self._worker_hang,
            "worker_boot": self._worker_boot,
            "worker_stuck": self._worker_stuck,
            "no_memory": self._no_memory,
            "device_lost": lambda: self._job_fails("device_error", sticky=True),
            "device_error": lambda: self._job_fails("device_error"),
            "out_of_memory": lambda: self._job_fails("out_of_memory"),
            "source_changed": lambda: self._job_fails("source_changed"),
            "corrupt": self._corrupt,
            "shuttle": self._shuttle,
            "segment_lost": self._segment_lost,
            "pool": self._pool,
            "client_kill": self._client_kill,
            "client_drop": self._client_drop,
            "template_kill": self._template_kill,
            "clock_step": self._clock_step,
            "stall": self._stall,
            "stood_still": self._stood_still,
            "supervisor_kill": self._supervisor_kill,
            "supervisor_kill_later": self._supervisor_kill_later,
            "journal": self._journal,
        }
        self._names = [
            *self._kinds,
            "corrupt",
            "corrupt",
            "worker_kill",
            "supervisor_kill",
            "client_kill",
            "client_kill",
        ]  # these more often

    def strike(self) -> bool:
        """Do something bad, now and then."""
        if self.world.step_number >= self._mended_at:
            self.world.journal.broken = False
        if self.world.rng.random() >= self.rate:
            return False
        kind = self.world.rng.choice(self._names)
        if not self._kinds[kind]():
            return False
        self.world.tally.fault(kind)
        self.world.tell(f"*** {kind}")
        return True

    def _worker(self, able: Callable[[SimWorker], object]) -> SimWorker | None:
        found = [process for process in self.world.processes if process.alive and able(process)]
        return self.world.rng.choice(found) if found else None

    def _worker_kill(self) -> bool:
        busy = self.world.rng.random() < 0.7
        process = self._worker(lambda p: p.busy or not busy)
        if process is not None:
            self.world.doom(process, "killed by SIGKILL")
        return process is not None

    def _worker_exit(self) -> bool:
        process = self._worker(lambda p: p.ready)
        if process is not None:
            process.end("exit status 1")
        return process is not None

    def _worker_hang(self) -> bool:
        process = self._worker(lambda p: p.busy or not p.ready)
        if process is not None:
            process.hung = True
        return process is not None

    def _worker_stuck(self) -> bool:
        """It hangs, and SIGKILL does not end it at once."""
        process = self._worker(lambda p: p.busy)
        if process is not None:
            process.hung = True
            process.lingers_s = self.world.settings.stuck_s + 2.0
        return process is not None

    def _no_memory(self) -> bool:
        process = self._worker(lambda p: not p.ready)
        if process is not None:
            process.no_memory = True
        return process is not None

    def _worker_boot(self) -> bool:
        process = self._worker(lambda p: not p.ready)
        if process is not None:
            process.end("exit status 3: the device cannot be used")
        return process is not None

    def _job_fails(self, code: str, *, sticky: bool = False) -> bool:
        process = self._worker(lambda p: p.busy)
        if process is None:
            return False
        jobs = [job for lane in process.lanes.values() for job in lane]
        job = self.world.rng.choice(jobs)
        if code == "source_changed" and job is not None and not process.lanes[True]:
            return False
        if code == "source_changed":
            job = process.lanes[True][0]
        job.fault = (code, sticky)
        return True

    def _corrupt(self) -> bool:
        """A stray write changes bytes of a published image."""
        world = self.world
        places = sorted(world.guard.images.published)
        if not places:
            return False
        worker, shuttle, granule = world.rng.choice(places)
        segment = world.segment_of(worker, shuttle)
        if segment is None or granule not in segment.granules:
            return False
        noise = world.rng.randrange(1, 1 << 40)  # never twice the same damage
        segment.granules[granule] = tuple(row ^ noise for row in segment.granules[granule])
        segment.corrupted.add(granule)
        return True

    def _shuttle(self) -> bool:
        process = self._worker(lambda p: True)
        if process is not None:
            process.shuttle_fault = "no_space"
        return process is not None

    def _segment_lost(self) -> bool:
        """A worker dies, and somebody removes a segment that it had mapped."""
        process = self._worker(lambda p: p.mapped)
        if process is not None:
            process.takes_along = self.world.rng.choice(sorted(process.mapped))
            self.world.doom(process, "killed by SIGKILL")
        return process is not None

    def _pool(self) -> bool:
        process = self._worker(lambda p: True)
        if process is not None:
            process.pool_fault = "probe_failed"
        return process is not None

    def _client_kill(self) -> bool:
        """An engine's process dies; another one comes up in its place, with memory of its own."""
        world = self.world
        client = world.rng.choice(world.clients)
        if client.number == 0:
            return False
        world.dead.add(client.pid)
        number, client.pid = client.number, client.pid + 100
        for slot_owner in client.engines:
            slot_owner.die()
        world.disconnect(number)
        for slot_owner in client.engines:
            for slot in slot_owner.slots:
                slot.held_by.clear()
                slot.tokens = None
        return True

    def _client_drop(self) -> bool:
        world = self.world
        numbers = sorted(world.by_number)
        if not numbers:
            return False
        world.disconnect(world.rng.choice(numbers))
        return True

    def _template_kill(self) -> bool:
        """What it had been told to fork comes to nothing."""
        world = self.world
        if not world.orders:
            return False
        order = world.orders.popleft()
        world.doomed_orders.discard(order)
        world.never_forked(*order)
        return True

    def _clock_step(self) -> bool:
        self.world.clock_s += self.world.rng.choice((-86_400.0, -3.0, 3_600.0))
        return True

    def _stall(self) -> bool:
        """Nothing happens for a while, but time passes."""
        self.world.now_s += self.world.rng.choice((1.0, 6.0, 70.0))
        return True

    def _stood_still(self) -> bool:
        """The daemon itself was stopped for a while, and notices."""
        world = self.world
        lost_s = world.rng.choice((2.0, 8.0))
        world.now_s += lost_s
        world.event(Cause("stood_still"), lambda: world.core.stood_still(lost_s, world.at))
        return True

    def _supervisor_kill(self) -> bool:
        """The daemon dies between two events."""
        if self.world.core.state.stopping:
            return False
        succession.died(self.world)
        return True

    def _supervisor_kill_later(self) -> bool:
        """The daemon dies in the middle of an event that is to come."""
        if self.world.die_after >= 0:
            return False
        self.world.die_after = self.world.rng.randrange(12)
        return True

    def _journal(self) -> bool:
        """The journal cannot be written for a while."""
        self.world.journal.broken = True
        self._mended_at = self.world.step_number + self.world.rng.randrange(10, 60)
        return True
