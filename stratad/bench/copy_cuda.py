"""The copy benchmarks' engine on GPUs; its limits are page-locked copies (on several cards: at once), and a plain copy
on the device.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

import torch

from stratad import topology
from stratad.bench.copy_baselines import baselines
from stratad.bench.copy_engine import CopyEngine, register
from stratad.bench.copy_layout import USUAL_FORM, CopyShape, PlaneForm, copy_shape
from stratad.bench.links import near
from stratad.bench.links_cuda import timing_event
from stratad.client import Client, Engine
from stratad.pools import StagePool

# Long enough for the link to reach its rate, small enough to stay page-locked beside the shuttles.
_LIMIT_BYTES: Final = 1 << 30
_LIMIT_REPEATS: Final = 3
# One product takes a millisecond or two of all multiprocessors.
_MATRIX: Final = 8192
_WAITING: Final = 4


class CudaSource(CopyEngine):
    """Stages on one GPU or several. Owns their tensors, a copy of their bytes beside each, and, for the limits,
    page-locked buffers.
    """

    def __init__(self, engine: Engine, pools: Sequence[torch.Tensor], shape: CopyShape) -> None:
        super().__init__(engine, shape)
        self._pools = list(pools)
        # In the order of the stages, those that have one: a card without a stage is of no interest.
        self._cards: Final = tuple(dict.fromkeys(str(pool.device) for pool in pools))
        self.device_name: Final = torch.cuda.get_device_name(self._cards[0])
        self._expected = [torch.empty_like(pool) for pool in pools]
        self._first_rows = {card: torch.tensor(shape.row_numbers(0), device=card) for card in self._cards}
        self._last_rows = {card: torch.tensor(shape.row_numbers(-1), device=card) for card in self._cards}
        self._page_locked: list[torch.Tensor] = []

    @classmethod
    def register(
        cls,
        client: Client,
        layout: str,
        stages: int,
        slot_bytes: int,
        slots: int,
        *,
        cards: Sequence[str],
        form: PlaneForm = USUAL_FORM,
    ) -> Self:
        """Allocate the pools and register them, on the cards in turn. Raises what the client raises."""
        shape = copy_shape(layout, slot_bytes, client.welcome.chunk_tokens, slots, form)
        places = [cards[stage % len(cards)] for stage in range(stages)]
        pools = [torch.empty(shape.pool_bytes, dtype=torch.uint8, device=place) for place in places]
        _synchronize(places)
        stage_pools = [StagePool(place, shape.layout, pool) for place, pool in zip(places, pools, strict=True)]
        return cls(register(client, stage_pools), pools, shape)

    def refill(self, number: int, *, alike: bool = True) -> None:
        """New random bytes in every pool; `alike`: the last slot's like the first's."""
        for stage, (pool, expected) in enumerate(zip(self._pools, self._expected, strict=True)):
            card = str(pool.device)
            with torch.cuda.device(card):  # whose generator is seeded
                torch.cuda.manual_seed(number * len(self._pools) + stage)
                expected.random_(0, 256)
                # A plane at a time: the rows of all at once would need the room of another slot.
                for plane in expected.view(self._shape.axes).unbind() if alike else ():
                    plane[self._last_rows[card]] = plane[self._first_rows[card]]
                pool.copy_(expected)
        _synchronize(self._cards)

    def wipe(self, *, first: bool = False) -> None:
        """Zero the last slot of every pool, or the first."""
        rows = self._first_rows if first else self._last_rows
        for pool in self._pools:
            for plane in pool.view(self._shape.axes).unbind():
                plane[rows[str(pool.device)]] = 0
        _synchronize(self._cards)

    def rewrite(self, first_token: int, number: int) -> None:
        """See `CopySource`."""
        torch.manual_seed(number)
        numbers = self._shape.rows_from(first_token)
        for pool, expected in zip(self._pools, self._expected, strict=True):
            rows = torch.tensor(numbers, device=pool.device)
            planes, held = expected.view(self._shape.axes).unbind(), pool.view(self._shape.axes).unbind()
            for plane, into in zip(planes, held, strict=True):
                size = (len(numbers), plane.shape[1])
                plane[rows] = torch.randint(0, 256, size, dtype=torch.uint8, device=pool.device)
                into[rows] = plane[rows]
        _synchronize(self._cards)

    def wipe_from(self, first_token: int) -> None:
        """See `CopySource`."""
        numbers = self._shape.rows_from(first_token)
        for pool in self._pools:
            rows = torch.tensor(numbers, device=pool.device)
            for plane in pool.view(self._shape.axes).unbind():
                plane[rows] = 0
        _synchronize(self._cards)

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
        if not self._page_locked:
            self._page_locked = [_near_card(card, min(_LIMIT_BYTES, self._shape.pool_bytes)) for card in self._cards]
        on_cards = [self._first_of(card)[: buffer.numel()] for card, buffer in self._buffers()]
        copies = list(zip(on_cards, self._page_locked, strict=True))
        # The bytes that a copy to the device writes are those it holds already.
        for source, destination in copies:
            destination.copy_(source)
        if direction == "restore":
            copies = [(destination, source) for source, destination in copies]
        best_s = min(_timed_copies(copies) for _ in range(_LIMIT_REPEATS))
        return sum(buffer.numel() for buffer in self._page_locked) / best_s

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self._cards, self._page_locked, strict=True))

    def _first_of(self, card: str) -> torch.Tensor:
        """The remembered bytes of the first stage on a card."""
        return next(expected for expected in self._expected if str(expected.device) == card)

    def baselines(self) -> dict[str, float]:
        """See `CopySource`."""
        return baselines(self._pools[0], self._shape, self._page_locked[0])

    @contextmanager
    def saturated(self) -> Iterator[None]:
        """Matrix products on a stream of every card, each fed by a thread: a few of them always waiting."""
        ending = threading.Event()
        threads = [threading.Thread(target=_multiply_until, args=(card, ending)) for card in self._cards]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Unregister and give all memory back."""
        self.unregister()
        for held in (self._pools, self._expected, self._page_locked, self._first_rows, self._last_rows):
            held.clear()
        torch.cuda.empty_cache()


def _near_card(card: str, size_bytes: int) -> torch.Tensor:
    """Page-locked memory that a thread near the card has touched first."""
    pci = {gpu.uuid: gpu.pci for gpu in topology.find_gpus()}
    with near(pci.get(f"GPU-{torch.cuda.get_device_properties(card).uuid}", "")):
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).zero_()


def _synchronize(cards: Sequence[str]) -> None:
    for card in dict.fromkeys(cards):
        torch.cuda.synchronize(card)


def _multiply_until(card: str, ending: threading.Event) -> None:
    stream = torch.cuda.Stream(card)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=card)
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
    """Seconds of copies from the first of each pair to the second: those of one card one after another, by its own
    clock; several cards at once, each by its own clock, and the slowest counts.
    """
    by_card: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for source, destination in copies:
        by_card.setdefault(str(source.device if source.is_cuda else destination.device), []).append(
            (source, destination)
        )
    events = [(timing_event(), timing_event(), card) for card in by_card]
    for start, end, card in events:
        with torch.cuda.device(card):
            start.record()
            for source, destination in by_card[card]:
                destination.copy_(source, non_blocking=True)
            end.record()
    for _, end, _ in events:
        end.synchronize()
    return max(float(start.elapsed_time(end)) for start, end, _ in events) / 1000
