"""The only poll loop of the daemon: sockets and processes in, the core's effects out."""

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import time
from typing import Final, assert_never

import msgspec

from ipc.lifeline import LifelineServer, Refused
from ipc.logs import fields
from ipc.messages import CopyCommand, Faults, MemoryReply, Reply, StatsReply, WorkerSpec
from ipc.server import FLUSH_S
from shm.janitor import remove_segment
from stratad import ledger
from stratad.access import Access
from stratad.client_side import ClientSide
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
from stratad.core.memory_tracks import Reading, Role, Target
from stratad.core.state import Instant
from stratad.core.views import status_line
from stratad.door import Door
from stratad.fault_points import FaultPoints
from stratad.foreign import ForeignProcesses
from stratad.journal import AGAIN_S, Journal, JournalError
from stratad.links import Endpoints, RefusalLog
from stratad.lock import InstanceLock, InstanceLocked
from stratad.notify import Notifier
from stratad.open_files import spare_files
from stratad.processes import Processes
from stratad.turn import Turn
from stratad.watch import Watch
from stratad.worker_side import WorkerSide

log = logging.getLogger(__name__)
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
ACCEPT_LIMIT: Final = 16
# So long another daemon might find the instance without its lock; one with another run directory would take it over.
LOCK_EVERY_S: Final = 0.5
# Of a turn that takes longer the workers are not to blame. An ordinary one takes milliseconds.
STILL_S: Final = 0.5
# How often the loop looks at all that no message tells of while messages come: a small operation takes less than this.
HOUSE_MS: Final = 2
# What may follow the time for a graceful stop: SIGKILL, its proof (10 s), and freeing a large arena.
END_S: Final = 30.0


