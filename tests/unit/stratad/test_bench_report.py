"""The benchmark report: percentiles, worst rows, and the keys that other tools rely on."""

import json

import pytest

from stratad.bench.report import (
    Report,
    Row,
    column,
    cpu_model,
    latency_fields,
    memory_total_bytes,
    percentile,
    worst_high,
    worst_low,
)
from stratad.ctl.bench import report_lines, rows_table
from stratad.version import package_hash
from tests.support.ctl_fakes import WELCOME


def test_percentile_is_the_nearest_rank() -> None:
    samples = [float(value) for value in range(1000, 0, -1)]
    assert percentile(samples, 50) == 500.0
    assert percentile(samples, 95) == 950.0
    assert percentile(samples, 99) == 990.0


@pytest.mark.parametrize(("percent", "least"), [(50, 20), (95, 100), (99, 1000)])
def test_too_few_samples_give_no_percentile(percent: int, least: int) -> None:
    assert percentile([1.0] * (least - 1), percent) is None
    assert percentile([1.0] * least, percent) == 1.0


def test_latency_is_told_in_milliseconds() -> None:
    assert latency_fields([0.002] * 100) == {"n": 100, "p50_ms": 2.0, "p95_ms": 2.0, "p99_ms": None, "max_ms": 2.0}
    assert latency_fields([])["max_ms"] is None


def test_column_and_worst() -> None:
    rows: list[Row] = [{"arm": "a", "x": 1}, {"arm": "a", "x": 3.5}, {"arm": "b", "x": 9}, {"arm": "a", "x": None}]
    assert column(rows, "x", arm="a") == [1.0, 3.5]
    assert worst_high(column(rows, "x", arm="a")) == 3.5
    assert worst_low(column(rows, "x", arm="a")) == 1.0
    assert worst_low(column(rows, "x", arm="none")) is None


def test_report_keys() -> None:
    rows: list[Row] = [{"round": 0, "x": 1.0}]
    data = json.loads(json.dumps(Report("control", rows, {"x": 1.0}, {"n": 1}, WELCOME).as_json()))
    assert {"bench", "date", "command", "hardware", "versions", "settings", "rows", "ratios"} <= data.keys()
    assert data["bench"] == "control"
    assert data["rows"] == rows
    assert data["versions"]["installed_package_hash"] == package_hash()
    assert data["versions"]["daemon_package_hash"] == WELCOME.package_hash
    assert {"cpu", "cores", "memory_bytes", "kernel", "gpus"} <= data["hardware"].keys()


def test_hardware_texts() -> None:
    assert cpu_model("processor : 0\nmodel name\t: A Processor @ 2 GHz\n") == "A Processor @ 2 GHz"
    assert cpu_model("processor : 0\n") != ""
    assert memory_total_bytes("MemFree: 1 kB\nMemTotal:     2048 kB\n") == 2048 * 1024
    assert memory_total_bytes("") is None


def test_rows_of_different_keys_make_one_table() -> None:
    lines = rows_table([{"round": 0, "a": 1.5}, {"round": 1, "b": None}])
    assert lines[0].split() == ["round", "a", "b"]
    assert lines[1].split() == ["0", "1.5", "-"]
    assert lines[2].split() == ["1", "-", "-"]


def test_rows_of_two_kinds_are_two_tables_and_ratios_say_where_they_come_from() -> None:
    rows: list[Row] = [
        {"round": 0, "arm": "worker", "shuttle_bytes": 128 << 20, "other_bytes": 1024},
        {"round": 0, "arm": "daemon", "serves_s": 0.5},
    ]
    ratios: Row = {"daemon_s": 0.5}
    notes = {"daemon_s": "longest of serves_s"}
    report = Report("recover", rows, ratios, {}, WELCOME, "arm", {"shuttle_bytes": "arena"}, notes)
    assert report_lines(report) == [
        "worker:",
        "round      arena  other_bytes",
        "    0  128.0 MiB         1024",
        "",
        "daemon:",
        "round  serves_s",
        "    0       0.5",
        "",
        "daemon_s: 0.5 (longest of serves_s)",
    ]
    plain = report_lines(Report("control", rows[1:], ratios, {}, WELCOME))
    assert plain == ["round  arm     serves_s", "    0  daemon       0.5", "", "daemon_s: 0.5"]
