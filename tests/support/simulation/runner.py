"""Runs many seeds in several processes, and says what they reached and what they found."""

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from tests.support.simulation import mutants
from tests.support.simulation.history import Broken, History
from tests.support.simulation.mutants import Mutant
from tests.support.simulation.tally import Tally, counted_tables, wanted
from tests.support.simulation.witnesses import WITNESSES

TOOL: Final = mutants.ROOT / "tools" / "simulate.py"
# Of fewer seeds nobody can ask that they reach everything.
ENOUGH_SEEDS: Final = 2_000
LEAST_EVENTS, LEAST_CONVERSATIONS, LEAST_STAGES = 50, 3, 2
SHOWN_VIOLATIONS: Final = 20
# A world is full of cycles, and small: collected all at once they cost a fifth less time.
COLLECT_EVERY: Final = 50


class Part(NamedTuple):
    """What a run of consecutive seeds gave. `sizes`: events, conversations and stages of each history."""

    counts: dict[str, int]
    sizes: list[tuple[int, int, int]]
    violations: list[str]
    crashes: int


def run_seeds(first: int, count: int) -> Part:
    """Run seeds one after another in this process."""
    tally = Tally()
    sizes: list[tuple[int, int, int]] = []
    violations: list[str] = []
    crashes = 0
    with counted_tables(tally.counts):
        for seed in range(first, first + count):
            if seed % COLLECT_EVERY == 0:
                gc.collect()
            tally.begin()
            history = History(seed, tally)
            try:
                history.run()
            except Broken as broken:
                crashes += broken.crashed
                violations.append(str(broken))
            world = history.world
            sizes.append((world.events, len(world.conversations), len(world.devices)))
    return Part(dict(tally.counts), sizes, violations, crashes)


def tell_story(seed: int, write: Callable[[str], None]) -> str:
    """Run one seed and write its whole history; what broke it, or nothing."""
    try:
        History(seed, Tally(), write).run()
    except Broken as broken:
        return str(broken)
    return ""


def summary(parts: Sequence[Part], seconds: float, jobs: int) -> dict[str, Any]:
    """The result of a run, as it is printed."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.counts)
    sizes = [size for part in parts for size in part.sizes]
    violations = [text for part in parts for text in part.violations]
    missing = sorted(name for name in wanted() if not counts[name])
    medians = [median(column) for column in zip(*sizes, strict=True)]
    result: dict[str, Any] = {
        "seeds": len(sizes),
        "events": sum(size[0] for size in sizes),
        "violations": len(violations),
        "found": violations[:SHOWN_VIOLATIONS],
        "median_events": medians[0],
        "median_conversations": medians[1],
        "median_stages": medians[2],
        "seeds_per_s_per_process": round(len(sizes) / seconds / jobs, 1),
        "seconds": round(seconds, 1),
        "jobs": jobs,
        "missing": missing if len(sizes) >= ENOUGH_SEEDS else [],
        "counts": dict(sorted(counts.items())),
    }
    small = (medians[0] < LEAST_EVENTS or medians[1] < LEAST_CONVERSATIONS or medians[2] < LEAST_STAGES) and len(
        sizes
    ) >= ENOUGH_SEEDS
    result["passed"] = not (violations or result["missing"] or small)
    return result


def run_many(seeds: int, *, first: int = 0, jobs: int = 0) -> dict[str, Any]:
    """Run seeds `first ..` in `jobs` processes (0: one a core)."""
    jobs = jobs or os.cpu_count() or 1
    jobs = max(1, min(jobs, seeds))
    bounds = [first + seeds * n // jobs for n in range(jobs + 1)]
    start_s = time.monotonic()
    commands = [["--part", str(low), str(high - low)] for low, high in pairwise(bounds)]
    parts = [
        Part(got["counts"], [tuple(size) for size in got["sizes"]], got["violations"], got["crashes"])
        for got in _children(commands, jobs)
    ]
    return summary(parts, time.monotonic() - start_s, jobs)


class Caught(NamedTuple):
    """How a mutant fared: the invariant's words ("": it got through), and in how many seeds the core only crashed."""

    name: str
    found: str
    seeds: int
    crashes: int


def try_mutant(mutant: Mutant) -> Caught:
    """Run a mutant in this process, which has that core from now on."""
    mutants.install(mutant)
    changed = importlib.import_module(__name__)  # with all that it stands on
    crashes = 0
    first = WITNESSES.get(mutant.name, 0)
    for count, seed in enumerate([first, *(seed for seed in range(mutant.seeds) if seed != first)], 1):
        part = changed.run_seeds(seed, 1)
        crashes += part.crashes
        if part.violations and not part.crashes:
            return Caught(mutant.name, part.violations[0], count, crashes)
    return Caught(mutant.name, "", mutant.seeds, crashes)


def run_mutants(jobs: int = 0) -> list[Caught]:
    """Run every mutant, each in a process of its own."""
    commands = [["--mutant", str(number)] for number in range(len(mutants.MUTANTS))]
    return [Caught(**got) for got in _children(commands, jobs or os.cpu_count() or 1)]


def _children(commands: Sequence[Sequence[str]], jobs: int) -> list[dict[str, Any]]:
    """Run this tool as children, `jobs` at once; the JSON object that each prints, in order."""
    results: dict[int, dict[str, Any]] = {}
    waiting = list(enumerate(commands))
    running: list[tuple[int, subprocess.Popen[str]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, arguments = waiting.pop(0)
                running.append((number, _start(arguments)))
            number, child = running.pop(0)
            out, _ = child.communicate()
            if child.returncode != 0:
                raise RuntimeError(f"{TOOL.name} {' '.join(commands[number])} ended with {child.returncode}")
            results[number] = json.loads(out)
    finally:
        for _, child in running:
            child.kill()
            child.communicate()
    return [results[number] for number in range(len(commands))]


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join(part for part in (str(mutants.ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, "-P", str(TOOL), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(mutants.ROOT),
        env=environ,
    )
