"""stratactl doctor: sockets, the instance lock and the daemon, seen without a daemon."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratad.ctl import doctor_daemon, doctor_memory
from stratad.ctl.connection import DaemonClient, Target, listens
from stratad.ctl.doctor_daemon import instance_lock, lock_holder, sockets
from stratad.ctl.findings import Check, State
from stratad.errors import error_for
from tests.support.ctl_fakes import FakeClient, another_build, with_health

KINDS = {"life.sock": socket.SOCK_SEQPACKET, "client.sock": socket.SOCK_STREAM, "worker.sock": socket.SOCK_STREAM}


@pytest.fixture
def target() -> Iterator[Target]:
    # A socket's path is short, which pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="ctl") as folder:
        yield Target(Path(folder), "one", 1.0)


def directory_of(target: Target) -> Path:
    assert target.run_dir is not None
    folder = target.run_dir / target.instance
    folder.mkdir(mode=0o750, exist_ok=True)
    return folder


def bind(folder: Path, names: list[str]) -> list[socket.socket]:
    bound = []
    for name in names:
        listener = socket.socket(socket.AF_UNIX, KINDS[name])
        listener.bind(str(folder / name))
        listener.listen()
        bound.append(listener)
    return bound


def states(checks: Iterator[Check]) -> dict[str, State]:
    return {check.name: check.state for check in checks}


def refuse(_target: Target) -> DaemonClient:
    raise AssertionError("nobody listens, so nothing may be connected")


def test_nothing_there_is_fine(target: Target) -> None:
    assert set(states(sockets(target)).values()) == {State.OK}
    finding = doctor_daemon.daemon(target, refuse)
    assert finding.check.state is State.OK
    assert finding.stats is None


def test_sockets_that_are_listened_at(target: Target) -> None:
    bound = bind(directory_of(target), list(KINDS))
    try:
        found = states(sockets(target))
        assert found["run directory"] is State.OK
        assert found["sockets"] is State.OK
    finally:
        for listener in bound:
            listener.close()


def test_sockets_of_a_daemon_that_died(target: Target) -> None:
    for listener in bind(directory_of(target), list(KINDS)):
        listener.close()
    assert states(sockets(target))["sockets"] is State.WARN
    assert doctor_daemon.daemon(target, refuse).check.state is State.OK


def test_a_removed_socket_is_a_failure(target: Target) -> None:
    bound = bind(directory_of(target), ["life.sock", "worker.sock"])
    try:
        assert states(sockets(target))["sockets"] is State.FAIL
    finally:
        for listener in bound:
            listener.close()


def test_a_directory_that_others_may_write_to(target: Target) -> None:
    directory_of(target).chmod(0o777)
    assert states(sockets(target))["run directory"] is State.FAIL


@pytest.mark.parametrize("target_", [Target(Path("/" + "x" * 120), "one", 1.0), Target(Path("/run"), "No Such!", 1.0)])
def test_paths_that_cannot_be(target_: Target) -> None:
    assert states(sockets(target_)) == {"sockets": State.FAIL}


def test_listens_tells_the_three_cases_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # relative, because pytest's folders are long
    path = Path("a.sock")
    assert listens(path, socket.SOCK_STREAM) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert listens(path, socket.SOCK_STREAM) is True
    assert listens(path, socket.SOCK_STREAM) is False


def _with_life_socket(target: Target) -> socket.socket:
    (listener,) = bind(directory_of(target), ["life.sock"])
    return listener


def test_a_daemon_that_answers(target: Target) -> None:
    with _with_life_socket(target):
        finding = doctor_daemon.daemon(target, FakeClient().connect)
        assert finding.check.state is State.OK
        assert finding.stats is not None
        assert doctor_daemon.daemon(target, with_health("degraded").connect).check.state is State.WARN


def test_a_daemon_of_another_build(target: Target) -> None:
    with _with_life_socket(target):
        check = doctor_daemon.daemon(target, another_build().connect).check
    assert check.state is State.FAIL
    assert "another build" in check.what
    assert check.fix


def test_a_daemon_that_is_silent(target: Target) -> None:
    client = FakeClient(fails_with=error_for("deadline", "no answer"))
    with _with_life_socket(target):
        check = doctor_daemon.daemon(target, client.connect).check
    assert check.state is State.FAIL
    assert "[deadline]" in check.what


def test_the_lock_is_looked_up_and_not_taken(tmp_path: Path) -> None:
    assert instance_lock("one", answers=False, shm=tmp_path).state is State.OK
    path = tmp_path / "stratad.one.lock"
    path.touch()
    assert instance_lock("one", answers=False, shm=tmp_path).state is State.OK
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        silent = instance_lock("one", answers=False, shm=tmp_path)
        answering = instance_lock("one", answers=True, shm=tmp_path)
    assert silent.state is State.FAIL
    assert silent.data["holder"] == os.getpid()
    assert answering.state is State.OK


def test_lock_holder_reads_only_its_own_file() -> None:
    text = (
        "1: POSIX  ADVISORY  WRITE 11 00:17:5 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 22 00:17:55 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 33 00:17:5 0 EOF\n"
        "3: -> FLOCK  ADVISORY  WRITE 44 00:17:5 0 EOF\n"
    )
    device = os.makedev(0, 0x17)
    assert lock_holder(text, device, 5) == 33
    assert lock_holder(text, device, 6) is None


def test_budget_of_the_configuration(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAD_RAM_BUDGET_BYTES", raising=False)
    assert doctor_memory.configured_budget_bytes(target, None) is None
    config = tmp_path / "c.toml"
    config.write_text('[ram]\nbudget_bytes = "256MiB"\n')
    assert doctor_memory.configured_budget_bytes(target, config) == 256 << 20


def test_a_configuration_that_cannot_be_read_is_a_finding(target: Target, tmp_path: Path) -> None:
    found = states(doctor_memory.memory(target, tmp_path / "none.toml", None))
    assert found["configuration"] is State.FAIL
    assert {"shm", "memlock", "headroom"} <= found.keys()


def test_headroom_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    check = doctor_memory.headroom(3 << 20, 1 << 20, tmp_path)
    assert check.state is State.FAIL
    assert "1.0 MiB more" in check.what
    assert doctor_memory.headroom(2 << 20, 1 << 20, tmp_path).state is State.OK
    assert doctor_memory.headroom(None, 0, tmp_path).state is State.OK
