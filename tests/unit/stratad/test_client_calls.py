"""The client's plain calls: handshake, registration, replies, errors, threads, deadlines, the end."""

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ipc.codec import encode
from ipc.link import Link, LinkError
from ipc.messages import (
    PROTOCOL_VERSION,
    SLOT_LIMIT,
    Capture,
    Captured,
    Done,
    Drop,
    Failed,
    Found,
    Goodbye,
    Hello,
    ImageInfo,
    Images,
    ListImages,
    Lookup,
    Mark,
    Pin,
    Progress,
    Register,
    Request,
    Restore,
    SlotDirect,
    SlotDrop,
    SlotFrom,
    SlotTo,
    StageOutcome,
    Stats,
    Unregister,
    Welcome,
)
from shm.rows import pack_numbers, pack_rows
from stratad.client import Client, CpuPool, Match, StagePool
from stratad.errors import (
    Busy,
    DeadlineExceeded,
    Lost,
    NoSpace,
    ProtocolError,
    UsageError,
)
from tests.support.client_rig import FINGERPRINT, PAGED, PLAIN, STATEFUL, rig
from tests.support.fake_daemon import FakeDaemon, empty_stats, silence
from tests.support.wait import wait_until


def test_handshake_uses_the_token_of_the_lifeline(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, _, _):
        hello = daemon.expect(Hello)
        assert (hello.version, hello.client) == (PROTOCOL_VERSION, "test")
        assert daemon.bad_hellos == 0
        assert client.welcome.start_id == daemon.start_id
    assert len(daemon.of(Goodbye)) == 1


def test_registration_hands_over_the_memory_that_its_probe_shows(tmp_path: Path) -> None:
    with (
        FakeDaemon.start(tmp_path) as daemon,
        Client.connect(tmp_path) as client,
        CpuPool.allocate(PLAIN.end_bytes) as pool,
    ):
        pool.buffer[:16] = bytes(range(16))
        pool.buffer[-16:] = bytes(range(100, 116))
        engine = client.register("an-engine", "tenant", FINGERPRINT, [StagePool("cpu:3", PLAIN, pool)])
        request = daemon.expect(Register)
        assert (request.engine, request.namespace, request.fingerprint) == ("an-engine", "tenant", FINGERPRINT)
        (stage,) = request.stages
        assert (stage.index, stage.device, stage.layout) == (0, "cpu:3", PLAIN)
        assert daemon.bad_probes == 0
        assert stage.probe_bytes.startswith(bytes(range(16)))
        assert stage.probe_bytes.endswith(bytes(range(100, 116)))
        assert engine.workers[0].pid == daemon.workers[0].pid
        engine.unregister()
        assert daemon.expect(Unregister).engine_id == 1


def test_capture_sends_what_was_asked(tmp_path: Path) -> None:
    with rig(tmp_path, (PLAIN, PAGED)) as (daemon, _, engine, _):
        result = engine.capture("chat", [1, 2, 3, 4, 5], slot=7, rows_by_stage=[range(5), [9, 2]]).result()
        assert result == Captured(result.seq, 1, 5, 1000, 1000, ())
        sent = daemon.expect(Capture)
        assert (sent.engine_id, sent.conversation, sent.slot) == (1, "chat", 7)
        assert (sent.ordered, sent.positions) == ("host", b"")
        assert sent.tokens.hex() == "0100000002000000030000000400000005000000"
        assert [[group.hex() for group in rows] for rows in sent.rows] == [
            ["0000000005000000"],
            ["09000000010000000200000001000000"],
        ]
        assert 4.0 < sent.deadline_s <= 5.0


def test_state_needs_a_position_and_a_slot(tmp_path: Path) -> None:
    with rig(tmp_path, (STATEFUL,)) as (daemon, _, engine, _):
        engine.capture("chat", [1, 2, 3], range(3), checkpoints=[(2, 1), (3, 0)]).result()
        sent = daemon.expect(Capture)
        assert (sent.positions, sent.rows) == (
            pack_numbers([2, 3]),
            ((pack_rows([(0, 3)]), pack_rows([(1, 1), (0, 1)])),),
        )
        for checkpoints in (
            [],
            [(4, 0)],
            [(0, 0)],
            [(3, 2)],
            [(3, -1)],
            [(3, 0), (2, 1)],
            [(2, 0), (2, 1)],
            [(2, 1), (3, 1)],
        ):
            with pytest.raises(UsageError):
                engine.capture("chat", [1, 2, 3], range(3), checkpoints=checkpoints)
    assert len(daemon.of(Capture)) == 1


