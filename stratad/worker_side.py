"""The workers of the daemon: their processes from order to proof of death, what they say, and what they are told."""

import functools
import logging
import os
import signal
from typing import Final

import msgspec
import psutil

from ipc.codec import BadFrame, decode_own
from ipc.lifeline import Life, Lifeline
from ipc.logs import fields
from ipc.messages import Report, WorkerHello, WorkerSpec
from ipc.server import FLUSH_S, Incoming, one_frame
from ipc.stream_server import StreamServer
from shm.headroom import oom_kills
from shm.process import start_ticks
from shm.under_way import TAG, read_under_way
from stratad.core.effects import KillWorker, SendTo, SpawnWorker
from stratad.descriptors import Source, WorkerChannel
from stratad.links import WorkerLink
from stratad.processes import LAST_WORDS_S, Processes, WorkerProc
from stratad.turn import Turn
from stratad.watch import Watch

log = logging.getLogger(__name__)
RECEIVE_LIMIT: Final = 64
# A worker says hello and that it is ready, then it waits for commands.
EARLY_LIMIT: Final = 16


class WorkerSide:
    """Owns the workers' socket, lifelines and, by `processes`, the processes. For one thread.

    `plans` holds what every process of a worker is told: its spec but for generation and token.
    """

    def __init__(
        self, turn: Turn, watch: Watch, server: StreamServer, processes: Processes, plans: dict[str, WorkerSpec]
    ) -> None:
        self.server = server
        self.processes = processes
        self._turn = turn
        self._watch = watch
        self._plans = plans
        self._links: dict[str, WorkerLink] = {}
        self._identities: dict[bytes, str] = {}
        self._unclaimed: dict[int, Lifeline] = {}
        self._oom_kills = 0

    def start(self) -> None:
        """Before the first turn."""
        self._oom_kills = oom_kills()
        self.server.admit_only(self._identities.__contains__)

    # --- processes ----------------------------------------------------------------------------------------------------

    def spawn(self, effect: SpawnWorker) -> None:
        """Order a process for a worker."""
        token = os.urandom(16)
        plan = self._plans[effect.worker]
        faults = faults_of(plan.faults, effect.generation)
        identity = f"{effect.worker}#{effect.generation}#".encode() + os.urandom(16)
        spec = msgspec.structs.replace(
            plan, generation=effect.generation, token=token, identity=identity, faults=faults
        )
        channel = WorkerChannel(effect.worker, self.server, identity)
        self._links[effect.worker] = WorkerLink(effect.generation, token, identity, channel)
        self._identities[identity] = effect.worker
        self.processes.spawn(spec, self._turn.now.now_s)

    def kill(self, effect: KillWorker) -> None:
        """SIGKILL the process of a worker; its end is told once it is proven."""
        log.warning("killing worker", extra=fields(worker=effect.worker, why=effect.reason))
        if not self.processes.kill(effect.worker, effect.generation, self._turn.now.now_s):
            self._ended(effect.worker, effect.generation, "it was never started")

    def tend(self, now_s: float) -> None:
        """What the template and the kernel say about processes; cheap when there is nothing."""
        self.processes.tend(now_s)
        if self.processes.start_error:
            log.error("template cannot be started", extra=fields(why=self.processes.start_error))
            self.processes.start_error = ""
        if self.processes.unforked and self.processes.hung_template(now_s):
            log.error("template hangs: killing it", extra=fields(owes=",".join(self.processes.unforked)))
        template = self.processes.template
        if template is not None and template.pidfd not in self._watch:
            self._watch.add(template.pidfd, self._on_template_gone)
            self._watch.add(template.control.fileno(), self._on_template)
            log.info("template started", extra=fields(pid=template.pid, count=self.processes.started))
        if self.processes.dying:
            self._on_worker_gone()

    def wait_s(self, now_s: float, most_s: float) -> float:
        """How long the loop may wait, at most so long."""
        if self.processes.waiting:
            next_s = self.processes.next_start_s - now_s
            most_s = min(most_s, next_s if self.processes.template is None else FLUSH_S)
        if self.processes.unforked:
            most_s = min(most_s, max(min(self.processes.unforked.values()) - now_s, FLUSH_S))
        if self.processes.dying or self.server.pending_count:
            most_s = min(most_s, FLUSH_S)
        if any(link.channel.waiting for link in self._links.values()):
            most_s = min(most_s, FLUSH_S)
        return most_s

    def _on_template(self) -> None:
        """Read the template's news: workers that it forked, exit statuses that it reaped."""
        if self.processes.template is None:
            return
        for proc in self.processes.take_news():
            self._watch.add(proc.pidfd, self._on_worker_gone)
            try:
                ticks = start_ticks(proc.pid)
            except OSError:  # it has ended already, or there is no descriptor to read /proc with
                ticks = 0
            core = self._turn.core
            self._turn.event(functools.partial(core.worker_forked, proc.worker, proc.generation, proc.pid, ticks))
            lifeline = self._unclaimed.pop(proc.pid, None)
            if lifeline is not None:
                self._adopt(proc.worker, lifeline)
        while self.processes.unable:
            order = self.processes.unable.pop(0)
            self._ended(order.worker, order.generation, f"it cannot be forked: {order.message}")

    def _on_template_gone(self) -> None:
        template = self.processes.template
        assert template is not None
        self._on_template()
        self._watch.remove(template.pidfd)
        self._watch.remove(template.control.fileno())
        lost = [name for name, link in self._links.items() if name not in self.processes.workers]
        status = self.processes.template_gone()
        if not self._turn.core.state.stopping:
            log.error("template gone", extra=fields(pid=template.pid, status=status))
        self.processes.reap_orphans()
        # An order that the dead template had taken but not carried out: no process ever lived for it.
        ordered = {spec.worker for spec in self.processes.waiting}
        for name in lost:
            if name not in ordered and name in self._links:
                self._ended(name, self._links[name].generation, "the template died before it was forked")

    def reap_orphans(self) -> None:
        """As subreaper, or as process 1, we inherit what others leave behind."""
        self.processes.reap_orphans()

    def _on_worker_gone(self) -> None:
        self._on_template()
        self.processes.reap_orphans()
        gone = self.processes.gone(self._turn.now.now_s, self._heard_out)
        for proc in self.processes.workers.values():
            if proc.gone_s is not None:
                self._watch.remove(proc.pidfd)  # readable for good: the loop looks again at each turn
        for proc, reason in gone:
            self._watch.remove(proc.pidfd)
            os.close(proc.pidfd)
            self._ended(proc.worker, proc.generation, reason + self._killed_for_memory(proc.status))

    def _heard_out(self, proc: WorkerProc) -> bool:
        """Whether nothing of what a worker said before its end can be on its way any more: its last answers may still
        wait in its stream, whose end comes only after them.
        """
        link = self._links.get(proc.worker)
        if link is None or link.generation != proc.generation or not link.greeted:
            return True
        return not self._turn.core.state.workers[proc.worker].jobs or not self.server.reaches(link.identity)

    def _killed_for_memory(self, status: int | None) -> str:
        """What the cgroup says of a SIGKILL: the kernel's own leave no other trace."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        if status != -signal.SIGKILL or self._oom_kills <= before:
            return ""
        return f", and the cgroup's count of kills for lack of memory rose from {before} to {self._oom_kills}"

    def _ended(self, worker: str, generation: int, reason: str) -> None:
        link = self._links.get(worker)
        under_way: tuple[int, ...] | None = ()
        if link is not None and link.generation == generation:
            del self._links[worker]
            self._identities.pop(link.identity, None)
            self.server.forget(link.identity)
            if link.channel.lifeline is not None:
                under_way = _last_under_way(worker, link.channel.lifeline)
                self._close_lifeline(link.channel.lifeline)
        gone = functools.partial(self._turn.core.worker_gone, worker, generation, reason, under_way=under_way)
        self._turn.event(gone)

    # --- lifelines ----------------------------------------------------------------------------------------------------

    def claim(self, lifeline: Lifeline) -> bool:
        """Take a lifeline of our own user that a worker has opened; False: it is somebody else's."""
        pid = lifeline.peer.pid
        if self.processes.by_pid(pid) is None:  # it may connect before the news of its fork was read
            self._on_template()
        proc = self.processes.by_pid(pid)
        if proc is not None:
            self._adopt(proc.worker, lifeline)
            return True
        # Ordered, but not reported yet?
        if all(name in self.processes.workers for name in self._links) or not self.processes.template:
            return False
        if not self.is_child_of_template(pid):
            return False
        self._unclaimed[pid] = lifeline
        return True

    def _adopt(self, worker: str, lifeline: Lifeline) -> None:
        link = self._links.get(worker)
        if link is None or link.channel.lifeline is not None:
            lifeline.close()
            return
        link.channel.lifeline = lifeline
        self._watch.add(lifeline.fileno(), lambda: self._on_lifeline(worker, link, lifeline))
        early, link.early = link.early, []
        for incoming in early:
            self._on_report(worker, link, incoming)

    def _on_lifeline(self, worker: str, link: WorkerLink, lifeline: Lifeline) -> None:
        """Its end says that the worker is going; only its pidfd says that it is gone."""
        if lifeline.drain() is Life.ENDED:
            self._watch.remove(lifeline.fileno())
            link.hung_up_s = self._turn.now.now_s
            self._turn.event(functools.partial(self._turn.core.worker_hung_up, worker, link.generation))

    def _close_lifeline(self, lifeline: Lifeline) -> None:
        self._watch.remove(lifeline.fileno())
        lifeline.close()

    # --- reports ------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take in what workers say, some of it."""
        for incoming in self.server.recv_all(RECEIVE_LIMIT):
            worker = self._identities.get(incoming.peer)
            link = self._links.get(worker) if worker is not None else None
            if worker is None or link is None:
                continue  # nobody we started: not even read
            if link.channel.lifeline is None:
                self._on_template()  # the core must know the process before the process says anything
            if link.channel.lifeline is not None:
                self._on_report(worker, link, incoming)
            elif len(link.early) < EARLY_LIMIT:
                link.early.append(incoming)

    def _on_report(self, worker: str, link: WorkerLink, incoming: Incoming) -> None:
        try:
            report = decode_own(one_frame(incoming), Report)
        except BadFrame as bad:
            log.error("bad frame of a worker", extra=fields(worker=worker, why=bad.message))
            return
        now = self._turn.now
        if link.hung_up_s is not None and now.now_s - link.hung_up_s >= LAST_WORDS_S:
            return  # whoever speaks in its name now is somebody else
        if isinstance(report, WorkerHello):
            link.greeted = report.token == link.token and report.worker == worker
            if not link.greeted:
                log.error("worker with a wrong token", extra=fields(peer=repr(incoming.peer)))
        elif link.greeted:
            core = self._turn.core
            # It may have come after the turn began, and be the answer to a command of this very turn.
            if core.state.trace.on:
                now = self._turn.tell_time()
            try:
                effects = core.report(worker, link.generation, report, now)
            except Exception:  # noqa: BLE001 - the worker's state is in doubt: start it again, which ends its jobs for good
                self._turn.bug("report", type(report).__name__)
                effects = core.worker_unfit(worker, link.generation, "a report is not understood", now)
            self._turn.perform(effects)

    # --- commands -----------------------------------------------------------------------------------------------------

    def send(self, effect: SendTo) -> None:
        """Send a command to the current process of a worker."""
        link = self._links.get(effect.worker)
        if link is not None and not link.channel.send(effect.command):
            self._unfit(effect.worker, link.generation, "it does not take its commands")  # its end answers for this one

    def forward(self, worker: str, worker_tag: int, source: Source) -> None:
        """Pass a descriptor on to a worker."""
        link = self._links.get(worker)
        if link is not None:
            link.channel.pass_on(worker_tag, source)

    def flush(self) -> None:
        """Send on what waits for workers."""
        if self.server.pending_count:
            self.server.flush()
        for worker, link in tuple(self._links.items()):
            if link.channel.waiting and not link.channel.flush():
                self._unfit(worker, link.generation, "it does not take its commands")

    def cannot_be_told(self, worker: str) -> None:
        """A command could not even be made: only the end of the process can answer for it."""
        link = self._links.get(worker)
        if link is not None:
            self._unfit(worker, link.generation, "a command for it cannot be made")

    def _unfit(self, worker: str, generation: int, reason: str) -> None:
        self._turn.event(functools.partial(self._turn.core.worker_unfit, worker, generation, reason))

    # --- end ----------------------------------------------------------------------------------------------------------

    def close_lifelines(self) -> None:
        """Close them all."""
        for link in self._links.values():
            if link.channel.lifeline is not None:
                self._close_lifeline(link.channel.lifeline)
        while self._unclaimed:
            self._unclaimed.popitem()[1].close()

    def is_child_of_template(self, pid: int) -> bool:
        """Whether the template that there is has forked this process."""
        template = self.processes.template
        return template is not None and _parent(pid) == template.pid


def _last_under_way(worker: str, lifeline: Lifeline) -> tuple[int, ...] | None:
    """The jobs that a process had under way when it ended; None where it left no word of that."""
    lifeline.drain()
    try:
        descriptor = lifeline.take(TAG)
    except KeyError:
        return None
    try:
        return read_under_way(descriptor)
    except (OSError, ValueError) as exc:
        log.error("what was under way cannot be read", extra=fields(worker=worker, why=str(exc)))
        return None
    finally:
        os.close(descriptor)


def faults_of(orders: dict[str, str], generation: int) -> dict[str, str]:
    """Of faults like ``copy_error`` (of every generation) and ``copy_error#1`` (of the first) those of one."""
    found: dict[str, str] = {}
    for name, when in orders.items():
        fault, _, only = name.partition("#")
        if not only or int(only) == generation:
            found[fault] = when
    return found


def _parent(pid: int) -> int:
    """Parent of a process, or -1."""
    try:
        return psutil.Process(pid).ppid() if pid > 0 else -1
    except (psutil.Error, OSError):
        return -1
