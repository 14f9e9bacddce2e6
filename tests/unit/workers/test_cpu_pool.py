"""A pool of a cpu device is mapped before it is needed, as far as its engine has memory for it."""

import fcntl
import mmap
import os
import resource

import pytest

from ipc.messages import MemfdPool, Stage
from shm.layout import Plane, StageLayout, one_group
from shm.memfd import create_pool
from workers.cpu_pool import CpuPool, open_host_pool

PAGES = 10240
SIZE = PAGES * mmap.PAGESIZE


def opened(descriptor: int) -> CpuPool:
    layout = StageLayout(one_group([Plane(0, mmap.PAGESIZE, mmap.PAGESIZE, PAGES)]), chunk_tokens=16)
    stage = Stage(0, "cpu:0", MemfdPool(1, SIZE), layout, bytes(8), bytes(16))
    return open_host_pool(stage, descriptor, lambda: None)


def faults_of_reading(pool: CpuPool, start: int, end: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(start, end):
        pool.read(page * mmap.PAGESIZE, 1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("mapped", [False, True])
def test_pages_that_are_mapped_do_not_fault(mapped: bool) -> None:
    descriptor = create_pool("pool", SIZE)
    pool = opened(descriptor)
    try:
        steps = 1
        while mapped and pool.map_some():
            steps += 1
        faults = faults_of_reading(pool, 0, PAGES)
        # The kernel maps up to 16 neighbours at a fault.
        assert (steps, faults < 64) == ((3, True) if mapped else (1, False))
    finally:
        pool.close()
        os.close(descriptor)
    assert not pool.map_some()


def test_what_its_engine_has_not_reserved_does_not_become_memory() -> None:
    descriptor = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    written = range(512, 1024)
    for page in (0, *written):
        os.pwrite(descriptor, bytes(mmap.PAGESIZE), page * mmap.PAGESIZE)
    blocks = os.fstat(descriptor).st_blocks
    os.lseek(descriptor, 5 * mmap.PAGESIZE, os.SEEK_SET)
    pool = opened(descriptor)
    try:
        # The engine has this place in common with the descriptor that it sent, and may be writing there.
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 5 * mmap.PAGESIZE
        while pool.map_some():
            pass
        assert os.fstat(descriptor).st_blocks == blocks
        assert faults_of_reading(pool, written.start, written.stop) < 8
    finally:
        pool.close()
        os.close(descriptor)


def test_a_pool_of_many_small_parts_is_opened_all_the_same() -> None:
    pages = PAGES // 2
    descriptor = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    for page in range(pages):
        os.pwrite(descriptor, bytes(1), 2 * page * mmap.PAGESIZE)
    pool = opened(descriptor)
    try:
        steps = 1
        while pool.map_some():
            steps += 1
        assert steps == 4096
    finally:
        pool.close()
        os.close(descriptor)
