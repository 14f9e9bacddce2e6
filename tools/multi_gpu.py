"""Everything that is measured on several GPUs, one stage a card, as steps: one JSON file and one table.

From a checkout: ``bash tools/multi_gpu.sh [--within SECONDS] [--steps NAME,...] [--skip NAME,...] [--out FILE]``.

The most valuable steps come first. Each has a time of its own and never more than what is left of `--within`; one that
fails, or is cut off, is a result and ends nothing. JSON and table are written after every step, so that an end at any
time loses only the step at hand. A second run with ``--steps`` takes what the first had no time for.

``--dry-run`` does the same with four `cpu` workers and little work: it shows that the commands work, and nothing else;
its JSON says ``"simulated": true``.
"""

import argparse
import contextlib
import datetime as dt
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import multi_gpu_steps as steps_of  # noqa: E402 - the path is set above
from multi_gpu_steps import CUT, FAILED, PASSED, RUNNING, SHM, SKIPPED, Step, environment  # noqa: E402

from stratad.bench.report import hardware  # noqa: E402
from stratad.ctl.output import table  # noqa: E402
from stratad.version import commit, package_hash  # noqa: E402

DRY_CARDS = 4
# What a step that is asked to end gets to end its daemon; it is taken from the time that is left.
STOP_S = 15.0
# With less than this a step would only be cut off.
LEAST_S = 10.0
LOG_LINES = 40
_MET = {True: "yes", False: "NO", None: "simulated"}


