"""The journal's file: what was appended is read back, whatever a killed writer or a bad disk left behind it."""

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ipc.codec import decode
from shm.shuttle import MOUNT
from stratad.core.images import ImagePart
from stratad.core.memory import INDEX_ENTRY_BYTES
from stratad.core.records import DropRecord, ImageRecord, Record, StageRecord, WorkerRecord, replay
from stratad.journal import (
    AGAIN_S,
    COPY_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    RESERVE_BYTES,
    STEP_BYTES,
    ForeignJournal,
    Journal,
    JournalError,
    is_written,
    journal_path,
    parse,
    read_journal,
    remove_journal,
)
from tests.support.instances import fresh_instance


@pytest.fixture
def instance() -> Iterator[str]:
    name = fresh_instance()
    yield name
    for path in MOUNT.glob(f"stratad.{name}.*"):
        path.unlink()


def image(number: int, *, size: int = 100, supersedes: int = 0, pinned: bool = False) -> ImageRecord:
    """A record of about `size` bytes."""
    stage = StageRecord(b"\0" * 4, b"\1\0\0\0", b"place", os.urandom(16), (("xxh3-128", b"12345678"),), b"\0")
    return ImageRecord(
        number, "ns", 1000, "f", {"model": "m"}, ("cpu:0",), f"c{number}", os.urandom(size), 1, (3,), None, (stage,),
        1.5, pinned, supersedes, ((0, 0),), (ImagePart("a", 3, "", 0, 1),),
    )  # fmt: skip


def opened(instance: str, *records: Record) -> Journal:
    journal = Journal(instance, records)
    journal.open()
    return journal


def contents(instance: str) -> tuple[Record, ...]:
    read = read_journal(instance)
    assert (read.unusable, read.damaged, read.same_pids) == ("", 0, True)
    return read.records


RECORDS: tuple[Record, ...] = (
    WorkerRecord("cpu:0", 7, 8),
    image(1),
    image(2),
    DropRecord((1,)),
    image(3, supersedes=2),
)


def test_records_are_read_back_as_they_were_written(instance: str) -> None:
    journal = opened(instance, *RECORDS[:2])
    journal.append(RECORDS[2:3])
    journal.append(RECORDS[3:])
    assert contents(instance) == RECORDS
    journal.close()
    assert contents(instance) == RECORDS
    assert journal_path(instance).stat().st_mode & 0o777 == 0o600


def test_what_records_add_up_to() -> None:
    found = replay([*RECORDS, image(4), image(5), image(4, pinned=True), WorkerRecord("cpu:0", 9, 9)])
    assert list(found.images) == [3, 5, 4]
    assert found.images[4].pinned
    assert found.workers == {"cpu:0": WorkerRecord("cpu:0", 9, 9)}


def test_a_worker_recorded_by_a_build_that_knew_no_first_shuttle_numbered_from_0() -> None:
    former = msgspec.msgpack.encode({"t": "worker", "worker": "cpu:0", "pid": 7, "start_ticks": 8})
    assert decode(former, Record) == WorkerRecord("cpu:0", 7, 8, first_shuttle=0)


def test_no_journal_has_no_records(instance: str) -> None:
    assert contents(instance) == ()


def test_a_tail_that_is_torn_at_any_byte_costs_the_last_record_alone(instance: str) -> None:
    journal = opened(instance, *RECORDS[:2])
    before = journal_path(instance).read_bytes()
    journal.append([RECORDS[2]])
    journal.close()
    after = journal_path(instance).read_bytes()
    end = max(n for n in range(len(after)) if after[n] != before[n]) + 1
    start = min(n for n in range(len(after)) if after[n] != before[n])
    for cut in range(start, end):
        torn = after[:cut] + before[cut:]
        assert parse(torn).records == RECORDS[:2], cut
        assert parse(after[:cut]).records == RECORDS[:2], cut
    assert parse(after[:end]).records == RECORDS[:3]


