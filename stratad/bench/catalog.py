"""``stratactl bench catalog``: what the catalog's own bookkeeping costs when it is large.

The real `Catalog`, in this process and with no daemon: it is filled with images, each capture of which takes the path
of a real one (victims, extents, binding, publishing, the journal's record), and then asked. Bytes of chunks do not
exist; their digests are made up. Garbage collection is off, as it is in the supervisor.
"""

import argparse
import gc
import os
import random
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from ipc.codec import encode
from ipc.messages import DIGEST_BYTES, PROTOCOL_VERSION, Welcome
from shm.extent import GRANULE_BYTES
from shm.layout import Plane, StageLayout, one_group
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, percentile, worst_high
from stratad.core import room
from stratad.core.arena import Arena
from stratad.core.catalog import Catalog
from stratad.core.images import Draft, Image, Scope, StageDigests, needed_granules
from stratad.core.records import image_record
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError, Json
from stratad.version import commit, package_hash

NAME: Final = "catalog"
SUMMARY: Final = "look-ups, captures and evictions in a catalog of a million chunks, without a daemon"
_CHUNK_TOKENS: Final = 256
_ROW_BYTES: Final = GRANULE_BYTES // _CHUNK_TOKENS
_SHUTTLE_BYTES: Final = 1 << 30
_FIELDS: Final = {"model": "m", "revision": "1", "dtype": "bf16", "kv_format": "rows", "engine_build": "1"}
_LAYOUT: Final = StageLayout(one_group([Plane(0, _ROW_BYTES, _ROW_BYTES, 1 << 24)]), chunk_tokens=_CHUNK_TOKENS)
# Conversations begin alike, as those of one application do: with one of so many openings.
_OPENINGS: Final = 100
_S_TO_US: Final = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--chunks", type=int, default=1_000_000, help="chunks of all images (default: 1000000)")
    parser.add_argument("--images", type=int, default=100_000, help="images (default: 100000)")
    parser.add_argument("--stages", type=int, default=2, help="stages of each image (default: 2)")
    parser.add_argument("--lookups", type=int, default=20_000, help="look-ups a round (default: 20000)")
    parser.add_argument("--captures", type=int, default=200, help="captures of each size a round (default: 200)")
    parser.add_argument("--small", type=int, default=16, help="chunks a stage of a small image (default: 16)")
    parser.add_argument("--large", type=int, default=256, help="chunks a stage of a large image (default: 256)")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Fill one catalog, then run all rounds on it. Raises `CommandError`."""
    for name in ("images", "stages", "lookups", "captures"):
        if getattr(args, name) < 1:
            what = f"--{name} must be at least 1, got {getattr(args, name)}"
            raise CommandError(ExitCode.USAGE, "bad_value", what)
    per_stage = args.chunks // (args.images * args.stages)
    if per_stage < 1 or min(args.small, args.large) < 1:
        raise CommandError(ExitCode.USAGE, "bad_value", "every image needs at least one chunk a stage", "more --chunks")
    collecting = gc.isenabled()
    gc.disable()
    try:
        filled = _Filled(args.stages, per_stage, args.images)
        progress(f"catalog: {args.images} images of {args.stages} x {per_stage} chunks")
        rows: list[Row] = [filled.fill()]
        for number in range(args.rounds):
            progress(f"catalog: round {number + 1} of {args.rounds}")
            rows += [{"round": number, **row} for row in filled.measure(args)]
        filled.catalog.validate()
    finally:
        if collecting:
            gc.enable()
    settings: dict[str, Json] = {
        "chunks": args.chunks,
        "images": args.images,
        "stages": args.stages,
        "lookups": args.lookups,
        "captures": args.captures,
        "chunks_per_stage": {"filled": per_stage, "small": args.small, "large": args.large},
    }
    return Report(NAME, rows, _ratios(rows), settings, _own_welcome(), split_by="arm")


class _Filled:
    """A catalog and what was put into it."""

    def __init__(self, stages: int, per_stage: int, images: int) -> None:
        self.workers: Final = tuple(f"cpu:{stage}" for stage in range(stages))
        self.scope: Final = Scope("bench", "f", self.workers)
        self._per_stage = per_stage
        self._images = images
        self._random = random.Random(1)  # noqa: S311 - not for secrets
        self._digests = 0
        self._made = 0
        granules = per_stage * images
        self.catalog: Final = Catalog(granules * stages * GRANULE_BYTES, 2 * images)
        usable = _SHUTTLE_BYTES // GRANULE_BYTES - 1
        for worker in self.workers:
            arena = self.catalog.arenas[worker] = Arena()
            for index in range(-(-granules // usable)):
                left = min(usable, granules - index * usable)
                arena.add_shuttle(index, (left + 1) * GRANULE_BYTES)
        openings = [self._some_tokens(_CHUNK_TOKENS // 2) for _ in range(_OPENINGS)]
        self._openings: Final = openings

    def _some_tokens(self, count: int) -> bytes:
        return struct.pack(f"<{count}I", *self._random.choices(range(50_000), k=count))

    def draft(self, per_stage: int, conversation: str = "") -> Draft:
        """A capture of a conversation that begins like others: a new one, unless it is named."""
        self._made += 1
        count = per_stage * _CHUNK_TOKENS
        opening = self._random.choice(self._openings)
        # Random bytes are tokens as well; what counts is that no two go on alike.
        tokens = opening + self._random.randbytes(4 * count - len(opening))
        spans = tuple(_LAYOUT.chunks(count))
        name = conversation or f"conversation-{self._made}"
        return Draft(self.scope, name, tokens, count, (), None, (spans,) * len(self.workers))

    def answers(self, draft: Draft) -> list[StageDigests]:
        """Digests that no chunk had before."""
        found: list[StageDigests] = []
        for spans in draft.spans:
            first = self._digests
            self._digests += len(spans)
            digests = tuple(n.to_bytes(DIGEST_BYTES, "little") for n in range(first, self._digests))
            found.append(StageDigests("xxh3-128", b"bench-id", digests))
        return found

    def fill(self) -> Row:
        """Capture as many images as there are to be."""
        process = psutil.Process(os.getpid())
        before_bytes = process.memory_info().rss
        started_s = time.perf_counter()
        for _ in range(self._images):
            draft = self.draft(self._per_stage)
            self.capture(draft, self.answers(draft))
        seconds = time.perf_counter() - started_s
        grown = process.memory_info().rss - before_bytes
        return {
            "round": 0,
            "arm": "fill",
            "images": len(self.catalog.images),
            "chunks": len(self.catalog.chunks),
            "fill_s": round(seconds, 3),
            "rss_bytes": grown,
            "bytes_per_image": grown // self._images,
            "token_bytes_per_image": self.catalog.token_bytes // self._images,
        }

    def capture(self, draft: Draft, answers: Sequence[StageDigests]) -> int:
        """All of a capture's bookkeeping; how many images made room for it."""
        catalog = self.catalog
        victims = room.victims(catalog, draft, needed_granules(draft))
        for victim in victims:
            catalog.drop(victim)
        staged = catalog.stage(draft)
        image, _ = catalog.bind(staged, answers, 1.0)
        encode(image_record(image, 1000, _FIELDS))
        catalog.publish(image)
        return len(victims)

    def measure(self, args: argparse.Namespace) -> list[Row]:
        """One round."""
        images = list(self.catalog.images.values())
        rows = [
            _timed("lookup_hit", args.lookups, self._hits(images), self._lookup),
            _timed("lookup_longer", args.lookups, self._longer(images), self._lookup),
            _timed("lookup_miss", args.lookups, lambda: self._some_tokens(_CHUNK_TOKENS), self._lookup),
        ]
        # The catalog is full: each of these makes its own room, of images that are as large, large or small.
        for arm, per_stage in (("capture_small", args.small), ("capture_large", args.large)):
            rows.append(self._captures(arm, per_stage, args.captures))
        rows.append(self._captures("capture_again", args.small, args.captures, again=True))
        self._refill()
        return rows

    def _lookup(self, tokens: bytes) -> None:
        self.catalog.lookup(self.scope, tokens)

    def _hits(self, images: Sequence[Image]) -> "Callable[[], bytes]":
        return lambda: self._random.choice(images).tokens

    def _longer(self, images: Sequence[Image]) -> "Callable[[], bytes]":
        return lambda: self._random.choice(images).tokens + b"\x01\x00\x00\x00" * _CHUNK_TOKENS

    def _captures(self, arm: str, per_stage: int, count: int, *, again: bool = False) -> Row:
        seconds: list[float] = []
        victims = 0
        chunks = per_stage * len(self.workers)
        for number in range(count):
            draft = self.draft(per_stage, f"again-{number % 8}" if again else "")
            answers = self.answers(draft)
            started_s = time.thread_time()  # there is no wait in it: what others do meanwhile is none of its cost
            victims += self.capture(draft, answers)
            seconds.append(time.thread_time() - started_s)
        row = _fields(arm, seconds)
        median_s = percentile(seconds, 50)
        row["evicted"] = victims
        row["us_per_chunk"] = None if median_s is None else round(median_s * _S_TO_US / chunks, 3)
        return row

    def _refill(self) -> None:
        """As many chunks as before, in images of the usual size."""
        while (
            self.catalog.used_bytes + len(self.workers) * self._per_stage * GRANULE_BYTES <= self.catalog.budget_bytes
        ):
            draft = self.draft(self._per_stage)
            self.capture(draft, self.answers(draft))


