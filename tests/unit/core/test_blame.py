"""Deaths of workers are held against what they copied, and what killed twice is quarantined while all else goes on."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    Cancel,
    Captured,
    Done,
    Drop,
    Failed,
    Found,
    ImageDetail,
    JobFailed,
    Lift,
    ListImages,
    Lookup,
    Pin,
    Restored,
    Show,
    Unregister,
)
from tests.support.core_harness import Harness, pack_tokens

MakeCore = Callable[..., Harness]
GIVE_UP = 4


def one_worker(make_core: MakeCore) -> tuple[Harness, int]:
    core = make_core(1)
    core.connect()
    return core, core.register(stages=1)


def captured(core: Harness, engine: int, name: str, first: int = 0) -> None:
    core.capture(engine, name, range(first, first + 256))
    core.finish_all()


def die_of(core: Harness, seq: int) -> str:
    """The worker dies of a request; it is back afterwards."""
    core.worker_gone("cpu:0")
    core.tick()
    assert core.core.state.workers["cpu:0"].state.value == "ready"
    return core.failure(1, seq).code


def restore(core: Harness, engine: int, name: str) -> int:
    return core.restore(engine, name, rows=256, first_row=1000)


def is_found(core: Harness, engine: int, first: int = 0) -> bool:
    look = Lookup(core.next_seq(), engine, pack_tokens(range(first, first + 256)))
    reply = core.ask(1, look)[-1]
    assert isinstance(reply, Found)
    return reply.match == "hit"


def test_an_image_that_kills_twice_is_quarantined_and_all_else_goes_on(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    captured(core, engine, "good", 5000)
    assert die_of(core, restore(core, engine, "bad")) == "worker_died"
    assert is_found(core, engine)
    assert die_of(core, restore(core, engine, "bad")) == "worker_died"
    failure = core.failure(1, restore(core, engine, "bad"))
    assert failure.code == "quarantined"
    assert not is_found(core, engine)
    assert is_found(core, engine, 5000)
    seq = restore(core, engine, "good")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)
    worker = core.core.state.workers["cpu:0"]
    assert (worker.deaths, worker.deaths_in_row) == (2, 0)
    listed = core.ask(1, ListImages(core.next_seq()))[-1]
    assert {i.conversation: i.quarantined for i in listed.images} == {"bad": True, "good": False}  # type: ignore[union-attr]
    shown = core.ask(1, Show(core.next_seq(), "ns", "bad"))[-1]
    assert isinstance(shown, ImageDetail)
    assert shown.image.quarantined


def test_a_quarantined_image_can_be_dropped_or_captured_anew(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for name in ("a", "b"):
        captured(core, engine, name)
        for _ in range(2):
            die_of(core, restore(core, engine, name))
    assert core.ask(1, Drop(core.next_seq(), "ns", "a"))[-1] == Done(core.seq, 1)
    captured(core, engine, "b")
    seq = restore(core, engine, "b")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_an_admin_lifts_a_quarantine(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    for _ in range(2):
        die_of(core, restore(core, engine, "a"))
    core.connect(2, uid=4321)
    asked = Lift(core.next_seq(), "ns", "a")
    core.ask(2, asked)
    assert core.failure(2, asked.seq).code == "not_permitted"
    assert core.ask(1, Lift(core.next_seq(), "ns", "a"))[-1] == Done(core.seq, 1)
    assert is_found(core, engine)
    assert die_of(core, restore(core, engine, "a")) == "worker_died"  # it begins anew
    seq = restore(core, engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)
    assert core.ask(1, Lift(core.next_seq(), "ns"))[-1] == Done(core.seq, 0)


def next_daemon(make_core: MakeCore, core: Harness) -> tuple[Harness, int]:
    successor = make_core(1, legacy=core.legacy())
    successor.former_gone("cpu:0")
    successor.connect()
    return successor, successor.register(stages=1)


def test_a_quarantine_outlives_the_daemon_until_it_is_lifted_or_the_image_is_captured_anew(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for name, first in (("bad", 0), ("good", 5000)):
        captured(core, engine, name, first)
    for _ in range(2):
        die_of(core, restore(core, engine, "bad"))
    second, engine = next_daemon(make_core, core)
    assert second.failure(1, restore(second, engine, "bad")).code == "quarantined"
    assert (is_found(second, engine), is_found(second, engine, 5000)) == (False, True)
    second.ask(1, Pin(second.next_seq(), "ns", "bad", True))  # is recorded anew
    third, engine = next_daemon(make_core, second)
    assert third.failure(1, restore(third, engine, "bad")).code == "quarantined"
    assert third.ask(1, Lift(third.next_seq(), "ns", "bad"))[-1] == Done(third.seq, 1)
    fourth, engine = next_daemon(make_core, third)
    assert is_found(fourth, engine)
    for _ in range(2):
        assert die_of(fourth, restore(fourth, engine, "bad")) == "worker_died"
    captured(fourth, engine, "bad")
    last, engine = next_daemon(make_core, fourth)
    assert is_found(last, engine)


def test_the_quarantine_of_an_image_that_has_ended_brings_it_not_back(make_core: MakeCore) -> None:
    """The restore that dies goes on after its image was dropped."""
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    die_of(core, restore(core, engine, "bad"))
    seq = restore(core, engine, "bad")
    core.ask(1, Drop(core.next_seq(), "ns", "bad"))
    die_of(core, seq)
    assert core.core.state.counters["quarantined"] == 1
    assert core.legacy().journal.images == {}


def test_a_success_between_two_deaths_clears_an_image(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    for _ in range(3):
        assert die_of(core, restore(core, engine, "a")) == "worker_died"
        seq = restore(core, engine, "a")
        core.finish_all()
        assert isinstance(core.final(1, seq), Restored)


def test_the_job_that_hangs_is_to_blame_and_not_the_one_beside_it(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    for _ in range(2):
        seq = restore(core, engine, "bad")
        core.tick(4.0)
        beside = core.capture(engine, "beside", range(300))
        core.tick(2.0)
        assert core.kills
        core.worker_gone("cpu:0")
        core.tick()
        assert core.failure(1, seq).code == "worker_hung"
        assert core.failure(1, beside).code == "worker_hung"
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"
    seq = core.capture(engine, "beside", range(300))
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_a_sticky_failure_is_held_against_its_job_and_nothing_more_is_sent(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    for _ in range(2):
        seq = restore(core, engine, "bad")
        other = core.capture(engine, "other", range(300))
        job = core.jobs("cpu:0")[0]
        core.report("cpu:0", JobFailed(job.job, "device_error", "lost", sticky=True))
        assert core.failure(1, seq).code == "device_error"
        waits = core.capture(engine, "later", range(300), first_row=2000)
        assert len(core.jobs("cpu:0")) == 2  # those of before
        core.worker_gone("cpu:0", "exited with status 4")
        core.tick()
        assert core.failure(1, other).code == "worker_died"
        core.finish_all()
        assert isinstance(core.final(1, waits), Captured)
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"


def test_suspects_have_the_worker_to_themselves_until_one_is_found_guilty(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    first = restore(core, engine, "bad")
    beside = core.capture(engine, "good", range(300))
    assert die_of(core, first) == die_of_none(core, beside) == "worker_died"
    for _ in range(2):
        alone = restore(core, engine, "bad")
        waits = core.capture(engine, "good", range(300))
        plain = core.capture(engine, "plain", range(300), first_row=2000)
        assert len(core.jobs("cpu:0")) == 1
        assert die_of(core, alone) == "worker_died"
        core.finish_all()
        assert isinstance(core.final(1, waits), Captured)
        assert isinstance(core.final(1, plain), Captured)
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"
    assert not core.core.state.suspects


def die_of_none(core: Harness, seq: int) -> str:
    return core.failure(1, seq).code


def test_what_waits_behind_in_the_lane_is_not_suspected(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    captured(core, engine, "good", 5000)
    for _ in range(2):
        head = restore(core, engine, "bad")
        behind = core.restore(engine, "good", rows=256, first_row=2000)
        assert len(core.jobs("cpu:0")) == 2
        assert die_of(core, head) == die_of_none(core, behind) == "worker_died"
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"
    seq = restore(core, engine, "good")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_who_was_under_way_is_to_blame_although_others_came_before(make_core: MakeCore) -> None:
    """A lane takes its jobs in turns: only its process can say which one it was."""
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    captured(core, engine, "good", 5000)
    for _ in range(2):
        waits = restore(core, engine, "good")
        overtakes = core.restore(engine, "bad", rows=256, first_row=2000)
        assert len(core.jobs("cpu:0")) == 2
        core.worker_gone("cpu:0", under_way=(core.jobs("cpu:0")[1].job,))
        core.tick()
        assert core.failure(1, waits).code == core.failure(1, overtakes).code == "worker_died"
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"
    assert not core.core.state.suspects
    seq = restore(core, engine, "good")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_who_was_under_way_on_the_lane_that_hung_is_to_blame(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "bad")
    captured(core, engine, "good", 5000)
    for _ in range(2):
        waits = restore(core, engine, "good")
        overtakes = core.restore(engine, "bad", rows=256, first_row=2000)
        core.tick(4.0)
        beside = core.capture(engine, "beside", range(300), first_row=3000)
        core.tick(2.0)
        assert core.kills
        jobs = [job.job for job in core.jobs("cpu:0")]
        core.worker_gone("cpu:0", under_way=(jobs[1], jobs[2]))
        core.tick()
        assert {core.failure(1, seq).code for seq in (waits, overtakes, beside)} == {"worker_hung"}
    assert core.failure(1, restore(core, engine, "bad")).code == "quarantined"
    assert not core.core.state.suspects
    assert core.core.state.engines[engine].suspects == {}


def test_nothing_is_held_against_what_a_dead_worker_had_not_begun(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    for _ in range(3):
        seq = restore(core, engine, "a")
        core.worker_gone("cpu:0", under_way=())
        core.tick(30.0)
        assert core.failure(1, seq).code == "worker_died"
    seq = restore(core, engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_where_nobody_knows_what_was_under_way_all_are_suspects(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for name, first in (("a", 0), ("b", 5000), ("c", 9000)):
        captured(core, engine, name, first)
    for at, name in enumerate("abc"):
        core.restore(engine, name, rows=256, first_row=1000 * at)
    core.worker_gone("cpu:0", under_way=None)
    core.tick()
    assert len(core.core.state.suspects) == 3
    for at, name in enumerate("abc"):
        core.restore(engine, name, rows=256, first_row=1000 * at)
    assert len(core.jobs("cpu:0")) == 1
    core.finish_all()
    assert not core.core.state.suspects


def test_a_suspect_that_waits_for_its_turn_is_not_overtaken(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    captured(core, engine, "b", 5000)
    pair = [restore(core, engine, "a"), core.capture(engine, "c", range(300))]
    core.worker_gone("cpu:0")
    core.tick()
    assert [core.failure(1, seq).code for seq in pair] == ["worker_died"] * 2
    running = core.restore(engine, "b", rows=256, first_row=3000)
    suspect = restore(core, engine, "a")
    later = core.restore(engine, "b", rows=256, first_row=2000)
    assert len(core.jobs("cpu:0")) == 1
    core.finish("cpu:0")
    assert isinstance(core.final(1, running), Restored)
    assert len(core.jobs("cpu:0")) == 1  # the suspect, alone
    core.finish("cpu:0")
    assert isinstance(core.final(1, suspect), Restored)
    core.finish_all()
    assert isinstance(core.final(1, later), Restored)


def test_captures_that_kill_twice_are_refused_by_conversation_until_lifted(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for _ in range(2):
        assert die_of(core, core.capture(engine, "bad")) == "worker_died"
    assert core.failure(1, core.capture(engine, "bad")).code == "quarantined"
    captured(core, engine, "good")
    assert core.core.state.workers["cpu:0"].deaths_in_row == 0
    assert core.ask(1, Lift(core.next_seq(), "other"))[-1] == Done(core.seq, 0)
    assert core.ask(1, Lift(core.next_seq(), "ns", "bad"))[-1] == Done(core.seq, 1)
    seq = core.capture(engine, "bad")
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_a_slot_that_kills_twice_is_refused_and_another_engine_is_not_concerned(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for kind in ("slot_to", "slot_direct"):
        assert die_of(core, core.slot_copy(engine, kind, slot=3)) == "worker_died"
    assert core.failure(1, core.slot_copy(engine, "slot_to", slot=3)).code == "quarantined"
    core.connect(2)
    other = core.register(2, stages=1)
    seq = core.slot_copy(other, "slot_to", client=2, slot=3)
    core.finish_all()
    assert isinstance(core.final(2, seq), Captured)
    core.ask(1, Lift(core.next_seq(), "ns"))
    seq = core.slot_copy(engine, "slot_to", slot=3)
    core.finish_all()
    assert isinstance(core.final(1, seq), Captured)


def test_a_transit_image_that_kills_twice_is_refused_and_can_be_replaced(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    core.slot_copy(engine, "slot_to", slot=1)
    core.finish_all()
    for _ in range(2):
        assert die_of(core, core.slot_copy(engine, "slot_from", slot=1)) == "worker_died"
    assert core.failure(1, core.slot_copy(engine, "slot_from", slot=1)).code == "quarantined"
    core.slot_copy(engine, "slot_to", slot=1)
    core.finish_all()
    seq = core.slot_copy(engine, "slot_from", slot=1)
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_an_operation_that_kills_all_its_workers_at_once_has_killed_once(make_core: MakeCore) -> None:
    core = make_core(2)
    core.connect()
    engine = core.register()
    for times in (1, 2):
        seq = core.capture(engine, "bad")
        core.worker_gone("cpu:0")
        core.worker_gone("cpu:1")
        core.tick()
        assert core.failure(1, seq).code == "worker_died", times
    assert core.failure(1, core.capture(engine, "bad")).code == "quarantined"


def test_a_worker_that_dies_of_everybody_is_given_up_all_the_same(make_core: MakeCore) -> None:
    """A broken device kills whatever is copied: that must not quarantine the whole cache one by one."""
    core, engine = one_worker(make_core)
    for name in "abcdefgh":
        captured(core, engine, name, 1000 * ord(name))
    core.worker_gone("cpu:0", "idle")
    died = 0
    for name in "abcdefgh":
        core.tick(20.0)
        if core.core.state.workers["cpu:0"].state.value == "failed":
            break
        restore(core, engine, name)
        core.worker_gone("cpu:0")
        died += 1
    assert core.core.state.workers["cpu:0"].state.value == "failed"
    assert died == GIVE_UP


def test_a_death_that_no_copy_caused_is_held_against_none(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    for _ in range(2):
        seq = restore(core, engine, "a")
        core.perform(core.core.worker_unfit("cpu:0", core.generations["cpu:0"], "takes no commands", core.at))
        assert die_of(core, seq) == "worker_died"
        core.now_s += 100.0
    seq = restore(core, engine, "a")
    core.finish_all()
    assert isinstance(core.final(1, seq), Restored)


def test_what_was_under_way_already_does_not_end_a_quarantine_by_ending_well(make_core: MakeCore) -> None:
    core = make_core(2)
    core.connect()
    engine = core.register()
    core.capture(engine, "a", range(256))
    core.finish_all()
    first = restore(core, engine, "a")
    core.worker_gone("cpu:0")
    core.finish("cpu:1")
    assert core.failure(1, first).code == "worker_died"
    core.tick()
    beside = restore(core, engine, "a")
    core.finish("cpu:0")
    second = core.restore(engine, "a", rows=256, first_row=2000)
    core.worker_gone("cpu:0")
    core.finish_all()
    assert core.failure(1, second).code == "worker_died"
    assert isinstance(core.final(1, beside), Restored)
    core.tick()
    assert core.failure(1, restore(core, engine, "a")).code == "quarantined"
    assert not is_found(core, engine)
    core.core.validate()
    assert core.ask(1, Lift(core.next_seq(), "ns", "a"))[-1] == Done(core.seq, 1)
    assert is_found(core, engine)


def test_a_mark_that_ends_well_is_no_suspect_any_more(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    captured(core, engine, "a")
    core.mark(engine, "b", range(256))
    assert die_of(core, restore(core, engine, "a")) == "worker_died"
    assert len(core.core.state.suspects) == 2
    restore(core, engine, "a")
    core.finish_all()
    core.mark(engine, "b", range(256))
    core.finish_all()
    assert not core.core.state.suspects
    assert not core.core.state.engines[engine].suspects


def test_a_mark_that_ends_well_clears_no_capture(make_core: MakeCore) -> None:
    """What is marked after each turn would never be quarantined."""
    core, engine = one_worker(make_core)
    for _ in range(2):
        assert die_of(core, core.capture(engine, "bad")) == "worker_died"
        core.mark(engine, "bad")
        core.finish_all()
    assert core.failure(1, core.capture(engine, "bad")).code == "quarantined"


def test_marks_that_kill_twice_are_quarantined_and_lifted_with_their_conversation(make_core: MakeCore) -> None:
    core, engine = one_worker(make_core)
    for _ in range(2):
        assert die_of(core, core.mark(engine, "bad")) == "worker_died"
    assert core.failure(1, core.mark(engine, "bad")).code == "quarantined"
    assert core.ask(1, Lift(core.next_seq(), "ns", "bad"))[-1] == Done(core.seq, 1)
    core.mark(engine, "bad")
    assert core.jobs("cpu:0")
    core.finish_all()


@pytest.mark.parametrize("how", ["deadline", "cancel", "unregister"])
def test_who_stands_back_for_a_suspect_is_looked_at_when_that_ends(make_core: MakeCore, how: str) -> None:
    core = make_core(2)
    core.connect()
    both, one = core.register(), core.register(stages=1)
    core.capture(one, "good", range(256))
    core.finish_all()
    core.capture(both, "bad", range(256))
    core.restore(one, "good", 256, first_row=1000)
    core.worker_gone("cpu:0")  # of the one or the other
    core.tick()
    core.finish("cpu:1")
    core.auto = False
    core.worker_gone("cpu:1")
    core.tick(1.0)  # it is being started, and takes its time
    suspect = core.capture(both, "bad", range(256), deadline_s=5.0)
    waits = core.capture(one, "plain", range(256))
    assert core.jobs("cpu:0") == []
    if how == "deadline":
        core.tick(5.1)
    else:
        seq = core.next_seq()
        core.ask(1, Cancel(seq, suspect) if how == "cancel" else Unregister(seq, both))
    assert isinstance(core.final(1, suspect), Failed)
    assert len(core.jobs("cpu:0")) == 1
    core.finish("cpu:0")
    assert isinstance(core.final(1, waits), Captured)
