"""The fault matrix's engine process: known bytes in slots, operations on them, and a plain comparison of every byte.

``python -m stratad.bench.matrix_engine [--import-torch]`` reads orders line by line (see `stratad.bench.matrix_wire`).
"""

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import IO, Final, TypeAlias, assert_never

import msgspec

from ipc.messages import Marked, StageOutcome
from shm.rows import unpack_rows
from stratad.bench.cpu_engine import FINGERPRINT, NAMESPACE, token_ids
from stratad.bench.matrix_memory import Memory, Shape, allocate, read_slot, write_slot
from stratad.bench.matrix_wire import (
    Answer,
    Bye,
    Check,
    Checked,
    Do,
    Failed,
    Fill,
    Filled,
    Imported,
    Order,
    Outcome,
    Quit,
    Register,
    Registered,
    Tell,
    Told,
)
from stratad.client import Captured, Client, Copied, Engine, Restored, Ticket
from stratad.errors import StratadError, UsageError

_PR_SET_PDEATHSIG: Final = 1
_CONNECT_S: Final = 60.0
# Stands in rows that an operation is to write: no contents are all of it.
_PATTERN: Final = b"\xee"
# A worker that died with its daemon is gone by then, and whoever holds the rows can see it.
_ROWS_FREE_S: Final = 5.0
_BEFORE_CANCEL_S: Final = 0.05
AnyTicket: TypeAlias = Ticket[Captured] | Ticket[Restored] | Ticket[Copied] | Ticket[Marked]
READING: Final = ("capture", "slot_to", "slot_direct")
WRITING: Final = ("restore", "take", "slot_from", "slot_direct")


