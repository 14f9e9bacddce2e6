"""How much processor time a process takes, all its threads together."""

import contextlib
from pathlib import Path
from typing import Final

_S_PER_NS: Final = 1e-9


class CpuMeter:
    """Reads the kernel's account of one process, which counts nanoseconds (that of `times` counts hundredths)."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._tasks: Final = proc / str(pid) / "task"

    def read_s(self) -> float | None:
        """Processor seconds of the threads that it has now; None where that is not told."""
        try:
            threads = list(self._tasks.iterdir())
        except OSError:
            return None
        total_ns = 0
        found = False
        for thread in threads:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
                total_ns += int((thread / "schedstat").read_text().split()[0])
                found = True
        return total_ns * _S_PER_NS if found else None
