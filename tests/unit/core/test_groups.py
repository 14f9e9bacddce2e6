"""Row groups, windows and states at checkpoints, through the core."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from ipc.messages import (
    Capture,
    Captured,
    CaptureJob,
    CopyJob,
    Failed,
    Found,
    Lookup,
    Reply,
    Restore,
    Restored,
    RestoreJob,
    SlotDirect,
    SlotFrom,
    SlotTo,
)
from shm.extent import unpack_places
from shm.layout import Plane, RowGroup, StageLayout, StateGroup
from shm.rows import pack_numbers, pack_rows
from stratad.core.failures import Refusal
from stratad.core.row_lists import Need, cut_stages
from tests.support.core_harness import ROWS, Harness, pack_tokens
from workers.jobs import restore_chunks

FULL = RowGroup((Plane(0, 64, 64, 4096),))
WINDOW = RowGroup((Plane(262_144, 512, 512, 256, 16, 32),), window_tokens=100)
STATES = (StateGroup((Plane(393_216, 4096, 4096, 8),)), StateGroup((Plane(425_984, 100, 128, 8),)))
HYBRID = StageLayout((FULL,), STATES)
WINDOWED = StageLayout((FULL, WINDOW))
LINEAR = StageLayout((), STATES)


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def rows_for(layout: StageLayout, tokens: int, slots: Sequence[int], first: int = 0) -> tuple[bytes, ...]:
    rows = (pack_rows([(first // group.tokens_per_row, group.rows_for(tokens))]) for group in layout.groups)
    return (*rows, *(pack_rows([(slot, 1) for slot in slots]) for _ in layout.states))


def capture(
    core: Harness, engine: int, layouts: Sequence[StageLayout], tokens: int, checkpoints: Sequence[tuple[int, int]] = ()
) -> Reply:
    slots = [slot for _, slot in checkpoints]
    request = Capture(
        core.next_seq(),
        engine,
        "a",
        pack_tokens(range(tokens)),
        tuple(rows_for(layout, tokens, slots) for layout in layouts),
        0,
        "host",
        pack_numbers([position for position, _ in checkpoints]),
    )
    core.ask(1, request)
    core.finish_all()
    return core.final(1, request.seq)


def restore(core: Harness, engine: int, layouts: Sequence[StageLayout], tokens: int, slot: int = 7) -> int:
    rows = tuple(rows_for(layout, tokens, [slot], first=2048) for layout in layouts)
    request = Restore(core.next_seq(), engine, "a", rows, slot, "host", tokens=tokens)
    core.ask(1, request)
    return request.seq


def lookup(core: Harness, engine: int, tokens: Sequence[int]) -> Found:
    request = Lookup(core.next_seq(), engine, pack_tokens(tokens))
    (reply,) = core.ask(1, request)
    assert isinstance(reply, Found)
    return reply


def test_a_hybrids_image_is_restored_at_its_checkpoints_only(core: Harness) -> None:
    layouts = (HYBRID, LINEAR)
    engine = core.register(layouts=layouts)
    reply = capture(core, engine, layouts, 600, [(300, 2), (512, 3), (600, 1)])
    assert isinstance(reply, Captured)
    for tokens in (1, 299, 301, 599):
        failure = core.failure(1, restore(core, engine, layouts, tokens))
        assert failure.code == "no_checkpoint"
        assert failure.detail == {"points": "300,512,600"}
    seq = restore(core, engine, layouts, 512)
    job = core.jobs("cpu:1")[0]
    assert isinstance(job, RestoreJob)
    assert (job.image_tokens, job.tokens, job.positions) == (600, 512, pack_numbers([300, 512, 600]))
    assert job.rows == (pack_rows([(7, 1)]),) * 2
    assert len(job.digests) == 16 * 6
    core.finish_all()
    assert core.final(1, seq).tokens == 512  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layouts", "checkpoints", "tokens"),
    [
        ((HYBRID, LINEAR), [(300, 2), (512, 3), (600, 1)], [300, 512, 600]),
        ((StageLayout((FULL,)),) * 2, [], [1, 256, 257, 599, 600]),
        ((WINDOWED,) * 2, [], [596, 600]),
    ],
    ids=["states", "rows", "window"],
)
def test_the_time_of_a_restore_counts_what_its_workers_move(
    core: Harness, layouts: Sequence[StageLayout], checkpoints: list[tuple[int, int]], tokens: list[int]
) -> None:
    engine = core.register(layouts=layouts)
    captured = capture(core, engine, layouts, 600, checkpoints)
    assert isinstance(captured, Captured)
    for count in tokens:
        seq = restore(core, engine, layouts, count)
        (op,) = core.core.state.ops.values()
        for run, layout in zip(op.stages, layouts, strict=True):
            (job,) = core.jobs(run.worker)
            assert isinstance(job, RestoreJob)
            moved = restore_chunks(
                layout,
                job.image_tokens,
                job.tokens,
                op.positions,
                unpack_places(job.places),
                digests=job.digests,
                algorithms=job.algorithms,
            )
            moved_bytes = sum(work.span.length_bytes for work in moved)
            assert core.core.state.workers[run.worker].job_bytes == moved_bytes > 0
            assert run.patience_s == 5.0 + moved_bytes / 1e9
        core.finish_all()
        restored = core.final(1, seq)
        assert isinstance(restored, Restored)
        assert restored.image_bytes == captured.image_bytes


def test_lookup_finds_the_last_checkpoint_within_the_common_prefix(core: Harness) -> None:
    layouts = (HYBRID, LINEAR)
    engine = core.register(layouts=layouts)
    reply = capture(core, engine, layouts, 600, [(300, 2), (512, 3)])
    assert isinstance(reply, Captured)
    assert lookup(core, engine, range(700)).tokens == 512
    assert lookup(core, engine, [*range(511), 9, 9]).tokens == 300
    assert lookup(core, engine, range(300)).tokens == 300
    assert lookup(core, engine, range(299)).match == "miss"
    assert core.failure(1, restore(core, engine, layouts, 600)).code == "no_checkpoint"


@pytest.mark.parametrize("checkpoints", [[], [(601, 0)], [(0, 0)], [(5, 0), (5, 1)], [(9, 0), (5, 1)], [(5, 8)]])
def test_checkpoints_that_cannot_be(core: Harness, checkpoints: list[tuple[int, int]]) -> None:
    engine = core.register(layouts=(HYBRID, LINEAR))
    reply = capture(core, engine, (HYBRID, LINEAR), 600, checkpoints)
    assert isinstance(reply, Failed)
    assert reply.code in ("bad_state", "bad_rows")


def test_a_windows_image_holds_what_the_window_holds(core: Harness) -> None:
    engine = core.register(layouts=(WINDOWED, WINDOWED))
    request_rows = rows_for(WINDOWED, 600, ())
    assert request_rows[1] == pack_rows([(0, 7)])  # tokens 496 to 599, in blocks of 16
    reply = capture(core, engine, (WINDOWED, WINDOWED), 600)
    assert isinstance(reply, Captured)
    assert reply.image_bytes == 2 * (600 * 64 + 7 * 512)
    assert core.failure(1, restore(core, engine, (WINDOWED, WINDOWED), 595)).code == "no_checkpoint"
    for tokens in (600, 596):  # whose windows begin in the same block
        seq = restore(core, engine, (WINDOWED, WINDOWED), tokens)
        core.finish_all()
        assert core.final(1, seq).tokens == tokens  # type: ignore[union-attr]
    assert lookup(core, engine, range(599)).match == "miss"
    assert lookup(core, engine, range(700)).tokens == 600


def test_images_of_another_window_are_refused_by_name(core: Harness) -> None:
    wider = StageLayout((FULL, msgspec.structs.replace(WINDOW, window_tokens=112)))
    assert wider.rows_for(112) == WINDOWED.rows_for(112)
    assert isinstance(capture(core, core.register(layouts=(WINDOWED,)), (WINDOWED,), 112), Captured)
    other = core.register(layouts=(wider,))
    failure = core.failure(1, restore(core, other, (wider,), 112))
    assert (failure.code, list(failure.detail)) == ("fingerprint_mismatch", ["layout.groups.0"])
    assert lookup(core, other, range(112)).match == "miss"


def test_a_window_that_has_not_passed_can_be_cut_anywhere(core: Harness) -> None:
    engine = core.register(layouts=(WINDOWED, WINDOWED))
    assert isinstance(capture(core, engine, (WINDOWED, WINDOWED), 100), Captured)
    assert lookup(core, engine, [*range(37), 5]).tokens == 37
    seq = restore(core, engine, (WINDOWED, WINDOWED), 37)
    core.finish_all()
    assert core.final(1, seq).tokens == 37  # type: ignore[union-attr]


def test_the_longest_of_both_kinds_of_image_is_found(core: Harness) -> None:
    engine = core.register(layouts=(WINDOWED, WINDOWED))
    for name, tokens in (("short", 90), ("long", 600)):
        rows = (rows_for(WINDOWED, tokens, ()),)
        core.ask(1, Capture(core.next_seq(), engine, name, pack_tokens(range(tokens)), rows, 0, "host"))
        core.finish_all()
    assert (lookup(core, engine, range(600)).conversation, lookup(core, engine, range(600)).tokens) == ("long", 600)
    assert (lookup(core, engine, range(599)).conversation, lookup(core, engine, range(599)).tokens) == ("short", 90)


def test_groups_that_are_the_same_memory_share_their_fences(core: Harness) -> None:
    pool = Plane(0, 512, 512, 64, 16, 32)
    layout = StageLayout(
        (RowGroup((pool,)), RowGroup((pool,), window_tokens=32)), (StateGroup((Plane(0, 500, 512, 64),)),)
    )
    engine = core.register(layouts=(layout, layout))

    def ask(first: int, window: int, state: int) -> int:
        rows = (tuple(pack_rows([(row, count)]) for row, count in ((first, 4), (window, 2), (state, 1))),)
        request = Capture(core.next_seq(), engine, "a", pack_tokens(range(64)), rows, 0, "host", pack_numbers([64]))
        core.ask(1, request)
        return request.seq

    assert core.failure(1, ask(0, 3, 10)).code == "bad_rows"
    assert core.failure(1, ask(0, 5, 6)).code == "bad_rows"
    ask(0, 4, 6)
    job = core.jobs("cpu:0")[0]
    assert isinstance(job, CaptureJob)
    assert job.rows == tuple(pack_rows([run]) for run in ((0, 4), (4, 2), (6, 1)))


def test_a_block_that_cannot_locate_tokens_is_not_cut_by_a_lookup(core: Harness) -> None:
    blocks = StageLayout((RowGroup((Plane(0, 512, 512, 64, 16, 0),)),))
    engine = core.register(layouts=(blocks, blocks))
    assert isinstance(capture(core, engine, (blocks, blocks), 64), Captured)
    assert lookup(core, engine, [*range(40), 0]).tokens == 32
    assert lookup(core, engine, [*range(15), 0]).match == "miss"


def test_with_windows_or_states_only_whole_units_are_captured(core: Harness) -> None:
    layout = StageLayout((RowGroup((Plane(0, 512, 512, 64, 16, 0),), window_tokens=32),))
    engine = core.register(layouts=(layout, layout))
    reply = capture(core, engine, (layout, layout), 70)
    assert isinstance(reply, Failed)
    assert reply.code == "bad_tokens"
    assert "multiple of 16" in reply.message


def test_a_checkpoint_to_which_nothing_could_be_restored_is_refused(core: Harness) -> None:
    blocks = StageLayout((RowGroup((Plane(0, 512, 512, 64, 16, 0),)),), STATES)
    engine = core.register(layouts=(blocks, blocks))
    reply = capture(core, engine, (blocks, blocks), 64, [(20, 1), (32, 2)])
    assert isinstance(reply, Failed)
    assert (reply.code, "multiples of 16" in reply.message) == ("bad_state", True)
    assert isinstance(capture(core, engine, (blocks, blocks), 64, [(32, 1), (48, 2)]), Captured)
    assert lookup(core, engine, [*range(47), 9]).tokens == 32


def test_of_the_checkpoints_behind_a_window_at_least_one_must_be_of_use(core: Harness) -> None:
    layout = StageLayout((FULL, WINDOW), STATES)
    engine = core.register(layouts=(layout, layout))
    reply = capture(core, engine, (layout, layout), 600, [(300, 1), (512, 2)])
    assert isinstance(reply, Failed)
    assert (reply.code, "windows" in reply.message) == ("bad_state", True)
    assert isinstance(capture(core, engine, (layout, layout), 600, [(512, 1), (600, 2)]), Captured)
    assert lookup(core, engine, range(599)).match == "miss"
    assert lookup(core, engine, range(600)).tokens == 600


def test_of_more_rows_than_are_needed_the_first_are_used_however_they_are_given(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(4))
    core.finish_all()
    first, beyond = [(9, 1), (7, 1), (5, 1), (3, 1)], [(20, 100), (ROWS + 5, 1)]
    for rows in (pack_rows(first + beyond), pack_rows([*first[:3], (3, 500)])):
        core.ask(1, Restore(core.next_seq(), engine, "a", ((rows,),), 1, "host"))
        jobs = [core.jobs(worker)[0] for worker in ("cpu:0", "cpu:1")]
        assert [job.rows for job in jobs] == [(pack_rows(first),)] * 2
        core.finish_all()
    ragged = Restore(core.next_seq(), engine, "a", ((pack_rows(first + beyond) + b"1",),), 1, "host")
    core.ask(1, ragged)
    assert core.failure(1, ragged.seq).code == "bad_rows"


def test_a_window_of_one_stage_binds_all_of_them(core: Harness) -> None:
    layouts = (StageLayout((FULL,)), WINDOWED)
    engine = core.register(layouts=layouts)
    assert isinstance(capture(core, engine, layouts, 600), Captured)
    assert core.failure(1, restore(core, engine, layouts, 300)).code == "no_checkpoint"
    assert lookup(core, engine, range(599)).match == "miss"
    assert lookup(core, engine, range(600)).tokens == 600


def test_slot_copies_take_the_state_at_their_last_token_along(core: Harness) -> None:
    layouts = (HYBRID, LINEAR)
    engine = core.register(layouts=layouts)
    source = tuple(rows_for(layout, 600, [2]) for layout in layouts)
    target = tuple(rows_for(layout, 600, [5], first=2048) for layout in layouts)
    core.ask(1, SlotTo(core.next_seq(), engine, 600, source, 0, "host"))
    core.ask(1, SlotDirect(core.next_seq(), engine, 600, source, target, 0, 1, "host"))
    for stage, worker in enumerate(("cpu:0", "cpu:1")):
        stored, copied = core.jobs(worker)
        assert isinstance(copied, CopyJob)
        assert (stored.positions, copied.positions) == (pack_numbers([600]),) * 2
        assert (stored.rows, copied.rows, copied.target_rows) == (source[stage], source[stage], target[stage])
    core.finish_all()
    ask = SlotFrom(core.next_seq(), engine, 0, target, 1, "host")
    core.ask(1, ask)
    assert [core.jobs(worker)[0].positions for worker in ("cpu:0", "cpu:1")] == [pack_numbers([600])] * 2
    core.finish_all()
    assert isinstance(core.final(1, ask.seq), Restored)


@pytest.mark.parametrize(("target_tokens", "slots"), [(599, [5]), (600, [])])
def test_a_direct_copy_needs_as_many_target_rows_as_it_writes(
    core: Harness, target_tokens: int, slots: list[int]
) -> None:
    engine = core.register(layouts=(HYBRID, HYBRID))
    source, target = (rows_for(HYBRID, 600, [2]),), (rows_for(HYBRID, target_tokens, slots, first=2048),)
    ask = SlotDirect(core.next_seq(), engine, 600, source, target, 0, 1, "host")
    core.ask(1, ask)
    assert core.failure(1, ask.seq).code == "bad_rows"


def test_rows_are_unpacked_and_cut_once_for_all_kinds_of_stages() -> None:
    kinds = [StageLayout((RowGroup((Plane(0, 32, 32, rows, 4, 0),)),)) for rows in (8, 9)]
    one, other = cut_stages(kinds, ((pack_rows([(0, 1), (7, 1), (3, 1)]),),), Need(12, 0), 8)
    assert [rows.runs for rows in one.lists] == [((0, 1), (7, 1))]
    assert (one.lists[0] is other.lists[0], one.packed[0] is other.packed[0]) == (True, True)
    whole = cut_stages(kinds, ((pack_rows([(0, 3)]),),), Need(12, 0), 12)
    assert whole[0].lists[0] is whole[1].lists[0]
    with pytest.raises(Refusal, match=r"run \(8, 1\) is empty or passes the last of 8 rows") as refused:
        cut_stages(list(reversed(kinds)), ((pack_rows([(0, 2), (8, 1)]),),), Need(12, 0), 12)
    assert (refused.value.code, refused.value.stage) == ("bad_rows", 1)
