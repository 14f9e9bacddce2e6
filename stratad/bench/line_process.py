"""A process that is driven line by line: an order in, an answer out, each a JSON object (`stratad.bench.engine_wire`).

Its driver stays small, owns it, and outlives any such process that it kills.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

import msgspec

from stratad.bench.engine_wire import LINE_LIMIT_BYTES, Bye, Failed, Line, Quit
from stratad.version import package_dir

AnswerType = TypeVar("AnswerType", bound=Line)

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


class LineProcess:
    """One such process, owned by whoever started it. Used by one thread."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, answers: Any) -> None:
        """`answers` is the union of what it may answer."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process: Final = process
        self._orders: Final[IO[bytes]] = process.stdin
        self._answers: Final[IO[bytes]] = process.stdout
        self._log: Final = log
        self._received = bytearray()
        self._decoder: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(answers)

    @property
    def pid(self) -> int:
        """The process's pid, also after its end."""
        return self._process.pid

    def call(self, order: Line, expected: type[AnswerType], deadline_s: float) -> AnswerType:
        """Give one order and wait for its answer.

        Raises:
            EngineError: it failed, died, or took longer than `deadline_s` seconds.
        """
        until_s = time.monotonic() + deadline_s
        self._send(msgspec.json.encode(order) + b"\n", until_s)
        return self._answer(expected, until_s)

    def begin(self, order: Line, deadline_s: float) -> None:
        """Give one order; `answer` waits for what comes of it.

        Raises:
            EngineError: it died, or does not read.
        """
        self._send(msgspec.json.encode(order) + b"\n", time.monotonic() + deadline_s)

    def has_answer(self) -> bool:
        """Whether something can be read of the next answer, or the process has ended."""
        return bool(self._received) or bool(select.select([self._answers], [], [], 0)[0])

    def answer(self, expected: type[AnswerType], deadline_s: float) -> AnswerType:
        """Wait for the next answer.

        Raises:
            EngineError: it failed, died, or took longer than `deadline_s` seconds.
        """
        return self._answer(expected, time.monotonic() + deadline_s)

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


def start_process(module: str, arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Run a module of ours with pipes for orders and answers; its standard error is appended to `log`."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            bufsize=0,
            env=engine_environment(),
        )


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
