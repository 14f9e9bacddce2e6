"""Engines of another user than the daemon's on a GPU: CUDA shares memory between users, but no events."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from shm.layout import Plane
from stratad.client import Client, StagePool
from tests.support.client_rig import FINGERPRINT
from tests.support.daemon import DaemonProcess
from tests.support.layouts import stage_layout
from tests.support.users import Runtime, passable, runtime_for

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
    pytest.mark.skipif(not passable(Path(tempfile.gettempdir())), reason="other users cannot get to TMPDIR"),
]
from tests.gpu.cards import first_card  # noqa: E402 - needs torch

OTHER = 65534
ROWS, ROW_BYTES, PLANES, TOKENS = 512, 4096, 4, 300
LAYOUT = stage_layout([Plane(n * ROWS * ROW_BYTES, ROW_BYTES, ROW_BYTES, ROWS) for n in range(PLANES)])
SETTINGS = {"ram.budget_bytes": "512MiB", "ram.shuttle_bytes": "64MiB", "access.users": str(OTHER)}
# What `park_and_return` does, in a process that may have nothing but the packages.
ENGINE = f"""
import sys
try:
    import torch
except ImportError:
    sys.exit("no torch")
from shm.layout import Plane, StageLayout, one_group
from stratad.client import Client, StagePool
planes = [Plane(n * {ROWS * ROW_BYTES}, {ROW_BYTES}, {ROW_BYTES}, {ROWS}) for n in range({PLANES})]
pool = torch.randint(0, 256, ({PLANES * ROWS * ROW_BYTES},), dtype=torch.uint8, device="cuda")
with Client.connect(sys.argv[1], sys.argv[2], deadline_s=60.0) as client:
    stage = StagePool("cuda:0", StageLayout(one_group(planes)), pool)
    engine = client.register("e", "theirs", {FINGERPRINT!r}, [stage])
    rows = pool.view({PLANES}, {ROWS}, {ROW_BYTES})[:, 7 : 7 + {TOKENS}]
    expected = rows.clone()
    engine.capture("a", range({TOKENS}), range(7, 7 + {TOKENS})).result()
    rows.zero_()
    engine.restore("a", range(7, 7 + {TOKENS})).result()
    print(torch.equal(rows, expected), [export.ordered for export in engine.registration.exports])
"""


def park_and_return(client: Client, namespace: str) -> list[str]:
    """An engine's life in this process: capture, lose the bytes, restore; says how its stages are ordered."""
    pool = torch.randint(0, 256, (PLANES * ROWS * ROW_BYTES,), dtype=torch.uint8, device="cuda")
    engine = client.register("e", namespace, FINGERPRINT, [StagePool("cuda:0", LAYOUT, pool)])
    rows = pool.view(PLANES, ROWS, ROW_BYTES)[:, 7 : 7 + TOKENS]
    expected = rows.clone()
    engine.capture("a", range(TOKENS), range(7, 7 + TOKENS)).result()
    rows.zero_()
    engine.restore("a", range(7, 7 + TOKENS)).result()
    assert torch.equal(rows, expected)
    ordered = [export.ordered for export in engine.registration.exports]
    engine.unregister()
    return ordered


def engine_of_other(daemon: DaemonProcess, runtime: Runtime) -> str:
    """What an engine of `OTHER` prints. Skips where that user has no torch."""
    shown = subprocess.run(
        [runtime.python, "-P", "-c", ENGINE, str(daemon.run_dir), daemon.instance],
        cwd="/",
        env={"PATH": os.environ.get("PATH", ""), "HOME": tempfile.gettempdir(), **runtime.environ},
        user=OTHER,
        group=OTHER,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.stderr.strip() == "no torch":
        pytest.skip(f"uid {OTHER} has no torch")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip()


def need_torch(runtime: Runtime) -> None:
    """Skip where `OTHER` has no torch: the workers of its daemon could not start."""
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": tempfile.gettempdir(), **runtime.environ}
    command = [runtime.python, "-P", "-c", "import torch"]
    shown = subprocess.run(
        command, cwd="/", env=environ, user=OTHER, group=OTHER, extra_groups=[], capture_output=True, check=False
    )
    if shown.returncode:
        pytest.skip(f"uid {OTHER} has no torch")


def test_an_engine_of_another_user_than_roots_daemon() -> None:
    with (
        runtime_for(OTHER) as runtime,
        DaemonProcess(first_card(), SETTINGS, home_mode=0o711) as daemon,
        daemon.client(60.0) as client,
    ):
        assert engine_of_other(daemon, runtime) == "True ['host']"
        assert park_and_return(client, "roots") == ["event"]


def test_an_engine_of_root_and_a_daemon_of_another_user() -> None:
    environ = {"HOME": tempfile.gettempdir()}
    with runtime_for(OTHER) as runtime:
        need_torch(runtime)
        with (
            DaemonProcess(
                first_card(), SETTINGS, home_mode=0o711, uid=OTHER, runtime=runtime, environ=environ
            ) as daemon,
            daemon.client(60.0) as client,
        ):
            assert park_and_return(client, "roots") == ["host"]
            assert engine_of_other(daemon, runtime) == "True ['event']"