def test_lookup_tells_hit_from_miss(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        assert engine.lookup([1, 2]) is None
        daemon.script[Lookup] = lambda request: [Found(request.seq, "hit", 5, "chat", 2, 9)]
        assert engine.lookup([1, 2]) == Match(5, "chat", 2, 9)


def test_failures_keep_their_code_stage_and_outcomes(tmp_path: Path) -> None:
    outcome = StageOutcome(1, "failed", "no_space", "full")
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Capture] = lambda request: [
            Failed(request.seq, "no_space", "the arena is full", 1, (outcome,), detail={"wanted": "5"})
        ]
        ticket = engine.capture("chat", [1], range(1))
        with pytest.raises(NoSpace, match=r"the arena is full \[no_space\]") as caught:
            ticket.result()
        assert (caught.value.stage, caught.value.stages, caught.value.detail) == (1, (outcome,), {"wanted": "5"})
        assert (ticket.state, ticket.rows_busy) == ("failed", False)
        daemon.script[Drop] = lambda request: [Failed(request.seq, "pinned", "it is pinned")]
        with pytest.raises(UsageError, match="pinned"):
            client.drop("tenant", "chat")


def test_images_are_listed_page_by_page(tmp_path: Path) -> None:
    def info(image_id: int) -> ImageInfo:
        return ImageInfo(image_id, "tenant", f"c{image_id}", 1, 1, 1, 1, 1, 1, False, False, 0.0, 0.0, 0)

    def pages(request: Request) -> list[Images]:
        assert isinstance(request, ListImages)
        first = request.after_image_id + 1
        return [Images(request.seq, (info(first), info(first + 1)), more=first < 5)]

    with rig(tmp_path) as (daemon, client, _, _):
        daemon.script[ListImages] = pages
        assert [image.image_id for image in client.list_images("tenant")] == [1, 2, 3, 4, 5, 6]
        assert daemon.of(ListImages)[0].namespace == "tenant"


def test_small_calls(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Drop] = lambda request: [Done(request.seq, 1)]
        assert client.drop("tenant", "chat", force=True) == 1
        assert daemon.expect(Drop).force
        client.pin("tenant", "chat", pinned=False)
        assert not daemon.expect(Pin).pinned
        assert (daemon.expect(Drop).image_id, daemon.expect(Pin).image_id) == (0, 0)
        client.drop("tenant", "chat", image_id=4)
        client.pin("tenant", "chat", image_id=5)
        assert (daemon.of(Drop)[-1].image_id, daemon.of(Pin)[-1].image_id) == (4, 5)
        assert client.clear("tenant") == 0
        assert client.stats().health == "ok"
        engine.mark(3, "poisoned")
        assert (daemon.expect(Mark).slot, daemon.expect(Mark).mark) == (3, "poisoned")
        with pytest.raises(UsageError, match="clean, dirty, poisoned"):
            engine.mark(3, "wrong")  # type: ignore[call-overload]


def test_many_threads_share_a_connection(tmp_path: Path) -> None:
    """Replies come in reverse order, so that each leader must take in the others' and hand over."""
    held: list[Stats] = []

    def in_reverse(request: Request) -> list[Done]:
        assert isinstance(request, Stats)
        held.append(request)
        if len(held) < 8:
            return []
        answers = [empty_stats(request.seq) for request in reversed(held)]
        held.clear()
        return answers  # type: ignore[return-value]

    with rig(tmp_path) as (daemon, client, _, _):
        daemon.script[Stats] = in_reverse
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.extend(client.stats().pid for _ in range(20))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert len(answers) == 160
        assert client.statistics() == {"connections": 1, "unknown_replies": 0}


def test_a_follower_leads_when_the_leader_is_done(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, _, _):
        daemon.script[Stats] = silence
        pids: list[int] = []
        threads = [threading.Thread(target=lambda: pids.append(client.stats().pid)) for _ in range(3)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            daemon.expect(Stats, count)
        for count, request in enumerate(daemon.of(Stats), 1):
            daemon.say(empty_stats(request.seq))
            wait_until(lambda count=count: len(pids) == count)  # type: ignore[misc]
        for thread in threads:
            thread.join(5.0)


class GatedPoller:
    """Holds the leader between its last look at the calls and its sleep."""

    def __init__(self, poller: select.poll) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self._poller = poller

    def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        self.entered.set()
        self.go.wait(5.0)
        return self._poller.poll(timeout_ms)


def test_a_reply_that_another_thread_takes_in_wakes_the_leader(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, _, _):
        daemon.script[Stats] = silence
        link = client.pump.link
        assert link is not None
        gate = GatedPoller(link.poller)
        link.poller = gate  # type: ignore[misc, assignment]
        leader = threading.Thread(target=client.stats)
        leader.start()
        assert gate.entered.wait(5.0)
        daemon.say(empty_stats(daemon.expect(Stats).seq))

        def taken_in() -> bool:
            client.pump.poll()
            return not client.pump._pending

        wait_until(taken_in)
        gate.go.set()
        leader.join(2.0)
        assert not leader.is_alive()


def test_the_deadline_ends_the_wait_and_a_late_reply_is_counted(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Lookup] = silence
        start_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="lookup: no final reply"):
            engine.lookup([1], deadline_s=0.05)
        assert 0.05 <= time.monotonic() - start_s < 2.0
        daemon.say(Found(daemon.expect(Lookup).seq, "miss"))
        assert client.stats().health == "ok"
        wait_until(lambda: client.stats() and client.statistics()["unknown_replies"] == 1)


