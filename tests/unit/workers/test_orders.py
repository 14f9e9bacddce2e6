"""Orders for pools find their descriptors, however many came before."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ipc.lifeline import MAX_DRAINED, Lifeline, LifelineServer
from ipc.messages import MemfdPool, OpenPool, Stage
from shm.memfd import create_pool
from tests.support.wait import wait_until
from tests.unit.workers.rig import KEY, slot_layout
from tests.unit.workers.supervisor import own_process
from workers.cpu_device import CpuDevice
from workers.digest import Digester
from workers.orders import PoolLetter, PoolMade, PoolOrders


class Ends(NamedTuple):
    supervisor: Lifeline
    worker: Lifeline


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    found: list[Lifeline] = []
    path = tmp_path / "life.sock"
    with LifelineServer.listen(path) as server:
        thread = threading.Thread(target=lambda: found.append(Lifeline.connect(path, 5.0, 4 * MAX_DRAINED)))
        thread.start()
        supervisor = wait_until(lambda: server.accept(bytes(16)))
        thread.join()
        with supervisor, found[0]:
            yield Ends(supervisor, found[0])


def test_a_descriptor_behind_more_than_one_drain_is_found(ends: Ends) -> None:
    layout = slot_layout()
    letters: list[PoolLetter] = []
    device = CpuDevice(Digester(KEY), slice_bytes=4096, link_bytes_per_s=0.0)
    orders = PoolOrders(device, ends.worker, letters.append)
    descriptor = create_pool("test", layout.end_bytes)
    last = MAX_DRAINED + 1
    for tag in range(last + 1):
        ends.supervisor.send_descriptor(tag, descriptor)
    os.close(descriptor)
    stage = Stage(0, "cpu:0", MemfdPool(last, layout.end_bytes), layout, bytes(8), bytes(16))
    orders.open(OpenPool(1, stage, *own_process()))
    orders.thread.start()
    assert orders.thread.stop(5.0)
    orders.close_all()
    assert [type(letter) for letter in letters] == [PoolMade]
    made = letters[0]
    assert isinstance(made, PoolMade)
    made.entry.pool.close()
    device.close()
