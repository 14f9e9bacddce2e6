"""stratactl doctor: what systemd does with a daemon."""

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ipc.listening import listener
from stratad.ctl import doctor_daemon, doctor_service
from stratad.ctl.connection import Target
from stratad.ctl.findings import Check, State

_SOMEBODY = 54321


@contextmanager
def _as_somebody_else() -> Iterator[None]:
    """Where we are root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_SOMEBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def only(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


@pytest.mark.parametrize(
    ("texts", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["RemoveIPC = yes\n", "RemoveIPC=no\n"], False),
        (["RemoveIPC=no\n", "RemoveIPC=yes\n"], True),
    ],
)
def test_remove_ipc(texts: list[str], removes: bool) -> None:
    assert doctor_service.removes_ipc(texts) is removes


@pytest.mark.parametrize(
    ("uid", "logind", "setting", "state"),
    [
        (1234567, True, "", State.WARN),
        (1234567, True, "RemoveIPC=no\n", State.OK),
        (1234567, False, "", State.OK),
        (0, True, "", State.OK),
        (999, True, "", State.OK),
        (65534, True, "", State.OK),
        (61183, True, "", State.WARN),
        (61184, True, "", State.OK),
        (65519, True, "", State.OK),
        (65520, True, "", State.WARN),
    ],
)
def test_a_login_user_is_warned(tmp_path: Path, uid: int, logind: bool, setting: str, state: State) -> None:
    if logind:
        (tmp_path / "run/systemd/users").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d/x.conf").write_text(setting)
    check = only(doctor_service.user(uid, tmp_path))
    assert check.state is state
    assert bool(check.fix) is (state is State.WARN)


def test_a_lingering_user_is_not_warned(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger/1234567").touch()
    assert only(doctor_service.user(1234567, tmp_path)).state is State.OK


def test_without_logind_the_check_says_so(tmp_path: Path) -> None:
    check = only(doctor_service.user(1234567, tmp_path))
    assert check.state is State.OK
    assert "not running" in check.what


@pytest.mark.parametrize(
    ("text", "uid", "state"),
    [
        ("#SYS_UID_MAX 5000\nSYS_UID_MAX\t\t  499\n", 500, State.WARN),
        ("SYS_UID_MAX 499\n", 499, State.OK),
        ("SYS_UID_MAX 2000\n", 1500, State.OK),
        ("SYS_GID_MAX 2000\n", 1500, State.WARN),
    ],
)
def test_who_is_a_system_user_is_read_from_login_defs(tmp_path: Path, text: str, uid: int, state: State) -> None:
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/login.defs").write_text(text)
    assert only(doctor_service.user(uid, tmp_path)).state is state


def test_the_vendors_logind_settings_count_where_the_admin_has_none(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    vendor, admin = tmp_path / "usr/lib/systemd/logind.conf", tmp_path / "etc/systemd/logind.conf"
    for path, value in ((vendor, "no"), (admin, "yes")):
        path.parent.mkdir(parents=True)
        path.write_text(f"[Login]\nRemoveIPC={value}\n")
    assert only(doctor_service.user(1234567, tmp_path)).state is State.WARN
    admin.unlink()
    assert only(doctor_service.user(1234567, tmp_path)).state is State.OK


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/stratad.service\n", "stratad.service"),
        ("4:memory:/x\n1:name=systemd:/system.slice/stratad.service\n0::/\n", "stratad.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/stratad.service\n", "stratad.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("4:memory:/system.slice/docker.service\n0::/\n", ""),
        ("0::/\n", ""),
    ],
)
def test_the_unit_is_read_from_the_cgroup(tmp_path: Path, text: str, unit: str) -> None:
    assert doctor_service.unit_of(text) == unit
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(text)
    check = only(doctor_service.unit(7, tmp_path))
    assert check.data["unit"] == unit
    assert unit in check.what


def test_a_daemon_of_another_pid_namespace_has_no_unit_to_be_seen(tmp_path: Path) -> None:
    assert "cannot be seen" in only(doctor_service.unit(0, tmp_path)).what


def test_where_no_daemon_can_be_asked_nobodys_unit_is_told() -> None:
    assert only(doctor_service.unit(None)).what == "no daemon to ask"
    with tempfile.TemporaryDirectory(prefix="ctl") as folder:
        assert doctor_daemon.daemon_pid(Target(Path(folder), "one", 1.0)) is None


def test_the_user_examined_is_the_daemons() -> None:
    with tempfile.TemporaryDirectory(prefix="ctl") as folder:
        path = Path(folder) / "one/life.sock"
        path.parent.mkdir()
        target = Target(Path(folder), "one", 1.0)
        assert listener(path, socket.SOCK_SEQPACKET) is None
        assert doctor_daemon.owner(target) == (os.getpid(), os.geteuid())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as life:
            life.bind(str(path))
            with _as_somebody_else():
                life.listen()  # this is when the kernel notes who it is
            assert doctor_daemon.daemon_pid(target) == os.getpid()
            assert doctor_daemon.owner(target) == (os.getpid(), _SOMEBODY if os.getuid() == 0 else os.getuid())
        assert listener(path, socket.SOCK_SEQPACKET) is None
