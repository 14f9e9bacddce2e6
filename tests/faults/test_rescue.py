"""Engines that are killed with ``-9`` between two turns, on real workers: what they had marked clean is not lost."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipc.messages import EngineInfo, StatsReply
from stratad.client import Client
from stratad.errors import StratadError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine
from tests.support.mortal_engine import LAYOUTS, MortalEngine
from tests.support.wait import wait_until

# A chunk of a "wide" stage is 1 MiB and a slice: at this speed it takes half a second, and a slot 1.3 s.
SLOW = {"cpu_device.link_bytes_per_s": "2e6", "rescue.max_s": "30"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("cpu:2") as made:
        yield made


@pytest.fixture(scope="module")
def slow() -> Iterator[DaemonProcess]:
    with DaemonProcess("cpu:2", SLOW) as made:
        yield made


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def mappings(stats: StatsReply) -> int:
    """Pools that workers have mapped, by their own count and by the kernel's."""
    counted = sum(worker.resources["mappings"] for worker in stats.workers)
    seen = sum("/memfd:" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in stats.workers)
    assert counted or not seen
    return counted


def unmapped_s(client: Client) -> float:
    """Seconds until no worker maps anything of an engine any more, and the daemon knows none."""
    start_s = time.monotonic()

    def gone() -> bool:
        stats = client.stats()
        return not stats.engines and not mappings(stats)

    wait_until(gone, 20.0)
    return time.monotonic() - start_s


def engine(client: Client) -> EngineInfo:
    (found,) = client.stats().engines
    return found


def images(client: Client, namespace: str) -> dict[str, int]:
    return {image.conversation: image.tokens for image in client.list_images(namespace)}


def test_an_engine_killed_between_two_turns_loses_no_conversation(
    daemon: DaemonProcess, client: Client, record_property: Callable[[str, object], None]
) -> None:
    """Five slots: clean; clean, then written in its second chunk; poisoned; dirty; clean, of two turns."""
    with MortalEngine(daemon, "rows", "turns") as mortal:
        mortal.ask("fill", seed=5)
        for slot, tokens in enumerate((400, 400, 300, 300, 300)):
            told = {"conversation": f"c{slot}", "tokens": tokens, "first": 400 * slot, "slot": slot}
            assert mortal.ask("mark", **told)["tokens"] == tokens
        second = mortal.ask("mark", conversation="c4", tokens=390, first=1600, slot=4)
        assert second["digested"] == 134 * (4 * 96 + 3 * 160)  # the new chunk, not the first one
        mortal.ask("write", stage=1, row=400 + 256)
        mortal.ask("plain", slot=2, mark="poisoned")
        mortal.ask("plain", slot=3, mark="dirty")
        shown = engine(client)
        assert (shown.clean_slots, shown.clean_tokens, shown.rescue) == (3, 400 + 400 + 390, "")
        before = client.stats().counters
        mortal.kill()
    record_property("unmapped_s", unmapped_s(client))
    assert images(client, "turns") == {"c0": 400, "c1": 256, "c4": 390}
    after = client.stats().counters
    assert {name: after.get(name, 0) - before.get(name, 0) for name in ("rescues", "rescued_images", "captures")} == {
        "rescues": 1, "rescued_images": 3, "captures": 0,
    }  # fmt: skip
    with MortalEngine(daemon, "rows", "turns") as following:
        for slot, tokens in ((0, 400), (1, 256), (4, 390)):
            following.ask("zero")
            assert following.ask("restore", conversation=f"c{slot}", tokens=tokens, first=1000) == {"tokens": tokens}
            assert following.ask("same", seed=5, tokens=tokens, source=400 * slot, target=1000) == {"same": True}
            assert following.ask("same", seed=6, tokens=tokens, source=400 * slot, target=1000) == {"same": False}
        assert following.ask("restore", conversation="c2", tokens=300)["code"] == "unknown_conversation"
        following.ask("goodbye")


@pytest.mark.parametrize("form", ["state", "paged", "window"])
def test_states_blocks_and_windows_come_back(daemon: DaemonProcess, client: Client, form: str) -> None:
    tokens, first = 330, 64
    with MortalEngine(daemon, form, form) as mortal:
        mortal.ask("fill", seed=8)
        mortal.ask("mark", conversation="c", tokens=tokens, first=first, slot=2)
        if form == "state":
            mortal.ask("mark", conversation="late", tokens=tokens, first=1000, slot=3)
            mortal.ask("write", stage=0, row=3, group=1)
        mortal.kill()
    unmapped_s(client)
    assert images(client, form) == {"c": tokens}  # a state that changed is the end of its whole conversation
    with MortalEngine(daemon, form, form) as following:
        following.ask("zero")
        assert following.ask("restore", conversation="c", tokens=tokens, first=512, slot=1) == {"tokens": tokens}
        same = following.ask("same", seed=8, tokens=tokens, source=first, target=512, slots=[2, 1])
        assert same == {"same": True}
        following.ask("goodbye")


