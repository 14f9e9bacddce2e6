"""A part of the fault matrix; `stratactl fault-matrix` runs all of it."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.messages import FAULT_KINDS, FAULT_OPS
from shm.extent import unpack_places
from stratad.bench.matrix_cells import engine_kill_cell, fault_cell
from stratad.bench.matrix_points import Rehearsal, point_cell, rehearse, takeover_cell
from stratad.bench.matrix_rig import Rig
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from stratad.fault_points import point_names
from tests.support.fault_matrix import COMMAND, fault_matrix
from tests.support.instances import private_segments

DEVICES, STAGES, STAGE = "cpu:4", 4, 1


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engine processes log to."""
    return tmp_path_factory.mktemp("matrix") / "log"


@contextlib.contextmanager
def started(log: Path) -> Iterator[Rig]:
    with Rig.start(DEVICES, STAGES, log) as running:
        running.connect()
        running.use_fresh_engine()
        running.publish_priors()
        yield running


@pytest.fixture(scope="module")
def rig(log: Path) -> Iterator[Rig]:
    """One daemon for all cells in which it lives on."""
    with started(log) as running:
        yield running


@pytest.mark.parametrize("kind", [kind for kind in FAULT_KINDS if kind != "slow"])
@pytest.mark.parametrize("op", FAULT_OPS)
def test_a_fault_in_the_middle_of_an_operation(rig: Rig, op: str, kind: str) -> None:
    cell = fault_cell(rig, op, STAGE, kind)
    assert cell.passed, cell.problems
    assert cell.recovered_s is not None


def test_a_slow_copy_ends_well(rig: Rig) -> None:
    cell = fault_cell(rig, "capture", STAGE, "slow")
    assert cell.passed, cell.problems
    assert cell.error == ""


def test_the_engine_is_killed_in_the_middle_of_an_operation(log: Path) -> None:
    with started(log) as rig:
        cell = engine_kill_cell(rig, "restore", STAGE)
        assert cell.passed, cell.problems


def test_a_fault_is_armed_and_disarmed_by_stratactl(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    which = ("--run-dir", str(rig.daemon.run_dir), "--instance", rig.daemon.instance, "--json")
    assert main(["fault", "arm", "capture", "--stage", "2", "--kind", "kill", "--at", "900", *which]) == 0
    number = json.loads(capsys.readouterr().out)["fault"]["fault"]
    assert main(["fault", "list", *which]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [info["fault"] for info in shown["faults"]] == [number]
    assert shown["points"]["SendTo.ArmFault:after"] > 0
    assert main(["fault", "disarm", str(number), *which]) == 0
    capsys.readouterr()
    assert not rig.client.faults().faults


def test_the_command_prints_its_cells_and_leaves_nothing() -> None:
    report = fault_matrix("--devices", "cpu:1", "--stages", "2", "--ops", "take", "--kinds", "oom")
    assert [(cell["op"], cell["stage"], cell["fault"], cell["error"]) for cell in report["cells"]] == [
        ("take", 0, "oom", "out_of_memory"),
        ("take", 1, "oom", "out_of_memory"),
    ]


@pytest.fixture(scope="module")
def rehearsal(log: Path) -> Rehearsal:
    """Which points the scenario passes."""
    return rehearse(DEVICES, STAGES, log)


def test_every_fault_point_is_reached_by_the_matrix(rehearsal: Rehearsal) -> None:
    assert sorted(set(point_names()) - rehearsal.scenario - rehearsal.takeover) == []


@pytest.mark.parametrize("point", ["Append.ImageRecord:before", "ReplyTo.Captured:before"])
def test_the_daemon_dies_at_a_point_and_the_next_one_has_every_image(
    rehearsal: Rehearsal, log: Path, point: str
) -> None:
    cell = point_cell(DEVICES, STAGES, log, point, rehearsal.passing(point))
    assert cell.passed, cell.problems
    assert cell.more["images"] == 4  # the one in flight was asked for again by its client


def test_the_next_daemon_dies_while_it_takes_over(log: Path) -> None:
    cell = takeover_cell(DEVICES, STAGES, log, "Append.WorkerRecord:after")
    assert cell.passed, cell.problems


def test_a_damaged_byte_of_a_published_image_fails_a_cell(rig: Rig) -> None:
    """The matrix itself: what it looks at, it sees."""
    detail = rig.client.show("bench", "prior-1")
    segment = Path("/dev/shm") / detail.chunks[0].segments[0].removeprefix("/")
    (place,) = unpack_places(detail.chunks[0].extents)
    with segment.open("r+b") as file:
        file.seek(place.extents[0].offset_bytes)
        byte = file.read(1)
        file.seek(place.extents[0].offset_bytes)
        file.write(bytes([byte[0] ^ 1]))
    cell = fault_cell(rig, "slot_direct", STAGE, "error")
    assert not cell.byte_exact
    assert any("prior-1" in problem and "damaged" in problem for problem in cell.problems)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_matrix_that_is_ended_shows_what_it_has(number: int) -> None:
    words = ("--json", "--devices", "cpu:1", "--stages", "2", "--points", "none")
    command = [argument for argument in COMMAND if argument != "--quiet"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "passed" in process.stderr.readline()
        process.send_signal(number)
        stdout, _ = process.communicate()
    report = json.loads(stdout.splitlines()[-1])
    assert process.returncode == ExitCode.INTERRUPTED
    assert report["cut_short"] is True
    assert report["passed"] == len(report["cells"]) >= 1
    assert private_segments(process.pid) == []
