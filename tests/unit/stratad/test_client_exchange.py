"""An exchange on a scripted daemon: what is sent in which order, and what a lost daemon's workers may still touch."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ipc.messages import (
    Captured,
    Done,
    Failed,
    GetBegin,
    GetEnd,
    GetPart,
    PartInfo,
    PartLoaded,
    Parts,
    PartStored,
    PutAbort,
    PutBegin,
    PutBegun,
    PutCommit,
    PutPart,
    Register,
    Request,
    Stats,
    WorkerInfo,
    WorkerProcess,
)
from shm.process import start_ticks
from shm.rows import row_count, unpack_rows
from stratad.client import Client, Exchange, Get
from stratad.errors import Busy, Cancelled, Damaged, DeadlineExceeded, Lost, NoSpace, PeerGone, UsageError
from tests.support.client_rig import FINGERPRINT
from tests.support.fake_daemon import Answer, FakeDaemon, empty_stats, silence
from tests.support.fake_worker import fake_worker
from tests.support.wait import wait_until

MIB = 1 << 20
STEP = 256
PARTS = (PartInfo("a", 3 * MIB), PartInfo("empty", 0), PartInfo("b", 10))


def part_bytes(part: int, first_row: int, size: int) -> bytes:
    return bytes([part * 16 + first_row // STEP]) * size


class Script:
    """A daemon that does puts and gets well. Parts of gets are filled with `part_bytes`, into the memfd itself."""

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.puts = 0

    def install(self, daemon: FakeDaemon) -> None:
        daemon.script.update(
            {
                PutBegin: self.begin,
                PutPart: self.put_part,
                PutCommit: lambda r: (Captured(r.seq, 7, 0, 1, 1, ()),),
                PutAbort: lambda r: (Done(r.seq),),
                GetBegin: lambda r: (Parts(r.seq, 5, 7, "chat", b"", PARTS),),
                GetPart: self.get_part,
                GetEnd: lambda r: (Done(r.seq),),
            }
        )

    def begin(self, request: Request) -> Iterable[Answer]:
        self.puts += 1
        return (PutBegun(request.seq, self.puts),)

    def put_part(self, request: Request) -> Iterable[Answer]:
        assert isinstance(request, PutPart)
        return (PartStored(request.seq, row_count(unpack_rows(request.rows)) * 4096, ()),)

    def get_part(self, request: Request) -> Iterable[Answer]:
        assert isinstance(request, GetPart)
        assert self.memory is not None
        for first, count in unpack_rows(request.rows):
            self.memory[first * 4096 : (first + count) * 4096] = part_bytes(
                request.part, request.first_row, count * 4096
            )
        return (PartLoaded(request.seq, 1, ()),)


@contextmanager
def rig(run_dir: Path, exchange_bytes: int = 4 * MIB, deadline_s: float = 5.0) -> Iterator[tuple[FakeDaemon, Exchange]]:
    script = Script()
    with FakeDaemon.start(run_dir) as daemon:
        script.install(daemon)
        with Client.connect(run_dir, deadline_s=deadline_s) as client:
            exchange = client.exchange("cpu:0", "tenant", FINGERPRINT, exchange_bytes)
            script.memory = exchange.pool.buffer
            yield daemon, exchange
            script.memory = None
        exchange.pool.close()


def test_a_part_travels_in_pieces_and_only_then_is_committed(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        (register,) = daemon.of(Register)
        assert (register.exchange, register.stages[0].device) == (True, "cpu:0")
        data = os.urandom(3 * MIB + 5)
        exchange.pool.buffer[:] = b"\xff" * exchange.nbytes
        with exchange.put("chat", [1, 2]) as put:
            put.add("x", data, "note")
            put.add("nothing", b"")
        assert put.result.image_id == 7
        assert daemon.of(PutBegin)[0].tokens == b"\1\0\0\0\2\0\0\0"
        sent = daemon.of(PutPart)
        assert [(p.name, p.nbytes, p.meta, p.first_row, row_count(unpack_rows(p.rows))) for p in sent] == [
            ("x", len(data), "note", 0, STEP),
            ("x", len(data), "note", STEP, STEP),
            ("x", len(data), "note", 2 * STEP, STEP),
            ("x", len(data), "note", 3 * STEP, 1),
            ("nothing", 0, "", 0, 0),
        ]
        ((row, _),) = unpack_rows(sent[3].rows)
        assert exchange.pool.buffer[row * 4096 : (row + 1) * 4096] == data[3 * MIB :] + bytes(4091)
        kinds = [type(request) for request in daemon.requests if isinstance(request, PutPart | PutCommit)]
        assert kinds == [PutPart] * 5 + [PutCommit]


def test_add_waits_for_room_only(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        daemon.script[PutPart] = silence
        put = exchange.put("chat")
        for number in range(4):
            put.add(f"{number}", bytes(MIB))
        daemon.expect(PutPart, 4)
        done = threading.Event()

        def add() -> None:
            put.add("4", bytes(MIB))
            done.set()

        thread = threading.Thread(target=add)
        thread.start()
        assert not done.wait(0.0)
        assert len(daemon.of(PutPart)) == 4
        first = daemon.of(PutPart)[0]
        daemon.say(PartStored(first.seq, MIB, ()))
        thread.join(5.0)
        assert done.is_set()
        assert daemon.expect(PutPart, 5).rows == first.rows
        for part in daemon.of(PutPart)[1:]:
            daemon.say(PartStored(part.seq, MIB, ()))
        put.commit()


def test_a_part_that_failed_is_named_and_may_be_added_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        well = daemon.script[PutPart]

        def fail(request: Request) -> Iterable[Answer]:
            assert isinstance(request, PutPart)
            if request.name == "x" and request.first_row == STEP:
                return (Failed(request.seq, "no_space", "full"),)
            return well(request)

        daemon.script[PutPart] = fail
        put = exchange.put("chat")
        put.add("w", b"1")
        with pytest.raises(NoSpace):
            put.add("x", bytes(8 * MIB))
        for attempt in (lambda: put.add("y", b"1"), put.commit):
            with pytest.raises(NoSpace) as caught:
                attempt()
            assert caught.value.detail["part"] == "x"
        assert not daemon.of(PutCommit)
        daemon.script[PutPart] = well
        put.add("x", bytes(2 * MIB))
        put.add("y", b"1")
        put.commit()
        names = [(p.name, p.nbytes, p.first_row) for p in daemon.of(PutPart)][-3:]
        assert names == [("x", 2 * MIB, 0), ("x", 2 * MIB, STEP), ("y", 1, 0)]
        assert exchange.room.free_rows == 4 * STEP


def test_of_several_parts_that_failed_each_may_be_added_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        well = daemon.script[PutPart]
        daemon.script[PutPart] = silence
        put = exchange.put("chat")
        put.add("x", b"1")
        put.add("y", b"2")
        daemon.expect(PutPart, 2)
        for part in daemon.of(PutPart):
            daemon.say(Failed(part.seq, "no_space", "full"))
        with pytest.raises(NoSpace):
            put.commit()
        daemon.script[PutPart] = well
        for name in ("y", "x"):
            put.add(name, b"3")
        put.add("z", b"4")
        put.commit()
        assert [part.name for part in daemon.of(PutPart)] == ["x", "y", "y", "x", "z"]


def test_a_put_that_lacks_a_part_whose_add_was_interrupted_is_not_committed(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        well = daemon.script[PutPart]
        daemon.script[PutPart] = silence
        put = exchange.put("chat")
        for number in range(4):
            put.add(f"{number}", bytes(MIB))
        daemon.expect(PutPart, 4)

        def interrupt() -> None:
            wait_until(lambda: exchange.client.pump._leader)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            put.add("late", b"1")
        thread.join(5.0)
        for part in daemon.of(PutPart):
            daemon.say(PartStored(part.seq, MIB, ()))
        with pytest.raises(Cancelled, match="'late' was not added"):
            put.commit()
        daemon.script[PutPart] = well
        put.add("late", b"1")
        put.commit()


def test_a_part_begins_anew_only_when_nothing_of_it_is_on_its_way(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        well = daemon.script[PutPart]

        def second_piece_fails(request: Request) -> Iterable[Answer]:
            assert isinstance(request, PutPart)
            if not request.nbytes:
                return well(request)
            return (Failed(request.seq, "no_space", "full"),) if request.first_row else ()

        def whole_pieces_only(request: Request) -> Iterable[Answer]:
            return well(request) if answered.is_set() else (Failed(request.seq, "duplicate_part", "still copied"),)

        def answer_once_somebody_waits() -> None:
            wait_until(lambda: exchange.client.pump._leader)
            answered.set()
            daemon.say(PartStored(first.seq, MIB, ()))

        answered = threading.Event()
        daemon.script[PutPart] = second_piece_fails
        put = exchange.put("chat")
        put.add("x", bytes(2 * MIB))
        first = daemon.expect(PutPart, 1)
        daemon.expect(PutPart, 2)
        with pytest.raises(NoSpace) as caught:
            wait_until(lambda: put.add(f"y{os.urandom(4).hex()}", b""))
        assert caught.value.detail["part"] == "x"
        daemon.script[PutPart] = whole_pieces_only
        thread = threading.Thread(target=answer_once_somebody_waits)
        thread.start()
        put.add("x", bytes(2 * MIB))
        thread.join(10.0)
        put.commit()


def test_reading_asks_for_the_next_part_ahead_and_uses_it(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange), exchange.get("chat") as got:
        assert list(got.parts) == ["a", "empty", "b"]
        assert got.read("a") == b"".join(part_bytes(0, n * STEP, MIB) for n in range(3))
        wait_until(lambda: len(daemon.of(GetPart)) == 4)
        assert [(p.part, p.first_row) for p in daemon.of(GetPart)] == [(0, 0), (0, STEP), (0, 2 * STEP), (2, 0)]
        assert got.read("empty") == b""
        assert got.read("b") == part_bytes(2, 0, 10)
        assert len(daemon.of(GetPart)) == 4
        got.close()
        assert exchange.room.free_rows == 4 * STEP
        assert daemon.of(GetEnd)[0].get_id == 5


def test_what_failed_when_it_was_asked_for_ahead_is_asked_for_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange), exchange.get("chat") as got:
        well = daemon.script[GetPart]

        def fail_b(request: Request) -> Iterable[Answer]:
            assert isinstance(request, GetPart)
            return (Failed(request.seq, "worker_died", "gone"),) if request.part == 2 else well(request)

        daemon.script[GetPart] = fail_b
        got.read("a")
        daemon.expect(GetPart, 4)
        with pytest.raises(PeerGone):
            got.read("b")
        got.read("a")
        wait_until(lambda: [p.part for p in daemon.of(GetPart)][-1] == 2)
        daemon.script[GetPart] = well
        assert got.read("b") == part_bytes(2, 0, 10)
        got.close()
        assert exchange.room.free_rows == 4 * STEP


def test_nothing_of_a_piece_that_failed_reaches_the_readers_buffer(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange), exchange.get("chat") as got:
        well = daemon.script[GetPart]

        def damage_the_second(request: Request) -> Iterable[Answer]:
            assert isinstance(request, GetPart)
            answers = tuple(well(request))
            return (Failed(request.seq, "damaged", "changed"),) if request.first_row == STEP else answers

        daemon.script[GetPart] = damage_the_second
        buffer = bytearray(3 * MIB)
        with pytest.raises(Damaged):
            got.read_into("a", buffer)
        assert buffer == part_bytes(0, 0, MIB) + bytes(2 * MIB)
        got.close()
        assert exchange.room.free_rows == 4 * STEP


def test_what_was_asked_for_ahead_gives_way_to_a_put_and_is_asked_for_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange), exchange.get("chat") as got, exchange.put("other") as put:
        got.read("a")
        put.add("x", bytes(4 * MIB))
        assert got.read("b") == part_bytes(2, 0, 10)
        assert [p.part for p in daemon.of(GetPart)] == [0, 0, 0, 2, 2]


def test_nothing_begun_in_one_daemon_is_sent_to_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, exchange):
        first.script[PutPart] = silence
        put, got, bare = exchange.put("chat"), exchange.get("chat"), exchange.put("bare")
        put.add("x", bytes(MIB))
        first.expect(PutPart)
        first.stop()
        for attempt in (bare.commit, lambda: put.add("y", b"1"), put.commit, lambda: got.read("a")):
            with pytest.raises(Lost):
                attempt()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            Script().install(second)
            again = exchange.put("chat")
            for attempt in (lambda: put.add("y", b"1"), put.commit, lambda: got.read("a")):
                with pytest.raises(Lost):
                    attempt()
            put.abort()
            got.close()
            again.add("x", b"1")
            again.commit()
            sent = [type(r) for r in second.requests if not isinstance(r, Register)][1:]
            assert sent == [PutBegin, PutPart, PutCommit]
            exchange.client.close()


def test_a_begin_whose_answer_was_lost_is_sent_again(tmp_path: Path) -> None:
    with rig(tmp_path) as (first, exchange):
        first.script[PutBegin] = silence
        made: list[object] = []
        thread = threading.Thread(target=lambda: made.append(exchange.put("chat")))
        thread.start()
        first.expect(PutBegin)
        first.stop()
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            Script().install(second)
            thread.join(5.0)
            (put,) = made
            put.add("x", b"1")  # type: ignore[attr-defined]
            put.commit()  # type: ignore[attr-defined]
            assert len(second.of(PutBegin)) == 1
            exchange.client.close()


def _lost(got: Get) -> None:
    with pytest.raises(Lost):
        got.read("a")


def test_the_name_of_a_worker_stands_for_its_device(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        shown = WorkerInfo("gpu0", "GPU-1", "ready", 1, 1, 0, (), 0, 0, 0, 0, 0, 0, "", {})
        daemon.script[Stats] = lambda r: (msgspec.structs.replace(empty_stats(r.seq), workers=(shown,)),)
        for name in ("gpu0", "GPU-1"):
            exchange.client.exchange(name, "tenant", FINGERPRINT, 4 * MIB).close()
            assert daemon.of(Register)[-1].stages[0].device == "GPU-1"
        with pytest.raises(UsageError, match=r"no worker serves device 'gpu1'; there are gpu0 \(GPU-1\)"):
            exchange.client.exchange("gpu1", "tenant", FINGERPRINT, 4 * MIB)


def test_rows_that_a_lost_worker_may_still_write_are_not_used_again(tmp_path: Path) -> None:
    with fake_worker() as worker, rig(tmp_path) as (first, exchange):
        first.workers = [worker.process]
        first.script[GetPart] = silence
        exchange.close()
        exchange = exchange.client.exchange("cpu:0", "tenant", FINGERPRINT, 3 * MIB, deadline_s=1.0)
        got = exchange.get("chat")
        reader = threading.Thread(target=lambda: _lost(got))
        reader.start()
        first.expect(GetPart, 3)
        first.stop()
        reader.join(5.0)
        with FakeDaemon.start(tmp_path, start_id=b"2" * 16) as second:
            Script().install(second)
            second.workers = [WorkerProcess(0, "w", os.getpid(), start_ticks(os.getpid()))]
            put = exchange.put("chat", deadline_s=0.3)
            with pytest.raises(Busy, match="no room in the exchange"):
                put.add("x", bytes(4 * MIB))
            worker.kill()
            put.abort()
            with exchange.put("chat") as put:
                put.add("x", bytes(8 * MIB))
            exchange.client.close()
        exchange.pool.close()


@pytest.mark.parametrize("size", [0, 1, 2 * MIB])
def test_a_part_that_was_stored_after_its_deadline_is_told_from_one_that_is_named_twice(
    tmp_path: Path, size: int
) -> None:
    with rig(tmp_path) as (daemon, exchange):
        daemon.script[PutPart] = silence
        put = exchange.put("chat", deadline_s=0.2)

        def add_and_commit() -> None:
            put.add("x", bytes(size))
            put.commit()

        with pytest.raises(DeadlineExceeded):
            add_and_commit()
        for part in daemon.of(PutPart):
            daemon.say(PartStored(part.seq, size, ()))
        daemon.script[PutPart] = lambda r: (Failed(r.seq, "duplicate_part", "part 'x' is there already"),)
        with pytest.raises(UsageError, match="'x' was stored after all") as caught:
            add_and_commit()
        assert caught.value.code == "duplicate_part"
        with pytest.raises(UsageError, match="abort the put") as caught:
            put.commit()
        assert caught.value.detail["part"] == "x"
        put.abort()
        assert daemon.of(PutAbort)


def test_a_part_without_an_answer_ends_the_wait_and_keeps_its_rows(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, exchange):
        daemon.script[PutPart] = silence
        put = exchange.put("chat", deadline_s=0.2)
        put.add("x", b"1")
        with pytest.raises(DeadlineExceeded) as caught:
            put.commit()
        assert caught.value.detail["part"] == "x"
        assert exchange.room.free_rows == 4 * STEP - 1
        daemon.say(PartStored(daemon.of(PutPart)[0].seq, 4096, ()))
        wait_until(lambda: exchange.room.try_take(4 * STEP))
        put.abort()
