"""The benchmarks, with so little work that only their reports are examined, and what an interrupted one leaves."""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from stratad.bench.copy_cpu import CpuSource
from stratad.bench.copy_rounds import ReplyT
from stratad.bench.daemon import PrivateDaemon
from stratad.client import Captured, Copied, Restored, Ticket
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from tests.support.bench import COMMAND, bench, check_slots
from tests.support.instances import private_segments
from tests.support.wait import wait_until


class SpoiltSource(CpuSource):
    """Slot copies of which the one named by `spoilt` leaves a wrong byte in the target or in the source."""

    spoilt = ""

    def slot_direct(self) -> Copied:
        return self._spoil("direct", super().slot_direct)

    def slot_to(self) -> Captured:
        return self._spoil("to", super().slot_to)

    def slot_from(self) -> Restored:
        return self._spoil("from", super().slot_from)

    def _spoil(self, op: str, copy: Callable[[], ReplyT]) -> ReplyT:
        reply = copy()
        if self.spoilt == f"{op}, nothing copied":
            self.wipe()
        for number, place in enumerate(("source", "target")):
            if self.spoilt == f"{op}, {place}":
                # The last byte of the slot in the last plane of the last pool.
                plane = np.frombuffer(self._pools[-1].buffer, np.uint8).reshape(self._shape.axes)[-1]
                plane[self._shape.row_numbers(number)[-1], -1] ^= 1
        return reply


SMALL = ("--stages", "2", "--captures", "24", "--restores", "6", "--warm-up", "2", "--clients", "2")


def test_control() -> None:
    report = bench("control", *SMALL, "--blocks", "64", "--paged", "3")  # the last of them out of the second slot
    ratios = report["ratios"]
    captures = [row for row in report["rows"] if row["arm"] == "capture"]
    assert ratios["p50_ms"] == max(row["p50_ms"] for row in captures) > 0
    assert ratios["p99_ms"] is None, "24 samples tell nothing about the hundredth"
    starts = [row for row in report["rows"] if row["arm"] == "start"]
    assert ratios["ready_s"] == max(row["hello_s"] for row in starts)
    assert all(0 < row["hello_s"] <= row["workers_s"] for row in starts)
    assert ratios["supervisor_rss_mib"] == max(row["supervisor_rss_mib"] for row in starts) > 5
    assert ratios["supervisor_cpu_ms_per_op"] == max(row["supervisor_cpu_ms_per_op"] for row in captures) > 0
    kinds = {kind: [row for row in report["rows"] if row["arm"] == kind] for kind in ("lookup", "clients")}
    assert [row["n"] for row in kinds["lookup"]] == [6] * 3
    assert [row["n"] for row in kinds["clients"]] == [24] * 3
    for kind in ("restore", "restore_paged"):
        assert [row["byte_exact"] for row in report["rows"] if row["arm"] == kind] == [True] * 3
    paged = [row for row in report["rows"] if row["arm"] == "capture_paged"]
    assert all(0 < row["outside_lane_p50_ms"] <= row["max_ms"] for row in paged)


def test_control_of_two_settings() -> None:
    report = bench("control", *SMALL, "--clients", "0", "--blocks", "0", "--arms", "parallel=true,false")
    names = [f"copy.parallel={value}" for value in ("true", "false")]
    assert [row["setting"] for row in report["rows"] if row["arm"] == "capture"] == names * 3
    first, second = (
        [row["p50_ms"] for row in report["rows"] if row["arm"] == "capture" and row["setting"] == name]
        for name in names
    )
    worst = max(two / one for one, two in zip(first, second, strict=True))
    assert report["ratios"]["capture_p50_ms_false_over_true"] == round(worst, 3)
    assert report["ratios"]["p50_ms"] == max(first)


def test_catalog() -> None:
    report = bench("catalog", "--chunks", "4000", "--images", "400", "--lookups", "40", "--captures", "20")
    rows, ratios = report["rows"], report["ratios"]
    fill = rows[0]
    assert (fill["arm"], fill["images"], fill["chunks"]) == ("fill", 400, 4000)
    assert ratios["bytes_per_image"] == fill["bytes_per_image"]
    lookups = [row for row in rows if row["arm"].startswith("lookup")]
    assert len(lookups) == 9
    assert ratios["lookup_p50_us"] == max(row["p50_us"] for row in lookups) > 0
    assert ratios["lookup_p99_us"] is None, "40 samples tell nothing about the hundredth"
    small, large = ([row for row in rows if row["arm"] == f"capture_{size}"] for size in ("small", "large"))
    assert all(row["evicted"] > 0 for row in (*small, *large)), "the catalog was full"
    assert ratios["capture_us_per_chunk"] == max(row["us_per_chunk"] for row in (*small, *large)) > 0


