"""The cards that GPU tests use: every one that torch sees, or ``GPU_TEST_CARDS`` of them. Where there are several,
the stages of an engine lie on them in turn.
"""

import os

import torch

VARIABLE = "GPU_TEST_CARDS"


def cards() -> list[str]:
    """Their names for torch."""
    there = torch.cuda.device_count()
    wanted = int(os.environ.get(VARIABLE, there))
    assert 1 <= wanted <= there, f"{VARIABLE}={wanted}, but torch sees {there} GPUs"
    return [f"cuda:{number}" for number in range(wanted)]


def card_of(stage: int) -> str:
    """Where a stage lies."""
    return cards()[stage % len(cards())]


def uuid_of(card: str) -> str:
    """As the daemon calls it."""
    return f"GPU-{torch.cuda.get_device_properties(card).uuid}"


def all_cards() -> str:
    """Devices of a daemon that serves all of them, in the order that torch has."""
    return ",".join(map(uuid_of, cards()))


def first_card() -> str:
    """Devices of a daemon that serves the first: its budget is then that card's."""
    return uuid_of("cuda:0")


def free_bytes() -> int:
    """Free memory over all of them."""
    return sum(int(torch.cuda.mem_get_info(card)[0]) for card in cards())


def synchronize() -> None:
    """Wait for everything on all of them."""
    for card in cards():
        torch.cuda.synchronize(card)
