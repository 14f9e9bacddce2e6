"""Marks with contents: what is digested, what of an earlier mark is taken over, and what ends them."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ipc.messages import DigestJob, Done, Failed, JobDone, Mark, Marked, Stats, StatsReply, Unregister
from shm.layout import Plane, RowGroup, StageLayout
from shm.rows import RowList, pack_numbers, pack_rows, runs_of, unpack_numbers
from stratad.core import clean_marks
from stratad.core.clean_marks import CleanMark, plan_marking
from stratad.core.images import StageDigests
from stratad.core.row_lists import CutRows
from tests.support.core_harness import Harness, layout, pack_tokens


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def held(core: Harness, engine: int) -> dict[int, CleanMark]:
    return core.core.state.engines[engine].clean.by_slot


def asked(core: Harness, worker: str = "cpu:0") -> list[int]:
    """The chunks that a worker is to digest now."""
    (job,) = core.jobs(worker)
    assert isinstance(job, DigestJob)
    return list(unpack_numbers(job.chunks))


def marked(core: Harness, engine: int, **how: object) -> None:
    seq = core.mark(engine, **how)  # type: ignore[arg-type]
    core.finish_all()
    assert isinstance(core.final(1, seq), Marked)


def test_a_mark_is_digested_on_all_stages_and_shown(core: Harness) -> None:
    engine = core.register()
    seq = core.mark(engine, "a", range(600), first_row=100, slot=3)
    for worker in ("cpu:0", "cpu:1"):
        (job,) = core.jobs(worker)
        assert isinstance(job, DigestJob)
        assert (job.rows, job.tokens, unpack_numbers(job.chunks)) == ((pack_rows([(100, 600)]),), 600, (0, 1, 2))
    assert (
        core.failure(1, core.slot_copy(engine, "slot_direct", tokens=10, first_row=2000, target_row=650)).code
        == "rows_busy"
    )
    core.finish("cpu:0")
    assert core.answers(1, seq) == []
    assert held(core, engine) == {}
    core.finish("cpu:1")
    reply = core.final(1, seq)
    assert isinstance(reply, Marked)
    assert (reply.tokens, reply.digested_bytes) == (600, 2 * 600 * 1024)
    assert [outcome.state for outcome in reply.stages] == ["done", "done"]
    stats = core.next_seq()
    core.ask(1, Stats(stats))
    shown = core.final(1, stats)
    assert isinstance(shown, StatsReply)
    assert (shown.engines[0].clean_slots, shown.engines[0].clean_tokens) == (1, 600)
    assert shown.engines[0].marks == {"clean": 1}
    assert core.core.state.catalog.used_bytes == 0
    assert not len(core.core.state.fences)


@pytest.mark.parametrize(
    ("before", "after", "chunks"),
    [
        (range(600), range(900), [2, 3]),  # the tail of the former mark has other tokens now
        (range(512), range(900), [1, 2, 3]),  # an engine that goes on computes token 511 anew
        (range(600), range(600), [2]),
        (range(600), range(500), [1]),
        (range(600), [*range(300), 7, *range(301, 900)], [1, 2, 3]),
        (range(600), [5, *range(1, 600)], [0, 1, 2]),
    ],
)
def test_only_what_is_new_is_digested(core: Harness, before: range, after: range, chunks: list[int]) -> None:
    engine = core.register()
    marked(core, engine, tokens=before)
    core.content = lambda stage, chunk: bytes([stage, chunk, 9]) + b"n" * 13
    seq = core.mark(engine, tokens=after)
    assert (asked(core), asked(core, "cpu:1")) == (chunks, chunks)
    core.finish_all()
    reply = core.final(1, seq)
    assert isinstance(reply, Marked)
    size = sum(span.length_bytes for n, span in enumerate(layout().chunks(len(after))) if n in chunks)
    assert reply.digested_bytes == 2 * size
    for stage, digests in enumerate(held(core, engine)[0].digests):
        new = [core.content(stage, n) for n in range(len(digests.digests))]
        old = [bytes([stage, n]) * 8 for n in range(len(digests.digests))]
        assert list(digests.digests) == [new[n] if n in chunks else old[n] for n in range(len(new))]


def test_a_conversation_of_another_name_is_digested_whole(core: Harness) -> None:
    engine = core.register()
    marked(core, engine, conversation="a")
    core.mark(engine, "b")
    assert asked(core) == [0, 1, 2]


def test_a_slot_of_its_own_is_digested_whole(core: Harness) -> None:
    engine = core.register()
    marked(core, engine, slot=0)
    core.mark(engine, slot=1)
    assert asked(core) == [0, 1, 2]


def test_chunks_in_other_rows_are_digested_again(core: Harness) -> None:
    engine = core.register()
    marked(core, engine)
    request = Mark(
        core.next_seq(),
        engine,
        0,
        "clean",
        "a",
        pack_tokens(range(900)),
        ((pack_rows([(0, 200), (200, 100), (1000, 600)]),),),
    )
    core.ask(1, request)
    assert asked(core) == [1, 2, 3]  # chunk 0 lies where it lay, if in two runs


def test_a_window_that_moved_keeps_what_it_still_has(core: Harness) -> None:
    full = RowGroup((Plane(0, 64, 64, 4096),))
    window = RowGroup((Plane(262_144, 512, 512, 256, 16, 32),), window_tokens=600)
    layouts = (StageLayout((full, window)),) * 2
    engine = core.register(layouts=layouts)

    def mark(tokens: int) -> int:
        rows = []
        for group in layouts[0].groups:
            first = group.first_token(tokens) // group.tokens_per_row
            rows.append(pack_rows([(first, group.rows_for(tokens))]))
        seq = core.next_seq()
        core.ask(1, Mark(seq, engine, 0, "clean", "a", pack_tokens(range(tokens)), (tuple(rows),)))
        return seq

    mark(1000)
    spans = layouts[0].chunks(1000)
    assert asked(core) == list(range(len(spans)))
    core.finish_all()
    mark(1300)
    spans = layouts[0].chunks(1300)
    again = [(spans[n].group, spans[n].first_token) for n in asked(core)]
    # The window begins at token 688 now: of its chunks only the one of 768 to 1000 was whole, and that has grown.
    assert again == [(0, 768), (0, 1024), (0, 1280), (1, 688), (1, 768), (1, 1024), (1, 1280)]


def test_a_state_is_always_digested(core: Harness) -> None:
    engine = core.register(layouts=[layout(state=True), layout()])
    rows = (pack_rows([(0, 512)]), pack_rows([(2, 1)]))

    def mark() -> None:
        request = Mark(core.next_seq(), engine, 2, "clean", "a", pack_tokens(range(512)), (rows, rows[:1]))
        core.ask(1, request)

    mark()
    (job,) = core.jobs("cpu:0")
    assert isinstance(job, DigestJob)
    assert (job.rows, job.positions) == (rows, pack_numbers([512]))
    core.finish_all()
    mark()
    assert (asked(core), asked(core, "cpu:1")) == ([1, 2], [1])


@pytest.mark.parametrize("mark", ["clean", "dirty", "poisoned"])
def test_a_plain_mark_ends_it(core: Harness, mark: str) -> None:
    engine = core.register()
    marked(core, engine, slot=0)
    marked(core, engine, slot=1, first_row=1000)
    assert isinstance(core.final(1, core.plain_mark(engine, mark, slot=0)), Done)
    assert list(held(core, engine)) == [1]


def test_what_we_write_ends_it(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "image", range(100), first_row=3000)
    core.finish_all()
    marked(core, engine, conversation="a", slot=0)
    marked(core, engine, conversation="b", slot=1, first_row=1000)
    marked(core, engine, conversation="c", slot=2, first_row=2000)
    core.restore(engine, "image", 100, first_row=1599)  # the last of b's rows
    assert sorted(held(core, engine)) == [0, 2]
    core.finish_all()
    core.slot_copy(engine, "slot_direct", tokens=10, first_row=2000, slot=2, target_row=599, target_slot=0)
    assert list(held(core, engine)) == [2]


def test_a_restore_that_is_refused_or_waits_ends_nothing(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "image", range(100), first_row=3000)
    core.finish_all()
    marked(core, engine)
    assert core.failure(1, core.restore(engine, "other", 100, first_row=500)).code == "unknown_conversation"
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick()
    core.restore(engine, "image", 100, first_row=500)
    assert list(held(core, engine)) == [0]


@pytest.mark.parametrize(("mark", "code"), [("poisoned", "poisoned"), ("dirty", "cancelled")])
def test_a_slot_that_is_marked_otherwise_meanwhile_is_not_declared(core: Harness, mark: str, code: str) -> None:
    engine = core.register()
    seq = core.mark(engine)
    core.plain_mark(engine, mark)
    core.finish_all()
    assert core.failure(1, seq).code == code
    assert held(core, engine) == {}


def test_a_poisoned_slot_can_be_declared(core: Harness) -> None:
    engine = core.register()
    core.plain_mark(engine, "poisoned")
    marked(core, engine)
    assert list(held(core, engine)) == [0]
    core.capture(engine)
    assert core.jobs("cpu:0")


def test_one_stage_that_fails_declares_nothing_and_keeps_the_former(core: Harness) -> None:
    engine = core.register()
    marked(core, engine, tokens=range(300))
    former = held(core, engine)[0]
    seq = core.mark(engine, tokens=range(600))
    core.finish("cpu:0")
    core.fail("cpu:1", "deadline")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stage) == ("deadline", 1)
    assert held(core, engine) == {0: former}


def test_the_later_of_two_marks_holds_whichever_ends_first(core: Harness) -> None:
    engine = core.register(stages=1)
    first = core.mark(engine, "a", range(300))
    core.mark(engine, "a", range(600))
    late, early = core.jobs("cpu:0")
    core.report("cpu:0", JobDone(early.job, 1, 0.0, 0.0, b"2" * 48))
    core.report("cpu:0", JobDone(late.job, 1, 0.0, 0.0, b"1" * 32))
    assert isinstance(core.final(1, first), Marked)
    assert held(core, engine)[0].token_count == 600


def test_digests_of_another_kind_are_not_mixed(core: Harness) -> None:
    engine = core.register()
    marked(core, engine)
    seq = core.mark(engine, tokens=range(900))
    for worker in ("cpu:0", "cpu:1"):
        (job,) = core.jobs(worker)
        core.report(worker, JobDone(job.job, 1, 0.0, 0.0, b"x" * 32, algorithm="mlh-128"))
    assert core.failure(1, seq).code == "internal"
    assert held(core, engine) == {}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"mark": "dirty"}, "bad_value"),
        ({"conversation": ""}, "bad_value"),
        ({"conversation": "a\0"}, "bad_value"),
        ({"tokens": b""}, "bad_tokens"),
        ({"tokens": b"123"}, "bad_tokens"),
        ({"rows": ()}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 9)]),),)}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 5), (4, 5)]),),)}, "bad_rows"),
        ({"slot": 65_536}, "bad_value"),
        ({"ordered": "device"}, "bad_value"),
        ({"engine_id": 77}, "not_registered"),
    ],
)
def test_a_bad_mark_is_refused_and_changes_nothing(core: Harness, change: dict[str, object], code: str) -> None:
    engine = core.register()
    core.plain_mark(engine, "poisoned")
    fields: dict[str, object] = {
        "seq": core.next_seq(),
        "engine_id": engine,
        "slot": 0,
        "mark": "clean",
        "conversation": "a",
        "tokens": pack_tokens(range(10)),
        "rows": ((pack_rows([(0, 10)]),),),
    }
    request = Mark(**{**fields, **change})  # type: ignore[arg-type]
    core.ask(1, request)
    reply = core.final(1, request.seq)
    assert isinstance(reply, Failed)
    assert reply.code == code
    assert core.core.state.engines[engine].marks == {0: "poisoned"}
    assert not core.jobs("cpu:0")


def test_marks_are_bounded(core: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratad.core.marking.CLEAN_BYTES_LIMIT", 25_000)
    assert clean_marks.CLEAN_BYTES_LIMIT == 64 * 1024 * 1024
    engine = core.register()
    marked(core, engine, slot=0)
    marked(core, engine, slot=0)  # takes the place of the former
    marked(core, engine, slot=1, first_row=1000)
    assert core.failure(1, core.mark(engine, slot=2, first_row=2000)).code == "too_many"
    core.plain_mark(engine, "dirty", slot=0)
    marked(core, engine, slot=2, first_row=2000)


def test_unregister_ends_a_mark_under_way(core: Harness) -> None:
    engine = core.register()
    seq = core.mark(engine)
    core.ask(1, Unregister(core.next_seq(), engine))
    for worker in ("cpu:0", "cpu:1"):
        core.fail(worker, "cancelled")
    assert core.failure(1, seq).code == "cancelled"
    assert not core.core.state.engines


SMALL = StageLayout((RowGroup((Plane(0, 8, 8, 512),)), RowGroup((Plane(4096, 8, 8, 512),), 20)), chunk_tokens=4)


def a_mark(tokens: list[int], rows: list[list[int]]) -> CleanMark:
    """A mark whose groups have these rows, cut into runs of up to two."""
    lists = tuple(
        RowList.of([run for n in range(0, len(group), 2) for run in runs_of(group[n : n + 2])]) for group in rows
    )
    spans = SMALL.chunks(len(tokens))
    digests = (StageDigests("x", b"k", tuple(b"%d" % n for n in range(len(spans)))),)
    cut = CutRows.of(lists)
    return CleanMark(1, 0, "a", pack_tokens(tokens), (), None, (cut,), (), len(spans), 0, digests)


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_what_is_taken_over_is_what_lies_where_it_lay(before: int, after: int, data: st.DataObject) -> None:
    """By a model that looks at every token and row: taken over is what ends before the first one that differs."""
    tokens = list(range(max(before, after)))
    new_tokens = [*tokens[:after]]
    rows = [[100 * number + 3 * (n // 2) + n % 2 for n in range(60)] for number in (0, 1)]
    new_rows = [list(group) for group in rows]
    if data.draw(st.booleans()):
        new_tokens[data.draw(st.integers(0, after - 1))] = 999
    if data.draw(st.booleans()):
        new_rows[data.draw(st.integers(0, 1))][data.draw(st.integers(0, 59))] = 500
    firsts = [[group.first_token(count) for group in SMALL.groups] for count in (before, after)]
    former = a_mark(tokens[:before], [rows[g][firsts[0][g] : before] for g in (0, 1)])
    mark = a_mark(new_tokens, [new_rows[g][firsts[1][g] : after] for g in (0, 1)])
    spans = SMALL.chunks(after)
    (asked,) = plan_marking([SMALL], [spans], mark, former).asked
    old = {(s.group, s.first_token, s.token_count) for s in SMALL.chunks(before)}
    for number, span in enumerate(spans):
        end = span.first_token + span.token_count
        start = max(firsts[0][span.group], firsts[1][span.group])
        known = (
            (span.group, span.first_token, span.token_count) in old
            and end < before
            and new_tokens[:end] == tokens[:end]
            and rows[span.group][start:end] == new_rows[span.group][start:end]
        )
        assert (number not in asked) == known, span
