"""The janitor takes what is this instance's and nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.extent import GRANULE_BYTES
from shm.header import ShuttleHeader
from shm.janitor import Segment, list_segments, remove_segment, remove_segments
from shm.process import boot_id
from shm.shuttle import Shuttle
from tests.support.instances import fresh_instance

SHM = Path("/dev/shm")


@pytest.fixture
def instance() -> Iterator[str]:
    instance = fresh_instance()
    yield instance
    for path in SHM.glob(f"stratad.{instance}*"):
        path.unlink()


def make(instance: str, index: int) -> str:
    header = ShuttleHeader(instance, "cpu_0", index, 2 * GRANULE_BYTES, boot_id())
    Shuttle.create(header).close()
    return header.segment


def test_lists_and_removes_its_own(instance: str) -> None:
    names = [make(instance, index) for index in (0, 1, 2)]
    assert [segment.name for segment in list_segments(instance)] == names
    assert [segment.name for segment in remove_segments(instance, keep={names[1]})] == [names[0], names[2]]
    assert [segment.name for segment in list_segments(instance)] == [names[1]]


def test_another_instance_is_not_touched(instance: str) -> None:
    other = f"{instance}x"
    kept = make(other, 0)
    assert list_segments(instance) == []
    assert remove_segments(instance) == []
    assert [segment.name for segment in remove_segments(other)] == [kept]


@pytest.mark.parametrize("name", ["stratad.{}.cpu_0.7.bak", "stratad.{}.journal", "stratad.{}.cpu_0.x"])
def test_files_of_no_segment_name_stay(instance: str, name: str) -> None:
    path = SHM / name.format(instance)
    path.write_bytes(b"somebody's data" * 100)
    path.chmod(0o600)
    assert remove_segments(instance) == []
    assert path.exists()


@pytest.mark.parametrize(("content", "mode"), [(bytes(GRANULE_BYTES), 0o600), (b"another format" * 100, 0o640)])
def test_a_header_that_cannot_be_read_does_not_keep_the_name(instance: str, content: bytes, mode: int) -> None:
    """Its maker was killed before it wrote one, or was of another version: the next maker needs the name."""
    path = SHM / f"stratad.{instance}.cpu_0.0"
    path.write_bytes(content)
    path.chmod(mode)
    expected = [Segment(f"/{path.name}", None, len(content))]
    assert list_segments(instance) == expected
    assert remove_segments(instance) == expected
    make(instance, 0)


def test_a_segment_with_the_header_of_another_goes_too(instance: str) -> None:
    renamed = SHM / f"stratad.{instance}.cpu_0.5"
    (SHM / make(instance, 0)[1:]).rename(renamed)
    assert [(segment.name, segment.header) for segment in remove_segments(instance)] == [(f"/{renamed.name}", None)]


def test_a_foreign_owner_stays(instance: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(SHM / make(instance, 0)[1:], 65534, 65534)
    empty = SHM / f"stratad.{instance}.cpu_0.1"
    empty.touch(0o600)
    os.chown(empty, 65534, 65534)
    assert remove_segments(instance) == []


def test_what_a_killed_maker_left_goes(instance: str) -> None:
    empty = SHM / f"stratad.{instance}.cpu_0.0"
    empty.touch(0o600)
    half = make(instance, 1)
    os.truncate(SHM / half[1:], GRANULE_BYTES)
    removed = remove_segments(instance)
    assert [(segment.name, segment.header is None) for segment in removed] == [(f"/{empty.name}", True), (half, False)]
    assert not empty.exists()


def test_symlinks_stay(instance: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    link = SHM / f"stratad.{instance}.cpu_0.0"
    link.symlink_to(target)
    assert remove_segments(instance) == []
    assert link.is_symlink()


def test_one_segment_goes_only_if_it_is_a_plain_file_of_ours(instance: str, tmp_path: Path) -> None:
    assert remove_segment(make(instance, 0))
    assert not remove_segment(f"/stratad.{instance}.cpu_0.0")
    link = SHM / f"stratad.{instance}.cpu_0.1"
    link.symlink_to(tmp_path)
    assert not remove_segment(f"/{link.name}")
    assert link.is_symlink()
    if os.geteuid() == 0:
        foreign = make(instance, 2)
        os.chown(SHM / foreign[1:], 65534, 65534)
        assert not remove_segment(foreign)
        assert (SHM / foreign[1:]).exists()
