"""The journal: records in ``/dev/shm/stratad.<instance>.journal``, from which the next daemon rebuilds the catalog.

It lies beside the shuttles because it must outlive processes, not the host. A record is on the file once `append` has
returned, and whole: one `write` of pages that were allocated before::

    header:  magic 8 | version u32 | boot id 16 | instance 32 | pid namespace u64 | salt u32 | crc32 of all before
    record:  mark u32 | length u32 | crc32 of the payload | crc32 of the three | payload (msgpack)
    ...      zeros: allocated, not written

Every crc starts from the file's salt, so that bytes of a client in the middle of a torn record never pass for a record.
Reading ends at the first mark that is none: what a killed writer left there was never answered. A record whose payload
is damaged is skipped, since the records after it are whole by themselves.

Superseded records are left behind by *compaction*: the live ones are copied to a new file in small steps, while new
records go to both, and then it takes the old one's name. Only the holder of the instance lock touches these files. Who
writes one holds a lock on it too: that tells of a daemon whose instance lock somebody has removed.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ipc.codec import BadFrame, decode, encode
from shm.process import boot_id
from shm.shuttle import MOUNT
from stratad.core.records import Record, subjects

MAGIC: Final = b"stratadJ"
VERSION: Final = 1
MARK: Final = 0x4C4A7274
_HEADER: Final = struct.Struct("<8sI16s32sQI")
_CHECK: Final = struct.Struct("<I")
_FRAME: Final = struct.Struct("<III")
HEADER_BYTES: Final = _HEADER.size + _CHECK.size
FRAME_BYTES: Final = _FRAME.size + _CHECK.size
# Allocated ahead in steps of this; the last `RESERVE_BYTES` are for small records (the end of an image, the process of
# a worker), which must find room when nothing else does.
STEP_BYTES: Final = 1024 * 1024
RESERVE_BYTES: Final = 64 * 1024
SMALL_BYTES: Final = 4096
# Compacted when dead records take more than the live ones and this, a piece of so many bytes at a time.
SLACK_BYTES: Final = 2 * STEP_BYTES
COPY_BYTES: Final = 512 * 1024
# What found no room is tried again after this, and not at each turn of the loop.
AGAIN_S: Final = 0.5
_MODE: Final = 0o600


class JournalError(OSError):
    """The journal cannot be written. Nothing of the append is in it."""


class ForeignJournal(ValueError):
    """A file under the journal's name that must not be used: another user's, or no plain file."""


class Contents(NamedTuple):
    """What a journal holds. `unusable` says why its records mean nothing here, or is empty.
    `damaged` counts records that were skipped; `same_pids` says whether its pids are of this pid namespace.
    """

    records: tuple[Record, ...]
    unusable: str = ""
    damaged: int = 0
    same_pids: bool = True


def journal_path(instance: str) -> Path:
    """Where the journal of an instance lies."""
    return MOUNT / f"stratad.{instance}.journal"


def read_journal(instance: str) -> Contents:
    """All whole records, in order; no records where there is no journal.

    Raises:
        ForeignJournal: the file belongs to somebody else.
        OSError: it cannot be read.
    """
    path = journal_path(instance)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Contents(())
    try:
        _refuse_foreign(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            packed = file.read()
    finally:
        os.close(descriptor)
    return parse(packed, instance)


def is_written(instance: str) -> bool:
    """Whether a process that lives writes the journal of an instance; the kernel lets go of it as the process ends."""
    try:
        descriptor = os.open(journal_path(instance), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # there is none, or none that can be used: who reads it says so
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def parse(packed: bytes, instance: str = "") -> Contents:
    """The records of a journal's bytes, whatever they are. `instance` is whose they must be, if that matters."""
    if len(packed) < HEADER_BYTES:
        return Contents((), "it is cut short")
    magic, version, boot, written_for, namespace, salt = _HEADER.unpack_from(packed)
    if magic != MAGIC or _CHECK.unpack_from(packed, _HEADER.size) != (zlib.crc32(packed[: _HEADER.size]),):
        return Contents((), "its header is damaged")
    if version != VERSION:
        return Contents((), f"it has version {version}, this build reads {VERSION}")
    owner = written_for.rstrip(b"\0").decode("ascii", "replace")
    if instance not in ("", owner):  # its pids and segments are another daemon's, which may live
        return Contents((), f"it is of instance {owner!r}")
    if boot != boot_id():
        return Contents((), "it was written before the host was restarted")
    records: list[Record] = []
    damaged = 0
    at = HEADER_BYTES
    while at + FRAME_BYTES <= len(packed):
        mark, length, payload_crc = _FRAME.unpack_from(packed, at)
        (frame_crc,) = _CHECK.unpack_from(packed, at + _FRAME.size)
        start = at + FRAME_BYTES
        at_end = start + length
        if mark != MARK or frame_crc != zlib.crc32(packed[at : at + _FRAME.size], salt) or at_end > len(packed):
            break
        payload = packed[start:at_end]
        at = at_end
        try:
            if payload_crc != zlib.crc32(payload, salt):
                raise BadFrame("bad_frame", "the checksum differs")
            records.append(decode(payload, Record))
        except BadFrame:
            damaged += 1
    return Contents(tuple(records), "", damaged, namespace == _pid_namespace())


