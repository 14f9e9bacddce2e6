"""The benchmarks, with so little work that only their reports are examined, and what an interrupted one leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratad.bench.daemon import PrivateDaemon
from stratad.version import package_hash
from tests.support.wait import wait_until

COMMAND = [sys.executable, "-P", "-m", "stratad.ctl", "bench"]


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *words, "--json", "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"bench", "hardware", "versions", "rows", "ratios"} <= report.keys()
    assert report["bench"] == words[0]
    assert report["versions"]["daemon_package_hash"] == report["versions"]["installed_package_hash"] == package_hash()
    assert {row["round"] for row in report["rows"]} == {0, 1, 2}
    return report


def test_control() -> None:
    report = bench("control", "--stages", "2", "--captures", "40", "--restores", "10", "--warm-up", "2")
    ratios = report["ratios"]
    captures = [row for row in report["rows"] if row["arm"] == "capture"]
    assert ratios["p50_ms"] == max(row["p50_ms"] for row in captures) > 0
    assert ratios["p99_ms"] is None, "40 samples tell nothing about the hundredth"
    starts = [row for row in report["rows"] if row["arm"] == "start"]
    assert ratios["ready_s"] == max(row["hello_s"] for row in starts)
    assert all(0 < row["hello_s"] <= row["workers_s"] for row in starts)
    assert ratios["supervisor_rss_mib"] == max(row["supervisor_rss_mib"] for row in starts) > 5
    assert all(row["byte_exact"] for row in report["rows"] if row["arm"] == "restore")


def test_stages() -> None:
    report = bench("stages", "--stages", "2", "--stage-mib", "4", "--link-bytes-per-s", "1e8")
    assert report["settings"]["simulated"] is True
    assert report["settings"]["link_bytes_per_s"] == 1e8
    assert all(row["simulated"] and row["byte_exact"] for row in report["rows"])
    for row in report["rows"]:
        assert row["seconds"] >= row["link_limit_s"], "nothing is faster than its link"
    # Two links, 42 ms each: serial must be visibly slower whatever the host does beside.
    assert report["ratios"]["parallel_over_serial"] > 1.2


def test_copy_on_cpu() -> None:
    report = bench("copy", "--device", "cpu", "--image-mib", "16", "--stages", "2")
    assert report["settings"]["device"] == "cpu"
    assert {(row["layout"], row["op"]) for row in report["rows"]} == {
        (layout, op) for layout in ("slot", "paged") for op in ("capture", "restore")
    }
    assert all(row["byte_exact"] and row["moved_bytes"] == row["bytes"] for row in report["rows"])
    for row in report["rows"]:
        assert 0 < row["lane_s"] < row["seconds"]
        assert row["overhead_s"] == pytest.approx(row["seconds"] - row["lane_s"], abs=2e-5)
    for op in ("capture", "restore"):
        worst = min(row["over_limit"] for row in report["rows"] if row["op"] == op)
        assert report["ratios"][f"{op}_over_limit"] == worst


def test_the_daemons_log_is_appended_to() -> None:
    """Whoever else writes to it, or empties it, loses no line of the daemon's."""
    with PrivateDaemon.start({"daemon.devices": "cpu:1"}) as daemon:
        client, _ = daemon.connect()
        client.close()
        assert "ready" in daemon.log_path.read_text()
        (flags,) = re.findall(r"flags:\s+(\d+)", Path(f"/proc/{daemon.pid}/fdinfo/2").read_text())
        assert int(flags, 8) & os.O_APPEND
    assert not daemon.log_path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_an_ended_benchmark_takes_its_daemon_along(number: int) -> None:
    command = [*COMMAND, "control", "--captures", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        own = psutil.Process(process.pid)
        # Supervisor, template and four workers.
        children = wait_until(lambda: found if len(found := own.children(recursive=True)) >= 6 else [], 30)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    wait_until(lambda: not any(child.is_running() for child in children), 10, "the daemon's processes ended")


def test_a_killed_benchmark_takes_its_daemon_along() -> None:
    command = [*COMMAND, "control", "--captures", "1000000"]
    # Nobody is left to remove its folder, so it is made where the test can.
    with (
        tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": folder}
        ) as process,
    ):
        own = psutil.Process(process.pid)
        children = wait_until(lambda: found if len(found := own.children(recursive=True)) >= 6 else [], 30)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        wait_until(lambda: not any(child.is_running() for child in children), 10, "the daemon's processes ended")


@pytest.mark.parametrize("words", [["frobnicate"], ["control", "--rounds", "2"], ["control", "--no-such"]])
def test_wrong_arguments(words: list[str]) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
