"""Run the daemon's real core under a seeded scheduler, and check every invariant after every event.

    python tools/simulate.py --seeds 2000 --json       seeds 0..1999, in as many processes as there are cores
    python tools/simulate.py --seed 17 --story         one seed alone, with everything that happened
    python tools/simulate.py --mutants --json          break one rule after another: each must be caught

The exit status is 0 if nothing was found, everything was reached, and every mutant was caught.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.simulation import mutants, runner


def main() -> int:
    """Read the command line, do what it says; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--story", action="store_true", help="with --seed: print its whole history")
    parser.add_argument("--mutants", action="store_true", help="run the mutants, too")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--mutant", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
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
        for name, value in result.items():
            print(f"{name}: {value}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
