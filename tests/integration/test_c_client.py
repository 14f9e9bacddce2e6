"""An engine that is not written in Python: the client in C of `tests/c_client`, against a real daemon."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.layout import Plane, StageLayout, one_group
from stratad.client import Client, CpuPool, StagePool
from stratad.paths import socket_paths
from tests.support.c_client import RUN_S, CannotBuild, build_client
from tests.support.daemon import DaemonProcess
from tests.support.wait import wait_until

# As in client.c.
NAMESPACE = "c"
TOKENS = [7 * n + 3 for n in range(600)]
SOURCE = [*range(400, 700), *range(100, 400)]
LAYOUT = StageLayout(one_group((Plane(0, 64, 64, 1024), Plane(65536, 48, 80, 1024))))
POOL_BYTES = 147456
FINGERPRINT = dict.fromkeys(("model", "revision", "dtype", "kv_format", "engine_build"), "c-1")
REFUSED = {
    "stats": "hello_first",
    "wrong version": "wrong_version",
    "truncated frame": "bad_frame",
    "two frames": "bad_frame",
    "dance": "unknown_op",
    "missing field": "bad_request",
    "unregister": "not_registered",
    "descriptor never sent": "unshareable",
    "unsealed pool": "unshareable",
    "wrong probe": "probe_failed",
    "rows out of range": "bad_rows",
    "rows twice": "bad_rows",
    "too few rows": "bad_rows",
    "an empty run": "bad_rows",
    "no such image": "unknown_conversation",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, compiled."""
    try:
        return build_client(tmp_path_factory.mktemp("c_client"))
    except CannotBuild as missing:
        pytest.skip(str(missing))
    except subprocess.CalledProcessError as failed:
        pytest.fail(f"{failed}\n{failed.stderr}")


@pytest.fixture
def clean(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The shared daemon; what the test leaves in the namespace is dropped."""
    yield daemon
    with daemon.client() as client:
        client.clear(NAMESPACE)


def command(program: Path, daemon: DaemonProcess, mode: str) -> list[str]:
    return [str(program), str(socket_paths(daemon.run_dir, daemon.instance).directory), mode]


def run(program: Path, daemon: DaemonProcess, mode: str) -> list[str]:
    """The lines that the program printed; it must end well and complain of nothing."""
    ended = subprocess.run(command(program, daemon, mode), timeout=RUN_S, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), f"{ended.stdout}{ended.stderr}"
    return ended.stdout.splitlines()


def images(client: Client) -> dict[str, int]:
    """Conversations of the C engine's namespace, with their tokens."""
    return {image.conversation: image.tokens for image in client.list_images(NAMESPACE)}


def pattern() -> bytes:
    """What the C engine's pool holds at first."""
    return bytes((n * 2654435761 & 0xFFFFFFFF) >> 24 for n in range(POOL_BYTES))


def tokens_of(memory: bytes | memoryview, rows: list[int]) -> list[bytes]:
    """The bytes of tokens in rows, plane by plane."""
    return [
        bytes(memory[plane.offset_bytes + row * plane.row_stride_bytes :][: plane.row_bytes])
        for plane in LAYOUT.planes
        for row in rows
    ]


def restored(client: Client, conversation: str) -> list[bytes]:
    """The bytes of an image of the C engine, as an engine in Python gets them."""
    rows = list(range(len(TOKENS)))
    with CpuPool.allocate(POOL_BYTES) as pool:
        engine = client.register("python", NAMESPACE, FINGERPRINT, [StagePool("cpu:0", LAYOUT, pool)])
        engine.restore(conversation, rows=rows, slot=0).result()
        found = tokens_of(pool.buffer, rows)
        engine.unregister()
    return found


def test_the_image_that_it_leaves_is_everybodys(program: Path, clean: DaemonProcess, client: Client) -> None:
    (line,) = run(program, clean, "story")
    assert images(client) == {"talk": len(TOKENS)}
    assert line == f"all right: image {client.list_images(NAMESPACE)[0].image_id}"
    assert restored(client, "talk") == tokens_of(pattern(), SOURCE)


def test_it_is_refused_with_codes_and_served_on(program: Path, clean: DaemonProcess, client: Client) -> None:
    lines = run(program, clean, "trials")
    assert dict(line.split(" refused: ") for line in lines if " refused: " in line) == REFUSED
    assert "packet without a descriptor: dropped" in lines
    assert lines[-1].startswith("all right: ")
    assert images(client) == {"talk": len(TOKENS)}
    stats = client.stats()
    assert (stats.pid, stats.health, stats.engines, stats.ops) == (clean.pid, "ok", (), ())
    assert all(worker.deaths == 0 for worker in stats.workers)
    assert "captures_failed" not in stats.counters  # refused before any worker was asked


def test_without_a_daemon_it_names_the_step(program: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(program), str(tmp_path), "story"], timeout=RUN_S, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("lifeline: nobody listens")


def test_a_refusal_of_the_daemon_is_named_with_its_code(program: Path) -> None:
    with DaemonProcess("cpu:1", faults={"cpu:0#1/capture.copy_error": "1"}) as daemon:
        ended = subprocess.run(
            command(program, daemon, "story"), timeout=RUN_S, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1
        assert ended.stderr.startswith("capture: failed with device_error: ")


@pytest.fixture
def stalled(program: Path) -> Iterator[tuple[DaemonProcess, "subprocess.Popen[str]"]]:
    """A daemon whose second capture never ends, and the client in the middle of that one."""
    settings = {"deadlines.job_floor_s": "4"}
    with DaemonProcess("cpu:1", settings, faults={"cpu:0#1/capture.copy_stall": "2"}) as daemon:
        engine = subprocess.Popen(
            command(program, daemon, "hold"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "capturing\n"
            yield daemon, engine
        finally:
            engine.kill()
            engine.communicate()


def test_its_death_in_a_capture_closes_its_engine_and_keeps_its_image(
    stalled: tuple[DaemonProcess, "subprocess.Popen[str]"],
) -> None:
    daemon, engine = stalled
    with daemon.client() as client:
        (op,) = wait_until(lambda: client.stats().ops, what="the second capture is under way")
        assert (op.kind, op.conversation) == ("capture", "torn")
        assert [(e.pid, e.engine) for e in client.stats().engines] == [(engine.pid, "c engine")]
        engine.kill()
        assert engine.wait(RUN_S) == -signal.SIGKILL
        wait_until(lambda: not client.stats().engines, timeout_s=20.0, what="the engine is closed")
        assert client.stats().ops == ()
        assert images(client) == {"kept": len(TOKENS)}
        assert restored(client, "kept") == tokens_of(pattern(), SOURCE)


def test_it_sees_the_daemons_death(stalled: tuple[DaemonProcess, "subprocess.Popen[str]"]) -> None:
    daemon, engine = stalled
    daemon.kill()
    _, complaint = engine.communicate(timeout=RUN_S)
    assert (engine.returncode, complaint) == (1, "capture: the lifeline ended\n")
