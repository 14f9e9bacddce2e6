"""The points at which a supervisor can be made to die: every effect has them, and they are counted and named."""

import os
import signal
from pathlib import Path
from typing import get_args

import pytest

from ipc.messages import Command, Done, Reply, StopWorker
from stratad.config import ConfigError, load_config
from stratad.core.effects import Append, Effect, ReplyTo, SendTo, SpawnWorker
from stratad.core.records import DropRecord, Record, WorkerRecord
from stratad.fault_points import DieAt, FaultPoints, point_names

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/home/x"}


def test_every_effect_has_points_and_those_that_carry_messages_one_for_each() -> None:
    names = set(point_names())
    carriers = {ReplyTo: Reply, SendTo: Command, Append: Record}
    expected = {
        f"{effect.__name__}.{message.__name__}" for effect, union in carriers.items() for message in get_args(union)
    }
    expected |= {effect.__name__ for effect in get_args(Effect) if effect not in carriers}
    assert names == {f"{name}:{when}" for name in expected for when in ("before", "after")}
    assert len(names) == len(point_names())


def test_a_passing_is_counted_and_the_first_is_written_down(tmp_path: Path) -> None:
    points = FaultPoints(None, tmp_path / "reached")
    for _ in range(3):
        points.pass_by(SendTo("cpu:0", StopWorker()), "before")
    points.pass_by(ReplyTo(1, Done(1)), "after")
    points.pass_by(SpawnWorker("cpu:0", 1), "before")
    records = (DropRecord((1,)), WorkerRecord("cpu:0", 2, 3), DropRecord((4,)))
    points.pass_by(Append(1, records), "before")
    assert points.passed == {
        "SendTo.StopWorker:before": 3,
        "ReplyTo.Done:after": 1,
        "SpawnWorker:before": 1,
        "Append.DropRecord:before": 1,
        "Append.WorkerRecord:before": 1,
    }
    assert set((tmp_path / "reached").read_text().split()) == set(points.passed)
    assert len((tmp_path / "reached").read_text().split()) == len(points.passed)


@pytest.mark.parametrize(("number", "passings"), [(1, 1), (3, 3)])
def test_a_process_dies_at_its_point_and_not_before(tmp_path: Path, number: int, passings: int) -> None:
    child = os.fork()
    if child == 0:
        points = FaultPoints(DieAt("SpawnWorker:after", number), tmp_path / "reached")
        for passing in range(5):
            points.pass_by(SpawnWorker("cpu:0", 1), "before")
            (tmp_path / "passing").write_text(str(passing + 1))
            points.pass_by(SpawnWorker("cpu:0", 1), "after")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "passing").read_text() == str(passings)


@pytest.mark.parametrize(
    ("text", "point", "number"),
    [("SendTo.CaptureJob:before#2", "SendTo.CaptureJob:before", 2), ("KillWorker:after", "KillWorker:after", 1)],
)
def test_where_to_die_is_read(text: str, point: str, number: int) -> None:
    assert DieAt.parse(text) == DieAt(point, number)
    config = load_config(["--set", "testing.allow_faults=true", "--set", f"testing.die_at={text}"], ENVIRON)
    assert config.testing.die_at == text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["testing.die_at=KillWorker:after"], "needs testing.allow_faults = true"),
        (["testing.allow_faults=true", "testing.die_at=KillWorker"], "no fault point is called 'KillWorker'"),
        (["testing.allow_faults=true", "testing.die_at=SendTo:before"], "see `stratactl fault points`"),
        (["testing.allow_faults=true", "testing.die_at=KillWorker:after#0"], "expected a number above 0"),
        (["testing.allow_faults=true", "testing.die_at=KillWorker:after#"], "expected a number above 0"),
    ],
)
def test_a_daemon_is_not_started_to_die_nowhere(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"testing\.die_at") as caught:
        load_config([part for setting in settings for part in ("--set", setting)], ENVIRON)
    assert says in str(caught.value)
