"""The trace: what is kept of an operation, how its steps add up, who may see and switch it, and that it is bounded."""

import random
import tracemalloc
from collections import deque
from collections.abc import Callable

import msgspec
import pytest

from ipc.codec import encode
from ipc.messages import (
    Captured,
    Clear,
    Failed,
    JobDone,
    JobFailed,
    Mark,
    SetTrace,
    StageOutcome,
    Stats,
    StatsReply,
    Trace,
    TraceCopies,
    Traced,
    TracedStage,
)
from stratad.core.effects import SendTo
from stratad.core.trace import IN_LANE, LIST_LIMIT, STEPS, percentiles
from stratad.core.trace_ring import OP_BYTES, RING_BYTES, STAGE_BYTES, UNANSWERED_LIMIT, OpTrace, TraceRing
from tests.support.core_harness import MIB, ROW_BYTES, Harness

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core(trace=True)
    harness.connect()
    return harness


def ask(core: Harness, client: int = 1, **changes: object) -> Traced:
    request = msgspec.structs.replace(Trace(core.next_seq()), **changes)
    core.ask(client, request)
    reply = core.final(client, request.seq)
    assert isinstance(reply, Traced), reply
    return reply


def told(core: Harness) -> list[tuple[str, bool]]:
    """What workers were told of the trace so far."""
    sent = [effect for effect in core.effects if isinstance(effect, SendTo)]
    return [(effect.worker, effect.command.on) for effect in sent if isinstance(effect.command, TraceCopies)]


def finish(core: Harness, worker: str, **times: float) -> None:
    """A worker does its oldest job well, in these times."""
    job = core.jobs(worker)[0]
    core.sent[worker].remove(job)
    digests = b"".join(bytes([int(worker[-1]), n]) * 8 for n in range(3)) if hasattr(job, "places") else b""
    report = JobDone(job.job, 1000, 0.0, 0.0, digests, digested_bytes=2000)
    core.report(worker, msgspec.structs.replace(report, **times))


def steps(stage: TracedStage) -> dict[str, float]:
    return {name: getattr(stage, f"{name}_s") for name in STEPS}


def in_lane(stage: TracedStage) -> dict[str, float]:
    return {name: getattr(stage, f"{name}_s") for name in IN_LANE}


def test_the_steps_of_a_capture_add_up_to_its_time(core: Harness) -> None:
    engine = core.register()
    ring = core.core.state.trace
    began_s = core.now_s
    seq = core.capture(engine)
    jobs = {worker: core.jobs(worker)[0].job for worker in core.sent}
    ring.note_sent(jobs["cpu:0"], began_s + 0.5)
    ring.note_sent(jobs["cpu:1"], began_s + 0.75)
    core.now_s += 10.0
    finish(
        core, "cpu:0", event_s=1.0, queue_s=2.0, lane_s=4.0, digest_s=1.5, verify_s=0.5, copy_s=1.75, gather_s=0.25
    )  # fmt: skip
    core.now_s += 2.0
    ring.note_append(0.125)
    finish(core, "cpu:1", lane_s=1.0)
    assert isinstance(core.final(1, seq), Captured)
    ring.note_reply(1, seq, core.now_s + 0.25)
    reply = ask(core)
    (op,) = reply.ops
    assert (op.kind, op.namespace, op.conversation, op.tokens, op.code) == ("capture", "ns", "a", 600, "")
    assert (op.engine_id, op.began_unix_s, op.total_s, op.journal_s) == (engine, 1e9 + began_s, 12.25, 0.125)
    first, second = op.stages
    assert steps(first) == {
        "queue": 0.5,
        "way": 2.5,
        "event": 1.0,
        "turn": 2.0,
        "lane": 4.0,
        "publish": 2.25,
    }
    assert in_lane(first) == {"digest": 1.0, "gather": 0.25, "link": 1.5, "verify": 0.5, "rest": 0.75}
    assert steps(second) == dict.fromkeys(STEPS, 0.0) | {"queue": 0.75, "way": 10.25, "lane": 1.0, "publish": 0.25}
    assert in_lane(second) == dict.fromkeys(IN_LANE, 0.0) | {"rest": 1.0}
    for stage in op.stages:
        assert sum(steps(stage).values()) == op.total_s
        assert (stage.asked_bytes, stage.moved_bytes, stage.digested_bytes) == (600 * ROW_BYTES, 1000, 2000)
        assert (stage.worker, stage.state) == (f"cpu:{stage.stage}", "done")
    (kind,) = reply.kinds
    assert (kind.kind, kind.count, kind.failed, kind.moved_bytes, kind.digested_bytes) == ("capture", 1, 0, 2000, 4000)
    assert kind.times["total"] == (12.25,) * 4
    assert kind.times["queue"] == (0.75,) * 4, "of the stage that was done last"
    assert kind.times["journal"] == (0.125,) * 4
    assert set(kind.times) == {"total", "journal", *STEPS, *IN_LANE}


