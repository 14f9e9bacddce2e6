"""The steps of tools/multi_gpu.py: their commands, what is told of each, and what must be reached with four cards."""

import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies
MIB, GIB = 1 << 20, 1 << 30
PASSED, FAILED, SKIPPED, CUT, RUNNING = "passed", "failed", "skipped", "cut", "running"
# What `bench stages` holds: two daemons with one image each, a spare shuttle a card, and its links' buffers.
MODEL_TOKEN_BYTES = 128 * 1024
STAGES_ARENAS = 2 * 1.125
STAGES_SPARE_BYTES = 2 * 256 * MIB + GIB
LONG_TOKENS = 391 * 256  # whole chunks
# How many cards the GPU tests use. Not one of ours by name: those are the daemon's settings, and doctor looks at them.
CARDS_VARIABLE = "GPU_TEST_CARDS"
# Doctor's words for "there are warnings" and "something is wrong": also then it has said what there is.
DOCTOR_CODES = (0, 4, 5)
PARALLEL_TARGET, LINK_TARGET, P99_TARGET = 3.8, 0.95, 2.0
PARALLEL_CARDS = 4  # fewer cannot be so much sooner together


@dataclass(frozen=True)
class Step:
    """One command. `why_not` (if not empty) says why it is not run; `stop` is the signal that asks it to end early."""

    name: str
    command: Sequence[str]
    limit_s: float
    why_not: str = ""
    codes: Sequence[int] = (0,)
    stop: signal.Signals = signal.SIGTERM
    figures: Callable[[str, Any], dict[str, Any]] = field(default=lambda _text, report: _ratios(report))


def plan(cards: int, *, dry: bool) -> list[Step]:
    """All steps for so many cards."""
    device = "cpu" if dry else "cuda"
    ctl = [sys.executable, "-P", "-m", "stratad.ctl"]

    def bench(name: str, *words: str, limit_s: float, label: str = "", why_not: str = "") -> Step:
        command = [*ctl, "bench", name, "--device", device, *words, "--json"]
        return Step(label or name, command, limit_s, why_not)

    several = "" if cards > 1 else "one card only"
    every = str(cards)
    small = {"copy": "16", "stage": "4", "slots": "16"} if dry else {"copy": "4096", "stage": "1024", "slots": "4096"}
    stages_size = ["--stage-mib", "8"] if dry else ["--tokens", str(fitting_tokens(cards))]
    links = [sys.executable, "-P", "-m", "stratad.bench.links", "--device", device, "--cards", every, "--json"]
    delta_size = ["--tokens", "6400", "--planes", "2", "--conversations", "4", "--prefix-tokens", "1024"] if dry else []
    soak = CHECKOUT / "tools/soak.py"
    steps = [
        Step("doctor", [*ctl, "doctor", "--json"], 90, codes=DOCTOR_CODES, figures=_topology),
        Step("links", [*links, "--mib", "32" if dry else "1024"], 90, figures=lambda _, report: _links(report)),
        bench("stages", "--cards", every, *stages_size, limit_s=170, why_not=several),
        bench(
            "isolate", "--cards", every, "--victim", str(min(2, cards - 1)), "--ops", "50" if dry else "1000",
            limit_s=200, why_not=several,
        ),
        Step("demo", [*ctl, "demo", *_demo(cards, dry=dry), "--json"], 150, figures=_demo_figures),
        bench("copy", "--cards", every, "--image-mib", small["copy"], limit_s=90),
        bench("duplex", "--cards", every, "--stage-mib", small["stage"], limit_s=90),
        bench("slots", "--cards", every, "--image-mib", small["slots"], limit_s=90),
        Step("fault-matrix", [*ctl, "fault-matrix", *_matrix(cards, dry=dry), "--json"], 150, figures=_cells),
        *_tests("tests-cards", _CARD_TESTS, 240, dry=dry),
        bench("recover", "--images", "0" if not dry else "8", "--kills", "2", limit_s=90),
        bench("delta", *delta_size, limit_s=150),
    ]  # fmt: skip
    for fewer in (1, 2):
        if fewer < cards:
            count = str(fewer)
            steps += [
                bench("copy", "--cards", count, "--image-mib", small["copy"], limit_s=90, label=f"copy-{fewer}"),
                bench("duplex", "--cards", count, "--stage-mib", small["stage"], limit_s=90, label=f"duplex-{fewer}"),
                bench("slots", "--cards", count, "--image-mib", small["slots"], limit_s=90, label=f"slots-{fewer}"),
                bench("stages", "--cards", count, *stages_size, limit_s=170, label=f"stages-{fewer}"),
            ]
    steps += _tests("tests-others", _other_tests(), 300, dry=dry)
    soak_command = [sys.executable, "-P", str(soak), "--ops", "200" if dry else "20000", "--json"]
    no_soak = "" if soak.is_file() else "there is no tools/soak.py yet"
    steps.append(Step("soak", soak_command, 330, no_soak, figures=lambda _, report: _soak(report)))
    return steps


