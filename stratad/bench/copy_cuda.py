"""The copy benchmarks' engine on a GPU; its limits are page-locked copies, and a plain copy on the device."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

import torch

from stratad.bench.copy_baselines import baselines
from stratad.bench.copy_engine import CopyEngine, register
from stratad.bench.copy_layout import PLANES, CopyShape, copy_shape
from stratad.client import Client, Engine
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError
from stratad.pools import StagePool

_DEVICE: Final = "cuda:0"
# Long enough for the link to reach its rate, small enough to stay page-locked beside the shuttles.
_LIMIT_BYTES: Final = 1 << 30
_LIMIT_REPEATS: Final = 3
# One product takes a millisecond or two of all multiprocessors.
_MATRIX: Final = 8192
_WAITING: Final = 4


def first_gpu_uuid() -> str:
    """UUID of the card that torch counts first, as the daemon's configuration spells it.

    Raises:
        CommandError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        what = f"torch {torch.__version__} sees no GPU"
        raise CommandError(
            ExitCode.FAILED, "foreign_device", what, "see `stratactl doctor --torch`, or use --device cpu"
        )
    return f"GPU-{torch.cuda.get_device_properties(_DEVICE).uuid}"


class CudaSource(CopyEngine):
    """Stages on the first GPU. Owns their tensors, a copy of their bytes on the GPU, and a page-locked buffer."""

    def __init__(self, engine: Engine, pools: Sequence[torch.Tensor], shape: CopyShape) -> None:
        super().__init__(engine, shape)
        self.device_name: Final = torch.cuda.get_device_name(_DEVICE)
        self._pools = list(pools)
        self._expected = [torch.empty_like(pool) for pool in pools]
        self._first_rows = torch.tensor(shape.row_numbers(0), device=_DEVICE)
        self._last_rows = torch.tensor(shape.row_numbers(-1), device=_DEVICE)
        self._page_locked = torch.empty(min(_LIMIT_BYTES, shape.pool_bytes), dtype=torch.uint8, pin_memory=True)

    @classmethod
    def register(  # noqa: PLR0917 - what `open_source` is told
        cls, client: Client, layout: str, stages: int, slot_bytes: int, slots: int, planes: int = PLANES
    ) -> Self:
        """Allocate the pools and register them. Raises what the client raises."""
        shape = copy_shape(layout, slot_bytes, client.welcome.chunk_tokens, slots, planes)
        pools = [torch.empty(shape.pool_bytes, dtype=torch.uint8, device=_DEVICE) for _ in range(stages)]
        torch.cuda.synchronize()
        stage_pools = [StagePool(_DEVICE, shape.layout, pool) for pool in pools]
        return cls(register(client, stage_pools), pools, shape)

    def refill(self, number: int) -> None:
        """New random bytes in every pool, the last slot's like the first's."""
        torch.manual_seed(number)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            expected.random_(0, 256)
            # A plane at a time: the rows of all at once would need the room of another slot.
            for plane in expected.view(self._shape.axes).unbind():
                plane[self._last_rows] = plane[self._first_rows]
            pool.copy_(expected)
        torch.cuda.synchronize()

    def wipe(self) -> None:
        """Zero the last slot of every pool."""
        for pool in self._pools:
            for plane in pool.view(self._shape.axes).unbind():
                plane[self._last_rows] = 0
        torch.cuda.synchronize()

    def rewrite(self, first_token: int, number: int) -> None:
        """See `CopySource`."""
        torch.manual_seed(number)
        rows = torch.tensor(self._shape.rows_from(first_token), device=_DEVICE)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            planes, held = expected.view(self._shape.axes).unbind(), pool.view(self._shape.axes).unbind()
            for plane, into in zip(planes, held, strict=True):
                plane[rows] = torch.randint(0, 256, (len(rows), plane.shape[1]), dtype=torch.uint8, device=_DEVICE)
                into[rows] = plane[rows]
        torch.cuda.synchronize()

    def wipe_from(self, first_token: int) -> None:
        """See `CopySource`."""
        rows = torch.tensor(self._shape.rows_from(first_token), device=_DEVICE)
        for pool in self._pools:
            for plane in pool.view(self._shape.axes).unbind():
                plane[rows] = 0
        torch.cuda.synchronize()

    def is_exact(self) -> bool:
        """Compare every byte on the GPU."""
        pairs = zip(self._pools, self._expected, strict=True)
        return all(torch.equal(pool, expected) for pool, expected in pairs)

    def limit_bytes_per_s(self, direction: str) -> float:
        """The fastest of a few plain copies: the limit is what the device can do, not what it did once."""
        if direction == "direct":
            size_bytes = self._shape.slot_bytes
            # As for the host's: the bytes are those that the pools hold already.
            copies = [
                (expected[:size_bytes], pool[:size_bytes])
                for expected, pool in zip(self._expected, self._pools, strict=True)
            ]
            return self.image_bytes / min(_timed_copies(copies) for _ in range(_LIMIT_REPEATS))
        on_device = self._expected[0][: self._page_locked.numel()]
        # The bytes that a copy to the device writes are those it holds already.
        self._page_locked.copy_(on_device)
        source, destination = on_device, self._page_locked
        if direction == "restore":
            source, destination = destination, source
        best_s = min(_timed_copies([(source, destination)]) for _ in range(_LIMIT_REPEATS))
        return self._page_locked.numel() / best_s

    def baselines(self) -> dict[str, float]:
        """See `CopySource`."""
        return baselines(self._pools[0], self._shape, self._page_locked)

    @contextmanager
    def saturated(self) -> Iterator[None]:
        """Matrix products on a stream of a thread of its own, a few of them always waiting."""
        ending = threading.Event()
        thread = threading.Thread(target=_multiply_until, args=(ending,))
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def close(self) -> None:
        """Unregister and give all memory back."""
        self.unregister()
        self._pools.clear()
        self._expected.clear()
        self._first_rows = self._last_rows = self._page_locked = torch.empty(0)
        torch.cuda.empty_cache()


def _multiply_until(ending: threading.Event) -> None:
    stream = torch.cuda.Stream(_DEVICE)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=_DEVICE)
        result = torch.empty_like(one)
        waiting: list[torch.cuda.Event] = []
        while not ending.is_set():
            torch.mm(one, one, out=result)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            waiting.append(event)
            if len(waiting) > _WAITING:
                waiting.pop(0).synchronize()
    stream.synchronize()


def _timed_copies(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Seconds of copies from the first of each pair to the second, by the device's own clock."""
    start, end = _timing_event(), _timing_event()
    start.record()
    for source, destination in copies:
        destination.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
