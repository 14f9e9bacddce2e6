"""When a worker's process counts as gone."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from stratad.processes import LAST_WORDS_S, STATUS_WAIT_S, Processes, WorkerProc


@pytest.fixture
def ended() -> Iterator[Processes]:
    """One worker, whose process has ended."""
    with subprocess.Popen(["true"]) as child:
        proc = WorkerProc("cpu:0", 1, child.pid, os.pidfd_open(child.pid))
        child.wait()
        yield Processes(import_torch=False, workers={"cpu:0": proc})
        os.close(proc.pidfd)


@pytest.mark.parametrize("status", [None, 0])
def test_one_that_has_ended_is_heard_out_and_no_longer_than_that(ended: Processes, status: int | None) -> None:
    ended.workers["cpu:0"].status = status
    assert ended.gone(10.0, lambda _: False) == []
    assert ended.dying == 1
    assert ended.gone(10.0 + STATUS_WAIT_S, lambda _: False) == []
    ((proc, _),) = ended.gone(10.0 + LAST_WORDS_S, lambda _: False)
    assert (proc.worker, ended.workers, ended.dying) == ("cpu:0", {}, 0)


def test_one_that_was_heard_out_is_gone_as_soon_as_its_status_is_known(ended: Processes) -> None:
    assert ended.gone(10.0, lambda _: True) == []
    ended.workers["cpu:0"].status = -9
    assert [reason for _, reason in ended.gone(10.0, lambda _: True)] == ["killed by SIGKILL"]


def test_a_kill_of_one_that_is_still_heard_out_is_done_already(ended: Processes) -> None:
    ended.gone(10.0, lambda _: False)
    assert ended.kill("cpu:0", 1, 10.0)
    assert not ended.unforked
