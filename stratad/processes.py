"""The template process and the workers that it forks, as the supervisor holds them.

The template is started by `posix_spawn` (no Python runs between fork and exec), single-threaded and free of CUDA; it
forks a worker for each order and hands the worker's pidfd back. When the template dies its workers die with it (their
parent-death signal); the next order starts a new one. A readable pidfd is the only proof that a process is gone.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ipc.codec import BadFrame, decode, encode
from ipc.messages import Exited, Forked, ForkFailed, TemplateNews, TemplateReady, WorkerSpec
from workers.streaming import with_streaming

PACKET_BYTES: Final = 256 * 1024
STATUS_WAIT_S: Final = 0.05
# For the last answers of a worker that has gone; milliseconds, unless the host is very busy.
LAST_WORDS_S: Final = 0.25
TEMPLATE_BACKOFF_S: Final = 1.0
# A template that has taken an order and has not forked this long after the order was to be undone does not work.
UNFORKED_S: Final = 2.0


def describe_status(status: int) -> str:
    """An exit status (or minus the signal) in words."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exited with status {status}"


@dataclass(slots=True, eq=False)
class WorkerProc:
    """A worker's process: `pidfd` proves its end. `status` is known once the template has reaped it."""

    worker: str
    generation: int
    pid: int
    pidfd: int
    status: int | None = None
    gone_s: float | None = None


