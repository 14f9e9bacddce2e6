"""The daemon dies or is stopped, and the next one serves what was published, byte for byte."""

import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from shm.digest_key import key_id
from shm.shuttle import MOUNT
from stratad.client import Client
from stratad.core.records import ImageRecord, StageRecord
from stratad.ctl.main import main as stratactl
from stratad.errors import StratadError, UsageError
from stratad.journal import Journal
from tests.support.daemon import DaemonProcess
from tests.support.engine import FINGERPRINT, FakeEngine, slot_layout
from tests.support.instances import fresh_instance
from tests.support.wait import wait_until

LAYOUTS = (slot_layout(state_bytes=5000), slot_layout(planes=3, row_bytes=160))
KEEP = {"ram.keep": "true"}
TOKENS = 700


def end(daemon: DaemonProcess, how: str) -> None:
    if how == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0


def conversations(client: Client) -> dict[str, int]:
    return {image.conversation: image.image_id for image in client.list_images()}


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_same_client_restores_from_the_next_daemon_what_it_captured_before(how: str) -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        expected: dict[str, list[list[bytes]]] = {}
        for number, name in enumerate("abc"):
            engine.fill()
            expected[name] = engine.contents(range(TOKENS), TOKENS)
            engine.capture(name, [number] * TOKENS, range(TOKENS))
        before = conversations(client)
        for _ in range(3):
            end(daemon, how)
            daemon.start()
            assert conversations(client) == before
            match = engine.engine.lookup([1] * TOKENS)
            assert match is not None
            assert match.conversation == "b"
            for name, contents in expected.items():
                engine.fill()
                engine.restore(name, range(TOKENS))
                assert engine.contents(range(TOKENS), TOKENS) == contents
        wait_until(lambda: client.stats().health == "ok")
        assert client.stats().counters["images_adopted"] == 3
        assert client.stats().counters.get("images_lost", 0) == 0


def test_what_was_dropped_taken_replaced_or_pinned_is_so_afterwards() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        for number, name in enumerate(("dropped", "taken", "replaced", "pinned")):
            engine.capture(name, [number] * TOKENS, range(TOKENS))
        client.drop("ns", "dropped")
        engine.engine.take("taken", rows=range(TOKENS), slot=0).result()
        engine.fill()
        engine.capture("replaced", [9] * 300, range(300))
        expected = engine.contents(range(300), 300)
        client.pin("ns", "pinned", pinned=True)
        daemon.kill()
        daemon.start()
        found = {image.conversation: (image.tokens, image.pinned) for image in client.list_images()}
        assert found == {"replaced": (300, False), "pinned": (TOKENS, True)}
        engine.fill()
        engine.restore("replaced", range(300))
        assert engine.contents(range(300), 300) == expected
        with pytest.raises(UsageError, match="pinned"):
            client.drop("ns", "pinned")


def test_parts_that_were_put_are_got_from_the_next_daemon() -> None:
    data = {"k": os.urandom(300_000), "v": os.urandom(5), "none": b""}
    with DaemonProcess("cpu:1", KEEP) as daemon:
        with (
            daemon.client() as client,
            client.exchange("cpu:0", "ns", FINGERPRINT) as exchange,
            exchange.put("a", range(8)) as put,
        ):
            for name, content in data.items():
                put.add(name, content, meta=name)
        end(daemon, "killed")
        daemon.start()
        with (
            daemon.client() as client,
            client.exchange("cpu:0", "ns", FINGERPRINT) as exchange,
            exchange.get("a") as got,
        ):
            assert {name: bytes(got.read(name)) for name in got.parts} == data


def test_a_worker_that_dies_after_the_restart_costs_no_image() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        expected = engine.contents(range(TOKENS), TOKENS)
        engine.capture("a", range(TOKENS), range(TOKENS))
        daemon.kill()
        daemon.start()
        wait_until(lambda: client.stats().health == "ok")
        victims = [worker.pid for worker in client.stats().workers]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        engine.fill()
        wait_until(lambda: not {w.pid for w in client.stats().workers} & {*victims, 0})
        engine.restore("a", range(TOKENS))
        assert engine.contents(range(TOKENS), TOKENS) == expected


