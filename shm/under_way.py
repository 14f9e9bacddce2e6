"""Which job each lane of a worker has under way, where it can be read after the worker's death.

A worker that is killed cannot say any more what it was copying, and messages of its last moments are lost. So it keeps
one file without a name, which its supervisor holds too: a word for each lane, the number of the job (0: none), written
before the lane touches anything of it. What the kernel has taken in is there whatever becomes of the writer.
"""

import os
import struct
from typing import Final

# Under which the descriptor travels on the worker's lifeline; pools go the other way.
TAG: Final = 0
LANES: Final = 2
_WORD: Final = struct.Struct("<Q")


class UnderWay:
    """The worker's side. Owns `descriptor`. Each lane is one thread's at a time."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> "UnderWay":
        """A new file, no job under way.

        Raises:
            OSError: no descriptor or no memory for it.
        """
        descriptor = os.memfd_create("stratad-under-way", os.MFD_CLOEXEC)
        made = cls(descriptor)
        try:
            for lane in range(LANES):
                made.note(lane, 0)
        except BaseException:
            made.close()
            raise
        return made

    def note(self, lane: int, job: int) -> None:
        """From now on the lane has this job under way (0: none)."""
        os.pwrite(self.descriptor, _WORD.pack(job), lane * _WORD.size)

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def read_under_way(descriptor: int) -> tuple[int, ...]:
    """The jobs that are, or were, under way.

    Raises:
        ValueError: the file is not a worker's.
    """
    data = os.pread(descriptor, LANES * _WORD.size, 0)
    if len(data) != LANES * _WORD.size:
        raise ValueError(f"{len(data)} bytes say what is under way, expected {LANES * _WORD.size}")
    return tuple(job for (job,) in _WORD.iter_unpack(data) if job)
