"""stratactl doctor: sockets, the instance lock and the daemon, seen without a daemon."""

import fcntl
import grp
import os
import pwd
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ipc.listening import listens
from ipc.messages import StatsReply
from stratad.ctl import doctor_daemon, doctor_memory
from stratad.ctl.connection import DaemonClient, Target, connect_client
from stratad.ctl.doctor_daemon import instance_lock, lock_holder, sockets
from stratad.ctl.findings import Check, State
from stratad.ctl.output import CommandError
from stratad.errors import error_for
from stratad.paths import SYSTEM_RUN_DIR, SYSTEM_STATE_DIR, PathError, default_run_dir, default_state_dir
from stratad.permission import barrier
from tests.support.ctl_fakes import STATS, FakeClient, another_build, with_health

NOBODY = 65534
KINDS = {"life.sock": socket.SOCK_SEQPACKET, "client.sock": socket.SOCK_STREAM, "worker.sock": socket.SOCK_STREAM}


STARTING = msgspec.structs.replace(
    STATS, health="starting", workers=(msgspec.structs.replace(STATS.workers[0], state="starting"),)
)


class GettingReady(FakeClient):
    """Its workers are ready from the second look on."""

    def stats(self) -> StatsReply:
        reply = super().stats()
        self.reply = STATS
        return reply


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


@contextmanager
def locked_out(place: Path, mode: int) -> Iterator[None]:
    """Be one whom `place` does not let in: another user where we are root, else the owner without a right."""
    before = place.stat().st_mode
    top = place.parent.parent if place.is_socket() else place.parent
    top.chmod(0o755)
    place.chmod(mode)
    as_root = os.geteuid() == 0
    groups = os.getgroups()
    try:
        if as_root:
            os.setgroups([])
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
        yield
    finally:
        if as_root:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)
        place.chmod(before)


def give_away(place: Path) -> None:
    """Give a place a group that is neither root's nor of who is locked out, where we may."""
    if os.geteuid() == 0:
        os.chown(place, -1, next(group.gr_gid for group in grp.getgrall() if group.gr_gid not in (0, NOBODY)))


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_daemon_of_another_user_that_lets_us_in_is_fine(target: Target, tmp_path: Path) -> None:
    folder = directory_of(target)
    os.chown(folder, NOBODY, NOBODY)
    assert doctor_daemon.directory(folder, answers=True).state is State.OK
    assert doctor_daemon.directory(folder, answers=False).state is State.WARN
    lock = tmp_path / "stratad.one.lock"
    lock.touch()
    os.chown(lock, NOBODY, NOBODY)
    assert instance_lock("one", answers=True, shm=tmp_path).state is State.OK
    left = instance_lock("one", answers=False, shm=tmp_path)
    assert left.state is State.WARN
    assert "systemctl start stratad" in left.fix


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


def test_a_daemon_whose_workers_are_starting_is_waited_for(target: Target) -> None:
    with _with_life_socket(target):
        assert doctor_daemon.daemon(target, GettingReady(reply=STARTING).connect).check.state is State.OK


def test_a_worker_that_does_not_get_ready_ends_the_wait(target: Target) -> None:
    client = FakeClient(reply=STARTING)
    with _with_life_socket(target):
        check = doctor_daemon.daemon(Target(target.run_dir, target.instance, 0.3), client.connect).check
    assert check.state is State.WARN
    assert client.calls.count(("stats",)) > 1


def test_a_socket_that_is_the_daemons_own_is_not_missed(target: Target) -> None:
    folder = directory_of(target)
    folder.chmod(0o755)
    bound = bind(folder, list(KINDS))
    for name in KINDS:
        (folder / name).chmod(0o666)
    try:
        with locked_out(folder / "worker.sock", 0o600 if os.geteuid() == 0 else 0o000):
            found = {check.name: check for check in sockets(target)}
    finally:
        for listener in bound:
            listener.close()
    assert found["sockets"].state is State.OK
    assert "worker.sock" not in found["sockets"].what


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


