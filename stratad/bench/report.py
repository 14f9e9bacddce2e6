"""The report of one benchmark: what ran where, every round, and the ratios that others rely on."""

import datetime as dt
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ipc.messages import Welcome
from stratad.ctl.output import Json, JsonObject
from stratad.version import commit, package_hash

Row: TypeAlias = JsonObject
# A percentile of fewer samples than these is a guess about the tail, so it is not given at all.
LEAST_SAMPLES: Final[dict[int, int]] = {50: 20, 95: 100, 99: 1000}
_NVIDIA_SMI_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True)
class Report:
    """Everything a benchmark found. `rows` holds every round; `ratios` are those of the worst row.

    For people alone: rows of different `split_by` are shown in tables of their own, `headings` name columns otherwise
    than the keys do, and `ratio_notes` say where a ratio comes from.
    """

    bench: str
    rows: Sequence[Row]
    ratios: JsonObject
    settings: JsonObject
    daemon: Welcome
    split_by: str = ""
    headings: Mapping[str, str] = field(default_factory=dict)
    ratio_notes: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> JsonObject:
        """The object of ``--json``; commands of other tools rely on its keys."""
        return {
            "bench": self.bench,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": list(sys.argv),
            "hardware": hardware(),
            "versions": versions(self.daemon),
            "settings": self.settings,
            "rows": list(self.rows),
            "ratios": self.ratios,
        }


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """Nearest-rank percentile (50, 95 or 99); None where there are too few samples to tell."""
    if len(samples) < LEAST_SAMPLES[percent]:
        return None
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds, rounded to microseconds."""
    return None if seconds is None else round(seconds * 1e3, 3)


def latency_fields(samples_s: Sequence[float]) -> Row:
    """Percentiles of one series of times."""
    return {
        "n": len(samples_s),
        "p50_ms": milliseconds(percentile(samples_s, 50)),
        "p95_ms": milliseconds(percentile(samples_s, 95)),
        "p99_ms": milliseconds(percentile(samples_s, 99)),
        "max_ms": milliseconds(max(samples_s, default=None)),
    }


def column(rows: Iterable[Row], key: str, **where: Json) -> list[float]:
    """The numbers under `key` of the rows that have all the given values."""
    values = (row.get(key) for row in rows if all(row.get(name) == value for name, value in where.items()))
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def worst_high(values: Sequence[float]) -> float | None:
    """The worst of values that should be small; None where there are none."""
    return max(values, default=None)


def worst_low(values: Sequence[float]) -> float | None:
    """The worst of values that should be large; None where there are none."""
    return min(values, default=None)


def versions(daemon: Welcome) -> JsonObject:
    """What was measured: commit, both package hashes, Python and, where it is loaded, torch."""
    found: JsonObject = {
        "commit": commit(),
        "installed_package_hash": package_hash(),
        "daemon_package_hash": daemon.package_hash,
        "daemon_commit": daemon.commit,
        "python": platform.python_version(),
    }
    for name in ("msgpack", "msgspec", "numpy", "pyzmq", "xxhash"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    torch = sys.modules.get("torch")
    found["torch"] = None if torch is None else str(torch.__version__)
    return found


def hardware(proc: Path = Path("/proc")) -> JsonObject:
    """The machine: processor, usable cores, memory, kernel, GPUs."""
    return {
        "cpu": cpu_model((proc / "cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_total_bytes((proc / "meminfo").read_text()),
        "kernel": platform.release(),
        "gpus": list(_gpu_names()) if (proc / "driver/nvidia").exists() else [],
    }


def cpu_model(cpuinfo: str) -> str:
    """Name of the processor out of /proc/cpuinfo; the architecture where it has none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def memory_total_bytes(meminfo: str) -> int | None:
    """MemTotal of /proc/meminfo."""
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            return int(value.split()[0]) * 1024
    return None


def _gpu_names() -> Sequence[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return done.stdout.strip().splitlines() if done.returncode == 0 else ()
