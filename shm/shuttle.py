"""Shuttles: the shared-memory segments that images live in.

A worker makes a shuttle (or attaches one that a former worker of its device left), and only the supervisor unlinks it.
Every page is reserved before the first byte is written: writing to a hole of a full tmpfs would be a SIGBUS.
"""

import contextlib
import enum
import errno
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import posix_ipc

from shm.extent import GRANULE_BYTES
from shm.header import HEADER_BYTES, ShuttleHeader, pack_header, unpack_header
from shm.headroom import Headroom, memory_headroom
from shm.mapping import SharedMapping
from shm.turns import TurnTaken, turn

MOUNT: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives
MAX_SHUTTLE_BYTES: Final = 1024 * 1024 * 1024
# Small enough to stop between two steps within a fraction of a second (a GiB takes 0.2 to 0.6 s).
STEP_BYTES: Final = 64 * 1024 * 1024
# Memory that reserving must leave to everybody else.
MARGIN_BYTES: Final = 64 * 1024 * 1024
# What shuttles leave of the tmpfs: the journal lies there too, and nothing is captured while it cannot grow. A step of
# it, and one of the file that a compaction puts in its place.
JOURNAL_BYTES: Final = 2 * 1024 * 1024
_MODE: Final = 0o600
# So many makers may reserve a step at the same time without asking one another; nearer to a limit they take turns.
_MAKERS: Final = 64
BLOCK_BYTES: Final = 512  # st_blocks counts in these
_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
# The process or the host lacks something for now; posix_ipc gives no number where descriptors have run out.
_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, None)


class ShuttleFault(enum.Enum):
    """Why a shuttle could not be had. MISSING and REFUSED are for good: what lay in that segment is lost. NO_SPACE and
    UNAVAILABLE (descriptors or address space have run out) pass.
    """

    NO_SPACE = "no_space"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    MISSING = "missing"
    EXISTS = "exists"
    REFUSED = "refused"


