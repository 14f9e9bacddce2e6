"""``stratactl fault-matrix`` in a process of its own, with what every report must hold."""

import json
import subprocess
import sys
from typing import Any

from tests.support.instances import private_segments

COMMAND = [sys.executable, "-P", "-m", "stratad.ctl", "fault-matrix", "--json", "--quiet"]
KEYS = {"op", "stage", "fault", "error", "recovered_s", "byte_exact", "pids_before", "pids_after"}


def fault_matrix(*words: str) -> dict[str, Any]:
    """A matrix of which every cell passes."""
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.communicate()
    report: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert process.returncode == 0, [cell for cell in report["cells"] if not cell["passed"]]
    assert stderr == ""
    assert private_segments(process.pid) == []
    assert (report["passed"], report["failed"], report["skipped"]) == (len(report["cells"]), 0, 0)
    for cell in report["cells"]:
        assert cell.keys() >= KEYS
        assert cell["byte_exact"] is True
    return report
