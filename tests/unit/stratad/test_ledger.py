"""Resident memory as the kernel tells it."""

import mmap
import os
import subprocess
import sys

import psutil

from shm.process import start_ticks
from stratad import ledger
from stratad.core.memory_tracks import Reading
from tests.support.wait import wait_until

MIB = 1 << 20
TAKEN = 32 * MIB


def parts_of(pid: int) -> Reading:
    reading = ledger.read_parts(pid)
    assert reading is not None
    return reading


def test_private_and_shared_memory_are_told_apart() -> None:
    before = parts_of(os.getpid())
    with mmap.mmap(-1, TAKEN, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        private.write(b"\1" * TAKEN)
        between = parts_of(os.getpid())
        with mmap.mmap(-1, TAKEN) as shared:
            shared.write(b"\1" * TAKEN)
            after = parts_of(os.getpid())
    assert between.anon_bytes - before.anon_bytes > TAKEN * 9 // 10
    assert between.shmem_bytes - before.shmem_bytes < TAKEN // 10
    assert after.shmem_bytes - between.shmem_bytes > TAKEN * 9 // 10
    assert after.pid == os.getpid()
    assert after.start_ticks == start_ticks(os.getpid())


def test_the_parts_make_up_the_whole() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # Asleep in its read, it takes no more memory.
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_SLEEPING)
        reading = wait_until(lambda: _same_as_rss(child.pid), 5)
        assert reading.file_bytes > 0
    finally:
        child.communicate()


def _same_as_rss(pid: int) -> Reading | None:
    reading = parts_of(pid)
    return reading if reading.resident_bytes == psutil.Process(pid).memory_info().rss else None


def test_a_process_that_has_ended_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert ledger.read_parts(child.pid) is None
    child.wait()
    assert ledger.read_parts(child.pid) is None


def test_settled_is_the_callers_word() -> None:
    reading = ledger.read_parts(os.getpid(), settled=False)
    assert reading is not None
    assert not reading.settled