def _timed(arm: str, count: int, make: Callable[[], bytes], do: Callable[[bytes], None]) -> Row:
    seconds: list[float] = []
    for _ in range(count):
        given = make()
        started_s = time.perf_counter()
        do(given)
        seconds.append(time.perf_counter() - started_s)
    return _fields(arm, seconds)


def _fields(arm: str, seconds: Sequence[float]) -> Row:
    row: Row = {"arm": arm, "n": len(seconds)}
    for percent in (50, 99):
        value = percentile(seconds, percent)
        row[f"p{percent}_us"] = None if value is None else round(value * _S_TO_US, 2)
    row["max_us"] = round(max(seconds) * _S_TO_US, 2)
    return row


def _ratios(rows: Sequence[Row]) -> Row:
    lookups = [value for kind in ("hit", "longer", "miss") for value in column(rows, "p99_us", arm=f"lookup_{kind}")]
    medians = [value for kind in ("hit", "longer", "miss") for value in column(rows, "p50_us", arm=f"lookup_{kind}")]
    small, large = (column(rows, "us_per_chunk", arm=f"capture_{size}") for size in ("small", "large"))
    return {
        "lookup_p99_us": worst_high(lookups),
        "lookup_p50_us": worst_high(medians),
        "capture_us_per_chunk": worst_high([*small, *large]),
        # 1: what a capture costs grows as its chunks do, in a catalog of whatever size.
        "us_per_chunk_large_over_small": worst_high(
            [round(one / other, 3) for one, other in zip(large, small, strict=True)]
        ),
        "bytes_per_image": worst_high(column(rows, "bytes_per_image", arm="fill")),
    }


def _own_welcome() -> Welcome:
    """Who measured: this process is all that there is."""
    own, revision = package_hash(), commit()
    return Welcome(0, PROTOCOL_VERSION, b"", os.getpid(), "", own, revision, 0, _CHUNK_TOKENS, True, False)
