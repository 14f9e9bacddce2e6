"""Every combination of the five switches of engines: the same bytes and greedy answers, and what is said of it."""

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np
import pytest

from stratad.client import Client, CpuPool, Engine, StagePool
from stratad.switches import ASYNC, PARALLEL, REUSE, TRACE
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT
from tests.support.small_decoder import LAYERS, Cache, SmallDecoder, layer_layout

ANSWERS: Final = 5
PROMPT: Final = [(5 * place * place + place) % 97 for place in range(600)]
TURN: Final = [(11 * place + 3) % 97 for place in range(40)]
SLOT_ROWS: Final = 700
SETTINGS: Final = {"copy.inline_bytes": "0", "ram.shuttle_bytes": "1MiB", "memory.sample_s": "1000"}


class Talk:
    """A conversation and what the model answers when nothing interrupts it; each bit of it is computed once."""

    def __init__(self) -> None:
        self.model = SmallDecoder(SLOT_ROWS)
        self.prompt = self._slot()
        token = self.model.read(PROMPT, self.prompt)
        self.answers = self._answers(self.prompt, token, len(PROMPT))
        self.next_tokens = [*PROMPT, *self.answers, *TURN]
        self.next_turn = self._slot()
        self.next_answers = self._answers(
            self.next_turn, self.model.read(self.next_tokens, self.next_turn), len(self.next_tokens)
        )

    def _slot(self) -> Cache:
        pools = [np.zeros(layer_layout(SLOT_ROWS).end_bytes, np.uint8) for _ in range(LAYERS)]
        return Cache(pools, 0, SLOT_ROWS)

    def _answers(self, cache: Cache, token: int, at: int) -> list[int]:
        """What it goes on to say; the cache is as it was."""
        copied = self._slot()
        copy_rows(cache, copied, SLOT_ROWS)
        return self.model.go_on(token, copied, at, ANSWERS)


def copy_rows(source: Cache, target: Cache, rows: int) -> None:
    for ours, theirs in zip((*target.keys, *target.values), (*source.keys, *source.values), strict=True):
        ours[:rows] = theirs[:rows]


@pytest.fixture(scope="module")
def talk() -> Talk:
    return Talk()


@contextmanager
def registered(client: Client) -> Iterator[tuple[Engine, list[Cache]]]:
    """An engine with two slots, and these."""
    layout = layer_layout(2 * SLOT_ROWS)
    with ExitStack() as stack:
        pools = [stack.enter_context(CpuPool.allocate(layout.end_bytes)) for _ in range(LAYERS)]
        memory = [np.frombuffer(pool.buffer, np.uint8) for pool in pools]
        slots = [Cache(memory, first, SLOT_ROWS) for first in (0, SLOT_ROWS)]
        stages = [StagePool(f"cpu:{number}", layout, pool) for number, pool in enumerate(pools)]
        engine = client.register("decoder", "ns", FINGERPRINT, stages)
        try:
            yield engine, slots
        finally:
            engine.unregister()
            slots.clear()
            memory.clear()


def park_and_continue(talk: Talk, engine: Engine, slots: Sequence[Cache]) -> None:
    """Two turns, each parked in one slot, overwritten there, and restored into the other or the same one."""
    turns = ((PROMPT, talk.prompt, talk.answers), (talk.next_tokens, talk.next_turn, talk.next_answers))
    for turn, (tokens, cache, answers) in enumerate(turns):
        for slot in slots:
            slot.fill(turn)
        count = len(tokens)
        copy_rows(cache, slots[0], count)
        engine.capture("talk", tokens, rows=range(count), slot=0).result()
        for number in (1, 0):
            slots[number].fill(17 + number)
            before = slots[1 - number].content()
            rows = range(number * SLOT_ROWS, number * SLOT_ROWS + count)
            engine.restore("talk", rows=rows, slot=number).result()
            expected = slots[number].content()
            copy_rows(cache, slots[number], count)
            assert slots[number].content() == expected, "not the bytes that were parked, or others too"
            assert slots[1 - number].content() == before
            said = talk.model.read(tokens[-1:], slots[number], count - 1)
            assert talk.model.go_on(said, slots[number], count, ANSWERS) == answers


def check_said(daemon: DaemonProcess, client: Client, bits: tuple[str, ...]) -> None:
    """What the daemon says of its switches, and whether it copies as it says."""
    parallel, reuse, trace, park, ckpt = (bit == "1" for bit in bits)
    side_by_side = parallel and not (park or ckpt)
    shown = client.stats().settings
    assert shown["copy.parallel"] == str(side_by_side).lower()
    assert shown["copy.trace"] == str(trace).lower()
    assert shown["shuttle.reuse"] == ("verified" if reuse else "off")
    assert client.welcome.parallel == side_by_side
    background = [f"{name} = 1" for name, bit in zip(ASYNC, (park, ckpt), strict=True) if bit]
    note = shown.get("copy.parallel_note", "")
    for said in background:
        assert said in note
        assert said in daemon.log
    assert (f"over {PARALLEL} = 1" in note) == (parallel and bool(background))
    ops = client.trace(limit=100).ops
    assert [op.kind for op in ops] == (["capture", "restore", "restore"] * 2 if trace else [])
    for op in ops:
        first, second = op.stages
        first_done_s = op.total_s - first.publish_s
        if not side_by_side:
            assert second.queue_s >= first_done_s, "the second stage was sent before the first was done"
        for stage in op.stages:
            spent_s = stage.queue_s + stage.way_s + stage.event_s + stage.turn_s + stage.digest_s + stage.gather_s
            spent_s += stage.link_s + stage.verify_s + stage.rest_s + stage.publish_s
            assert spent_s == pytest.approx(op.total_s, abs=1e-6)
            assert min(stage.queue_s, stage.way_s, stage.publish_s, stage.turn_s) >= 0.0
            assert stage.digest_s + stage.verify_s > 0.0


@pytest.mark.parametrize("background", ["00", "01", "10", "11"])
def test_all_combinations(talk: Talk, background: str) -> None:
    with ExitStack() as stack:
        started: list[tuple[tuple[str, ...], DaemonProcess]] = []
        for front in itertools.product("01", repeat=3):
            bits = (*front, *background)
            environ = dict(zip((PARALLEL, REUSE, TRACE, *ASYNC), bits, strict=True))
            daemon = DaemonProcess("cpu:2", SETTINGS, environ=environ)
            stack.callback(daemon.close)
            daemon.launch()
            started.append((bits, daemon))
        for bits, daemon in started:
            with daemon.client() as client:
                with registered(client) as (engine, slots):
                    park_and_continue(talk, engine, slots)
                check_said(daemon, client, bits)
        for _, daemon in started:
            daemon.signal(signal.SIGTERM)  # all at once; each is waited for below
