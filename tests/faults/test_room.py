"""Too little room: /dev/shm that is small, full or filled by others, and a memory cgroup near its limit.

Every shortage is refused with its limit and numbers, costs no process and no image, and ends by itself.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shm.shuttle import JOURNAL_BYTES
from stratad.client import Client
from stratad.errors import Busy, NoSpace
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, slot_layout
from tests.support.namespaces import MIB, MemoryCgroup, SmallShm, memory_cgroup
from tests.support.wait import wait_until

# 2048 rows of 4 planes of 1 KiB: an image of all of them takes 8 MiB, two shuttles and more.
LAYOUT = slot_layout(row_bytes=1024)
SETTINGS = {"ram.grow_again_s": "0.1", "ram.shuttle_bytes": "4MiB"}


def settled(client: Client, health: str) -> None:
    wait_until(lambda: client.stats().health == health, timeout_s=20, what=f"health {health}")


def check_restores(engine: FakeEngine, conversation: str, expected: list[list[bytes]], rows: range) -> None:
    for pool in engine.pools:
        pool.buffer[:] = bytes(pool.nbytes)
    engine.restore(conversation, rows)
    assert engine.contents(rows, len(rows)) == expected


def test_a_full_dev_shm_is_told_with_numbers_and_its_end_is_noticed() -> None:
    rows, small = range(2048), range(300)
    with SmallShm.make(24 * MIB) as shm:
        daemon = DaemonProcess("cpu:1", SETTINGS, prefix=shm.prefix, shm=shm.folder)
        with contextlib.ExitStack() as stack:
            with shm.filled():
                assert shm.free_bytes == 0
                stack.enter_context(daemon)
                client = stack.enter_context(daemon.client())
                engine = stack.enter_context(FakeEngine(client, (LAYOUT,)))
                settled(client, "degraded")
                lacking = "a shuttle needs 4194304 bytes, 0 are free under /dev/shm"
                wait_until(lambda: lacking in client.stats().workers[0].detail)
                with pytest.raises(Busy, match=r"the journal cannot be written: .* 0 are free under /dev/shm"):
                    engine.capture("small", small, small)
                assert "0 are free" in client.stats().journal_error
                assert daemon.segments() == [f"stratad.{daemon.instance}.lock"]
                again = subprocess.run(daemon.command(), capture_output=True, timeout=20, check=False)
                assert (again.returncode, b"is served by another daemon" in again.stderr) == (3, True)
            settled(client, "ok")  # nobody has asked for anything
            expected = engine.contents(small, 300)
            engine.capture("small", small, small)
            with shm.filled(leave_bytes=MIB):
                with pytest.raises(NoSpace, match=r"1048576 are free under /dev/shm: make it larger"):
                    engine.capture("large", rows, rows)
                settled(client, "degraded")
                check_restores(engine, "small", expected, small)
            settled(client, "ok")
            engine.capture("small", small, small)
            (worker,) = client.stats().workers
            assert (worker.deaths, worker.detail) == (0, "")
            engine.fill()
            large = engine.contents(rows, 2048)
            engine.capture("large", rows, rows)
            check_restores(engine, "large", large, rows)
            assert daemon.log.count("shuttle failed") <= 4, "a line an episode, not one a try"


def test_shuttles_leave_the_journal_room_to_grow() -> None:
    """Or it could not be written for as long as they are there: nothing would be captured, dropped or pinned."""
    rows = range(2048)
    with SmallShm.make(24 * MIB) as shm:
        daemon = DaemonProcess("cpu:1", SETTINGS, prefix=shm.prefix, shm=shm.folder)
        with daemon, daemon.client() as client, FakeEngine(client, (LAYOUT,)) as engine:
            engine.capture("small", range(300), range(300))
            with shm.filled(leave_bytes=4 * MIB + JOURNAL_BYTES - MIB):
                with pytest.raises(NoSpace, match=rf"5242880 are free .* {JOURNAL_BYTES} stay for the journal"):
                    engine.capture("large", rows, rows)
                assert shm.free_bytes >= JOURNAL_BYTES
            settled(client, "ok")
            engine.capture("large", rows, rows)


def test_ten_kills_and_starts_leave_the_use_of_dev_shm_flat() -> None:
    """The leftover of a killed daemon is taken over, not made once more beside it. There is room for the journal
    (2 MiB) twice, since the next daemon begins a new one, and for no further shuttle.
    """
    budget_bytes, overhead_bytes = 16 * MIB, 4 * MIB + 64 * 1024
    settings = {**SETTINGS, "ram.budget_bytes": str(budget_bytes), "ram.prefault": "true"}
    with SmallShm.make(budget_bytes * 13 // 10) as shm:
        daemon = DaemonProcess("cpu:1", settings, prefix=shm.prefix, shm=shm.folder)
        expected: list[list[bytes]] = []
        try:
            for number in range(10):
                with daemon.start().client() as client, FakeEngine(client, (LAYOUT,), seed=number) as engine:
                    wait_until(lambda c=client: c.stats().workers[0].mapped == 4, timeout_s=20, what="the whole arena")  # type: ignore[misc]
                    if expected:
                        check_restores(engine, "a", expected, range(300))
                    engine.fill()
                    expected = engine.contents(range(300), 300)
                    engine.capture("a", range(300), range(300))
                    check_restores(engine, "a", expected, range(300))
                    assert shm.used_bytes <= budget_bytes + overhead_bytes
                    assert client.stats().health == "ok"
                    daemon.kill()
        finally:
            daemon.close()


@pytest.fixture(scope="module")
def group() -> Iterator[MemoryCgroup]:
    """A cgroup whose limit is its parent's, as of a container in a container."""
    with memory_cgroup(192 * MIB) as made:
        yield made


