"""Run the daemon's real core under a seeded scheduler, and check every invariant after every event.

    python tools/simulate.py --seeds 2000 --json       seeds 0..1999, in as many processes as there are cores
    python tools/simulate.py --seed 17 --story         one seed alone, with everything that happened
    python tools/simulate.py --mutants --json          break one rule after another: each must be caught

The exit status is 0 if nothing was found, everything was reached, and every mutant was caught.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.simulation import mutants, runner

MOST_NAMES, MOST_VIOLATIONS, MOST_CHARS = 8, 3, 200


def main() -> int:
    """Read the command line, do what it says; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--story", action="store_true", help="with --seed: print its whole history")
    parser.add_argument("--mutants", action="store_true", help="run the mutants, too")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--mutant", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if options.jobs < 0:
        parser.error(f"--jobs must not be negative, got {options.jobs}")
    if options.part is not None:
        gc.disable()  # see `run_seeds`
        print(json.dumps(runner.run_seeds(*options.part)._asdict()))
        return 0
    if options.mutant is not None:
        print(json.dumps(runner.try_mutant(mutants.MUTANTS[options.mutant])._asdict()))
        return 0
    if options.seed is not None:
        if os.environ.get("PYTHONHASHSEED") != "0":  # as in the processes that run many
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
        found = runner.tell_story(options.seed, print if options.story else lambda _: None)
        print(found or f"seed {options.seed}: nothing found")
        return int(bool(found))
    if not options.seeds and not options.mutants:
        parser.error("one of --seeds, --seed and --mutants is needed")
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    result = (
        runner.run_many(options.seeds, first=options.first, jobs=options.jobs) if options.seeds else {"passed": True}
    )
    caught = runner.run_mutants(options.jobs) if options.mutants else []
    result["mutants"] = len(caught)
    result["mutants_caught"] = sum(bool(one.found) for one in caught)
    if caught:
        result["mutants_found"] = {one.name: one._asdict() for one in caught}
    passed = result["passed"] and all(one.found for one in caught)
    result["passed"] = passed
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print("\n".join(lines_of(result, caught)))
    return int(not passed)


def lines_of(result: dict[str, Any], caught: Sequence[runner.Caught]) -> list[str]:
    """A result for people; `--json` has all of it."""
    lines: list[str] = []
    if "seeds" in result:
        seeds, jobs = result["seeds"], result["jobs"]
        rate = (
            f"{result['seeds_per_s_per_process']} seeds/s in each of {jobs} {'process' if jobs == 1 else 'processes'}"
        )
        lines += [
            f"seeds {seeds}, events {result['events']}, violations {result['violations']}",
            f"{result['seconds']} s, {rate}",
            f"median history: {result['median_events']:g} events, {result['median_conversations']:g} conversations, "
            f"{result['median_stages']:g} stages",
            f"not reached: {_listed(result['missing'])}"
            if seeds >= runner.ENOUGH_SEEDS
            else f"not reached: said of {runner.ENOUGH_SEEDS} seeds or more",
        ]
        lines += [f"  {text.splitlines()[0][:MOST_CHARS]}" for text in result["found"][:MOST_VIOLATIONS] if text]
    if caught:
        through = [one.name for one in caught if not one.found]
        lines.append(f"mutants {len(caught)}, not caught: {_listed(through)}")
    return [*lines, "passed" if result["passed"] else "FAILED"]


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more]) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