def test_stages() -> None:
    report = bench("stages", "--stages", "2", "--stage-mib", "4", "--link-bytes-per-s", "1e8")
    assert report["settings"]["simulated"] is True
    assert report["settings"]["link_bytes_per_s"] == 1e8
    assert report["settings"]["cards"] == ["cpu:0", "cpu:1"]
    assert all(row["simulated"] and row["byte_exact"] for row in report["rows"])
    for row in report["rows"]:
        assert row["seconds"] >= row["link_limit_s"], "nothing is faster than its link"
    # Two links, 42 ms each: serial must be visibly slower whatever the host does beside.
    assert report["ratios"]["parallel_over_serial"] > 1.2


def test_stages_of_one_card_share_its_link() -> None:
    words = ["--cards", "1", "--stages", "2", "--stage-mib", "1", "--link-bytes-per-s", "4e8"]
    report = bench("stages", *words)
    stage_bytes = report["settings"]["bytes_per_stage"]
    assert stage_bytes == 4 << 20, "no less than a chunk"
    assert {row["link_limit_s"] for row in report["rows"]} == {round(2 * stage_bytes / 4e8, 4)}


def test_duplex() -> None:
    words = ["--device", "cpu", "--cards", "2", "--stage-mib", "4", "--link-bytes-per-s", "1e8"]
    report = bench("duplex", *words)
    assert report["settings"]["simulated"] is True
    rows = report["rows"]
    assert [(row["round"], row["way"]) for row in rows] == [
        (number, way) for number in range(3) for way in ("capture", "restore", "both")
    ]
    for row in rows:
        assert row["byte_exact"]
        assert row["bytes"] == (8 << 20) * (2 if row["way"] == "both" else 1)
        assert row["seconds"] >= 4 * (1 << 20) / 1e8, "nothing is faster than its link"
    by_round = [{row["way"]: row["seconds"] for row in rows if row["round"] == number} for number in range(3)]
    ratios = [2 * min(took["capture"], took["restore"]) / took["both"] for took in by_round]
    assert report["ratios"]["both_over_one_way"] == pytest.approx(min(ratios), abs=1e-3)


def test_isolate() -> None:
    words = ["--device", "cpu", "--cards", "2", "--victim", "0", "--ops", "20", "--medium-bytes", str(1 << 20)]
    report = bench("isolate", *words)
    assert report["settings"]["victim"] == "cpu:0"
    rows = report["rows"]
    others = [row for row in rows if row["what"] == "latency" and row["card"] == "cpu:1"]
    assert len(others) == 3 * 2 * 4
    assert all((row["n"], row["lost"]) == (20, 0) for row in others)
    assert (report["ratios"]["others_lost"], report["ratios"]["others_p99_over_calm"]) == (0, None)
    deaths = [row for row in rows if row["what"] == "death"]
    assert report["ratios"]["kills"] == len(deaths) >= 3, "at least one in each round"
    lost = [row for row in rows if row["what"] == "lost"]
    assert {row["card"] for row in lost} <= {"cpu:0"}
    assert report["ratios"]["victim_lost"] == sum(row["count"] for row in lost)


@pytest.mark.parametrize("words", [["--victim", "2"], ["--cards", "1"], ["--ops", "0"], ["--medium-bytes", "1000"]])
def test_isolate_refuses_what_it_cannot_measure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "isolate", "--device", "cpu", *(["--cards", "2"] if "--cards" not in words else []), *words])
        == ExitCode.USAGE
    )
    assert words[0] in capsys.readouterr().err


def test_recover() -> None:
    sizes = ("--arena-bytes", str(128 << 20), "--shuttle-bytes", str(64 << 20), "--image-bytes", str(64 << 10))
    report = bench("recover", "--device", "cpu", *sizes, "--kills", "1", "--images", "12", "--stages", "2")
    workers = [row for row in report["rows"] if row["arm"] == "worker"]
    daemons = [row for row in report["rows"] if row["arm"] == "daemon"]
    assert (len(workers), len(daemons)) == (3, 3)
    assert all(row["byte_exact"] for row in report["rows"])
    for row in workers:
        assert row["shuttle_bytes"] == 128 << 20, "the arena is whole before each kill"
        assert 0 < row["gone_s"] <= row["ready_s"] <= row["first_shuttle_s"] <= row["all_shuttles_s"]
    assert all(0 < row["accepts_s"] <= row["serves_s"] <= row["all_restored_s"] for row in daemons)
    assert report["ratios"] == {
        "worker_s_p50": sorted(row["first_shuttle_s"] for row in workers)[1],
        "worker_s_max": max(row["first_shuttle_s"] for row in workers),
        "daemon_s": max(row["serves_s"] for row in daemons),
    }


