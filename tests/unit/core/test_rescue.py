"""Rescue through the core: what of a dead engine's clean slots becomes images, and when its memory is unmapped."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    Announce,
    CancelJob,
    CaptureJob,
    ClosePool,
    CudaIpcPool,
    DigestJob,
    Done,
    Failed,
    Goodbye,
    Mark,
    Register,
    Stage,
    Stats,
    StatsReply,
    StopWorker,
    Unregister,
)
from shm.layout import Plane, RowGroup, StageLayout
from shm.rows import pack_rows
from stratad.core import rescue
from stratad.core.effects import AwaitEnd, SendTo, StopAwaiting
from stratad.core.images import Image, StageDigests
from stratad.core.prefix_cut import longest_prefix
from tests.support.core_harness import FINGERPRINT, Harness, layout, pack_tokens

ALL = ("cpu:0", "cpu:1")


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def mark(core: Harness, engine: int, conversation: str = "a", tokens: int = 600, slot: int = 0) -> None:
    core.mark(engine, conversation, range(tokens), first_row=1000 * slot, slot=slot)
    core.finish_all()
    assert slot in core.core.state.engines[engine].clean.by_slot


def image(core: Harness, conversation: str = "a") -> Image | None:
    named = core.core.state.catalog.named("ns", conversation)
    return named[0] if named else None


def tokens(core: Harness, conversation: str = "a") -> int:
    found = image(core, conversation)
    return 0 if found is None else found.token_count


def unmapped(core: Harness) -> bool:
    """Whether every pool was closed, and nothing is left of any engine."""
    closed = [e for e in core.effects if isinstance(e, SendTo) and isinstance(e.command, ClosePool)]
    return bool(closed) and not core.core.state.engines


def counters(core: Harness) -> dict[str, int]:
    wanted = ("rescues", "rescued_images", "rescued_bytes", "rescues_cut_off")
    return {name: core.core.state.counters.get(name, 0) for name in wanted}


def change(core: Harness, *changed: tuple[int, int]) -> None:
    """From now on these chunks, (stage, number), have other bytes."""
    core.content = lambda stage, chunk: (
        b"changed" + b"." * 9 if (stage, chunk) in changed else bytes([stage, chunk]) * 8
    )


def test_a_dead_engines_clean_slot_becomes_an_image(core: Harness) -> None:
    engine = core.register()
    mark(core, engine)
    core.die(proven=False)
    assert AwaitEnd(1, 4001, 7) in core.effects
    assert not any(core.jobs(worker) for worker in ALL)
    assert not unmapped(core)
    core.ended()
    for worker in ALL:
        (job,) = core.jobs(worker)
        assert isinstance(job, CaptureJob)
        assert (job.rows, job.tokens, job.poll_event) == ((pack_rows([(0, 600)]),), 600, False)
    core.finish("cpu:0")
    assert image(core) is None
    assert not unmapped(core)
    core.finish("cpu:1")
    found = image(core)
    assert found is not None
    assert (found.tokens, [len(stage) for stage in found.stages]) == (pack_tokens(range(600)), [3, 3])
    assert unmapped(core)
    assert counters(core) == {
        "rescues": 1, "rescued_images": 1, "rescued_bytes": 2 * 600 * 1024, "rescues_cut_off": 0,
    }  # fmt: skip


def test_it_is_found_and_restored_by_the_next_engine(core: Harness) -> None:
    mark(core, core.register())
    core.die()
    core.finish_all()
    core.connect(2)
    engine = core.register(2)
    seq = core.restore(engine, "a", client=2)
    core.finish_all()
    assert not isinstance(core.final(2, seq), Failed)


def test_the_latest_mark_is_rescued_first_one_at_a_time(core: Harness) -> None:
    engine = core.register()
    for slot, name in enumerate("abc"):
        mark(core, engine, name, slot=slot)
    mark(core, engine, "a", 700)
    core.die()
    order = []
    while core.jobs("cpu:0"):
        (job,) = core.jobs("cpu:0")
        assert isinstance(job, CaptureJob)
        order.append(job.rows[0])
        core.finish("cpu:0")
        core.finish("cpu:1")
    assert order == [pack_rows([(0, 700)]), pack_rows([(2000, 600)]), pack_rows([(1000, 600)])]
    assert [tokens(core, name) for name in "abc"] == [700, 600, 600]
    assert unmapped(core)


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ([(0, 2)], 512),  # the tail
        ([(1, 1)], 256),
        ([(0, 2), (1, 1)], 256),
        ([(0, 0)], 0),
        ([(0, 0), (1, 0)], 0),
    ],
)
def test_a_slot_written_after_its_mark_is_rescued_up_to_the_first_changed_chunk(
    core: Harness, changed: list[tuple[int, int]], left: int
) -> None:
    mark(core, core.register())
    change(core, *changed)
    core.die()
    core.finish_all()
    assert tokens(core) == left
    found = image(core)
    assert (found is None) is (left == 0)
    if found is not None:
        assert found.tokens == pack_tokens(range(left))
        assert [len(stage) for stage in found.stages] == [left // 256] * 2
        assert all(chunk.key.digest == bytes([s, n]) * 8 for s in (0, 1) for n, chunk in enumerate(found.stages[s]))
    granules = core.core.state.catalog.used_bytes // 65_536
    assert granules == 2 * left * 1024 // 65_536  # what lay behind is free again
    assert unmapped(core)


def test_a_shorter_prefix_does_not_take_the_place_of_a_longer_image(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(600))
    core.finish_all()
    before = image(core)
    mark(core, engine, "a", 900)
    change(core, (1, 2))
    core.die()
    assert core.jobs("cpu:0")
    core.finish_all()
    assert image(core) is before
    assert (tokens(core), counters(core)["rescued_images"]) == (600, 0)
    assert unmapped(core)


def test_a_longer_conversation_takes_the_place_of_its_image(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(600))
    core.finish_all()
    mark(core, engine, "a", 900)
    core.die()
    core.finish_all()
    assert (tokens(core), len(core.core.state.catalog.images)) == (900, 1)


def test_another_continuation_takes_the_place_of_the_image(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", [*range(300), 9, *range(301, 600)])
    core.finish_all()
    mark(core, engine, "a", 600)
    core.die()
    core.finish_all()
    found = image(core)
    assert found is not None
    assert found.tokens == pack_tokens(range(600))


@pytest.mark.parametrize("image_tokens", [600, 900])
def test_what_an_image_has_is_not_rescued(core: Harness, image_tokens: int) -> None:
    engine = core.register()
    mark(core, engine, "a", 600)
    core.capture(engine, "a", range(image_tokens))
    core.finish_all()
    core.die()
    assert not core.jobs("cpu:0")
    assert (tokens(core), unmapped(core)) == (image_tokens, True)


def test_an_image_that_is_damaged_is_no_reason_not_to(core: Harness) -> None:
    engine = core.register()
    mark(core, engine)
    core.capture(engine)
    core.finish_all()
    core.restore(engine)
    core.fail("cpu:0", "damaged", chunk=0)
    core.finish_all()
    mark(core, engine)  # what the restore wrote ended it
    core.die()
    core.finish_all()
    found = image(core)
    assert found is not None
    assert not found.damaged


@pytest.mark.parametrize("how", ["poisoned", "dirty", "clean", "restore", "nothing"])
def test_a_slot_that_is_not_declared_is_not_rescued(core: Harness, how: str) -> None:
    engine = core.register()
    mark(core, engine, "b", 300, slot=1)
    if how != "nothing":
        mark(core, engine)
    if how == "restore":
        core.capture(engine, "b", range(300), first_row=1000)
        core.finish_all()
        core.restore(engine, "b", 300, first_row=599)
        core.finish_all()
    elif how != "nothing":
        core.plain_mark(engine, how)
    core.die()
    core.finish_all()
    assert (tokens(core, "a"), tokens(core, "b")) == (0, 300)
    assert unmapped(core)


@pytest.mark.parametrize("how", ["goodbye", "unregister", "no marks", "no proof possible", "switched off"])
def test_without_reason_the_memory_is_unmapped_at_once(make_core: Callable[..., Harness], how: str) -> None:
    core = make_core(rescue_max_s=0.0 if how == "switched off" else 2.0)
    core.connect()
    if how == "no proof possible":
        core.core.state.clients[1].pid = 0
    engine = core.register()
    if how != "no marks":
        mark(core, engine)
    if how == "goodbye":
        core.ask(1, Goodbye(core.next_seq()))
    if how == "unregister":
        core.ask(1, Unregister(core.next_seq(), engine))
    core.die(proven=False)
    assert unmapped(core)
    assert image(core) is None
    assert not any(isinstance(effect, AwaitEnd) for effect in core.effects)


def test_a_process_that_lives_on_is_not_rescued(core: Harness) -> None:
    mark(core, core.register())
    core.die(proven=False)
    core.tick(rescue.PROOF_S - 0.1)
    assert not unmapped(core)
    core.tick(0.2)
    assert unmapped(core)
    assert image(core) is None
    assert StopAwaiting(1) in core.effects
    core.ended()  # too late
    assert image(core) is None


def test_a_process_whose_end_cannot_be_watched_is_not_rescued(core: Harness) -> None:
    mark(core, core.register())
    core.die(proven=False)
    core.ended(proven=False)
    assert unmapped(core)
    assert image(core) is None


def test_the_time_of_a_rescue_is_bounded(core: Harness) -> None:
    engine = core.register()
    for slot, name in enumerate("abc"):
        mark(core, engine, name, slot=slot)
    core.die()
    for worker in ALL:
        core.finish(worker)
    core.tick(1.9)
    assert len(core.jobs("cpu:0")) == 1
    core.tick(0.2)
    cancelled = {e.worker for e in core.effects if isinstance(e, SendTo) and isinstance(e.command, CancelJob)}
    assert cancelled == set(ALL)
    assert not unmapped(core)  # the workers may still read
    for worker in ALL:
        core.fail(worker, "cancelled")
    assert unmapped(core)
    assert [tokens(core, name) for name in "abc"] == [0, 0, 600]
    assert counters(core)["rescues_cut_off"] == 1
    assert core.core.state.catalog.staged_bytes == 0


def register_request(core: Harness, namespace: str, device: str) -> Register:
    one = layout()
    pool = CudaIpcPool(b"h" * 64, one.end_bytes, 0, one.end_bytes)  # refused at once, which is a hello all the same
    return Register(core.next_seq(), namespace, "next", FINGERPRINT, (Stage(0, device, pool, one),))


@pytest.mark.parametrize(
    ("namespace", "devices", "cut"),
    [("ns", (), True), ("other", ("cpu:1",), True), ("other", ("cpu:2",), False), ("", (), False)],
)
@pytest.mark.parametrize("proven", [True, False])
def test_an_engine_that_says_hello_ends_a_rescue_in_its_way(
    make_core: Callable[..., Harness], namespace: str, devices: tuple[str, ...], cut: bool, proven: bool
) -> None:
    core = make_core(workers=3)
    core.connect()
    mark(core, core.register())
    core.die(proven=proven)
    core.connect(2)
    request = Announce(core.next_seq(), namespace, devices)
    core.ask(2, request)
    if not cut:
        assert core.final(2, request.seq) == Done(request.seq, 0)
        if proven:
            core.finish_all()
            assert tokens(core) == 600
        return
    if proven:
        assert core.answers(2, request.seq) == []  # the memory is not free yet
        for worker in ALL:
            core.fail(worker, "cancelled")
    assert core.final(2, request.seq) == Done(request.seq, 1)
    assert unmapped(core)
    assert image(core) is None
    assert counters(core)["rescues_cut_off"] == 1


def test_a_registration_is_a_hello(core: Harness) -> None:
    engine = core.register()
    mark(core, engine)
    core.die()
    core.connect(2)
    core.register(2, stages=1, namespace="other")
    assert counters(core)["rescues_cut_off"] == 1
    for worker in ALL:
        core.fail(worker, "cancelled")
    assert list(core.core.state.engines) == [engine + 1]
    assert image(core) is None


def test_two_engines_of_one_process_wait_for_one_proof(core: Harness) -> None:
    first, second = core.register(), core.register(namespace="theirs")
    mark(core, first)
    mark(core, second)
    core.die(proven=False)
    assert core.effects.count(AwaitEnd(1, 4001, 7)) == 1
    core.connect(2)
    core.ask(2, Announce(core.next_seq(), "theirs"))
    assert list(core.core.state.engines) == [first]
    assert StopAwaiting(1) not in core.effects
    core.ended()
    core.finish_all()
    assert tokens(core) == 600
    assert not core.core.state.catalog.named("theirs", "a")
    assert unmapped(core)


def test_the_end_of_a_process_is_not_awaited_for_nothing(core: Harness) -> None:
    for engine in (core.register(), core.register(namespace="theirs")):
        mark(core, engine)
    core.die(proven=False)
    core.connect(2)
    for namespace in ("ns", "theirs"):
        assert StopAwaiting(1) not in core.effects
        core.ask(2, Announce(core.next_seq(), namespace))
    assert core.effects.count(StopAwaiting(1)) == 1


def test_what_is_published_stays_when_an_engine_says_hello(core: Harness) -> None:
    engine = core.register()
    mark(core, engine, "a", slot=0)
    mark(core, engine, "b", slot=1)
    core.die()
    core.finish("cpu:0")
    core.finish("cpu:1")
    core.connect(2)
    core.register(2)
    for worker in ALL:
        core.fail(worker, "cancelled")
    assert (tokens(core, "a"), tokens(core, "b")) == (0, 600)


def test_an_announcement_waits_for_memory_of_engines_without_marks_too(core: Harness) -> None:
    core.register()
    core.auto = False
    core.die(proven=False)
    core.connect(2)
    request = Announce(core.next_seq(), "ns", deadline_s=5.0)
    core.ask(2, request)
    assert core.answers(2, request.seq) == []
    for _ in range(63):
        core.ask(2, Announce(core.next_seq(), "ns", deadline_s=5.0))
    late = Announce(core.next_seq(), "ns", deadline_s=5.0)
    core.ask(2, late)
    assert core.failure(2, late.seq).code == "too_many"
    core.tick(5.1)
    assert core.failure(2, request.seq).code == "deadline"
    assert not core.core.state.announced


def test_announcements_are_checked(core: Harness) -> None:
    core.register()
    core.connect(2, uid=77)
    for request, code in (
        (Announce(core.next_seq(), "ns"), "not_permitted"),
        (Announce(core.next_seq(), "", ("cpu:9",)), "foreign_device"),
    ):
        core.ask(2, request)
        assert core.failure(2, request.seq).code == code
    core.core.validate()


@pytest.mark.parametrize("when", ["waiting for the proof", "copying", "done on one stage"])
def test_a_worker_that_dies_ends_the_rescue(core: Harness, when: str) -> None:
    engine = core.register()
    mark(core, engine, "a", slot=0)
    mark(core, engine, "b", slot=1)
    core.die(proven=when != "waiting for the proof")
    if when == "done on one stage":
        core.finish("cpu:1")
    core.worker_gone("cpu:0")
    if when == "copying":
        assert any(isinstance(e, SendTo) and isinstance(e.command, CancelJob) for e in core.effects)
        core.finish("cpu:1")  # the cancel came too late
    assert unmapped(core)
    assert (image(core, "a"), image(core, "b")) == (None, None)
    assert core.core.state.catalog.used_bytes == 0
    core.ended()  # of no meaning any more
    core.tick()
    core.connect(2)
    core.register(2)


def test_a_worker_that_dies_on_another_device_changes_nothing(make_core: Callable[..., Harness]) -> None:
    core = make_core(workers=3)
    core.connect()
    mark(core, core.register())
    core.die()
    core.worker_gone("cpu:2")
    core.finish_all()
    assert tokens(core) == 600


def test_a_stage_whose_pool_is_not_open_is_not_rescued(core: Harness) -> None:
    mark(core, core.register())
    core.auto = False
    core.worker_gone("cpu:0")
    core.die()
    assert not any(isinstance(effect, AwaitEnd) for effect in core.effects)


def test_an_operation_under_way_ends_first(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "image", range(100), first_row=3000)
    core.finish_all()
    mark(core, engine)
    core.restore(engine, "image", 100, first_row=2000)
    core.die()
    assert not any(isinstance(job, CaptureJob) for job in core.jobs("cpu:0"))
    core.fail("cpu:0", "cancelled")
    core.fail("cpu:1", "cancelled")
    core.finish_all()
    assert tokens(core) == 600


def test_a_mark_under_way_at_death_counts(core: Harness) -> None:
    engine = core.register()
    core.mark(engine)
    core.die()
    assert isinstance(core.jobs("cpu:0")[0], DigestJob)
    assert not any(isinstance(e, SendTo) and isinstance(e.command, CancelJob) for e in core.effects)
    core.finish_all()
    assert tokens(core) == 600
    assert unmapped(core)


def test_a_mark_under_way_at_death_that_fails_rescues_nothing(core: Harness) -> None:
    core.mark(core.register())
    core.die()
    core.fail("cpu:0", "engine_gone")
    core.finish("cpu:1")
    assert unmapped(core)


def test_no_room_is_no_rescue_and_the_next_slot_is_tried(make_core: Callable[..., Harness]) -> None:
    core = make_core(budget_bytes=2 * 1024 * 1024)
    core.connect()
    engine = core.register()
    mark(core, engine, "small", 300, slot=0)
    mark(core, engine, "large", 2000, slot=1)
    core.die()
    core.finish_all()
    assert (tokens(core, "large"), tokens(core, "small")) == (0, 300)
    assert unmapped(core)


def test_a_stop_ends_a_rescue_after_the_copy_in_hand(core: Harness) -> None:
    engine = core.register()
    mark(core, engine, "a", slot=0)
    mark(core, engine, "b", slot=1)
    core.die()
    core.perform(core.core.stop(core.at))
    assert not any(isinstance(e, SendTo) and isinstance(e.command, CancelJob) for e in core.effects)
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert (tokens(core, "a"), tokens(core, "b")) == (0, 600)
    assert not core.jobs("cpu:0")
    assert any(isinstance(e, SendTo) and isinstance(e.command, StopWorker) for e in core.effects)


def test_no_event_of_a_dead_engine_is_asked(make_core: Callable[..., Harness]) -> None:
    core = make_core(devices={"gpu0": "GPU-x"})
    core.connect()
    one = layout()
    pool = CudaIpcPool(b"h" * 64, one.end_bytes, 0, one.end_bytes, b"e" * 64)
    core.ask(1, Register(core.next_seq(), "ns", "e", FINGERPRINT, (Stage(0, "GPU-x", pool, one),)))
    (engine,) = core.core.state.engines
    rows = ((pack_rows([(0, 300)]),),)
    core.ask(1, Mark(core.next_seq(), engine, 0, "clean", "a", pack_tokens(range(300)), rows, "event"))
    (job,) = core.jobs("gpu0")
    assert isinstance(job, DigestJob)
    assert job.poll_event
    core.finish("gpu0", 0)
    core.die()
    (job,) = core.jobs("gpu0")
    assert isinstance(job, CaptureJob)
    assert not job.poll_event
    core.finish("gpu0", 0)
    assert tokens(core) == 300


def test_status_shows_a_rescue(core: Harness) -> None:
    engine = core.register()
    mark(core, engine, "a", slot=0)
    mark(core, engine, "b", slot=1)

    def shown(client: int) -> str:
        seq = core.next_seq()
        core.ask(client, Stats(seq))
        reply = core.final(client, seq)
        assert isinstance(reply, StatsReply)
        (info,) = reply.engines
        return info.rescue

    assert shown(1) == ""
    core.connect(2)
    core.die(proven=False)
    assert shown(2) == "waits for the end of process 4001"
    core.ended()
    assert shown(2) == "1 of 2 slots, 0 images"
    core.finish("cpu:0")
    core.finish("cpu:1")
    assert shown(2) == "2 of 2 slots, 1 images"
    core.finish_all()


PLAIN = layout()
BLOCKS = StageLayout((RowGroup((Plane(0, 16 * 64, 16 * 64, 256, 16, 64),)),))
ODD_BLOCKS = StageLayout((RowGroup((Plane(0, 24 * 64, 24 * 64, 256, 24, 64),)),))  # a chunk is 240 tokens
STATE = layout(state=True)
WINDOW = StageLayout((RowGroup((Plane(0, 64, 64, 4096),)), RowGroup((Plane(262_144, 64, 64, 4096),), 500)))


@pytest.mark.parametrize(
    ("layouts", "count", "changed", "left"),
    [
        ((PLAIN, PLAIN), 600, (), 600),
        ((PLAIN, PLAIN), 600, ((1, 0, 512),), 512),
        ((PLAIN, BLOCKS), 600, ((1, 0, 256),), 256),
        ((PLAIN, BLOCKS), 599, (), 599),  # the tail of a block
        ((PLAIN, ODD_BLOCKS), 3900, ((1, 0, 3840),), 3840),  # chunks of both end together at multiples of 3840
        ((PLAIN, ODD_BLOCKS), 3900, ((0, 0, 3584),), 0),
        ((STATE, PLAIN), 600, (), 600),
        ((STATE, PLAIN), 600, ((1, 0, 512),), 0),  # the state at the end is of no use before it
        ((STATE, PLAIN), 600, ((0, 1, 600),), 0),
        ((WINDOW,), 480, ((0, 0, 256),), 256),  # all of it is still in the window
        ((WINDOW,), 900, ((0, 0, 768),), 0),  # the window has passed what 768 tokens need
        ((WINDOW,), 900, (), 900),
    ],
)
def test_where_an_image_can_be_cut(
    layouts: tuple[StageLayout, ...], count: int, changed: tuple[tuple[int, int, int], ...], left: int
) -> None:
    positions = (count,) if any(one.states for one in layouts) else ()
    spans = [one.chunks(count, positions) for one in layouts]
    declared = [StageDigests("x", b"k", tuple(b"%d" % n for n in range(len(mine)))) for mine in spans]
    found = [
        StageDigests(
            "x",
            b"k",
            tuple(
                b"other" if (stage, span.group, span.first_token) in changed else b"%d" % n
                for n, span in enumerate(mine)
            ),
        )
        for stage, mine in enumerate(spans)
    ]
    assert longest_prefix(layouts, spans, declared, found, count) == left
    otherwise = [StageDigests("y", one.key_id, one.digests) for one in declared]
    assert longest_prefix(layouts, spans, declared, otherwise, count) == 0


def test_a_mark_under_way_does_not_keep_memory_mapped_once_the_rescue_is_over(core: Harness) -> None:
    engine = core.register()
    core.mark(engine, "a")
    core.die()
    core.connect(2)
    before = len(core.effects)
    core.ask(2, seq := Announce(core.next_seq(), "ns"))
    cancelled = [e.worker for e in core.effects[before:] if isinstance(e, SendTo) and isinstance(e.command, CancelJob)]
    assert sorted(cancelled) == list(ALL)
    for worker in ALL:
        core.fail(worker, "cancelled")
    assert core.final(2, seq.seq) == Done(seq.seq, 1)
    assert unmapped(core)


def test_a_rescue_holds_no_transit_images_and_has_their_space(core: Harness) -> None:
    engine = core.register()
    mark(core, engine)
    core.slot_copy(engine, "slot_to", first_row=1000, slot=3)
    core.finish_all()
    assert core.core.state.catalog.transits
    core.die(proven=False)
    assert not unmapped(core)
    assert not core.core.state.catalog.transits
    assert core.core.state.catalog.used_bytes == 0


def test_a_process_is_not_held_to_live_because_the_daemon_stood_still(core: Harness) -> None:
    mark(core, core.register())
    core.die(proven=False)
    core.perform(core.core.stood_still(60.0, core.at))
    core.tick(61.0)
    core.ended()
    core.finish_all()
    assert tokens(core) == 600
