"""The only poll loop of the daemon: sockets and processes in, the core's effects out."""

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final, assert_never

import msgspec
import psutil
import zmq

from ipc.codec import BadFrame, EncodeError, decode, encode
from ipc.lifeline import Life, Lifeline, Refused
from ipc.logs import fields
from ipc.messages import (
    Failed,
    Faults,
    Hello,
    MemfdPool,
    Register,
    Reply,
    Report,
    Request,
    StatsReply,
    WorkerHello,
    WorkerSpec,
)
from ipc.server import FLUSH_S, Incoming, Sent
from shm.headroom import oom_kills
from shm.janitor import remove_segment
from shm.process import open_pidfd, pidfd_ended, start_ticks
from stratad import ledger
from stratad.access import Access
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
from stratad.core.failures import Refusal
from stratad.core.memory_tracks import Reading, Role, Target
from stratad.core.registration import STAGE_LIMIT
from stratad.core.state import Instant
from stratad.core.views import status_line
from stratad.descriptors import WorkerChannel
from stratad.fault_points import FaultPoints
from stratad.journal import Journal, JournalError
from stratad.links import ClientLink, ClientLinks, Endpoints, RefusalLog, WorkerLink
from stratad.lock import InstanceLock, InstanceLocked
from stratad.notify import Notifier
from stratad.processes import Processes

log = logging.getLogger(__name__)
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
RECEIVE_LIMIT: Final = 64
BAD_FRAME_LIMIT: Final = 16
ACCEPT_LIMIT: Final = 16
HELLO_BYTES: Final = 1024  # more is not read of a peer that nobody has vouched for
LONGEST_WAIT_S: Final = 60.0
# A worker says hello and that it is ready, then it waits for commands.
EARLY_LIMIT: Final = 16
# Descriptors that no client is given (the kernel hands out the lowest number): for the ZeroMQ connections of those who
# have just been let in, and for workers that are started again.
SPARE_FILES: Final = 32
# For the last answers of a worker that has gone; milliseconds, unless the host is very busy.
LAST_WORDS_S: Final = 0.25
# Of a turn that takes longer the workers are not to blame. An ordinary one takes milliseconds.
STILL_S: Final = 0.5
# What may follow the time for a graceful stop: SIGKILL, its proof (10 s), and freeing a large arena.
END_S: Final = 30.0