class Supervisor:
    """Everything the daemon does, in one thread. `run` returns after a graceful stop."""

    def __init__(
        self,
        core: Core,
        endpoints: Endpoints,
        processes: Processes,
        plans: dict[str, WorkerSpec],
        access: Access,
        *,
        watch: Watch,
        journal: Journal,
        lock: InstanceLock,
        stop_s: float,
        unread_s: float,
        notifier: Notifier,
        points: FaultPoints | None = None,
    ) -> None:
        self._core = core
        self._trace = core.state.trace
        self._points = points
        self._notifier = notifier
        self._access = access
        self._journal = journal
        self._mend_again_s = 0.0
        self._lock = lock
        self._lock_lost = False
        self._lock_due_s = 0.0
        self._refusals = RefusalLog()
        self._stop_s = stop_s
        self._stop_deadline_s: float | None = None
        self._watch = watch
        self._poller = select.poll()
        self._house_s = 0.0
        self._house_waits = False
        self._signals: socket.socket | None = None
        self._wakeup: socket.socket | None = None
        self._turn = turn = Turn(core, self._perform, self._not_performed, self._performed)
        self._listener: LifelineServer = endpoints.lifelines
        self._clients = ClientSide(turn, watch, endpoints.clients, unread_s)
        self._door = Door.at(endpoints.clients, self._clients.lifelines_of, self._refused)
        self._workers = WorkerSide(turn, watch, endpoints.workers, processes, plans)
        self._foreign = ForeignProcesses(turn, watch)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal asks to stop and every worker has ended."""
        self._catch_signals()
        self._workers.start()
        for source in (self._clients.server, self._workers.server, self._door, self._watch):
            self._poller.register(source.fileno(), select.POLLIN)
        self._watch.add(self._listener.fileno(), self._on_connect)
        self._turn.tell_time()
        self._turn.event(self._core.start)
        self._turn.event(self._core.tick)
        self._notifier.ready()
        while not (self._core.stopped and self._workers.processes.workers.keys() <= self._core.stuck):
            self._take_turn()

    def _take_turn(self) -> None:
        clients, workers = self._clients.server, self._workers.server
        # Their descriptors tell of changes only, which what was sent in the last turn may have taken in.
        more_clients, more_workers, more_arrivals = clients.readable, workers.readable, self._door.readable
        more = more_clients or more_workers or more_arrivals
        wait_ms = 0 if more else HOUSE_MS if self._house_waits else self._wait_ms()
        before_s = self._turn.now.now_s
        ready = {descriptor for descriptor, _ in self._poller.poll(wait_ms)}
        now = self._turn.tell_time()
        lost_s = now.now_s - before_s - wait_ms / 1000.0
        if lost_s > STILL_S:  # stopped, or held up by a call: others did their work meanwhile, and nobody looked
            log.warning("the daemon's loop stood still", extra=fields(for_s=round(lost_s, 3)))
            self._turn.event(functools.partial(self._core.stood_still, lost_s))
        if more_workers or workers.fileno() in ready:  # before the descriptors: what a dead worker still said counts
            self._workers.receive()
        if more_clients or clients.fileno() in ready:
            self._clients.receive()
        if more_arrivals or self._door.fileno() in ready:
            self._door.tend()
        if self._watch.fileno() in ready:
            for handler in self._watch.ready():
                try:
                    handler()
                except Exception:  # noqa: BLE001 - out of descriptors, say: one peer's trouble, not everybody's end
                    self._turn.bug("descriptor", getattr(handler, "__name__", "handler"))
        # While messages come one upon the other, the rest is looked at now and then only.
        self._house_waits = (more or bool(ready)) and now.now_s < self._house_s
        if not self._house_waits:
            self._house_s = now.now_s + HOUSE_MS / 1000.0
            self._keep_house(now)

    def _keep_house(self, now: Instant) -> None:
        """Everything that is due by time, or was put off."""
        self._workers.tend(now.now_s)
        self._foreign.tend(now.now_s)
        if self._core.due_s <= now.now_s:
            self._turn.event(self._core.tick)
        self._clients.flush(now.now_s)
        self._workers.flush()
        self._journal.tend(now.now_s)
        if self._journal.damaged:
            self._mend_journal(now.now_s)
        self._renew_lock(now.now_s)
        if self._stop_deadline_s is not None and self._stop_deadline_s <= now.now_s:
            self._stop_deadline_s = None
            self._turn.event(functools.partial(self._core.kill_all, "the time for a graceful stop is over"))
        self._notifier.beat(now.now_s, lambda: status_line(self._core.state))

    def _mend_journal(self, now_s: float) -> None:
        """Somebody cut the journal short: what it said is known here."""
        if now_s < self._mend_again_s:
            return
        self._mend_again_s = now_s + AGAIN_S
        try:
            self._journal.write_anew(self._core.all_records())
        except JournalError as exc:
            log.error("the journal was cut short and cannot be written anew", extra=fields(why=str(exc)))
        else:
            log.error("the journal was cut short by somebody; it is written anew")

    def _wait_ms(self) -> int:
        if self._journal.compacting:
            return 0
        now_s = time.monotonic()
        wait_s = min(self._core.due_s - now_s, self._notifier.due_s - now_s, self._lock_due_s - now_s)
        if self._stop_deadline_s is not None:
            wait_s = min(wait_s, self._stop_deadline_s - now_s)
        if self._clients.server.pending_count:
            wait_s = min(wait_s, FLUSH_S)
        wait_s = self._foreign.wait_s(now_s, self._workers.wait_s(now_s, wait_s))
        return max(int(wait_s * 1000) + 1, 0) if wait_s > 0 else 0

    def _on_connect(self) -> None:
        for _ in range(ACCEPT_LIMIT):
            lifeline = self._listener.admit(self._core.state.settings.start_id, self._access.why_not, self._spare_files)
            if lifeline is None:
                return
            if isinstance(lifeline, Refused):
                self._refused(lifeline)
                continue
            # One of another user is no worker of ours, whatever its pid was before.
            if lifeline.peer.uid != self._access.own_uid or not self._workers.claim(lifeline):
                self._clients.add(lifeline)

    def _refused(self, refused: Refused) -> None:
        self._core.state.count("peers_refused")
        self._refusals.add(refused, self._turn.now.now_s)

    def _spare_files(self, pid: int) -> int:
        """How many descriptors must be left once a peer has been let in. ZeroMQ aborts the process where it cannot
        accept a connection: who will open one is turned away before.
        """
        return 0 if self._workers.is_child_of_template(pid) else spare_files()

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
        self._watch.add(self._signals.fileno(), self._on_signal)

    def _on_signal(self) -> None:
        assert self._signals is not None
        numbers = set(self._signals.recv(4096))
        if signal.SIGCHLD in numbers:
            self._workers.reap_orphans()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            if self._core.state.stopping:
                log.info("second signal to stop: already stopping")
                return
            log.info("stopping", extra=fields(within_s=self._stop_s))
            self._stop_deadline_s = time.monotonic() + self._stop_s
            self._notifier.stopping(self._stop_s + END_S)
            self._turn.event(self._core.stop)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if self._points is None:
            self._carry_out(effect)
        else:
            self._points.pass_by(effect, "before")
            self._carry_out(effect)
            self._points.pass_by(effect, "after")

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendTo():
                if self._trace.on and isinstance(effect.command, CopyCommand):
                    self._trace.note_sent(effect.command.job, time.monotonic())  # its worker may be faster than we
                self._workers.send(effect)
            case ReplyTo():
                self._reply_to(effect.client, effect.message)
                if self._trace.unanswered:
                    self._trace.note_reply(effect.client, effect.message.seq, time.monotonic())
            case LogLine():
                log.log(LEVELS[effect.level], "%s", effect.message, extra=fields(**dict(effect.fields)))
            case ForwardDescriptor():
                find = functools.partial(self._clients.find_descriptor, effect.client, effect.descriptor)
                self._workers.forward(effect.worker, effect.worker_tag, find)
            case CloseDescriptor():
                self._clients.close_descriptor(effect.client, effect.descriptor)
            case SpawnWorker():
                self._workers.spawn(effect)
            case KillWorker():
                self._workers.kill(effect)
            case Append():
                self._append(effect)
            case WatchFormer():
                self._foreign.watch_former(effect)
            case KillFormer():
                self._foreign.kill_former(effect.worker)
            case UnlinkSegment():
                remove_segment(effect.segment)
            case SampleMemory():
                self._sample_memory(effect)
            case DropClient():
                self._clients.drop_later(effect.client)
            case AwaitEnd():
                self._foreign.await_end(effect)
            case StopAwaiting():
                self._foreign.stop_awaiting(effect.client)
            case _:
                assert_never(effect)

    def _not_performed(self, effect: Effect) -> None:
        """An effect met a bug of ours. Where somebody waits for what comes of it, that is an error now."""
        match effect:
            case SendTo() | ForwardDescriptor():
                self._workers.cannot_be_told(effect.worker)
            case AwaitEnd():
                self._turn.event(functools.partial(self._core.process_ended, effect.client, proven=False))
            case _:
                pass

    def _performed(self) -> None:
        """Clients that are to be dropped go after the last effect, since their end has effects."""
        self._clients.drop_dropped()

    def _append(self, effect: Append) -> None:
        error = ""
        start_s = time.monotonic()
        try:
            self._journal.append(effect.records)
        except JournalError as exc:
            error = str(exc)
        except Exception as exc:  # noqa: BLE001 - whoever waits for the record must hear of it, or he waits for good
            self._turn.bug("append", ",".join(sorted({type(record).__name__ for record in effect.records})))
            error = f"a bug of the daemon, see its log ({exc})"
        self._trace.note_append(time.monotonic() - start_s)
        self._turn.event(functools.partial(self._core.journaled, effect.serial, error))

    def _reply_to(self, client: int, message: Reply) -> None:
        if not self._clients.hears(client):
            return
        if isinstance(message, StatsReply):
            message = msgspec.structs.replace(
                message, memory=ledger.resident(self._members(message)), journal_bytes=self._journal.file_bytes
            )
        elif isinstance(message, MemoryReply):
            message = msgspec.structs.replace(message, journal_bytes=self._journal.file_bytes)
        elif isinstance(message, Faults) and self._points is not None:
            message = msgspec.structs.replace(message, points=dict(self._points.passed))
        self._clients.reply(client, message)

    # --- from time to time --------------------------------------------------------------------------------------------

    def _renew_lock(self, now_s: float) -> None:
        """Whoever cleans up /dev/shm may have removed the lock's file."""
        if now_s < self._lock_due_s:
            return
        self._lock_due_s = now_s + LOCK_EVERY_S
        try:
            self._lock.renew()
        except (InstanceLocked, OSError) as exc:
            if not self._lock_lost:
                log.error("somebody removed the instance lock, and it cannot be taken anew", extra=fields(why=str(exc)))
            self._lock_lost = True
        else:
            self._lock_lost = False

    def _sample_memory(self, effect: SampleMemory) -> None:
        start_s = time.monotonic()
        found: list[tuple[Target, Reading | None]] = []
        for target in effect.targets:
            with contextlib.suppress(OSError):  # no descriptor to read with: the next round tries again
                found.append((target, self._read_memory(target)))
        self._turn.event(functools.partial(self._core.sampled, found))
        self._core.state.memory.note_cost(time.monotonic() - start_s)

    def _read_memory(self, target: Target) -> Reading | None:
        if target.role is not Role.TEMPLATE:
            return ledger.read_parts(target.pid)
        template = self._workers.processes.template
        return ledger.read_parts(template.pid, settled=template.ready is not None) if template is not None else None

    def _members(self, shown: StatsReply) -> list[ledger.Member]:
        """The daemon's processes, and the engines that this reply may name."""
        processes = self._workers.processes
        members = [ledger.Member("supervisor", os.getpid())]
        if processes.template is not None:
            members.append(ledger.Member("template", processes.template.pid))
        members.extend(ledger.Member(proc.worker, proc.pid) for proc in processes.workers.values())
        members.extend(ledger.Member(f"engine {engine.engine}", engine.pid) for engine in shown.engines if engine.pid)
        return members

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Close sockets and descriptors, end the template; lifelines first (see `ClientSide.close_lifelines`)."""
        self._clients.close_lifelines()
        self._workers.close_lifelines()
        self._workers.processes.close(timeout_s)
        self._listener.close()
        self._clients.server.close()
        self._workers.server.close()
        self._foreign.close()
        signal.set_wakeup_fd(-1)
        for end in (self._signals, self._wakeup):
            if end is not None:
                end.close()
