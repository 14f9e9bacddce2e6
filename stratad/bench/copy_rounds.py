"""What the benchmarks of copies have in common: an engine on one device or several, a daemon of their own, and their
rounds.

Every destination is wiped before and compared after, by the benchmark itself.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ipc.messages import Captured, Copied, Restored
from stratad.bench.cards import Cards, add_cards_argument, chosen_cards
from stratad.bench.copy_layout import LAYOUTS, PLAIN_LAYOUTS, USUAL_FORM, PlaneForm, largest_slot_bytes
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_low
from stratad.client import Client, Ticket
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

PATHS: Final = ("auto", "gather", "engine")
_MIB: Final = 1 << 20
_CUDA_DEFAULT_MIB: Final = 4096
_CPU_DEFAULT_MIB: Final = 256
# The image itself, the one that a later operation makes beside it, and room for granules.
_BUDGET_IMAGES: Final = 2.25
ReplyT = TypeVar("ReplyT", bound=Captured | Restored | Copied)


class CopySource(Protocol):
    """An engine with its stages, and what a benchmark needs to know of the devices that they lie on.

    Its pools hold one slot or several of the same size. Sources are the first slot, destinations the last.
    """

    @property
    def image_bytes(self) -> int:
        """Bytes of one slot over all stages."""
        ...

    @property
    def device_name(self) -> str:
        """Name of the device for people."""
        ...

    def refill(self, number: int, *, alike: bool = True) -> None:
        """Make all bytes unlike those of any round before, and remember them; `alike`: the last slot's are the same as
        the first's.
        """
        ...

    def capture(self, conversation: str) -> Captured:
        """Capture the first slot, and wait for the published image."""
        ...

    def restore(self, conversation: str) -> Restored:
        """Restore over the last slot, and wait for verified rows."""
        ...

    def begin_capture(self, conversation: str, slot: int = 0) -> Ticket[Captured]:
        """Start to capture a slot; each slot has tokens of its own."""
        ...

    def begin_restore(self, conversation: str, slot: int = -1) -> Ticket[Restored]:
        """Start to restore over a slot (-1: the last)."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of a slot."""
        ...

    def capture_tokens(self, conversation: str, tokens: bytes) -> Captured:
        """Capture the first slot's first rows as what these (packed) tokens have, and wait for the image."""
        ...

    def restore_first(self, conversation: str, resident_tokens: int = 0) -> Restored:
        """Restore over the first slot, which may still hold so many tokens, and wait for verified rows."""
        ...

    def rewrite(self, first_token: int, number: int) -> None:
        """Other bytes in the first slot from a token on (which begins a row), to be remembered in place of those."""
        ...

    def wipe_from(self, first_token: int) -> None:
        """Zero the first slot from a token on (which begins a row), and wait until that is done."""
        ...

    def slot_direct(self) -> Copied:
        """Copy the first slot to the last on the device, and wait."""
        ...

    def slot_to(self) -> Captured:
        """Copy the first slot into its transit image, and wait."""
        ...

    def slot_from(self) -> Restored:
        """Copy the first slot's transit image into the last slot, and wait for verified rows."""
        ...

    def wipe(self, *, first: bool = False) -> None:
        """Zero all bytes of the last slot, or of the first, and wait until that is done."""
        ...

    def is_exact(self) -> bool:
        """Whether all pools, sources and destinations alike, hold the remembered bytes."""
        ...

    def limit_bytes_per_s(self, direction: str) -> float:
        """Plain copy, in the direction of ``capture`` or of ``restore``, or on the device (``direct``); of several
        cards all at once, in sum.

        Call it after `refill`: what it writes are the remembered bytes.
        """
        ...

    def baselines(self) -> dict[str, float]:
        """Bytes a second of other ways to bring the first slot's rows to the host."""
        ...

    def saturated(self) -> AbstractContextManager[None]:
        """Keep the device's multiprocessors busy with something else."""
        ...

    def close(self) -> None:
        """Unregister, and give all memory back."""
        ...


