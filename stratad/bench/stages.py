"""``stratactl bench stages``: how much sooner all stages are done when they copy at once.

Two daemons of the same build take turns, one with ``copy.parallel = false``. On GPUs there is one stage a card, and the
image is by default that of a conversation of 100,000 tokens of a model with 32 layers and 8 K/V heads of 128 in bf16;
in each round the links are measured without a daemon too, each alone and all at once, and the lane of each stage is
held against both.

On one host with few cores the stages of `cpu` devices would share the memory's bandwidth, which a real split does not:
each card has its own link. So there every stage is held to a simulated link, inside its copy; all bytes move and are
compared.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Final

from ipc.messages import Captured, Restored
from stratad.bench.cards import ALL, Cards, add_cards_argument, chosen_cards
from stratad.bench.copy_layout import PLAIN_LAYOUTS, PlaneForm, largest_slot_bytes
from stratad.bench.copy_rounds import CopySource, add_device_argument, open_on, timed, wants_cuda
from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.links import CAPTURE, RESTORE, Links, open_links, survey
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_low
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "stages"
SUMMARY: Final = "parallel against serial stages: one a card, or with a simulated link a stage"
_MIB: Final = 1 << 20
_OPS: Final = (CAPTURE, RESTORE)
_CPU_STAGE_MIB: Final = 32
# Pieces so large that the link alone is what takes time.
_CPU_FORM: Final = PlaneForm(1, 16 * 1024)
# 32 layers, K and V, 8 heads of 128 in bf16: 128 KiB a token over all stages.
_MODEL_PLANES: Final = 64
_MODEL_TOKEN_BYTES: Final = 2048
_MODEL_TOKENS: Final = 391 * 256  # whole chunks
_LINK_BYTES: Final = 512 * _MIB
# One image, as it is dropped before the next: and each stage's chunks leave some room in its shuttles.
_BUDGET_IMAGES: Final = 1.125
_SHUTTLE_BYTES: Final = 256 * _MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_device_argument(parser, "cpu")
    add_cards_argument(parser, "all")
    parser.add_argument("--stages", type=int, help="stages, on the cards in turn (default: one a card)")
    parser.add_argument(
        "--link-bytes-per-s", type=float, default=200e6, help="on cpu: rate of each stage's link (default: 2e8)"
    )
    parser.add_argument(
        "--layout", choices=PLAIN_LAYOUTS, default=PLAIN_LAYOUTS[0], help=f"default: {PLAIN_LAYOUTS[0]}"
    )
    parser.add_argument("--tokens", type=int, default=_MODEL_TOKENS, help=f"on cuda (default: {_MODEL_TOKENS})")
    parser.add_argument(
        "--stage-mib", type=int, help=f"MiB a stage (default: {_CPU_STAGE_MIB} on cpu, --tokens on cuda)"
    )


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    plan = _Plan(args)
    rows: list[Row] = []
    with ExitStack() as stack:
        arms = {name: _Arm(stack, plan, parallel=name == "parallel") for name in ("serial", "parallel")}
        links = stack.enter_context(closing(open_links(plan.cards, _LINK_BYTES))) if plan.cards.on_cuda else None
        for number in range(args.rounds):
            progress(f"stages: round {number + 1} of {args.rounds}")
            limits = _limits(links, plan)
            rows += [{"round": number, "kind": "limit", **row} for row in limits]
            # The order changes from round to round, so that neither arm always has the warmer caches.
            names = list(arms) if number % 2 == 0 else list(reversed(arms))
            for name in names:
                rows += [{"round": number, "arm": name, **row} for row in arms[name].measure(number, limits)]
        welcome = arms["parallel"].client.welcome
        settings: Row = {
            "simulated": not plan.cards.on_cuda,
            "cards": list(plan.cards.names),
            "stages": plan.stages,
            "layout": args.layout,
            "tokens": arms["parallel"].tokens,
            "bytes_per_stage": arms["parallel"].stage_bytes,
        }
    if not plan.cards.on_cuda:
        settings["link_bytes_per_s"] = args.link_bytes_per_s
    marked: list[Row] = [{**row, "simulated": not plan.cards.on_cuda} for row in rows]
    return Report(NAME, marked, _ratios(rows, args.rounds), settings, welcome, "kind", ratio_notes=_NOTES)


_NOTES: Final[Mapping[str, str]] = {
    "at_once_over_alone": "of the links alone: below 1 the cards share something, such as the host's memory",
    "capture_link_over_limit": "slowest lane of a stage against its card's link, all cards at once",
    "restore_link_over_limit": "the same",
}


class _Plan:
    """What is measured where."""

    def __init__(self, args: argparse.Namespace) -> None:
        if (args.stages is not None and args.stages < 1) or args.tokens < 1:
            raise CommandError(ExitCode.USAGE, "bad_value", "--stages and --tokens must be at least 1")
        if args.stage_mib is not None and args.stage_mib < 1:
            raise CommandError(ExitCode.USAGE, "bad_value", f"--stage-mib must be at least 1, got {args.stage_mib}")
        on_cuda = wants_cuda(args)
        one_each = args.cards == ALL and args.stages is not None and not on_cuda
        self.cards: Final[Cards] = chosen_cards(str(args.stages) if one_each else args.cards, on_cuda=on_cuda)
        self.stages: Final[int] = len(self.cards.names) if args.stages is None else args.stages
        self.layout: Final[str] = args.layout
        self.link_bytes_per_s: Final[float] = 0.0 if on_cuda else args.link_bytes_per_s
        planes = max(_MODEL_PLANES // self.stages, 1)
        self.form: Final = PlaneForm(planes, _MODEL_TOKEN_BYTES) if on_cuda else _CPU_FORM
        if args.stage_mib is not None or not on_cuda:
            wanted_bytes = (args.stage_mib or _CPU_STAGE_MIB) * _MIB
        else:
            wanted_bytes = args.tokens * planes * _MODEL_TOKEN_BYTES
        self.stage_bytes: Final = largest_slot_bytes((self.layout,), wanted_bytes, self.form)

    @property
    def settings(self) -> dict[str, str]:
        """Of a daemon that holds one image."""
        image_bytes = self.stages * self.stage_bytes
        spare_bytes = len(self.cards.names) * _SHUTTLE_BYTES if self.cards.on_cuda else 0
        return {
            "daemon.devices": self.cards.devices,
            "cpu_device.link_bytes_per_s": f"{self.link_bytes_per_s:g}",
            "ram.budget_bytes": str(int(_BUDGET_IMAGES * image_bytes) + spare_bytes),
        }


class _Arm:
    """One of the two daemons, with its engine."""

    def __init__(self, stack: ExitStack, plan: _Plan, *, parallel: bool) -> None:
        daemon = stack.enter_context(PrivateDaemon.start({**plan.settings, "copy.parallel": str(parallel).lower()}))
        self.client: Final[Client] = stack.enter_context(daemon.connect()[0])
        if self.client.welcome.parallel is not parallel:
            raise CommandError(ExitCode.FAILED, "bad_value", "the daemon did not take copy.parallel", "report it")
        opened = open_on(self.client, plan.layout, plan.stages, plan.stage_bytes, 1, cards=plan.cards, form=plan.form)
        self._source: Final[CopySource] = stack.enter_context(opened)
        self._places = plan.cards.of_stages(plan.stages)
        self.stage_bytes: Final = self._source.image_bytes // plan.stages
        self.tokens: Final = self.stage_bytes // (plan.form.planes * plan.form.token_bytes)
        rate = plan.link_bytes_per_s
        # Stages of one card share its link.
        turns = -(-plan.stages // len(plan.cards.names)) if parallel else plan.stages
        self._least_s = self.stage_bytes / rate * turns if rate else None
        self.measure(-1, ())  # first touch of the shuttles and pools is no part of the measurement

    def measure(self, number: int, limits: Sequence[Row]) -> list[Row]:
        """Capture, wipe, restore, compare."""
        source, conversation = self._source, "conversation"
        source.refill(number + 2)
        captured, capture_s = timed(lambda: source.capture(conversation))
        source.wipe()
        restored, restore_s = timed(lambda: source.restore(conversation))
        if not source.is_exact():
            raise CommandError(ExitCode.FAILED, "damaged", "the restored bytes differ from the captured", "report it")
        self.client.drop(NAMESPACE, conversation)
        rows: list[Row] = []
        for op, reply, seconds in ((CAPTURE, captured, capture_s), (RESTORE, restored, restore_s)):
            slowest_s = max(stage.lane_s for stage in reply.stages)
            row: Row = {
                "kind": "operation",
                "op": op,
                "seconds": round(seconds, 5),
                "bytes": source.image_bytes,
                "gb_per_s": round(source.image_bytes / seconds / 1e9, 3),
                "slowest_lane_s": round(slowest_s, 5),
                "byte_exact": True,
            }
            if self._least_s is not None:
                row["link_limit_s"] = round(self._least_s, 4)
            rows += [row, *self._lanes(op, reply, limits)]
        return rows

    def _lanes(self, op: str, reply: Captured | Restored, limits: Sequence[Row]) -> list[Row]:
        """What each stage's lane made of its card's link."""
        found = {str(limit["card"]): limit for limit in limits if limit["way"] == op}
        rows: list[Row] = []
        for outcome in reply.stages if found else ():
            place = self._places[outcome.stage]
            rate = outcome.moved_bytes / outcome.lane_s / 1e9
            row: Row = {
                "kind": "lane",
                "op": op,
                "stage": outcome.stage,
                "card": place,
                "moved_bytes": outcome.moved_bytes,
                "lane_s": round(outcome.lane_s, 5),
                "copy_s": round(outcome.copy_s, 5),
                "digest_s": round(outcome.digest_s, 5),
                "gb_per_s": round(rate, 3),
            }
            for name in ("alone", "at_once"):
                (limit,) = column([found[place]], f"{name}_gb_per_s")
                row[f"over_{name}"] = round(rate / limit, 4)
            rows.append(row)
        return rows


def _limits(links: Links | None, plan: _Plan) -> list[Row]:
    """What the links can do without a daemon; of simulated ones it is known."""
    if links is not None:
        return survey(links, plan.cards.names, _OPS)
    return []


def _ratios(rows: Sequence[Row], rounds: int) -> Row:
    """Serial over parallel of each round; the least of them counts."""
    by_op: dict[str, list[float]] = {CAPTURE: [], RESTORE: []}
    for op, ratios in by_op.items():
        for number in range(rounds):
            (serial_s,) = column(rows, "seconds", round=number, op=op, arm="serial")
            (parallel_s,) = column(rows, "seconds", round=number, op=op, arm="parallel")
            ratios.append(round(serial_s / parallel_s, 3))
    found: Row = {
        "parallel_over_serial": worst_low([*by_op[CAPTURE], *by_op[RESTORE]]),
        "capture_parallel_over_serial": worst_low(by_op[CAPTURE]),
        "restore_parallel_over_serial": worst_low(by_op[RESTORE]),
    }
    if column(rows, "at_once_over_alone"):
        found["at_once_over_alone"] = worst_low(column(rows, "at_once_over_alone", card="all"))
        for op in _OPS:
            lanes = [row for row in rows if row["kind"] == "lane" and row["arm"] == "parallel" and row["op"] == op]
            found[f"{op}_link_over_limit"] = worst_low(column(lanes, "over_at_once"))
            found[f"{op}_link_over_alone"] = worst_low(column(lanes, "over_alone"))
    return found
