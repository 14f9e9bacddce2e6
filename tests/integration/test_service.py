"""The service as it is shipped: its unit file, and what becomes of it under a real systemd."""

import configparser
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratad
from tests.support.systemd_box import NoBox, SystemdBox
from tests.support.wait import wait_until

CHECKOUT = Path(stratad.__file__).parents[1]
FILES = Path(__file__).parents[2] / "systemd"
UNIT = FILES / "stratad.service"
PROGRAM = "/opt/stratad/venv/bin/stratad"
SETTINGS = """\
[daemon]
devices = "cpu:2"
[ram]
budget_bytes = "64MiB"
shuttle_bytes = "4MiB"
[restarts]
backoff_first_s = 0.02
"""
# The highest exposure in tenths; what raises it needs a reason in the unit.
MAX_EXPOSURE = 25

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unit_with_program(tmp_path: Path) -> Path:
    """The unit, with a program that is there."""
    text = UNIT.read_text()
    assert text.count(PROGRAM) == 1
    path = tmp_path / UNIT.name
    path.write_text(text.replace(PROGRAM, sys.executable))
    return path


@needs_analyze
def test_systemd_finds_nothing_to_complain_about(unit_with_program: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit_with_program)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_analyze
def test_its_exposure_stays_low(unit_with_program: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(unit_with_program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_unit_takes_nothing_away_that_the_daemon_needs() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    service = parser["Service"]
    forbidden = {
        "DynamicUser", "PrivateDevices", "PrivateTmp", "PrivateUsers", "PrivateIPC", "PrivateNetwork", "ProcSubset",
        "ProtectProc", "ProtectClock", "MemoryDenyWriteExecute", "DevicePolicy", "DeviceAllow",
    }  # fmt: skip
    assert not forbidden & service.keys()
    needed = {
        "Type": "notify", "NotifyAccess": "main", "Restart": "on-failure", "KillMode": "mixed", "OOMPolicy": "continue",
        "User": "stratad", "RemoveIPC": "no", "RuntimeDirectoryPreserve": "yes", "LimitMEMLOCK": "infinity",
        "AmbientCapabilities": "CAP_IPC_LOCK", "LimitCORE": "0",
    }  # fmt: skip
    assert {key: service.get(key) for key in needed} == needed
    assert {"WatchdogSec", "TimeoutStartSec", "TimeoutStopSec", "TimeoutAbortSec"} <= service.keys()


# --- under a real systemd ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box() -> Iterator[SystemdBox]:
    """A systemd with the service installed as the README says, but for where its program lies."""
    folders = list(dict.fromkeys([CHECKOUT, FILES, Path(sys.prefix), Path(sys.base_prefix)]))
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(SystemdBox(folders))
        except NoBox as exc:
            pytest.skip(str(exc))
        for source, target in (
            ("stratad.service", "systemd/system/stratad.service"),
            ("stratad.sysusers", "sysusers.d/stratad.conf"),
            ("stratad.tmpfiles", "tmpfiles.d/stratad.conf"),
        ):
            made.run("install", "-D", "-m", "644", str(FILES / source), f"/etc/{target}")
        made.run("systemd-sysusers", "/etc/sysusers.d/stratad.conf")
        made.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/stratad.conf")
        drop_in = (
            f"[Service]\nExecStart=\nExecStart={sys.executable} -P -m stratad --config /etc/stratad/stratad.toml\n"
            f"Environment=PYTHONPATH={CHECKOUT} PYTHONDONTWRITEBYTECODE=1\n"
            "ProtectHome=no\nWatchdogSec=3s\nRestartSec=100ms\n"
        )
        made.write("/etc/systemd/system/stratad.service.d/test.conf", drop_in)
        made.run("systemctl", "daemon-reload")
        can_import = made.run(sys.executable, "-c", "import zmq, msgspec, numpy", user="stratad", check=False)
        if can_import.returncode != 0:
            pytest.skip(f"another user cannot run this Python: {can_import.stderr.strip()[-200:]}")
        yield made


@pytest.fixture
def service(box: SystemdBox) -> Iterator[SystemdBox]:
    """The service runs and its workers are ready; no failure of an earlier test counts."""
    box.write("/etc/stratad/stratad.toml", SETTINGS)
    box.run("systemctl", "reset-failed")
    box.run("systemctl", "start", "stratad")
    wait_until_healthy(box)
    yield box
    box.run("systemctl", "stop", "stratad")


def ctl(box: SystemdBox, *words: str, user: str = "") -> subprocess.CompletedProcess[str]:
    command = ["env", f"PYTHONPATH={CHECKOUT}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-P", "-m", "stratad.ctl"]
    return box.run(*command, *words, user=user, check=False)


def status(box: SystemdBox) -> dict[str, object]:
    answer = json.loads(ctl(box, "status", "--json").stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def wait_until_healthy(box: SystemdBox) -> None:
    wait_until(lambda: status(box).get("health") == "ok", 20.0, "a healthy service")


def main_pid(box: SystemdBox) -> int:
    return int(box.show("stratad", "MainPID"))


def restarts(box: SystemdBox) -> int:
    return int(box.show("stratad", "NRestarts"))


def workers(box: SystemdBox) -> list[int]:
    found = status(box)["workers"]
    assert isinstance(found, list)
    return [worker["pid"] for worker in found]


def kill(box: SystemdBox, name: str, pid: int) -> None:
    box.run("bash", "-c", 'kill -s "$0" "$1"', name, str(pid))


def wait_until_replaced(box: SystemdBox, pid: int) -> None:
    wait_until(lambda: main_pid(box) not in (0, pid), 20.0, "another main process")
    wait_until_healthy(box)


def processes(box: SystemdBox) -> list[str]:
    """Everything that the service runs; nothing can leave its cgroup."""
    return box.run("cat", "/sys/fs/cgroup/system.slice/stratad.service/cgroup.procs", check=False).stdout.split()


def test_ready_means_that_a_client_is_answered(box: SystemdBox) -> None:
    box.write("/etc/stratad/stratad.toml", SETTINGS)
    box.run("systemctl", "start", "stratad")
    try:
        assert ctl(box, "status", "--timeout", "5").returncode in (0, 4)  # 4: not all workers are ready yet
        wait_until(lambda: box.show("stratad", "StatusText").startswith("2 of 2 workers ready"), 10.0)
        assert box.show("stratad", "StatusText") == "2 of 2 workers ready, 0 images, 0 of 64 MiB"
    finally:
        box.run("systemctl", "stop", "stratad")


def test_it_is_its_users_and_lies_where_it_should(service: SystemdBox) -> None:
    modes = service.run("stat", "-c", "%a %U %G %n", "/run/stratad", "/run/stratad/default", "/var/lib/stratad").stdout
    assert modes.splitlines() == [
        "750 stratad stratad /run/stratad",
        "750 stratad stratad /run/stratad/default",
        "700 stratad stratad /var/lib/stratad",
    ]
    assert len(processes(service)) == 4  # supervisor, template, two workers
    assert service.run("find", "/tmp", "/var/tmp", "-mindepth", "1").stdout == ""
    limits = service.run("grep", "CapEff", f"/proc/{workers(service)[0]}/status").stdout
    assert int(limits.split()[1], 16) == 1 << 14  # CAP_IPC_LOCK and nothing else


def test_doctor_is_content_and_names_the_unit(service: SystemdBox) -> None:
    done = ctl(service, "doctor", "--config", "/etc/stratad/stratad.toml")
    assert done.returncode == 0, done.stdout
    assert "runs in stratad.service" in done.stdout
    uid = service.run("id", "-u", "stratad").stdout.strip()
    assert f"uid {uid} is a system user" in done.stdout  # the daemon's, not ours


def test_a_user_who_is_named_passes_for_good_with_another_mode_and_the_group_still_does(service: SystemdBox) -> None:
    service.write("/etc/sysusers.d/named.conf", "u teammate - -\nm teammate stratad\nu named - -\nu nobodys - -\n")
    service.run("systemd-sysusers", "/etc/sysusers.d/named.conf")
    drop_in = "/etc/systemd/system/stratad.service.d/mode.conf"
    service.write(drop_in, "[Service]\nRuntimeDirectoryMode=0751\n")
    service.write("/etc/stratad/stratad.toml", SETTINGS + '[access]\nusers = ["named"]\n')
    try:
        service.run("systemctl", "daemon-reload")
        for _ in range(2):  # also after a restart, which undoes a chmod
            service.run("systemctl", "restart", "stratad")
            wait_until_healthy(service)
            served = {user: ctl(service, "status", user=user).returncode for user in ("teammate", "named", "nobodys")}
            assert served == {"teammate": 0, "named": 0, "nobodys": 1}
    finally:
        service.run("rm", drop_in)
        service.run("systemctl", "daemon-reload")


def test_members_of_the_group_find_it_and_others_are_told_what_is_missing(service: SystemdBox) -> None:
    users = "u member - -\nm member stratad\nu stranger - -\n"
    service.write("/etc/sysusers.d/test.conf", users)
    service.run("systemd-sysusers", "/etc/sysusers.d/test.conf")
    member = ctl(service, "status", user="member")
    assert member.returncode == 0, member.stderr
    doctor = ctl(service, "doctor", user="member")
    assert doctor.returncode == 0, doctor.stdout
    stranger = ctl(service, "status", user="stranger")
    assert stranger.returncode == 1
    assert "`usermod -aG stratad stranger` (from your next login on)" in stranger.stderr
    assert "to open /run/stratad" in stranger.stderr
    doctor = ctl(service, "doctor", user="stranger")
    assert "configuration" not in doctor.stdout
    assert "service: no daemon to ask" in doctor.stdout


def test_a_stop_leaves_no_process_socket_or_segment(service: SystemdBox) -> None:
    service.run("systemctl", "stop", "stratad")
    assert service.show("stratad", "ActiveState") == "inactive"
    assert service.show("stratad", "Result") == "success"
    assert processes(service) == []
    assert service.run("find", "/run/stratad").stdout.split() == ["/run/stratad", "/run/stratad/default"]
    assert service.run("find", "/dev/shm", "-name", "stratad.*").stdout == ""


def test_a_stop_that_reaches_every_process_at_once_ends_the_same(service: SystemdBox) -> None:
    service.run("systemctl", "kill", "--kill-whom=all", "-s", "TERM", "stratad")
    wait_until(lambda: service.show("stratad", "ActiveState") == "inactive", 20.0)
    assert service.show("stratad", "Result") == "success"
    assert processes(service) == []
    assert service.run("find", "/dev/shm", "-name", "stratad.*").stdout == ""


def test_a_killed_supervisor_is_started_again(service: SystemdBox) -> None:
    before = main_pid(service)
    kill(service, "KILL", before)
    wait_until_replaced(service, before)
    assert restarts(service) == 1
    assert len(processes(service)) == 4


def test_a_hung_supervisor_is_aborted_and_started_again_although_a_worker_hangs_too(service: SystemdBox) -> None:
    before = main_pid(service)
    kill(service, "STOP", workers(service)[0])
    kill(service, "STOP", before)
    wait_until_replaced(service, before)
    assert restarts(service) == 1
    assert len(processes(service)) == 4
    log = service.run("journalctl", "-u", "stratad", "-o", "cat", "--no-pager").stdout
    assert "Watchdog timeout" in log
    assert "code=killed, status=6/ABRT" in log


def test_a_restart(service: SystemdBox) -> None:
    before = main_pid(service)
    service.run("systemctl", "restart", "stratad")
    assert main_pid(service) != before
    wait_until_healthy(service)


@pytest.mark.parametrize("how", ["restart", "kill", "stop and start"])
def test_images_outlive_the_service(service: SystemdBox, how: str) -> None:
    keeper = [
        "env",
        f"PYTHONPATH={CHECKOUT}",
        "PYTHONDONTWRITEBYTECODE=1",
        sys.executable,
        "-m",
        "tests.support.keeper",
    ]
    service.run(*keeper, "capture", "--run-dir", "/run/stratad")
    before = main_pid(service)
    if how == "restart":
        service.run("systemctl", "restart", "stratad")
    elif how == "kill":
        kill(service, "KILL", before)
        wait_until_replaced(service, before)
    else:
        service.run("systemctl", "stop", "stratad")
        assert processes(service) == []
        service.run("systemctl", "start", "stratad")
    assert main_pid(service) != before
    assert service.run(*keeper, "restore", "--run-dir", "/run/stratad").stdout == "done\n"
    assert ctl(service, "clear", "kept").returncode == 0


def test_a_killed_worker_is_no_matter_of_systemds(service: SystemdBox) -> None:
    before, victim = main_pid(service), workers(service)[0]
    kill(service, "KILL", victim)
    wait_until(lambda: victim not in workers(service) and status(service)["health"] == "ok", 20.0)
    assert (main_pid(service), restarts(service)) == (before, 0)


def test_what_no_restart_mends_is_not_restarted(box: SystemdBox) -> None:
    box.write("/etc/stratad/stratad.toml", "[ram]\nbudget_bytes = -1\n")
    assert box.run("systemctl", "start", "stratad", check=False).returncode != 0
    assert box.show("stratad", "ActiveState") == "failed"
    assert box.show("stratad", "ExecMainStatus") == "2"
    assert restarts(box) == 0
