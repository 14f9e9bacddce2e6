"""Connections of a ROUTER, as ZeroMQ tells of them: it accepts them in a thread of its own and asks nobody.

It aborts the process when no descriptor is left for one, so whoever owns the ROUTER must see to it that there are never
too many. That is done by `hang_up`: the end of a connection reaches ZeroMQ like one that the peer has made.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

import zmq

from ipc.credentials import connection_behind, process_of

_EVENTS: Final = int(zmq.EVENT_ACCEPTED) | int(zmq.EVENT_DISCONNECTED)
# More than ZeroMQ keeps.
NEWS_COUNT: Final = 4096
_EVENT: Final = struct.Struct("=Hi")


class Arrival(NamedTuple):
    """A connection that came (`here`) or went: ZeroMQ's own descriptor of it, which may be another's by now."""

    descriptor: int
    here: bool


class Arrivals:
    """The news of one ROUTER. For the thread that owns it, which must read them: ZeroMQ keeps about a thousand, and
    then accepts nobody until some have been read.
    """

    def __init__(self, server: zmq.Socket[bytes], news: zmq.Socket[bytes], path: Path) -> None:
        self._server = server
        self._news = news
        self._path = os.fspath(path)

    @classmethod
    def open(cls, server: zmq.Socket[bytes], path: Path) -> Self:
        """Of a socket that is about to be bound at `path`.

        Raises:
            zmq.ZMQError: no socket to be had for the news.
        """
        news = server.get_monitor_socket(_EVENTS)
        # Else twice as many are kept, of which each may be a connection that nobody has looked at: descriptors.
        news.rcvhwm = 1
        return cls(server, news, path)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a `zmq.Poller`: readable when there is news."""
        return self._news

    def read(self, limit: int) -> Iterator[Arrival]:
        """Up to `limit` of them, in the order in which they happened."""
        with contextlib.suppress(zmq.Again):
            for _ in range(limit):
                event, descriptor = _EVENT.unpack(self._news.recv_multipart(zmq.NOBLOCK)[0])
                yield Arrival(descriptor, event == zmq.EVENT_ACCEPTED)

    def peer(self, descriptor: int) -> tuple[int, int] | None:
        """Pid and uid of who is at the other end of a connection; None where it has gone."""
        connection = _connection(descriptor, self._path)
        if connection is None:
            return None
        with connection:
            return process_of(connection)

    def hang_up(self, descriptor: int) -> None:
        """End a connection; without effect where it has gone."""
        connection = _connection(descriptor, self._path)
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Before the ROUTER is closed; idempotent."""
        if not self._news.closed:
            for _ in self.read(NEWS_COUNT):
                pass  # ZeroMQ's thread may be waiting for room, with a lock that the next step takes
            self._server.disable_monitor()
            self._news.close(0)


def _connection(descriptor: int, path: str) -> socket.socket | None:
    """A copy of a descriptor that is a connection at `path`: it may be closed at any time, and another's then."""
    connection = connection_behind(descriptor)
    if connection is None or connection.getsockname() == path:
        return connection
    connection.close()
    return None