def main() -> int:
    """Run the steps; the exit status is 1 if one failed or was cut off."""
    args = _arguments()
    until_s = time.monotonic() + args.within
    cards = DRY_CARDS if args.dry_run else args.cards or steps_of.gpus()
    if not args.dry_run and cards < 1:
        print("multi_gpu: torch sees no GPU; --dry-run shows what would be run", file=sys.stderr)
        return 2
    if not args.dry_run:
        os.environ[steps_of.CARDS_VARIABLE] = str(cards)
    if args.room_gib:
        steps_of.make_room(args.room_gib << 30)
    steps = _chosen(steps_of.plan(cards, dry=args.dry_run), args.steps, args.skip)
    result: dict[str, Any] = {
        "tool": "multi_gpu",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cards": cards,
        "simulated": args.dry_run,
        "hardware": {**hardware(), **steps_of.memory()},
        "commit": commit(),
        "package_hash": package_hash(),
        "steps": [],
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    for step in steps:
        entry: dict[str, Any] = {"name": step.name, "command": list(step.command), "seconds": 0.0, "state": RUNNING}
        result["steps"].append(entry)
        write(result, args.out)
        print(f"multi_gpu: {step.name} ...", file=sys.stderr, flush=True)
        try:
            entry.update(run_step(step, until_s - time.monotonic()))
        except KeyboardInterrupt:
            entry.update(state=CUT, reason="interrupted")
            interrupted = True
        print(f"multi_gpu: {step.name}: {entry['state']} {entry['seconds']:.1f} s", file=sys.stderr, flush=True)
        result["targets"] = steps_of.targets(result)
        write(result, args.out)
        if interrupted:
            break
    print("\n".join(lines(result)))
    print(json.dumps({key: value for key, value in result.items() if key != "steps"} | {"out": str(args.out)}))
    return 130 if interrupted else int(any(entry["state"] in (FAILED, CUT) for entry in result["steps"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="four cpu workers and little work")
    parser.add_argument("--cards", type=int, default=0, help="use the first N GPUs (default: all)")
    parser.add_argument("--within", type=float, default=570.0, metavar="SECONDS", help="for all steps (default: 570)")
    parser.add_argument("--steps", default="", metavar="NAME,...", help="only these, in this order")
    parser.add_argument("--skip", default="", metavar="NAME,...", help="all but these")
    parser.add_argument("--out", type=Path, default=Path("multi_gpu.json"), help="JSON file; the table lies beside it")
    parser.add_argument(
        "--room-gib",
        type=int,
        default=0,
        metavar="N",
        help="first touch N GiB of memory once, for a virtual machine that is given it only then, and, as root, let "
        "/dev/shm hold as much (default: neither)",
    )
    args = parser.parse_args()
    if args.within <= 0 or args.cards < 0 or args.room_gib < 0:
        parser.error("--within must be above 0, --cards and --room-gib at least 0")
    return args


def _chosen(steps: Sequence[Step], only: str, without: str) -> list[Step]:
    by_name = {step.name: step for step in steps}
    wanted = [name for name in only.split(",") if name] or list(by_name)
    unwanted = [name for name in without.split(",") if name]
    unknown = [name for name in [*wanted, *unwanted] if name not in by_name]
    if unknown:
        sys.exit(f"multi_gpu: no step {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in wanted if name not in unwanted]


# --- running ----------------------------------------------------------------------------------------------------------


def run_step(step: Step, left_s: float) -> dict[str, Any]:
    """Run one; what became of it."""
    if step.why_not:
        return {"state": SKIPPED, "reason": step.why_not, "figures": {}}
    if left_s < LEAST_S + STOP_S:
        return {"state": SKIPPED, "reason": "no time was left", "figures": {}}
    limit_s = min(step.limit_s, left_s - STOP_S)
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            step.command, stdout=out, stderr=err, cwd=steps_of.CHECKOUT, env=environment(), start_new_session=True
        )
        try:
            cut = not _ended(process, limit_s)
        finally:
            _end(process, step.stop)
        stdout, stderr = (_text(stream) for stream in (out, err))
    entry: dict[str, Any] = {"seconds": round(time.monotonic() - started_s, 2), "exit_code": process.returncode}
    report = last_json(stdout)
    figures: dict[str, Any] = {}
    if "error" not in report and (report or step.name.startswith("tests")):
        try:
            figures = step.figures(stdout, report)
        except (KeyError, TypeError, ValueError, IndexError) as exc:
            entry["reason"] = f"its report cannot be read: {type(exc).__name__}: {exc}"
    good = process.returncode in step.codes and bool(figures)
    entry |= {"state": CUT if cut else PASSED if good else FAILED, "figures": figures, "report": report}
    if cut:
        entry["reason"] = f"not done after {limit_s:.0f} s"
    elif not good:
        entry.setdefault("reason", _why(process.returncode, report, stderr))
    if entry["state"] != PASSED:
        entry["log"] = (stderr + "\n" + stdout[-4000:]).strip().splitlines()[-LOG_LINES:]
    return entry


def _ended(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait for its end. It is not reaped here: until then nobody else can have its number, or its session's."""
    watch = os.pidfd_open(process.pid)
    try:
        return bool(select.select([watch], [], [], limit_s)[0])
    finally:
        os.close(watch)


def _end(process: "subprocess.Popen[bytes]", stop: signal.Signals) -> None:
    """Ask it to end, so that it takes its daemon along and says what it has; then end it, and all of its session."""
    if not _ended(process, 0):
        os.kill(process.pid, stop)
        _ended(process, STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in SHM.glob(f"stratad.bench{process.pid}x*"):  # of its daemons, should they have been killed too
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode(errors="replace"))


def last_json(text: str) -> dict[str, Any]:
    """The JSON object of the last line that is one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                return found if isinstance(found, dict) else {}
    return {}


def _why(code: int, report: Mapping[str, Any], stderr: str) -> str:
    error = report.get("error")
    if isinstance(error, dict):
        return f"{error.get('message', '')} [{error.get('code', '')}]"
    last = stderr.strip().splitlines()
    return f"exit status {code}" + (f": {last[-1]}" if last else "")


# --- what is written --------------------------------------------------------------------------------------------------


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table for people."""
    what = "SIMULATED on cpu workers: no figure of it stands for a GPU" if result["simulated"] else "real GPUs"
    rows = []
    for entry in result["steps"]:
        said = entry.get("reason", "") or ", ".join(
            f"{key} {_short(value)}"
            for key, value in entry.get("figures", {}).items()
            if not isinstance(value, list | dict)
        )
        rows.append([entry["name"], entry["state"], f"{entry['seconds']:.1f}", said])
    goals = [
        [goal["step"], goal["name"], str(goal["got"]), _MET[goal["met"]], goal.get("note", "")]
        for goal in result.get("targets", [])
    ]
    head = f"{result['cards']} cards ({what}), commit {result['commit']}, {result['date']}"
    return [
        head,
        "",
        *table(["step", "state", "seconds", "figures"], rows),
        "",
        *table(["step", "must be", "is", "met", ""], goals),
    ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(result: Mapping[str, Any], out: Path) -> None:
    """The JSON file and the table beside it, each whole at any time."""
    for path, text in ((out, json.dumps(result, indent=1)), (out.with_suffix(".txt"), "\n".join(lines(result)))):
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
