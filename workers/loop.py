"""The only poll loop of a worker: commands in, jobs to the desk and slow orders to their threads, reports out."""

import gc
import logging
import os
import resource
import select
import threading
import time
from pathlib import Path
from typing import Final, TypeAlias, assert_never

from ipc.codec import BadFrame, decode_own, encode
from ipc.lifeline import Life, Lifeline
from ipc.messages import (
    PROTOCOL_VERSION,
    ArmFault,
    BootFailed,
    CancelJob,
    CaptureJob,
    Census,
    ClosePool,
    Command,
    CopyJob,
    DigestJob,
    DisarmFault,
    FaultStruck,
    GroupRestored,
    LaneMoving,
    MakeShuttle,
    OpenPool,
    PoolClosed,
    PoolFailed,
    Report,
    RestoreJob,
    ShuttleFailed,
    ShuttleReady,
    SourceFree,
    StopWorker,
    TakeCensus,
    TraceCopies,
    WorkerHello,
    WorkerReady,
    WorkerSpec,
)
from ipc.stream import LinkError, StreamLink
from shm.under_way import TAG, UnderWay
from workers import exit_codes
from workers.device import Device, LaneKind
from workers.digest import Digester
from workers.fault_orders import FaultBook
from workers.job_desk import DeviceLost, JobDesk, JobLetter, LaneEnded
from workers.orders import PoolLetter, PoolMade, PoolOrders, ShuttleOrders
from workers.threads import Mailbox, TaskThread

_log: Final = logging.getLogger(__name__)
_CONNECT_S: Final = 10.0
# The daemon reads at least every few milliseconds; one that takes no report for this long is as good as gone.
_SEND_S: Final = 10.0
_FRAMES_A_TURN: Final = 64
# After a restart the descriptors of every engine's pool come at once, and who sends them is our own supervisor.
_STASH_LIMIT: Final = 4096
_STOP_S: Final = 5.0
_LANES: Final = tuple(LaneKind)
# How long a worker that cannot start waits for the supervisor to have read why.
_HEARD_MS: Final = 2000

_Letter: TypeAlias = JobLetter | PoolLetter | ShuttleReady | ShuttleFailed | FaultStruck


