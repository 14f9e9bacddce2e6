"""An engine in a process of its own that is there to be killed: known bytes, driven by JSON lines on standard input.

Orders: ``fill`` (every byte of every pool, by `seed`), ``mark`` (clean, with contents), ``plain`` (a mark without),
``capture``, ``restore``, ``write`` (invert a byte of a row on one stage), ``zero`` (all pools), ``same`` (whether rows
hold what another row list held after the fill with `seed`), ``goodbye``.
"""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shm.layout import Plane, RowGroup, StageLayout
from stratad.client import Client, GroupRows
from stratad.errors import StratadError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, paged_layout, slot_layout

REPOSITORY: Final = Path(__file__).resolve().parents[2]
WIDE: Final = slot_layout(rows=2048, planes=2, row_bytes=2048)
# 256 tokens of it are 1 MiB: a chunk is a slice, and a slow link shows.
_WINDOW: Final = StageLayout(
    (
        RowGroup((Plane(0, 96, 96, 2048),)),
        RowGroup((Plane(2048 * 96, 16 * 64, 16 * 64, 128, 16, 64),), window_tokens=100),
    )
)
LAYOUTS: Final = {
    "rows": (slot_layout(), slot_layout(planes=3, row_bytes=160)),
    "wide": (WIDE, WIDE),
    "state": (slot_layout(state_bytes=5000), slot_layout(planes=2)),
    "paged": (paged_layout(128), paged_layout(128, planes=2)),
    "window": (_WINDOW, _WINDOW),
}


def rows_of(layout: StageLayout, first: int, tokens: int) -> GroupRows:
    """The rows of every group of a slot whose token 0 is in row `first` (of a paged cache: in its block)."""
    found = []
    for group in layout.groups:
        start = (first + group.first_token(tokens)) // group.tokens_per_row
        found.append(range(start, start + group.rows_for(tokens)))
    return GroupRows(*found)


class _Engine:
    """What the process does with each order."""

    def __init__(self, client: Client, form: str, namespace: str) -> None:
        self._client = client
        self._fake = FakeEngine(client, LAYOUTS[form], namespace=namespace)
        self._fake.register()

    def answer(self, op: str, **told: object) -> dict[str, object]:
        match op:
            case "fill":
                self._fake.random = random.Random(int(str(told["seed"])))
                self._fake.fill()
            case "zero":
                for pool in self._fake.pools:
                    pool.buffer[:] = bytes(pool.nbytes)
            case "write":
                self._write(**told)  # type: ignore[arg-type]
            case "plain":
                self._fake.engine.mark(told["slot"], told["mark"])  # type: ignore[call-overload]
            case "same":
                return {"same": self._same(**told)}  # type: ignore[arg-type]
            case "goodbye":
                self._client.close()
            case _:
                return self._operate(op, **told)  # type: ignore[arg-type]
        return {}

    def _operate(self, op: str, conversation: str, tokens: int, first: int = 0, slot: int = 0) -> dict[str, object]:
        engine, rows = self._fake.engine, [rows_of(layout, first, tokens) for layout in self._fake.layouts]
        checkpoints = [(tokens, slot)] if any(layout.states for layout in self._fake.layouts) else []
        ids = range(tokens)
        match op:
            case "mark":
                marked = engine.mark(slot, "clean", conversation=conversation, tokens=ids, rows_by_stage=rows).result()
                return {"tokens": marked.tokens, "digested": marked.digested_bytes}
            case "capture":
                done = engine.capture(
                    conversation, ids, None, slot, rows_by_stage=rows, checkpoints=checkpoints
                ).result()
                return {"tokens": done.tokens}
            case "restore":
                back = engine.restore(conversation, None, slot, rows_by_stage=rows, tokens=tokens).result()
                return {"tokens": back.tokens}
        raise ValueError(op)

    def _write(self, stage: int, row: int, group: int = 0) -> None:
        plane = self._fake.layouts[stage].all_groups[group].planes[0]
        self._fake.pools[stage].buffer[plane.offset_bytes + row * plane.row_stride_bytes] ^= 1

    def _same(self, seed: int, tokens: int, source: int, target: int, slots: Sequence[int] = (0, 0)) -> bool:
        """Whether the rows from `target` on (and state slot ``slots[1]``) hold what those from `source` on, and state
        slot ``slots[0]``, held after the fill with `seed`.
        """
        other = random.Random(seed)
        for layout, pool in zip(self._fake.layouts, self._fake.pools, strict=True):
            before = other.randbytes(pool.nbytes)
            for group in layout.groups:
                there, here = (
                    list(range(at // group.tokens_per_row + skip, at // group.tokens_per_row + skip + count))
                    for at in (source, target)
                    for skip, count in [(group.first_token(tokens) // group.tokens_per_row, group.rows_for(tokens))]
                )
                end = tokens - group.first_token(tokens)
                for plane in group.planes:
                    size = plane.token_stride_bytes or plane.row_bytes
                    for token in range(end):
                        row, inside = divmod(token, plane.tokens_per_row)
                        a, b = (
                            plane.offset_bytes + rows[row] * plane.row_stride_bytes + inside * size
                            for rows in (there, here)
                        )
                        if before[a : a + size] != pool.buffer[b : b + size]:
                            return False
            for state in layout.states:
                for plane in state.planes:
                    a, b = (plane.offset_bytes + slot * plane.row_stride_bytes for slot in slots)
                    if before[a : a + plane.row_bytes] != pool.buffer[b : b + plane.row_bytes]:
                        return False
        return True


def main(run_dir: str, instance: str, form: str, namespace: str) -> None:
    """Serve until the end of standard input, which is a death without goodbye."""
    client = Client.connect(run_dir, instance, deadline_s=20.0)
    engine = _Engine(client, form, namespace)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        try:
            answer = engine.answer(**json.loads(line))
        except StratadError as exc:
            answer = {"code": exc.code}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class MortalEngine:
    """One such process, registered at a daemon. `with` it: killed at the end."""

    def __init__(self, daemon: DaemonProcess, form: str = "rows", namespace: str = "ns") -> None:
        command = [sys.executable, "-m", "tests.support.mortal_engine"]
        command += [str(daemon.run_dir), daemon.instance, form, namespace]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
        )
        self._read()

    def ask(self, op: str, **told: object) -> dict[str, object]:
        """Give one order and wait for its answer."""
        self.tell(op, **told)
        return self._read()

    def tell(self, op: str, **told: object) -> None:
        """Give one order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **told}) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10)}"
        answer: dict[str, object] = json.loads(line)
        return answer

    def kill(self) -> None:
        """SIGKILL; back when it is gone. Idempotent."""
        self.process.kill()
        self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
