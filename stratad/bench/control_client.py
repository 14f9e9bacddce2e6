"""One of the many clients of ``stratactl bench control``: a process of its own, driven line by line."""

import argparse
import sys
import time
from pathlib import Path
from typing import Final, Self, TypeAlias

import msgspec

from stratad.bench.control_work import CONVERSATIONS, Work
from stratad.bench.cpu_engine import CpuEngine
from stratad.bench.engine_wire import Bye, Failed, Line, Quit
from stratad.bench.line_process import LineProcess, start_process
from stratad.client import Client
from stratad.errors import StratadError

# A conversation of 64 tokens: less than a chunk.
TOKENS: Final = 64
ROW_BYTES: Final = 256
SLOTS: Final = 4
START_S: Final = 60.0


class Capture(Line, frozen=True, tag="capture"):
    """Capture so many conversations, one after the other."""

    count: int


class Captured(Line, frozen=True, tag="captured"):
    """Answer to `Capture`: how long each took; empty when the process is ready for its first order."""

    seconds: list[float]


_Order: TypeAlias = Capture | Quit
_Answer: TypeAlias = Captured | Failed | Bye


class ClientProcess(LineProcess):
    """Such a process, for whoever drives it."""

    @classmethod
    def start(cls, run_dir: Path, instance: str, number: int, stages: int, log: Path) -> Self:
        """Start it and return at once; its first answer says that it is registered."""
        arguments = [f"--run-dir={run_dir}", f"--instance={instance}", f"--number={number}", f"--stages={stages}"]
        return cls(start_process("stratad.bench.control_client", arguments, log), log, _Answer)


def main() -> int:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    args = parser.parse_args()
    try:
        with Client.connect(
            args.run_dir, args.instance, deadline_s=START_S, name=f"bench client {args.number}"
        ) as client:
            devices = [f"cpu:{stage}" for stage in range(args.stages)]
            with CpuEngine.register(client, devices, tokens=TOKENS, row_bytes=ROW_BYTES, slots=SLOTS) as engine:
                first = (args.number + 1) * CONVERSATIONS  # nobody else's tokens
                _serve(Work(engine, prefix=f"client-{args.number}-", first_token=first))
    except StratadError as exc:
        _say(Failed(exc.code, exc.message))
        return 1
    _say(Bye())
    return 0


def _serve(work: Work) -> None:
    _say(Captured([]))
    decoder: msgspec.json.Decoder[_Order] = msgspec.json.Decoder(_Order)
    for line in sys.stdin:
        order = decoder.decode(line)
        if isinstance(order, Quit):
            return
        seconds: list[float] = []
        for _ in range(order.count):
            work.stamp()
            started_s = time.perf_counter()
            work.capture()
            seconds.append(time.perf_counter() - started_s)
        _say(Captured(seconds))


def _say(answer: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