def test_a_run_directory_that_was_found_is_not_missed_in_the_environment() -> None:
    """As it is where a user asks the service's daemon from a shell without a login session."""
    for bare in ({}, {"RUNTIME_DIRECTORY": "", "STATE_DIRECTORY": ""}):
        with pytest.raises(PathError):
            default_run_dir(bare, 1000)
        environ = doctor_memory.found_environ(SYSTEM_RUN_DIR, bare)
        assert default_run_dir(environ, 1000) == SYSTEM_RUN_DIR
        assert default_state_dir(environ, 1000) == SYSTEM_STATE_DIR
    given = {"RUNTIME_DIRECTORY": "/run/mine", "STRATAD_RAM_BUDGET_BYTES": "1GiB"}
    assert doctor_memory.found_environ(SYSTEM_RUN_DIR, given) == {**given, "STATE_DIRECTORY": str(SYSTEM_STATE_DIR)}
    assert default_state_dir(doctor_memory.found_environ(Path("/run/own"), {"HOME": "/h"}), 1000) == Path(
        "/h/.local/state/stratad"
    )


def test_a_configuration_that_cannot_be_read_is_a_finding(target: Target, tmp_path: Path) -> None:
    found = states(doctor_memory.memory(target, tmp_path / "none.toml", None))
    assert found["configuration"] is State.FAIL
    assert {"shm", "memlock", "headroom"} <= found.keys()


def test_a_named_file_is_examined_also_beside_a_running_daemon(target: Target, tmp_path: Path) -> None:
    missing = {check.name: check for check in doctor_memory.memory(target, tmp_path / "none.toml", STATS)}
    assert missing["configuration"].state is State.FAIL
    assert "none.toml" in missing["configuration"].what
    config = tmp_path / "c.toml"
    config.write_text('[ram]\nbudget_bytes = "256MiB"\n')
    usable = {check.name: check for check in doctor_memory.memory(target, config, STATS)}
    assert usable["configuration"].state is State.OK
    assert usable["shm"].data["budget_bytes"] == STATS.budget_bytes
    assert "configuration" not in states(doctor_memory.memory(target, None, STATS))


@pytest.mark.parametrize(("mode", "fix"), [(0o050, "usermod -aG "), (0o000, "run as user")])
def test_a_run_directory_that_we_may_not_enter(target: Target, mode: int, fix: str) -> None:
    folder = directory_of(target)
    give_away(folder)
    bound = bind(folder, list(KINDS))
    try:
        with locked_out(folder, mode):
            found = {check.name: check for check in sockets(target)}
            daemon = doctor_daemon.daemon(target, refuse).check
            with pytest.raises(CommandError) as caught:
                connect_client(target)
    finally:
        for listener in bound:
            listener.close()
    check = found["sockets"]
    assert check.state is State.FAIL
    assert check.fix.startswith("permission: ")
    assert fix in check.fix
    assert str(folder) in check.fix
    if mode:
        who = NOBODY if os.geteuid() == 0 else os.geteuid()
        group = grp.getgrgid(folder.stat().st_gid).gr_name
        assert f"`usermod -aG {group} {pwd.getpwuid(who).pw_name}` (from your next login on)" in check.fix
        assert f"if you are named in access.users, to open {folder}" in check.fix
    assert "README, Who may use the daemon" in check.fix
    assert daemon.state is State.WARN, "that none runs cannot be known"
    assert (caught.value.code, caught.value.fix) == ("not_permitted", check.fix)
    assert str(folder) in caught.value.what


def test_a_socket_that_we_may_not_write_to(target: Target) -> None:
    folder = directory_of(target)
    folder.chmod(0o755)
    bound = bind(folder, ["life.sock"])
    give_away(folder / "life.sock")
    try:
        with locked_out(folder / "life.sock", 0o060):
            barred = barrier(folder / "life.sock")
        assert barred is not None
        assert f"write to {folder}/life.sock" in barred.what
        assert "usermod -aG " in barred.fix
        assert barrier(folder / "client.sock") is None
    finally:
        bound[0].close()


def test_nobody_is_told_to_join_the_group_of_root(target: Target) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to root's group")
    folder = directory_of(target)
    os.chown(folder, -1, 0)
    with locked_out(folder, 0o050):
        barred = barrier(folder / "life.sock")
    assert barred is not None
    assert "usermod" not in barred.fix
    assert "access.users" in barred.fix


def test_headroom_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    check = doctor_memory.headroom(3 << 20, 1 << 20, tmp_path)
    assert check.state is State.FAIL
    assert "1.0 MiB more" in check.what
    assert doctor_memory.headroom(2 << 20, 1 << 20, tmp_path).state is State.OK
    assert doctor_memory.headroom(None, 0, tmp_path).state is State.OK
