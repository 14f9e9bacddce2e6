"""``stratactl bench copy``: how near capture and restore come to the plain copy that the hardware allows.

On a GPU the limit is a page-locked copy of the same direction, on `cpu` devices a plain copy between two buffers; it is
measured in the same run, next to each capture and restore. Every destination is wiped before and compared after.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ipc.messages import Captured, Restored
from stratad.bench.daemon import PrivateDaemon
from stratad.bench.progress import Progress
from stratad.bench.report import Report, Row, column, worst_low
from stratad.client import Client
from stratad.ctl.connection import Target
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError

NAME: Final = "copy"
SUMMARY: Final = "capture and restore against the plain copy limit of the same device"
ResultT = TypeVar("ResultT")
LAYOUTS: Final = ("slot", "paged")
_MIB: Final = 1 << 20
_CUDA_DEFAULT_MIB: Final = 4096
_CPU_DEFAULT_MIB: Final = 256
# The image itself, the one that a later capture makes beside it, and room for granules.
_BUDGET_IMAGES: Final = 2.25


class CopySource(Protocol):
    """An engine whose stages lie on one device, with what this benchmark needs to know of that device."""

    @property
    def image_bytes(self) -> int:
        """Bytes of one image over all stages."""
        ...

    @property
    def device_name(self) -> str:
        """Name of the device for people."""
        ...

    def refill(self, number: int) -> None:
        """Make the source bytes unlike those of any round before, and remember them."""
        ...

    def capture(self, conversation: str) -> Captured:
        """Capture, and wait for the published image."""
        ...

    def restore(self, conversation: str) -> Restored:
        """Restore over the source, and wait for verified rows."""
        ...

    def wipe(self) -> None:
        """Zero all destination bytes, and wait until that is done."""
        ...

    def is_exact(self) -> bool:
        """Whether the destination holds the remembered bytes."""
        ...

    def limit_bytes_per_s(self, direction: str) -> float:
        """Plain copy of this device: ``capture`` or ``restore`` direction."""
        ...

    def close(self) -> None:
        """Unregister, and give all memory back."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--stages", type=int, default=1, help="stages on the one device (default: 1)")
    parser.add_argument(
        "--image-mib", type=int, help=f"default: {_CUDA_DEFAULT_MIB} on cuda, {_CPU_DEFAULT_MIB} on cpu"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")


def run(args: argparse.Namespace, _target: Target, progress: Progress) -> Report:
    """Run all rounds. Raises `CommandError` and what the client raises."""
    on_cuda = args.device == "cuda" or (args.device == "auto" and Path("/proc/driver/nvidia/gpus").is_dir())
    image_bytes = (args.image_mib or (_CUDA_DEFAULT_MIB if on_cuda else _CPU_DEFAULT_MIB)) * _MIB
    settings = {
        "daemon.devices": _first_gpu() if on_cuda else "cpu:1",
        "ram.budget_bytes": str(int(_BUDGET_IMAGES * image_bytes) + 64 * _MIB),
    }
    rows: list[Row] = []
    device_name = ""
    with PrivateDaemon.start(settings) as daemon:
        progress("copy: waiting for the daemon's workers")
        client, _ = daemon.connect()
        with client:
            # Each layout has its turn in each round; one at a time holds device memory.
            for number in range(args.rounds + 1):
                for layout in args.layouts:
                    progress(f"copy: {layout}, " + (f"round {number} of {args.rounds}" if number else "warm-up"))
                    with _source(client, layout, args.stages, image_bytes, on_cuda=on_cuda) as source:
                        found = _round(client, source, number)
                        device_name = source.device_name
                    if number:  # the first touches memory that nobody had used before
                        rows += [{"round": number - 1, "layout": layout, **row} for row in found]
            welcome = client.welcome
    report_settings: Row = {
        "device": "cuda" if on_cuda else "cpu",
        "device_name": device_name,
        "stages": args.stages,
        "image_bytes": image_bytes,
    }
    return Report(NAME, rows, _ratios(rows), report_settings, welcome)


def _first_gpu() -> str:
    """The daemon serves only the card that is measured: a budget is shared out over all cards it serves."""
    from stratad.bench.copy_cuda import first_gpu_uuid  # noqa: PLC0415 - loads torch

    return first_gpu_uuid()


@contextmanager
def _source(client: Client, layout: str, stages: int, image_bytes: int, *, on_cuda: bool) -> Iterator[CopySource]:
    """An engine of the asked kind; torch is loaded only here, and only for a GPU."""
    source: CopySource
    if on_cuda:
        from stratad.bench.copy_cuda import CudaSource  # noqa: PLC0415 - see above

        source = CudaSource.register(client, layout, stages, image_bytes)
    else:
        from stratad.bench.copy_cpu import CpuSource  # noqa: PLC0415 - loads numpy

        source = CpuSource.register(client, layout, stages, image_bytes)
    try:
        yield source
    finally:
        source.close()


def _round(client: Client, source: CopySource, number: int) -> list[Row]:
    """One capture and one restore, each beside its limit."""
    conversation = "conversation"
    source.refill(number)
    limits = {direction: source.limit_bytes_per_s(direction) for direction in ("capture", "restore")}
    captured, capture_s = _timed(lambda: source.capture(conversation))
    source.wipe()
    restored, restore_s = _timed(lambda: source.restore(conversation))
    exact = source.is_exact()
    client.drop("bench", conversation)
    if not exact:
        raise CommandError(ExitCode.FAILED, "damaged", "the restored bytes differ from the captured", "report it")
    timed = (("capture", captured, capture_s), ("restore", restored, restore_s))
    return [_row(source, op, limits[op], seconds, reply) for op, reply, seconds in timed]


def _row(source: CopySource, op: str, limit_bytes_per_s: float, seconds: float, reply: Captured | Restored) -> Row:
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
        "digest_s": round(max((stage.digest_s for stage in reply.stages), default=0.0), 5),
        "copy_s": round(max((stage.copy_s for stage in reply.stages), default=0.0), 5),
        "lane_s": round(lane_s, 5),
        # What the daemon, the wire and the client add to the slowest lane.
        "overhead_s": round(seconds - lane_s, 5),
        "byte_exact": True,
    }


def _timed(call: Callable[[], ResultT]) -> tuple[ResultT, float]:
    started_s = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started_s


def _ratios(rows: Sequence[Row]) -> Row:
    return {f"{op}_over_limit": worst_low(column(rows, "over_limit", op=op)) for op in ("capture", "restore")}