@dataclass(frozen=True)
class CopyBench:
    """One benchmark: `measure` makes the rows of one round, `ratios` names the ratio of each ``op`` in them."""

    name: str
    slots: int
    measure: Callable[[Client, CopySource, int], list[Row]]
    ratios: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that these benchmarks share."""
    add_device_argument(parser)
    add_cards_argument(parser, "1")
    parser.add_argument("--stages", type=int, help="stages, on the cards in turn (default: one a card)")
    parser.add_argument(
        "--image-mib", type=int, help=f"default: {_CUDA_DEFAULT_MIB} on cuda, {_CPU_DEFAULT_MIB} on cpu"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        help=f"rows-*, heads-*: shuffled rows of that size (default: all on cuda, {', '.join(PLAIN_LAYOUTS)} on cpu)",
    )
    parser.add_argument(
        "--paths",
        nargs="+",
        choices=PATHS,
        default=["auto"],
        help="values of copy.path, each with a daemon of its own; on cuda only (default: auto)",
    )
    parser.add_argument("--slice-mib", type=int, help="copy.slice_bytes and copy.staging_bytes (default: the daemon's)")
    parser.add_argument(
        "--saturate",
        action="store_true",
        help="keep the GPU busy with matrix products while its copies are measured; on cuda only",
    )


def run_rounds(bench: CopyBench, args: argparse.Namespace, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    on_cuda = wants_cuda(args)
    cards = chosen_cards(args.cards, on_cuda=on_cuda)
    if args.image_mib is None:
        args.image_mib = _CUDA_DEFAULT_MIB if on_cuda else _CPU_DEFAULT_MIB
    if args.stages is None:
        args.stages = len(cards.names)
    for option, value in (("--stages", args.stages), ("--image-mib", args.image_mib), ("--slice-mib", args.slice_mib)):
        if value is not None and value < 1:
            raise CommandError(ExitCode.USAGE, "bad_value", f"{option} must be at least 1, got {value}")
    if not on_cuda and (args.saturate or args.paths != ["auto"]):
        raise CommandError(ExitCode.USAGE, "bad_value", "--paths and --saturate are for --device cuda")
    layouts = args.layouts or (LAYOUTS if on_cuda else PLAIN_LAYOUTS)
    # All cards have an arena of the same size: with room for as many stages as lie on the fullest.
    stages_a_card = -(-args.stages // len(cards.names))
    image_bytes = stages_a_card * len(cards.names) * largest_slot_bytes(layouts, args.image_mib * _MIB // args.stages)
    settings = {
        "daemon.devices": cards.devices,
        "ram.budget_bytes": str(int(_BUDGET_IMAGES * image_bytes) + 64 * _MIB * len(cards.names)),
    }
    if args.slice_mib is not None:
        settings |= dict.fromkeys(("copy.staging_bytes", "copy.slice_bytes"), f"{args.slice_mib}MiB")
    rows: list[Row] = []
    device_name, welcome = "", None
    for path in args.paths:
        with PrivateDaemon.start({**settings, "copy.path": path}) as daemon:
            progress(f"{bench.name}: waiting for the daemon's workers")
            client, _ = daemon.connect()
            with client:
                found, device_name = _rounds(bench, client, args, layouts, cards=cards, progress=progress)
                rows += [{**row, "path": path} for row in found] if on_cuda else found
                welcome = client.welcome
    assert welcome is not None, "there is one path at least"
    report_settings: Row = {
        "device": "cuda" if on_cuda else "cpu",
        "device_name": device_name,
        "cards": list(cards.names),
        "stages": args.stages,
        "image_bytes": args.image_mib * _MIB,
        "saturated": args.saturate,
    }
    ratios: Row = {name: worst_low(column(rows, "over_limit", op=op)) for name, op in bench.ratios.items()}
    return Report(bench.name, rows, ratios, report_settings, welcome)


def _rounds(
    bench: CopyBench,
    client: Client,
    args: argparse.Namespace,
    layouts: Sequence[str],
    *,
    cards: Cards,
    progress: Progress,
) -> tuple[list[Row], str]:
    """All rounds with one daemon, and the device's name. Each layout has its turn in each round; one at a time holds
    device memory.
    """
    rows: list[Row] = []
    device_name = ""
    slot_bytes = args.image_mib * _MIB // args.stages
    for number in range(args.rounds + 1):
        for layout in layouts:
            when = f"round {number} of {args.rounds}" if number else "warm-up"
            progress(f"{bench.name}: {layout}, {when}")
            with open_on(client, layout, args.stages, slot_bytes, bench.slots, cards=cards) as source:
                device_name = source.device_name
                with source.saturated() if args.saturate else nullcontext():
                    found = bench.measure(client, source, number)
            if number:  # the first touches memory that nobody had used before
                rows += [{"round": number - 1, "layout": layout, **row} for row in found]
    return rows, device_name


def wants_cuda(args: argparse.Namespace) -> bool:
    """Whether a GPU is to be measured."""
    return args.device == "cuda" or (args.device == "auto" and Path("/proc/driver/nvidia/gpus").is_dir())


def add_device_argument(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """``--device``."""
    said = "cuda if there is one" if default == "auto" else default
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default=default, help=f"default: {said}")


@contextmanager
def open_on(
    client: Client,
    layout: str,
    stages: int,
    slot_bytes: int,
    slots: int,
    *,
    cards: Cards,
    form: PlaneForm = USUAL_FORM,
) -> Iterator[CopySource]:
    """An engine with its stages on the cards in turn; torch is loaded only here, and only for GPUs."""
    source: CopySource
    if cards.on_cuda:
        from stratad.bench.copy_cuda import CudaSource  # noqa: PLC0415 - see above

        source = CudaSource.register(client, layout, stages, slot_bytes, slots, cards=cards.names, form=form)
    else:
        from stratad.bench.copy_cpu import CpuSource  # noqa: PLC0415 - loads numpy

        source = CpuSource.register(client, layout, stages, slot_bytes, slots, cards=cards.names, form=form)
    try:
        yield source
    finally:
        source.close()


def timed(call: Callable[[], ReplyT]) -> tuple[ReplyT, float]:
    """What a call gives, and how many seconds it took."""
    started_s = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started_s


def copy_row(
    source: CopySource, op: str, limit_bytes_per_s: float, seconds: float, reply: Captured | Restored | Copied
) -> Row:
    """The row of one operation whose destination was compared."""
    rate = source.image_bytes / seconds
    lane_s = max((stage.lane_s for stage in reply.stages), default=0.0)
    return {
        "op": op,
        "bytes": source.image_bytes,
        "moved_bytes": sum(stage.moved_bytes for stage in reply.stages),
        "seconds": round(seconds, 5),
        "gb_per_s": round(rate / 1e9, 3),
        "limit_gb_per_s": round(limit_bytes_per_s / 1e9, 3),
        "over_limit": round(rate / limit_bytes_per_s, 4),
        "lane_over_limit": round(source.image_bytes / lane_s / limit_bytes_per_s, 4) if lane_s else None,
        "digest_s": round(max((stage.digest_s for stage in reply.stages), default=0.0), 5),
        "copy_s": round(max((stage.copy_s for stage in reply.stages), default=0.0), 5),
        "lane_s": round(lane_s, 5),
        # What the daemon, the wire and the client add to the slowest lane; part of it the worker saw.
        "overhead_s": round(seconds - lane_s, 5),
        "event_s": round(max((stage.event_s for stage in reply.stages), default=0.0), 5),
        "queue_s": round(max((stage.queue_s for stage in reply.stages), default=0.0), 5),
        "byte_exact": True,
    }
