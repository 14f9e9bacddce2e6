"""Rescue on a GPU: memory of an engine that was killed is valid while the worker maps it, and free in the end."""

import time
from collections.abc import Callable, Iterator

import pytest

from stratad.client import Client
from tests.support.daemon import DaemonProcess
from tests.support.wait import wait_until

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

from tests.gpu.cards import all_cards, cards, free_bytes  # noqa: E402 - needs torch
from tests.gpu.mortal_engine import POOL_BYTES, STAGES, GpuMortalEngine  # noqa: E402 - needs torch

SETTINGS = {
    "ram.budget_bytes": f"{4 * len(cards()) if torch.cuda.is_available() else 4}GiB",
    "ram.shuttle_bytes": "512MiB",
}
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(all_cards(), SETTINGS) as made:
        yield made


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(60.0) as made:
        wait_until(lambda: made.stats().health == "ok", 60.0)
        yield made


def unmapped_s(client: Client) -> float:
    """Seconds until the daemon knows no engine and its workers map nothing of any."""
    start_s = time.monotonic()

    def gone() -> bool:
        stats = client.stats()
        return not stats.engines and not sum(worker.resources["mappings"] for worker in stats.workers)

    wait_until(gone, 30.0)
    return time.monotonic() - start_s


def images(client: Client, namespace: str) -> dict[str, int]:
    return {image.conversation: image.tokens for image in client.list_images(namespace)}


def test_an_engine_killed_between_two_turns_loses_no_conversation(
    daemon: DaemonProcess, client: Client, record_property: Callable[[str, object], None]
) -> None:
    with GpuMortalEngine(daemon, "turns") as mortal:
        mortal.ask("fill", seed=5)  # under way on the stream when the first slot is marked
        for slot, tokens in enumerate((900, 900, 300, 300)):
            told = {"conversation": f"c{slot}", "tokens": tokens, "first": 1000 * slot, "slot": slot}
            assert mortal.ask("mark", **told)["tokens"] == tokens
        again = mortal.ask("mark", conversation="c0", tokens=1000, first=0, slot=0)
        assert again["digested"] == (1000 - 768) * 4096 * 16 * STAGES
        mortal.ask("write", stage=1, row=1000 + 600)
        mortal.ask("plain", slot=2, mark="poisoned")
        mortal.ask("plain", slot=3, mark="dirty")
        mortal.kill()
    record_property("unmapped_s", unmapped_s(client))
    assert images(client, "turns") == {"c0": 1000, "c1": 512}
    assert all(chunk.algorithm == "mlh-128" for chunk in client.show("turns", "c0").chunks)
    with GpuMortalEngine(daemon, "turns") as following:
        for slot, tokens in ((0, 1000), (1, 512)):
            told = {"conversation": f"c{slot}", "tokens": tokens, "source": 1000 * slot, "target": 2500}
            assert following.ask("restore", seed=5, **told) == {"same": True}
            assert following.ask("restore", seed=6, **told) == {"same": False}
        following.ask("goodbye")


@pytest.mark.parametrize("marked", [True, False])
def test_the_memory_of_a_dead_engine_is_free_in_the_end(
    daemon: DaemonProcess, client: Client, record_property: Callable[[str, object], None], marked: bool
) -> None:
    with GpuMortalEngine(daemon, "warm") as first:  # whatever the worker keeps for good, it has after this
        first.ask("mark", conversation="c", tokens=1000, first=0, slot=0)
        first.ask("goodbye")
    unmapped_s(client)
    before = free_bytes()
    namespace = f"free {marked}"
    with GpuMortalEngine(daemon, namespace) as mortal:
        mortal.ask("fill", seed=1)
        if marked:
            mortal.ask("mark", conversation="c", tokens=1000, first=0, slot=0)
        assert free_bytes() < before - STAGES * POOL_BYTES // 2
        mortal.kill()
    record_property("unmapped_s", unmapped_s(client))
    wait_until(lambda: free_bytes() > before - 64 * MIB, 5.0)
    assert images(client, namespace) == ({"c": 1000} if marked else {})


def test_an_engine_that_says_hello_gets_the_memory(daemon: DaemonProcess, client: Client) -> None:
    worker = client.stats().workers[0]
    faults = {f"{worker.worker}#1/capture.slow_copy_s": "0.3"}
    with DaemonProcess(all_cards(), SETTINGS, faults) as slow, slow.client(60.0) as other:
        wait_until(lambda: other.stats().health == "ok", 60.0)
        before = free_bytes()
        with GpuMortalEngine(slow, "hello") as mortal:
            mortal.ask("fill", seed=2)
            for slot in range(3):  # two slices each, on each of two stages: 1.2 s
                mortal.ask("mark", conversation=f"c{slot}", tokens=1200, first=1200 * slot, slot=slot)
            mortal.kill()
        wait_until(lambda: other.stats().counters.get("rescues", 0) == 1, 30.0)
        assert other.announce("another", [worker.device]) == 1
        stats = other.stats()
        assert (stats.engines, stats.workers[0].resources["mappings"], stats.staged_bytes) == ((), 0, 0)
        assert len(images(other, "hello")) < 3
        assert stats.counters["rescues_cut_off"] == 1
        wait_until(lambda: free_bytes() > before - 64 * MIB, 5.0)
