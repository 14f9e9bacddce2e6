"""Gets through the core: an image is held while it is read, every part by its own digests, and only by its owners."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    Capture,
    Captured,
    Clear,
    CudaIpcPool,
    Done,
    Drop,
    Failed,
    GetBegin,
    GetPart,
    MemfdPool,
    PartLoaded,
    PutAbort,
    PutBegin,
    PutCommit,
    PutPart,
    Register,
    Reply,
    Request,
    Restore,
    RestoreJob,
    SlotTo,
    Stage,
)
from shm.extent import GRANULE_BYTES, unpack_places
from shm.layout import Plane, RowGroup, StageLayout
from shm.rows import pack_rows
from tests.support.core_exchange import STEP, CoreExchange, exchange_layout
from tests.support.core_harness import FINGERPRINT, MIB, Harness, layout, pack_tokens

MakeCore = Callable[..., Harness]
ROW = pack_rows([(0, 1)])


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core(2)
    harness.connect()
    return harness


@pytest.fixture
def exchange(core: Harness) -> CoreExchange:
    return CoreExchange.register(core)


def code(core: Harness, seq: int, client: int = 1) -> str:
    return core.failure(client, seq).code


def code_of(reply: Reply) -> str:
    assert isinstance(reply, Failed), reply
    return reply.code


def test_parts_are_loaded_by_their_own_digests_and_places(core: Harness, exchange: CoreExchange) -> None:
    put = exchange.begin("a")
    core.content = lambda stage, chunk: bytes([7, chunk]) * 8
    exchange.put(put, "x", MIB + 1)
    core.finish_all()
    core.content = lambda stage, chunk: bytes([9, chunk]) * 8
    exchange.put(put, "y", 3 * 4096)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)
    (image,) = core.core.state.catalog.images.values()
    got = exchange.open("a")
    for part, first, count, at in ((0, 0, STEP, 0), (0, STEP, 1, 1), (0, 0, STEP + 1, 0), (1, 0, 3, 2)):
        seq = exchange.get(got.get_id, part, 0, at=5, first_row=first, rows=count)
        (job,) = core.jobs("cpu:0")
        assert isinstance(job, RestoreJob)
        chunks = image.stages[0][at : at - (-count // STEP)]
        assert job.digests == b"".join(chunk.key.digest for chunk in chunks)
        assert unpack_places(job.places) == [chunk.place for chunk in chunks]
        assert (job.tokens, job.image_tokens, job.rows) == (count, count, (pack_rows([(5, count)]),))
        core.finish_all()
        assert isinstance(core.final(1, seq), PartLoaded)


def test_a_held_image_is_not_evicted_and_stays_readable_when_dropped(make_core: MakeCore) -> None:
    core = make_core(1, budget_bytes=2 * MIB)
    core.connect()
    exchange = CoreExchange.register(core)
    exchange.put_whole("a", {"x": MIB})
    got = exchange.open("a")
    put = exchange.begin("b")
    assert code(core, exchange.put(put, "y", 2 * MIB)) == "no_space"
    core.ask(1, Drop(core.next_seq(), "ns", "a"))
    assert code_of(exchange.try_open("a")) == "unknown_conversation"
    assert core.core.state.catalog.used_bytes == MIB
    seq = exchange.get(got.get_id, 0, MIB)
    core.finish_all()
    assert isinstance(core.final(1, seq), PartLoaded)
    late = exchange.get(got.get_id, 0, MIB)
    assert isinstance(exchange.close(got.get_id), Done)
    assert core.core.state.catalog.used_bytes == MIB  # the part that is being copied
    core.finish_all()
    assert isinstance(core.final(1, late), PartLoaded)
    assert core.core.state.catalog.used_bytes == 0
    exchange.put(put, "y", 2 * MIB)
    core.finish_all()
    assert isinstance(exchange.commit(put), Captured)
    assert code(core, exchange.get(got.get_id, 0, MIB)) == "unknown_get"
    assert code_of(exchange.close(got.get_id)) == "unknown_get"


def test_an_image_is_held_by_each_get_until_its_own_end(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": 10})
    (image,) = core.core.state.catalog.images.values()
    one, two = exchange.open("a"), exchange.open(image_id=image.image_id, conversation="")
    assert one.image_id == two.image_id
    assert (image.readers, image.restores) == (2, 2)
    exchange.close(one.get_id)
    assert not image.evictable
    core.perform(core.core.client_gone(1, core.at))
    assert image.evictable


def test_a_damaged_part_flags_the_image_and_the_other_parts_stay_readable(
    core: Harness, exchange: CoreExchange
) -> None:
    exchange.put_whole("a", {"x": MIB, "y": MIB + 1})
    got = exchange.open("a")
    seq = exchange.get(got.get_id, 1, MIB + 1)
    core.fail("cpu:0", "damaged", chunk=1)
    assert code(core, seq) == "damaged"
    (image,) = core.core.state.catalog.images.values()
    assert [chunk.damaged for chunk in image.chunks()] == [False, False, True]
    assert code_of(exchange.try_open("a")) == "damaged"
    seq = exchange.get(got.get_id, 0, MIB)
    core.finish_all()
    assert isinstance(core.final(1, seq), PartLoaded)
    exchange.put_whole("a", {"y": MIB + 1})
    assert exchange.open("a").image_id != image.image_id


def test_a_worker_that_dies_leaves_the_rows_it_was_to_write_undefined(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": 8192})
    got = exchange.open("a")
    seq = exchange.get(got.get_id, 0, 8192, at=4)
    core.worker_gone("cpu:0")
    failure = core.failure(1, seq)
    assert (failure.code, failure.stages[0].rows_undefined) == ("worker_died", (pack_rows([(4, 2)]),))
    core.tick(1.0)
    seq = exchange.get(got.get_id, 0, 8192, at=4)
    core.finish_all()
    assert isinstance(core.final(1, seq), PartLoaded)


def test_wrong_gets_are_refused(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": 2 * MIB, "empty": 0})
    got = exchange.open("a").get_id
    cases = [
        (exchange.get(got, 2, 10), "unknown_part"),
        (exchange.get(got, -1, 10), "unknown_part"),
        (exchange.get(got, 0, 0, rows=2 * STEP + 1), "bad_rows"),
        (exchange.get(got, 0, 0, rows=STEP - 1), "bad_rows"),
        (exchange.get(got, 0, 0, first_row=1, rows=STEP), "bad_rows"),
        (exchange.get(got, 0, 0, first_row=1, rows=STEP - 1), "bad_rows"),
        (exchange.get(got, 0, 0, rows=0), "bad_rows"),
        (exchange.get(got, 0, 0, first_row=2 * STEP, rows=0), "bad_rows"),
        (exchange.get(got, 0, 0, first_row=-STEP, rows=STEP), "bad_rows"),
        (exchange.get(got, 0, 0, at=2000, rows=STEP), "bad_rows"),
        (exchange.get(got, 1, 0, rows=1), "bad_rows"),
        (exchange.get(got + 1, 0, 10), "unknown_get"),
    ]
    assert [(code(core, seq), expected) for seq, expected in cases if code(core, seq) != expected] == []
    assert not core.jobs("cpu:0")
    assert isinstance(core.final(1, exchange.get(got, 1, 0)), PartLoaded)
    assert code_of(exchange.try_open("")) == "bad_value"
    assert code_of(exchange.try_open("nobody")) == "unknown_conversation"
    for _ in range(63):
        exchange.open("a")
    assert code_of(exchange.try_open("a")) == "too_many"


def test_nobody_reaches_into_what_is_not_his(core: Harness, exchange: CoreExchange) -> None:
    """Every number of another client, namespace or kind of engine is refused, and changes nothing."""
    done = exchange.put_whole("a", {"x": 10})
    assert isinstance(done, Captured)
    got = exchange.open("a").get_id
    put = exchange.begin("b")
    core.connect(2)
    thief = CoreExchange.register(core, 2, namespace="other")
    fellow = CoreExchange.register(core, 2)
    away = CoreExchange.register(core, 2, worker="cpu:1")
    stolen: list[tuple[Request, str]] = []
    for engine_id, expected in ((exchange.engine_id, "not_registered"), (fellow.engine_id, "unknown_put")):
        stolen += [
            (PutPart(core.next_seq(), engine_id, put, "x", 10, ROW), expected),
            (PutCommit(core.next_seq(), engine_id, put), expected),
            (PutAbort(core.next_seq(), engine_id, put), expected),
        ]
    stolen += [
        (GetPart(core.next_seq(), exchange.engine_id, got, 0, ROW), "not_registered"),
        (GetPart(core.next_seq(), fellow.engine_id, got, 0, ROW), "unknown_get"),
        (PutBegin(core.next_seq(), exchange.engine_id, "a"), "not_registered"),
        (GetBegin(core.next_seq(), exchange.engine_id, "a"), "not_registered"),
        (GetBegin(core.next_seq(), thief.engine_id, "", done.image_id), "unknown_image"),
        (GetBegin(core.next_seq(), thief.engine_id, "a"), "unknown_conversation"),
        (GetBegin(core.next_seq(), away.engine_id, "a"), "foreign_device"),
    ]
    for request, expected in stolen:
        core.ask(2, request)
        assert code(core, request.seq, 2) == expected, request
    assert len(core.core.state.engines[exchange.engine_id].puts) == 1
    assert code_of(thief.try_open("b")) == "unknown_conversation"
    assert isinstance(fellow.try_open("a"), type(exchange.open("a")))


def test_captures_and_puts_keep_to_their_own_kind(core: Harness, exchange: CoreExchange) -> None:
    plain = core.register(stages=1, layouts=[exchange_layout()])
    exchange.put_whole("put", {"x": 10}, range(8))
    core.capture(plain, "captured", range(8))
    core.finish_all()
    for request, expected in (
        (PutBegin(core.next_seq(), plain, "a"), "bad_request"),
        (GetBegin(core.next_seq(), plain, "put"), "bad_request"),
        (
            Capture(core.next_seq(), exchange.engine_id, "a", pack_tokens([1]), ((ROW,),), 0, "host"),
            "bad_request",
        ),
        (Restore(core.next_seq(), exchange.engine_id, "captured", ((ROW,),), 0, "host"), "bad_request"),
        (SlotTo(core.next_seq(), exchange.engine_id, 1, ((ROW,),), 0, "host"), "bad_request"),
        (Restore(core.next_seq(), plain, "put", ((ROW,),), 0, "host"), "fingerprint_mismatch"),
        (GetBegin(core.next_seq(), exchange.engine_id, "captured"), "fingerprint_mismatch"),
    ):
        core.ask(1, request)
        assert code(core, request.seq) == expected, request


def test_the_other_way_is_named_to_who_asks_for_an_image_of_the_other_kind(
    core: Harness, exchange: CoreExchange
) -> None:
    plain = core.register(stages=1, layouts=[exchange_layout()])
    exchange.put_whole("put", {"x": 10})
    core.capture(plain, "captured", range(8))
    core.finish_all()
    restore = Restore(core.next_seq(), plain, "put", ((ROW,),), 0, "host")
    core.ask(1, restore)
    failure = core.failure(1, restore.seq)
    assert failure.message.endswith("was put as parts: read it through an exchange")
    assert "layout.exchange" in failure.detail
    get = GetBegin(core.next_seq(), exchange.engine_id, "captured")
    core.ask(1, get)
    assert core.failure(1, get.seq).message.endswith("was captured: restore it into an engine")


@pytest.mark.parametrize(
    "bad",
    [
        layout(),
        layout(state=True),
        StageLayout((RowGroup((Plane(0, 4096, 8192, 8),)),)),
        StageLayout((RowGroup((Plane(0, 4096, 4096, 8, 2),)),)),
        StageLayout((RowGroup((Plane(0, 4096, 4096, 8),), 4),)),
        StageLayout((RowGroup((Plane(0, 4096, 4096, 8), Plane(32768, 4096, 4096, 8))),)),
        StageLayout((RowGroup((Plane(0, 4096, 4096, 8),)), RowGroup((Plane(32768, 4096, 4096, 8),)))),
    ],
)
def test_what_is_no_exchange_is_refused(core: Harness, bad: StageLayout) -> None:
    stage = Stage(0, "cpu:0", MemfdPool(5, bad.end_bytes), bad)
    request = Register(core.next_seq(), "ns", "e", FINGERPRINT, (stage,), exchange=True)
    core.ask(1, request)
    assert code(core, request.seq) == "bad_layout"


def test_an_exchange_has_one_stage_and_may_lie_beside_a_gpu(make_core: MakeCore) -> None:
    core = make_core(devices={"gpu0": "GPU-1", "gpu1": "GPU-2"})
    core.connect()
    good = exchange_layout()
    stages = tuple(Stage(n, f"GPU-{n + 1}", MemfdPool(n + 1, good.end_bytes), good) for n in range(2))
    on_device = (Stage(0, "GPU-1", CudaIpcPool(bytes(64), good.end_bytes, 0, good.end_bytes), good),)
    for bad in (stages, on_device):
        request = Register(core.next_seq(), "ns", "e", FINGERPRINT, bad, exchange=True)
        core.ask(1, request)
        assert code(core, request.seq) == "bad_layout"
    exchange = CoreExchange.register(core, worker="gpu1")
    put = exchange.begin("a")
    exchange.put(put, "x", GRANULE_BYTES)
    core.finish("gpu1", stage=0)
    assert isinstance(exchange.commit(put), Captured)


def test_clear_and_stop_treat_puts_as_images(core: Harness, exchange: CoreExchange) -> None:
    exchange.put_whole("a", {"x": 10})
    put = exchange.begin("b")
    exchange.put(put, "x", 10)
    core.finish_all()
    clear = Clear(core.next_seq(), "ns")
    assert core.ask(1, clear) == [Done(clear.seq, 1)]
    assert isinstance(exchange.commit(put), Captured)
    core.perform(core.core.stop(core.at))
    request = PutBegin(core.next_seq(), exchange.engine_id, "c")
    core.ask(1, request)
    assert code(core, request.seq) == "stopping"