class MatrixEngine:
    """A registered engine and its own copy of what every slot must hold, as the seeds of their contents."""

    def __init__(self, order: Register) -> None:
        self._client: Final = Client.connect(order.run_dir, order.instance, deadline_s=_CONNECT_S, name="fault-matrix")
        chunk_tokens = self._client.welcome.chunk_tokens
        self._shape: Final = Shape(order.slots, order.tokens, order.planes, order.row_bytes, chunk_tokens)
        self._stages: Final[list[Memory]] = [allocate(device, self._shape) for device in order.devices]
        self._own: Final[dict[int, list[bytes]]] = {}
        pools = [stage.pool for stage in self._stages]
        self._engine: Final[Engine] = self._client.register("fault-matrix", NAMESPACE, FINGERPRINT, pools)

    def fill(self, slot: int, seed: int) -> None:
        """Write the contents of a seed to a slot."""
        self._own[slot] = self._contents(seed)
        self._write(slot, self._own[slot])

    def check(self, order: Check) -> Checked:
        """Zero, restore, compare."""
        self._own.pop(order.slot, None)
        self._write(order.slot, [bytes(self._shape.slot_bytes)] * len(self._stages))
        try:
            rows = self._rows(order.slot)
            self._engine.restore(order.conversation, rows=rows, slot=order.slot, deadline_s=order.deadline_s).result()
        except StratadError as exc:
            return Checked(exc.code, exc.message)
        pairs = zip(self._read(order.slot), self._contents(order.seed), strict=True)
        return Checked(exact=tuple(found == expected for found, expected in pairs))

    def do(self, order: Do) -> Outcome:
        """Carry out an operation and look at every byte that it may have touched."""
        before = [_PATTERN * self._shape.slot_bytes] * len(self._stages)
        if order.op in WRITING:
            self._own.pop(order.target, None)
            self._write(order.target, before)
        started_s = time.monotonic()
        error: StratadError | None = None
        ticket: AnyTicket | None = None
        image_id = 0
        try:
            ticket = self._start(order)
            result = ticket.result()
            image_id = result.image_id if isinstance(result, Captured) else 0
        except StratadError as exc:
            error = exc
        seconds = time.monotonic() - started_s
        problems: list[str] = []
        if ticket is not None and not ticket.wait_rows_free(_ROWS_FREE_S):
            return Outcome(seconds, "rows_busy", "", problems=(f"the rows are still busy {_ROWS_FREE_S:g} s later",))
        if order.op in READING:
            problems += self._check_source(order)
        # Whoever was lost, or did not wait for the answer, knows nothing of any row.
        if order.op in WRITING and (error is None or error.code not in ("lost", "deadline")):
            problems += self._check_target(order, before, error)
        if error is None:
            return Outcome(seconds, problems=tuple(problems), image_id=image_id)
        undefined = tuple(len(self._undefined(order.target, outcome)) for outcome in error.stages)
        states = tuple(outcome.state for outcome in error.stages)
        return Outcome(seconds, error.code, error.message, error.stage, states, undefined, tuple(problems))

    def _start(self, order: Do) -> AnyTicket:
        engine, tokens, deadline_s = self._engine, self._shape.tokens, order.deadline_s
        source, target = self._rows(order.slot), self._rows(order.target)
        match order.op:
            case "capture" | "cancel":
                named = token_ids(tokens, order.seed)
                ticket = engine.capture(order.conversation, named, rows=source, slot=order.slot, deadline_s=deadline_s)
                if order.op == "cancel":
                    time.sleep(_BEFORE_CANCEL_S)  # so that its stages copy by then
                    ticket.cancel()
                return ticket
            case "declare":
                named = token_ids(tokens, order.seed)
                return engine.mark(
                    order.slot,
                    "clean",
                    conversation=order.conversation,
                    tokens=named,
                    rows=source,
                    deadline_s=deadline_s,
                )
            case "restore":
                return engine.restore(order.conversation, rows=target, slot=order.target, deadline_s=deadline_s)
            case "take":
                return engine.take(order.conversation, rows=target, slot=order.target, deadline_s=deadline_s)
            case "slot_direct":
                return engine.slot_direct(
                    tokens, source, target, slot=order.slot, target_slot=order.target, deadline_s=deadline_s
                )
            case "slot_to":
                return engine.slot_to(tokens, source, slot=order.slot, deadline_s=deadline_s)
            case "slot_from":
                return engine.slot_from(order.slot, target, slot=order.target, deadline_s=deadline_s)
            case _:
                raise UsageError("bad_value", f"no operation is called {order.op!r}")

    def tell(self, order: Tell) -> Told:
        """Say or ask something that copies nothing."""
        engine, deadline_s = self._engine, order.deadline_s
        try:
            match order.what:
                case "slot_drop":
                    engine.slot_drop(order.slot, deadline_s=deadline_s)
                case "mark":
                    engine.mark(order.slot, "clean", deadline_s=deadline_s)
                    engine.mark(order.slot, "dirty", deadline_s=deadline_s)
                case "lookup":
                    found = engine.lookup(token_ids(self._shape.tokens, order.seed), deadline_s=deadline_s)
                    return Told(conversation=found.conversation if found is not None else "")
                case "abandon":
                    self._client.pump.forget_connection()
                case "unregister":
                    engine.unregister(deadline_s=deadline_s)
                case _:
                    raise UsageError("bad_value", f"nothing is called {order.what!r}")
        except StratadError as exc:
            return Told(exc.code)
        return Told()

    def _check_source(self, order: Do) -> list[str]:
        """What is read must be left alone; the byte that an ordered fault changed is put right."""
        problems: list[str] = []
        for number, (found, own) in enumerate(zip(self._read(order.slot), self._own[order.slot], strict=True)):
            changed = sum(a != b for a, b in zip(found, own, strict=True)) if found != own else 0
            if changed != (number == order.flipped):
                problems.append(f"stage {number}: {changed} bytes of the source changed")
            if changed:
                write_slot(self._stages[number], self._shape, order.slot, own)
        return problems

    def _check_target(self, order: Do, before: Sequence[bytes], error: StratadError | None) -> list[str]:
        """Written rows hold the contents; after a failure every row that is not named undefined is what its stage's
        state says.
        """
        problems: list[str] = []
        expected = self._contents(order.seed)
        outcomes = error.stages if error is not None else ()
        for number, found in enumerate(self._read(order.target)):
            outcome = outcomes[number] if number < len(outcomes) else None
            done = error is None or (outcome is not None and outcome.state == "done")
            named = self._undefined(order.target, outcome) if outcome is not None else frozenset[int]()
            wanted = expected[number] if done else before[number]
            wrong = [row for row in self._rows_that_differ(found, wanted) if row not in named]
            if wrong:
                state = "untouched" if outcome is None else outcome.state
                what = "wrong" if done else "changed and not named undefined"
                problems.append(f"stage {number} ({state}): {len(wrong)} rows are {what}, the first is {wrong[0]}")
        return problems

    def _rows_that_differ(self, one: bytes, other: bytes) -> list[int]:
        """Rows of a slot, counted from its first, that differ in any plane."""
        if one == other:
            return []
        size, tokens = self._shape.row_bytes, self._shape.tokens
        rows: set[int] = set()
        for at in range(0, self._shape.slot_bytes, size):
            if one[at : at + size] != other[at : at + size]:
                rows.add(at // size % tokens)
        return sorted(rows)

    def _undefined(self, slot: int, outcome: StageOutcome) -> frozenset[int]:
        """Rows of a slot, counted from its first, that an outcome names undefined."""
        first_row = slot * self._shape.tokens
        return frozenset(
            row - first_row
            for packed in outcome.rows_undefined
            for first, count in unpack_rows(packed)
            for row in range(first, first + count)
        )

    def _rows(self, slot: int) -> tuple[tuple[int, int], ...]:
        return ((slot * self._shape.tokens, self._shape.tokens),)

    def _contents(self, seed: int) -> list[bytes]:
        return [self._shape.contents(seed, stage) for stage in range(len(self._stages))]

    def _read(self, slot: int) -> list[bytes]:
        return [read_slot(stage, self._shape, slot) for stage in self._stages]

    def _write(self, slot: int, contents: Sequence[bytes]) -> None:
        for stage, data in zip(self._stages, contents, strict=True):
            write_slot(stage, self._shape, slot, data)

    def close(self) -> None:
        """Unregister and leave. Raises what the client raises."""
        self._engine.unregister()
        self._client.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve orders until told to quit, or until the driver is gone."""
    parser = argparse.ArgumentParser(prog="python -m stratad.bench.matrix_engine")
    parser.add_argument("--import-torch", action="store_true", help="for stages on GPUs")
    chosen = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if chosen.import_torch:
        import torch  # noqa: F401, PLC0415 - here, so that registering takes no seconds
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints goes to the log
    _say(answers, Imported(os.getpid()))
    orders = msgspec.json.Decoder(Order)
    engine: MatrixEngine | None = None
    for line in sys.stdin.buffer:
        try:
            order: Order = orders.decode(line)
            if isinstance(order, Register):
                engine = MatrixEngine(order)
                answer: Answer = Registered(order.devices[0])
            elif isinstance(order, Quit):
                if engine is not None:
                    engine.close()
                answer = Bye()
            else:
                answer = _carry_out(engine, order)
        except Exception as exc:  # noqa: BLE001 - a wrong order must not end the process: the driver decides
            traceback.print_exc()
            code = exc.code if isinstance(exc, StratadError) else "engine"
            answer = Failed(code, f"{type(exc).__name__}: {exc}")
        _say(answers, answer)
        if isinstance(answer, Bye):
            break
    return 0


def _carry_out(engine: MatrixEngine | None, order: Fill | Do | Tell | Check) -> Answer:
    if engine is None:
        raise UsageError("not_registered", "the first order is to register")
    match order:
        case Fill():
            engine.fill(order.slot, order.seed)
            return Filled()
        case Do():
            return engine.do(order)
        case Tell():
            return engine.tell(order)
        case Check():
            return engine.check(order)
    assert_never(order)


def _say(answers: IO[bytes], answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
