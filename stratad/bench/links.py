"""The links to the cards by themselves: page-locked copies without a daemon, on one card and on all of them at once.

What all reach at once against the sum of what each reaches alone says how much of a shortfall is the host's memory (or
what the cards share on the way to it), and not the daemon's. ``python -m stratad.bench.links --json`` prints that; on
`cpu` plain copies stand for it, and the report says that they are simulated.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from stratad import topology
from stratad.bench.cards import Cards, add_cards_argument, chosen_cards
from stratad.ctl.output import CommandError, JsonObject, table

CAPTURE: Final = "capture"
RESTORE: Final = "restore"
BOTH: Final = "both"
WAYS: Final[Mapping[str, tuple[str, ...]]] = {CAPTURE: (CAPTURE,), RESTORE: (RESTORE,), BOTH: (CAPTURE, RESTORE)}
_MIB: Final = 1 << 20
_REPEATS: Final = 3


class Links(Protocol):
    """Plain copies between the cards and memory near them."""

    def seconds(self, cards: Sequence[int], way: str) -> list[float]:
        """`size_bytes` a chosen card and direction, all at once: the seconds of each card, by its own clock, and, last,
        those of all together by the host's.
        """
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that are copied at a time on each card, in each direction."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


def rates(links: Links, cards: Sequence[int], way: str, repeats: int = _REPEATS) -> list[float]:
    """Bytes a second of each card, and of all together: the best of some tries, as a limit is what can be done."""
    tries = [links.seconds(cards, way) for _ in range(repeats)]
    moved = links.size_bytes * len(WAYS[way])
    best = [moved / min(column) for column in zip(*tries, strict=True)]
    best[-1] *= len(cards)
    return best


def survey(links: Links, names: Sequence[str], ways: Sequence[str] = tuple(WAYS)) -> list[JsonObject]:
    """One row a card and way, and one (`card` ``all``) for all at once: `alone` and `at_once`, in GB/s."""
    rows: list[JsonObject] = []
    everyone = range(len(names))
    for way in ways:
        alone = [rates(links, [card], way)[0] for card in everyone]
        *each, total = rates(links, everyone, way)
        for name, one, among in zip(names, alone, each, strict=True):
            rows.append({"card": name, "way": way, **_speeds(one, among)})
        rows.append({"card": "all", "way": way, **_speeds(sum(alone), total)})
    return rows


def _speeds(alone: float, at_once: float) -> JsonObject:
    return {
        "alone_gb_per_s": round(alone / 1e9, 3),
        "at_once_gb_per_s": round(at_once / 1e9, 3),
        "at_once_over_alone": round(at_once / alone, 4),
    }


def open_links(cards: Cards, size_bytes: int) -> Links:
    """Buffers for copies of so many bytes."""
    if cards.on_cuda:
        from stratad.bench.links_cuda import CudaLinks  # noqa: PLC0415 - loads torch

        return CudaLinks(cards, size_bytes)
    return CpuLinks(len(cards.names), size_bytes)


class CpuLinks:
    """Plain copies on as many threads as there are `cpu` devices."""

    def __init__(self, count: int, size_bytes: int) -> None:
        import numpy as np  # noqa: PLC0415 - a benchmark on GPUs needs none

        self._numpy = np
        self.size_bytes: Final = size_bytes
        self._pairs = [(np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)) for _ in range(count)]

    def seconds(self, cards: Sequence[int], way: str) -> list[float]:
        """See `Links`."""
        took_s = [0.0] * len(cards)
        ready = threading.Barrier(len(cards) + 1)

        def copy(place: int, card: int) -> None:
            source, target = self._pairs[card]
            ready.wait()
            started_s = time.perf_counter()
            for _ in WAYS[way]:
                self._numpy.copyto(target, source)
            took_s[place] = time.perf_counter() - started_s

        threads = [threading.Thread(target=copy, args=pair) for pair in enumerate(cards)]
        for thread in threads:
            thread.start()
        ready.wait()
        started_s = time.perf_counter()
        for thread in threads:
            thread.join()
        return [*took_s, time.perf_counter() - started_s]

    def close(self) -> None:
        """See `Links`."""
        self._pairs.clear()


@contextmanager
def near(pci: str) -> Iterator[None]:
    """Run this thread on the CPUs near a PCI device, so that what it touches first lies there too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, topology.near_cpus(pci, sorted(before)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m stratad.bench.links", description="plain copies to every card")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    add_cards_argument(parser, "all")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of one copy (default: 1024)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last")
    chosen = parser.parse_args(arguments)
    if chosen.mib < 1:
        parser.error(f"--mib must be at least 1, got {chosen.mib}")
    try:
        cards = chosen_cards(chosen.cards, on_cuda=chosen.device == "cuda")
    except CommandError as exc:
        print(f"{exc.what} [{exc.code}]", file=sys.stderr)
        return int(exc.exit_code)
    links = open_links(cards, chosen.mib * _MIB)
    try:
        rows = survey(links, cards.names)
    finally:
        links.close()
    data: JsonObject = {
        "cards": list(cards.names),
        "uuids": list(cards.uuids),
        "simulated": not cards.on_cuda,
        "bytes": chosen.mib * _MIB,
        "rows": list(rows),
    }
    head = list(rows[0])
    print("\n".join(table(head, ([str(row[key]) for key in head] for row in rows))))
    if chosen.json:
        print(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
