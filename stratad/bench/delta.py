"""``stratactl bench delta``: what a conversation's next turn costs, and what conversations with one beginning take.

A capture of a whole conversation and one of its next turn (the conversation with 1 % more tokens) take turns, and so do
a restore of everything and one into a slot that still holds all but the last 1 %. The daemon has ``shuttle.reuse`` =
``verified``: what it finds stored, or in the rows, it has digested. Then many conversations are captured that begin
with the same tokens and go on each in its own way. Every byte that is restored is compared, by the benchmark itself.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from ipc.messages import Captured, Restored
from shm.rows import pack_numbers
from stratad.bench.cards import Cards, chosen_cards
from stratad.bench.copy_layout import BLOCK_TOKENS, PLAIN_LAYOUTS, TOKEN_BYTES, PlaneForm
from stratad.bench.copy_rounds import CopySource, add_device_argument, open_on, timed, wants_cuda
from stratad.bench.cpu_engine import NAMESPACE
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_high
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "delta"
SUMMARY: Final = "the next turn, and conversations that begin alike, against whole captures and restores"
_MIB: Final = 1 << 20
_CUDA_PLANES, _CPU_PLANES = 64, 4
# A whole image, the conversation's former one and what its next turn adds.
_BUDGET_IMAGES: Final = 2.25
# How few of the conversations that share a beginning are restored and compared.
_COMPARED: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_device_argument(parser)
    parser.add_argument("--stages", type=int, default=1, help="stages on the one device (default: 1)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the conversation (default: 100000)")
    parser.add_argument(
        "--planes",
        type=int,
        help=f"planes of a stage, {TOKEN_BYTES} bytes a token each (default: {_CUDA_PLANES} on cuda, {_CPU_PLANES} on "
        "cpu)",
    )
    parser.add_argument(
        "--conversations", type=int, default=100, help="that share a beginning (default: 100; 0: this part is left out)"
    )
    parser.add_argument("--prefix-tokens", type=int, default=32_768, help="tokens that they share (default: 32768)")
    parser.add_argument("--tail-tokens", type=int, default=608, help="tokens of each one's own (default: 608)")
    parser.add_argument("--layouts", nargs="+", choices=PLAIN_LAYOUTS, default=list(PLAIN_LAYOUTS), help="default: all")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    on_cuda = wants_cuda(args)
    if args.planes is None:
        args.planes = _CUDA_PLANES if on_cuda else _CPU_PLANES
    for option in ("stages", "planes", "tokens", "prefix_tokens", "tail_tokens", "conversations"):
        least = {"tokens": 200 * BLOCK_TOKENS, "conversations": 0}.get(option, 1)
        if getattr(args, option) < least:
            what = f"--{option.replace('_', '-')} must be at least {least}, got {getattr(args, option)}"
            raise CommandError(ExitCode.USAGE, "bad_value", what)
        if option.endswith("tokens"):  # whole blocks, so that all of a row is compared
            setattr(args, option, -(-getattr(args, option) // BLOCK_TOKENS) * BLOCK_TOKENS)
    bench = _Bench(args, chosen_cards("1", on_cuda=on_cuda))
    rows: list[Row] = []
    with PrivateDaemon.start(bench.settings()) as daemon:
        progress(f"{NAME}: waiting for the daemon's workers")
        client, _ = daemon.connect()
        with client:
            for number in range(args.rounds + 1):
                for layout in args.layouts:
                    progress(f"{NAME}: {layout}, " + (f"round {number} of {args.rounds}" if number else "warm-up"))
                    found = bench.turns(client, layout, number)
                    if number:  # the first touches memory that nobody had used before
                        found += bench.shared(client, layout, number)
                        rows += [{"round": number - 1, "layout": layout, **row} for row in found]
            welcome = client.welcome
    settings: Row = {
        "device": "cuda" if on_cuda else "cpu",
        "device_name": bench.device_name,
        "stages": args.stages,
        "tokens": args.tokens,
        "new_tokens": bench.new_tokens,
        "image_bytes": bench.slot_bytes * args.stages,
        "conversations": args.conversations,
        "prefix_tokens": args.prefix_tokens,
        "tail_tokens": args.tail_tokens,
    }
    return Report(NAME, rows, _ratios(rows, args), settings, welcome)


class _Bench:
    """What all rounds share."""

    def __init__(self, args: argparse.Namespace, card: Cards) -> None:
        self._args = args
        self._card = card
        self._token_bytes = args.planes * TOKEN_BYTES
        self.device_name = ""
        # Whole blocks, since an engine with blocks writes its next tokens into new ones.
        self.new_tokens = -(-args.tokens // 100 // BLOCK_TOKENS) * BLOCK_TOKENS
        self.slot_bytes = args.tokens * self._token_bytes

    def settings(self) -> dict[str, str]:
        """The daemon's configuration."""
        args = self._args
        shared_tokens = args.prefix_tokens + args.conversations * (args.tail_tokens + 512) if args.conversations else 0
        budget_bytes = max(_BUDGET_IMAGES * self.slot_bytes, 1.1 * shared_tokens * self._token_bytes) * args.stages
        return {
            "daemon.devices": self._card.devices,
            "ram.budget_bytes": str(int(budget_bytes) + 64 * _MIB),
            "shuttle.reuse": "verified",
        }

    def _open(self, client: Client, layout: str, tokens: int) -> AbstractContextManager[CopySource]:
        """An engine of one slot with room for so many tokens."""
        # A slot is a whole number of chunks, the last one partly filled.
        slot_bytes = (tokens + client.welcome.chunk_tokens) * self._token_bytes
        form = PlaneForm(self._args.planes)
        return open_on(client, layout, self._args.stages, slot_bytes, 1, cards=self._card, form=form)

    def turns(self, client: Client, layout: str, number: int) -> list[Row]:
        """One round of captures and restores."""
        rows: list[Row] = []
        with self._open(client, layout, self._args.tokens) as source:
            self.device_name = source.device_name
            source.refill(number)
            arms: list[Callable[[Client, CopySource], list[Row]]] = [self._capture_full, self._capture_next]
            ways = [self._restore_full, self._restore_resident]
            if number % 2:  # neither always has the warmer caches
                arms.reverse()
                ways.reverse()
            for arm in (*arms, *ways):
                rows += arm(client, source)
            client.drop(NAMESPACE, "turns")
        return rows

    def _tokens(self, count: int, conversation: int = 0) -> bytes:
        return pack_numbers(range(conversation << 24, (conversation << 24) + count))

    def _capture_full(self, client: Client, source: CopySource) -> list[Row]:
        tokens = self._tokens(self._args.tokens, 1)  # of a conversation that nobody has seen
        reply, seconds = timed(lambda: source.capture_tokens("full", tokens))
        client.drop(NAMESPACE, "full")
        return [_row("capture", seconds, reply)]

    def _capture_next(self, _client: Client, source: CopySource) -> list[Row]:
        before = self._args.tokens - self.new_tokens
        source.capture_tokens("turns", self._tokens(before))
        reply, seconds = timed(lambda: source.capture_tokens("turns", self._tokens(self._args.tokens)))
        return [_row("next_turn", seconds, reply)]

    def _restore_full(self, _client: Client, source: CopySource) -> list[Row]:
        source.wipe_from(0)
        reply, seconds = timed(lambda: source.restore_first("turns"))
        return [self._compared(source, _row("restore", seconds, reply))]

    def _restore_resident(self, _client: Client, source: CopySource) -> list[Row]:
        held = self._args.tokens - self.new_tokens
        source.wipe_from(held)
        reply, seconds = timed(lambda: source.restore_first("turns", held))
        return [self._compared(source, _row("restore_resident", seconds, reply))]

    def _compared(self, source: CopySource, row: Row) -> Row:
        """The row of a restore, once its bytes are compared. What the slot has beyond the conversation was wiped."""
        source.rewrite(self._args.tokens, 0)
        _check_exact(source, f"{row['op']}")
        return row

    def shared(self, client: Client, layout: str, number: int) -> list[Row]:
        """Capture conversations that begin alike, and look what they take."""
        args = self._args
        if not args.conversations:
            return []
        prefix = args.prefix_tokens
        tokens = prefix + args.tail_tokens
        with self._open(client, layout, tokens) as source:
            source.refill(number)
            before = client.stats().published_bytes
            for which in range(args.conversations):
                source.rewrite(prefix, which)
                source.capture_tokens(f"shared {which}", self._own(prefix, which))
            stored_bytes = client.stats().published_bytes - before
            for which in range(0, args.conversations, max(1, args.conversations // _COMPARED)):
                source.rewrite(prefix, which)
                source.wipe_from(0)
                source.restore_first(f"shared {which}")
                source.rewrite(tokens, 0)
                _check_exact(source, f"conversation {which} of those that begin alike")
            for which in range(args.conversations):
                client.drop(NAMESPACE, f"shared {which}")
        ideal_bytes = (prefix + args.conversations * args.tail_tokens) * self._token_bytes * args.stages
        return [
            {
                "op": "shared",
                "bytes": ideal_bytes,
                "stored_bytes": stored_bytes,
                "over_ideal": round(stored_bytes / ideal_bytes, 4),
                "byte_exact": True,
            }
        ]

    def _own(self, prefix: int, which: int) -> bytes:
        """The beginning that all share, and a conversation's own tokens."""
        own = prefix + which * self._args.tail_tokens
        return pack_numbers(range(prefix)) + pack_numbers(range(own, own + self._args.tail_tokens))


def _check_exact(source: CopySource, what: str) -> None:
    if not source.is_exact():
        raise CommandError(
            ExitCode.FAILED, "damaged", f"the restored bytes of {what} are not the captured", "report it"
        )


def _row(op: str, seconds: float, reply: Captured | Restored) -> Row:
    lane_s = max((stage.lane_s for stage in reply.stages), default=0.0)
    return {
        "op": op,
        "bytes": reply.image_bytes,
        "moved_bytes": sum(stage.moved_bytes for stage in reply.stages),
        "skipped_bytes": sum(stage.skipped_bytes for stage in reply.stages),
        "seconds": round(seconds, 5),
        "digest_s": round(max((stage.digest_s for stage in reply.stages), default=0.0), 5),
        "copy_s": round(max((stage.copy_s for stage in reply.stages), default=0.0), 5),
        "lane_s": round(lane_s, 5),
        # What the daemon, the wire and the client add to the slowest lane.
        "overhead_s": round(seconds - lane_s, 5),
        "byte_exact": True,
    }


def _ratios(rows: list[Row], args: argparse.Namespace) -> Row:
    """Each over the whole operation of the same round and layout; the worst of them counts."""

    def over(op: str, whole: str) -> list[float]:
        found: list[float] = []
        for number in range(args.rounds):
            for layout in args.layouts:
                (mine,) = column(rows, "seconds", round=number, layout=layout, op=op)
                (all_of_it,) = column(rows, "seconds", round=number, layout=layout, op=whole)
                found.append(round(mine / all_of_it, 4))
        return found

    return {
        "next_turn_over_full": worst_high(over("next_turn", "capture")),
        "restore_resident_over_full": worst_high(over("restore_resident", "restore")),
        "shared_bytes_over_ideal": worst_high(column(rows, "over_ideal", op="shared")),
    }