def test_the_time_of_a_record_is_told_once_and_only_of_what_was_recorded(core: Harness) -> None:
    engine = core.register()
    ring = core.core.state.trace
    core.capture(engine)
    ring.note_append(0.5)
    core.finish_all()
    ring.note_append(0.25)
    core.restore(engine)
    core.finish_all()
    core.slot_copy(engine, "slot_to")
    core.finish_all()
    assert [(op.kind, op.journal_s) for op in ask(core).ops] == [("capture", 0.5), ("restore", 0.0), ("slot_to", 0.0)]


def test_one_stage_after_the_other_waits_in_the_queue(make_core: MakeCore) -> None:
    core = make_core(trace=True, parallel=False)
    core.connect()
    core.capture(core.register())
    core.now_s += 3.0
    finish(core, "cpu:0", lane_s=3.0)
    core.now_s += 2.0
    finish(core, "cpu:1", lane_s=2.0)
    first, second = ask(core).ops[0].stages
    assert (first.queue_s, first.rest_s, first.publish_s) == (0.0, 3.0, 2.0)
    assert (second.queue_s, second.rest_s, second.publish_s) == (3.0, 2.0, 0.0)


def test_a_failed_operation_has_its_code_and_the_times_of_what_was_done(core: Harness) -> None:
    engine = core.register()
    seq = core.capture(engine)
    core.now_s += 2.0
    job = core.jobs("cpu:0")[0]
    core.sent["cpu:0"].remove(job)
    failure = JobFailed(job.job, "source_changed", "x" * 1000, 0, (b"r" * 1000,), lane_s=1.0, moved_bytes=5)
    core.report("cpu:0", msgspec.structs.replace(failure, digest_s=0.75, verify_s=0.25, queue_s=0.5))
    core.finish("cpu:1")
    assert isinstance(core.final(1, seq), Failed)
    assert core.failure(1, seq).stages[0].digest_s == 0.75
    (op,) = ask(core).ops
    first, second = op.stages
    assert (op.code, first.state, first.code, second.state) == ("source_changed", "failed", "source_changed", "done")
    assert (first.digest_s, first.verify_s, first.rest_s, first.turn_s, first.way_s) == (0.5, 0.25, 0.25, 0.5, 0.5)
    assert first.moved_bytes == 5
    kept = core.core.state.trace.entries[0].stages[0][-1]
    assert (kept.message, kept.rows_undefined) == ("", ()), "these may be as large as a frame"
    (kind,) = ask(core).kinds
    assert (kind.count, kind.failed, kind.times) == (0, 1, {})


def test_the_rows_that_a_failure_names_are_not_kept(core: Harness) -> None:
    engine = core.register()
    seq = core.slot_copy(engine, "slot_direct", slot=3)
    core.ask(1, Mark(core.next_seq(), engine, 3, "poisoned"))
    core.finish_all()
    assert all(outcome.rows_undefined for outcome in core.failure(1, seq).stages)
    (entry,) = core.core.state.trace.entries
    assert [(outcome.state, outcome.rows_undefined) for *_, outcome in entry.stages] == [("done", ())] * 2


def test_what_overlaps_on_the_lane_leaves_no_rest(core: Harness) -> None:
    core.capture(core.register())
    core.now_s += 4.0
    for worker in ("cpu:0", "cpu:1"):
        finish(core, worker, lane_s=3.0, digest_s=2.0, verify_s=1.0, copy_s=2.5, gather_s=1.0)
    (op,) = ask(core).ops
    for stage in op.stages:
        assert in_lane(stage) == {"digest": 1.0, "gather": 1.0, "link": 1.5, "verify": 1.0, "rest": 0.0}
        assert sum(steps(stage).values()) == op.total_s == 4.0


def test_a_stage_that_missed_chunks_counts_from_its_first_job_on(make_core: MakeCore) -> None:
    core = make_core(trace=True, reuse="verified")
    core.connect()
    engine = core.register(stages=1)
    core.capture(engine)
    core.finish_all()
    ring = core.core.state.trace
    core.content = lambda stage, chunk: bytes([stage, chunk, chunk == 1, 9]) * 4  # not what the first capture had
    core.capture(engine, "a", tuple(range(900)))
    first = core.jobs("cpu:0")[0].job
    ring.note_sent(first, core.now_s + 0.25)
    core.now_s += 2.0
    core.finish("cpu:0")
    second = core.jobs("cpu:0")[0].job
    assert second != first
    ring.note_sent(second, core.now_s + 0.5)
    core.now_s += 3.0
    core.finish("cpu:0")
    op = ask(core).ops[-1]
    (stage,) = op.stages
    assert steps(stage) == dict.fromkeys(STEPS, 0.0) | {"queue": 0.25, "way": 4.75}
    assert stage.asked_bytes == 900 * ROW_BYTES
    assert ring.sent_s == {}