def test_a_record_with_a_flipped_bit_is_skipped_and_those_after_it_are_read(instance: str) -> None:
    opened(instance, *RECORDS).close()
    packed = bytearray(journal_path(instance).read_bytes())
    packed[packed.index(RECORDS[2].tokens)] ^= 1  # type: ignore[union-attr]
    found = parse(bytes(packed))
    assert found.records == (*RECORDS[:2], *RECORDS[3:])
    assert found.damaged == 1


def test_a_record_inside_of_a_record_is_not_taken_for_one(instance: str) -> None:
    """What a client sends lies in the journal: in the rest of a torn record it must not pass for records of ours."""
    forger = opened(fresh := fresh_instance(), image(66))
    forger.close()
    forged = journal_path(fresh).read_bytes()[HEADER_BYTES:][:500]
    remove_journal(fresh)
    opened(instance, image(1)).close()
    packed = journal_path(instance).read_bytes()
    end = len(packed.rstrip(b"\0"))
    spliced = packed[:end] + forged + packed[end + len(forged) :]
    assert [r.image_id for r in parse(spliced).records if isinstance(r, ImageRecord)] == [1]


@pytest.mark.parametrize("at", [0, 20, HEADER_BYTES - 1])
def test_a_damaged_header_is_named(instance: str, at: int) -> None:
    opened(instance, *RECORDS).close()
    packed = bytearray(journal_path(instance).read_bytes())
    packed[at] ^= 0x55
    found = parse(bytes(packed))
    assert found.records == ()
    assert "header is damaged" in found.unusable
    assert "cut short" in parse(bytes(packed[:10])).unusable


