"""For mutants that few seeds catch: a seed that has caught each, which is tried first.

One that is out of date costs time and nothing else: all other seeds are tried after it. `python tools/simulate.py
--mutants --json` names, under `mutants_found`, the seed that catches each now.
"""

from collections.abc import Mapping
from typing import Final

WITNESSES: Final[Mapping[str, int]] = {
    "a shuttle that was never finished stays in /dev/shm": 84,
    "rows that a killed worker may have written are not told": 79,
    "a writer may share rows with readers": 59,
    "images that are being read are evicted": 33,
    "images that are being taken are evicted": 71,
    "slot_from restores the transit image of any slot": 1527,
    "an image with a damaged chunk is not flagged": 136,
    "the next capture is deduplicated against a damaged chunk": 314,
    "further damage of an image that is damaged already is not recorded": 3279,
    "damaged images are found by their tokens": 136,
    "former workers that hang are not killed": 30,
    "adopted chunks are counted as referenced once": 97,
    "known damage is forgotten with the daemon": 136,
    "shuttles are written although a process lives whose end cannot be proven": 176,
    "a shuttle that a former worker made late stays in /dev/shm": 46,
    "a capture publishes into an arena that is reset": 52,
    "images of a lost segment stay": 60,
}
