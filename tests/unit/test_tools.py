"""The commands in `tools/`: what they say of themselves, and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# A user of a tool has not installed what only the tests need.
WITHOUT_PYTEST = (
    "import runpy, sys; sys.modules['pytest'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_PYTEST, str(TOOLS / name), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["cycles.py", "simulate.py", "worker_kills.py", "exchange_speed.py", "multi_gpu.py"])
def test_a_tool_needs_no_pytest(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("cycles.py", "--cycles", "0"),
        ("simulate.py", "--seeds", "0"),
        ("simulate.py", "--seeds", "-3"),
        ("worker_kills.py", "--kills", "0"),
        ("worker_kills.py", "--mib", "7"),
    ],
)
def test_a_number_that_is_too_small_is_refused(name: str, option: str, value: str) -> None:
    done = run(name, option, value)
    assert done.returncode == 2
    assert f"{option} must be at least" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_simulator_tells_people_in_few_lines() -> None:
    done = run("simulate.py", "--seeds", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith("seeds 4, events ")
    assert lines[-1] == "passed"
    assert "mutants" not in done.stdout