def test_captures_after_the_restart_overwrite_no_image_and_evict_as_ever() -> None:
    settings = {**KEEP, "ram.budget_bytes": "8MiB", "ram.shuttle_bytes": "2MiB"}
    with DaemonProcess("cpu:2", settings) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        first = engine.contents(range(TOKENS), TOKENS)
        engine.capture("a", range(TOKENS), range(TOKENS))
        client.pin("ns", "a", pinned=True)
        daemon.kill()
        daemon.start()
        for number in range(30):
            engine.fill()
            expected = engine.contents(range(TOKENS), TOKENS)
            engine.capture(f"new {number}", [number] * TOKENS, range(TOKENS))
        assert client.stats().counters["evictions"] > 0
        engine.fill()
        engine.restore("new 29", range(TOKENS))
        assert engine.contents(range(TOKENS), TOKENS) == expected
        engine.restore("a", range(TOKENS))
        assert engine.contents(range(TOKENS), TOKENS) == first


def test_another_process_restores_it() -> None:
    command = [sys.executable, "-m", "tests.support.keeper"]
    with DaemonProcess("cpu:2", KEEP) as daemon:
        where = ["--run-dir", str(daemon.run_dir), "--instance", daemon.instance]
        subprocess.run([*command, "capture", *where], check=True, capture_output=True)
        daemon.kill()
        daemon.start()
        subprocess.run([*command, "restore", *where], check=True, capture_output=True)


def test_a_start_under_another_digest_key_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        expected = engine.contents(range(TOKENS), TOKENS)
        engine.capture("a", range(TOKENS), range(TOKENS))
        daemon.kill()
        key = daemon.state_dir / "digest.key"
        key.rename(aside := daemon.state_dir / "aside")
        with pytest.raises(StratadError):
            daemon.start(answers_within_s=2.0)
        assert daemon.ended() == 2
        assert "1 of 1 images in /dev/shm were made under another digest key" in daemon.log
        aside.rename(key)
        daemon.start()
        engine.fill()
        engine.restore("a", range(TOKENS))
        assert engine.contents(range(TOKENS), TOKENS) == expected
        daemon.kill()
        key.unlink()
        assert stratactl(["--instance", daemon.instance, "purge", "--yes"]) == 0
        assert "removed of" in capsys.readouterr().out
        daemon.start()
        engine.capture("a", range(TOKENS), range(TOKENS))


def test_a_look_at_what_is_left_leaves_no_lock_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever owns the lock's file decides who may serve the instance."""
    instance = fresh_instance()
    assert stratactl(["--instance", instance, "purge"]) == 0
    assert f"instance {instance}: nothing in /dev/shm" in capsys.readouterr().out
    assert not list(MOUNT.glob(f"stratad.{instance}.*"))


def test_bytes_that_changed_while_no_daemon_ran_are_never_served() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", range(TOKENS), range(TOKENS))
        extent = client.show("ns", "a").chunks[1]
        daemon.kill()
        segment = MOUNT / extent.segments[0].lstrip("/")
        with segment.open("r+b") as file:
            file.seek(64 * 1024 + 100)
            byte = file.read(1)
            file.seek(64 * 1024 + 100)
            file.write(bytes([byte[0] ^ 1]))
        daemon.start()
        before = engine.everything()
        with pytest.raises(StratadError, match="damaged"):
            engine.restore("a", range(TOKENS))
        assert [image.damaged for image in client.list_images()] == [True]
        assert engine.everything()[0] == before[0]


def test_a_journal_of_garbage_costs_the_images_and_nothing_else() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", range(TOKENS), range(TOKENS))
        daemon.kill()
        (MOUNT / f"stratad.{daemon.instance}.journal").write_bytes(os.urandom(100_000))
        daemon.start()
        assert conversations(client) == {}
        assert "of no use" in daemon.log
        engine.capture("b", range(TOKENS), range(TOKENS))
        daemon.kill()
        daemon.start()
        assert list(conversations(client)) == ["b"]


