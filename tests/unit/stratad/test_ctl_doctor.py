"""stratactl doctor: what it concludes from what it finds."""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from stratad.ctl import doctor_host, doctor_install, doctor_memory
from stratad.ctl.doctor import report
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.findings import Check, State
from stratad.version import PACKAGES, package_dir


def only(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ((), ExitCode.OK),
        ((State.OK, State.OK), ExitCode.OK),
        ((State.WARN, State.OK), ExitCode.DEGRADED),
        ((State.WARN, State.FAIL, State.OK), ExitCode.UNHEALTHY),
    ],
)
def test_the_worst_finding_decides(states: tuple[State, ...], code: ExitCode) -> None:
    answer = report({"some": lambda: [Check("c", state, "text", "do this") for state in states]})
    assert answer.exit_code is code
    data = json.loads(json.dumps(answer.data))
    assert [check["state"] for check in data["checks"]] == [state.value for state in states]
    assert sum("fix: do this" in line for line in answer.lines) == sum(state is not State.OK for state in states)


def test_a_check_that_breaks_is_a_finding_and_hides_nothing() -> None:
    def broken() -> Iterable[Check]:
        yield Check("first", State.OK, "fine")
        raise RuntimeError("oh")

    answer = report({"bad": broken, "good": lambda: [Check("second", State.OK, "fine")]})
    assert answer.exit_code is ExitCode.DEGRADED
    text = "\n".join(answer.lines)
    assert "RuntimeError: oh" in text
    assert "second" in text


def test_a_host_without_a_gpu(tmp_path: Path) -> None:
    check = only(doctor_host.devices(try_torch=False, root=tmp_path))
    assert check.state is State.OK
    assert "cpu workers" in check.what


def test_a_driver_whose_tool_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: X\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = only(doctor_host.devices(try_torch=False, root=tmp_path))
    assert check.state is State.WARN
    assert check.fix


def test_gpus_are_read_from_the_tools_list() -> None:
    text = (
        "GPU 0: NVIDIA H200 (UUID: GPU-0a1b2c3d-1111-2222-3333-444455556666)\n"
        "  MIG 1g.18gb Device 0: (UUID: MIG-0a1b2c3d-0000-2222-3333-444455556666)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-9a1b2c3d-1111-2222-3333-444455556666)\n"
    )
    gpus = doctor_host.parse_gpu_list(text)
    assert [gpu["index"] for gpu in gpus] == ["0", "1"]
    assert gpus[0] == {"index": "0", "name": "NVIDIA H200", "uuid": "GPU-0a1b2c3d-1111-2222-3333-444455556666"}
    assert doctor_host.parse_gpu_list("No devices were found\n") == []


def test_this_kernel_has_what_is_needed() -> None:
    assert only(doctor_host.kernel()).state is State.OK


def test_shm_that_holds_the_budget(tmp_path: Path) -> None:
    check = doctor_memory.shared_memory(1 << 20, 0, tmp_path)
    assert check.state is State.OK
    assert check.data["budget_bytes"] == 1 << 20


def test_shm_that_is_too_small_names_the_size_to_mount(tmp_path: Path) -> None:
    check = doctor_memory.shared_memory(1 << 60, 0, tmp_path)
    assert check.state is State.FAIL
    size = int(check.fix.partition("size=")[2].split()[0])
    assert size >= 1 << 60


def test_bytes_that_we_hold_already_count(tmp_path: Path) -> None:
    free_bytes = doctor_memory.shared_memory(0, 0, tmp_path).data["free_bytes"]
    assert isinstance(free_bytes, int)
    budget_bytes = free_bytes + (1 << 40)
    assert doctor_memory.shared_memory(budget_bytes, 0, tmp_path).state is State.FAIL
    assert doctor_memory.shared_memory(budget_bytes, 1 << 41, tmp_path).state is State.OK


def test_shm_that_is_not_there(tmp_path: Path) -> None:
    assert doctor_memory.shared_memory(1, 0, tmp_path / "none").state is State.FAIL


def test_page_lock_is_tried() -> None:
    assert doctor_memory.try_page_lock(1 << 16) == ""
    # More than any address space holds: whatever limit there is, this must be refused.
    assert doctor_memory.try_page_lock(1 << 60) != ""


