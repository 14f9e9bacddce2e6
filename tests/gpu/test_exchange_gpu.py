"""Exchanges on a host whose only workers are those of GPUs: the CPU copies, the GPU's shuttles hold the bytes."""

import os

import numpy as np
import pytest

from shm.extent import unpack_places
from shm.layout import Plane
from shm.shuttle import MOUNT
from stratad.client import StagePool
from stratad.errors import Damaged
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT
from tests.support.layouts import stage_layout

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(180),
]
from tests.gpu.cards import first_card  # noqa: E402 - needs torch

MIB = 1 << 20
SETTINGS = {"ram.budget_bytes": "256MiB", "ram.shuttle_bytes": "64MiB"}


def test_parts_and_captures_share_a_gpus_worker() -> None:
    layout = stage_layout((Plane(0, 512, 512, 1024), Plane(512 * 1024, 512, 512, 1024)))
    tensor = torch.randint(0, 255, (2, 1024, 512), dtype=torch.uint8, device="cuda")
    noise = np.random.default_rng(1).integers(0, 256, 40 * MIB + 5, dtype=np.uint8)
    cpu_tensor = torch.randn(100, 1000).to(torch.bfloat16)
    with DaemonProcess(first_card(), SETTINGS) as daemon, daemon.client(deadline_s=120.0) as client:
        worker = client.stats().workers[0]
        engine = client.register("e", "ns", FINGERPRINT, [StagePool("cuda:0", layout, tensor)])
        with client.exchange(worker.worker, "ns", FINGERPRINT, 16 * MIB) as exchange:
            for _ in range(3):
                with exchange.put("put", range(9)) as put:
                    put.add("noise", noise)
                    ticket = engine.capture("captured", range(1024), range(1024))
                    put.add("bf16", cpu_tensor)
                    ticket.result()
                before = {name: n for name, n in client.stats().workers[0].resources.items() if "jobs" not in name}
            expected = tensor.cpu()
            tensor.zero_()
            torch.cuda.synchronize()
            with exchange.get("put") as got:
                restoring = engine.restore("captured", range(1024))
                assert got.read("noise") == noise.tobytes()
                target = torch.zeros_like(cpu_tensor)
                got.read_into("bf16", target)
                restoring.result()
            assert torch.equal(target, cpu_tensor)
            assert torch.equal(tensor.cpu(), expected)
            assert {chunk.algorithm for chunk in client.show("ns", "put").chunks} == {"xxh3-128"}
            assert {chunk.algorithm for chunk in client.show("ns", "captured").chunks} == {"mlh-128"}
            now = {name: n for name, n in client.stats().workers[0].resources.items() if "jobs" not in name}
            assert now == before
            chunk = client.show("ns", "put").chunks[-1]
            (place,) = unpack_places(chunk.extents)
            with (MOUNT / chunk.segments[0].lstrip("/")).open("r+b") as shuttle:
                shuttle.seek(place.extents[0].offset_bytes)
                (byte,) = shuttle.read(1)
                shuttle.seek(-1, os.SEEK_CUR)
                shuttle.write(bytes([byte ^ 1]))
            with exchange.get("put") as got, pytest.raises(Damaged):
                got.read("bf16")
        engine.unregister()
        assert client.stats().workers[0].resources["pools"] == 0
