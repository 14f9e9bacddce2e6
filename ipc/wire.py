"""Frames in and out of a ZeroMQ socket, at the lowest price.

pyzmq's wrappers (lists of parts, flag enums, an exception for each empty read) cost as much as all other work on a
small message, so both ends call what lies below them.
"""

from typing import Final

import zmq
from zmq.backend import Socket as BackendSocket

_send: Final = BackendSocket.send
_recv: Final = BackendSocket.recv
_get: Final = BackendSocket.get
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_SOURCE: Final = int(zmq.SRCFD)
# Of peers that speak the first version of its protocol ZeroMQ does not tell where their messages come from.
NO_SOURCE: Final = -1


def send_now(socket: zmq.Socket[bytes], frame: bytes) -> None:
    """Send a message of one frame without waiting.

    Raises:
        zmq.Again: the pipe is full.
        zmq.ZMQError: the socket cannot be used.
    """
    _send(socket, frame, _NOBLOCK)


def send_to_now(socket: zmq.Socket[bytes], peer: bytes, frame: bytes) -> None:
    """Send a message of one frame to a peer of a ROUTER without waiting; nothing of it is sent when that fails.

    Raises:
        zmq.Again: the peer's pipe is full.
        zmq.ZMQError: the peer is not there (EHOSTUNREACH), or the socket cannot be used.
    """
    _send(socket, peer, _MORE)
    _send(socket, frame, _NOBLOCK)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there now. ZeroMQ's descriptor tells of changes only, and whoever sends or reads may have
    taken the news: before a wait for the descriptor this must be asked, and False.
    """
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def receive_all(socket: zmq.Socket[bytes], limit: int, sources: list[int] | None = None) -> list[list[bytes]]:
    """The frames of each message that is there now, up to `limit` messages; best called when a poll said so.

    Of a message with more than a few frames, which no peer of ours sends, only the first are kept; the rest are empty.
    To `sources` is added, for each message, the descriptor of the connection that it came over, or `NO_SOURCE`.

    Raises:
        zmq.ZMQError: the socket cannot be used.
    """
    messages: list[list[bytes]] = []
    try:
        while True:
            frames: list[bytes] = []
            more = True
            while more:
                frame = _recv(socket, _NOBLOCK, False)  # a Frame knows whether more follow; asking the socket is slower
                frames.append(frame.bytes if len(frames) <= 2 else b"")
                more = frame.more
                if sources is not None and not more:
                    sources.append(_source_of(frame))
            messages.append(frames)
            if len(messages) == limit or not int(_get(socket, _EVENTS)) & _POLLIN:
                return messages
    except zmq.Again:
        return messages


def _source_of(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(_SOURCE))
    except zmq.ZMQError:
        return NO_SOURCE
