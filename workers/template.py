"""The template process: has imported what workers need, never touches a device, and forks one worker an order.

Its only peer is the supervisor, at the other end of a SEQPACKET socket pair::

    template -> supervisor   TemplateReady, Forked (with the worker's pidfd), ForkFailed, Exited
    supervisor -> template   WorkerSpec;  end of file: exit

Everything happens on the main thread: a parent-death signal fires when the forking thread ends.
"""

import array
import gc
import os
import select
import signal
import socket
import time
from typing import Final, NoReturn

from ipc.codec import BadFrame, decode, encode
from ipc.logs import setup_logs
from ipc.messages import Exited, Forked, ForkFailed, TemplateNews, TemplateReady, WorkerSpec
from workers import exit_codes
from workers.process import die_with_parent, run_and_exit, set_process_name

_PACKET_BYTES: Final = 256 * 1024


def run_template(channel: socket.socket, import_s: float) -> int:
    """Serve fork orders until the supervisor closes its end; the exit status. Owns `channel`."""
    set_process_name("strata-template")
    setup_logs("info", "text", template=os.getpid())
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A stop that is sent to every process of the service is the supervisor's to carry out; its end of file ends us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A handler of any kind makes the kernel tell of ended children; the wake-up pipe tells the loop.
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # Workers share these pages until somebody writes to them; a collection would write to all.
    gc.collect()
    gc.freeze()
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    try:
        _send(channel, TemplateReady(import_s))
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap(channel)
            if channel.fileno() in ready:
                spec = _receive_spec(channel)
                if spec is None:
                    return exit_codes.STOPPED
                _fork(channel, spec, (wake_read, wake_write))
    except (BadFrame, OSError):
        return exit_codes.SUPERVISOR_LOST


def _receive_spec(channel: socket.socket) -> WorkerSpec | None:
    """The next order, or None at the end of file.

    Raises:
        BadFrame: the packet is no order.
    """
    packet = channel.recv(_PACKET_BYTES)
    return decode(packet, WorkerSpec) if packet else None


def _fork(channel: socket.socket, spec: WorkerSpec, own_fds: tuple[int, int]) -> None:
    template_pid = os.getpid()
    born_s = time.monotonic()
    told_read, told_write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = os.fork()
        except OSError as exc:  # the limit of processes: the workers that are there go on
            _send(channel, ForkFailed(spec.worker, spec.generation, str(exc)))
            return
        if pid == 0:
            os.close(told_write)
            _be_worker(channel, spec, template_pid, born_s, own_fds, told=told_read)
        # Before any reaping, so the number is still this child's.
        pidfd = os.pidfd_open(pid)
        try:
            _send(channel, Forked(spec.worker, spec.generation, pid), pidfd)
        finally:
            os.close(pidfd)
    finally:
        os.close(told_read)
        os.close(told_write)


def _be_worker(
    channel: socket.socket,
    spec: WorkerSpec,
    template_pid: int,
    born_s: float,
    own_fds: tuple[int, int],
    *,
    told: int,
) -> NoReturn:
    die_with_parent(template_pid)
    signal.set_wakeup_fd(-1)
    channel.close()
    # The end of this pipe: the supervisor has been told of us. Who spoke to it before that would be a stranger, who is
    # handed no pool and might write to an arena before it is on record that he may.
    os.read(told, 1)
    for descriptor in (*own_fds, told):
        os.close(descriptor)
    run_and_exit(spec, born_s)


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(channel, Exited(pid, os.waitstatus_to_exitcode(status)))


def _send(channel: socket.socket, news: TemplateNews, descriptor: int = -1) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
    channel.sendmsg([encode(news)], rights, socket.MSG_NOSIGNAL)