def test_what_never_started_only_waited(make_core: MakeCore) -> None:
    core = make_core(trace=True, max_ops=1)
    core.connect()
    engine = core.register()
    core.auto = False
    core.worker_gone("cpu:1")
    seq = core.capture(engine, deadline_s=5.0)
    core.tick(6.0)
    assert core.failure(1, seq).code == "deadline"
    (op,) = ask(core).ops
    assert (op.code, op.total_s) == ("deadline", 6.0)
    for stage in op.stages:
        assert stage.state == "untouched"
        assert steps(stage) == dict.fromkeys(STEPS, 0.0) | {"queue": 6.0}


def test_off_nothing_is_kept(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    core.capture(core.register())
    core.finish_all()
    reply = ask(core)
    assert (reply.on, reply.kept, reply.ops, reply.held_bytes, reply.since_unix_s) == (False, 0, (), 0, 0.0)
    assert told(core) == []


def switch(core: Harness, *, on: bool, client: int = 1) -> Traced | Failed:
    request = SetTrace(core.next_seq(), on)
    core.ask(client, request)
    reply = core.final(client, request.seq)
    assert isinstance(reply, Traced | Failed)
    return reply


def shown(core: Harness) -> str:
    request = Stats(core.next_seq())
    core.ask(1, request)
    reply = core.final(1, request.seq)
    assert isinstance(reply, StatsReply)
    return reply.settings["copy.trace"]


def test_it_is_switched_while_it_runs(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    core.capture(engine, "before")
    assert shown(core) == "false"
    reply = switch(core, on=True)
    assert isinstance(reply, Traced)
    assert (reply.on, reply.kept, reply.since_unix_s) == (True, 0, 1e9 + core.now_s)
    assert shown(core) == "true"
    assert told(core) == [("cpu:0", True), ("cpu:1", True)]
    core.finish_all()
    core.capture(engine, "while")
    switch(core, on=True)
    assert len(told(core)) == 2, "it was on already"
    core.core.state.trace.note_sent(core.jobs("cpu:0")[0].job, core.now_s)
    switch(core, on=False)
    assert told(core)[2:] == [("cpu:0", False), ("cpu:1", False)]
    core.finish_all()
    assert [op.conversation for op in ask(core).ops] == ["before"], "what ended while it was off is not kept"
    switch(core, on=True)
    assert ask(core).kept == 0, "it begins anew"


def test_a_worker_that_comes_later_is_told(core: Harness) -> None:
    assert told(core) == [("cpu:0", True), ("cpu:1", True)]
    core.worker_gone("cpu:1")
    core.tick(1.0)
    assert told(core)[2:] == [("cpu:1", True)]


def test_only_an_admin_switches_it(make_core: MakeCore) -> None:
    core = make_core()
    core.connect(2, uid=2000)
    reply = switch(core, on=True, client=2)
    assert isinstance(reply, Failed)
    assert (reply.code, core.core.state.trace.on) == ("not_permitted", False)


def test_each_sees_its_own_namespaces(core: Harness) -> None:
    core.connect(2, uid=2000)
    mine, theirs = core.register(), core.register(2, namespace="theirs")
    core.capture(mine)
    core.capture(theirs, "b", client=2, first_row=1000)
    core.finish_all()
    assert [op.conversation for op in ask(core).ops] == ["a", "b"], "an admin sees all"
    reply = ask(core, 2)
    assert [op.conversation for op in reply.ops] == ["b"]
    assert [kind.count for kind in reply.kinds] == [1]
    core.ask(2, Clear(core.next_seq(), "theirs"))
    core.perform(core.core.client_gone(2, core.at))
    core.connect(3, uid=3000)
    assert ask(core, 3).ops == ()


def test_the_latest_the_slowest_and_one_kind(core: Harness) -> None:
    engine = core.register()
    for name, took_s in (("a", 1.0), ("b", 4.0), ("c", 2.0)):
        core.capture(engine, name)
        core.now_s += took_s
        core.finish_all()
    core.restore(engine, "a")
    core.now_s += 3.0
    core.finish_all()
    assert [op.total_s for op in ask(core).ops] == [1.0, 4.0, 2.0, 3.0]
    assert [op.total_s for op in ask(core, limit=2).ops] == [2.0, 3.0]
    assert [op.total_s for op in ask(core, slowest=True, limit=2).ops] == [4.0, 3.0]
    assert [op.total_s for op in ask(core, op="capture", limit=2).ops] == [4.0, 2.0]
    assert [kind.kind for kind in ask(core, op="restore").kinds] == ["restore"]
    assert ask(core, limit=0).ops == ()
    assert ask(core, limit=-5).ops == ()
    captures = ask(core, limit=0).kinds[0]
    assert captures.times["total"] == (2.0, 4.0, 4.0, 4.0)
    request = Trace(core.next_seq(), op="captures")
    core.ask(1, request)
    failed = core.failure(1, request.seq)
    assert failed.code == "bad_value"
    assert "capture, get_part, mark" in failed.message


def entry(stages: int, conversation: str, at: float, code: str = "") -> OpTrace:
    """An entry of its own, as those of real operations are."""
    done = [
        StageOutcome(
            n,
            "done",
            moved_bytes=n + 10**6,
            digest_s=at + n / 7,
            copy_s=at + n / 11,
            lane_s=at + n / 13,
            gather_s=at + n / 17,
            verify_s=at + n / 19,
            event_s=at + n / 23,
            queue_s=at + n / 29,
            digested_bytes=n + 10**6,
        )
        for n in range(stages)
    ]
    traces = tuple(("cpu:0", n + 10**7, at + n / 3, at + n / 5, one) for n, one in enumerate(done))
    return OpTrace(int(at), "capture", "ns", conversation, 1, 600, code, at, at + 0.1, at / 9, traces)


def test_it_is_bounded() -> None:
    ring = TraceRing()
    ring.switch(1.0, on=True)
    count = 0
    while ring.forgotten < 1000:
        ring.add(entry(1 + count % 5, f"c{count}", float(count)))
        count += 1
    assert len(ring.entries) + ring.forgotten == count
    assert RING_BYTES - 5 * STAGE_BYTES - 2 * OP_BYTES < ring.held_bytes <= RING_BYTES
    assert [one.op_id for one in ring.entries] == list(range(1000, count))
    ring.validate(frozenset())


@pytest.mark.parametrize("stages", [1, 4])
def test_an_entry_takes_no_more_than_it_counts(stages: int) -> None:
    count = 2000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ring = TraceRing(on=True)
    for number in range(count):
        ring.add(entry(stages, f"conversation-{number}", float(number)))
    taken = (tracemalloc.get_traced_memory()[0] - before) / len(ring.entries)
    tracemalloc.stop()
    counted = ring.held_bytes / len(ring.entries)
    assert 0.6 * counted < taken <= counted


def test_replies_that_are_never_sent_are_not_waited_for_without_end() -> None:
    ring = TraceRing(on=True)
    for seq in range(UNANSWERED_LIMIT * 3):
        ring.await_reply(1, seq, entry(1, "a", 1.0))
        assert len(ring.unanswered) <= UNANSWERED_LIMIT
    ring.note_reply(9, 9, 1.0)


def test_who_is_gone_is_not_waited_for(core: Harness) -> None:
    engine = core.register()
    core.capture(engine)
    core.perform(core.core.client_gone(1, core.at))
    core.finish_all()
    assert core.core.state.trace.unanswered == {}
    assert len(core.core.state.trace.entries) == 1


def test_a_reply_fits_into_a_frame(make_core: MakeCore) -> None:
    core = make_core(trace=True, max_message_bytes=256 * 1024)
    core.connect()
    ring = core.core.state.trace
    rng = random.Random(1)
    ring.entries = deque(entry(rng.randrange(1, 5), "\U0001f40d" * 512, 1e6 + n, "damaged") for n in range(LIST_LIMIT))
    ring.held_bytes = sum(one.held_bytes for one in ring.entries)
    core.core.state.owners["ns"] = 1000
    reply = ask(core, limit=LIST_LIMIT)
    assert len(encode(reply)) <= 256 * 1024
    assert 20 < len(reply.ops) < LIST_LIMIT
    assert reply.ops[-1].op_id == ring.entries[-1].op_id, "the latest ones"
    ring.entries.clear()
    ring.held_bytes = 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ()),
        ([7.0], (7.0,) * 4),
        ([float(n) for n in range(100, 0, -1)], (51.0, 91.0, 100.0, 100.0)),
        ([float(n) for n in range(1000)], (500.0, 900.0, 990.0, 999.0)),
    ],
)
def test_percentiles(values: list[float], expected: tuple[float, ...]) -> None:
    assert percentiles(values) == expected


def test_it_is_a_term_of_the_memory(core: Harness) -> None:
    engine = core.register()
    core.capture(engine)
    core.finish_all()
    state = core.core.state
    core.tick(state.settings.memory.sample_s)
    while state.memory.pending:
        core.tick(0.02)
    terms = {term.claim.name: term.claim for track in state.memory.tracks.values() for term in track.terms}
    assert terms["trace"].bound_bytes == state.trace.held_bytes > STAGE_BYTES
    assert RING_BYTES == 4 * MIB
