"""Start, submit, stop at a random instant, many times over, as `tests.support.cycles` describes.

From a checkout: ``python tools/cycles.py [--cycles 1000] [--seed 1] [--json]``. The exit status is 1, and the
story is told, where anything was not as it should be.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.cycles import Cycles


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000, help="how often a daemon is ended (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants and of what is submitted (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last")
    options = parser.parse_args()
    if options.cycles < 1:
        parser.error(f"--cycles must be at least 1, got {options.cycles}")
    started_s = time.monotonic()
    done = 0
    wrong = ""
    try:
        with Cycles(options.seed) as cycles:
            for done in range(1, options.cycles + 1):
                cycles.cycle()
                if done % 50 == 0:
                    print(f"{done} cycles, {sum(cycles.outcomes.values())} operations", file=sys.stderr, flush=True)
    except AssertionError as error:
        wrong = str(error)
    shown = {
        "cycles": done,
        "operations": sum(cycles.outcomes.values()),
        "ends": dict(sorted(cycles.ends.items())),
        "outcomes": dict(sorted(cycles.outcomes.items())),
        "slowest_end_s": round(cycles.slowest_end_s, 3),
        "seconds": round(time.monotonic() - started_s, 1),
        "verdict": "failed" if wrong else "passed",
        "wrong": wrong,
    }
    if options.json:
        print(json.dumps(shown))
    else:
        took = f"{shown['seconds']} s, the slowest end of a daemon {shown['slowest_end_s']} s"
        print(f"{shown['verdict']}: {done} cycles, {shown['operations']} operations in {took}")
        if wrong:
            print(wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