class ShuttleError(Exception):
    """A shuttle that could not be made or attached.

    Attributes:
        fault: what kind of failure.
        wanted_bytes, free_bytes: for `NO_SPACE`, what was asked for and what there was; else 0.
    """

    def __init__(self, fault: ShuttleFault, message: str, wanted_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.fault = fault
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class Shuttle:
    """A mapped shuttle. Owns the mapping, not the name: `unlink` removes that.

    `view` is the whole segment, writable, header included; `address` is where it lies in this process.
    """

    def __init__(self, header: ShuttleHeader, mapping: SharedMapping) -> None:
        self.header: Final = header
        self._mapping: SharedMapping | None = mapping

    @classmethod
    def create(
        cls,
        header: ShuttleHeader,
        *,
        on_step: Callable[[int], bool] = lambda _reserved_bytes: True,
        headroom: Callable[[], Headroom] = memory_headroom,
    ) -> Self:
        """Make the segment `header.segment`, reserve all of it, map it.

        The caller's thread touches the pages first, so its CPU affinity decides the NUMA node. `on_step` is told the
        bytes reserved so far after each step and returns False to give up. A failure leaves nothing behind.

        Raises:
            ShuttleError: no space (tmpfs, cgroup or host), cancelled, or the name is taken.
            ValueError: the size is no multiple of the granule, below two granules or above `MAX_SHUTTLE_BYTES`.
        """
        _check_size(header.shuttle_bytes)
        _check_free(header.shuttle_bytes, headroom())
        try:
            # With size 0 posix_ipc makes the segment and does not truncate it to a size full of holes.
            segment = posix_ipc.SharedMemory(header.segment, posix_ipc.O_CREX, mode=_MODE, size=0)
        except posix_ipc.ExistentialError as exc:
            raise ShuttleError(ShuttleFault.EXISTS, f"the segment {header.segment} exists already") from exc
        except (posix_ipc.PermissionsError, OSError) as exc:
            raise _not_opened(header.segment, "made", exc) from exc
        try:
            os.fchmod(segment.fd, _MODE)  # the umask may have taken bits away
            _reserve(segment.fd, header, on_step, headroom)
            return cls(header, _map(segment.fd, header.shuttle_bytes))
        except BaseException:
            unlink(header.segment)
            raise
        finally:
            segment.close_fd()

    @classmethod
    def attach(cls, header: ShuttleHeader) -> Self:
        """Map an existing segment after proving that it is the one that `header` describes.

        Raises:
            ShuttleError: it is missing, or it is refused: not ours, another mode or size, not fully reserved, or its
                own header differs.
        """
        descriptor = _open(header.segment)
        try:
            _check_identity(descriptor, header)
            return cls(header, _map(descriptor, header.shuttle_bytes))
        finally:
            os.close(descriptor)

    @property
    def view(self) -> memoryview:
        """All bytes of the segment; slices of it must not outlive the shuttle's use."""
        return memoryview(b"") if self._mapping is None else self._mapping.view

    @property
    def mapping(self) -> SharedMapping:
        """The mapping itself.

        Raises:
            ValueError: the shuttle is closed.
        """
        if self._mapping is None:
            raise ValueError(f"shuttle {self.header.segment} is closed")
        return self._mapping

    @property
    def address(self) -> int:
        """Address of the first byte in this process.

        Raises:
            ValueError: the shuttle is closed.
        """
        return self.mapping.address

    def close(self) -> None:
        """Unmap. While slices of `view` are still held the mapping lingers and goes with the last of them."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unlink(segment: str) -> bool:
    """Remove a segment's name; False where there is none. Only the supervisor may (and a maker that failed)."""
    try:
        posix_ipc.unlink_shared_memory(segment)
    except posix_ipc.ExistentialError:
        return False
    return True


def read_header(segment: str) -> ShuttleHeader:
    """The header of a segment of ours, without mapping it.

    Raises:
        ShuttleError: it is missing, not ours, or has no good header.
    """
    descriptor = _open(segment)
    try:
        return _own_header(descriptor, segment)
    finally:
        os.close(descriptor)


def _check_size(shuttle_bytes: int) -> None:
    if shuttle_bytes % GRANULE_BYTES or not 2 * GRANULE_BYTES <= shuttle_bytes <= MAX_SHUTTLE_BYTES:
        raise ValueError(
            f"shuttle_bytes {shuttle_bytes} must be a multiple of {GRANULE_BYTES}, "
            f"at least {2 * GRANULE_BYTES} and at most {MAX_SHUTTLE_BYTES}"
        )


def _check_free(wanted_bytes: int, room: Headroom) -> None:
    """Refuse what would be refused halfway, or would get somebody killed.

    Raises:
        ShuttleError: `NO_SPACE`, naming the limit.
    """
    status = os.statvfs(MOUNT)
    tmpfs_free_bytes = status.f_bavail * status.f_frsize
    # A tmpfs without a size limit has no blocks at all.
    if status.f_blocks and tmpfs_free_bytes < wanted_bytes + JOURNAL_BYTES:
        remedy = f"make it larger (mount -o remount,size=...; {JOURNAL_BYTES} stay for the journal)"
        raise _no_space(wanted_bytes, tmpfs_free_bytes, f"{MOUNT}: {remedy}")
    if room.free_bytes < wanted_bytes + MARGIN_BYTES:
        raise _no_space(wanted_bytes, max(room.free_bytes - MARGIN_BYTES, 0), room.limited_by)


def _no_space(wanted_bytes: int, free_bytes: int, limit: str) -> ShuttleError:
    return ShuttleError(
        ShuttleFault.NO_SPACE,
        f"a shuttle needs {wanted_bytes} bytes, {free_bytes} are free under {limit}",
        wanted_bytes,
        free_bytes,
    )


def _not_opened(segment: str, what: str, exc: Exception) -> ShuttleError:
    number = getattr(exc, "errno", None) if isinstance(exc, OSError) else errno.EACCES
    text = f"the segment {segment} cannot be {what}: {exc}"
    if number in _FULL:
        return ShuttleError(ShuttleFault.NO_SPACE, f"{text} ({MOUNT} has no room for another file)")
    if number in _PASSING:
        return ShuttleError(ShuttleFault.UNAVAILABLE, f"{text} (this process may have {_open_files()} files open)")
    return ShuttleError(ShuttleFault.REFUSED, text)


def _reserve(
    descriptor: int, header: ShuttleHeader, on_step: Callable[[int], bool], headroom: Callable[[], Headroom]
) -> None:
    # The header goes in first: a maker that is killed halfway leaves a segment that says whose it is.
    reserved_bytes = 0
    for end_bytes in (GRANULE_BYTES, *range(STEP_BYTES, header.shuttle_bytes, STEP_BYTES), header.shuttle_bytes):
        _reserve_step(descriptor, header, reserved_bytes, end_bytes - reserved_bytes, headroom)
        if reserved_bytes == 0:
            os.pwrite(descriptor, pack_header(header), 0)
        reserved_bytes = end_bytes
        if not on_step(reserved_bytes):
            raise ShuttleError(ShuttleFault.CANCELLED, f"{header.segment}: given up at {reserved_bytes} bytes")


def _reserve_step(
    descriptor: int, header: ShuttleHeader, start_bytes: int, step_bytes: int, headroom: Callable[[], Headroom]
) -> None:
    with contextlib.ExitStack() as stack:
        room = headroom()
        if room.free_bytes < step_bytes + MARGIN_BYTES + _MAKERS * STEP_BYTES:
            # Each of several makers would see the same last bytes free, and together they would take more than those.
            try:
                stack.enter_context(turn(MOUNT / f"stratad.{header.instance}.lock"))
            except TurnTaken as exc:
                raise _no_space(step_bytes, 0, f"{room.limited_by}, which another worker is about to take") from exc
            room = headroom()
        _check_free(step_bytes, room)
        try:
            os.posix_fallocate(descriptor, start_bytes, step_bytes)
        except OSError as exc:
            if exc.errno not in _FULL:
                raise ShuttleError(ShuttleFault.REFUSED, f"{header.segment}: {exc.strerror}") from exc
            status = os.statvfs(MOUNT)
            raise _no_space(step_bytes, status.f_bavail * status.f_frsize, str(MOUNT)) from exc


def _open(segment: str) -> int:
    try:
        return cast("int", posix_ipc.SharedMemory(segment, 0).fd)
    except posix_ipc.ExistentialError as exc:
        raise ShuttleError(ShuttleFault.MISSING, f"there is no segment {segment}") from exc
    except (posix_ipc.PermissionsError, OSError, ValueError) as exc:
        raise _not_opened(segment, "opened", exc) from exc


def _own_header(descriptor: int, segment: str) -> ShuttleHeader:
    """The header of an open segment that belongs to us.

    Raises:
        ShuttleError: `REFUSED`.
    """
    status = os.fstat(descriptor)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"belongs to uid {status.st_uid}, expected {os.geteuid()}"
    elif not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != _MODE:
        problem = f"has mode {status.st_mode:o}, expected a plain file with {_MODE:o}"
    if not problem:
        try:
            header = unpack_header(os.pread(descriptor, HEADER_BYTES, 0))
        except ValueError as exc:
            problem = str(exc)
        else:
            if header.segment == segment:
                return header
            problem = f"has the header of {header.segment}"
    raise ShuttleError(ShuttleFault.REFUSED, f"the segment {segment} is refused: {problem}")


def _check_identity(descriptor: int, header: ShuttleHeader) -> None:
    found = _own_header(descriptor, header.segment)
    status = os.fstat(descriptor)
    problem = ""
    if found != header:
        problem = f"its header says {found}, expected {header}"
    elif status.st_size != header.shuttle_bytes:
        problem = f"it has {status.st_size} bytes, expected {header.shuttle_bytes}"
    elif status.st_blocks * BLOCK_BYTES < header.shuttle_bytes:
        problem = f"only {status.st_blocks * BLOCK_BYTES} of {header.shuttle_bytes} bytes are reserved"
    if problem:
        raise ShuttleError(ShuttleFault.REFUSED, f"the segment {header.segment} is refused: {problem}")


def _map(descriptor: int, shuttle_bytes: int) -> SharedMapping:
    try:
        return SharedMapping.of(descriptor, shuttle_bytes)
    except OSError as exc:
        # The segment is good; this process has no room for it now (address space, mappings, a descriptor).
        text = (
            f"{shuttle_bytes} bytes cannot be mapped: {exc.strerror} (this process may have {_open_files()} files open)"
        )
        raise ShuttleError(ShuttleFault.UNAVAILABLE, text) from exc


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
