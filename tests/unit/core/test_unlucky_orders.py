"""What goes wrong only when events come in an unlucky order (found by the simulator)."""

from collections.abc import Callable

from ipc.messages import Captured, Failed, Progress, Restored, Unregister
from stratad.core.effects import UnlinkSegment
from stratad.core.state import WorkerState
from tests.support.core_harness import MIB, Harness

MakeCore = Callable[..., Harness]


def captured(core: Harness, engine: int, conversation: str = "a", tokens: int = 600) -> int:
    core.content = lambda stage, chunk: bytes([stage, chunk % 256]) + conversation.encode() * 14
    seq = core.capture(engine, conversation, range(tokens))
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Captured), reply
    return reply.image_id


def test_a_take_that_ends_after_its_engine_was_closed_holds_nothing(make_core: MakeCore) -> None:
    core = make_core()
    core.connect()
    engine = core.register()
    image_id = captured(core, engine)
    take = core.restore(engine, take=True)
    core.ask(1, Unregister(core.next_seq(), engine))
    core.finish_all()  # the cancel came too late
    assert isinstance(core.final(1, take), Restored)
    assert core.core.state.catalog.images[image_id].taken == 0
    other = core.register()
    again = core.restore(other, take=True)
    core.finish_all()
    assert isinstance(core.final(1, again), Restored)


def test_accepted_comes_before_the_answer_that_a_broken_journal_gives(make_core: MakeCore) -> None:
    core = make_core(budget_images=1)
    core.connect()
    engine = core.register()
    captured(core, engine)
    core.journal_error = "no space left on device"
    seq = core.capture(engine, "b", range(300))  # the end of "a" would have to be written down first
    assert [type(reply) for reply in core.answers(1, seq)] == [Progress, Failed]
    assert core.failure(1, seq).code == "journal_unwritable"


def test_a_stage_is_not_sent_to_a_worker_that_was_started_again_meanwhile(make_core: MakeCore) -> None:
    core = make_core(parallel=False)
    core.connect()
    engine = core.register()
    seq = core.capture(engine, "a", range(600))
    core.worker_gone("cpu:1")
    core.tick()
    assert core.core.state.workers["cpu:1"].state is WorkerState.READY
    core.finish("cpu:0")
    assert core.jobs("cpu:1") == []
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("worker_died", 1)
    assert "started again" in failure.message


def test_a_shuttle_that_a_former_worker_made_late_is_unlinked(make_core: MakeCore) -> None:
    core = make_core(workers=1, shuttle_bytes=MIB)
    core.connect()
    captured(core, core.register(stages=1))
    successor = make_core(workers=1, shuttle_bytes=MIB, legacy=core.legacy())
    known = successor.core.segments
    assert known
    before = len(successor.effects)
    successor.former_gone("cpu:0")
    gone = [e.segment for e in successor.effects[before:] if isinstance(e, UnlinkSegment)]
    assert gone[0] == f"/stratad.unit.cpu_0.{len(known)}"
    assert known.isdisjoint(gone)