class Supervisor:
    """Everything the daemon does, in one thread. `run` returns after a graceful stop.

    `plans` holds what every process of a worker is told: its spec but for generation and token.
    """

    def __init__(
        self,
        core: Core,
        endpoints: Endpoints,
        processes: Processes,
        plans: dict[str, WorkerSpec],
        access: Access,
        *,
        journal: Journal,
        lock: InstanceLock,
        stop_s: float,
        unread_s: float,
        notifier: Notifier,
        points: FaultPoints | None = None,
    ) -> None:
        self._core = core
        self._points = points
        self._notifier = notifier
        self._clients, self._workers, self._listener = endpoints
        self._processes = processes
        self._plans = plans
        self._access = access
        self._journal = journal
        self._lock = lock
        self._lock_lost = False
        self._formers: dict[str, int] = {}  # pidfds of an earlier daemon's workers, by worker
        self._refusals = RefusalLog()
        self._stop_s = stop_s
        self._unread_s = unread_s
        self._stop_deadline_s: float | None = None
        self._links = ClientLinks()
        self._worker_links: dict[str, WorkerLink] = {}
        self._worker_identities: dict[bytes, str] = {}
        self._unclaimed: dict[int, Lifeline] = {}
        self._ending: dict[int, int] = {}  # pidfds of clients that have gone, while their end matters
        self._dropped: list[int] = []  # clients to drop once the effects in hand are done
        self._poller = zmq.Poller()
        self._epoll = select.epoll()  # all plain descriptors, so that the poller has three entries and not one for each
        self._handlers: dict[int, Callable[[], None]] = {}
        self._now = Instant(0.0, 0.0)
        self._oom_kills = 0
        self._signals: socket.socket | None = None
        self._wakeup: socket.socket | None = None

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal asks to stop and every worker has ended."""
        self._catch_signals()
        self._oom_kills = oom_kills()
        self._poller.register(self._clients.socket, zmq.POLLIN)
        self._poller.register(self._workers.socket, zmq.POLLIN)
        self._poller.register(self._epoll.fileno(), zmq.POLLIN)
        self._watch(self._listener.fileno(), self._on_connect)
        self._tell_time()
        self._event(self._core.start)
        self._event(self._core.tick)
        self._notifier.ready()
        while not (self._core.stopped and self._processes.workers.keys() <= self._core.stuck):
            self._turn()

    def _turn(self) -> None:
        wait_ms, before_s = self._wait_ms(), self._now.now_s
        ready = [key for key, _ in self._poller.poll(wait_ms)]
        now = self._tell_time()
        lost_s = now.now_s - before_s - wait_ms / 1000.0
        if lost_s > STILL_S:  # stopped, or held up by a call: others did their work meanwhile, and nobody looked
            log.warning("the daemon's loop stood still", extra=fields(for_s=round(lost_s, 3)))
            self._event(functools.partial(self._core.stood_still, lost_s))
        if self._workers.socket in ready:  # before the descriptors: what a dead worker still said counts
            self._on_workers()
        if self._clients.socket in ready:
            self._on_clients()
        if self._epoll.fileno() in ready:
            for descriptor, _ in self._epoll.poll(0):
                handler = self._handlers.get(descriptor)
                if handler is None:  # an earlier handler of this turn may have closed it
                    continue
                try:
                    handler()
                except Exception:  # noqa: BLE001 - out of descriptors, say: one peer's trouble, not everybody's end
                    self._bug("descriptor", getattr(handler, "__name__", "handler"))
        self._on_processes(now)
        if self._core.due_s <= now.now_s:
            self._event(self._core.tick)
        if self._clients.pending_count:
            self._flush_clients(now.now_s)
        if self._workers.pending_count:
            self._workers.flush()
        for worker, link in list(self._worker_links.items()):
            if link.channel.waiting and not link.channel.flush():
                self._unfit(worker, link.generation, "it does not take its commands")
        self._journal.tend()
        if self._stop_deadline_s is not None and self._stop_deadline_s <= now.now_s:
            self._stop_deadline_s = None
            self._event(lambda at: self._core.kill_all("the time for a graceful stop is over", at))
        self._notifier.beat(now.now_s, lambda: status_line(self._core.state))

    def _flush_clients(self, now_s: float) -> None:
        """Send on what waits for clients; who is gone, or reads nothing for too long, is dropped with all it holds."""
        lost = [(peer, "it cannot be reached") for peer in self._clients.flush()]
        lost += [(peer, "it does not read") for peer in self._clients.unread(now_s, self._unread_s)]
        for peer, why in lost:
            link = self._links.of_peer(peer)
            if link is not None:
                self._drop_deaf(link, why)

    def _drop_deaf(self, link: ClientLink, why: str) -> None:
        log.info("client dropped: %s", why, extra=fields(client=link.client, pid=link.lifeline.peer.pid))
        self._core.state.count("clients_dropped")
        self._drop_client(link)

    def _wait_ms(self) -> int:
        if self._journal.compacting:
            return 0
        now_s = time.monotonic()
        wait_s = min(LONGEST_WAIT_S, self._core.due_s - now_s, self._notifier.due_s - now_s)
        if self._stop_deadline_s is not None:
            wait_s = min(wait_s, self._stop_deadline_s - now_s)
        if self._processes.waiting:
            next_s = self._processes.next_start_s - now_s
            wait_s = min(wait_s, next_s if self._processes.template is None else FLUSH_S)
        if self._processes.unforked:
            wait_s = min(wait_s, max(min(self._processes.unforked.values()) - now_s, FLUSH_S))
        if self._processes.dying or self._clients.pending_count or self._workers.pending_count:
            wait_s = min(wait_s, FLUSH_S)
        if any(link.channel.waiting for link in self._worker_links.values()):
            wait_s = min(wait_s, FLUSH_S)
        return max(int(wait_s * 1000) + 1, 0) if wait_s > 0 else 0

    def _tell_time(self) -> Instant:
        """Read the clocks; the whole turn happens at this instant."""
        self._now = Instant(time.monotonic(), time.time())
        return self._now

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    # --- signals ------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        """Signals only wake the loop; what they ask for is done there."""
        self._signals, self._wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._watch(self._signals.fileno(), self._on_signal)

    def _on_signal(self) -> None:
        assert self._signals is not None
        numbers = set(self._signals.recv(4096))
        if signal.SIGCHLD in numbers:  # as subreaper, or as process 1, we inherit what others leave behind
            self._processes.reap_orphans()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            if self._core.state.stopping:
                log.info("second signal to stop: already stopping")
                return
            log.info("stopping", extra=fields(within_s=self._stop_s))
            self._stop_deadline_s = time.monotonic() + self._stop_s
            self._notifier.stopping(self._stop_s + END_S)
            self._event(self._core.stop)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _on_processes(self, now: Instant) -> None:
        """What the template and the kernel say about processes; cheap when there is nothing."""
        self._processes.tend(now.now_s)
        if self._processes.start_error:
            log.error("template cannot be started", extra=fields(why=self._processes.start_error))
            self._processes.start_error = ""
        if self._processes.unforked and self._processes.hung_template(now.now_s):
            log.error("template hangs: killing it", extra=fields(owes=",".join(self._processes.unforked)))
        template = self._processes.template
        if template is not None and template.pidfd not in self._handlers:
            self._watch(template.pidfd, self._on_template_gone)
            self._watch(template.control.fileno(), self._on_template)
            log.info("template started", extra=fields(pid=template.pid, count=self._processes.started))
        if self._processes.dying:
            self._on_worker_gone()

    def _on_template(self) -> None:
        """Read the template's news: workers that it forked, exit statuses that it reaped."""
        if self._processes.template is None:
            return
        for proc in self._processes.take_news():
            self._watch(proc.pidfd, self._on_worker_gone)
            try:
                ticks = start_ticks(proc.pid)
            except OSError:  # it has ended already, or there is no descriptor to read /proc with
                ticks = 0
            forked = functools.partial(self._core.worker_forked, proc.worker, proc.generation, proc.pid, ticks)
            self._event(forked)
            lifeline = self._unclaimed.pop(proc.pid, None)
            if lifeline is not None:
                self._adopt_worker_lifeline(proc.worker, lifeline)

    def _on_template_gone(self) -> None:
        template = self._processes.template
        assert template is not None
        self._on_template()
        self._unwatch(template.pidfd)
        self._unwatch(template.control.fileno())
        lost = [name for name, link in self._worker_links.items() if name not in self._processes.workers]
        status = self._processes.template_gone()
        if not self._core.state.stopping:
            log.error("template gone", extra=fields(pid=template.pid, status=status))
        self._processes.reap_orphans()
        # An order that the dead template had taken but not carried out: no process ever lived for it.
        ordered = {spec.worker for spec in self._processes.waiting}
        for name in lost:
            if name not in ordered and name in self._worker_links:
                self._worker_ended(name, self._worker_links[name].generation, "the template died before it was forked")

    def _on_worker_gone(self) -> None:
        self._on_template()
        self._processes.reap_orphans()
        gone = self._processes.gone(self._now.now_s)
        for proc in self._processes.workers.values():
            if proc.gone_s is not None:
                self._unwatch(proc.pidfd)  # readable for good: the loop only waits for the exit status now
        for proc, reason in gone:
            self._unwatch(proc.pidfd)
            os.close(proc.pidfd)
            link = self._worker_links.get(proc.worker)
            if link is not None and link.generation == proc.generation:
                self._hear_out(proc.worker, link)
            self._worker_ended(proc.worker, proc.generation, reason + self._killed_for_memory(proc.status))

    def _killed_for_memory(self, status: int | None) -> str:
        """What the cgroup says of a SIGKILL: the kernel's own leave no other trace."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        if status != -signal.SIGKILL or self._oom_kills <= before:
            return ""
        return f", and the cgroup's count of kills for lack of memory rose from {before} to {self._oom_kills}"

    def _hear_out(self, worker: str, link: WorkerLink) -> None:
        """Take in what a worker said before its end: its last answers may still be in the hands of ZeroMQ's thread,
        which lets go of a peer only once everything that came from it was read.
        """
        until_s = time.monotonic() + LAST_WORDS_S
        while link.greeted and self._core.state.workers[worker].jobs and time.monotonic() < until_s:
            self._on_workers()
            if self._workers.send(link.identity, b"") is Sent.UNREACHABLE:
                return
            self._workers.socket.poll(1)

    def _worker_ended(self, worker: str, generation: int, reason: str) -> None:
        link = self._worker_links.get(worker)
        if link is not None and link.generation == generation:
            del self._worker_links[worker]
            self._worker_identities.pop(link.identity, None)
            self._workers.forget(link.identity)
            if link.channel.lifeline is not None:
                self._close_lifeline(link.channel.lifeline)
        self._event(lambda at: self._core.worker_gone(worker, generation, reason, at))

    # --- lifelines ----------------------------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        for _ in range(ACCEPT_LIMIT):
            lifeline = self._listener.admit(self._core.state.settings.start_id, self._access.why_not, self._spare_files)
            if lifeline is None:
                return
            if isinstance(lifeline, Refused):
                self._core.state.count("peers_refused")
                self._refusals.add(lifeline, self._now.now_s)
                continue
            pid = lifeline.peer.pid
            if lifeline.peer.uid != self._access.own_uid:  # whatever its pid was before: no worker of ours
                self._add_client(lifeline)
                continue
            self._on_template_news_before(pid)
            proc = self._processes.by_pid(pid)
            if proc is not None:
                self._adopt_worker_lifeline(proc.worker, lifeline)
            elif self._awaits_fork and self._processes.template and _parent(pid) == self._processes.template.pid:
                self._unclaimed[pid] = lifeline
            else:
                self._add_client(lifeline)

    def _spare_files(self, pid: int) -> int:
        """How many descriptors must be left once a peer has been let in. ZeroMQ aborts the process where it cannot
        accept a connection: who will open one is turned away before.
        """
        template = self._processes.template
        ours = template is not None and _parent(pid) == template.pid
        return 0 if ours else SPARE_FILES

    @property
    def _awaits_fork(self) -> bool:
        """Whether a worker was ordered whose process has not been reported."""
        return any(name not in self._processes.workers for name in self._worker_links)

    def _on_template_news_before(self, pid: int) -> None:
        """A worker may connect before the news of its fork was read."""
        if self._processes.by_pid(pid) is None:
            self._on_template()

    def _adopt_worker_lifeline(self, worker: str, lifeline: Lifeline) -> None:
        link = self._worker_links.get(worker)
        if link is None or link.channel.lifeline is not None:
            lifeline.close()
            return
        link.channel.lifeline = lifeline
        self._watch(lifeline.fileno(), lambda: self._on_worker_lifeline(lifeline))
        early, link.early = link.early, []
        for incoming in early:
            self._on_report(worker, link, incoming)

    def _on_worker_lifeline(self, lifeline: Lifeline) -> None:
        """Its end says that the worker is going; only its pidfd says that it is gone."""
        if lifeline.drain() is Life.ENDED:
            self._unwatch(lifeline.fileno())
            for worker, link in list(self._worker_links.items()):
                if link.channel.lifeline is lifeline:
                    self._hear_out(worker, link)
                    link.greeted = False  # whoever speaks in its name from now on is somebody else
                    self._event(functools.partial(self._core.worker_hung_up, worker, link.generation))

    def _add_client(self, lifeline: Lifeline) -> None:
        link = self._links.add(lifeline)
        self._watch(lifeline.fileno(), lambda: self._on_client_lifeline(link))
        peer = lifeline.peer
        # The end of its lifeline tells of its end, unless a process that it forked keeps a copy.
        with contextlib.suppress(OSError):  # another pid namespace, no descriptor: then the lifeline alone tells
            link.pidfd = open_pidfd(peer.pid, peer.start_ticks)
            self._watch(link.pidfd, lambda: self._on_client_process(link))
        self._event(lambda at: self._core.client_connected(link.client, peer.pid, peer.uid, peer.start_ticks, at))

    def _on_client_lifeline(self, link: ClientLink) -> None:
        if link.paused or link.lifeline.read_on() is Life.ENDED:  # of a paused one only the end is told
            self._drop_client(link)
        elif link.lifeline.full:
            link.paused = True
            self._epoll.modify(link.lifeline.fileno(), 0)

    def _on_client_process(self, link: ClientLink) -> None:
        """It was asked for by the number of a descriptor, which may be another's by now."""
        if link.pidfd >= 0 and pidfd_ended(link.pidfd):
            self._drop_client(link)

    def _drop_client(self, link: ClientLink) -> None:
        if not self._links.remove(link):
            return
        self._clients.forget(link.identity)
        self._close_lifeline(link.lifeline)
        self._close_pidfd(link)
        self._event(lambda at: self._core.client_gone(link.client, at))
        link.descriptors.close_all()

    def _close_pidfd(self, link: ClientLink) -> None:
        if link.pidfd >= 0:
            self._unwatch(link.pidfd)
            os.close(link.pidfd)
            link.pidfd = -1

    def _close_lifeline(self, lifeline: Lifeline) -> None:
        self._unwatch(lifeline.fileno())
        lifeline.close()

    # --- messages of clients ------------------------------------------------------------------------------------------

    def _on_clients(self) -> None:
        for incoming in self._clients.recv_all(RECEIVE_LIMIT):
            link = self._links.of_peer(incoming.peer)
            if link is None and len(incoming.frame) > HELLO_BYTES:
                self._refuse(incoming.peer, -1, "hello_first", "the first message of a connection must be 'hello'")
                continue
            try:
                request = decode(_one_frame(incoming), Request)
            except BadFrame as bad:
                self._on_bad_frame(incoming.peer, link, bad)
                continue
            if link is None:
                link = self._greet(incoming, request)
            if link is None:
                continue
            if isinstance(request, Register):  # a lifeline keeps few, and the worker may not be there yet
                for stage in request.stages[:STAGE_LIMIT]:
                    if isinstance(stage.pool, MemfdPool):
                        link.descriptors.find(stage.pool.descriptor)
            try:
                effects = self._core.request(link.client, request, self._now)
            except Exception:  # noqa: BLE001 - a bug of ours must cost one request, not the daemon and every image in it
                self._bug("request", type(request).__name__)
                effects = [ReplyTo(link.client, Failed(request.seq, "internal", "a bug of the daemon, see its log"))]
            self._perform(effects)

    def _greet(self, incoming: Incoming, request: Request) -> ClientLink | None:
        """The client that a first message comes from, or None: then it was refused."""
        try:
            if not isinstance(request, Hello):
                raise Refusal("hello_first", "the first message of a connection must be 'hello'")
            return self._links.claim(request.token, incoming)
        except Refusal as refusal:
            self._refuse(incoming.peer, request.seq, refusal.code, refusal.message)
            return None

    def _on_bad_frame(self, peer: bytes, link: ClientLink | None, bad: BadFrame) -> None:
        self._core.state.count("bad_frames")
        self._refuse(peer, bad.seq, bad.code, bad.message)
        if link is None:
            return
        link.bad_frames += 1
        if link.bad_frames >= BAD_FRAME_LIMIT:
            log.warning(
                "client dropped: too many bad frames", extra=fields(client=link.client, pid=link.lifeline.peer.pid)
            )
            self._drop_client(link)

    def _refuse(self, peer: bytes, seq: int, code: str, message: str) -> None:
        self._clients.send(peer, encode(Failed(seq, code, message, start_id=self._core.state.settings.start_id)))

    # --- messages of workers ------------------------------------------------------------------------------------------

    def _on_workers(self) -> None:
        for incoming in self._workers.recv_all(RECEIVE_LIMIT):
            worker = self._worker_identities.get(incoming.peer)
            link = self._worker_links.get(worker) if worker is not None else None
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
            report = decode(_one_frame(incoming), Report)
        except BadFrame as bad:
            log.error("bad frame of a worker", extra=fields(worker=worker, why=bad.message))
            return
        if isinstance(report, WorkerHello):
            link.greeted = report.token == link.token and report.worker == worker
            if not link.greeted:
                log.error("worker with a wrong token", extra=fields(peer=repr(incoming.peer)))
        elif link.greeted:
            try:
                effects = self._core.report(worker, link.generation, report, self._now)
            except Exception:  # noqa: BLE001 - the worker's state is in doubt: start it again, which ends its jobs for good
                self._bug("report", type(report).__name__)
                effects = self._core.worker_unfit(worker, link.generation, "a report is not understood", self._now)
            self._perform(effects)

    def _bug(self, what: str, name: str) -> None:
        self._core.state.count("internal_errors")
        log.exception("%s could not be handled", what, extra=fields(message_type=name))

    # --- effects ------------------------------------------------------------------------------------------------------

    def _event(self, event: Callable[[Instant], list[Effect]]) -> None:
        """Tell the core something and do what it says. A bug of ours must not end the daemon and every image in it."""
        try:
            effects = event(self._now)
        except Exception:  # noqa: BLE001
            self._bug("event", getattr(event, "__name__", "event"))
            return
        self._perform(effects)

    def _perform(self, effects: Iterable[Effect]) -> None:
        """Carry effects out in order; clients that are to be dropped go after the last, since their end has effects."""
        for effect in effects:
            if self._points is None:
                self._carry_out(effect)
            else:
                self._points.pass_by(effect, "before")
                self._carry_out(effect)
                self._points.pass_by(effect, "after")
        while self._dropped:
            link = self._links.get(self._dropped.pop(0))
            if link is not None:
                self._drop_client(link)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendTo():
                self._send_to(effect)
            case ReplyTo():
                self._reply_to(effect.client, effect.message)
            case LogLine():
                log.log(LEVELS[effect.level], "%s", effect.message, extra=fields(**dict(effect.fields)))
            case ForwardDescriptor():
                self._forward(effect)
            case CloseDescriptor():
                self._close_descriptor(effect)
            case SpawnWorker():
                self._spawn(effect)
            case KillWorker():
                self._kill(effect)
            case Append():
                self._append(effect)
            case WatchFormer():
                self._watch_former(effect)
            case KillFormer():
                self._kill_former(effect.worker)
            case UnlinkSegment():
                remove_segment(effect.segment)
            case SampleMemory():
                self._sample_memory(effect)
            case DropClient():
                self._dropped.append(effect.client)
            case AwaitEnd():
                self._await_end(effect)
            case StopAwaiting():
                self._stop_awaiting(effect.client)
            case _:
                assert_never(effect)

    def _append(self, effect: Append) -> None:
        error = ""
        try:
            self._journal.append(effect.records)
        except (JournalError, EncodeError) as exc:
            error = str(exc)
        self._event(functools.partial(self._core.journaled, effect.serial, error))

    def _watch_former(self, effect: WatchFormer) -> None:
        """A process that is not our child: its pidfd is as good a proof."""
        try:
            pidfd = open_pidfd(effect.pid, effect.start_ticks)
        except ProcessLookupError:
            self._former_gone(effect.worker)
            return
        self._formers[effect.worker] = pidfd
        self._watch(pidfd, functools.partial(self._former_gone, effect.worker))

    def _former_gone(self, worker: str) -> None:
        pidfd = self._formers.pop(worker, -1)
        if pidfd >= 0:
            self._unwatch(pidfd)
            os.close(pidfd)
        self._event(functools.partial(self._core.former_gone, worker))

    def _kill_former(self, worker: str) -> None:
        pidfd = self._formers.get(worker, -1)
        if pidfd >= 0:
            log.warning("killing the worker of an earlier daemon", extra=fields(worker=worker))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _kill(self, effect: KillWorker) -> None:
        log.warning("killing worker", extra=fields(worker=effect.worker, why=effect.reason))
        if not self._processes.kill(effect.worker, effect.generation, self._now.now_s):
            self._worker_ended(effect.worker, effect.generation, "it was never started")

    def _await_end(self, effect: AwaitEnd) -> None:
        """Watch for the end of a client's process."""
        ended = functools.partial(self._core.process_ended, effect.client)
        try:
            pidfd = open_pidfd(effect.pid, effect.start_ticks)
        except ProcessLookupError:
            self._event(ended)
            return
        except OSError as exc:
            log.warning("process cannot be watched", extra=fields(pid=effect.pid, why=str(exc)))
            self._event(functools.partial(ended, proven=False))
            return
        self._ending[effect.client] = pidfd
        self._watch(pidfd, lambda: self._on_process_ended(effect.client))

    def _on_process_ended(self, client: int) -> None:
        self._stop_awaiting(client)
        self._event(functools.partial(self._core.process_ended, client))

    def _stop_awaiting(self, client: int) -> None:
        pidfd = self._ending.pop(client, None)
        if pidfd is not None:
            self._unwatch(pidfd)
            os.close(pidfd)

    def _unfit(self, worker: str, generation: int, reason: str) -> None:
        self._event(functools.partial(self._core.worker_unfit, worker, generation, reason))

    def _send_to(self, effect: SendTo) -> None:
        link = self._worker_links.get(effect.worker)
        if link is not None and not link.channel.send(effect.command):
            self._unfit(effect.worker, link.generation, "it does not take its commands")  # its end answers for this one

    def _reply_to(self, client: int, message: Reply) -> None:
        link = self._links.get(client)
        if link is None or not link.identity:
            return
        if isinstance(message, StatsReply):
            message = msgspec.structs.replace(
                message, memory=ledger.resident(self._members(message)), journal_bytes=self._journal.file_bytes
            )
        elif isinstance(message, Faults) and self._points is not None:
            message = msgspec.structs.replace(message, points=dict(self._points.passed))
        try:
            frame = encode(message)
        except EncodeError as exc:
            log.error("reply cannot be encoded", extra=fields(client=client, why=str(exc)))
            frame = encode(Failed(message.seq, "internal", str(exc)))
        sent = self._clients.send(link.identity, frame)
        if sent is Sent.TOO_LARGE:
            self._clients.send(
                link.identity, encode(Failed(message.seq, "too_large", "the reply passes the size limit"))
            )
        elif sent is Sent.FULL:
            self._drop_deaf(link, "it does not read")
        elif sent is Sent.UNREACHABLE:  # its half of the lifeline may be open still
            self._drop_deaf(link, "it cannot be reached")

    def _renew_lock(self) -> None:
        """From time to time: whoever cleans up /dev/shm may have removed the lock's file."""
        try:
            self._lock.renew()
        except (InstanceLocked, OSError) as exc:
            if not self._lock_lost:
                log.error("somebody removed the instance lock, and it cannot be taken anew", extra=fields(why=str(exc)))
            self._lock_lost = True
        else:
            self._lock_lost = False

    def _sample_memory(self, effect: SampleMemory) -> None:
        self._renew_lock()
        start_s = time.monotonic()
        found: list[tuple[Target, Reading | None]] = []
        for target in effect.targets:
            with contextlib.suppress(OSError):  # no descriptor to read with: the next round tries again
                found.append((target, self._read_memory(target)))
        self._event(functools.partial(self._core.sampled, found))
        self._core.state.memory.note_cost(time.monotonic() - start_s)

    def _read_memory(self, target: Target) -> Reading | None:
        if target.role is not Role.TEMPLATE:
            return ledger.read_parts(target.pid)
        template = self._processes.template
        return ledger.read_parts(template.pid, settled=template.ready is not None) if template is not None else None

    def _members(self, shown: StatsReply) -> list[ledger.Member]:
        """The daemon's processes, and the engines that this reply may name."""
        members = [ledger.Member("supervisor", os.getpid())]
        if self._processes.template is not None:
            members.append(ledger.Member("template", self._processes.template.pid))
        members.extend(ledger.Member(proc.worker, proc.pid) for proc in self._processes.workers.values())
        members.extend(ledger.Member(f"engine {engine.engine}", engine.pid) for engine in shown.engines if engine.pid)
        return members

    def _forward(self, effect: ForwardDescriptor) -> None:
        worker = self._worker_links.get(effect.worker)
        if worker is not None:
            find = functools.partial(self._find_descriptor, effect.client, effect.descriptor)
            worker.channel.pass_on(effect.worker_tag, find)

    def _find_descriptor(self, client: int, tag: int) -> int | None:
        link = self._links.get(client)
        return None if link is None else link.descriptors.find(tag)

    def _close_descriptor(self, effect: CloseDescriptor) -> None:
        link = self._links.get(effect.client)
        if link is not None:
            link.descriptors.close(effect.descriptor)

    def _spawn(self, effect: SpawnWorker) -> None:
        token = os.urandom(16)
        plan = self._plans[effect.worker]
        faults = faults_of(plan.faults, effect.generation)
        identity = f"{effect.worker}#{effect.generation}#".encode() + os.urandom(16)
        spec = msgspec.structs.replace(
            plan, generation=effect.generation, token=token, identity=identity, faults=faults
        )
        channel = WorkerChannel(effect.worker, self._workers, identity)
        self._worker_links[effect.worker] = WorkerLink(effect.generation, token, identity, channel)
        self._worker_identities[identity] = effect.worker
        self._processes.spawn(spec, self._now.now_s)

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Close sockets and descriptors, end the template. The lifelines come first: a client that is told by them
        takes the last replies in, which its ZeroMQ drops as soon as ours has closed.
        """
        for link in self._links:
            self._close_lifeline(link.lifeline)
            self._close_pidfd(link)
            link.descriptors.close_all()
        for worker in self._worker_links.values():
            if worker.channel.lifeline is not None:
                self._close_lifeline(worker.channel.lifeline)
        for lifeline in self._unclaimed.values():
            lifeline.close()
        for client in list(self._ending):
            self._stop_awaiting(client)
        self._processes.close(timeout_s)
        self._listener.close()
        self._clients.close()
        self._workers.close()
        for pidfd in self._formers.values():
            os.close(pidfd)
        self._formers.clear()
        self._epoll.close()
        signal.set_wakeup_fd(-1)
        for end in (self._signals, self._wakeup):
            if end is not None:
                end.close()


def faults_of(orders: dict[str, str], generation: int) -> dict[str, str]:
    """Of faults like ``copy_error`` (of every generation) and ``copy_error#1`` (of the first) those of one."""
    found: dict[str, str] = {}
    for name, when in orders.items():
        fault, _, only = name.partition("#")
        if not only or int(only) == generation:
            found[fault] = when
    return found


def _one_frame(incoming: Incoming) -> bytes:
    """The frame of a message.

    Raises:
        BadFrame: it has none or more than one.
    """
    if incoming.frame_count != 1:
        raise BadFrame("bad_frame", f"a message has one frame after the identity, got {incoming.frame_count}")
    return incoming.frame


def _parent(pid: int) -> int:
    """Parent of a process, or -1."""
    try:
        return psutil.Process(pid).ppid() if pid > 0 else -1
    except (psutil.Error, OSError):
        return -1