class Worker:
    """One worker's loop. Owns the device, the link, the lifeline and every thread; `start`, then `run`. `faults` are
    those of the device, where it may have any.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        device: Device,
        digester: Digester,
        lifeline: Lifeline,
        link: StreamLink,
        *,
        faults: FaultBook | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._digester = digester
        self._lifeline = lifeline
        self._link = link
        self._stopping = False
        self._mailbox: Mailbox[_Letter] = Mailbox()
        self._faults = faults
        if faults is not None:
            faults.on_strike = lambda fault: self._mailbox.put(FaultStruck(fault))
        self._shuttles = ShuttleOrders(device, self._mailbox.put, lambda: self._stopping, huge_pages=spec.huge_pages)
        self._pools = PoolOrders(device, lifeline, self._mailbox.put)
        self._desk = JobDesk(
            device,
            self._pools,
            spec.inline_bytes,
            post=self._mailbox.put,
            send=self._send,
            note=self._note,
            small_bytes=spec.small_bytes,
        )
        self._under_way: UnderWay | None = None

    def start(self, forked_s: float) -> None:
        """Start the threads and say that this worker is ready. `forked_s` is the monotonic time of its birth.

        Raises:
            OSError: what is under way cannot be shared with the supervisor.
        """
        self._under_way = UnderWay.create()
        self._lifeline.send_descriptor(TAG, self._under_way.descriptor, _CONNECT_S)
        for thread in self._threads():
            thread.start()
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._send(
            WorkerReady(
                self._spec.device,
                self._device.name,
                self._device.digest_algorithm,
                self._digester.key_id,
                self._device.digest_path,
                cpus,
                time.monotonic() - forked_s,
                self._device.device_bytes,
            )
        )
        # What is here now stays: no later collection has to look at it again.
        gc.freeze()

    def _note(self, lane: LaneKind, job: int) -> None:
        assert self._under_way is not None, "jobs come after the start"
        self._under_way.note(_LANES.index(lane), job)

    def _threads(self) -> list[TaskThread]:
        return [self._shuttles.thread, self._pools.thread, *self._desk.threads]

    def request_stop(self) -> None:
        """Finish the current copies, refuse everything else, then end `run`."""
        if not self._stopping:
            self._stopping = True
            self._desk.stop()

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        lifeline_fd, mailbox_fd, link_fd = self._lifeline.fileno(), self._mailbox.fileno(), self._link.fileno()
        poller = select.poll()
        for source in (link_fd, lifeline_fd, mailbox_fd):
            poller.register(source, select.POLLIN)
        try:
            while not (self._stopping and self._desk.idle):
                timeout_ms = self._desk.timeout_ms()
                ready = [source for source, _ in poller.poll(0 if self._link.readable else timeout_ms)]
                if lifeline_fd in ready and self._lifeline.drain() is Life.ENDED:
                    _log.error("the supervisor is gone")
                    return exit_codes.SUPERVISOR_LOST
                if mailbox_fd in ready:
                    self._read_mailbox()
                if timeout_ms is not None:
                    self._desk.ask_events(time.monotonic())
                if link_fd in ready or self._link.readable:
                    for frame in self._link.recv_all(_FRAMES_A_TURN):
                        self._handle(decode_own(frame, Command))
            return exit_codes.STOPPED
        except BadFrame as exc:
            _log.error("no command of this version code=%s error=%s", exc.code, exc.message)
            return exit_codes.BAD_COMMAND
        except LinkError as exc:
            _log.error("the supervisor takes no reports error=%s", exc)
            return exit_codes.SUPERVISOR_LOST
        except DeviceLost:
            return exit_codes.DEVICE_LOST

    def close(self) -> None:
        """After a clean stop: end the threads, then give everything back."""
        ended = [thread.stop(_STOP_S) for thread in self._threads()]
        self._pools.close_all()
        if all(ended):
            self._device.close()
            self._shuttles.close_all()
        self._link.close()
        self._lifeline.close()
        self._mailbox.close()
        if self._under_way is not None:
            self._under_way.close()

    def _handle(self, command: Command) -> None:
        match command:
            case CaptureJob() | RestoreJob() | CopyJob() | DigestJob():
                self._desk.start(command)
            case CancelJob():
                self._desk.cancel(command.job)
            case MakeShuttle():
                self._shuttles.make(command)
            case OpenPool():
                self._pools.open(command)
            case ClosePool():
                self._pools.close(command.pool)
            case ArmFault() | DisarmFault():
                self._order_fault(command)
            case TraceCopies():
                self._desk.measure(exact=command.on)
            case TakeCensus():
                self._send(Census(command.census, self._resources()))
            case StopWorker():
                self.request_stop()
            case _:
                assert_never(command)

    def _order_fault(self, command: ArmFault | DisarmFault) -> None:
        if self._faults is None:
            _log.error("faults are not allowed here fault=%d", command.fault)
        elif isinstance(command, ArmFault):
            self._faults.arm(command.fault, command.op, command.stage, command.kind, command.at)
        else:
            self._faults.disarm(command.fault)

    def _resources(self) -> dict[str, int]:
        return {
            **self._device.resources(),
            **self._desk.counts,
            "threads": threading.active_count(),
            "fds": _open_files(),
        }

    def _read_mailbox(self) -> None:
        for letter in self._mailbox.take():
            match letter:
                case LaneEnded():
                    self._desk.lane_ended(letter)
                case PoolMade() | PoolFailed() | PoolClosed():
                    answer = self._pools.answer(letter)
                    if answer is not None:
                        self._send(answer)
                case SourceFree() | GroupRestored() | LaneMoving() | ShuttleReady() | ShuttleFailed() | FaultStruck():
                    self._send(letter)
                case _:
                    assert_never(letter)

    def _send(self, report: Report) -> None:
        self._link.send(encode(report), _SEND_S)


def boot_failed(report: BootFailed, lifeline: Lifeline, link: StreamLink) -> int:
    """Say why this worker cannot start, and wait until that was read: an answer of the supervisor, whatever it is, says
    so. Without it the exit status must do. Returns that; closes both.
    """
    try:
        link.send(encode(report), _SEND_S)
        poller = select.poll()
        for source in (link.fileno(), lifeline.fileno()):
            poller.register(source, select.POLLIN)
        poller.poll(_HEARD_MS)
    except LinkError as exc:
        _log.error("the supervisor takes no reports error=%s", exc)
    finally:
        link.close()
        lifeline.close()
    return exit_codes.BOOT_FAILED


def connect(spec: WorkerSpec) -> tuple[Lifeline, StreamLink]:
    """Connect to the supervisor and say hello.

    Raises:
        LifelineError, LinkError: nobody is there.
    """
    lifeline = Lifeline.connect(Path(spec.life_socket), _CONNECT_S, _STASH_LIMIT)
    identity = spec.identity or f"{spec.worker}#{spec.generation}".encode()
    link = StreamLink.connect(
        Path(spec.worker_socket), identity, max_message_bytes=spec.max_message_bytes, timeout_s=_CONNECT_S
    )
    link.send(encode(WorkerHello(spec.worker, spec.generation, spec.token, os.getpid(), PROTOCOL_VERSION)), _SEND_S)
    return lifeline, link


def _open_files() -> int:
    """Descriptors of this process: where none is left to look with, as many as it may have."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - the listing itself is one of them
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
