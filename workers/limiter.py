"""A simulated link: holds a lane to a rate by sleeping inside its copies, while every byte really moves."""

import time
from typing import Final

# Sleeping costs some 60 us a call: debts below this are carried on.
_MIN_SLEEP_S: Final = 0.0003


class LinkLimiter:
    """Holds one lane to `bytes_per_s` (0: no limit). Used by one thread at a time."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def moved(self, count_bytes: int, now_s: float) -> None:
        """Account for bytes whose copy began no later than `now_s`; sleep where the link would still be busy."""
        if self.bytes_per_s <= 0:
            return
        self._free_at_s = max(self._free_at_s, now_s) + count_bytes / self.bytes_per_s
        ahead_s = self._free_at_s - time.perf_counter()
        if ahead_s > _MIN_SLEEP_S:
            time.sleep(ahead_s)

    def settle(self) -> None:
        """Sleep off what is left of the debt: the link is idle afterwards."""
        ahead_s = self._free_at_s - time.perf_counter()
        if self.bytes_per_s > 0 and ahead_s > 0:
            time.sleep(ahead_s)
