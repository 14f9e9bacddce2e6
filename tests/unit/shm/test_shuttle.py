"""Making, attaching and giving back shuttles, on real shared memory."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from shm.extent import GRANULE_BYTES
from shm.header import ShuttleHeader, pack_header
from shm.headroom import Headroom
from shm.process import boot_id
from shm.shuttle import (
    MARGIN_BYTES,
    STEP_BYTES,
    Shuttle,
    ShuttleError,
    ShuttleFault,
    read_header,
    unlink,
)
from tests.support.instances import fresh_instance

SIZE_BYTES = 4 * GRANULE_BYTES


@pytest.fixture
def header() -> Iterator[ShuttleHeader]:
    header = ShuttleHeader(fresh_instance(), "cpu_0", 0, SIZE_BYTES, boot_id())
    yield header
    unlink(header.segment)


def file_of(header: ShuttleHeader) -> Path:
    return Path("/dev/shm") / header.segment[1:]


def make_by_hand(
    header: ShuttleHeader, *, size_bytes: int = SIZE_BYTES, mode: int = 0o600, sparse: int = False
) -> None:
    segment = posix_ipc.SharedMemory(header.segment, posix_ipc.O_CREX, mode=0o600, size=0)
    try:
        os.fchmod(segment.fd, mode)
        if sparse:
            os.ftruncate(segment.fd, size_bytes)
        else:
            os.posix_fallocate(segment.fd, 0, size_bytes)
        os.pwrite(segment.fd, pack_header(header), 0)
    finally:
        segment.close_fd()


def attach_fault(header: ShuttleHeader) -> tuple[ShuttleFault, str]:
    with pytest.raises(ShuttleError) as caught:
        Shuttle.attach(header)
    return caught.value.fault, str(caught.value)


def test_two_mappings_share_their_bytes(header: ShuttleHeader) -> None:
    with Shuttle.create(header) as maker, Shuttle.attach(header) as other:
        assert len(maker.view) == len(other.view) == SIZE_BYTES
        maker.view[-3:] = b"abc"
        assert bytes(other.view[-3:]) == b"abc"
        assert read_header(header.segment) == header


def test_every_page_is_reserved_and_only_ours_whatever_the_umask(header: ShuttleHeader) -> None:
    before = os.umask(0o777)
    try:
        Shuttle.create(header).close()
    finally:
        os.umask(before)
    status = file_of(header).stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= SIZE_BYTES == status.st_size


def test_the_name_outlives_the_mapping_and_goes_with_unlink(header: ShuttleHeader) -> None:
    Shuttle.create(header).close()
    assert file_of(header).exists()
    assert unlink(header.segment)
    assert not file_of(header).exists()
    assert not unlink(header.segment)


def test_address_is_where_the_view_lies(header: ShuttleHeader) -> None:
    with Shuttle.create(header) as shuttle:
        array = np.frombuffer(shuttle.view, np.uint8)
        assert array.ctypes.data == shuttle.address
        del array
    with pytest.raises(ValueError, match="closed"):
        _ = shuttle.address


def test_close_with_views_outstanding_lingers_until_they_go(header: ShuttleHeader) -> None:
    shuttle = Shuttle.create(header)
    shuttle.view[GRANULE_BYTES] = 9
    array = np.frombuffer(shuttle.view, np.uint8)
    shuttle.close()
    shuttle.close()
    assert array[GRANULE_BYTES] == 9
    assert header.segment in Path("/proc/self/maps").read_text()
    del array
    assert header.segment not in Path("/proc/self/maps").read_text()


def test_a_taken_name_is_left_alone(header: ShuttleHeader) -> None:
    with Shuttle.create(header) as first:
        first.view[GRANULE_BYTES] = 5
        with pytest.raises(ShuttleError, match="exists") as caught:
            Shuttle.create(header)
        assert caught.value.fault is ShuttleFault.EXISTS
        with Shuttle.attach(header) as again:
            assert again.view[GRANULE_BYTES] == 5


@pytest.mark.parametrize("size_bytes", [0, GRANULE_BYTES, SIZE_BYTES + 1, 2**30 + GRANULE_BYTES, -GRANULE_BYTES])
def test_sizes_that_cannot_be(size_bytes: int) -> None:
    header = ShuttleHeader(fresh_instance(), "cpu_0", 0, size_bytes, boot_id())
    with pytest.raises(ValueError, match="shuttle_bytes"):
        Shuttle.create(header)
    assert not file_of(header).exists()


def test_progress_comes_in_steps_and_can_stop_it(header: ShuttleHeader) -> None:
    large = ShuttleHeader(header.instance, "cpu_0", 1, STEP_BYTES + 2 * GRANULE_BYTES, header.boot_id)
    steps: list[int] = []

    def stop_at_second(reserved_bytes: int) -> bool:
        steps.append(reserved_bytes)
        return reserved_bytes < STEP_BYTES

    with pytest.raises(ShuttleError) as caught:
        Shuttle.create(large, on_step=stop_at_second)
    assert caught.value.fault is ShuttleFault.CANCELLED
    assert steps == [GRANULE_BYTES, STEP_BYTES]
    assert not file_of(large).exists()


def test_a_maker_that_ends_halfway_has_left_its_header(header: ShuttleHeader) -> None:
    seen: list[ShuttleHeader] = []

    def look(_reserved_bytes: int) -> bool:
        seen.append(read_header(header.segment))
        return True

    Shuttle.create(header, on_step=look).close()
    assert seen == [header, header]


def test_an_error_of_the_callback_leaves_nothing(header: ShuttleHeader) -> None:
    def fail(_reserved_bytes: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Shuttle.create(header, on_step=fail)
    assert not file_of(header).exists()


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_no_headroom_is_an_error_that_names_the_limit(header: ShuttleHeader, calls_before: int) -> None:
    calls: list[int] = []

    def shrinking() -> Headroom:
        calls.append(1)
        free_bytes = 2**40 if len(calls) <= calls_before else MARGIN_BYTES + 100
        return Headroom(free_bytes, "memory.max of a test")

    with pytest.raises(ShuttleError, match=r"memory\.max of a test") as caught:
        Shuttle.create(header, headroom=shrinking)
    assert caught.value.fault is ShuttleFault.NO_SPACE
    assert caught.value.wanted_bytes > caught.value.free_bytes == 100
    assert not file_of(header).exists()


def test_a_full_tmpfs_is_an_error_that_names_it(header: ShuttleHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ShuttleError, match="/dev/shm") as caught:
        Shuttle.create(header)
    assert caught.value.fault is ShuttleFault.NO_SPACE
    assert not file_of(header).exists()


def test_attach_missing(header: ShuttleHeader) -> None:
    assert attach_fault(header)[0] is ShuttleFault.MISSING


def test_too_few_descriptors_are_no_fault_of_the_segment(header: ShuttleHeader) -> None:
    """One is needed to open it, and none for the mapping."""
    Shuttle.create(header).close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        fault, text = attach_fault(header)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
        Shuttle.attach(header).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert fault is ShuttleFault.UNAVAILABLE
    assert f"this process may have {lowest} files open" in text


@pytest.mark.parametrize(
    ("made", "form", "problem"),
    [
        ("same", {"mode": 0o640}, "mode"),
        ("same", {"size_bytes": SIZE_BYTES + GRANULE_BYTES}, "bytes"),
        ("same", {"size_bytes": SIZE_BYTES - GRANULE_BYTES}, "bytes"),
        ("same", {"sparse": True}, "reserved"),
        ("other boot", {}, "header"),
        ("other size", {}, "header"),
    ],
)
def test_attach_refuses_what_does_not_match(
    header: ShuttleHeader, made: str, form: dict[str, int], problem: str
) -> None:
    make_by_hand(header, **form)
    expected = {
        "same": header,
        "other boot": ShuttleHeader(header.instance, header.worker, 0, SIZE_BYTES, b"another boot's.."),
        "other size": ShuttleHeader(header.instance, header.worker, 0, SIZE_BYTES * 2, header.boot_id),
    }[made]
    fault, text = attach_fault(expected)
    assert fault is ShuttleFault.REFUSED
    assert problem in text


def test_attach_refuses_a_segment_without_a_header(header: ShuttleHeader) -> None:
    make_by_hand(header)
    file_of(header).write_bytes(bytes(SIZE_BYTES))
    assert attach_fault(header)[0] is ShuttleFault.REFUSED


def test_attach_refuses_a_segment_under_another_name(header: ShuttleHeader) -> None:
    make_by_hand(header)
    other = ShuttleHeader(header.instance, "cpu_1", 0, SIZE_BYTES, header.boot_id)
    file_of(header).rename(file_of(other))
    try:
        assert attach_fault(other)[0] is ShuttleFault.REFUSED
    finally:
        unlink(other.segment)


def test_attach_refuses_a_foreign_owner(header: ShuttleHeader) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    make_by_hand(header)
    os.chown(file_of(header), 65534, 65534)
    fault, text = attach_fault(header)
    assert fault is ShuttleFault.REFUSED
    assert "65534" in text


def test_attach_refuses_a_symlink(header: ShuttleHeader, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(pack_header(header) + bytes(SIZE_BYTES))
    file_of(header).symlink_to(target)
    assert attach_fault(header)[0] is ShuttleFault.REFUSED
