"""Whether somebody listens at a unix socket, and who: asked by connecting, and letting go at once."""

import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
_NO_UID: Final = -1


def listens(path: Path, kind: int) -> bool | None:
    """Whether somebody listens at a unix socket; None where there is no such path or we may not look."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        return _try(probe, path)


def listener(path: Path, kind: int) -> tuple[int, int] | None:
    """Pid and uid of who listens at a unix socket, as the kernel vouches for them (pid 0: of another pid namespace)."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        if not _try(probe, path):
            return None
        pid, uid, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # A full backlog connects nobody, so there are no credentials.
    return (pid, uid) if uid != _NO_UID else None


def _try(probe: socket.socket, path: Path) -> bool | None:
    probe.setblocking(False)
    try:
        probe.connect(os.fspath(path))
    except BlockingIOError:
        return True  # its backlog is full: somebody does listen
    except OSError as exc:
        return False if exc.errno == errno.ECONNREFUSED else None
    return True
