"""The simulator finds nothing in the core, reaches everything, and catches each rule that is broken on purpose."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.simulation import mutants, runner
from tests.support.simulation.mutants import MUTANTS, Mutant, StaleMutant
from tests.support.simulation.runner import Part
from tests.support.simulation.tally import wanted
from tests.support.simulation.witnesses import WITNESSES

SEEDS = 2_000
TOOL_S = 60.0


@pytest.mark.timeout(300)
def test_no_seed_breaks_an_invariant_and_everything_is_reached() -> None:
    result = runner.run_many(SEEDS)
    assert result["found"] == []
    assert result["missing"] == []
    assert result["passed"], {name: value for name, value in result.items() if name.startswith("median")}


@pytest.mark.timeout(300)
def test_every_broken_rule_is_caught_by_an_invariant() -> None:
    caught = runner.run_mutants()
    assert [one.name for one in caught if not one.found] == []
    assert all(re.match(r"seed \d+, step \d+: \w", one.found) for one in caught)
    assert len(caught) == len(MUTANTS) >= 18


EVERYTHING = dict.fromkeys(wanted(), 1)
FULL = [(80, 4, 2)] * runner.ENOUGH_SEEDS


def test_a_run_passes_when_nothing_was_found_and_all_was_reached() -> None:
    result = runner.summary([Part(EVERYTHING, FULL, [], 0)], 10.0, 2)
    assert result["passed"]
    assert (result["seeds"], result["events"], result["missing"]) == (len(FULL), 80 * len(FULL), [])


@pytest.mark.parametrize(
    "part",
    [
        Part(EVERYTHING, FULL, ["seed 1, step 2: wrong bytes"], 0),
        Part({**EVERYTHING, "fault:corrupt": 0}, FULL, [], 0),
        Part(EVERYTHING, [(49, 4, 2)] * len(FULL), [], 0),
        Part(EVERYTHING, [(80, 2, 2)] * len(FULL), [], 0),
        Part(EVERYTHING, [(80, 4, 1)] * len(FULL), [], 0),
    ],
    ids=["violation", "missing", "events", "conversations", "stages"],
)
def test_a_run_fails(part: Part) -> None:
    assert not runner.summary([part], 10.0, 2)["passed"]


def test_the_names_of_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert WITNESSES.keys() <= {mutant.name for mutant in MUTANTS}
    assert all(WITNESSES.get(mutant.name, 0) < mutant.seeds for mutant in MUTANTS)


@pytest.mark.parametrize("times", [0, 2])
def test_a_mutant_whose_line_is_not_there_once_is_an_error(times: int) -> None:
    mutant = Mutant("a rule", "stratad.core.fences", "line", "other")
    with pytest.raises(StaleMutant, match=f"{times} times"):
        mutants.patched(mutant, "line\n" * times)


def test_a_mutant_changes_its_line_alone() -> None:
    mutant = Mutant("a rule", "stratad.core.fences", "    b", "    c")
    assert mutants.patched(mutant, "a\n    b\n        b\n") == "a\n    c\n        b\n"


def test_a_seed_tells_the_same_story_each_time() -> None:
    stories: list[list[str]] = [[], []]
    for story in stories:
        assert runner.tell_story(11, story.append) == ""
    assert stories[0] == stories[1]
    assert any("--> request" in line for line in stories[0])
    assert any("Append(" in line for line in stories[0])


def test_the_command_prints_what_it_found() -> None:
    result = _tool("--seeds", "6", "--jobs", "2", "--json")
    printed = json.loads(result.stdout)
    assert printed["seeds"] == 6
    assert printed["violations"] == printed["mutants"] == printed["mutants_caught"] == 0
    assert printed["events"] > 100
    assert printed["counts"]["stage:pending:send"] > 0
    assert result.returncode == 0


def test_the_command_tells_the_story_of_one_seed() -> None:
    result = _tool("--seed", "4", "--story")
    assert result.returncode == 0
    assert "SpawnWorker(worker='cpu:0', generation=1)" in result.stdout
    assert result.stdout.endswith("seed 4: nothing found\n")


def _tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(runner.TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
