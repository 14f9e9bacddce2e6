"""Page-locked copies on several GPUs at once; see `stratad.bench.links`."""

import time
from collections.abc import Sequence
from typing import Final

import torch

from stratad import topology
from stratad.bench.cards import Cards
from stratad.bench.links import BOTH, CAPTURE, WAYS, near

# One after another: the host's clock, which times all cards together, then sees little of its own calls.
_COPIES: Final = 4


class _Card:
    """One card's buffers and streams: in each direction two buffers of their own, so that both can run at once."""

    def __init__(self, name: str, pci: str, size_bytes: int) -> None:
        self.name: Final = name
        self.streams: Final = {way: _stream(name) for way in WAYS[BOTH]}
        with near(pci):
            self.host: Final = {way: _page_locked(size_bytes) for way in self.streams}
        self.device: Final = {way: torch.zeros(size_bytes, dtype=torch.uint8, device=name) for way in self.streams}


class CudaLinks:
    """See `stratad.bench.links.Links`."""

    def __init__(self, cards: Cards, size_bytes: int) -> None:
        self.size_bytes: Final = size_bytes * _COPIES
        pci = {gpu.uuid: gpu.pci for gpu in topology.find_gpus()}
        pairs = zip(cards.names, cards.uuids, strict=True)
        self._cards = [_Card(name, pci.get(uuid, ""), size_bytes) for name, uuid in pairs]
        self._synchronize(range(len(self._cards)))

    def seconds(self, cards: Sequence[int], way: str) -> list[float]:
        """See `Links`."""
        self._synchronize(cards)
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        started_s = time.perf_counter()
        for number in cards:
            card = self._cards[number]
            events.append([_copy(card, direction) for direction in WAYS[way]])
        self._synchronize(cards)
        wall_s = time.perf_counter() - started_s
        # Both directions of a card begin together: the longer one is the card's time.
        return [*(max(start.elapsed_time(end) for start, end in pairs) / 1000 for pairs in events), wall_s]

    def _synchronize(self, cards: Sequence[int]) -> None:
        for number in cards:
            torch.cuda.synchronize(self._cards[number].name)

    def close(self) -> None:
        """See `Links`."""
        self._cards.clear()
        torch.cuda.empty_cache()


def _copy(card: _Card, direction: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = timing_event(), timing_event()
    stream = card.streams[direction]
    host, device = card.host[direction], card.device[direction]
    with torch.cuda.device(card.name), torch.cuda.stream(stream):
        start.record(stream)
        for _ in range(_COPIES):
            if direction == CAPTURE:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)
        end.record(stream)
    return start, end


def _stream(card: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=card)  # type: ignore[no-untyped-call]


def _page_locked(size_bytes: int) -> torch.Tensor:
    buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return buffer.zero_()


def timing_event() -> torch.cuda.Event:
    """An event that has a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
