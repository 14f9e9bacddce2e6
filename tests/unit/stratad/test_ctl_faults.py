"""stratactl fault and fault-matrix: arguments in, tables and JSON out, without a daemon."""

import argparse
import json

import pytest

from ipc.messages import FAULT_OPS
from stratad.bench.matrix import Plan
from stratad.bench.matrix_cell import Cell
from stratad.bench.matrix_points import SUPERVISOR_KILL
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.fault_matrix import add_arguments, plan_of, report
from stratad.ctl.main import main
from stratad.errors import error_for
from stratad.fault_points import point_names
from tests.support.ctl_fakes import FakeClient

PLAN = Plan("cpu:2", 2, ("capture",), ("kill",))


def run(client: FakeClient, *argv: str) -> ExitCode:
    return ExitCode(main(argv, client.connect))


def test_arm_asks_for_one_fault(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    code = run(client, "fault", "arm", "take", "--stage", "1", "--kind", "hang", "--at", "3", "--engine", "7", "--json")
    assert code is ExitCode.OK
    assert client.calls[-1] == ("arm_fault", "take", 1, "hang", 3, 7)
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"fault": {"fault": 5, "op": "take", "stage": 1, "kind": "hang", "at": 3, "worker": "cpu:0"}}


def test_arm_strikes_the_next_copy_unless_it_is_told_another(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert run(client, "fault", "arm", "capture", "--stage", "0", "--kind", "error") is ExitCode.OK
    assert client.calls[-1] == ("arm_fault", "capture", 0, "error", 1, 0)
    assert capsys.readouterr().out.splitlines()[1].split() == ["5", "capture", "0", "error", "1", "cpu:0"]


def test_list_shows_what_is_armed_and_what_was_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeClient(), "fault", "list") is ExitCode.OK
    text = capsys.readouterr().out
    assert "kill" in text
    assert "SendTo.CaptureJob:before" not in text
    assert run(FakeClient(), "fault", "list", "--json") is ExitCode.OK
    assert json.loads(capsys.readouterr().out)["points"] == {"SendTo.CaptureJob:before": 3}
    assert run(FakeClient(), "fault", "list", "--passed") is ExitCode.OK
    assert "SendTo.CaptureJob:before" in capsys.readouterr().out
    assert run(FakeClient(armed=()), "fault", "list") is ExitCode.OK
    assert "no fault is armed" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "asked"), [((), 0), (("5",), 5)])
def test_disarm_takes_back_one_or_all(argv: tuple[str, ...], asked: int, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert run(client, "fault", "disarm", *argv, "--json") is ExitCode.OK
    assert client.calls[-1] == ("disarm_fault", asked)
    assert json.loads(capsys.readouterr().out) == {"disarmed": 1}


def test_points_are_shown_without_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert run(client, "fault", "points", "--json") is ExitCode.OK
    assert client.calls == []
    assert json.loads(capsys.readouterr().out) == {"points": list(point_names())}


def test_a_daemon_that_allows_no_faults_says_how_to_start_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(fails_with=error_for("faults_off", "not allowed"))
    assert run(client, "fault", "list") is ExitCode.FAILED
    assert "testing.allow_faults=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("fault",),
        ("fault", "arm", "capture", "--kind", "kill"),
        ("fault", "arm", "capture", "--stage", "0", "--kind", "bang"),
        ("fault", "arm", "put_part", "--stage", "0", "--kind", "kill"),
        ("fault-matrix", "--ops", "copy"),
        ("fault-matrix", "--ops", ","),
        ("fault-matrix", "--kinds", "kill,bang"),
        ("fault-matrix", "--points", "SendTo:before"),
        ("fault-matrix", "--points", "none,Append.ImageRecord:before"),
        ("fault-matrix", "--kinds", "supervisor_kill", "--points", "none"),
        ("fault-matrix", "--stages", "0"),
        ("fault-matrix", "--devices", "gpu:7"),
        ("fault-matrix", "--devices", "auto"),
    ],
)
def test_arguments_that_cannot_be_are_refused(argv: tuple[str, ...]) -> None:
    assert run(FakeClient(), *argv) is ExitCode.USAGE


def test_the_report_has_the_keys_that_others_rely_on() -> None:
    good = Cell("capture", 0, "kill", "worker_died", 0.1234567, True, {"engine": 1}, {"engine": 1})
    answer = report(PLAN, [good], 0)
    assert answer.exit_code is ExitCode.OK
    assert (answer.data["passed"], answer.data["failed"], answer.data["skipped"]) == (1, 0, 0)
    (cell,) = json.loads(json.dumps(answer.data["cells"]))
    keys = ("op", "stage", "fault", "error", "recovered_s", "byte_exact", "pids_before", "pids_after")
    assert [cell[key] for key in keys] == [
        "capture",
        0,
        "kill",
        "worker_died",
        0.1235,
        True,
        {"engine": 1},
        {"engine": 1},
    ]


@pytest.mark.parametrize(
    "bad",
    [
        Cell("capture", 1, "kill", byte_exact=False),
        Cell("capture", 1, "kill", byte_exact=True, problems=["rows changed"]),
    ],
)
def test_one_bad_cell_fails_the_matrix(bad: Cell) -> None:
    good = Cell("capture", 0, "kill", "worker_died", 0.1, byte_exact=True)
    answer = report(PLAN, [good, bad], 3)
    assert answer.exit_code is ExitCode.FAILED
    assert (answer.data["passed"], answer.data["failed"], answer.data["skipped"]) == (1, 1, 3)
    assert any("1/2" in line for line in answer.lines)
    assert all(any(problem in line for line in answer.lines) for problem in bad.problems)


def planned(*words: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return plan_of(parser.parse_args(words))


def test_no_points_leave_the_supervisors_deaths_out() -> None:
    assert SUPERVISOR_KILL in planned().kinds
    assert planned("--points", "none").kinds == tuple(kind for kind in planned().kinds if kind != SUPERVISOR_KILL)
    one = planned("--points", "Append.ImageRecord:before")
    assert (one.kinds, one.points) == (planned().kinds, ("Append.ImageRecord:before",))


def test_a_matrix_that_is_cut_short_has_not_passed() -> None:
    good = Cell("capture", 0, "kill", "worker_died", 0.1, byte_exact=True)
    answer = report(PLAN, [good], 0, cut_short=True)
    assert answer.exit_code is ExitCode.INTERRUPTED
    assert (answer.data["passed"], answer.data["cut_short"]) == (1, True)
    assert "cut short" in answer.lines[-1]
    assert report(PLAN, [good], 0).data["cut_short"] is False


def test_help_of_the_matrix_names_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeClient(), "fault-matrix", "--help") is ExitCode.OK
    words = capsys.readouterr().out
    assert all(op in words for op in FAULT_OPS)
    assert "5 minutes" in words
    assert "none" in words
