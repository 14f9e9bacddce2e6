"""Logging: one line a record, with fields, to a descriptor that may be slow or dead without anybody waiting for it.

Text: ``TIME LEVEL logger message key=value ...``, the time (UTC) only where the reader is not systemd's journal, which
has its own; json: one object a line. Fields are given as
``logger.info("image published", extra=fields(image=3, worker="cpu:0"))``.
"""

import errno
import json
import logging
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

QUEUE_LINES: Final = 2000
QUEUE_BYTES: Final = 1024 * 1024
# A line may quote what a peer sent.
LINE_CHARS: Final = 8192

# A full disk is a slow reader: it may have room again.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

Field = str | int | float | bool | None


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """Named values for a record, to be passed as its `extra`."""
    return {"fields": values}


def setup_logs(level: str, style: Literal["text", "json"], descriptor: int = 2, **always: Field) -> "LogSink":
    """Send everything that the process logs to `descriptor` (which stays the caller's); replaces earlier handlers.

    `always` are fields of every line: who writes it.
    """
    sink = LogSink.open(descriptor)
    text = _TextFormatter(always, timed=not is_the_journals(descriptor))
    sink.setFormatter(_JsonFormatter(always) if style == "json" else text)
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.addHandler(sink)
    root.setLevel(level.upper())
    return sink


def is_the_journals(descriptor: int) -> bool:
    """Whether a descriptor is the stream to systemd's journal that the service manager has given to this process."""
    status = os.fstat(descriptor)
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class LogSink(logging.Handler):
    """Writes lines as far as the reader takes them and keeps the rest in a bounded queue.

    When the queue is full, new lines are dropped and counted; the count is logged when there is room again. A reader
    that has gone ends the writing, not the process. The rest of the queue leaves with the next record or `flush`.
    """

    def __init__(self, descriptor: int, connection: socket.socket | None = None, *, shared: bool = False) -> None:
        super().__init__()
        self.dropped_count = 0
        self._descriptor = descriptor
        self._socket = connection
        self._shared = shared
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._unreported_count = 0
        self._dead = False

    @classmethod
    def open(cls, descriptor: int) -> "LogSink":
        """A sink over a copy of `descriptor`.

        Raises:
            OSError: it is not open.
        """
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):  # never slow; the copy shares its offset with whoever else writes to the file
            return cls(os.dup(descriptor), shared=True)
        if stat.S_ISSOCK(mode):  # the journal's stderr
            connection = socket.socket(fileno=os.dup(descriptor))
            return cls(connection.fileno(), connection)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
        try:
            # Opened anew, because O_NONBLOCK on the descriptor itself would hold for every process that shares it.
            return cls(os.open(f"/proc/self/fd/{descriptor}", flags))
        except OSError:
            return cls(os.dup(descriptor), shared=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record and write what the reader takes (the caller holds the handler's lock)."""
        self._write_queued()
        line = self._line(record)
        if self._dead or len(self._queue) >= QUEUE_LINES or self._queued_bytes + len(line) > QUEUE_BYTES:
            self.dropped_count += 1
            self._unreported_count += 1
            return
        if self._unreported_count:
            message = "log lines were dropped, the reader was too slow"
            note = logging.LogRecord("ipc.logs", logging.WARNING, __file__, 0, message, None, None)
            note.fields = {"dropped": self._unreported_count}
            self._unreported_count = 0
            self._put(self._line(note))
        self._put(line)
        self._write_queued()

    def flush(self) -> None:
        """Write what the reader takes now."""
        self.acquire()
        try:
            self._write_queued()
        finally:
            self.release()

    def close(self) -> None:
        """Write what can be written at once, then close our copy of the descriptor."""
        self.acquire()
        try:
            if self._descriptor >= 0:
                self._write_queued()
                if self._socket is not None:
                    self._socket.close()
                else:
                    os.close(self._descriptor)
                self._descriptor = -1
                self._dead = True
        finally:
            self.release()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            return self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001 - a bad format string must not end what was to be logged
            return f"ERROR ipc.logs a record of {record.name} cannot be formatted\n".encode()

    def _put(self, line: bytes) -> None:
        self._queue.append(line)
        self._queued_bytes += len(line)

    def _write_queued(self) -> None:
        while self._queue and not self._dead:
            line = self._queue[0]
            try:
                written = self._write(line)
            except BlockingIOError:
                return
            except OSError as exc:  # EPIPE, EIO, ECONNRESET: nobody reads any more
                if exc.errno in _FULL:
                    return
                self._dead = True
                self.dropped_count += len(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
                return
            self._queued_bytes -= written
            if written < len(line):
                self._queue[0] = line[written:]
            else:
                self._queue.popleft()

    def _write(self, line: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._shared:
            # Not ours to make non-blocking: a pipe that polls as writable takes PIPE_BUF bytes at once.
            poller = select.poll()
            poller.register(self._descriptor, select.POLLOUT)
            if not poller.poll(0):
                raise BlockingIOError
            line = line[: select.PIPE_BUF]
        return os.write(self._descriptor, line)


class _FieldsFormatter(logging.Formatter):
    def __init__(self, always: Mapping[str, Field]) -> None:
        super().__init__()
        self._always = dict(always)

    def _fields_of(self, record: logging.LogRecord) -> dict[str, Field]:
        given = getattr(record, "fields", None)
        return {**self._always, **(given if isinstance(given, dict) else {})}


class _TextFormatter(_FieldsFormatter):
    def __init__(self, always: Mapping[str, Field], *, timed: bool) -> None:
        super().__init__(always)
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record.created)] if self._timed else []
        parts += [record.levelname, record.name, _one_line(record.getMessage())]
        parts += [f"{key}={_value(value)}" for key, value in self._fields_of(record).items()]
        text = _cut(" ".join(parts))
        if record.exc_info:
            # Indented, so that no line of a traceback can pass for a record.
            text += "".join(f"\n    {line}" for line in self.formatException(record.exc_info).splitlines())
        return text


class _JsonFormatter(_FieldsFormatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Field] = self._fields_of(record)
        entry |= {
            "unix_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _time(unix_s: float) -> str:
    """RFC 3339, in UTC and to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: Field) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(char in text for char in ' "=')
    return _cut(text if plain else json.dumps(text))


def _one_line(text: str) -> str:
    """Control characters escaped: a name that a client chose must not begin a line of its own."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]}..."
