"""stratactl against a real daemon: what it shows is true, and no state of the daemon can hang it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shm.extent import GRANULE_BYTES
from shm.shuttle import MOUNT
from stratad.bench.cpu_engine import NAMESPACE, CpuEngine, token_ids
from stratad.client import Client
from stratad.version import PACKAGES, package_dir
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.instances import fresh_instance
from tests.support.wait import wait_until

# The interpreter's start on a busy host, beside the time-out that was asked for.
START_MARGIN_S = 5.0
TOKENS, ROW_BYTES, SLOTS = 300, 256, 2


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("cpu:2") as process, process.client() as client:
        wait_until(lambda: all(worker.state == "ready" for worker in client.stats().workers), 20)
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def engine(client: Client) -> Iterator[CpuEngine]:
    made = CpuEngine.register(client, ["cpu:0", "cpu:1"], tokens=TOKENS, row_bytes=ROW_BYTES, slots=SLOTS)
    with made:
        yield made


def ctl(
    target: DaemonProcess, *words: str, timeout_s: float = 10.0, home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run stratactl as a process; `home` is the folder whose packages it runs from."""
    command = [sys.executable, "-P", "-m", "stratad.ctl", *words]
    command += ["--run-dir", str(target.run_dir), "--instance", target.instance, "--timeout", str(timeout_s)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STRATAD_")}
    if home is not None:
        environment["PYTHONPATH"] = str(home)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s + 30, env=environment)