@dataclass(slots=True)
class Template:
    """The template process with its control socket. Owns its descriptors."""

    pid: int
    pidfd: int
    control: socket.socket
    ready: TemplateReady | None = None

    @classmethod
    def start(cls, *, import_torch: bool) -> "Template":
        """Start the template.

        Raises:
            OSError: the interpreter could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
            command = [sys.executable, "-P", "-m", "workers.main", "template", "--fd", "3"]
            if import_torch:
                command.append("--import-torch")
            try:
                pid = os.posix_spawn(
                    sys.executable,
                    command,
                    with_streaming(os.environ),
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
                    setsigmask=[],
                    setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE],
                )
                pidfd = os.pidfd_open(pid)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return cls(pid, pidfd, ours)

    def order(self, spec: WorkerSpec) -> None:
        """Order a worker.

        Raises:
            OSError: the template is gone or does not read.
        """
        self.control.send(encode(spec))

    def news(self) -> list[tuple[TemplateNews, int]]:
        """What the template has said since, each with the pidfd that came along (-1: none); the caller owns those."""
        found: list[tuple[TemplateNews, int]] = []
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError:
                return found
            if not packet:
                return found
            pidfd = descriptors[0] if descriptors else -1
            try:
                news = decode(packet, TemplateNews)
            except BadFrame:
                if pidfd >= 0:
                    os.close(pidfd)
                continue
            found.append((news, pidfd))

    def close(self) -> None:
        """End of file for the template (it exits and its workers with it); our descriptors are closed."""
        self.control.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(slots=True)
class Processes:
    """All processes of the daemon but the supervisor itself."""

    import_torch: bool
    template: Template | None = None
    workers: dict[str, WorkerProc] = field(default_factory=dict)
    started: int = 0
    next_start_s: float = 0.0
    start_error: str = ""
    waiting: list[WorkerSpec] = field(default_factory=list)
    unforked: dict[str, float] = field(
        default_factory=dict
    )  # worker that is to be killed but was not forked: until when
    unable: list[ForkFailed] = field(default_factory=list)  # orders that came to nothing; the caller takes them out
    dying: int = 0  # workers whose end is proven, whose exit status or last answers are still awaited

    def spawn(self, spec: WorkerSpec, now_s: float) -> None:
        """Order a worker; without a template the order waits for the next one."""
        self.waiting.append(spec)
        self.tend(now_s)

    def tend(self, now_s: float) -> None:
        """Start a template where one is needed and due, and pass waiting orders on.

        A template that cannot be started now (`start_error` says why) is tried again later; the orders wait.
        """
        if not self.waiting:
            return
        if self.template is None:
            if now_s < self.next_start_s:
                return
            self.next_start_s = now_s + TEMPLATE_BACKOFF_S
            try:
                self.template = Template.start(import_torch=self.import_torch)
            except OSError as exc:
                self.start_error = str(exc)
                return
            self.start_error = ""
            self.started += 1
        while self.waiting:
            try:
                self.template.order(self.waiting[0])
            except OSError:
                return
            self.waiting.pop(0)

    def take_news(self) -> list[WorkerProc]:
        """Read the template's news; returns the workers forked since. Those that could not be are in `unable`."""
        forked: list[WorkerProc] = []
        if self.template is None:
            return forked
        for news, pidfd in self.template.news():
            match news:
                case Forked():
                    if pidfd < 0:  # it came without: we have no free descriptor. Unseen it must not live.
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(news.pid, signal.SIGKILL)
                        continue
                    old = self.workers.pop(news.worker, None)
                    assert old is None, "a worker is started again only after its end was told"
                    proc = WorkerProc(news.worker, news.generation, news.pid, pidfd)
                    self.workers[news.worker] = proc
                    self.unforked.pop(news.worker, None)
                    forked.append(proc)
                case ForkFailed():
                    self.unforked.pop(news.worker, None)
                    self.unable.append(news)
                case Exited():
                    for proc in self.workers.values():
                        if proc.pid == news.pid:
                            proc.status = news.status
                case TemplateReady():
                    self.template.ready = news
        return forked

    def template_gone(self) -> int:
        """The template's pidfd is readable: reap it. Returns its exit status (or minus the signal)."""
        assert self.template is not None
        status = 0
        with contextlib.suppress(ChildProcessError):
            _, wait_status = os.waitpid(self.template.pid, 0)
            status = os.waitstatus_to_exitcode(wait_status)
        self.template.close()
        self.template = None
        self.unforked.clear()
        return status

    def reap_orphans(self) -> None:
        """Reap workers whose template died before it could (the supervisor is the subreaper)."""
        template_pid = self.template.pid if self.template is not None else -1
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None or info.si_pid == template_pid:
                return
            _, wait_status = os.waitpid(info.si_pid, 0)
            for proc in self.workers.values():
                if proc.pid == info.si_pid:
                    proc.status = os.waitstatus_to_exitcode(wait_status)

    def gone(self, now_s: float, heard_out: Callable[[WorkerProc], bool]) -> list[tuple[WorkerProc, str]]:
        """Workers proven gone, each with the reason; the caller closes their pidfds. A short wait lets the exit status
        arrive, and another one, until `heard_out`, the last answers. To be asked at each turn while any is `dying`.
        """
        found: list[tuple[WorkerProc, str]] = []
        for proc in list(self.workers.values()):
            if proc.gone_s is None and _readable(proc.pidfd):
                proc.gone_s = now_s
                self.dying += 1
            if proc.gone_s is None:
                continue
            waited_s = now_s - proc.gone_s
            if (proc.status is None and waited_s < STATUS_WAIT_S) or (waited_s < LAST_WORDS_S and not heard_out(proc)):
                continue
            del self.workers[proc.worker]
            self.dying -= 1
            found.append((proc, describe_status(proc.status) if proc.status is not None else "ended"))
        return found

    def kill(self, worker: str, generation: int, now_s: float) -> bool:
        """SIGKILL exactly this generation of a worker. False: its order was still waiting here and is dropped, so there
        is no process and will be none. One that the template has yet to fork is killed when it comes (see
        `hung_template`).
        """
        proc = self.workers.get(worker)
        if proc is not None and proc.generation == generation:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(proc.pidfd, signal.SIGKILL)
            return True
        for spec in self.waiting:
            if spec.worker == worker and spec.generation == generation:
                self.waiting.remove(spec)
                return False
        self.unforked.setdefault(worker, now_s + UNFORKED_S)
        return True

    def hung_template(self, now_s: float) -> bool:
        """Whether the template owes a worker for too long: then it is killed, and its end answers for what it owes."""
        if self.template is None or all(now_s < until_s for until_s in self.unforked.values()):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.template.pidfd, signal.SIGKILL)
        return True

    def by_pid(self, pid: int) -> WorkerProc | None:
        """The worker that runs as `pid`."""
        return next((proc for proc in self.workers.values() if proc.pid == pid), None)

    def close(self, timeout_s: float) -> None:
        """End the template (its workers are gone by now) and reap it; SIGKILL after `timeout_s`."""
        template = self.template
        if template is not None:
            template.control.close()
            if not _readable(template.pidfd, timeout_s):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(template.pidfd, signal.SIGKILL)
                _readable(template.pidfd, timeout_s)
            self.template_gone()
        for proc in self.workers.values():
            os.close(proc.pidfd)
        self.workers.clear()


def _readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
