"""Arms of a benchmark, their ratios, and the processor time of a process."""

import os
import threading
from pathlib import Path

import pytest

from stratad.bench.arms import Arm, parse_arms, ratios_over_first
from stratad.bench.cpu_meter import CpuMeter
from stratad.bench.report import Row
from stratad.ctl.output import CommandError


def test_arms_of_any_setting() -> None:
    arms = parse_arms("copy.parallel=true,false")
    assert arms == (Arm("copy.parallel", "true"), Arm("copy.parallel", "false"))
    assert parse_arms("parallel=true,false") == arms
    assert arms[1].settings == {"copy.parallel": "false"}
    assert arms[1].name == "copy.parallel=false"
    assert (Arm().settings, Arm().name) == ({}, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("frobnicate=1,2", "none"),
        ("parallel", "at least two"),
        ("parallel=true", "at least two"),
        ("parallel=true,true", "at least two"),
        ("parallel=true,", "at least two"),
        ("=1,2", "none"),
    ],
)
def test_arms_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(CommandError, match=why):
        parse_arms(text)


def test_a_ratio_is_that_of_the_worst_round() -> None:
    arms = parse_arms("parallel=true,false")
    rows: list[Row] = [
        {"arm": kind, "setting": arm.name, "p50_ms": value}
        for kind, values in (("capture", ((1.0, 2.0), (1.5, 2.5))), ("restore", ((4.0, 4.0), (4.0, 2.0))))
        for arm, mine in zip(arms, values, strict=True)
        for value in mine
    ]
    assert ratios_over_first(rows, arms, "p50_ms") == {
        "capture_p50_ms_false_over_true": 1.5,
        "restore_p50_ms_false_over_true": 1.0,
    }
    assert ratios_over_first(rows, arms[:1], "p50_ms") == {}
    assert ratios_over_first(rows, arms, "p99_ms") == {}


def test_the_meter_counts_every_thread() -> None:
    meter = CpuMeter(os.getpid())
    before_s = meter.read_s()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [0 for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        while (now_s := meter.read_s()) is not None and before_s is not None and now_s < before_s + 0.02:
            pass
    finally:
        stop.set()
        thread.join()
    assert now_s is not None


def test_the_meter_sums_what_the_kernel_says(tmp_path: Path) -> None:
    for thread, text in ((1, "1500000000 7 8\n"), (2, "500000000 7 8\n"), (3, "")):
        folder = tmp_path / "42/task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(text)
    assert CpuMeter(42, tmp_path).read_s() == 2.0
    assert CpuMeter(43, tmp_path).read_s() is None