def test_another_boot_is_named(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(instance, *RECORDS).close()
    packed = journal_path(instance).read_bytes()
    monkeypatch.setattr("stratad.journal.boot_id", lambda: b"b" * 16)
    assert "restarted" in parse(packed).unusable


def test_superseded_records_are_left_behind_while_it_is_written(instance: str) -> None:
    journal = opened(instance, WorkerRecord("cpu:0", 1, 2))
    live: dict[int, ImageRecord] = {}
    files: set[int] = set()
    for number in range(1, 400):
        record = image(number, size=20_000, supersedes=number - 3 if number > 3 and number % 2 else 0)
        journal.append([record])
        live.pop(record.supersedes, None)
        live[number] = record
        if number % 5 == 0:
            journal.append([DropRecord((number - 1,))])
            live.pop(number - 1, None)
        if len(live) > 40:
            gone = next(iter(live))
            journal.append([DropRecord((gone,))])
            del live[gone]
        journal.tend(0.0)
        files.add(journal_path(instance).stat().st_ino)
        assert replay(contents(instance)).images == live  # at each instant, also in the middle of a compaction
    while journal.compacting:
        journal.tend(0.0)
    assert len(files) > 2
    assert replay(contents(instance)).images == live
    assert replay(contents(instance)).workers == {"cpu:0": WorkerRecord("cpu:0", 1, 2)}
    assert journal.file_bytes < 8 * STEP_BYTES
    assert journal_path(instance).stat().st_size == journal.file_bytes
    journal.close()
    assert [path.name for path in MOUNT.glob(f"stratad.{instance}.*")] == [f"stratad.{instance}.journal"]


def test_whether_somebody_writes_it_can_be_told(instance: str) -> None:
    assert not is_written(instance)
    journal = Journal(instance, ())
    assert not is_written(instance)
    journal.open()
    assert is_written(instance)
    journal.write_anew(())
    assert is_written(instance)
    journal.close()
    assert not is_written(instance)


def test_a_compaction_copies_in_bounded_steps(instance: str) -> None:
    journal = opened(instance)
    for number in range(1, 60):
        journal.append([image(number, size=COPY_BYTES // 4)])
    dead = [image(number, size=COPY_BYTES) for number in range(100, 120)]
    for record in dead:
        journal.append([record])
    journal.append([DropRecord(tuple(record.image_id for record in dead))])
    turns = 0
    journal.tend(0.0)
    while journal.compacting:
        journal.tend(0.0)
        turns += 1
    assert turns >= 59 * (COPY_BYTES // 4) // (COPY_BYTES + COPY_BYTES // 4)
    assert len(replay(contents(instance)).images) == 59
    journal.close()


def test_the_next_journal_replaces_the_former_one_in_one_step(instance: str) -> None:
    former = opened(instance, *RECORDS)
    former.close()
    journal = Journal(instance, (image(9),))
    assert contents(instance) == RECORDS
    journal.open()
    assert [r.image_id for r in contents(instance) if isinstance(r, ImageRecord)] == [9]
    journal.close()


@pytest.mark.parametrize("instead", ["nothing", "another file"])
def test_one_that_was_removed_is_written_anew(instance: str, instead: str) -> None:
    journal = opened(instance, *RECORDS)
    journal_path(instance).unlink()
    if instead == "another file":
        journal_path(instance).write_bytes(b"rubbish")
    journal.append([image(4)])
    journal.tend(0.0)
    while journal.compacting:
        journal.tend(0.0)
    assert set(replay(contents(instance)).images) == {3, 4}
    journal.append([image(5)])
    assert set(replay(contents(instance)).images) == {3, 4, 5}
    journal.close()


def test_one_that_was_cut_short_takes_nothing_before_it_is_written_anew(instance: str) -> None:
    journal = opened(instance, *RECORDS)
    os.truncate(journal_path(instance), HEADER_BYTES + 20)
    with pytest.raises(JournalError, match="cut it short"):
        journal.append([image(4)])
    assert journal.damaged
    journal.write_anew([image(3), WorkerRecord("cpu:0", 1, 2)])
    assert not journal.damaged
    journal.append([image(4)])
    journal.tend(1.0)
    assert set(replay(contents(instance)).images) == {3, 4}
    assert replay(contents(instance)).workers == {"cpu:0": WorkerRecord("cpu:0", 1, 2)}
    journal.close()


def test_one_that_is_cut_short_while_it_is_compacted_is_not_copied_as_if_it_were_whole(instance: str) -> None:
    kept = [image(number, size=COPY_BYTES) for number in range(1, 9)]
    dead = [image(number, size=COPY_BYTES) for number in range(20, 40)]
    journal = opened(instance, *kept)
    for record in dead:
        journal.append([record])
    journal.append([DropRecord(tuple(record.image_id for record in dead))])
    journal.tend(1.0)
    journal.tend(1.0)
    assert journal.compacting
    os.truncate(journal_path(instance), 3 * COPY_BYTES)
    while journal.compacting:
        journal.tend(1.0)
    assert journal.damaged
    assert not journal_path(instance).with_name(f"stratad.{instance}.journal.new").exists()
    journal.write_anew(kept)
    assert list(replay(contents(instance)).images.values()) == kept
    journal.close()


def test_that_of_another_instance_says_nothing_of_this_one(instance: str) -> None:
    opened(instance, *RECORDS).close()
    packed = journal_path(instance).read_bytes()
    assert parse(packed, instance).records == RECORDS
    found = parse(packed, "other")
    assert (found.records, found.unusable) == ((), f"it is of instance {instance!r}")


class Full:
    """/dev/shm has no room any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.refusals = 0
        self.spare = 0
        self._allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        if self.full and self.spare:
            self.spare -= 1
        elif self.full:
            self.refusals += 1
            raise OSError(28, "No space left on device")
        self._allocate(descriptor, offset, length)


def test_without_room_nothing_is_written_but_small_records_find_what_was_kept_for_them(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(instance, *RECORDS)
    shm = Full(monkeypatch)
    with pytest.raises(JournalError, match="No space"):
        journal.append([image(10, size=STEP_BYTES)])
    number = 11
    while number < 10_000:
        try:
            journal.append([image(number, size=40_000)])
        except JournalError:
            break
        number += 1
    assert 20 < number < 10_000
    for gone in range(RESERVE_BYTES // 200):
        journal.append([DropRecord((gone,))])
    before = contents(instance)
    assert [r.image_id for r in before if isinstance(r, ImageRecord)] == [1, 2, 3, *range(11, number)]
    shm.full = False
    journal.append([image(number, size=40_000)])
    assert len(contents(instance)) == len(before) + 1
    journal.close()


def test_a_write_that_stops_halfway_leaves_nothing(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(instance, *RECORDS)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: len(data) // 2], at))
    with pytest.raises(JournalError, match="wrote"):
        journal.append([image(10, size=5000)])
    monkeypatch.undo()
    assert contents(instance) == RECORDS
    journal.append([image(11)])
    assert contents(instance)[:-1] == RECORDS
    journal.close()


def test_one_that_cannot_be_made_is_made_by_a_later_append(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(instance, *RECORDS).close()
    shm = Full(monkeypatch)
    journal = Journal(instance, RECORDS[:1])
    for _ in range(2):
        with pytest.raises(JournalError, match="No space"):
            journal.append([image(10)])
    assert contents(instance) == RECORDS  # the former one is untouched
    assert not journal.file_bytes
    shm.full = False
    journal.append([image(10)])
    assert [r.image_id for r in contents(instance) if isinstance(r, ImageRecord)] == [10]
    journal.close()


def test_a_file_of_another_kind_is_refused(instance: str, tmp_path: Path) -> None:
    path = journal_path(instance)
    path.mkdir()
    with pytest.raises(ForeignJournal, match="no plain file"):
        read_journal(instance)
    path.rmdir()
    (tmp_path / "elsewhere").write_bytes(b"mine")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        read_journal(instance)
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_the_estimate_of_what_its_index_takes_is_near(instance: str) -> None:
    journal = opened(instance)
    records: list[Record] = [
        DropRecord(()),
        *(WorkerRecord(f"cuda:{number}", 10**6 + number, 10**7) for number in range(20_000)),
    ]
    journal.append(records[:1])
    tracemalloc.start()
    try:
        for record in records[1:]:
            journal.append((record,))
        took_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 < took_bytes / (len(records) * INDEX_ENTRY_BYTES) < 1.4
    journal.close()


def test_the_overhead_of_a_record_is_its_frame(instance: str) -> None:
    journal = opened(instance, image(1))
    end = len(journal_path(instance).read_bytes().rstrip(b"\0"))
    journal.append([DropRecord((1,))])
    grown = len(journal_path(instance).read_bytes().rstrip(b"\0")) - end
    assert FRAME_BYTES < grown < FRAME_BYTES + 32
    journal.close()


def test_one_that_was_removed_and_finds_no_room_says_so_until_it_does(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(instance, *RECORDS)
    journal_path(instance).unlink()
    shm = Full(monkeypatch)
    for turn in range(100):
        journal.tend(turn / 100)
    with pytest.raises(JournalError, match="somebody removed it"):
        journal.append([image(4)])
    assert 1 <= shm.refusals <= 2 * (1 + int(1 / AGAIN_S)), "a turn of the loop must not ask each time"
    shm.full = False
    journal.tend(1.0 + AGAIN_S)
    journal.append([image(5)])
    while journal.compacting:
        journal.tend(2.0)
    assert set(replay(contents(instance)).images) == {3, 5}
    journal.close()


def test_what_is_written_is_answered_so_although_a_compaction_fails(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(instance, *RECORDS)
    journal_path(instance).unlink()
    journal.tend(0.0)
    assert journal.compacting
    shm = Full(monkeypatch)
    new = next(MOUNT.glob(f"stratad.{instance}.*.new"))
    monkeypatch.setattr(Path, "unlink", lambda _path, **_: (_ for _ in ()).throw(PermissionError(1, "no")))
    shm.spare = 1  # for the file that is in use, and not for the next one
    journal.append([image(4, size=STEP_BYTES)])
    assert not journal.compacting, "there was no room for the copy"
    monkeypatch.undo()
    assert (new.exists(), shm.refusals > 0) == (True, True)
    journal.tend(AGAIN_S)
    while journal.compacting:
        journal.tend(AGAIN_S)
    assert set(replay(contents(instance)).images) == {3, 4}
    journal.close()