@pytest.mark.parametrize("words", [["--arena-bytes", "1"], ["--kills", "0"], ["--image-bytes", "1000"]])
def test_recover_refuses_what_it_cannot_measure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "recover", "--device", "cpu", *words]) == ExitCode.USAGE
    assert words[0] in capsys.readouterr().err


def test_copy_on_cpu() -> None:
    report = bench("copy", "--device", "cpu", "--image-mib", "16", "--cards", "2")
    assert report["settings"]["device"] == "cpu"
    assert (report["settings"]["cards"], report["settings"]["stages"]) == (["cpu:0", "cpu:1"], 2)
    assert {(row["layout"], row["op"]) for row in report["rows"]} == {
        (layout, op) for layout in ("slot", "paged") for op in ("capture", "restore")
    }
    assert all(row["byte_exact"] and row["moved_bytes"] == row["bytes"] for row in report["rows"])
    for row in report["rows"]:
        assert 0 < row["lane_s"] < row["seconds"]
        assert row["overhead_s"] == pytest.approx(row["seconds"] - row["lane_s"], abs=2e-5)
    for op in ("capture", "restore"):
        worst = min(row["over_limit"] for row in report["rows"] if row["op"] == op)
        assert report["ratios"][f"{op}_over_limit"] == worst


@pytest.mark.parametrize("stages", ["1", "2"])
def test_slots_on_cpu(stages: str) -> None:
    check_slots(bench("slots", "--device", "cpu", "--image-mib", "16", "--stages", stages), "cpu")


SPOILT = ["direct, nothing copied", "direct, source", "direct, target", "to, source", "from, source", "from, target"]


@pytest.mark.parametrize("layout", ["slot", "paged"])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_spoilt_slot_copy_fails_the_benchmark(
    layout: str, spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SpoiltSource, "spoilt", spoilt)
    monkeypatch.setattr("stratad.bench.copy_cpu.CpuSource", SpoiltSource)
    before = signal.getsignal(signal.SIGTERM)
    try:
        words = ["--device", "cpu", "--image-mib", "16", "--layouts", layout, "--json", "--quiet"]
        assert main(["bench", "slots", *words]) == ExitCode.FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert (error["code"], error["exit_code"]) == ("damaged", ExitCode.FAILED)
    assert ("slot_direct" if spoilt.startswith("direct") else "slot_to") in error["message"]


class SpoiltTickets(CpuSource):
    """A source whose captures take, or whose restores leave, a wrong byte in the slot's last row."""

    spoilt = ""

    def begin_capture(self, conversation: str, slot: int = 0) -> Ticket[Captured]:
        if self.spoilt != "capture" or conversation == "kept":  # what `duplex` restores was captured well
            return super().begin_capture(conversation, slot)
        self._flip(slot)
        ticket = super().begin_capture(conversation, slot)
        ticket.result()
        self._flip(slot)
        return ticket

    def begin_restore(self, conversation: str, slot: int = -1) -> Ticket[Restored]:
        ticket = super().begin_restore(conversation, slot)
        if self.spoilt == "restore":
            ticket.result()
            self._flip(slot)
        return ticket

    def _flip(self, slot: int) -> None:
        plane = np.frombuffer(self._pools[-1].buffer, np.uint8).reshape(self._shape.axes)[-1]
        plane[self._shape.row_numbers(slot)[-1], -1] ^= 1


@pytest.mark.parametrize("bench_name", ["stages", "duplex"])
@pytest.mark.parametrize("spoilt", ["capture", "restore"])
def test_a_spoilt_copy_fails_the_benchmark(
    bench_name: str, spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SpoiltTickets, "spoilt", spoilt)
    monkeypatch.setattr("stratad.bench.copy_cpu.CpuSource", SpoiltTickets)
    before = signal.getsignal(signal.SIGTERM)
    try:
        words = ["--device", "cpu", "--cards", "2", "--stage-mib", "4", "--link-bytes-per-s", "1e9", "--quiet"]
        assert main(["bench", bench_name, *words, "--json"]) == ExitCode.FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["code"] == "damaged"


