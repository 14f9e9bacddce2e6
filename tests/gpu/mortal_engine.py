"""An engine in a process of its own that is there to be killed: two stages, on two GPUs where there are several, known
bytes, driven by JSON lines on standard input.

Orders: ``fill`` (by `seed`, on the stream and not waited for), ``mark``, ``plain``, ``write`` (invert a row on one
stage), ``restore`` (into zeroed pools; then the rows are compared with what the fill with `seed` had at `source`),
``goodbye``.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from shm.layout import Plane
from stratad.client import Client, StagePool
from stratad.errors import StratadError
from tests.gpu.cards import card_of, synchronize
from tests.support.client_rig import FINGERPRINT
from tests.support.daemon import DaemonProcess
from tests.support.layouts import stage_layout

REPOSITORY: Final = Path(__file__).resolve().parents[2]
STAGES: Final = 2
ROWS, ROW_BYTES, PLANES = 4096, 4096, 16
LAYOUT: Final = stage_layout([Plane(n * ROWS * ROW_BYTES, ROW_BYTES, ROW_BYTES, ROWS) for n in range(PLANES)])
POOL_BYTES: Final = PLANES * ROWS * ROW_BYTES


class _Engine:
    """What the process does with each order."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._pools = [torch.zeros(POOL_BYTES, dtype=torch.uint8, device=card_of(stage)) for stage in range(STAGES)]
        stages = [StagePool(str(pool.device), LAYOUT, pool) for pool in self._pools]
        self._engine = client.register("e", namespace, FINGERPRINT, stages)

    def answer(self, op: str, **told: object) -> dict[str, object]:
        match op:
            case "fill":
                for stage, pool in enumerate(self._pools):
                    with torch.cuda.device(pool.device):
                        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
                        pool.copy_(_content(int(str(told["seed"])), stage))
            case "write":
                stage, row = int(str(told["stage"])), int(str(told["row"]))
                self._pools[stage].view(PLANES, ROWS, ROW_BYTES)[:, row] ^= 255
                synchronize()
            case "plain":
                self._engine.mark(told["slot"], told["mark"])  # type: ignore[call-overload]
            case "mark":
                return self._mark(**told)  # type: ignore[arg-type]
            case "restore":
                return {"same": self._restore(**told)}  # type: ignore[arg-type]
            case "goodbye":
                self._client.close()
        return {}

    def _mark(self, conversation: str, tokens: int, first: int, slot: int) -> dict[str, object]:
        rows = range(first, first + tokens)
        marked = self._engine.mark(slot, "clean", conversation=conversation, tokens=range(tokens), rows=rows).result()
        return {"tokens": marked.tokens, "digested": marked.digested_bytes}

    def _restore(self, conversation: str, seed: int, tokens: int, source: int, target: int) -> bool:
        for pool in self._pools:
            pool.zero_()
        self._engine.restore(conversation, rows=range(target, target + tokens)).result()
        for stage, pool in enumerate(self._pools):
            planes = pool.view(PLANES, ROWS, ROW_BYTES)
            expected = _content(seed, stage).view(PLANES, ROWS, ROW_BYTES)[:, source : source + tokens]
            if not torch.equal(planes[:, target : target + tokens], expected):
                return False
            planes[:, target : target + tokens] = 0
            if int(torch.count_nonzero(pool)):
                return False
        return True


def _content(seed: int, stage: int) -> torch.Tensor:
    card = card_of(stage)
    generator = torch.Generator(device=card).manual_seed(1000 * seed + stage)
    return torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device=card, generator=generator)


def main(run_dir: str, instance: str, namespace: str) -> None:
    """Serve until the end of standard input, which is a death without goodbye."""
    torch.cuda.set_device(0)
    client = Client.connect(run_dir, instance, deadline_s=60.0)
    engine = _Engine(client, namespace)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        try:
            answer = engine.answer(**json.loads(line))
        except StratadError as exc:
            answer = {"code": exc.code}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class GpuMortalEngine:
    """One such process, registered at a daemon. `with` it: killed at the end."""

    def __init__(self, daemon: DaemonProcess, namespace: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.mortal_engine", str(daemon.run_dir), daemon.instance, namespace]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
        )
        self._read()

    def ask(self, op: str, **told: object) -> dict[str, object]:
        """Give one order and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **told}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10)}"
        answer: dict[str, object] = json.loads(line)
        return answer

    def kill(self) -> None:
        """SIGKILL; back when it is gone. Idempotent."""
        self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