def test_deadlines_must_be_numbers_above_zero(tmp_path: Path) -> None:
    with rig(tmp_path) as (_, client, _, _):
        for deadline_s in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="deadline"):
                client.stats(deadline_s=deadline_s)


def test_nobody_listens(tmp_path: Path) -> None:
    advice = (
        r"^no daemon answered at .*default within 0\.05 s: start one with `stratad`, or name its run_dir and instance "
    )
    with pytest.raises(DeadlineExceeded, match=advice):
        Client.connect(tmp_path, deadline_s=0.05)


def test_a_daemon_that_starts_later_is_waited_for(tmp_path: Path) -> None:
    clients: list[Client] = []
    thread = threading.Thread(target=lambda: clients.append(Client.connect(tmp_path, deadline_s=5.0)))
    thread.start()
    with FakeDaemon.start(tmp_path):
        thread.join(5.0)
        clients[0].close()


def test_another_version_is_refused_at_once(tmp_path: Path) -> None:
    with FakeDaemon.start(tmp_path) as daemon:
        daemon.script[Hello] = lambda request: [Failed(request.seq, "wrong_version", "version 9")]
        with pytest.raises(ProtocolError, match="version 9"):
            Client.connect(tmp_path, deadline_s=5.0)
        daemon.script[Hello] = lambda request: [
            Welcome(
                request.seq,
                PROTOCOL_VERSION + 1,
                b"1" * 16,
                os.getpid(),
                "default",
                "",
                "",
                1000,
                256,
                parallel=True,
                admin=True,
            )
        ]
        with pytest.raises(ProtocolError, match=f"speaks version {PROTOCOL_VERSION + 1}"):
            Client.connect(tmp_path, deadline_s=5.0)


def test_a_bad_instance_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="instance"):
        Client.connect(tmp_path, "a/b")


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: b"\xc1",
        lambda seq: encode(Done(seq)),
        lambda seq: encode(Stats(seq)),
        lambda seq: encode(Progress(seq, "sideways")),
        lambda _: encode(Failed(-1, "bad_frame", "could not be read")),
    ],
    ids=["rubbish", "of another call", "a request", "unknown progress", "unread"],
)
def test_a_malformed_reply_is_the_waiters_protocol_error(tmp_path: Path, answer: Callable[[int], bytes]) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Lookup] = lambda request: [answer(request.seq)]
        with pytest.raises(ProtocolError):
            engine.lookup([1])
        del daemon.script[Lookup]
        assert engine.lookup([1]) is None
        assert client.statistics()["connections"] == 2