@pytest.mark.parametrize("bench_name", ["copy", "slots"])
@pytest.mark.parametrize("option", ["--stages", "--image-mib"])
def test_no_copies_of_nothing(bench_name: str, option: str) -> None:
    done = subprocess.run([*COMMAND, bench_name, option, "0"], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE
    assert f"{option} must be at least 1, got 0 [bad_value]" in done.stderr


def test_the_daemons_log_is_appended_to() -> None:
    """Whoever else writes to it, or empties it, loses no line of the daemon's."""
    with PrivateDaemon.start({"daemon.devices": "cpu:1"}) as daemon:
        client, _ = daemon.connect()
        client.close()
        assert "ready" in daemon.log_path.read_text()
        (flags,) = re.findall(r"flags:\s+(\d+)", Path(f"/proc/{daemon.pid}/fdinfo/2").read_text())
        assert int(flags, 8) & os.O_APPEND
    assert not daemon.log_path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_an_ended_benchmark_takes_its_daemon_along(number: int) -> None:
    command = [*COMMAND, "control", "--captures", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        own = psutil.Process(process.pid)
        # Supervisor, template and four workers.
        children = wait_until(lambda: found if len(found := own.children(recursive=True)) >= 6 else [], 30)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    wait_until(lambda: not any(child.is_running() for child in children), 10, "the daemon's processes ended")
    assert private_segments(process.pid) == []


def test_a_killed_benchmark_takes_its_daemon_along() -> None:
    command = [*COMMAND, "control", "--captures", "1000000"]
    # Nobody is left to remove its folder, so it is made where the test can.
    with (
        tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": folder}
        ) as process,
    ):
        own = psutil.Process(process.pid)
        children = wait_until(lambda: found if len(found := own.children(recursive=True)) >= 6 else [], 30)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        wait_until(lambda: not any(child.is_running() for child in children), 10, "the daemon's processes ended")
    assert private_segments(process.pid) == []


@pytest.mark.parametrize("words", [["frobnicate"], ["control", "--rounds", "2"], ["control", "--no-such"]])
def test_wrong_arguments(words: list[str]) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_delta_on_cpu() -> None:
    words = (
        "--tokens",
        "6400",
        "--conversations",
        "4",
        "--prefix-tokens",
        "1024",
        "--stages",
        "2",
        "--layouts",
        "paged",
    )
    report = bench("delta", "--device", "cpu", *words)
    rows = report["rows"]
    ops = ["capture", "next_turn", "restore", "restore_resident", "shared"]
    assert sorted((row["round"], row["op"]) for row in rows) == sorted((n, op) for n in range(3) for op in ops)
    assert all(row["byte_exact"] for row in rows)
    for row in rows:
        if row["op"] in {"capture", "restore"}:
            assert (row["moved_bytes"], row["skipped_bytes"]) == (row["bytes"], 0)
        elif row["op"] == "shared":
            assert row["over_ideal"] == pytest.approx(row["stored_bytes"] / row["bytes"], abs=1e-3)
        else:  # the last chunk and the new tokens' are copied
            assert row["moved_bytes"] + row["skipped_bytes"] == row["bytes"]
            assert 0 < row["moved_bytes"] <= row["bytes"] / 10
    assert report["ratios"]["shared_bytes_over_ideal"] <= 1.05
    for name, (op, whole) in {
        "next_turn_over_full": ("next_turn", "capture"),
        "restore_resident_over_full": ("restore_resident", "restore"),
    }.items():
        by_op = {op: [row["seconds"] for row in rows if row["op"] == op] for op in (op, whole)}
        worst = max(mine / theirs for mine, theirs in zip(by_op[op], by_op[whole], strict=True))
        assert report["ratios"][name] == pytest.approx(worst, abs=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        ["control", "--stages", "0"],
        ["control", "--captures", "0"],
        ["control", "--clients", "-1"],
        ["control", "--warm-up", "-1"],
        ["control", "--blocks", "1000001"],
        ["catalog", "--images", "0"],
        ["catalog", "--stages", "0"],
        ["catalog", "--lookups", "0"],
        ["catalog", "--captures", "0"],
        ["copy", "--slice-mib", "0", "--device", "cpu"],
        ["delta", "--conversations", "-1", "--device", "cpu"],
        ["isolate", "--pause-ms", "nan", "--device", "cpu"],
        ["isolate", "--pause-ms", "inf", "--device", "cpu"],
        ["stages", "--stages", "-1"],
        ["stages", "--stage-mib", "0"],
        ["duplex", "--layout", "rows-4k", "--device", "cpu"],
    ],
)
def test_values_that_cannot_be_measured_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["bench", *words]) == ExitCode.USAGE
    finally:
        signal.signal(signal.SIGTERM, before)
    error = capsys.readouterr().err
    assert words[1] in error
    assert "[bad_value]" in error


def test_delta_of_more_conversations_than_a_byte_counts() -> None:
    words = ["--tokens", "3200", "--planes", "4", "--prefix-tokens", "256", "--tail-tokens", "16", "--layouts", "slot"]
    report = bench("delta", "--device", "cpu", *words, "--conversations", "260")
    assert report["ratios"]["shared_bytes_over_ideal"] == pytest.approx(1, abs=0.01)


def test_delta_refuses_a_conversation_that_has_no_hundredth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "delta", "--device", "cpu", "--tokens", "100"]) == ExitCode.USAGE
    assert "--tokens" in capsys.readouterr().err
