"""tools/multi_gpu.py: what becomes of a step, whatever its command does, and what is written meanwhile."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stratad.bench.cards import choose_cards
from stratad.config import load_config
from stratad.ctl.bench import MIN_ROUNDS
from stratad.ctl.connection import DaemonClient, Target
from stratad.ctl.main import build_parser
from tests.support.wait import wait_until

TOOLS = Path(__file__).resolve().parents[2] / "tools"
REPORT = 'print(\'{"ratios": {"a": 2}, "settings": {}}\', flush=True)'


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> Any:
    before = list(sys.path)
    try:
        _load("multi_gpu_steps")
        return _load("multi_gpu")
    finally:
        sys.path[:] = before


def step(tool: Any, code: str, **more: Any) -> Any:
    return tool.Step("some", [sys.executable, "-c", code], more.pop("limit_s", 30.0), **more)


def test_a_step_that_passes_tells_its_figures(tool: Any) -> None:
    entry = tool.run_step(step(tool, f"print('so far'); {REPORT}"), 60.0)
    assert (entry["state"], entry["figures"], entry["exit_code"]) == ("passed", {"a": 2}, 0)
    assert entry["report"] == {"ratios": {"a": 2}, "settings": {}}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('it broke')", "it broke"),
        ('print(\'{"error": {"code": "damaged", "message": "other bytes"}}\'); raise SystemExit(1)', "other bytes"),
        ("print('no report')", "exit status 0"),
        ("print('{\"ratios\": 7}')", "cannot be read"),
        (f"{REPORT}; raise SystemExit(3)", "exit status 3"),
    ],
)
def test_a_step_that_fails_is_a_result(tool: Any, code: str, reason: str) -> None:
    entry = tool.run_step(step(tool, code), 60.0)
    assert entry["state"] == "failed"
    assert reason in entry["reason"]


def test_a_step_is_not_run_without_time_or_against_a_reason(tool: Any) -> None:
    assert tool.run_step(step(tool, "raise SystemExit(9)"), 20.0)["reason"] == "no time was left"
    entry = tool.run_step(step(tool, "raise SystemExit(9)", why_not="not there"), 60.0)
    assert (entry["state"], entry["reason"]) == ("skipped", "not there")


def test_a_step_that_is_cut_off_says_what_it_has_and_leaves_no_process(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "STOP_S", 0.3)
    pids = tmp_path / "pids"
    code = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"{REPORT}\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    entry = tool.run_step(step(tool, code, limit_s=2.0), 60.0)
    assert (entry["state"], entry["figures"], entry["exit_code"]) == ("cut", {"a": 2}, -signal.SIGKILL)
    wait_until(lambda: not any(_runs(int(pid)) for pid in pids.read_text().split()), 10.0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_pytest_says_is_counted(tool: Any) -> None:
    text = (
        "F.\nFAILED tests/gpu/test_a.py::test_b - assert 1\n== 1 failed, 117 passed, 2 skipped in 9.83s (0:00:09) ==\n"
    )
    found = sys.modules["multi_gpu_steps"].counted(text)
    assert found == {"failed": 1, "passed": 117, "skipped": 2, "failures": ["FAILED tests/gpu/test_a.py::test_b"]}


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("cards", [1, 4])
def test_every_command_is_one_that_is_taken(tool: Any, cards: int, dry: bool) -> None:
    steps = sys.modules["multi_gpu_steps"].plan(cards, dry=dry)
    assert len({step.name for step in steps}) == len(steps)
    for found in steps:
        if "stratad.ctl" in found.command:
            words = found.command[found.command.index("stratad.ctl") + 1 :]
            args = build_parser(_nobody).parse_args(words)
            assert args.json
            assert getattr(args, "rounds", MIN_ROUNDS) >= MIN_ROUNDS
            if isinstance(getattr(args, "cards", None), str):  # of a benchmark
                assert choose_cards(args.cards, None if dry else Gpus()).devices
    several = [step.name for step in steps if step.why_not == "one card only"]
    assert several == ([] if cards > 1 else ["stages", "isolate"])


def _nobody(_target: Target) -> DaemonClient:
    raise AssertionError("nothing is asked of a daemon here")


class Gpus:
    def count(self) -> int:
        return 4

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"


def test_every_file_of_gpu_tests_is_run(tool: Any) -> None:
    steps = sys.modules["multi_gpu_steps"].plan(4, dry=False)
    run = [Path(word).name for step in steps for word in step.command if word.startswith("tests/gpu/")]
    assert sorted(run) == sorted(path.name for path in (TOOLS.parent / "tests/gpu").glob("test_*.py"))


def test_the_number_of_cards_for_the_tests_is_no_setting_of_a_daemon(tool: Any) -> None:
    variable = sys.modules["multi_gpu_steps"].CARDS_VARIABLE
    assert f'VARIABLE = "{variable}"' in (TOOLS.parent / "tests/gpu/cards.py").read_text()
    load_config([], {"XDG_RUNTIME_DIR": "/run", variable: "4"})


def _result(simulated: bool, **figures: dict[str, Any]) -> dict[str, Any]:
    steps = [{"name": name, "state": "passed", "figures": found, "seconds": 1.0} for name, found in figures.items()]
    return {"simulated": simulated, "steps": steps, "cards": 4, "commit": "c", "date": "d"}


STAGES = {
    "capture_parallel_over_serial": 3.9, "restore_parallel_over_serial": 3.7, "tokens": 100_096,
    "capture_link_over_alone": 0.96, "restore_link_over_alone": 0.9, "capture_link_over_limit": 0.97,
    "restore_link_over_limit": 0.96, "at_once_over_alone": 0.93,
}  # fmt: skip


def test_targets_are_judged_on_cards_and_never_in_a_dry_run(tool: Any) -> None:
    isolate = {"others_lost": 0, "others_p99_over_calm": 2.1}
    targets = sys.modules["multi_gpu_steps"].targets
    judged = [goal["met"] for goal in targets(_result(False, stages=STAGES, isolate=isolate))]
    assert judged == [True, True, False, False, True, False]
    assert {goal["met"] for goal in targets(_result(True, stages=STAGES, isolate=isolate))} == {None}
    two = {**_result(False, stages=STAGES), "cards": 2}
    assert [goal["met"] for goal in targets(two)] == [True, False], "two cards are never 3.8 times as fast as one"
    failed = _result(False, stages=STAGES)
    failed["steps"][0]["state"] = "failed"
    assert targets(failed) == []


def test_the_table_says_that_a_dry_run_is_simulated(tool: Any) -> None:
    assert "SIMULATED" in tool.lines(_result(True))[0]
    assert "real GPUs" in tool.lines(_result(False))[0]


def test_a_dry_run_writes_its_json_and_its_table(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-P", str(TOOLS / "multi_gpu.py"), "--dry-run", "--steps", "links,soak,tests-cards"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["cards"], found["simulated"]) == (4, True)
    assert {"hardware", "commit", "steps", "targets"} <= set(found)
    links, soak, tests = found["steps"]
    assert (links["state"], soak["name"], tests["state"]) == ("passed", "soak", "skipped")
    assert links["figures"]["capture_at_once_gb_per_s"] > 0
    assert "SIMULATED" in out.with_suffix(".txt").read_text()
    assert json.loads(done.stdout.splitlines()[-1])["simulated"] is True


def test_a_step_that_is_unknown_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(TOOLS / "multi_gpu.py"), "--dry-run", "--steps", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "no step 'nothing'; there are doctor, links" in done.stderr
    assert list(tmp_path.iterdir()) == []
