"""Stages in GPU tensors: what another process sees through the exported handles, and what cannot be exported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.messages import Capture, CudaIpcPool, Register, Stage
from shm.layout import Plane
from stratad._stages import export_stages
from stratad.client import Client, StagePool
from stratad.errors import UsageError
from tests.support.client_rig import FINGERPRINT
from tests.support.fake_daemon import FakeDaemon
from tests.support.layouts import stage_layout

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


LAYOUT = stage_layout((Plane(0, 512, 512, 64), Plane(32768, 512, 512, 64)))


class _Nobody:
    def reason(self) -> None:
        return None


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Take what CUDA keeps for the life of a process before a test is held to leave nothing behind."""
    (export,) = export_stages([StagePool("cuda:0", LAYOUT, torch.zeros(65536, dtype=torch.uint8, device="cuda"))])
    export.order()
    export.close(_Nobody())


# What a worker does: open by UUID, map, read the probe, ask the event.
READER = """
import ctypes, sys, torch
from shm.gpu_runtime import DEVICE_TO_HOST, GpuRuntime
uuid, handle, offset, event, places = sys.argv[1:]
runtime = GpuRuntime.load()
runtime.set_device(runtime.find_device(uuid))
base = runtime.ipc_open_mem(bytes.fromhex(handle))
opened = runtime.ipc_open_event(bytes.fromhex(event))
stream = runtime.stream_create(urgent=False)
buffer = ctypes.create_string_buffer(16)
read = b""
for place in places.split(","):
    runtime.memcpy_async(ctypes.addressof(buffer), base + int(offset) + int(place), 16, DEVICE_TO_HOST, stream)
    runtime.stream_synchronize(stream)
    read += buffer.raw
print(read.hex())
for line in sys.stdin:
    print(runtime.event_done(opened), flush=True)
runtime.event_destroy(opened)
runtime.ipc_close_mem(base)
"""


def _reader(stage: Stage) -> "subprocess.Popen[str]":
    pool = stage.pool
    assert isinstance(pool, CudaIpcPool)
    places = [
        int.from_bytes(stage.probe_offsets[at : at + 8], "little") for at in range(0, len(stage.probe_offsets), 8)
    ]
    arguments = [stage.device, pool.handle.hex(), str(pool.offset_bytes), pool.event_handle.hex()]
    return subprocess.Popen(
        [sys.executable, "-c", READER, *arguments, ",".join(map(str, places))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_another_process_sees_the_probe_and_the_event(tmp_path: Path) -> None:
    filler = torch.zeros(1000, device="cuda")  # so that the pool does not begin at the allocation's base
    tensor = torch.randint(0, 255, (2, 64, 512), dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        engine = client.register("e", "n", FINGERPRINT, [StagePool("cuda:0", LAYOUT, tensor)])
        (stage,) = daemon.expect(Register).stages
        pool = stage.pool
        assert isinstance(pool, CudaIpcPool)
        assert (len(pool.handle), len(pool.event_handle)) == (64, 64)
        assert pool.pool_bytes == 65536
        assert pool.offset_bytes + pool.pool_bytes <= pool.allocation_bytes
        assert stage.device.startswith("GPU-")
        flat = tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        assert stage.probe_bytes == flat[:16] + flat[32752:32784] + flat[-16:]
        reader = _reader(stage)
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == stage.probe_bytes.hex()
        torch.cuda._sleep(2_000_000_000)  # about a second of work that the capture must come after
        engine.capture("chat", range(64), range(64)).result()
        assert daemon.expect(Capture).ordered == "event"
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == "False"
        torch.cuda.synchronize()
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == "True"
        reader.stdin.close()
        reader.stdout.close()
        assert reader.wait(30) == 0
        engine.unregister()
    del filler


def test_what_cannot_be_exported_says_why() -> None:
    tensor = torch.zeros(2, 64, 512, dtype=torch.uint8, device="cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    for export in export_stages([StagePool(uuid, LAYOUT, tensor), StagePool("cuda:0", LAYOUT, tensor)]):
        assert export.ordered == "event"
        export.close(_Nobody())
    for device, memory, code in (
        ("cuda:1", tensor, "foreign_device"),
        ("cuda:0", tensor[:, ::2], "unshareable"),
        ("cuda:0", tensor[:1], "bad_layout"),
    ):
        with pytest.raises(UsageError) as caught:
            export_stages([StagePool(device, LAYOUT, memory)])
        assert caught.value.code == code


def test_expandable_segments_are_named() -> None:
    code = """
import torch
from shm.layout import Plane, StageLayout, one_group
from stratad._stages import export_stages
from stratad.client import StagePool
from stratad.errors import UsageError
layout = StageLayout(one_group([Plane(0, 512, 512, 64)]))
try:
    export_stages([StagePool("cuda:0", layout, torch.zeros(64 * 512, dtype=torch.uint8, device="cuda"))])
except UsageError as error:
    print(error.code, "expandable_segments:False" in error.message)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout.strip() == "unshareable True", shown.stderr
