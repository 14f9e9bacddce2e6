"""Put and get through real processes: whatever memory it was, it comes back byte for byte, or not at all."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ipc.messages import MemfdPool, Register, Registered, Stage
from shm.extent import unpack_places
from shm.shuttle import MOUNT
from stratad._calls import Call
from stratad.client import Client, Exchange
from stratad.errors import Damaged, Lost, NoSpace, PeerGone, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT
from tests.support.wait import wait_until

torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(scope="module")
def roomy() -> Iterator[DaemonProcess]:
    """A daemon that takes 200 MB at once."""
    with DaemonProcess("cpu:1", {"ram.budget_bytes": "320MiB", "ram.shuttle_bytes": "32MiB"}) as running:
        yield running


def noise(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def opened(client: Client, exchange_bytes: int = 16 * MIB, namespace: str = "ns") -> Exchange:
    return client.exchange("cpu:0", namespace, FINGERPRINT, exchange_bytes)


def test_200_mb_of_all_kinds_through_16_mib(roomy: DaemonProcess) -> None:
    parts: dict[str, object] = {
        "numpy": noise(100_000_001),
        "floats": noise(40_000_000, 2).view(np.float32).reshape(100, -1),
        "torch": torch.from_numpy(noise(40_000_000, 3)).view(torch.bfloat16).reshape(5, 4, -1),
        "bytes": noise(20_000_003, 4).tobytes(),
        "view": memoryview(noise(5000, 5).tobytes())[1:],
        "nothing": b"",
        **{f"{n}.small": bytes([n]) * n for n in range(1, 60)},
    }
    wanted = {
        name: data.view(torch.uint8).numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)  # type: ignore[call-overload]
        for name, data in parts.items()
    }
    with roomy.client() as client, opened(client) as exchange:
        with exchange.put("chat", range(1000)) as put:
            for name, data in parts.items():
                put.add(name, data)  # type: ignore[arg-type]
        assert put.result.image_bytes == sum(map(len, wanted.values()))
        info = next(image for image in client.list_images("ns") if image.conversation == "chat")
        assert (info.parts, info.tokens) == (len(parts), 1000)
    # Another client, with a smaller exchange: the pieces are others.
    with roomy.client() as client, opened(client, 2 * MIB) as exchange:
        match = exchange.lookup(range(1500))
        assert match is not None
        with exchange.get(image_id=match.image_id) as got:
            assert list(got.parts) == list(parts)
            assert got.parts["torch"] == (40_000_000, "bfloat16[5,4,1000000]")
            for name in parts:
                assert got.read(name) == wanted[name], name
            for name in reversed(parts):
                if isinstance(parts[name], torch.Tensor):
                    tensor = torch.zeros_like(parts[name])
                    got.read_into(name, tensor)
                    assert torch.equal(tensor.view(torch.uint8), parts[name].view(torch.uint8))  # type: ignore[attr-defined]
                else:
                    target = np.empty(len(wanted[name]), np.uint8)
                    got.read_into(name, target)
                    assert target.tobytes() == wanted[name], name
        client.clear("ns")
    with roomy.client() as client:
        assert client.stats().published_bytes == client.stats().staged_bytes == 0


def test_a_put_that_raises_leaves_the_former_image(roomy: DaemonProcess) -> None:
    with roomy.client() as client, opened(client) as exchange:
        with exchange.put("chat") as put:
            put.add("x", b"former")
        put = exchange.put("chat")

        def fail() -> None:
            with put:
                put.add("x", noise(20 * MIB))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert client.stats().staged_bytes == 0
        with pytest.raises(UsageError, match="was not committed"):
            assert put.result
        with pytest.raises(UsageError, match="has ended"):
            put.add("y", b"")
        with exchange.get("chat") as got:
            assert got.read("x") == b"former"
        client.clear("ns")


def test_threads_share_an_exchange_and_never_wait_in_a_circle(roomy: DaemonProcess) -> None:
    with roomy.client() as client, opened(client, 4 * MIB) as exchange:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                mine = {f"p{n}": noise(1_500_000 + n, 10 * number + n) for n in range(4)}
                for _ in range(3):
                    with exchange.put(f"chat{number}") as put:
                        for name, data in mine.items():
                            put.add(name, data)
                    with exchange.get(f"chat{number}") as got, exchange.put(f"again{number}") as put:
                        for name, data in mine.items():
                            read = got.read(name)
                            assert read == data.tobytes()
                            put.add(name, read)
            except BaseException as exc:  # noqa: BLE001 - shown by the test
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50.0)
        assert not failures
        assert exchange.room.free_rows == 4 * MIB // 4096
        client.clear("ns")


def test_a_client_killed_in_the_middle_of_a_put_leaves_nothing_but_the_former_image(roomy: DaemonProcess) -> None:
    script = (
        "import sys, os, signal\n"
        "from stratad.client import Client\n"
        "from tests.support.engine import FINGERPRINT\n"
        "client = Client.connect(run_dir=sys.argv[1], instance=sys.argv[2])\n"
        "exchange = client.exchange('cpu:0', 'ns', FINGERPRINT, 8 << 20)\n"
        "put = exchange.put('chat')\n"
        "for n in range(10): put.add(f'{n}', os.urandom(1 << 20))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with roomy.client() as client, opened(client) as exchange:
        with exchange.put("chat") as put:
            put.add("x", b"former")
        before = client.stats()
        command = [sys.executable, "-c", script, str(roomy.run_dir), roomy.instance]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            wait_until(lambda: client.stats().staged_bytes >= MIB)
            child.kill()
        wait_until(lambda: client.stats().staged_bytes == 0, timeout_s=2.0)
        wait_until(lambda: len(client.stats().engines) == 1, timeout_s=2.0)
        now = client.stats()
        assert (now.published_bytes, now.free_bytes) == (before.published_bytes, before.free_bytes)
        wait_until(lambda: client.stats().workers[0].resources["pools"] == 1, timeout_s=2.0)
        with exchange.get("chat") as got:
            assert got.read("x") == b"former"
        client.clear("ns")


@pytest.mark.parametrize("part", ["small", "large"])
def test_a_flipped_bit_is_found_and_nothing_of_the_piece_is_written(roomy: DaemonProcess, part: str) -> None:
    with roomy.client() as client, opened(client, 8 * MIB) as exchange:
        with exchange.put("chat") as put:
            put.add("small", noise(3000))
            put.add("large", noise(2 * MIB - 5, 2))
            put.add("whole", noise(1000, 3))
        chunk = client.show("ns", "chat").chunks[{"small": 0, "large": 1}[part]]
        (place,) = unpack_places(chunk.extents)
        segment = Path(MOUNT) / chunk.segments[0].lstrip("/")
        with segment.open("r+b") as shuttle:
            shuttle.seek(place.extents[0].offset_bytes + 2000)
            (byte,) = shuttle.read(1)
            shuttle.seek(-1, os.SEEK_CUR)
            shuttle.write(bytes([byte ^ 8]))
        with exchange.get("chat") as got:
            target = np.full(got.parts[part].nbytes, 7, np.uint8)
            with pytest.raises(Damaged) as caught:
                got.read_into(part, target)
            assert caught.value.stages[0].rows_undefined == ()
            assert (target == 7).all()
            with pytest.raises(Damaged):
                got.read(part)
            assert got.read("whole") == noise(1000, 3).tobytes()
        with pytest.raises(Damaged):
            exchange.get("chat")
        with exchange.put("chat") as put:
            put.add("small", noise(3000))
        with exchange.get("chat") as got:
            assert got.read("small") == noise(3000).tobytes()
        client.clear("ns")


@pytest.mark.parametrize("end", ["again", "abort"])
def test_a_worker_that_dies_in_a_part_fails_that_part_only(end: str) -> None:
    with (
        DaemonProcess("cpu:1", faults={"cpu:0#1/capture.copy_kill": "3"}) as daemon,
        daemon.client() as client,
        opened(client, 8 * MIB) as exchange,
    ):
        with exchange.put("former") as put:
            put.add("x", b"former")
        before = client.stats()
        put = exchange.put("chat")
        put.add("0", noise(MIB))
        # Answered, and not only copied: the signal that ends the worker could overtake what it has to say of this part.
        wait_until(lambda: not client.stats().ops)
        put.add("1", noise(MIB, 2))
        with pytest.raises(PeerGone) as caught:
            put.commit()
        assert caught.value.code == "worker_died"
        assert caught.value.detail["part"] == "1"
        if end == "again":
            put.add("1", noise(MIB, 2))
            put.commit()
            with exchange.get("chat") as got:
                assert got.read("0") == noise(MIB).tobytes()
                assert got.read("1") == noise(MIB, 2).tobytes()
            client.drop("ns", "chat")
        else:
            put.abort()
        now = client.stats()
        assert (now.published_bytes, now.staged_bytes) == (before.published_bytes, 0)
        assert now.workers[0].deaths == 1
        assert exchange.room.free_rows == 2048
        with exchange.get("former") as got:
            assert got.read("x") == b"former"


def test_a_worker_that_dies_in_a_get_fails_that_read_only() -> None:
    with (
        DaemonProcess("cpu:1", faults={"cpu:0#1/restore.copy_kill": "2"}) as daemon,
        daemon.client() as client,
        opened(client, 8 * MIB) as exchange,
    ):
        with exchange.put("chat") as put:
            put.add("x", noise(3 * MIB))
        with exchange.get("chat") as got:
            with pytest.raises(PeerGone):
                got.read("x")
            assert got.read("x") == noise(3 * MIB).tobytes()
        assert exchange.room.free_rows == 2048


def test_a_put_does_not_outlive_its_daemon_and_the_exchange_does() -> None:
    with DaemonProcess("cpu:1") as daemon, daemon.client() as client, opened(client, 8 * MIB) as exchange:
        with exchange.put("chat") as put:
            put.add("x", b"committed")
        got = exchange.get("chat")
        put = exchange.put("chat")
        put.add("x", noise(MIB))
        daemon.kill()
        with pytest.raises(Lost):
            put.add("more", noise(20 * MIB))
        with pytest.raises(Lost):
            got.read("x")
        daemon.start()
        with pytest.raises(Lost):
            put.commit()
        put.abort()
        got.close()
        with exchange.get("chat") as got:
            assert got.read("x") == b"committed"
        with exchange.put("chat") as put:
            put.add("x", noise(MIB, 3))
        with exchange.get("chat") as got:
            assert got.read("x") == noise(MIB, 3).tobytes()
        wait_until(lambda: exchange.room.try_take(2048) is not None)


def test_what_does_not_fit_is_refused_and_the_put_can_go_on() -> None:
    with DaemonProcess("cpu:1", {"ram.budget_bytes": "8MiB"}) as daemon, daemon.client() as client:
        with opened(client, 4 * MIB) as exchange, exchange.put("chat") as put:
            put.add("x", noise(3 * MIB))
            with pytest.raises(NoSpace) as caught:
                put.add("y", noise(20 * MIB, 2))
            assert caught.value.detail["part"] == "y"
            put.add("y", noise(MIB, 2))
        assert [image.image_bytes for image in client.list_images("ns")] == [4 * MIB]


def test_misuse_is_refused_before_a_byte_leaves(roomy: DaemonProcess) -> None:
    with roomy.client() as client:
        for device, size, fingerprint, code in (
            ("cpu:7", 8 * MIB, FINGERPRINT, "foreign_device"),
            ("gpu0", 8 * MIB, FINGERPRINT, "foreign_device"),
            ("cpu:0", MIB, FINGERPRINT, "bad_value"),
            ("cpu:0", 8 * MIB, {}, "fingerprint_missing"),
        ):
            with pytest.raises(UsageError) as refused:
                client.exchange(device, "ns", fingerprint, size)
            assert refused.value.code == code
        with opened(client) as exchange:
            put = exchange.put("chat")
            put.add("x", b"1")
            for name, data, meta, code in (
                ("x", b"2", None, "duplicate_part"),
                ("", b"2", None, "bad_value"),
                ("n" * 257, b"2", None, "bad_value"),
                ("y", b"2", "m" * 513, "bad_value"),
                ("y", np.arange(8)[::2], None, "bad_value"),
            ):
                with pytest.raises(UsageError) as refused:
                    put.add(name, data, meta)
                assert refused.value.code == code
            put.commit()
            with exchange.get("chat") as got:
                for target, code in ((bytearray(2), "bad_value"), (b"1", "bad_value")):
                    with pytest.raises(UsageError) as refused:
                        got.read_into("x", target)
                    assert refused.value.code == code
                with pytest.raises(UsageError) as refused:
                    got.read("y")
                assert refused.value.code == "unknown_part"
            with pytest.raises(UsageError, match="closed"):
                got.read("x")
            with pytest.raises(UsageError):
                exchange.get()
        client.clear("ns")


def register(client: Client, stage: Stage) -> None:
    """Register a stage as it is, whatever it names."""
    call = Call(
        "register",
        lambda _, seq: Register(seq, "ns", "thief", FINGERPRINT, (stage,), exchange=True),
        Registered,
        client.until_s(5.0),
    )
    client.wait(call, Registered)


def test_another_clients_memory_cannot_be_had_by_its_numbers(roomy: DaemonProcess) -> None:
    """A client names descriptors by the tags of its own lifeline: those of another client mean nothing there."""
    with roomy.client() as owner, opened(owner, 8 * MIB) as exchange, roomy.client() as thief:
        layout = exchange.engine.layouts[0]
        for tag in range(1, 5):
            stage = Stage(0, "cpu:0", MemfdPool(tag, exchange.nbytes), layout)
            with pytest.raises(UsageError) as refused:
                register(thief, stage)
            assert refused.value.code == "unshareable"
        assert len(owner.stats().engines) == 1


def test_a_closed_exchange_leaves_no_mapping_and_its_images(roomy: DaemonProcess) -> None:
    with roomy.client() as client:
        exchange = opened(client)
        with exchange.put("chat") as put:
            put.add("x", b"stays")
        open_put, held = exchange.put("chat"), exchange.get("chat")
        open_put.add("x", noise(MIB))
        exchange.close()
        exchange.close()
        for late in (
            lambda: exchange.put("chat"),
            lambda: exchange.get("chat"),
            lambda: exchange.lookup([1]),
            lambda: open_put.add("y", b"late"),
            open_put.commit,
            lambda: held.read("x"),
        ):
            with pytest.raises(UsageError, match="exchange 'exchange' is closed"):
                late()
        assert client.stats().staged_bytes == 0
        assert client.stats().workers[0].resources["pools"] == 0
        held.close()
        open_put.abort()
        with opened(client) as other, other.get("chat") as got:
            assert got.read("x") == b"stays"
        assert client.drop("ns", "chat") == 1
        assert client.stats().published_bytes == 0