class _Live(NamedTuple):
    """Where the latest record of a subject lies."""

    offset: int
    length: int


class _File:
    """One file that is written from its start to its end."""

    def __init__(self, path: Path, descriptor: int, salt: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.salt = salt
        self.end = HEADER_BYTES
        self.allocated = 0

    @classmethod
    def create(cls, path: Path) -> "_File":
        path.unlink(missing_ok=True)  # under the instance lock a file of that name is nobody's
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, _MODE)
            salt = int.from_bytes(os.urandom(4), "little")
            file = cls(path, descriptor, salt)
            file.allocate(STEP_BYTES - HEADER_BYTES)
            head = _HEADER.pack(MAGIC, VERSION, boot_id(), _instance_of(path), _pid_namespace(), salt)
            os.pwrite(descriptor, head + _CHECK.pack(zlib.crc32(head)), 0)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return file

    def allocate(self, free_bytes: int) -> None:
        """Have so many bytes after the end.

        Raises:
            OSError: there is no room.
        """
        lacking = self.end + free_bytes - self.allocated
        if lacking > 0:
            step = -(-lacking // STEP_BYTES) * STEP_BYTES
            try:
                os.posix_fallocate(self.descriptor, self.allocated, step)
            except OSError as exc:
                status = os.fstatvfs(self.descriptor)
                free_bytes = status.f_bavail * status.f_frsize
                text = f"{exc.strerror}: {step} bytes are needed, {free_bytes} are free under {MOUNT}"
                raise OSError(exc.errno, text) from exc
            self.allocated += step

    def frame(self, payload: bytes) -> bytes:
        """A payload with its head."""
        head = _FRAME.pack(MARK, len(payload), zlib.crc32(payload, self.salt))
        return head + _CHECK.pack(zlib.crc32(head, self.salt)) + payload

    def write(self, framed: bytes) -> None:
        """One write at the end.

        Raises:
            OSError: it failed; nothing of it is left.
        """
        written = 0
        try:
            written = os.pwrite(self.descriptor, framed, self.end)
        finally:
            if written != len(framed):
                # Whatever a later, shorter record leaves of this one must not be taken for records.
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, self.end)
                    self.allocated = self.end
        if written != len(framed):
            raise OSError(f"{self.path}: wrote {written} of {len(framed)} bytes")
        self.end += len(framed)

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)  # noqa: PTH104 - replaces what is there
        self.path = path

    def cut_short(self) -> bool:
        """Whether somebody took bytes away that were allocated."""
        return os.fstat(self.descriptor).st_size < self.allocated

    def has_its_name(self) -> bool:
        """Whether the next daemon will find it: a cleaner, or a person, may have removed it."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor))  # noqa: PTH116
        except OSError:
            return False

    def close(self) -> None:
        os.close(self.descriptor)


class Journal:
    """The journal as the supervisor writes it. One whose file was removed is written anew from what it still holds."""

    def __init__(self, instance: str, records: Sequence[Record]) -> None:
        """`records` are those that it begins with; nothing is touched before `open`."""
        self._path = journal_path(instance)
        self._first = records
        self._file: _File | None = None
        self._live: dict[str, _Live] = {}
        self._live_bytes = 0
        self._next: _File | None = None
        self._next_live: dict[str, _Live] = {}
        self._todo: list[str] = []
        self._compact_above = 0
        self._now_s = self._again_s = 0.0
        self._nameless = False  # its file was removed, and there was no room for another
        self._damaged = False

    def open(self) -> None:
        """Make a fresh file that begins with the first records, and replace the one that is there in one step. Without
        effect where that was done.

        Raises:
            JournalError: it cannot be written; the one that is there is untouched.
        """
        if self._file is not None:
            return
        try:
            file = _File.create(self._new_path)
        except OSError as exc:
            raise JournalError(exc.errno, f"{self._path}: {exc.strerror or exc}") from exc
        self._file = file
        try:
            for record in self._first:
                self.append((record,))
            file.rename(self._path)
        except OSError as exc:
            self._file = None
            self._live, self._live_bytes = {}, 0
            file.close()
            file.path.unlink(missing_ok=True)
            raise JournalError(exc.errno, f"{self._path}: {exc.strerror or exc}") from exc
        self._first = ()

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(self._path.name + ".new")

    @property
    def file_bytes(self) -> int:
        """What it takes of /dev/shm."""
        return sum(file.allocated for file in (self._file, self._next) if file is not None)

    @property
    def compacting(self) -> bool:
        """Whether `tend` has something to do."""
        return self._next is not None

    def append(self, records: Iterable[Record]) -> None:
        """Write records, all or none. With no records it tells whether there is room for one.

        Raises:
            JournalError: they are not written.
        """
        self.open()
        file = self._file
        assert file is not None
        self._damaged = self._damaged or file.cut_short()
        if self._damaged:
            raise JournalError(errno.EIO, f"{self._path}: somebody cut it short, and it has not been written anew yet")
        if self._nameless:  # what is written there is not found by the next daemon
            raise JournalError(errno.ENOENT, f"{self._path}: somebody removed it, and it cannot be written anew yet")
        records = tuple(records)
        changes = [subjects(record) for record in records]
        payloads = [encode(record) for record in records]
        total = sum(map(len, payloads)) + FRAME_BYTES * len(payloads)
        try:
            file.allocate(total if 0 < total <= SMALL_BYTES else total + RESERVE_BYTES)
            at = file.end
            file.write(b"".join(map(file.frame, payloads)))
        except OSError as exc:
            raise JournalError(exc.errno, f"{file.path}: {exc.strerror or exc}") from exc
        for (subject, ended), payload in zip(changes, payloads, strict=True):
            place = _Live(at + FRAME_BYTES, len(payload))
            at += FRAME_BYTES + len(payload)
            self._note(subject, ended, place)
            self._mirror(payload, subject, ended)

    def tend(self, now_s: float) -> None:
        """Allocate ahead, and take a step of compaction where that is due. Called by the loop at each turn."""
        file = self._file
        if file is None:
            return
        self._now_s = now_s
        self._damaged = self._damaged or file.cut_short()
        if self._damaged:  # what was cut off must not be copied as if it were whole
            self._abandon()
            return
        if self._next is not None:
            self._copy_some(file)
            return
        self._nameless = not file.has_its_name()
        if now_s < self._again_s:
            return
        try:
            file.allocate(2 * RESERVE_BYTES)
        except OSError:  # the next append says so
            self._again_s = now_s + AGAIN_S
        dead = file.end - self._live_bytes
        wasteful = dead > self._live_bytes + SLACK_BYTES and file.end > self._compact_above
        if wasteful or self._nameless:
            self._begin_compaction(file)

    @property
    def damaged(self) -> bool:
        """Whether live records may be lost: then everything has to be written anew, and nothing is appended before."""
        return self._damaged

    def write_anew(self, records: Sequence[Record]) -> None:
        """Replace a damaged file by one that begins with `records`: all that is true now.

        Raises:
            JournalError: that cannot be written now; it is damaged still.
        """
        fresh = Journal(self._path.name.split(".")[1], records)
        self._abandon()
        fresh.open()
        if self._file is not None:
            self._file.close()
        self._file, self._live, self._live_bytes = fresh._file, fresh._live, fresh._live_bytes
        self._damaged = False

    def close(self) -> None:
        """Close the file; it stays."""
        self._abandon()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note(self, subject: str, ended: Iterable[str], place: _Live) -> None:
        for gone in ended:
            former = self._live.pop(gone, None)
            if former is not None:
                self._live_bytes -= former.length + FRAME_BYTES
        if subject:
            former = self._live.pop(subject, None)
            if former is not None:
                self._live_bytes -= former.length + FRAME_BYTES
            self._live[subject] = place
            self._live_bytes += place.length + FRAME_BYTES

    # --- compaction ---------------------------------------------------------------------------------------------------

    def _begin_compaction(self, file: _File) -> None:
        try:
            self._next = _File.create(self._new_path)
        except OSError:
            self._compact_above = file.end + STEP_BYTES  # no room now: try again later
            self._again_s = self._now_s + AGAIN_S
            return
        self._nameless = False  # from now on both files are written
        self._next_live = {}
        self._todo = list(reversed(self._live))

    def _mirror(self, payload: bytes, subject: str, ended: Iterable[str]) -> None:
        """What is written while live records are copied goes to both files."""
        if self._next is None:
            return
        for gone in ended:
            self._next_live.pop(gone, None)
        self._copy(subject, payload)

    def _copy(self, subject: str, payload: bytes) -> None:
        assert self._next is not None
        try:
            framed = self._next.frame(payload)
            self._next.allocate(len(framed) + RESERVE_BYTES)
            at = self._next.end
            self._next.write(framed)
        except OSError:
            self._abandon()
            return
        if subject:
            self._next_live.pop(subject, None)
            self._next_live[subject] = _Live(at + FRAME_BYTES, len(payload))

    def _copy_some(self, file: _File) -> None:
        copied = 0
        while self._todo and copied < COPY_BYTES and self._next is not None:
            subject = self._todo.pop()
            place = self._live.get(subject)
            if place is None or subject in self._next_live:  # ended meanwhile, or written anew to both
                continue
            self._copy(subject, os.pread(file.descriptor, place.length, place.offset))
            copied += place.length
        if self._next is not None and not self._todo:
            self._finish_compaction(file, self._next)

    def _finish_compaction(self, old: _File, new: _File) -> None:
        assert set(self._next_live) == set(self._live), "a live record was not copied"
        try:
            new.rename(self._path)
        except OSError:
            self._abandon()
            return
        self._file, self._live, self._next = new, self._next_live, None
        old.close()

    def _abandon(self) -> None:
        if self._next is not None:
            self._compact_above = self._next.end + STEP_BYTES
            self._again_s = self._now_s + AGAIN_S
            self._next.close()
            with contextlib.suppress(OSError):  # what was to be appended is written all the same
                self._next.path.unlink(missing_ok=True)
            self._next = None
            self._todo = []


def _instance_of(path: Path) -> bytes:
    return path.name.split(".")[1].encode("ascii")


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116


def _refuse_foreign(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        raise ForeignJournal(f"{path} is no plain file of uid {os.geteuid()}: remove it or choose another --instance")


def remove_journal(instance: str) -> None:
    """Remove the journal and what an interrupted compaction left; under the instance lock, with the images gone."""
    path = journal_path(instance)
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".new").unlink(missing_ok=True)
