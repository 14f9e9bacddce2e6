"""Puts through the core: staged part by part, published whole, given back in every other case."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    CancelJob,
    Captured,
    CaptureJob,
    Done,
    Drop,
    Failed,
    Found,
    ImageDetail,
    JobDone,
    Lookup,
    PartInfo,
    PartStored,
    Progress,
    PutBegin,
    PutPart,
    Show,
    Stats,
    StatsReply,
    Unregister,
)
from shm.extent import GRANULE_BYTES, unpack_places
from stratad.core.puts import PART_LIMIT
from tests.support.core_exchange import STEP, CoreExchange
from tests.support.core_harness import MIB, Harness, pack_tokens

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core(1)
    harness.connect()
    return harness


@pytest.fixture
def exchange(core: Harness) -> CoreExchange:
    return CoreExchange.register(core)


def staged(core: Harness) -> int:
    return core.core.state.catalog.staged_bytes


def used(core: Harness) -> int:
    return core.core.state.catalog.used_bytes


def code(core: Harness, seq: int) -> str:
    return core.failure(1, seq).code


def test_a_put_is_invisible_until_it_is_committed_and_then_whole(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("chat", range(5))
    seq = exchange.put(put, "0.k", 100, meta="u8")
    (job,) = core.jobs("cpu:0")
    assert isinstance(job, CaptureJob)
    assert (job.tokens, [place.length_bytes for place in unpack_places(job.places)]) == (1, [4096])
    assert core.answers(1, seq) == []
    core.finish("cpu:0")
    reply = core.final(1, seq)
    assert isinstance(reply, PartStored)
    assert reply.stored_bytes == 4096
    exchange.put(put, "0.v", 3 * MIB - 5000)
    core.finish_all()
    exchange.put(put, "nothing", 0, meta="empty")
    assert staged(core) == GRANULE_BYTES + 3 * MIB
    assert core.core.state.catalog.images == {}
    look = Lookup(core.next_seq(), exchange.engine_id, pack_tokens(range(9)))
    assert core.ask(1, look) == [Found(look.seq, "miss")]
    assert isinstance(exchange.try_open("chat"), Failed)
    done = exchange.commit(put)
    assert isinstance(done, Captured)
    assert (done.tokens, done.image_bytes, done.new_bytes) == (5, 100 + 3 * MIB - 5000, 4096 + 3 * MIB - 4096)
    assert staged(core) == 0
    look = Lookup(core.next_seq(), exchange.engine_id, pack_tokens(range(9)))
    assert core.ask(1, look) == [Found(look.seq, "hit", done.image_id, "chat", 5, 5)]
    table = exchange.open("chat").parts
    assert table == (
        PartInfo("0.k", 100, "u8"),
        PartInfo("0.v", 3 * MIB - 5000),
        PartInfo("nothing", 0, "empty"),
    )


def test_tokens_find_a_put_as_a_whole_only_and_without_tokens_its_name_does(
    core: Harness, exchange: CoreExchange
) -> None:
    exchange.put_whole("a", {"x": 10}, range(8))
    exchange.put_whole("b", {"x": 11})
    for asked, match in ((range(7), "miss"), (range(8), "hit"), (range(100), "hit"), ([7], "miss")):
        look = Lookup(core.next_seq(), exchange.engine_id, pack_tokens(asked))
        (found,) = core.ask(1, look)
        assert isinstance(found, Found)
        assert found.match == match, asked
    assert exchange.open("b").tokens == b""


def test_a_put_replaces_the_former_image_only_when_it_is_committed(core: Harness, exchange: CoreExchange) -> None:
    first = exchange.put_whole("a", {"x": 10})
    assert isinstance(first, Captured)
    put = exchange.begin("a")
    exchange.put(put, "y", 20)
    core.finish_all()
    assert exchange.open("a").image_id == first.image_id
    exchange.abort(put)
    assert exchange.open("a").image_id == first.image_id
    second = exchange.put_whole("a", {"y": 20})
    assert isinstance(second, Captured)
    assert exchange.open("a").image_id == second.image_id
    assert list(core.core.state.catalog.images) == [second.image_id]


def test_two_puts_of_one_conversation_end_with_the_last_commit_each_whole(
    core: Harness, exchange: CoreExchange
) -> None:
    one, two = exchange.begin("a"), exchange.begin("a")
    exchange.put(one, "x", 10)
    exchange.put(two, "x", 5000, at=8)
    exchange.put(two, "y", 10, at=16)
    core.finish_all()
    assert isinstance(exchange.commit(two), Captured)
    assert [part.name for part in exchange.open("a").parts] == ["x", "y"]
    assert isinstance(exchange.commit(one), Captured)
    assert [(part.name, part.nbytes) for part in exchange.open("a").parts] == [("x", 10)]


def test_equal_parts_are_stored_once(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": MIB, "same": MIB})
    assert used(core) == MIB
    again = exchange.put_whole("b", {"x": MIB})
    assert isinstance(again, Captured)
    assert (again.new_bytes, used(core)) == (0, MIB)
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    assert used(core) == MIB
    core.ask(1, Drop(core.next_seq(), "ns", "b"))
    assert used(core) == 0


def test_the_algorithm_that_a_worker_names_is_recorded(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    exchange.put(put, "x", 10)
    (job,) = core.jobs("cpu:0")
    core.sent["cpu:0"].remove(job)
    core.report("cpu:0", JobDone(job.job, 1, 0.0, 0.0, bytes(16), algorithm="other-128"))
    exchange.put(put, "y", 10)
    core.finish_all()
    exchange.commit(put)
    show = Show(core.next_seq(), "ns", "a")
    (detail,) = core.ask(1, show)
    assert isinstance(detail, ImageDetail)
    assert [chunk.algorithm for chunk in detail.chunks] == ["other-128", "xxh3-128"]
    assert detail.image.parts == 2
    assert detail.parts == (PartInfo("x", 10), PartInfo("y", 10))


def test_a_part_that_failed_may_be_put_again_and_nothing_of_it_stays(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    exchange.put(put, "good", 10)
    core.finish_all()
    before = staged(core)
    seq = exchange.put(put, "x", MIB)
    core.fail("cpu:0", "out_of_memory")
    assert code(core, seq) == "out_of_memory"
    assert staged(core) == before
    seq = exchange.put(put, "x", MIB)
    core.worker_gone("cpu:0")
    assert code(core, seq) == "worker_died"
    assert staged(core) == before
    core.tick(1.0)
    exchange.put(put, "x", MIB)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)
    assert len(exchange.open("a").parts) == 2


def test_a_put_with_a_part_that_is_missing_is_not_published(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    empty = exchange.commit(put)
    assert isinstance(empty, Failed)
    assert empty.code == "part_incomplete"
    exchange.put(put, "x", 10)
    copying = exchange.commit(put)
    assert isinstance(copying, Failed)
    assert (copying.code, copying.detail) == ("part_incomplete", {"part": "x"})
    core.finish_all()
    exchange.put(put, "big", 3 * STEP * 4096, rows=STEP)
    core.finish_all()
    half = exchange.commit(put)
    assert isinstance(half, Failed)
    assert (half.code, half.detail) == ("part_incomplete", {"part": "big"})
    assert not core.core.state.catalog.images
    exchange.put(put, "big", 3 * STEP * 4096, first_row=STEP, rows=2 * STEP)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)


def test_pieces_of_one_part_may_end_in_any_order(make_core: MakeCore) -> None:
    core = make_core(1)
    core.connect()
    exchange = CoreExchange.register(core)
    put = exchange.begin("a")
    size = 3 * MIB + 1
    seqs = [
        exchange.put(put, "x", size, rows=STEP),
        exchange.put(put, "x", size, at=300, first_row=2 * STEP, rows=STEP + 1),
        exchange.put(put, "x", size, at=600, first_row=STEP, rows=STEP),
    ]
    names = {core.jobs("cpu:0")[n].job: bytes([n + 1]) * 16 for n in range(3)}
    for job in reversed(core.jobs("cpu:0")):
        assert isinstance(job, CaptureJob)
        core.sent["cpu:0"].remove(job)
        digests = b"".join(names[job.job][:15] + bytes([n]) for n in range(len(unpack_places(job.places))))
        core.report("cpu:0", JobDone(job.job, 1, 0.0, 0.0, digests))
    assert all(isinstance(core.final(1, seq), PartStored) for seq in seqs)
    assert isinstance(exchange.commit(put), Captured)
    (image,) = core.core.state.catalog.images.values()
    assert [(c.key.digest[0], c.key.digest[15]) for c in image.chunks()] == [(1, 0), (3, 0), (2, 0), (2, 1)]


def test_a_part_is_begun_anew_only_when_nothing_of_it_is_under_way(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    size = 2 * MIB
    first = exchange.put(put, "x", size, rows=STEP)
    exchange.put(put, "x", size, at=300, first_row=STEP, rows=STEP)
    core.fail("cpu:0", "device_error")
    assert code(core, first) == "device_error"
    assert code(core, exchange.put(put, "x", size, at=600, rows=STEP)) == "duplicate_part"
    core.finish_all()
    exchange.put(put, "x", 10, at=600)
    core.finish_all()
    assert staged(core) == GRANULE_BYTES
    assert isinstance(exchange.commit(put), Captured)
    assert exchange.open("a").parts == (PartInfo("x", 10),)


def test_wrong_parts_are_refused_by_name_and_change_nothing(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    exchange.put(put, "x", 10)
    core.finish_all()
    exchange.put(put, "half", 2 * MIB, rows=STEP)
    core.finish_all()
    before = staged(core)
    cases = [
        (exchange.put(put, "x", 10), "duplicate_part"),
        (exchange.put(put, "half", 2 * MIB, first_row=0, rows=2 * STEP + 1), "bad_rows"),
        (exchange.put(put, "", 10), "bad_value"),
        (exchange.put(put, "n" * 257, 10), "bad_value"),
        (exchange.put(put, "a\nb", 10), "bad_value"),
        (exchange.put(put, "y", 10, meta="m" * 513), "bad_value"),
        (exchange.put(put, "y", -1, rows=0), "too_large"),
        (exchange.put(put, "y", 1 << 50, rows=STEP), "too_large"),
        (exchange.put(put, "y", 10, rows=2), "bad_rows"),
        (exchange.put(put, "y", 0, rows=1), "bad_rows"),
        (exchange.put(put, "y", 10, rows=0), "bad_rows"),
        (exchange.put(put, "y", 10, at=2048), "bad_rows"),
        (exchange.put(put, "y", 2 * MIB, rows=STEP - 1), "bad_rows"),
        (exchange.put(put, "half", 2 * MIB, first_row=STEP - 1, rows=2), "bad_rows"),
        (exchange.put(put, "half", 2 * MIB, first_row=STEP + 1, rows=STEP - 1), "bad_rows"),
        (exchange.put(put, "half", 2 * MIB, first_row=2 * STEP, rows=0), "bad_rows"),
        (exchange.put(put, "half", 2 * MIB, first_row=-STEP, rows=STEP), "bad_rows"),
        (exchange.put(put, "half", 3 * MIB, first_row=STEP, rows=STEP), "unknown_part"),
        (exchange.put(put, "y", 2 * MIB, first_row=STEP, rows=STEP), "unknown_part"),
        (exchange.put(put + 1, "y", 10), "unknown_put"),
    ]
    assert [(code(core, seq), expected) for seq, expected in cases if code(core, seq) != expected] == []
    assert staged(core) == before
    assert not core.jobs("cpu:0")
    exchange.put(put, "half", 2 * MIB, first_row=STEP, rows=STEP)
    seq = exchange.put(put, "half", 2 * MIB, first_row=STEP, at=900, rows=STEP)
    assert code(core, seq) == "duplicate_part"
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)


def test_pieces_of_a_part_never_overlap(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    exchange.put(put, "x", 3 * MIB, rows=2 * STEP)
    assert code(core, exchange.put(put, "x", 3 * MIB, first_row=STEP, at=600, rows=2 * STEP)) == "duplicate_part"
    exchange.put(put, "x", 3 * MIB, first_row=2 * STEP, at=600, rows=STEP)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)
    (image,) = core.core.state.catalog.images.values()
    assert sum(chunk.place.length_bytes for chunk in image.chunks()) == 3 * MIB


def test_rows_of_the_exchange_are_busy_until_the_part_is_stored(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": 10})
    get = exchange.open("a").get_id
    put = exchange.begin("b")
    exchange.put(put, "x", 8192)
    exchange.put(put, "shared", 4096)
    busy = exchange.get(get, 0, 10, at=1)
    assert code(core, busy) == "rows_busy"
    core.finish_all()
    exchange.get(get, 0, 10, at=1)
    assert code(core, exchange.put(put, "z", 8192)) == "rows_busy"
    core.finish_all()
    exchange.put(put, "z", 8192)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)


def test_an_aborted_put_gives_everything_back_also_what_is_being_copied(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    exchange.put(put, "x", MIB)
    core.finish_all()
    failed = exchange.put(put, "y", MIB)
    (job,) = core.jobs("cpu:0")
    assert isinstance(exchange.abort(put), Done)
    assert CancelJob(job.job) in core.sent["cpu:0"]
    assert staged(core) == MIB
    core.finish("cpu:0")  # the cancel came too late
    assert code(core, failed) == "cancelled"
    assert (staged(core), used(core)) == (0, 0)
    again = exchange.abort(put)
    assert isinstance(again, Failed)
    assert again.code == "unknown_put"
    assert code(core, exchange.put(put, "y", 10)) == "unknown_put"


@pytest.mark.parametrize("way", ["gone", "unregister"])
def test_a_put_ends_with_its_client(core: Harness, exchange: CoreExchange, way: str) -> None:
    former = exchange.put_whole("a", {"x": 10})
    assert isinstance(former, Captured)
    put = exchange.begin("a")
    exchange.put(put, "x", MIB)
    core.finish_all()
    exchange.put(put, "y", MIB)
    before = used(core)
    if way == "gone":
        core.perform(core.core.client_gone(1, core.at))
    else:
        core.ask(1, Unregister(core.next_seq(), exchange.engine_id))
    assert used(core) == before - MIB
    core.fail("cpu:0", "cancelled")
    assert (staged(core), used(core)) == (0, GRANULE_BYTES)
    assert list(core.core.state.catalog.images) == [former.image_id]
    assert not core.core.state.engines


def test_puts_count_against_the_budgets_and_show_as_staged(make_core: MakeCore) -> None:
    core = make_core(1, budget_images=2, budget_bytes=3 * MIB)
    core.connect()
    exchange = CoreExchange.register(core)
    exchange.put_whole("a", {"x": 10})
    exchange.put_whole("b", {"x": 11})
    put = exchange.begin("c")
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["b"]
    for number in range(20):
        exchange.put(put, f"p{number}", GRANULE_BYTES)
        core.finish_all()
    assert [image.conversation for image in core.core.state.catalog.images.values()] == ["b"]
    stats = Stats(core.next_seq())
    core.ask(1, stats)
    core.tick(1.0)
    shown = core.final(1, stats.seq)
    assert isinstance(shown, StatsReply)
    assert shown.staged_bytes == 20 * GRANULE_BYTES
    other = exchange.begin("d")
    assert core.core.state.catalog.images == {}
    refused = PutBegin(core.next_seq(), exchange.engine_id, "e")
    core.ask(1, refused)
    assert code(core, refused.seq) == "no_space"
    assert code(core, exchange.put(other, "x", 2 * MIB)) == "no_space"
    exchange.abort(put)
    exchange.put(other, "x", 2 * MIB)
    core.finish_all()
    assert isinstance(exchange.commit(other), Captured)


def test_a_part_waits_for_space_that_operations_in_flight_hold(make_core: MakeCore) -> None:
    core = make_core(1, arena_bytes=2 * MIB)
    core.connect()
    exchange = CoreExchange.register(core)
    gone, put = exchange.begin("gone"), exchange.begin("a")
    exchange.put(gone, "x", MIB)
    waits = exchange.put(put, "y", MIB, at=512)
    assert len(core.jobs("cpu:0")) == 1
    core.fail("cpu:0", "out_of_memory")
    core.finish_all()
    assert isinstance(core.final(1, waits), PartStored)


def test_tokens_of_puts_count_against_the_budget_of_bytes(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=MIB)
    core.connect()
    exchange = CoreExchange.register(core)
    catalog = core.core.state.catalog
    many = range(100_000)
    for name in ("a", "b"):
        assert isinstance(exchange.put_whole(name, {"x": 0}, many), Captured)
    assert catalog.put_token_bytes == 2 * 400_000
    third = exchange.begin("c", many)  # the least recently used one makes room
    assert [image.conversation for image in catalog.images.values()] == ["b"]
    other = exchange.begin("d", many)
    assert not catalog.images
    request = PutBegin(core.next_seq(), exchange.engine_id, "e", pack_tokens(many))
    core.ask(1, request)
    assert code(core, request.seq) == "no_space"
    too_many = PutBegin(core.next_seq(), exchange.engine_id, "e", bytes(MIB + 4))
    core.ask(1, too_many)
    assert code(core, too_many.seq) == "too_large"
    exchange.abort(other)
    assert code(core, exchange.put(third, "x", MIB)) == "no_space"
    exchange.put(third, "y", MIB // 2)
    core.finish_all()
    assert isinstance(exchange.commit(third), Captured)


def test_limits_of_a_put(make_core: MakeCore) -> None:
    core = make_core(1)
    core.connect()
    exchange = CoreExchange.register(core)
    put = exchange.begin("a")
    for number in range(PART_LIMIT):
        exchange.put(put, f"{number}", 0)
    assert code(core, exchange.put(put, "one more", 0)) == "too_many"
    assert isinstance(exchange.commit(put), Captured)
    put = exchange.begin("a")
    exchange.put(put, "n" * 256, 10, meta="m" * 512)
    core.fail("cpu:0")  # nothing of it counts any more
    for number in range(1365):
        last = exchange.put(put, f"{number}".rjust(256, "0"), 0, meta="m" * 512)
        assert isinstance(core.final(1, last), PartStored)
    assert code(core, exchange.put(put, "n" * 256, 0, meta="m" * 512)) == "too_many"
    for _ in range(63):
        exchange.begin("b")
    request = PutBegin(core.next_seq(), exchange.engine_id, "b")
    core.ask(1, request)
    assert code(core, request.seq) == "too_many"
    for bad in (PutBegin(core.next_seq(), exchange.engine_id, ""), PutBegin(core.next_seq(), 77, "a")):
        core.ask(1, bad)
        assert code(core, bad.seq) in ("bad_value", "not_registered")
    odd = PutBegin(core.next_seq(), exchange.engine_id, "a", b"123")
    core.ask(1, odd)
    assert code(core, odd.seq) == "bad_tokens"


def test_a_piece_of_too_many_runs_is_refused_unread(
    core: Harness, exchange: CoreExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratad.core.row_lists.RUN_LIMIT", 2)
    put = exchange.begin("a")
    part = PutPart(core.next_seq(), exchange.engine_id, put, "x", 3 * EXCHANGE_ROW_BYTES, bytes(8 * 3))
    core.ask(1, part)
    assert code(core, part.seq) == "too_large"


def test_a_put_of_too_many_chunks_is_refused(
    core: Harness, exchange: CoreExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratad.core.exchange.CHUNK_LIMIT", 2)
    put = exchange.begin("a")
    assert code(core, exchange.put(put, "x", 2 * MIB + 1)) == "too_large"
    exchange.put(put, "x", MIB)
    exchange.put(put, "y", 10, at=600)
    core.finish_all()
    assert code(core, exchange.put(put, "z", 10)) == "too_large"
    exchange.put(put, "nothing", 0)
    assert isinstance(exchange.commit(put), Captured)


def test_an_aborted_put_ends_its_parts_that_wait(core: Harness, exchange: CoreExchange) -> None:
    put, other = exchange.begin("a"), exchange.begin("b")
    core.auto = False
    core.worker_gone("cpu:0")
    waits, stays = exchange.put(put, "x", MIB), exchange.put(other, "x", MIB, at=600)
    exchange.abort(put)
    assert code(core, waits) == "cancelled"
    assert [type(reply) for reply in core.answers(1, stays)] == [Progress]


def test_a_put_never_evicts_the_image_that_it_will_replace(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=3 * MIB)
    core.connect()
    exchange = CoreExchange.register(core)
    former = exchange.put_whole("a", {"x": MIB})
    core.content = lambda stage, chunk: bytes([1, chunk]) * 8
    exchange.put_whole("b", {"x": MIB})
    put = exchange.begin("a")
    for name in ("x", "y"):
        exchange.put(put, name, MIB)
        core.finish_all()
    assert isinstance(former, Captured)
    assert list(core.core.state.catalog.images) == [former.image_id]
    assert code(core, exchange.put(put, "z", MIB)) == "no_space"
    assert list(core.core.state.catalog.images) == [former.image_id]
    assert isinstance(exchange.commit(put), Captured)
    assert former.image_id not in core.core.state.catalog.images
