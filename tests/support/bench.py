"""One benchmark through the command line, in a process of its own, with what every report must hold."""

import json
import subprocess
import sys
from typing import Any

import pytest

from stratad.version import package_hash
from tests.support.instances import private_segments

COMMAND = [sys.executable, "-P", "-m", "stratad.ctl", "bench"]


def bench(*words: str) -> dict[str, Any]:
    command = [*COMMAND, *words, "--json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stderr == ""
    assert private_segments(process.pid) == []
    report: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert {"bench", "hardware", "versions", "rows", "ratios"} <= report.keys()
    assert report["bench"] == words[0]
    assert report["versions"]["daemon_package_hash"] == report["versions"]["installed_package_hash"] == package_hash()
    assert {row["round"] for row in report["rows"]} == {0, 1, 2}
    return report


def check_slots(report: dict[str, Any], device: str) -> None:
    """The report of ``bench slots`` over both layouts."""
    assert report["settings"]["device"] == device
    rows = report["rows"]
    assert sorted((row["round"], row["layout"], row["op"]) for row in rows) == sorted(
        (number, layout, op) for number in range(3) for layout in ("slot", "paged") for op in ("direct", "to", "from")
    )
    for row in rows:
        assert row["byte_exact"]
        assert row["moved_bytes"] == row["bytes"] >= report["settings"]["image_bytes"]
        assert 0 < row["lane_s"] < row["seconds"]
        assert row["overhead_s"] == pytest.approx(row["seconds"] - row["lane_s"], abs=2e-5)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9, rel=0.01, abs=1e-3)
        assert row["over_limit"] == pytest.approx(row["gb_per_s"] / row["limit_gb_per_s"], rel=0.02, abs=1e-3)
    ratios = {"direct_over_d2d": "direct", "to_over_limit": "to", "from_over_limit": "from"}
    assert report["ratios"] == {
        name: min(row["over_limit"] for row in rows if row["op"] == op) for name, op in ratios.items()
    }
    # The ways take turns at being first.
    firsts = [next(row["op"] for row in rows if row["round"] == number) for number in range(3)]
    assert firsts == ["to", "direct", "to"]