_CARD_TESTS = ("test_cards_gpu", "test_shapes_gpu", "test_slot_faults_gpu", "test_rescue_gpu", "test_client_gpu")


def _other_tests() -> list[str]:
    """The other files of GPU tests."""
    return sorted({path.stem for path in (CHECKOUT / "tests/gpu").glob("test_*.py")} - set(_CARD_TESTS))


def _tests(name: str, modules: Sequence[str], limit_s: float, *, dry: bool) -> list[Step]:
    files = [f"tests/gpu/{module}.py" for module in modules]
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    why_not = "a dry run has no GPU" if dry else ""
    return [Step(name, command, limit_s, why_not, stop=signal.SIGINT, figures=lambda text, _: counted(text))]


def _demo(cards: int, *, dry: bool) -> list[str]:
    if dry:
        return ["--model", "random:tiny", "--tokens", "200", "--device", "cpu", "--stages", str(cards)]
    return ["--model", "random:smollm2", "--tokens", "2000", "--device", "cuda", "--cards", str(cards)]


def _matrix(cards: int, *, dry: bool) -> list[str]:
    ops, kinds = "capture,restore,slot_direct", "kill,corrupt,engine_kill"
    if dry:
        ops, kinds = "capture,restore", "exception"
    devices = f"cpu:{cards}" if dry else "cuda:all"
    return ["--devices", devices, "--stages", str(max(cards, 2)), "--ops", ops, "--kinds", kinds, "--points", "none"]


def fitting_tokens(cards: int) -> int:
    """Tokens of the long conversation: 100,000, or as many as two daemons have room for."""
    free_bytes = min(shutil.disk_usage(SHM).free, memory()["memory_available_bytes"])
    room_bytes = 0.9 * free_bytes - cards * STAGES_SPARE_BYTES
    return max(min(LONG_TOKENS, int(room_bytes / STAGES_ARENAS / MODEL_TOKEN_BYTES)), 4096)