def test_a_journal_that_is_cut_short_under_the_daemon_is_written_anew() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon, daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
        engine.capture("a", range(TOKENS), range(TOKENS))
        os.truncate(MOUNT / f"stratad.{daemon.instance}.journal", 60)
        wait_until(lambda: client.stats() and "it is written anew" in daemon.log)
        engine.capture("b", [2] * TOKENS, range(TOKENS))
        daemon.kill()
        daemon.start()
        assert set(conversations(client)) == {"a", "b"}


def test_a_stop_leaves_nothing_where_nothing_is_held_or_nothing_is_to_be_kept() -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon:
        with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
            engine.capture("a", range(TOKENS), range(TOKENS))
            client.clear("ns")
        assert daemon.stop() == 0
        assert daemon.segments() == []
    with DaemonProcess("cpu:2") as daemon:
        with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
            engine.capture("a", range(TOKENS), range(TOKENS))
        assert daemon.stop() == 0
        assert daemon.segments() == []


def test_purge_frees_what_a_stopped_daemon_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("cpu:2", KEEP) as daemon:
        with daemon.client() as client, FakeEngine(client, LAYOUTS) as engine:
            engine.capture("a", range(TOKENS), range(TOKENS))
        purge = ["--instance", daemon.instance, "purge"]
        assert stratactl([*purge, "--yes"]) != 0
        assert "served by another daemon" in capsys.readouterr().err
        assert daemon.stop() == 0
        assert stratactl(purge) == 0
        assert "1 images in 2 segments of 8.0 MiB" in capsys.readouterr().out
        assert len(daemon.segments()) == 4
        assert stratactl([*purge, "--yes"]) == 0
        assert daemon.segments() == []


def test_a_daemon_whose_lock_was_removed_keeps_its_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither `purge` nor a daemon with another run directory takes them, although no worker is there to be seen."""
    with DaemonProcess("cpu:1", {**KEEP, "restarts.backoff_first_s": "30"}) as daemon, daemon.client() as client:
        with FakeEngine(client, LAYOUTS[:1]) as engine:
            engine.capture("a", range(TOKENS), range(TOKENS))
        psutil.Process(client.stats().workers[0].pid).kill()
        wait_until(lambda: client.stats().workers[0].deaths == 1)
        lock = MOUNT / f"stratad.{daemon.instance}.lock"
        segments = daemon.segments()
        wait_until(lock.exists)
        lock.unlink()
        assert stratactl(["--instance", daemon.instance, "purge", "--yes"]) != 0
        assert "is served by" in capsys.readouterr().err
        wait_until(lock.exists)
        lock.unlink()
        with tempfile.TemporaryDirectory(prefix="stratad-test-") as run_dir:
            command = [run_dir if word == str(daemon.run_dir) else word for word in daemon.command()]
            other = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert other.returncode == 3
        assert "is served by another daemon" in other.stderr
        assert set(segments) <= set(daemon.segments())
        assert client.stats().images == 1


def test_what_reading_a_large_journal_took_is_given_back() -> None:
    def lost(number: int) -> ImageRecord:
        places, makers = os.urandom(480), (("xxh3-128", key_id((daemon.state_dir / "digest.key").read_bytes())),)
        stage = StageRecord(bytes(80), b"\1\0\0\0" * 20, places, os.urandom(320), makers, bytes(20))
        return ImageRecord(
            number, "ns", 0, "f", {"model": "m"}, ("cpu:0",), f"c{number}", os.urandom(20_000), 1, (), None, (stage,),
            1.5, False,
        )  # fmt: skip

    with DaemonProcess("cpu:1", KEEP) as daemon:
        with daemon.client():
            before = psutil.Process(daemon.pid).memory_info().rss
        daemon.kill()
        journal = Journal(daemon.instance, [lost(number) for number in range(1, 4000)])
        journal.open()
        assert journal.file_bytes > 80 * 10**6
        journal.close()
        daemon.start()
        with daemon.client() as client:
            assert client.stats().counters["images_lost"] == 3999
            assert psutil.Process(daemon.pid).memory_info().rss < before + 16 * 1024 * 1024