@contextmanager
def within(group: MemoryCgroup, settings: dict[str, str]) -> Iterator[tuple[DaemonProcess, Client]]:
    group.limit(192 * MIB)
    with DaemonProcess("cpu:1", {**SETTINGS, **settings}, prefix=group.prefix) as daemon, daemon.client() as client:
        yield daemon, client


def test_near_the_limit_of_its_cgroup_an_arena_stops_growing_and_nobody_is_killed(group: MemoryCgroup) -> None:
    wanted = {"ram.budget_bytes": "256MiB", "ram.shuttle_bytes": "32MiB", "ram.prefault": "true"}
    with within(group, wanted) as (daemon, client), FakeEngine(client, (LAYOUT,)) as engine:
        settled(client, "degraded")
        (worker,) = client.stats().workers
        assert f"are free under {group.limit_file} = {192 * MIB}" in worker.detail
        assert "a shuttle needs 33554432 bytes" in worker.detail
        assert 0 < worker.shuttle_bytes < 192 * MIB
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        group.limit(512 * MIB)
        wait_until(lambda: client.stats().workers[0].shuttle_bytes == 256 * MIB, timeout_s=20)
        settled(client, "ok")
        check_restores(engine, "a", expected, range(300))
        assert (client.stats().workers[0].deaths, group.oom_kills) == (0, 0)
        assert "the budget is larger than what there is now" in daemon.log
        assert f"{group.limit_file} = {192 * MIB}" in daemon.log


def test_auto_takes_the_least_limit_on_the_path_and_a_kill_for_memory_is_named(group: MemoryCgroup) -> None:
    with within(group, {"ram.budget_bytes": "auto"}) as (daemon, client), FakeEngine(client, (LAYOUT,)) as engine:
        stats = client.stats()
        assert str(group.limit_file) in stats.settings["ram.budget_source"]
        assert stats.budget_bytes < 192 * MIB // 4
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        victim = client.stats().workers[0].pid
        # The kernel takes the worker first; whoever takes all the memory here ends when it has.
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
        subprocess.run([*group.prefix, sys.executable, "-c", _HOG, str(victim)], check=False, timeout=20)
        wait_until(lambda: client.stats().workers[0].deaths == 1, timeout_s=20)
        settled(client, "ok")
        check_restores(engine, "a", expected, range(300))
        assert group.oom_kills >= 1
        assert "killed by SIGKILL, and the cgroup's count of kills for lack of memory rose from 0 to 1" in daemon.log


_HOG = """
import sys
taken = []
def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
while lives(sys.argv[1]):
    taken.append(b"x" * 262144)
"""
