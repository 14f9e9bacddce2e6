"""One stage a card on several GPUs: every byte on every card, and what the death of one card's worker leaves alone."""

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from shm.layout import Plane
from stratad import topology
from stratad.client import Client, Engine, StagePool
from stratad.ctl import doctor_topology
from stratad.errors import StratadError
from tests.support.client_rig import FINGERPRINT
from tests.support.daemon import DaemonProcess
from tests.support.layouts import stage_layout
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

from tests.gpu.cards import all_cards, cards, synchronize, uuid_of  # noqa: E402 - needs torch

ROWS, ROW_BYTES, PLANES, TOKENS = 4096, 4096, 16, 1500
LAYOUT = stage_layout([Plane(n * ROWS * ROW_BYTES, ROW_BYTES, ROW_BYTES, ROWS) for n in range(PLANES)])
SOURCE, TARGET = range(10, 10 + TOKENS), range(2000, 2000 + TOKENS)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    settings = {"ram.budget_bytes": f"{1 * len(cards())}GiB", "ram.shuttle_bytes": "256MiB"}
    with DaemonProcess(all_cards(), settings) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(60.0) as connected:
        wait_until(lambda: connected.stats().health == "ok", 60.0)
        yield connected


def make_pools(seed: int) -> "list[Tensor]":
    """Other bytes on each card."""
    made = []
    for number, card in enumerate(cards()):
        generator = torch.Generator(device=card).manual_seed(100 * seed + number)
        size = (PLANES * ROWS * ROW_BYTES,)
        made.append(torch.randint(0, 256, size, dtype=torch.uint8, device=card, generator=generator))
    return made


def register(client: Client, pools: "list[Tensor]") -> Engine:
    return client.register("e", "cards", FINGERPRINT, [StagePool(str(p.device), LAYOUT, p) for p in pools])


def rows_of(pool: "Tensor", rows: range) -> "Tensor":
    return pool.view(PLANES, ROWS, ROW_BYTES)[:, rows.start : rows.stop]


def test_every_byte_of_every_card_goes_and_comes_back(client: Client) -> None:
    pools = make_pools(1)
    expected = [rows_of(pool, SOURCE).clone() for pool in pools]
    engine = register(client, pools)
    captured = engine.capture("c", range(TOKENS), SOURCE).result()
    assert [outcome.moved_bytes for outcome in captured.stages] == [TOKENS * ROW_BYTES * PLANES] * len(pools)
    for pool in pools:
        pool.zero_()
    engine.restore("c", TARGET).result()
    for pool, bytes_ in zip(pools, expected, strict=True):
        assert torch.equal(rows_of(pool, TARGET), bytes_)
        assert int(torch.count_nonzero(rows_of(pool, range(TARGET.start)))) == 0
    engine.slot_direct(TOKENS, TARGET, SOURCE, slot=1, target_slot=0).result()
    for pool in pools:
        rows_of(pool, TARGET).zero_()
    synchronize()
    engine.slot_to(TOKENS, SOURCE, slot=0).result()
    engine.slot_from(0, TARGET, slot=1).result()
    for pool, bytes_ in zip(pools, expected, strict=True):
        assert torch.equal(rows_of(pool, SOURCE), bytes_)
        assert torch.equal(rows_of(pool, TARGET), bytes_)
    engine.unregister()
    client.clear("cards")


def test_what_a_stream_of_each_card_still_does_is_waited_for(client: Client) -> None:
    pools = make_pools(2)
    engine = register(client, pools)
    for pool in pools:
        with torch.cuda.device(pool.device):
            torch.cuda._sleep(500_000_000)
            pool.add_(1)
    engine.capture("late", range(TOKENS), SOURCE).result()
    expected = [rows_of(pool, SOURCE).clone() for pool in pools]
    engine.restore("late", TARGET).result()
    for pool, bytes_ in zip(pools, expected, strict=True):
        assert torch.equal(rows_of(pool, TARGET), bytes_)
    engine.unregister()
    client.clear("cards")


@pytest.mark.parametrize("victim", range(2))
def test_a_worker_that_dies_names_its_stage_and_leaves_the_other_cards_alone(client: Client, victim: int) -> None:
    pools = make_pools(3 + victim)
    expected = [rows_of(pool, SOURCE).clone() for pool in pools]
    engine = register(client, pools)
    engine.capture("kept", range(TOKENS), SOURCE).result()
    before = {worker.device: worker for worker in client.stats().workers}
    worker = before[uuid_of(cards()[victim])]
    os.kill(worker.pid, signal.SIGSTOP)  # so that the copy is under way when it dies
    ticket = engine.restore("kept", TARGET)
    wait_until(lambda: client.stats().ops != ())
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(StratadError) as caught:
        ticket.result()
    assert caught.value.stage == victim
    states = [outcome.state for outcome in caught.value.stages]
    assert [number for number, state in enumerate(states) if state == "failed"] == [victim]
    wait_until(lambda: client.stats().health == "ok", 60.0)
    after = {found.device: found for found in client.stats().workers}
    changed = [device for device in after if after[device].pid != before[device].pid]
    assert changed == [worker.device]
    engine.restore("kept", TARGET).result()
    for pool, bytes_ in zip(pools, expected, strict=True):
        assert torch.equal(rows_of(pool, TARGET), bytes_)
    engine.unregister()
    client.clear("cards")


def test_workers_are_near_their_cards_and_doctor_says_so(client: Client) -> None:
    stats = client.stats()
    pci = {gpu.uuid: gpu.pci for gpu in topology.find_gpus()}
    for worker in stats.workers:
        near = topology.near_cpus(pci[worker.device], topology.allowed_cpus())
        assert set(worker.cpus) == set(near)
    checks = list(doctor_topology.topology_of(stats))
    assert [check.name for check in checks[:-1]] == ["topology"] * len(pci)
    peers = checks[-1].as_json()
    assert peers["name"] == "peer access"
    assert len(peers["peers"]) == len(pci)  # type: ignore[arg-type]
