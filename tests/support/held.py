"""A process that outlives SIGKILL: one that a tracer stops on its way out, as the kernel or a driver may."""

import ctypes
import os
import signal
from types import TracebackType
from typing import Final, Self

_SEIZE: Final = 0x4206
_CONT: Final = 7
_TRACE_EXIT: Final = 0x40
_WALL: Final = 0x40000000
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class HeldProcess:
    """While in this block, a process that is killed does not end. All by one thread, which must be allowed to trace."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._tasks: list[int] = []

    def __enter__(self) -> Self:
        for name in os.listdir(f"/proc/{self._pid}/task"):  # noqa: PTH208 - numbers, not paths
            if _libc.ptrace(_SEIZE, int(name), None, _TRACE_EXIT):
                raise OSError(ctypes.get_errno(), "PTRACE_SEIZE")
            self._tasks.append(int(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it end: it must have been killed."""
        os.kill(self._pid, signal.SIGKILL)
        left = set(self._tasks)
        while left:
            task, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                _libc.ptrace(_CONT, task, None, None)
            else:
                left.discard(task)
