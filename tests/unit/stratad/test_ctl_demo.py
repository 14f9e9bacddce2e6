"""What the demo concludes from what it saw."""

import argparse
from dataclasses import replace

import pytest

from stratad.bench.engine_wire import Generated, Parked, Prefilled, Ready, Restored
from stratad.ctl.demo import Outcome, Settings, Talk, add_arguments, conclude, run_demo
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, CommandError

SETTINGS = Settings("random:tiny", 1000, 2, "cpu", "bfloat16", 3)
TALK = Talk("A", [1, 2], [3], [4, 5, 6], "hash")
OUTCOME = Outcome(
    TALK, Prefilled(2, 3.0, 3), Parked(3, 96, 0.1), Restored(3, 0.5), Generated([4, 5, 6], 1.0, 7, "hash"), ""
)


def _ready(pid: int) -> Ready:
    return Ready(pid, "m", "bfloat16", "cpu", "", 4, 512, 32, ["cpu:0", "cpu:1"], "2 cores", 2, 1.0, {})


def _conclude(outcomes: list[Outcome], exit_code: int = -9, pids: tuple[int, int] = (11, 12)) -> Answer:
    return conclude(SETTINGS, _ready(10), (_ready(pids[0]), _ready(pids[1])), exit_code, outcomes)


def test_the_same_tokens_after_a_kill_are_a_success() -> None:
    answer = _conclude([OUTCOME, OUTCOME])
    assert answer.exit_code == ExitCode.OK
    assert answer.data["engine_killed"] is True
    assert answer.data["continuation_identical"] is True
    assert answer.data["prefill_over_restore"] == 6.0
    needed = "model stages tokens image_bytes prefill_s capture_s restore_s engine_killed continuation_identical"
    assert set(needed.split()) <= set(answer.data)


@pytest.mark.parametrize("wrong", [[4, 5, 7], [4, 5], [4, 5, 6, 7], []])
@pytest.mark.parametrize("place", [0, 1])
def test_any_other_token_is_a_failure(wrong: list[int], place: int) -> None:
    outcomes = [OUTCOME, OUTCOME]
    outcomes[place] = replace(OUTCOME, continued=Generated(wrong, 1.0, 7, "hash"))
    answer = _conclude(outcomes)
    assert answer.exit_code == ExitCode.FAILED
    assert answer.data["continuation_identical"] is False
    assert any("FAILED" in line for line in answer.lines)


@pytest.mark.parametrize("exit_code", [0, 1, -15, 137])
def test_an_engine_that_was_not_killed_is_a_failure(exit_code: int) -> None:
    answer = _conclude([OUTCOME], exit_code)
    assert answer.exit_code == ExitCode.FAILED
    assert answer.data["engine_killed"] is False


def test_the_same_process_cannot_restore_after_its_death() -> None:
    assert _conclude([OUTCOME], pids=(11, 11)).data["engine_killed"] is False


def test_other_logits_are_told_but_no_failure() -> None:
    answer = _conclude([replace(OUTCOME, continued=Generated([4, 5, 6], 1.0, 7, "other"))])
    assert answer.exit_code == ExitCode.OK
    assert answer.data["logits_identical"] is False


@pytest.mark.parametrize("flags", [["--tokens", "0"], ["--stages", "0"], ["--continue", "0"]])
def test_numbers_must_be_positive(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(CommandError) as caught:
        run_demo(parser.parse_args(flags))
    assert caught.value.exit_code == ExitCode.USAGE
