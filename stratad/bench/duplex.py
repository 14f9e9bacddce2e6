"""``stratactl bench duplex``: a capture and a restore at once against each of them alone.

An engine of two slots: the first is captured while another conversation is restored into the second, one stage a card.
On GPUs the links' own limit, page-locked copies in both directions at once, is measured in each round too; on `cpu` the
two lanes of a worker are each held to a simulated link. Everything that was moved is compared: what was restored where
it lies, what was captured by restoring it.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final

from stratad.bench.cards import add_cards_argument, chosen_cards
from stratad.bench.copy_layout import LAYOUTS, PLAIN_LAYOUTS, PlaneForm, largest_slot_bytes
from stratad.bench.copy_rounds import CopySource, add_device_argument, open_on, timed, wants_cuda
from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.links import BOTH, CAPTURE, RESTORE, Links, open_links, rates
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_low
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "duplex"
SUMMARY: Final = "a capture and a restore at once against one way alone"
_MIB: Final = 1 << 20
_CUDA_DEFAULT_MIB: Final = 2048
_CPU_DEFAULT_MIB: Final = 32
_LINK_BYTES: Final = 512 * _MIB
# The image that is restored, the one that is captured beside it, and room for granules.
_BUDGET_IMAGES: Final = 2.25
# On cpu: pieces so large that the simulated link alone is what takes time.
_CPU_FORM: Final = PlaneForm(1, 16 * 1024)
_KEPT, _FRESH = "kept", "fresh"
_FIRST, _SECOND = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_device_argument(parser)
    add_cards_argument(parser, "1")
    parser.add_argument(
        "--stage-mib", type=int, help=f"MiB a stage (default: {_CUDA_DEFAULT_MIB} on cuda, {_CPU_DEFAULT_MIB} on cpu)"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help=f"on cpu only {', '.join(PLAIN_LAYOUTS)} (default: {LAYOUTS[0]})",
    )
    parser.add_argument(
        "--link-bytes-per-s", type=float, default=200e6, help="on cpu: rate of each lane's link (default: 2e8)"
    )


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    on_cuda = wants_cuda(args)
    cards = chosen_cards(args.cards, on_cuda=on_cuda)
    if args.stage_mib is None:
        args.stage_mib = _CUDA_DEFAULT_MIB if on_cuda else _CPU_DEFAULT_MIB
    if args.stage_mib < 1:
        raise CommandError(ExitCode.USAGE, "bad_value", f"--stage-mib must be at least 1, got {args.stage_mib}")
    if not on_cuda and args.layout not in PLAIN_LAYOUTS:  # whose rows would not have the size in their name
        what = f"--layout {args.layout} is for --device cuda; on cpu: {', '.join(PLAIN_LAYOUTS)}"
        raise CommandError(ExitCode.USAGE, "bad_value", what)
    form = PlaneForm() if on_cuda else _CPU_FORM
    stages, stage_bytes = len(cards.names), largest_slot_bytes((args.layout,), args.stage_mib * _MIB, form)
    daemon_settings = {
        "daemon.devices": cards.devices,
        "cpu_device.link_bytes_per_s": "0" if on_cuda else f"{args.link_bytes_per_s:g}",
        "ram.budget_bytes": str(int(_BUDGET_IMAGES * stages * stage_bytes) + 64 * _MIB * stages),
    }
    rows: list[Row] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon.start(daemon_settings))
        client = stack.enter_context(daemon.connect()[0])
        links = stack.enter_context(closing(open_links(cards, _LINK_BYTES))) if on_cuda else None
        source = stack.enter_context(open_on(client, args.layout, stages, stage_bytes, 2, cards=cards, form=form))
        for number in range(args.rounds + 1):
            progress(f"duplex: round {number} of {args.rounds}" if number else "duplex: warm-up")
            found = _round(client, source, number)
            if number:  # the first touches memory that nobody had used before
                rows += [{"round": number - 1, **row, **_limit(links, stages, str(row["way"]))} for row in found]
        welcome = client.welcome
        settings: Row = {
            "device": "cuda" if on_cuda else "cpu",
            "device_name": source.device_name,
            "simulated": not on_cuda,
            "cards": list(cards.names),
            "layout": args.layout,
            "image_bytes": source.image_bytes,
        }
    if not on_cuda:
        settings["link_bytes_per_s"] = args.link_bytes_per_s
    notes = {"both_over_one_way": "bytes a second of both at once over those of the faster one alone"}
    return Report(NAME, rows, _ratios(rows, args.rounds), settings, welcome, ratio_notes=notes)


def _limit(links: Links | None, cards: int, way: str) -> Row:
    """What all links together can do without a daemon."""
    if links is None:
        return {}
    return {"limit_gb_per_s": round(rates(links, range(cards), way)[-1] / 1e9, 3)}


def _round(client: Client, source: CopySource, number: int) -> list[Row]:
    """One way alone, the other alone, both at once; the order changes from round to round."""
    source.refill(number, alike=False)
    source.begin_capture(_KEPT, _SECOND).result()
    source.wipe()
    arms = [CAPTURE, RESTORE, BOTH]
    shift = number % len(arms)
    seconds = {way: _measure(client, source, way) for way in [*arms[shift:], *arms[:shift]]}
    client.drop(NAMESPACE, _KEPT)
    return [_row(source, way, seconds[way]) for way in arms]


def _measure(client: Client, source: CopySource, way: str) -> float:
    """Seconds of one arm; afterwards every byte is where it was, seen by the benchmark itself."""
    source.wipe()
    if way == CAPTURE:
        _, took_s = timed(lambda: source.begin_capture(_FRESH, _FIRST).result())
        source.begin_restore(_KEPT, _SECOND).result()
    elif way == RESTORE:
        _, took_s = timed(lambda: source.begin_restore(_KEPT, _SECOND).result())
    else:
        started_s = time.perf_counter()
        capture = source.begin_capture(_FRESH, _FIRST)
        restore = source.begin_restore(_KEPT, _SECOND)
        capture.result()
        restore.result()
        took_s = time.perf_counter() - started_s
    if way != RESTORE:
        source.wipe(first=True)
        source.begin_restore(_FRESH, _FIRST).result()
        client.drop(NAMESPACE, _FRESH)
    if not source.is_exact():
        what = f"{way}: a slot does not hold what was captured from it"
        raise CommandError(ExitCode.FAILED, "damaged", what, "report it")
    return took_s


def _row(source: CopySource, way: str, seconds: float) -> Row:
    moved_bytes = source.image_bytes * (2 if way == BOTH else 1)
    return {
        "way": way,
        "bytes": moved_bytes,
        "seconds": round(seconds, 5),
        "gb_per_s": round(moved_bytes / seconds / 1e9, 3),
        "byte_exact": True,
    }


def _ratios(rows: Sequence[Row], rounds: int) -> Row:
    """Of each round the bytes a second of both over those of the faster way alone; the least of them counts."""
    ratios: list[float] = []
    for number in range(rounds):
        (both_s,) = column(rows, "seconds", round=number, way=BOTH)
        alone_s = [
            *column(rows, "seconds", round=number, way=CAPTURE),
            *column(rows, "seconds", round=number, way=RESTORE),
        ]
        ratios.append(round(2 * min(alone_s) / both_s, 4))
    found: Row = {"both_over_one_way": worst_low(ratios)}
    limits = column(rows, "limit_gb_per_s", way=BOTH)
    if limits:
        reached = column(rows, "gb_per_s", way=BOTH)
        found["both_over_limit"] = worst_low([round(a / b, 4) for a, b in zip(reached, limits, strict=True)])
    return found
