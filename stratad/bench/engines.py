"""The engine process of demo, benchmarks and fault tests: a model in a process of its own, driven line by line.

``python -m stratad.bench.engines --model MODEL ...`` is that process (see `stratad.bench.engine_loop`); `EngineProcess`
starts one and talks to it. Nothing here imports torch: a driver stays small, and outlives any engine that it kills.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeVar

import msgspec

from stratad.bench.engine_wire import LINE_LIMIT_BYTES, Answer, Bye, Failed, Order, Quit, Ready
from stratad.version import package_dir

AnswerType = TypeVar("AnswerType", bound=Answer)

_READ_BYTES: Final = 1 << 16
_LOG_TAIL_LINES: Final = 15
# SIGKILL takes effect when the kernel has torn the process down; a large model's memory takes a while.
_REAP_S: Final = 30.0
_QUIT_S: Final = 20.0


class EngineError(Exception):
    """An engine process did not do what it was asked. `code` is a wire code, ``engine``, ``died`` or ``deadline``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message


@dataclass(frozen=True)
class EngineOptions:
    """How to start an engine process. Without `run_dir` it knows no daemon and never parks.

    `model` is a folder or ``random:SHAPE``; `device` is ``auto`` or a torch device. `devices` names the daemon's device
    of each stage (default: ``cpu:0``, ``cpu:1``, ...; on a GPU all stages lie on it).
    """

    model: str
    run_dir: Path | None = None
    instance: str = "default"
    stages: int = 2
    device: str = "cpu"
    dtype: str = "bfloat16"
    slots: int = 1
    max_tokens: int = 2048
    namespace: str = "bench"
    seed: int = 1
    threads: int = 0
    devices: Sequence[str] = field(default=())

    def arguments(self) -> list[str]:
        """The command line after the module's name."""
        given = [f"--model={self.model}", f"--instance={self.instance}", f"--stages={self.stages}"]
        given += [f"--device={self.device}", f"--dtype={self.dtype}", f"--slots={self.slots}"]
        given += [f"--max-tokens={self.max_tokens}", f"--namespace={self.namespace}", f"--seed={self.seed}"]
        given += [f"--threads={self.threads}"]
        if self.run_dir is not None:
            given.append(f"--run-dir={self.run_dir}")
        if self.devices:
            given.append(f"--devices={','.join(self.devices)}")
        return given


class EngineProcess:
    """One engine process, owned by whoever started it. Used by one thread."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process: Final = process
        self._orders: Final[IO[bytes]] = process.stdin
        self._answers: Final[IO[bytes]] = process.stdout
        self._log: Final = log
        self._received = bytearray()
        self._decoder: Final = msgspec.json.Decoder(Answer)

    @classmethod
    def start(cls, options: EngineOptions, log: Path) -> Self:
        """Start it and return at once; `ready` waits. Its standard error is appended to `log`."""
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stratad.bench.engines", *options.arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                bufsize=0,
                env=engine_environment(),
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """The process's pid, also after its end."""
        return self._process.pid

    def ready(self, deadline_s: float) -> Ready:
        """Wait until the model is loaded (and registered).

        Raises:
            EngineError: it failed, died, or took longer than `deadline_s` seconds.
        """
        return self._answer(Ready, time.monotonic() + deadline_s)

    def call(self, order: Order, expected: type[AnswerType], deadline_s: float) -> AnswerType:
        """Give one order and wait for its answer.

        Raises:
            EngineError: it failed, died, or took longer than `deadline_s` seconds.
        """
        until_s = time.monotonic() + deadline_s
        self._send(msgspec.json.encode(order) + b"\n", until_s)
        return self._answer(expected, until_s)

    def kill(self) -> int:
        """SIGKILL by pid, wait until it is gone, and return its exit code (-9 if the signal ended it).

        Raises:
            EngineError: it is not gone after half a minute.
        """
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        return self._reap(_REAP_S)

    def quit(self) -> int:
        """Let it end by itself; killed if it does not. Returns the exit code."""
        if self._process.poll() is None:
            with contextlib.suppress(EngineError):
                self.call(Quit(), Bye, _QUIT_S)
                return self._reap(_QUIT_S)
        return self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _reap(self, timeout_s: float) -> int:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineError("deadline", f"engine process {self.pid} is not gone after {timeout_s:g} s") from None
        self._orders.close()
        self._answers.close()
        return code

    def _send(self, line: bytes, until_s: float) -> None:
        """Write a line; a pipe holds 64 KiB, so an engine that does not read must not hold us up for ever."""
        os.set_blocking(self._orders.fileno(), False)
        left = memoryview(line)
        while left:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([], [self._orders], [], left_s)[1]:
                raise EngineError("deadline", f"engine process {self.pid} does not read its orders")
            try:
                left = left[os.write(self._orders.fileno(), left) :]
            except BrokenPipeError:
                raise self._died() from None

    def _answer(self, expected: type[AnswerType], until_s: float) -> AnswerType:
        line = self._line(until_s)
        try:
            answer = self._decoder.decode(line)
        except msgspec.MsgspecError as exc:
            raise EngineError("bad_frame", f"engine process {self.pid} answered {line[:200]!r}: {exc}") from exc
        if isinstance(answer, Failed):
            raise EngineError(answer.code, answer.message)
        if not isinstance(answer, expected):
            raise EngineError("bad_frame", f"expected {expected.__name__}, got {type(answer).__name__}")
        return answer

    def _line(self, until_s: float) -> bytes:
        while True:
            line, found, rest = self._received.partition(b"\n")
            if found:
                self._received = rest
                return bytes(line)
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise EngineError("deadline", f"engine process {self.pid} has not answered in time")
            piece = os.read(self._answers.fileno(), _READ_BYTES)
            if not piece:
                raise self._died()
            self._received += piece
            if len(self._received) > LINE_LIMIT_BYTES:
                raise EngineError("bad_frame", f"engine process {self.pid} sent a line without end")

    def _died(self) -> EngineError:
        """Its output ended: say how, with the end of its log."""
        try:
            how = f"exit code {self._process.wait(_QUIT_S)}"
        except subprocess.TimeoutExpired:
            how = "its output is closed"
        try:
            said = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        except OSError:
            said = ""
        return EngineError("died", f"engine process {self.pid} ended ({how})" + (f":\n{said}" if said else ""))


def engine_environment() -> dict[str, str]:
    """Our environment, the folder of our packages on the import path, and a model library that asks no network."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what torch asks for to be deterministic on a GPU
    home = package_dir("stratad")
    if home is not None:
        inherited = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (inherited, str(home.parent)) if part)
    return environment


if __name__ == "__main__":
    from stratad.bench.engine_loop import main

    sys.exit(main())
