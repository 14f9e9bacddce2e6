"""What `stratactl memory` shows of a daemon that exists only as values, and the line that `status` takes over."""

import json
import os

import msgspec
import pytest

from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from stratad.ctl.memory import describe, memory, proportional_bytes
from stratad.ctl.status import describe as describe_status
from tests.support.ctl_fakes import MEMORY, MEMORY_WARNING, MIB, STATS, WORKER_MEMORY, FakeClient

WARNED = msgspec.structs.replace(MEMORY, warnings=(MEMORY_WARNING,))
WARNING_LINE = (
    "warning: worker cpu:0 (pid 101) holds 80.0 MiB that nothing explains, 66.0 MiB are tolerated: "
    "resident 2.1 GiB, explained 2.1 GiB, since 1970-01-01 01:01:01 UTC"
)


def test_every_process_with_its_parts_terms_and_movement() -> None:
    text = "\n".join(describe(MEMORY).lines)
    worker = next(line for line in text.splitlines() if line.startswith("worker  ")).split()
    engine = next(line for line in text.splitlines() if line.startswith("engine  ")).split()
    assert worker[:3] == ["worker", "cpu:0", "101"]
    assert " ".join(worker[3:]) == "2.1 GiB 130.0 MiB 2.0 GiB 20.0 MiB 2.1 GiB 80.0 MiB 66.0 MiB"
    assert engine[-1] == "-", "an engine is not judged"
    assert (
        "worker cpu:0: shuttles 2.0 GiB, pools <=2.0 MiB of 8.0 MiB, baseline (private) 50.0 MiB, files 20.0 MiB, "
        "residual 80.0 MiB" in text.splitlines()
    )
    assert "engine an-engine: pools <=8.0 MiB, residual 492.0 MiB (its own business)" in text.splitlines()
    assert "arena cpu:0: reserved 2.0 GiB, used 1.0 GiB, free 1.0 GiB" in text.splitlines()
    assert "journal: 3.0 MiB of /dev/shm, which no process has mapped" in text.splitlines()
    assert "daemon in all: resident 2.1 GiB, residual 80.0 MiB" in text, "engines are not the daemon"
    assert "worker cpu:0 720 59 m 55 s 2.1 GiB 2.0 GiB 2.1 GiB 2.1 GiB 100.0 MiB -" in " ".join(text.split())
    assert "a round took 0.40 ms, one wake-up 0.90 ms at most" in text


def test_the_json_explains_all_that_is_resident() -> None:
    data = json.loads(json.dumps(describe(MEMORY).data))
    assert set(data) == set(MEMORY.__struct_fields__) - {"seq"}
    for process in data["processes"]:
        assert process["resident_bytes"] == process["residual_bytes"] + sum(t["bytes"] for t in process["terms"])
    assert data["processes"][1]["series"]["resident_bytes"] == [400 * MIB, 500 * MIB]


def test_samples_are_listed_where_there_are_some() -> None:
    lines = describe(MEMORY).lines
    at = lines.index("engine an-engine, pid 102:")
    assert " ".join(lines[at + 2].split()) == "1970-01-01 00:00:00 400.0 MiB 390.0 MiB 8.0 MiB 8.0 MiB 392.0 MiB"
    assert not any(line.startswith("worker cpu:0, pid") for line in lines)


@pytest.mark.parametrize(("reply", "code"), [(MEMORY, ExitCode.OK), (WARNED, ExitCode.DEGRADED)])
def test_a_warning_is_a_line_and_an_exit_code(reply: object, code: ExitCode) -> None:
    answer = describe(reply)  # type: ignore[arg-type]
    assert answer.exit_code is code
    assert (WARNING_LINE in answer.lines) is (reply is WARNED)


def test_status_shows_the_warning_and_stays_well() -> None:
    warned = msgspec.structs.replace(STATS, memory_warnings=(MEMORY_WARNING,))
    answer = describe_status(warned, lambda _pid: 1)
    assert WARNING_LINE in answer.lines
    assert answer.exit_code is ExitCode.OK
    assert json.loads(json.dumps(answer.data))["memory_warnings"][0]["process"] == "worker cpu:0"
    assert not any("warning" in line for line in describe_status(STATS, lambda _pid: 1).lines)


def test_what_has_no_baseline_yet_is_said_so() -> None:
    early = msgspec.structs.replace(WORKER_MEMORY, judged=False)
    lines = describe(msgspec.structs.replace(MEMORY, processes=(early,))).lines
    assert any(line.endswith("residual 80.0 MiB (no baseline yet)") for line in lines)


def test_processes_that_are_left_out_are_counted() -> None:
    lines = describe(msgspec.structs.replace(MEMORY, unwatched=7)).lines
    assert "not shown: 7 processes, too many to be watched or to be sent" in lines


def test_a_name_cannot_write_to_the_terminal() -> None:
    evil = msgspec.structs.replace(MEMORY.processes[1], name="\x1b[31m")
    warning = msgspec.structs.replace(MEMORY_WARNING, process="\x1b[31m")
    reply = msgspec.structs.replace(MEMORY, processes=(evil,), warnings=(warning,))
    assert "\x1b" not in "\n".join(describe(reply).lines)


def test_shares_are_read_only_when_asked_for() -> None:
    asked: list[int] = []

    def share_of(pid: int) -> int | None:
        asked.append(pid)
        return 1500 * MIB if pid == 101 else None

    client = FakeClient()
    assert "pss_bytes" not in memory(client, share_of=share_of).data
    assert not asked
    answer = memory(client, history=5, shares=True, share_of=share_of)
    assert json.loads(json.dumps(answer.data))["pss_bytes"] == {"101": 1500 * MIB, "102": None}
    assert "1.5 GiB" in "\n".join(answer.lines)
    assert client.calls == [("memory", 0), ("memory", 5)]


def test_a_share_of_this_process_and_of_none() -> None:
    share = proportional_bytes(os.getpid())
    assert share is not None
    assert share > MIB
    assert proportional_bytes(2**22 + 1) is None


@pytest.mark.parametrize(("words", "history"), [([], 0), (["--history"], 24), (["--history", "7"], 7)])
def test_history_on_the_command_line(words: list[str], history: int, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["memory", *words], client.connect) == ExitCode.OK
    assert client.calls[-1] == ("memory", history)
    capsys.readouterr()
