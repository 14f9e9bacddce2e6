"""The public client against a real daemon, beside a dictionary: whatever is done in whatever order, both agree.

Every image is compared byte for byte by the engine's own process, into rows that were zeroed first.
"""

import os
import signal
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stratad.client import Client, Exchange
from stratad.errors import StratadError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.wait import wait_until

EXAMPLES, STEPS = 18, 40
SLOTS, SLOT_ROWS = 3, 600
LAYOUTS = (slot_layout(SLOTS * SLOT_ROWS, 2, 48), slot_layout(SLOTS * SLOT_ROWS, 1, 80))
# Faults cost a few tenths of a second each.
FAULTS_AN_EXAMPLE = 1
BACK_S = 20.0

slots = st.integers(0, SLOTS - 1)
conversations = st.sampled_from("ab")
counts = st.sampled_from((1, 255, 256, 300, 600))
names = st.sampled_from(("x", "y"))


class Kept(NamedTuple):
    """An image as it was captured: its tokens, and their bytes by stage and plane."""

    tokens: list[int]
    contents: list[list[bytes]]


def tokens_of(conversation: str, version: int, count: int) -> list[int]:
    """All conversations begin alike; versions of one differ after 260 tokens."""
    own = (ord(conversation) * 10 + version) * 1000
    return [n if n < 260 else own + n for n in range(count)]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two conversations share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class ClientMachine(RuleBasedStateMachine):
    """One example: an engine of its own in a namespace of its own. The daemon serves all examples."""

    daemon: ClassVar[DaemonProcess]
    count: ClassVar[int] = 0
    reached: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        ClientMachine.count += 1
        self.namespace = f"ns{ClientMachine.count}"
        self.images: dict[str, Kept] = {}
        self.puts: dict[str, dict[str, bytes]] = {}
        self.pinned: set[str] = set()
        self.transits: dict[int, Kept] = {}
        self.faults = 0
        self.client: Client
        self.engine: FakeEngine
        self.exchange: Exchange

    @initialize()
    def open(self) -> None:
        self.client = self.daemon.client()
        self.engine = FakeEngine(self.client, LAYOUTS, seed=self.count, namespace=self.namespace)
        self.engine.fill()
        self.engine.register()
        self.exchange = self.client.exchange("cpu:0", self.namespace, FINGERPRINT, 2 << 20)

    def teardown(self) -> None:
        if hasattr(self, "exchange"):
            self.exchange.close()
            self.engine.engine.unregister()
            self.client.clear(self.namespace)
            for conversation in self.pinned:
                self.client.drop(self.namespace, conversation, force=True)
            self.client.close()
            self.engine.close()

    @staticmethod
    def rows(slot: int, count: int) -> range:
        return range(slot * SLOT_ROWS, slot * SLOT_ROWS + count)

    def contents(self, slot: int, count: int) -> list[list[bytes]]:
        return self.engine.contents(self.rows(slot, count), count)

    def zero(self, slot: int) -> None:
        """So that what is found there later has come from the daemon."""
        for layout, pool in zip(LAYOUTS, self.engine.pools, strict=True):
            for plane in layout.groups[0].planes:
                start = plane.offset_bytes + slot * SLOT_ROWS * plane.row_bytes
                pool.buffer[start : start + SLOT_ROWS * plane.row_bytes] = bytes(SLOT_ROWS * plane.row_bytes)

    def refused(self, code: str, attempt: Callable[[], object]) -> None:
        with pytest.raises(StratadError) as caught:
            attempt()
        assert caught.value.code == code
        self.reached.add(code)

    # --- images -------------------------------------------------------------------------------------------------------

    @rule(slot=slots)
    def compute(self, slot: int) -> None:
        """The engine writes its rows."""
        for layout, pool in zip(LAYOUTS, self.engine.pools, strict=True):
            for plane in layout.groups[0].planes:
                start, size = plane.offset_bytes + slot * SLOT_ROWS * plane.row_bytes, SLOT_ROWS * plane.row_bytes
                pool.buffer[start : start + size] = self.engine.random.randbytes(size)

    @rule(conversation=conversations, version=st.integers(0, 1), count=counts, slot=slots)
    def capture(self, conversation: str, version: int, count: int, slot: int) -> None:
        tokens = tokens_of(conversation, version, count)
        kept = Kept(tokens, self.contents(slot, count))
        captured = self.engine.engine.capture(conversation, tokens, self.rows(slot, count), slot).result()
        assert captured.tokens == count
        self.images[conversation] = kept
        self.reached.add("capture")

    @rule(conversation=conversations, slot=slots, taken=st.booleans(), part=st.booleans())
    def restore(self, conversation: str, slot: int, *, taken: bool, part: bool) -> None:
        start = self.engine.engine.take if taken else self.engine.engine.restore
        kept = self.images.get(conversation)
        if kept is None:
            self.refused("unknown_conversation", lambda: start(conversation, self.rows(slot, 1)).result())
        elif taken and conversation in self.pinned:
            self.refused("pinned", lambda: start(conversation, self.rows(slot, SLOT_ROWS)).result())
        else:
            count = len(kept.tokens)
            asked = max(1, count - 45) if part else count
            self.zero(slot)
            restored = start(conversation, self.rows(slot, asked), slot, tokens=asked).result()
            assert restored.tokens == asked
            wanted = [
                [plane[: len(plane) // count * asked] for plane in stage] for stage in kept.contents
            ]  # tokens of a plane lie side by side
            assert self.contents(slot, asked) == wanted
            if taken:
                del self.images[conversation]
                self.refused("unknown_conversation", lambda: start(conversation, self.rows(slot, asked)).result())
            self.reached.add("take" if taken else "restore")

    @rule(conversation=conversations, force=st.booleans())
    def drop(self, conversation: str, *, force: bool) -> None:
        if conversation not in self.images:
            self.refused("unknown_conversation", lambda: self.client.drop(self.namespace, conversation, force=force))
        elif conversation in self.pinned and not force:
            self.refused("pinned", lambda: self.client.drop(self.namespace, conversation))
        else:
            assert self.client.drop(self.namespace, conversation, force=force) == 1
            del self.images[conversation]
            self.pinned.discard(conversation)
            self.reached.add("drop")

    @rule(conversation=conversations, pinned=st.booleans())
    def pin(self, conversation: str, *, pinned: bool) -> None:
        if conversation not in self.images:
            self.refused("unknown_conversation", lambda: self.client.pin(self.namespace, conversation, pinned=pinned))
            return
        self.client.pin(self.namespace, conversation, pinned=pinned)
        if pinned:
            self.pinned.add(conversation)
            self.refused("pinned", lambda: self.client.drop(self.namespace, conversation))
        else:
            self.pinned.discard(conversation)
        self.reached.add("pin")

    @rule(conversation=conversations, version=st.integers(0, 1), count=counts)
    def lookup(self, conversation: str, version: int, count: int) -> None:
        tokens = tokens_of(conversation, version, count)
        best = max((common(kept.tokens, tokens) for kept in self.images.values()), default=0)
        match = self.engine.engine.lookup(tokens)
        assert (match.tokens if match is not None else 0) == best
        if match is not None:
            assert common(self.images[match.conversation].tokens, tokens) == best
            self.reached.add("hit")

    # --- slot copies --------------------------------------------------------------------------------------------------

    @rule(source=slots, count=counts)
    def slot_direct(self, source: int, count: int) -> None:
        into = (source + 1) % SLOTS
        before = self.contents(source, count)
        self.zero(into)
        rows, written = self.rows(source, count), self.rows(into, count)
        self.engine.engine.slot_direct(count, rows, written, slot=source, target_slot=into).result()
        assert self.contents(into, count) == self.contents(source, count) == before
        self.reached.add("slot_direct")

    @rule(slot=slots, count=counts)
    def slot_to(self, slot: int, count: int) -> None:
        kept = Kept(list(range(count)), self.contents(slot, count))
        self.engine.engine.slot_to(count, self.rows(slot, count), slot).result()
        self.transits[slot] = kept

    @rule(source=slots, slot=slots, keep=st.booleans())
    def slot_from(self, source: int, slot: int, *, keep: bool) -> None:
        kept = self.transits.get(source)
        if kept is None:
            rows = self.rows(slot, 1)
            self.refused("unknown_image", lambda: self.engine.engine.slot_from(source, rows, slot).result())
            return
        count = len(kept.tokens)
        self.zero(slot)
        self.engine.engine.slot_from(source, self.rows(slot, count), slot, keep=keep).result()
        assert self.contents(slot, count) == kept.contents
        if not keep:
            del self.transits[source]
            rows = self.rows(slot, count)
            self.refused("unknown_image", lambda: self.engine.engine.slot_from(source, rows, slot).result())
        self.reached.add("slot_from")

    # --- puts and gets ------------------------------------------------------------------------------------------------

    @rule(name=names, sizes=st.lists(st.sampled_from((0, 1, 4096, 1_500_000)), min_size=1, max_size=3))
    def put(self, name: str, sizes: list[int]) -> None:
        parts = {f"part {n}": self.engine.random.randbytes(size) for n, size in enumerate(sizes)}
        with self.exchange.put(name) as put:
            for part, data in parts.items():
                put.add(part, data)
        self.puts[name] = parts
        self.reached.add("put")

    @rule(name=names)
    def get(self, name: str) -> None:
        if name not in self.puts:
            self.refused("unknown_conversation", lambda: self.exchange.get(name))
            return
        with self.exchange.get(name) as got:
            assert {part: bytes(got.read(part)) for part in got.parts} == self.puts[name]
        self.reached.add("get")

    # --- faults -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.faults < FAULTS_AN_EXAMPLE)
    @rule(stage=st.integers(0, 1))
    def kill_worker(self, stage: int) -> None:
        self.faults += 1
        before = self.client.stats().workers[stage].generation
        os.kill(self.engine.engine.workers[stage].pid, signal.SIGKILL)

        def back() -> bool:
            stats = self.client.stats()
            return stats.health == "ok" and stats.workers[stage].generation > before

        wait_until(back, BACK_S)
        self.reached.add("kill_worker")

    @precondition(lambda self: self.faults < FAULTS_AN_EXAMPLE)
    @rule()
    def kill_daemon(self) -> None:
        self.faults += 1
        self.daemon.kill()
        self.daemon.start()
        wait_until(lambda: self.client.stats().health == "ok", BACK_S)
        self.transits.clear()
        self.reached.add("kill_daemon")

    @rule()
    def reconnect(self) -> None:
        """Another process of the same engine, as far as the daemon can tell."""
        pools = self.engine
        self.exchange.close()
        pools.engine.unregister()
        self.client.close()
        pools.close()
        self.transits.clear()
        self.open()
        self.reached.add("reconnect")

    @invariant()
    def both_list_the_same(self) -> None:
        if not hasattr(self, "client"):
            return
        listed = {info.conversation: info for info in self.client.list_images(self.namespace)}
        assert set(listed) == {*self.images, *self.puts}
        for conversation, kept in self.images.items():
            info = listed[conversation]
            assert (info.tokens, info.pinned, info.damaged) == (len(kept.tokens), conversation in self.pinned, False)


@pytest.mark.timeout(300)
def test_the_client_and_a_dictionary_agree() -> None:
    # On a fast host it kills workers more often than a daemon bears by default.
    with DaemonProcess("cpu:2", {"restarts.give_up_after": "1000"}) as daemon:
        ClientMachine.daemon = daemon
        run_state_machine_as_test(
            ClientMachine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                derandomize=True,
                database=None,
                deadline=None,
                phases=(Phase.generate,),  # to shrink a failure takes as many faults again, minutes of them
                suppress_health_check=list(HealthCheck),
            ),
        )
    wanted = {
        "capture", "restore", "take", "drop", "pin", "hit", "slot_direct", "slot_from", "put", "get", "kill_worker",
        "kill_daemon", "reconnect", "unknown_conversation", "unknown_image", "pinned",
    }  # fmt: skip
    assert wanted <= ClientMachine.reached
