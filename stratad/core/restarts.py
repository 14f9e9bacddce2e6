"""When a dead worker is started again."""

from dataclasses import dataclass

STABLE_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off between starts: `first_s` doubled for each further death in a row, at most `cap_s`; after
    `give_up_after` deaths in a row the worker stays failed. A worker that lived `STABLE_S` starts the count anew.
    """

    first_s: float
    cap_s: float
    give_up_after: int

    def deaths_in_row(self, deaths_before: int, lived_s: float) -> int:
        """Deaths in a row, the present one included."""
        return 1 if lived_s >= STABLE_S else deaths_before + 1

    def delay_s(self, deaths_in_row: int) -> float | None:
        """Seconds until the next start, or None: give up. The first death after a stable life costs no delay."""
        if deaths_in_row >= self.give_up_after:
            return None
        return self.backoff_s(deaths_in_row - 1)

    def backoff_s(self, failures_in_row: int) -> float:
        """`first_s` after one failure, doubled for each further one in a row, at most `cap_s`; 0 after none."""
        if failures_in_row <= 0:
            return 0.0
        exponent = min(failures_in_row - 1, 30)
        return float(min(self.first_s * 2**exponent, self.cap_s))
