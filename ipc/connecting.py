"""Connecting to a unix socket with a limit on the wait."""

import os
import socket
import struct
from pathlib import Path
from typing import Final

_TIMEVAL: Final = struct.Struct("@ll")


def connect_within(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect a new unix socket to `path`; it does not block afterwards.

    A unix connect waits while the backlog is full; a non-blocking one would fail at once in place of that.

    Raises:
        OSError: nobody listens there, or there was no room in the backlog within `timeout_s`.
    """
    whole_s = int(timeout_s)
    limit = _TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.connect(os.fspath(path))
    connection.setblocking(False)
