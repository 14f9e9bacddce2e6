"""The supervisor's side of one worker, small: sockets, template process, and what came back."""

import array
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from ipc.codec import decode, encode
from ipc.lifeline import Lifeline, LifelineServer
from ipc.messages import Command, Exited, MemfdPool, Report, Stage, TemplateNews, WorkerSpec
from ipc.stream_server import StreamServer
from shm.layout import StageLayout
from shm.process import own_identity
from tests.support.wait import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
R = TypeVar("R", bound=msgspec.Struct)


class SmallSupervisor:
    """Everything that one worker talks to. `with` it: at the end no process is left."""

    def __init__(self, directory: Path) -> None:
        self.router = StreamServer.bind(directory / "worker.sock", max_message_bytes=1 << 24)
        self.listener = LifelineServer.listen(directory / "life.sock")
        self.directory = directory
        self.lifeline: Lifeline | None = None
        self.reports: list[tuple[bytes, Report]] = []
        self.news: list[TemplateNews] = []
        self.pidfds: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channel: socket.socket | None = None

    def spec(self, **changes: object) -> WorkerSpec:
        """A plain cpu worker's spec."""
        plain = WorkerSpec(
            worker="cpu0",
            device="cpu:0",
            generation=1,
            token=bytes(16),
            worker_socket=str(self.directory / "worker.sock"),
            life_socket=str(self.directory / "life.sock"),
            cpus=(0,),
            digest_key=bytes(range(32)),
            slice_bytes=1 << 20,
            staging_bytes=1 << 20,
            inline_bytes=1 << 18,
            link_bytes_per_s=0.0,
            max_message_bytes=1 << 24,
            log_level="info",
        )
        return msgspec.structs.replace(plain, **changes)

    def start(self, *options: str, send_buffer_bytes: int = 0) -> subprocess.Popen[bytes]:
        """Start the template; with `send_buffer_bytes` it can have only so many bytes of news on the way."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if send_buffer_bytes:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        command = [sys.executable, "-P", "-m", "workers.main", "template", "--fd", str(theirs.fileno()), *options]
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        ours.settimeout(0.0)
        self.channel = ours
        self.processes.append(process)
        return process

    def order(self, spec: WorkerSpec) -> None:
        """Send a spec to the template."""
        assert self.channel is not None
        self.channel.sendmsg([encode(spec)])

    def pump(self) -> None:
        """Take in everything that is there."""
        if self.lifeline is None:
            self.lifeline = self.listener.accept(bytes(16))
        self.router.flush()
        for incoming in self.router.recv_all(100):
            self.reports.append((incoming.peer, decode(incoming.frame, Report)))
        while self.channel is not None:
            try:
                packet, ancillary, _, _ = self.channel.recvmsg(65536, socket.CMSG_SPACE(4))
            except BlockingIOError:
                break
            for _, _, data in ancillary:
                self.pidfds.extend(array.array("i", data))
            if not packet:
                break
            self.news.append(decode(packet, TemplateNews))

    def report(self, kind: type[R], timeout_s: float = 10.0) -> R:
        """Wait for a report of this kind and take it out."""

        def find() -> R | None:
            self.pump()
            for at, (_, report) in enumerate(self.reports):
                if isinstance(report, kind):
                    del self.reports[at]
                    return report
            return None

        found = wait_until(find, timeout_s, f"{kind.__name__} among {self.reports}")
        assert found is not None
        return found

    def heard(self, kind: type[R], timeout_s: float = 20.0) -> R:
        """Wait for news of the template of this kind and take it out."""

        def find() -> R | None:
            self.pump()
            for at, news in enumerate(self.news):
                if isinstance(news, kind):
                    del self.news[at]
                    return news
            return None

        found = wait_until(find, timeout_s, f"{kind.__name__} among {self.news}")
        assert found is not None
        return found

    def send(self, command: Command, peer: bytes = b"cpu0#1") -> None:
        """Send one command."""
        self.router.send(peer, encode(command))

    def ask(self, command: Command, kind: type[R]) -> R:
        """Send one command and wait for its answer."""
        self.send(command)
        return self.report(kind)

    def hand_over(self, tag: int, descriptor: int) -> None:
        """Send a descriptor over the lifeline."""
        assert self.lifeline is not None
        self.lifeline.send_descriptor(tag, descriptor, 1.0)

    def stage(self, layout: StageLayout, tag: int, probe: bytes) -> Stage:
        """A stage whose pool travels under `tag`; `probe` are its first 16 bytes."""
        return Stage(0, "cpu:0", MemfdPool(tag, layout.end_bytes), layout, bytes(8), probe)

    def exited(self, timeout_s: float = 10.0) -> Exited:
        """Wait until the template reaped a worker."""
        return self.heard(Exited, timeout_s)

    def close(self) -> None:
        """End every process and close every socket."""
        if self.channel is not None:
            self.channel.close()
        if self.lifeline is not None:
            self.lifeline.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(5)
        for pidfd in self.pidfds:
            os.close(pidfd)
        self.router.close()
        self.listener.close()

    def __enter__(self) -> "SmallSupervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own_process() -> tuple[int, int]:
    """Pid and start time of the calling process, as an engine."""
    identity = own_identity()
    return identity.pid, identity.start_ticks
