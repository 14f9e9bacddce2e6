"""What `stratactl trace` shows of a daemon that exists only as values, and what it asks for."""

import json

import msgspec
import pytest

from ipc.messages import TracedStage
from stratad.core import trace as of_the_core
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from stratad.ctl.trace import STEPS, describe
from tests.support.ctl_fakes import TRACED, FakeClient


def test_one_line_a_stage_with_every_step_in_milliseconds() -> None:
    lines = describe(TRACED).lines
    head = next(line for line in lines if "time (UTC)" in line).split()
    assert head[2:] == [
        *("op", "kind", "conversation", "engine", "stage", "worker", "asked", "moved", "digested"),
        *STEPS,
        *("total", "code"),
    ]
    capture, failed, waited = (" ".join(line.split()) for line in lines[-3:])
    steps = "1.000 0.200 0.000 0.300 0.400 0.500 0.600 0.700 0.800 0.900"
    sizes = "2.9 KiB 2.0 KiB 1000 B"
    assert capture == rf"1970-01-01 01:01:02.500 41 capture a\x1bb 3 0 cpu:0 {sizes} {steps} 5.400 -"
    assert failed == f"1970-01-01 01:01:03.500 42 restore b 3 0 cpu:0 {sizes} {steps} 2.000 damaged"
    assert waited == f"1970-01-01 01:01:03.500 42 restore b 3 1 cpu:1 {sizes} {steps} 2.000 (damaged)"


def test_percentiles_of_each_kind() -> None:
    lines = [" ".join(line.split()) for line in describe(TRACED).lines]
    rows = [line for line in lines if line.startswith("capture 1 0 2.0 KiB 1000 B")]
    assert [row.split()[7] for row in rows] == ["p50", "p90", "p99", "most"]
    assert [set(row.split()[8:]) for row in rows] == [{"1.000"}, {"2.000"}, {"3.000"}, {"4.000"}]
    assert all(len(row.split()[8:]) == len(STEPS) + 2 for row in rows)
    assert [line for line in lines if line.startswith("restore 0 1")] == ["restore 0 1 0 B 0 B -" + 12 * " -"]


def test_the_head_says_whether_it_is_on() -> None:
    on, off = describe(TRACED).lines[0], describe(msgspec.structs.replace(TRACED, on=False)).lines[0]
    assert on == (
        "trace on since 1970-01-01 01:01:01.000 UTC: 2 operations kept, 2.5 KiB of at most 4.0 MiB; 1 forgotten"
    )
    assert off.startswith("trace off (`stratactl trace on` begins anew): 2 operations kept")


def test_json_leaves_no_field_out() -> None:
    data = json.loads(json.dumps(describe(TRACED).data))
    assert set(data) == set(TRACED.__struct_fields__) - {"seq"}
    assert set(data["ops"][0]) == set(TRACED.ops[0].__struct_fields__)
    assert set(data["ops"][1]["stages"][1]) == set(TracedStage.__struct_fields__)
    assert data["ops"][0]["stages"][0]["event_s"] == 0.0
    assert data["kinds"][0]["times"]["total"] == [0.001, 0.002, 0.003, 0.004]


def test_the_steps_are_those_of_the_daemon() -> None:
    assert STEPS == of_the_core.STEPS
    assert [f"{step}_s" for step in STEPS] == [name for name in TracedStage.__struct_fields__ if name.endswith("_s")]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], ("trace", 20, "", False)),
        (["--last", "5", "--slowest", "--op", "take"], ("trace", 5, "take", True)),
        (["--last", "0"], ("trace", 0, "", False)),
        (["on"], ("set_trace", True)),
        (["off"], ("set_trace", False)),
    ],
)
def test_what_is_asked(words: list[str], asked: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["trace", *words, "--json"], client.connect) == ExitCode.OK
    assert client.calls[-1] == asked
    assert "kept" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", [["--last", "x"], ["--last", "-1"], ["--last", "1001"], ["maybe"]])
def test_what_cannot_be_asked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["trace", *words], client.connect) == ExitCode.USAGE
    assert client.calls == []
    assert capsys.readouterr().err