def ctl_json(target: DaemonProcess, *words: str) -> dict[str, object]:
    done = ctl(target, *words, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def capture(engine: CpuEngine, conversation: str, number: int = 0) -> None:
    engine.engine.capture(conversation, token_ids(TOKENS, number), rows=engine.rows[0], slot=0).result()


def test_status_shows_what_runs(daemon: DaemonProcess, engine: CpuEngine) -> None:
    capture(engine, "chat")
    status = json.loads(json.dumps(ctl_json(daemon, "status")))
    assert status["health"] == "ok"
    assert status["pid"] == daemon.pid
    assert status["images"] == 1
    assert [worker["worker"] for worker in status["workers"]] == ["cpu:0", "cpu:1"]
    for worker in status["workers"]:
        assert set(worker["cpus"]) == set(psutil.Process(worker["pid"]).cpu_affinity())
        assert worker["shuttle_bytes"] >= worker["used_bytes"] + worker["free_bytes"] > 0
    assert [found["pid"] for found in status["engines"]] == [os.getpid()]
    by_pid = {process["pid"]: process for process in status["processes"]}
    expected = {daemon.pid, os.getpid(), *(worker["pid"] for worker in status["workers"])}
    assert expected <= by_pid.keys()
    assert all(by_pid[pid]["resident_bytes"] > 1 << 20 for pid in expected)
    text = ctl(daemon, "status")
    assert text.returncode == 0
    assert f"instance {daemon.instance}: ok, pid {daemon.pid}" in text.stdout


def test_status_of_a_daemon_for_tests_says_so() -> None:
    settings = {"testing.allow_faults": "true", "testing.die_at": "KillWorker:after#900"}
    with DaemonProcess("cpu:1", settings) as daemon:
        said = "testing: faults are allowed, the daemon kills itself at KillWorker:after#900\n"
        assert said in ctl(daemon, "status").stdout


def test_images_are_listed_shown_pinned_and_dropped(daemon: DaemonProcess, engine: CpuEngine) -> None:
    for number, conversation in enumerate(("one", "two", "three")):
        engine.stamp(0, number)
        capture(engine, conversation, number)
    listed = json.loads(json.dumps(ctl_json(daemon, "list", "--namespace", NAMESPACE)))["images"]
    assert [image["conversation"] for image in listed] == ["one", "two", "three"]
    assert ctl_json(daemon, "list", "--namespace", "another") == {"images": []}

    shown = json.loads(json.dumps(ctl_json(daemon, "show", NAMESPACE, "two")))
    assert sum(chunk["length_bytes"] for chunk in shown["chunks"]) == 2 * TOKENS * ROW_BYTES
    for chunk in shown["chunks"]:
        assert len(bytes.fromhex(chunk["digest"])) == 16
        for extent in chunk["extents"]:
            assert extent["offset_bytes"] >= GRANULE_BYTES
            assert (MOUNT / extent["segment"].lstrip("/")).is_file()

    assert ctl_json(daemon, "pin", NAMESPACE, "one") == {"pinned": True}
    refused = ctl(daemon, "drop", NAMESPACE, "one")
    assert refused.returncode == 1
    assert "[pinned]" in refused.stderr
    assert ctl_json(daemon, "drop", NAMESPACE, "two") == {"count": 1}
    assert ctl_json(daemon, "clear", NAMESPACE) == {"count": 1}
    assert ctl_json(daemon, "pin", NAMESPACE, "one", "--off") == {"pinned": False}
    assert ctl_json(daemon, "drop", NAMESPACE, "one") == {"count": 1}
    assert ctl_json(daemon, "list") == {"images": []}


def test_one_of_a_names_images_is_shown_pinned_and_dropped_by_its_number(daemon: DaemonProcess, client: Client) -> None:
    with FakeEngine(client, (slot_layout(),), namespace=NAMESPACE) as engine:
        first = engine.capture("one", range(10), range(10)).image_id
        engine.engine.unregister()
        engine.register({**FINGERPRINT, "engine_build": "another"})
        second = engine.capture("one", range(10), range(10)).image_id
        assert [client.show(NAMESPACE, "one", image_id=one).others for one in (0, first)] == [(first,), (second,)]
        shown = ctl(daemon, "show", NAMESPACE, "one", "--image", str(first)).stdout.splitlines()
        assert shown[0].startswith(f"image {first}: ")
        assert shown[1].startswith("1 of 2 images of this name")
        assert shown[1].endswith(f" {second}")
        ctl_json(daemon, "pin", NAMESPACE, "one", "--image", str(second))
        assert ctl_json(daemon, "drop", NAMESPACE, "one", "--image", str(first)) == {"count": 1}
        refused = ctl(daemon, "drop", NAMESPACE, "one", "--image", str(first))
        assert (refused.returncode, "[unknown_image]" in refused.stderr) == (1, True)
        assert "[pinned]" in ctl(daemon, "drop", NAMESPACE, "one").stderr
        ctl_json(daemon, "pin", NAMESPACE, "one", "--off", "--image", str(second))
        assert ctl_json(daemon, "drop", NAMESPACE, "one") == {"count": 1}


def test_an_unknown_conversation_is_a_coded_error(daemon: DaemonProcess) -> None:
    done = ctl(daemon, "show", "nobody", "nothing", "--json")
    assert done.returncode == 1
    assert "[unknown_conversation]" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "unknown_conversation"


def test_a_stopped_daemon_is_told_within_the_time_out(daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        done = ctl(daemon, "status", timeout_s=1.0)
        took_s = time.monotonic() - started_s
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("stratactl: ")
    assert "Traceback" not in done.stderr
    assert took_s < 1.0 + START_MARGIN_S


def test_interrupt_while_waiting(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-P", "-m", "stratad.ctl", "status", "--timeout", "60"]
    command += ["--run-dir", str(daemon.run_dir), "--instance", daemon.instance]
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            # It waits for the daemon once it holds a socket.
            wait_until(lambda: psutil.Process(process.pid).net_connections("unix"), 20)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_what_a_killed_daemon_leaves() -> None:
    with DaemonProcess("cpu:1") as daemon:
        daemon.kill()
        started_s = time.monotonic()
        status = ctl(daemon, "status")
        assert time.monotonic() - started_s < START_MARGIN_S, "nobody is there, so nothing is to be waited for"
        doctor = ctl(daemon, "doctor", "--json")
    assert status.returncode == 3
    assert "nobody listens" in status.stderr
    checks = {check["name"]: check["state"] for check in json.loads(doctor.stdout)["checks"]}
    assert checks["sockets"] == "warn"
    assert doctor.returncode in (4, 5)


def test_the_installed_script_takes_nothing_of_ours_for_foreign(tmp_path: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "stratactl"
    command = [str(script), "doctor", "--json", "--run-dir", str(tmp_path), "--instance", fresh_instance()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert checks["shadowing"]["state"] == "ok", checks["shadowing"]
    assert checks["origins"]["state"] == "ok"


def test_no_daemon_at_all(tmp_path: Path) -> None:
    absent = DaemonProcess("cpu:1")
    try:
        done = ctl(absent, "list", "--json")
        assert done.returncode == 3
        assert json.loads(done.stdout)["error"]["code"] == "lost"
        assert "fix: start it" in done.stderr
    finally:
        absent.close()


def test_another_build_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    for package in PACKAGES:
        origin = package_dir(package)
        assert origin is not None
        shutil.copytree(origin, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    same = ctl(daemon, "status", home=tmp_path)
    assert same.returncode == 0, same.stderr
    with (tmp_path / "ipc/messages.py").open("a") as source:
        source.write("# changed\n")
    other = ctl(daemon, "status", home=tmp_path)
    assert other.returncode == 2
    assert "[wrong_build]" in other.stderr
    assert ctl(daemon, "doctor", home=tmp_path).returncode == 5


def test_doctor_finds_the_running_daemon(daemon: DaemonProcess) -> None:
    done = ctl(daemon, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["daemon"]["pid"] == daemon.pid
    assert checks["lock"]["holder"] == daemon.pid
    assert {checks[name]["state"] for name in ("daemon", "lock", "sockets", "run directory", "shm")} == {"ok"}
    assert checks["shm"]["budget_bytes"] == 64 << 20
    assert checks["shm"]["held_bytes"] > 0


# --- the trace --------------------------------------------------------------------------------------------------------


def traced(daemon: DaemonProcess, *words: str) -> dict[str, object]:
    ended = ctl(daemon, "trace", "--json", *words)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert isinstance(data, dict)
    return data


def test_the_trace_is_switched_on_and_off_in_a_daemon_that_runs(daemon: DaemonProcess, engine: CpuEngine) -> None:
    tokens = token_ids(TOKENS, 1)
    engine.engine.capture("before", tokens, rows=engine.rows[0], slot=0).result()
    assert traced(daemon)["on"] is False
    began_s = time.time()
    assert traced(daemon, "on")["on"] is True
    engine.engine.capture("chat", tokens, rows=engine.rows[0], slot=0).result()
    engine.engine.restore("chat", rows=engine.rows[1], slot=1).result()
    found = traced(daemon, "off")
    assert (found["on"], found["kept"]) == (False, 2)
    engine.engine.capture("after", tokens, rows=engine.rows[0], slot=0).result()
    found = traced(daemon, "--last", "10")
    ops = found["ops"]
    assert isinstance(ops, list)
    assert [(op["kind"], op["conversation"], op["tokens"], op["code"]) for op in ops] == [
        ("capture", "chat", TOKENS, ""),
        ("restore", "chat", TOKENS, ""),
    ]
    for op in ops:
        assert began_s <= op["began_unix_s"] <= time.time()
        for number, stage in enumerate(op["stages"]):
            assert (stage["stage"], stage["worker"], stage["state"]) == (number, f"cpu:{number}", "done")
            assert stage["asked_bytes"] == stage["moved_bytes"] == stage["digested_bytes"] == TOKENS * ROW_BYTES
            spent_s = [value for name, value in stage.items() if name.endswith("_s")]
            assert sum(spent_s) == pytest.approx(op["total_s"], abs=1e-6)
            assert stage["queue_s"] > 0, "when its job was sent is not known"
            assert stage["publish_s"] > 0, "when the reply was sent is not known"
            assert stage["digest_s"] + stage["verify_s"] > 0
            assert stage["gather_s"] + stage["link_s"] > 0
    assert ops[0]["journal_s"] > 0
    assert ops[1]["journal_s"] == 0
    people = ctl(daemon, "trace", "--slowest", "--op", "capture").stdout
    assert "capture  chat" in people
    assert "restore" not in people


def test_reports_that_come_together_have_each_its_own_instant(client: Client) -> None:
    """Eight small jobs of one worker: the supervisor reads the reports of several in one turn."""
    client.set_trace(on=True)
    with CpuEngine.register(client, ["cpu:0"] * 8, tokens=TOKENS, row_bytes=16, slots=1) as engine:
        for number in range(20):
            tokens = token_ids(TOKENS, number)
            engine.engine.capture(f"chat {number}", tokens, rows=engine.rows[0], slot=0).result()
    ops = client.trace(op="capture").ops
    assert len(ops) == 20
    for op in ops:
        assert len({stage.publish_s for stage in op.stages}) == 8
