"""Sealed pools, and descriptors that are none."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import posix_ipc
import pytest

from shm.memfd import PoolError, create_pool, map_pool
from tests.support.instances import fresh_instance

SIZE_BYTES = 100_000


def test_a_pool_is_shared_reserved_and_cannot_change_its_size() -> None:
    descriptor = create_pool("pool", SIZE_BYTES)
    try:
        with map_pool(descriptor, SIZE_BYTES) as one, map_pool(descriptor, SIZE_BYTES) as other:
            one[SIZE_BYTES - 1] = 7
            assert other[SIZE_BYTES - 1] == 7
        assert os.fstat(descriptor).st_blocks * 512 >= SIZE_BYTES
        for size_bytes in (0, SIZE_BYTES - 1, SIZE_BYTES + 1, 2 * SIZE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_the_mapping_outlives_the_descriptor() -> None:
    descriptor = create_pool("pool", SIZE_BYTES)
    mapping = map_pool(descriptor, SIZE_BYTES)
    os.close(descriptor)
    with mapping:
        mapping[5] = 1
        assert mapping[5] == 1


@pytest.mark.parametrize("size_bytes", [0, -1, 2**62])
def test_pools_that_cannot_be_made(size_bytes: int) -> None:
    with pytest.raises(PoolError):
        create_pool("pool", size_bytes)


@pytest.mark.parametrize("promised_bytes", [SIZE_BYTES + 1, 2**40, 0, -5])
def test_a_pool_shorter_than_promised(promised_bytes: int) -> None:
    descriptor = create_pool("pool", SIZE_BYTES)
    try:
        with pytest.raises(PoolError, match=str(SIZE_BYTES)):
            map_pool(descriptor, promised_bytes)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_a_memfd_that_may_still_shrink(seals: int) -> None:
    descriptor = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(PoolError, match="shrink"):
            map_pool(descriptor, SIZE_BYTES)
    finally:
        os.close(descriptor)


def test_a_memfd_that_cannot_be_written() -> None:
    descriptor = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        with pytest.raises(PoolError, match="write"):
            map_pool(descriptor, SIZE_BYTES)
    finally:
        os.close(descriptor)


def test_descriptors_that_are_no_memfd(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE_BYTES))
    read_end, write_end = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR)
    folder = os.open(tmp_path, os.O_RDONLY)
    one, other = socket.socketpair()
    name = f"/stratad.{fresh_instance()}.x.0"
    segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=SIZE_BYTES)
    try:
        for descriptor in (read_end, write_end, plain, folder, one.fileno(), segment.fd):
            with pytest.raises(PoolError, match="sealed"):
                map_pool(descriptor, SIZE_BYTES)
    finally:
        for descriptor in (read_end, write_end, plain, folder):
            os.close(descriptor)
        one.close()
        other.close()
        segment.close_fd()
        segment.unlink()


def test_a_closed_descriptor() -> None:
    descriptor = create_pool("pool", 1)
    os.close(descriptor)
    with pytest.raises(PoolError) as caught:
        map_pool(descriptor, 1)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EBADF
