"""What the demo concludes from what it saw."""

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stratad.bench.engine_wire import Generated, Parked, Prefilled, Ready, Restored
from stratad.ctl.demo import Outcome, Settings, Talk, _Demo, add_arguments, conclude, run_demo
from stratad.ctl.demo_model import check_stages, layers_of, model_folder
from stratad.ctl.doctor_host import TorchSight
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


@pytest.mark.parametrize(("restore_s", "promised"), [(0.5, True), (1.0, True), (1.5, False)])
def test_the_pace_is_told_and_decides_nothing(restore_s: float, promised: bool) -> None:
    answer = _conclude([OUTCOME, replace(OUTCOME, restored=Restored(3, restore_s))])
    (line,) = [line for line in answer.lines if "sooner than reading the prompt again" in line]
    assert f"{3.0 / restore_s:.1f} times sooner" in line
    assert ("LESS than the 3 times that are promised" in line) is not promised
    assert answer.exit_code == ExitCode.OK


@pytest.mark.parametrize("flags", [["--tokens", "0"], ["--stages", "0"], ["--continue", "0"]])
def test_numbers_must_be_positive(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(CommandError) as caught:
        run_demo(parser.parse_args(flags))
    assert caught.value.exit_code == ExitCode.USAGE


def _refused(*flags: str) -> CommandError:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(CommandError) as caught:
        run_demo(parser.parse_args(flags))
    assert caught.value.fix
    return caught.value


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process may be started, whatever for."""

    def popen(*_args: object, **_keywords: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", popen)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--stages", "65"], "1 to 64"),
        (["--stages", "5", "--model", "random:tiny"], "4 layers"),
        (["--stages", "31", "--model", "random:smollm2"], "30 layers"),
        (["--model", "random:large"], "random:large"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all: there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags: list[str], what: str) -> None:
    error = _refused(*flags)
    assert error.exit_code == ExitCode.USAGE
    assert what in error.what


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("config", "what"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ('{"num_hidden_layers": 3}', "3 layers"),
        ('{"n_layer": 2}', "2 layers"),
        ('{"text_config": {"num_hidden_layers": 1}}', "1 layers"),
    ],
)
def test_a_folders_configuration_is_read_first(tmp_path: Path, config: str | None, what: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    error = _refused("--stages", "4", "--model", str(tmp_path))
    assert error.exit_code == ExitCode.USAGE
    assert what in error.what


@pytest.mark.parametrize("config", ["[]", "{}", '{"num_hidden_layers": "many"}', '{"num_hidden_layers": 4}'])
def test_layers_that_are_not_known_are_not_judged(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    check_stages(4, layers_of(str(tmp_path)))


def test_a_gpu_that_is_not_there_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("stratad.ctl.demo.EngineProcess", None)  # whoever started one would fail otherwise
    error = _refused("--device", "cuda", "--model", "random:tiny")
    assert error.exit_code == ExitCode.USAGE
    assert "sees no GPU" in error.what
    assert "--device cpu" in error.fix


@pytest.mark.parametrize(("missing", "model"), [("torch", "random:tiny"), ("transformers", "smollm2")])
def test_libraries_that_are_not_installed_are_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, missing: str, model: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("stratad.ctl.demo.EngineProcess", None)  # whoever started one would fail otherwise
    error = _refused("--model", model, "--device", "cuda")
    assert (error.exit_code, error.code) == (ExitCode.FAILED, "not_installed")
    assert f"{missing} cannot be found" in error.what
    assert "-c constraints.txt '.[transformers]'" in error.fix


def test_the_current_directory_is_not_searched_for_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = tmp_path / "stratad"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("raise RuntimeError('a stranger')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError) as caught:
        model_folder("/nowhere/at/all")
    assert "no folder with a config.json" in caught.value.what


def test_why_a_model_could_not_be_had_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError) as caught:
        model_folder("/nowhere/at/all")
    assert "/nowhere/at/all: no folder with a config.json" in caught.value.what
    assert caught.value.fix.startswith("give the folder of a causal model")
    assert caught.value.fix not in caught.value.what
    assert capfd.readouterr() == ("", "")


def test_the_log_of_a_daemon_that_does_not_start_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # No machine has this GPU.
    ready = msgspec.structs.replace(_ready(10), gpu_uuid="GPU-00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(_Demo, "_reference", lambda _self: (ready, []))
    with pytest.raises(CommandError):
        _Demo(SETTINGS, SETTINGS.model, tmp_path).run()
    assert capfd.readouterr().err.count("cannot start") == 1


def test_a_restored_cache_with_other_bytes_is_a_failure_even_with_the_same_tokens() -> None:
    same = replace(OUTCOME, restored=Restored(3, 0.5, "abc"), parked_sha256="abc")
    assert _conclude([same]).exit_code == ExitCode.OK
    answer = _conclude([same, replace(same, restored=Restored(3, 0.5, "abd"))])
    assert answer.exit_code == ExitCode.FAILED
    assert answer.data["cache_identical"] is False
    assert any("bytes" in line for line in answer.lines if "FAILED" in line)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--cards", "0"], "--cards 0"),
        (["--cards", "4", "--stages", "2"], "several cards have one stage each"),
        (["--cards", "2", "--device", "cpu"], "--device cpu"),
    ],
)
def test_cards_that_cannot_be_are_refused_before_anything_starts(flags: list[str], what: str) -> None:
    error = _refused("--model", "random:tiny", *flags)
    assert error.exit_code == ExitCode.USAGE
    assert what in error.what


def test_more_cards_than_torch_sees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratad.ctl.demo_model.torch_sees_gpus", lambda: TorchSight("2", 2, ""))
    assert "--cards 4, but torch sees 2 GPUs" in _refused("--model", "random:tiny", "--cards", "4").what


def test_cards_that_torch_does_not_see_are_refused_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratad.ctl.demo_model.torch_sees_gpus", lambda: TorchSight("2", 0, "torch 2 sees no GPU"))
    error = _refused("--model", "random:tiny", "--cards", "4")
    assert error.what == "--cards 4, but torch 2 sees no GPU"
    assert error.fix.startswith("give one --cards; for GPUs: ")


def test_an_engine_over_several_cards_is_told_all_of_them() -> None:
    assert SETTINGS.engine_device == "cpu"
    assert replace(SETTINGS, device="auto", cards=3).engine_device == "cuda:0,cuda:1,cuda:2"