@pytest.mark.parametrize("how", ["goodbye", "no marks"])
def test_without_a_rescue_the_memory_is_unmapped_at_once(
    daemon: DaemonProcess, client: Client, record_property: Callable[[str, object], None], how: str
) -> None:
    with MortalEngine(daemon, "rows", how) as mortal:
        if how == "goodbye":
            mortal.ask("mark", conversation="c", tokens=300)
            mortal.ask("goodbye")
        assert how == "goodbye" or mappings(client.stats()) == 2
        before = client.stats().counters.get("rescues", 0)
        mortal.kill()
    record_property("unmapped_s", unmapped_s(client))
    assert images(client, how) == {}
    assert client.stats().counters.get("rescues", 0) == before


def doomed(daemon: DaemonProcess, client: Client, namespace: str) -> None:
    """An engine with three declared conversations of 2.5 MiB a stage is killed; back when its rescue runs."""
    before = client.stats().counters.get("rescues", 0)
    with MortalEngine(daemon, "wide", namespace) as mortal:
        mortal.ask("fill", seed=3)
        for slot in range(3):
            mortal.ask("mark", conversation=f"c{slot}", tokens=640, first=640 * slot, slot=slot)
        mortal.kill()
    wait_until(lambda: client.stats().counters.get("rescues", 0) > before)


def cut_off(client: Client) -> int:
    return client.stats().counters.get("rescues_cut_off", 0)


def test_an_engine_that_says_hello_gets_the_memory_at_once(slow: DaemonProcess) -> None:
    with slow.client() as client:
        doomed(slow, client, "hello")
        wait_until(lambda: images(client, "hello") == {"c2": 640})
        assert engine(client).rescue == "2 of 3 slots, 1 images"
        assert client.announce("another", ["cpu:1"]) == 1
        stats = client.stats()
        assert (stats.engines, mappings(stats), stats.staged_bytes) == ((), 0, 0)
        assert images(client, "hello") == {"c2": 640}
        assert cut_off(client) == 1


def test_a_worker_that_dies_in_a_rescue_takes_nothing_with_it(slow: DaemonProcess) -> None:
    with slow.client() as client:
        doomed(slow, client, "worker")
        wait_until(lambda: images(client, "worker") == {"c2": 640})
        os.kill(client.stats().workers[1].pid, signal.SIGKILL)
        unmapped_s(client)
        assert images(client, "worker") == {"c2": 640}
        wait_until(lambda: client.stats().health == "ok")
        with MortalEngine(slow, "wide", "worker") as following:
            following.ask("zero")
            assert following.ask("restore", conversation="c2", tokens=256) == {"tokens": 256}
            assert following.ask("same", seed=3, tokens=256, source=1280, target=0) == {"same": True}
            following.ask("goodbye")


def test_the_time_of_a_rescue_is_bounded() -> None:
    with DaemonProcess("cpu:2", {**SLOW, "rescue.max_s": "0.35"}) as daemon, daemon.client() as client:
        doomed(daemon, client, "late")
        unmapped_s(client)
        assert images(client, "late") == {}
        assert (cut_off(client), client.stats().staged_bytes) == (1, 0)


@pytest.mark.parametrize(("fault", "code"), [("copy_kill", "worker_died"), ("copy_error", "device_error")])
def test_a_mark_that_fails_on_one_stage_declares_nothing_and_the_next_one_does(fault: str, code: str) -> None:
    with (
        DaemonProcess("cpu:2", None, {f"cpu:1#1/capture.{fault}": "2"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS["wide"]) as engine,
    ):
        with pytest.raises(StratadError) as caught:
            engine.engine.mark(0, "clean", conversation="c", tokens=range(600), rows=range(600)).result()
        assert (caught.value.code, caught.value.stage) == (code, 1)
        shown = client.stats()
        assert shown.engines[0].clean_slots == 0
        wait_until(lambda: client.stats().health == "ok")
        engine.engine.mark(0, "clean", conversation="c", tokens=range(600), rows=range(600)).result()
        assert client.stats().engines[0].clean_tokens == 600
        assert client.stats().counters["marks"] == 1
