"""Whatever arrives on the socket: a coded reply or silence for that peer, and the daemon serves on."""

import os
import socket as sockets
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from ipc.lifeline import MAX_STASHED, Lifeline
from ipc.messages import PROTOCOL_VERSION
from ipc.stream import LinkError, StreamLink
from stratad.client import Client
from stratad.paths import socket_paths
from tests.support.daemon import DaemonProcess
from tests.support.wait import wait_until


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[zmq.Socket[bytes]]:
    """A bare DEALER at the client socket."""
    paths = socket_paths(daemon.run_dir, daemon.instance)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 5000
    socket.connect(f"ipc://{paths.client}")
    yield socket
    socket.close()
    context.term()


def answer(socket: zmq.Socket[bytes], *frames: bytes) -> dict[str, object]:
    socket.send_multipart(frames)
    reply = msgpack.unpackb(socket.recv())
    assert isinstance(reply, dict)
    return reply


BAD = {
    "empty": b"",
    "one byte": b"\x00",
    "nothing known": b"\xc1",
    "no map": msgpack.packb([1, 2]),
    "no type": msgpack.packb({"seq": 4}),
    "cut short": msgpack.packb({"t": "stats", "seq": 4})[:-1],
    "glued": msgpack.packb({"t": "stats", "seq": 4}) * 2,
    "huge string": b"\xdb\xff\xff\xff\xff",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\x81\xa1t\xd4\x01\x00",
    "deep": b"\x91" * 100_000,
    "float seq": msgpack.packb({"t": "stats", "seq": 1.5}),
    "bool seq": msgpack.packb({"t": "stats", "seq": True}),
    "seq over 64 bits": b"\x82\xa1t\xa5stats\xa3seq\xcf" + b"\xff" * 8,
    "pickle": b"cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_frame_gets_a_coded_reply(raw: zmq.Socket[bytes], client: Client, name: str) -> None:
    reply = answer(raw, BAD[name])
    assert reply["t"] == "failed"
    assert reply["code"] in {"bad_frame", "bad_request", "hello_first"}
    assert client.stats().pid


def test_frame_counts(raw: zmq.Socket[bytes], client: Client) -> None:
    good = msgpack.packb({"t": "stats", "seq": 4})
    assert answer(raw, good, good)["code"] == "bad_frame"
    assert answer(raw, b"", good)["code"] == "bad_frame"
    assert answer(raw, *[b"x"] * 1000)["code"] == "bad_frame"
    assert client.stats().counters["bad_frames"] >= 3


def test_an_unknown_op_is_named_with_its_seq(raw: zmq.Socket[bytes]) -> None:
    reply = answer(raw, msgpack.packb({"t": "explode", "seq": 17}))
    assert (reply["code"], reply["seq"]) == ("unknown_op", 17)
    assert "explode" in str(reply["message"])


def test_nothing_without_a_lifeline(raw: zmq.Socket[bytes]) -> None:
    assert answer(raw, msgpack.packb({"t": "stats", "seq": 1}))["code"] == "hello_first"
    hello = {"t": "hello", "seq": 2, "version": PROTOCOL_VERSION, "token": b"x" * 16}
    assert answer(raw, msgpack.packb(hello))["code"] == "hello_first"


def test_a_token_is_good_for_one_peer(daemon: DaemonProcess, raw: zmq.Socket[bytes]) -> None:
    paths = socket_paths(daemon.run_dir, daemon.instance)
    with Lifeline.connect(paths.life, 5.0) as lifeline:
        hello = msgpack.packb({"t": "hello", "seq": 2, "version": PROTOCOL_VERSION, "token": lifeline.token})
        assert answer(raw, hello)["t"] == "welcome"
        with zmq.Context() as context, context.socket(zmq.DEALER) as second:
            second.linger = 0
            second.rcvtimeo = 5000
            second.connect(f"ipc://{paths.client}")
            assert answer(second, hello)["code"] == "hello_first"


def test_a_peer_that_persists_is_dropped(daemon: DaemonProcess, raw: zmq.Socket[bytes], client: Client) -> None:
    paths = socket_paths(daemon.run_dir, daemon.instance)
    with Lifeline.connect(paths.life, 5.0) as lifeline:
        hello = msgpack.packb({"t": "hello", "seq": 2, "version": PROTOCOL_VERSION, "token": lifeline.token})
        assert answer(raw, hello)["t"] == "welcome"
        for _ in range(16):
            assert answer(raw, b"\xc1")["code"] == "bad_frame"
        assert answer(raw, msgpack.packb({"t": "stats", "seq": 1}))["code"] == "hello_first"
    assert client.stats().pid == daemon.pid


def test_a_flood_of_rubbish_costs_no_memory_and_nobody_else(
    daemon: DaemonProcess, raw: zmq.Socket[bytes], client: Client
) -> None:
    before = supervisor_anon_bytes(client)
    rubbish = os.urandom(1000)
    raw.sndtimeo = 5000
    for number in range(20_000):
        raw.send(struct.pack("<I", number) + rubbish)
        if number % 1000 == 0:
            assert client.stats().pid == daemon.pid
    assert supervisor_anon_bytes(client) - before < 96 * 1024 * 1024


def supervisor_anon_bytes(client: Client) -> int:
    return next(m.anon_bytes for m in client.stats().memory if m.role == "supervisor")


def test_descriptors_ahead_of_their_messages_wait(daemon: DaemonProcess, client: Client) -> None:
    """More than a lifeline keeps: the rest stays in the socket, and goes with its sender."""
    before = client.stats().counters
    descriptors = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
    pool = os.memfd_create("ahead")
    with Lifeline.connect(socket_paths(daemon.run_dir, daemon.instance).life, 5.0) as lifeline:
        for tag in range(MAX_STASHED + 20):
            lifeline.send_descriptor(tag, pool, 5.0)
        # One for the lifeline itself and one for the end of our process.
        wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) == descriptors + 2 + MAX_STASHED)
        assert client.stats().health
    os.close(pool)
    wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) == descriptors)
    assert client.stats().counters.get("internal_errors", 0) == before.get("internal_errors", 0)


