"""Lines, fields, and readers that are slow or dead."""

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from ipc.logs import QUEUE_LINES, LogSink, fields, setup_logs

Style = Literal["text", "json"]
LOGGER = logging.getLogger("stratad.test")
TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.MULTILINE)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for handler in handlers:
        root.removeHandler(handler)  # `setup_logs` would close those of pytest
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for descriptor in (read_end, write_end):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test closed it


def lines(read_end: int) -> list[str]:
    """What was written, without the time of each record."""
    return TIME.sub("", os.read(read_end, 1 << 20).decode()).splitlines()


def test_text(pipe: tuple[int, int]) -> None:
    setup_logs("info", "text", pipe[1])
    LOGGER.info("image %d published", 3, extra=fields(worker="cpu:0", took_s=0.5, note="two words", empty=""))
    assert lines(pipe[0]) == ['INFO stratad.test image 3 published worker=cpu:0 took_s=0.5 note="two words" empty=""']


@pytest.mark.parametrize("under", ["terminal", "journal", "another's journal"])
def test_a_line_has_its_time_unless_the_journal_adds_one(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    status = os.fstat(pipe[1])
    stream = {"terminal": "", "journal": f"{status.st_dev}:{status.st_ino}", "another's journal": "8:1"}[under]
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    setup_logs("info", "text", pipe[1])
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", None, None)
    record.created = 1_700_000_000.0625
    logging.getLogger().handle(record)
    time = "" if under == "journal" else "2023-11-14T22:13:20.062Z "
    assert os.read(pipe[0], 1000).decode() == f"{time}INFO x hello\n"


def test_json(pipe: tuple[int, int]) -> None:
    setup_logs("info", "json", pipe[1])
    LOGGER.warning("image %d", 3, extra=fields(worker="cpu:0", message="not over the real one"))
    (line,) = lines(pipe[0])
    entry = json.loads(line)
    assert entry.pop("unix_s") > 0
    assert entry == {"level": "warning", "logger": "stratad.test", "message": "image 3", "worker": "cpu:0"}


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_record_is_one_line_whatever_a_peer_sent(pipe: tuple[int, int], style: Style) -> None:
    setup_logs("info", style, pipe[1])
    LOGGER.info("bad name %s", "x\nERROR stratad forged", extra=fields(client="y\r\nERROR forged \x1b[31m\ud800"))
    (line,) = lines(pipe[0])
    assert line.isprintable()


@pytest.mark.parametrize("style", ["text", "json"])
def test_long_values_are_cut(pipe: tuple[int, int], style: Style) -> None:
    setup_logs("info", style, pipe[1])
    LOGGER.info("x" * 50_000)
    assert len(lines(pipe[0])[0]) < 10_000


def test_tracebacks_are_indented(pipe: tuple[int, int]) -> None:
    setup_logs("info", "text", pipe[1])
    try:
        raise ValueError("what\nERROR forged")
    except ValueError:
        LOGGER.exception("it failed")
    first, *rest = lines(pipe[0])
    assert first == "ERROR stratad.test it failed"
    assert any("ValueError" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_bad_format_string_does_not_raise(pipe: tuple[int, int], style: Style) -> None:
    setup_logs("info", style, pipe[1])
    LOGGER.info("%d images", "three")
    assert "cannot be formatted" in lines(pipe[0])[0]


def test_levels(pipe: tuple[int, int]) -> None:
    setup_logs("warning", "text", pipe[1])
    LOGGER.info("not this")
    LOGGER.warning("this")
    assert lines(pipe[0]) == ["WARNING stratad.test this"]


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_full_pipe_does_not_block_and_what_was_dropped_is_counted(pipe: tuple[int, int], style: Style) -> None:
    sink = setup_logs("info", style, pipe[1])
    sent = QUEUE_LINES + 3000
    for number in range(sent):
        LOGGER.info("line %d %s", number, "x" * 100)
    assert os.get_blocking(pipe[1])  # others write to it too
    assert sink.dropped_count > 0
    received: list[str] = []
    text = b""
    while True:
        sink.flush()
        os.set_blocking(pipe[0], False)
        try:
            text += os.read(pipe[0], 1 << 20)
        except BlockingIOError:
            break
    received = text.decode().splitlines()
    assert len(received) == sent - sink.dropped_count
    LOGGER.info("later")
    note, later = lines(pipe[0])
    assert str(sink.dropped_count) in note
    assert "dropped" in note
    assert "later" in later


def test_a_dead_reader_is_survived(pipe: tuple[int, int]) -> None:
    sink = setup_logs("info", "text", pipe[1])
    os.close(pipe[0])
    for _ in range(3):
        LOGGER.info("nobody reads this")
    assert sink.dropped_count == 3
    sink.flush()


def test_a_full_disk_is_a_slow_reader_and_no_dead_one() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink = setup_logs("info", "text", full.fileno())
        for number in range(QUEUE_LINES + 5):
            LOGGER.info("line %d", number)
        assert sink.dropped_count == 5


def test_a_socket_as_the_journal_gives(pipe: tuple[int, int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink = setup_logs("info", "text", ours.fileno())
        LOGGER.info("hello")
        assert TIME.sub("", theirs.recv(1000).decode()) == "INFO stratad.test hello\n"
        for _ in range(20_000):
            LOGGER.info("x" * 1000)
        assert sink.dropped_count > 0
        assert ours.getblocking()
        theirs.close()
        LOGGER.info("gone")


def test_a_file_is_shared_with_whoever_else_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)  # a shell's `>log`: no O_APPEND, one offset for all
    try:
        os.write(descriptor, b"before\n")
        setup_logs("info", "text", descriptor)
        LOGGER.info("hello")
        os.write(descriptor, b"after\n")
        LOGGER.info("again")
    finally:
        os.close(descriptor)
    assert TIME.sub("", path.read_text()) == "before\nINFO stratad.test hello\nafter\nINFO stratad.test again\n"


def test_closing_leaves_the_descriptor_of_the_caller(pipe: tuple[int, int]) -> None:
    sink = LogSink.open(pipe[1])
    sink.close()
    sink.close()
    sink.emit(logging.LogRecord("x", logging.INFO, "", 0, "late", None, None))
    assert sink.dropped_count == 1
    os.write(pipe[1], b"still open\n")
    assert lines(pipe[0]) == ["still open"]


def test_a_second_setup_replaces_the_first(pipe: tuple[int, int]) -> None:
    setup_logs("info", "text", pipe[1])
    setup_logs("info", "text", pipe[1])
    LOGGER.info("once")
    assert lines(pipe[0]) == ["INFO stratad.test once"]
