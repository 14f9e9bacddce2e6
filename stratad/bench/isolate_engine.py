"""The engine process of ``bench isolate``: one stage on one device, small and medium images, captured and restored in
turn. ``python -m stratad.bench.isolate_engine --device DEVICE ...`` reads orders line by line.

After an operation that failed the next ones use another conversation: what is measured is a worker that somebody else
kills, and nothing that the daemon holds against an image for having killed it.
"""

import argparse
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from stratad.bench.cpu_engine import FINGERPRINT, token_ids
from stratad.bench.engine_wire import Bye, Failed, Quit
from stratad.bench.isolate_wire import Answer, Begun, Loss, Order, Work, Worked
from stratad.bench.matrix_memory import Memory, Shape, allocate
from stratad.client import Client, Engine
from stratad.errors import StratadError

PLANES: Final = 4
ROW_BYTES: Final = 4096
SIZES: Final = ("small", "medium")
_SOURCE, _TARGET, _SLOTS = 0, 1, 2
# So many conversations' tokens take turns: what is captured is never known from the capture before.
_VARIANTS: Final = 8
_PR_SET_PDEATHSIG: Final = 1
_CONNECT_S: Final = 60.0
_DEADLINE_S: Final = 30.0
# An engine that was refused does not ask again at once.
_BACK_OFF_S: Final = 0.01
# A worker that was killed is back by then.
_PUBLISH_S: Final = 60.0


class IsolateEngine:
    """A registered engine of one stage, with a copy of what its source slot holds."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._tokens: Final = {"small": chosen.small_tokens, "medium": chosen.medium_tokens}
        self._client: Final = Client.connect(chosen.run_dir, chosen.instance, deadline_s=_CONNECT_S, name="isolate")
        most = max(self._tokens.values())
        self._shape: Final = Shape(_SLOTS, most, PLANES, ROW_BYTES, self._client.welcome.chunk_tokens)
        self._memory: Final[Memory] = allocate(chosen.device, self._shape)
        self._contents: Final = self._shape.contents(chosen.seed, 0)
        self._ids: Final = {
            size: [token_ids(tokens, 1000 * number + variant) for variant in range(_VARIANTS)]
            for number, (size, tokens) in enumerate(self._tokens.items())
        }
        for plane, offset in enumerate(self._shape.parts(_SOURCE)):
            self._memory.write(offset, self._part(plane, most))
        self._namespace: Final = f"isolate-{chosen.seed}"
        pools = [self._memory.pool]
        self._engine: Final[Engine] = self._client.register("isolate", self._namespace, FINGERPRINT, pools)
        self._epoch = 0
        self._captures = 0
        for size in SIZES:
            self._capture(size)

    def work(self, order: Work) -> Worked:
        """Carry out an order."""
        seconds: dict[str, list[float]] = {f"{op} {size}": [] for size in SIZES for op in ("capture", "restore")}
        losses: dict[tuple[str, str], Loss] = {}
        done = 0
        while (done < order.count) if order.count else not _waiting():
            done += 1
            for size in SIZES:
                if self._step("capture", size, seconds, losses):
                    time.sleep(order.pause_s)
                    self._step("restore", size, seconds, losses)
                time.sleep(order.pause_s)
        return Worked(seconds, list(losses.values()), self._is_exact())

    def _step(self, op: str, size: str, seconds: dict[str, list[float]], losses: dict[tuple[str, str], Loss]) -> bool:
        arm = f"{op} {size}"
        started_s = time.perf_counter()
        try:
            self._capture(size) if op == "capture" else self._restore(size)
        except StratadError as exc:
            before = losses.get((arm, exc.code), Loss(arm, exc.code, 0, exc.message))
            losses[arm, exc.code] = msgspec.structs.replace(before, count=before.count + 1)
            self._epoch += 1
            time.sleep(_BACK_OFF_S)
            return False
        seconds[arm].append(time.perf_counter() - started_s)
        return True

    def _capture(self, size: str) -> None:
        rows = self._rows(size, _SOURCE)
        name = f"{size}-{self._epoch}"
        self._captures += 1
        ids = self._ids[size][self._captures // len(SIZES) % _VARIANTS]
        self._engine.capture(name, ids, rows=rows, slot=_SOURCE, deadline_s=_DEADLINE_S).result()

    def _restore(self, size: str) -> None:
        rows = self._rows(size, _TARGET)
        self._engine.restore(f"{size}-{self._epoch}", rows=rows, slot=_TARGET, deadline_s=_DEADLINE_S).result()

    def _is_exact(self) -> bool:
        """Capture again what there is, restore it into zeroed rows and compare every byte."""
        for size in SIZES:
            self._publish(size)
            part_bytes = self._tokens[size] * ROW_BYTES
            for offset in self._shape.parts(_TARGET):
                self._memory.write(offset, bytes(part_bytes))
            self._restore(size)
            for plane, offset in enumerate(self._shape.parts(_TARGET)):
                if self._memory.read(offset, part_bytes) != self._part(plane, self._tokens[size]):
                    return False
        return True

    def _publish(self, size: str) -> None:
        """Capture, as often as it takes until the worker is back.

        Raises:
            StratadError: it does not come back.
        """
        until_s = time.monotonic() + _PUBLISH_S
        while True:
            try:
                return self._capture(size)
            except StratadError:
                if time.monotonic() > until_s:
                    raise
                self._epoch += 1
                time.sleep(_BACK_OFF_S)

    def _part(self, plane: int, tokens: int) -> bytes:
        """What the first rows of a plane hold in the source slot."""
        first = plane * self._shape.tokens * ROW_BYTES
        return self._contents[first : first + tokens * ROW_BYTES]

    def _rows(self, size: str, slot: int) -> tuple[tuple[int, int], ...]:
        return ((slot * self._shape.tokens, self._tokens[size]),)

    def close(self) -> None:
        """Give up all images and leave. Raises what the client raises."""
        self._client.clear(self._namespace)
        self._engine.unregister()
        self._client.close()


def _waiting() -> bool:
    """Whether the next order is there, or the driver is gone."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve orders until told to quit, or until the driver is gone."""
    parser = argparse.ArgumentParser(prog="python -m stratad.bench.isolate_engine")
    parser.add_argument("--run-dir", type=Path, required=True, help="the daemon's run directory")
    parser.add_argument("--instance", required=True, help="the daemon's instance")
    parser.add_argument("--device", required=True, help="the daemon's name of the stage's device")
    parser.add_argument("--small-tokens", type=int, default=16)
    parser.add_argument("--medium-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1, help="of the contents; names the namespace")
    chosen = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints goes to the log
    try:
        engine = IsolateEngine(chosen)
    except (StratadError, RuntimeError, OSError) as exc:
        traceback.print_exc()
        _say(answers, _failed(exc))
        return 1
    _say(answers, Begun(os.getpid()))
    orders = msgspec.json.Decoder(Order)
    for line in iter(sys.stdin.buffer.readline, b""):
        try:
            order: Order = orders.decode(line)
            answer: Answer = _carry_out(engine, order)
        except Exception as exc:  # noqa: BLE001 - a wrong order must not end the process: the driver decides
            traceback.print_exc()
            answer = _failed(exc)
        _say(answers, answer)
        if isinstance(answer, Bye):
            break
    return 0


def _carry_out(engine: IsolateEngine, order: Order) -> Answer:
    if isinstance(order, Quit):
        engine.close()
        return Bye()
    return engine.work(order)


def _failed(exc: Exception) -> Failed:
    return Failed(exc.code if isinstance(exc, StratadError) else "engine", f"{type(exc).__name__}: {exc}")


def _say(answers: IO[bytes], answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