def test_a_stranger_at_the_workers_socket_is_hung_up_on(daemon: DaemonProcess, client: Client) -> None:
    """Of our own user, since nobody else may connect there: a name that no worker was given, then frames."""
    path = socket_paths(daemon.run_dir, daemon.instance).worker
    with (
        sockets.socket(sockets.AF_UNIX) as silent,
        StreamLink.connect(path, b"cpu:0#1#stray", max_message_bytes=1 << 20, timeout_s=5.0) as stray,
    ):
        silent.connect(str(path))

        def ended() -> bool:
            try:
                stray.send(bytes(64))
            except LinkError:
                return True
            return False

        wait_until(ended)
        wait_until(lambda: client.stats().health == "ok")


@pytest.mark.parametrize("word", [b"\x02\x00x", b"\x06\x00hello", b"\x02\x01a\x02\x00b"])
def test_an_old_peer_is_answered_like_any_other(daemon: DaemonProcess, client: Client, word: bytes) -> None:
    """One that speaks ZeroMQ's first protocol, a name and frames of length, flags and body, says it without a greeting;
    ZeroMQ does not tell which connection its messages come over.
    """
    path = socket_paths(daemon.run_dir, daemon.instance).client
    with sockets.socket(sockets.AF_UNIX) as old:
        old.settimeout(10)
        old.connect(str(path))
        old.sendall(b"\x05\x00name" + 8 * word)  # it is looked at once there is as much as a greeting has
        said = b""
        while b"code" not in said:
            said += (part := old.recv(4096))
            assert part, "the daemon has hung up"
    assert client.stats().pid == daemon.pid
