"""Mappings that a huge page fits into, on real shared memory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm.mapping import HUGE_PAGE_BYTES, SharedMapping

SIZE_BYTES = 3 * HUGE_PAGE_BYTES + 64 * 1024


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A file in shared memory without a name, all of it reserved."""
    made = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(made, 0, SIZE_BYTES)
    yield made
    os.close(made)


def mapped_at(address: int) -> str:
    """What /proc says of the mapping that begins there; "" if none does."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*?(?=^[0-9a-f]+-|\Z)", text, re.DOTALL | re.MULTILINE)
    return found.group() if found else ""


def huge_bytes(address: int) -> int:
    return 1024 * int(re.findall(r"^ShmemPmdMapped: +(\d+) kB$", mapped_at(address), re.MULTILINE)[0])


def test_it_begins_at_a_huge_page_and_nothing_of_the_room_around_it_stays(descriptor: int) -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    mappings = [SharedMapping.of(descriptor, SIZE_BYTES) for _ in range(3)]
    for mapping in mappings:
        assert mapping.address % HUGE_PAGE_BYTES == 0
        assert len(mapping.view) == SIZE_BYTES
    mappings[0].view[-1] = 7
    assert mappings[2].view[-1] == 7
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 3
    for mapping in mappings:
        address = mapping.address
        mapping.close()
        mapping.close()
        assert not mapped_at(address)


def test_whoever_holds_a_part_of_it_keeps_it_mapped(descriptor: int) -> None:
    mapping = SharedMapping.of(descriptor, SIZE_BYTES)
    mapping.view[5] = 9
    part = np.frombuffer(mapping.view[4:8], np.uint8)
    mapping.close()
    assert len(mapping.view) == 0
    assert part[1] == 9
    assert mapped_at(mapping.address)
    del part
    assert not mapped_at(mapping.address)


def test_a_file_that_cannot_be_mapped_is_an_error_and_takes_no_room() -> None:
    reader, writer = os.pipe()
    before = Path("/proc/self/maps").read_text().count("\n")
    with pytest.raises(OSError, match=r"No such device|Permission denied"):
        SharedMapping.of(reader, SIZE_BYTES)
    assert Path("/proc/self/maps").read_text().count("\n") <= before
    os.close(reader)
    os.close(writer)


def test_populate_enters_every_page_in_steps_and_stops_when_told(descriptor: int) -> None:
    def resident(mapping: SharedMapping) -> int:
        return 1024 * int(re.findall(r"^Rss: +(\d+) kB$", mapped_at(mapping.address), re.MULTILINE)[0])

    mapping = SharedMapping.of(descriptor, SIZE_BYTES)
    assert not mapping.populate(HUGE_PAGE_BYTES, lambda: False)
    assert resident(mapping) == HUGE_PAGE_BYTES
    assert not mapping.populate(HUGE_PAGE_BYTES)
    assert resident(mapping) == SIZE_BYTES
    mapping.close()


def test_collapse_puts_the_pages_together_and_keeps_every_byte(descriptor: int) -> None:
    mapping = SharedMapping.of(descriptor, SIZE_BYTES)
    written = np.random.default_rng(5).integers(0, 256, SIZE_BYTES, np.uint8)
    np.frombuffer(mapping.view, np.uint8)[:] = written
    assert huge_bytes(mapping.address) == 0
    done = mapping.collapse(HUGE_PAGE_BYTES)
    if not done:
        pytest.skip("this kernel has no huge page to give")
    assert not mapping.populate(HUGE_PAGE_BYTES)
    assert huge_bytes(mapping.address) >= done
    assert np.array_equal(np.frombuffer(mapping.view, np.uint8), written)
    other = SharedMapping.of(descriptor, SIZE_BYTES)
    assert not other.populate(HUGE_PAGE_BYTES)
    assert huge_bytes(other.address) >= done  # what a next process maps
    other.close()
    mapping.close()


def test_collapse_stops_when_told(descriptor: int) -> None:
    mapping = SharedMapping.of(descriptor, SIZE_BYTES)
    done = mapping.collapse(HUGE_PAGE_BYTES, lambda: False)
    assert done <= HUGE_PAGE_BYTES
    mapping.close()