def test_page_lock_against_a_limit() -> None:
    # Without CAP_IPC_LOCK, of which root's later programs are rid by the bounding set (24 drops 14 from it).
    program = (
        "import ctypes, resource\n"
        "ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from stratad.ctl.doctor_memory import try_page_lock\n"
        "print(repr(try_page_lock(1 << 20)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "memory" in done.stdout.lower(), done.stdout


@pytest.mark.parametrize(("needed", "state"), [(True, State.FAIL), (False, State.WARN)])
def test_page_lock_matters_most_with_a_gpu(needed: bool, state: State) -> None:
    check = doctor_memory.page_lock(needed=needed, try_bytes=1 << 60)
    assert check.state is state
    assert "CAP_IPC_LOCK" in check.fix
    assert doctor_memory.page_lock(needed=needed, try_bytes=1 << 16).state is State.OK


@pytest.mark.parametrize(
    ("capabilities", "limit", "needed", "state"),
    [
        ("0000000000004000", "8388608", True, State.OK),
        ("0000000000003fff", "8388608", True, State.FAIL),
        ("0000000000003fff", "8388608", False, State.WARN),
        ("0000000000000000", "unlimited", True, State.OK),
    ],
)
def test_page_lock_of_a_daemon_of_another_user(
    tmp_path: Path, capabilities: str, limit: str, needed: bool, state: State
) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/status").write_text(f"Name:\tx\nCapPrm:\tff\nCapEff:\t{capabilities}\n")
    (tmp_path / "proc/7/limits").write_text(
        f"Max processes   1   1   processes\nMax locked memory         {limit}   {limit}   bytes\n"
    )
    check = doctor_memory.page_lock_of(7, needed=needed, root=tmp_path)
    assert check.state is state
    assert bool(check.fix) is (state is not State.OK)
    assert doctor_memory.page_lock_of(8, needed=needed, root=tmp_path).state is State.OK


@pytest.mark.parametrize("name", ["ipc/__init__.py", "workers.py", "shm.abi3.so", f"shm{EXTENSION_SUFFIXES[0]}"])
def test_a_foreign_module_of_our_name_is_found(tmp_path: Path, name: str) -> None:
    assert doctor_install.foreign(tmp_path, []).state is State.OK
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    for check in (doctor_install.foreign(tmp_path, []), doctor_install.foreign(Path("/"), [str(tmp_path)])):
        assert check.state is State.WARN
        assert str(tmp_path) in check.what


@pytest.mark.parametrize("name", ["stratad", "ipc.txt", "shm.so.1", "workers.toml"])
def test_a_file_that_python_does_not_import_is_not_foreign(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()  # such as our own script in a bin folder, which leads the path of the script itself
    assert doctor_install.foreign(Path("/"), [str(tmp_path)]).state is State.OK


def test_our_own_packages_are_not_foreign() -> None:
    home = package_dir("stratad")
    assert home is not None
    assert doctor_install.foreign(home.parent, [str(home.parent)]).state is State.OK


def test_a_folder_that_is_no_package_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    assert doctor_install.foreign(tmp_path, []).state is State.OK


def test_origins_and_versions_are_named() -> None:
    origins, _, versions = doctor_install.packages()
    assert origins.state is State.OK
    named = origins.data["origins"]
    assert isinstance(named, dict)
    assert set(named) == set(PACKAGES)
    assert versions.state is State.OK
    assert f"python {sys.version_info[0]}." in versions.what


def test_what_is_missing_or_old_is_named_with_a_command_that_installs_it() -> None:
    needed = {"no_such_module": "no-such-thing", "msgpack": "msgpack", "zmq": "pyzmq"}
    check = doctor_install.dependencies(needed, ["msgpack>=999.0", "pyzmq>=1.0"])
    assert check.state is State.FAIL
    assert "no-such-thing is missing" in check.what
    assert "is older than 999.0" in check.what
    for part in ("no-such-thing, msgpack:", "pip install -e .", "bash tools/demo.sh"):
        assert part in check.fix
    assert "pyzmq" not in check.fix


def test_minimum_versions() -> None:
    wanted = ["msgpack>=1.0.8", "posix-ipc>=1.1", "torch>=2.4; extra == 'gpu'", "odd==1"]
    assert doctor_install.minimum_versions(wanted) == {"msgpack": "1.0.8", "posix-ipc": "1.1"}