def test_a_message_above_the_daemons_limit_is_not_sent(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        with pytest.raises(UsageError, match="the daemon takes 1048576"):
            engine.lookup(bytes(2 << 20))
        assert engine.lookup([1]) is None
        assert len(daemon.of(Lookup)) == 1


def test_a_forked_child_may_not_use_the_client(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = "nothing"
            try:
                client.stats()
            except UsageError as error:
                said = error.message
            try:
                engine.capture("chat", [1], range(1))
                said = "captured"
            except UsageError:
                pass
            client.close()
            os.write(writer, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1000).decode().startswith(f"this client belongs to process {os.getpid()}")
        os.close(reader)
        os.close(writer)
        assert client.stats().health == "ok"
        assert not daemon.of(Capture)


def test_a_forked_child_does_not_hold_the_lifeline(tmp_path: Path) -> None:
    """Else a daemon would not see the death of an engine whose children live on."""
    with rig(tmp_path) as (_, client, _, _):
        link = client.pump.link
        assert link is not None
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.fstat(link.lifeline_fd)
                os.write(writer, b"open")
            except OSError:
                os.write(writer, b"closed")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 10) == b"closed"
        os.close(reader)
        os.close(writer)


def test_close_ends_waiting_threads_and_may_be_repeated(tmp_path: Path) -> None:
    with rig(tmp_path) as (daemon, client, engine, _):
        daemon.script[Lookup] = silence
        errors: list[Exception] = []

        def look() -> None:
            try:
                engine.lookup([1])
            except Lost as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        daemon.expect(Lookup, 3)
        client.close()
        for thread in threads:
            thread.join(5.0)
        assert len(errors) == 3
        client.close()
        with pytest.raises(UsageError, match="closed"):
            client.stats()


def test_the_fingerprint_must_be_complete(tmp_path: Path) -> None:
    with FakeDaemon.start(tmp_path), Client.connect(tmp_path) as client, CpuPool.allocate(PLAIN.end_bytes) as pool:
        stages = [StagePool("cpu:0", PLAIN, pool)]
        lacking = FINGERPRINT | {"revision": "", "kv_format": ""}
        with pytest.raises(UsageError, match="lacks revision, kv_format"):
            client.register("e", "n", lacking, stages)


def test_a_refused_registration_leaves_the_pool_free(tmp_path: Path) -> None:
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        daemon.script[Register] = lambda request: [Failed(request.seq, "worker_unavailable", "not yet", 0)]
        pool = CpuPool.allocate(PLAIN.end_bytes)
        with pytest.raises(Busy):
            client.register("e", "n", FINGERPRINT, [StagePool("cpu:0", PLAIN, pool)])
        pool.close()
        assert client.engines == ()


@pytest.mark.parametrize(
    ("name", "text"), [("e" * (2 << 20), "the daemon takes"), ("\ud800", "cannot be encoded")], ids=["large", "no text"]
)
def test_a_registration_that_cannot_be_sent_leaves_no_descriptor_with_the_daemon(
    tmp_path: Path, name: str, text: str
) -> None:
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        with CpuPool.allocate(PLAIN.end_bytes) as pool:
            stages = [StagePool("cpu:0", PLAIN, pool)]
            with pytest.raises(UsageError, match=text):
                client.register(name, "n", FINGERPRINT, stages)
            assert client.stats().health == "ok"
            assert daemon.unclaimed() == 0
            assert not daemon.of(Register)
            client.register("e", "n", FINGERPRINT, stages).unregister()
            assert daemon.tags == [2], "the first tag was given away and is not used again"
        assert client.statistics()["connections"] == 1


class BrokenLink:
    """A link whose send queue is full."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, frame: bytes) -> None:
        raise LinkError("the send queue is full")

    def recv(self, timeout_s: float) -> bytes | None:
        return self._link.recv(timeout_s)

    def close(self) -> None:
        self._link.close()


def test_descriptors_that_went_without_their_frame_end_the_connection(tmp_path: Path) -> None:
    """The daemon would keep them for as long as the connection lives."""
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        link = client.pump.link
        assert link is not None
        link._link = BrokenLink(link._link)  # type: ignore[assignment]
        with CpuPool.allocate(PLAIN.end_bytes) as pool:
            client.register("e", "n", FINGERPRINT, [StagePool("cpu:0", PLAIN, pool)]).unregister()
        assert client.statistics()["connections"] == 2
        assert len(daemon.of(Register)) == 1
        wait_until(lambda: daemon.unclaimed() == 0)


def test_a_registration_that_comes_too_late_is_undone(tmp_path: Path) -> None:
    with FakeDaemon.start(tmp_path) as daemon, Client.connect(tmp_path) as client:
        daemon.script[Register] = silence
        with CpuPool.allocate(PLAIN.end_bytes) as pool:
            with pytest.raises(DeadlineExceeded):
                client.register("e", "n", FINGERPRINT, [StagePool("cpu:0", PLAIN, pool)], deadline_s=0.05)
            daemon.say(daemon.registered(daemon.expect(Register).seq, 1))
            wait_until(lambda: client.stats() and daemon.of(Unregister))
            assert daemon.expect(Unregister).engine_id == 1
            assert client.engines == ()


@pytest.mark.parametrize("slot", [-1, SLOT_LIMIT])
def test_a_slot_that_could_not_be_marked_is_not_even_sent(tmp_path: Path, slot: int) -> None:
    with rig(tmp_path) as (daemon, _, engine, _):
        calls: tuple[Callable[[], object], ...] = (
            lambda: engine.capture("chat", [1], range(1), slot=slot),
            lambda: engine.restore("chat", range(1), slot=slot),
            lambda: engine.take("chat", range(1), slot=slot),
            lambda: engine.slot_to(1, range(1), slot=slot),
            lambda: engine.slot_from(slot, range(1)),
            lambda: engine.slot_from(0, range(1), slot=slot),
            lambda: engine.slot_direct(1, range(1), range(1, 2), slot=slot, target_slot=0),
            lambda: engine.slot_direct(1, range(1), range(1, 2), slot=0, target_slot=slot),
            lambda: engine.slot_drop(slot),
            lambda: engine.mark(slot, "poisoned"),
        )
        for call in calls:
            with pytest.raises(UsageError, match=f"0 to {SLOT_LIMIT - 1}") as caught:
                call()
            assert caught.value.code == "bad_value"
        assert not any(daemon.of(kind) for kind in (Capture, Restore, SlotTo, SlotFrom, SlotDirect, SlotDrop, Mark))