def environment() -> dict[str, str]:
    """Of every command: this checkout first on the import path."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(CHECKOUT), inherited) if part)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


# --- figures ----------------------------------------------------------------------------------------------------------


def _ratios(report: Any) -> dict[str, Any]:
    """The ratios of a benchmark, and how long the conversation was that it moved."""
    tokens = report["settings"].get("tokens")
    return {**report["ratios"], **({} if tokens is None else {"tokens": tokens})}


def _topology(_text: str, report: Any) -> dict[str, Any]:
    checks = [check for check in report["checks"] if check["name"] in ("devices", "topology", "peer access")]
    return {"state": report["state"], "checks": checks, "nvidia_smi_topology": _smi_topology()}


def _smi_topology() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _links(report: Any) -> dict[str, Any]:
    return {
        f"{row['way']}_{key}": row[key]
        for row in report["rows"]
        if row["card"] == "all"
        for key in ("alone_gb_per_s", "at_once_gb_per_s", "at_once_over_alone")
    }


def _demo_figures(_text: str, report: Any) -> dict[str, Any]:
    keys = "device stages tokens image_bytes prefill_s capture_s restore_s engine_killed continuation_identical "
    return {key: report[key] for key in [*keys.split(), "cache_identical", "logits_identical"]}


def _soak(report: Any) -> dict[str, Any]:
    return {key: report[key] for key in ("ops", "evictions", "mismatches", "accounting_exact", "verdict")}


def _cells(_text: str, report: Any) -> dict[str, Any]:
    return {key: report[key] for key in ("passed", "failed", "skipped", "cut_short")}


def counted(text: str) -> dict[str, Any]:
    """What the last line of pytest says: ``3 failed, 117 passed in 9.8s``; the names of what failed."""
    found: dict[str, Any] = {}
    for line in reversed(text.splitlines()):
        words = line.strip("= ").replace(",", "").split()
        found = {
            what: int(number) for number, what in itertools.pairwise(words) if number.isdecimal() and what.isalpha()
        }
        if found:
            break
    bad = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {**found, "failures": bad} if bad else found


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What must be reached (some of it by four cards at least), and what was: nothing of a step that did not pass. A
    dry run meets nothing and misses nothing: `met` is None.
    """
    figures = {entry["name"]: entry["figures"] for entry in result["steps"] if entry["state"] == PASSED}
    found: list[dict[str, Any]] = []

    def target(step: str, name: str, got: Any, met: bool, note: str = "") -> None:
        judged = None if result["simulated"] else met
        found.append({"step": step, "name": name, "got": got, "met": judged, **({"note": note} if note else {})})

    if stages := figures.get("stages"):
        for op in ("capture", "restore"):
            got = stages[f"{op}_parallel_over_serial"]
            note = f"{stages.get('tokens')} tokens"
            if result["cards"] >= PARALLEL_CARDS:
                target("stages", f"{op}: serial over parallel >= {PARALLEL_TARGET}", got, got >= PARALLEL_TARGET, note)
            share = stages.get(f"{op}_link_over_alone")
            if share is not None:
                at_once = stages["at_once_over_alone"]
                note = f"of the limits at once {stages[f'{op}_link_over_limit']}; links at once over alone {at_once}"
                target("stages", f"{op}: each link >= {LINK_TARGET} of its own", share, share >= LINK_TARGET, note)
    if isolate := figures.get("isolate"):
        lost, p99 = isolate["others_lost"], isolate["others_p99_over_calm"]
        target("isolate", "operations of the other cards lost = 0", lost, lost == 0)
        target("isolate", f"p99 of the others within {P99_TARGET:g} x", p99, p99 is not None and p99 <= P99_TARGET)
    if demo := figures.get("demo"):
        same = bool(demo["continuation_identical"] and demo["cache_identical"] and demo["engine_killed"])
        target("demo", "same tokens from a model over all cards", same, same)
    return found


def gpus() -> int:
    """GPUs that torch sees, asked in a process of its own: this one stays without a context."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.split() else 0


# --- memory -----------------------------------------------------------------------------------------------------------


def memory() -> dict[str, int]:
    """What the machine has left of memory, and how much /dev/shm may hold."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(found["MemAvailable"].split()[0]) * 1024
    return {"memory_available_bytes": available, "shm_bytes": shutil.disk_usage(SHM).total}


def _touch(size_bytes: int) -> None:
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, size_bytes, mmap.PAGESIZE):
            memory[at] = 1


def make_room(room_bytes: int) -> None:
    """Touch memory once and give it back; as root let /dev/shm hold as much."""
    workers = max(1, min(8, len(os.sched_getaffinity(0))))
    started_s = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_touch, [room_bytes // workers] * workers))  # all of it at the same time
    if shutil.disk_usage(SHM).total < room_bytes and os.geteuid() == 0:
        subprocess.run(["mount", "-o", f"remount,size={room_bytes}", str(SHM)], check=False)
    print(f"multi_gpu: room made in {time.monotonic() - started_s:.1f} s: {memory()}", file=sys.stderr, flush=True)
