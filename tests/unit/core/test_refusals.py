"""Bad requests: each a coded refusal that names what was wrong, and nothing is changed."""

from collections.abc import Callable

import msgspec
import pytest

from ipc.codec import encode
from ipc.messages import (
    PROTOCOL_VERSION,
    Capture,
    Clear,
    CudaIpcPool,
    Done,
    Drop,
    Failed,
    Hello,
    Images,
    ListImages,
    Lookup,
    Mark,
    MemfdPool,
    OpenPool,
    Pin,
    PoolOpened,
    Register,
    Registered,
    Release,
    Restore,
    Show,
    SlotDirect,
    SlotDrop,
    Stage,
    Stats,
    Unregister,
)
from shm.layout import Plane
from shm.rows import pack_numbers, pack_rows
from stratad.core import registration
from stratad.core.core import SURPLUS_TOLD_EVERY_S
from stratad.core.effects import CloseDescriptor, LogLine
from tests.support.core_harness import FINGERPRINT, ROWS, Harness, layout, pack_tokens
from tests.support.layouts import stage_layout


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def good_capture(core: Harness, engine: int) -> Capture:
    return Capture(core.next_seq(), engine, "a", pack_tokens(range(10)), ((pack_rows([(0, 10)]),),), 0, "host")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"engine_id": 77}, "not_registered"),
        ({"conversation": ""}, "bad_value"),
        ({"conversation": "a\0b"}, "bad_value"),
        ({"conversation": "x" * 600}, "bad_value"),
        ({"tokens": b""}, "bad_tokens"),
        ({"tokens": b"123"}, "bad_tokens"),
        ({"rows": ()}, "bad_rows"),
        ({"rows": ((b"1234",),)}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 10)]),),) * 3}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 9)]),),)}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 11)]),),)}, "bad_rows"),
        ({"rows": ((pack_rows([(ROWS - 9, 10)]),),)}, "bad_rows"),
        ({"rows": ((pack_rows([(0, 5), (4, 5)]),),)}, "bad_rows"),
        ({"rows": ((pack_rows([(5, 0)]),),)}, "bad_rows"),
        ({"slot": -1}, "bad_value"),
        ({"ordered": ""}, "bad_value"),
        ({"ordered": "device"}, "bad_value"),
        ({"positions": pack_numbers((10,))}, "bad_state"),
        ({"positions": b"123"}, "bad_state"),
        ({"rows": ((pack_rows([(0, 10)]),) * 2,)}, "bad_rows"),
    ],
)
def test_capture(core: Harness, change: dict[str, object], code: str) -> None:
    engine = core.register()
    request = msgspec.structs.replace(good_capture(core, engine), **change)
    core.ask(1, request)
    assert core.failure(1, request.seq).code == code
    assert not core.core.state.ops
    assert not len(core.core.state.fences)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"conversation": "none"}, "unknown_conversation"),
        ({"image_id": 99}, "unknown_image"),
        ({"tokens": 0}, "bad_tokens"),
        ({"tokens": 11}, "bad_tokens"),
        ({"tokens": -2}, "bad_tokens"),
        ({"rows": ((pack_rows([(0, 9)]),),)}, "bad_rows"),
    ],
)
def test_restore(core: Harness, change: dict[str, object], code: str) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    request = Restore(core.next_seq(), engine, "a", ((pack_rows([(0, 10)]),),), 0, "host")
    request = msgspec.structs.replace(request, **change)
    core.ask(1, request)
    assert core.failure(1, request.seq).code == code
    assert not core.core.state.ops


@pytest.mark.parametrize("field", [*FINGERPRINT, "rope_scaling"])
def test_a_fingerprint_that_differs_in_one_field_is_refused_by_name(core: Harness, field: str) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    other = core.register(fingerprint={**FINGERPRINT, field: "other"})
    seq = core.restore(other, "a", rows=10)
    failure = core.failure(1, seq)
    assert failure.code == "fingerprint_mismatch"
    assert list(failure.detail) == [field]
    look = Lookup(core.next_seq(), other, pack_tokens(range(10)))
    core.ask(1, look)
    assert core.final(1, look.seq).match == "miss"  # type: ignore[union-attr]


def test_another_shape_of_rows_is_refused_by_name(core: Harness) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    half = stage_layout((Plane(0, 512, 1024, ROWS), Plane(512, 512, 1024, ROWS)), None, 256)
    other = core.register(layouts=[layout(), half])
    failure = core.failure(1, core.restore(other, "a", rows=10))
    assert failure.code == "fingerprint_mismatch"
    assert list(failure.detail) == ["layout.groups.1"]


@pytest.mark.parametrize("value", ["", "auto", "None", " unknown "])
@pytest.mark.parametrize("field", list(FINGERPRINT))
def test_an_unresolved_fingerprint_is_refused(core: Harness, field: str, value: str) -> None:
    one = layout()
    stages = (Stage(0, "cpu:0", MemfdPool(1, one.end_bytes), one),)
    request = Register(core.next_seq(), "ns", "e", {**FINGERPRINT, field: value}, stages)
    core.ask(1, request)
    failure = core.failure(1, request.seq)
    assert failure.code == "fingerprint_missing"
    assert failure.detail == {"field": field}
    assert not core.core.state.engines


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ((), "bad_value"),
        ((Stage(1, "cpu:0", MemfdPool(1, ROWS * 1024), layout()),), "bad_value"),
        ((Stage(0, "cpu:9", MemfdPool(1, ROWS * 1024), layout()),), "foreign_device"),
        ((Stage(0, "cpu:0", MemfdPool(1, ROWS * 1024 - 1), layout()),), "bad_layout"),
        ((Stage(0, "cpu:0", MemfdPool(1, ROWS * 1024), stage_layout((), None, 256)),), "bad_layout"),
        (
            (Stage(0, "cpu:0", MemfdPool(1, ROWS * 1024), msgspec.structs.replace(layout(), chunk_tokens=128)),),
            "bad_layout",
        ),
        (
            (Stage(0, "cpu:0", MemfdPool(1, 2**40), stage_layout((Plane(0, 2**23, 2**23, ROWS),), None, 256)),),
            "bad_layout",
        ),
    ],
)
def test_register(core: Harness, stages: tuple[Stage, ...], code: str) -> None:
    request = Register(core.next_seq(), "ns", "e", FINGERPRINT, stages)
    core.ask(1, request)
    assert core.failure(1, request.seq).code == code
    assert not core.core.state.engines
    assert not core.core.state.pools


@pytest.mark.parametrize("version", [-1, 0, 1, PROTOCOL_VERSION + 1, 9999])
def test_other_versions_are_refused_with_both_named(core: Harness, version: int) -> None:
    core.perform(core.core.client_connected(2, 1, 1000, 1, core.at))
    hello = Hello(core.next_seq(), version, b"")
    core.ask(2, hello)
    failure = core.failure(2, hello.seq)
    assert failure.code == "wrong_version"
    assert f"version {PROTOCOL_VERSION}, the client {version}" in failure.message


def test_nothing_is_served_before_the_hello(core: Harness) -> None:
    core.perform(core.core.client_connected(2, 1, 1000, 1, core.at))
    stats = Stats(core.next_seq())
    core.ask(2, stats)
    assert core.failure(2, stats.seq).code == "hello_first"


def test_a_request_number_in_flight_is_not_used_twice(core: Harness) -> None:
    engine = core.register()
    request = good_capture(core, engine)
    core.ask(1, request)
    core.ask(1, msgspec.structs.replace(request, conversation="b"))
    assert core.answers(1, request.seq)[-1].code == "bad_request"  # type: ignore[union-attr]
    assert len(core.core.state.ops) == 1
    core.finish_all()


def test_namespaces_belong_to_their_uid(core: Harness) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    core.connect(2, uid=2000)
    one = layout()
    stages = (Stage(0, "cpu:0", MemfdPool(1, one.end_bytes), one),)
    register = Register(core.next_seq(), "ns", "e", FINGERPRINT, stages)
    core.ask(2, register)
    assert core.failure(2, register.seq).code == "not_permitted"
    show = Show(core.next_seq(), "ns", "a")
    core.ask(2, show)
    assert core.failure(2, show.seq).code == "not_permitted"
    core.connect(3, uid=0)
    show = Show(core.next_seq(), "ns", "a")
    core.ask(3, show)
    assert core.final(3, show.seq).image.conversation == "a"  # type: ignore[union-attr]


def test_a_stranger_neither_sees_nor_changes_what_is_in_a_namespace(core: Harness) -> None:
    core.connect(2, uid=2000)
    engine = core.register(2)
    core.capture(engine, "a", range(10), client=2)
    core.finish_all()
    core.connect(3, uid=3000)
    before = dict(core.core.state.catalog.images)
    for request in (
        Show(core.next_seq(), "ns", "a"),
        Drop(core.next_seq(), "ns", "a", force=True),
        Pin(core.next_seq(), "ns", "a", True),
        Clear(core.next_seq(), "ns"),
        ListImages(core.next_seq(), "ns"),
        Lookup(core.next_seq(), engine, pack_tokens(range(10))),
        Mark(core.next_seq(), engine, 0, "poisoned"),
        SlotDrop(core.next_seq(), engine, 0),
        Unregister(core.next_seq(), engine),
    ):
        core.ask(3, request)
        assert core.failure(3, request.seq).code in ("not_permitted", "not_registered"), request
    assert core.core.state.catalog.images == before
    assert not any(image.pinned for image in before.values())
    for client, seen in ((2, 1), (3, 0), (1, 1)):  # the third is an administrator
        request = ListImages(core.next_seq())
        (reply,) = core.ask(client, request)
        assert isinstance(reply, Images)
        assert len(reply.images) == seen


def test_of_two_users_who_want_a_new_namespace_at_once_one_gets_it(make_core: Callable[..., Harness]) -> None:
    core = make_core()
    core.auto = False
    one, asked = layout(), {2: 2000, 3: 3000}
    for client, uid in asked.items():
        core.connect(client, uid)
        stages = (Stage(0, "cpu:0", MemfdPool(1, one.end_bytes), one),)
        core.ask(client, Register(client, "ns", "e", FINGERPRINT, stages))
    for command in [command for command in core.sent["cpu:0"] if isinstance(command, OpenPool)]:
        core.report("cpu:0", PoolOpened(command.pool))
    assert isinstance(core.final(2, 2), Registered)
    assert core.failure(3, 3).code == "not_permitted"
    assert core.core.state.owners == {"ns": 2000}


def test_a_namespace_is_its_owners_as_long_as_anything_is_in_it(core: Harness) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    core.ask(1, Unregister(core.next_seq(), engine))
    core.connect(2, uid=2000)

    def register() -> Register:
        one = layout()
        stages = (Stage(0, "cpu:0", MemfdPool(1, one.end_bytes), one),)
        request = Register(core.next_seq(), "ns", "e", FINGERPRINT, stages)
        core.ask(2, request)
        return request

    before = dict(core.core.state.numbers)
    assert core.failure(2, register().seq).code == "not_permitted"
    assert core.core.state.numbers == before  # no worker was troubled
    core.ask(1, Clear(core.next_seq(), "ns"))
    core.final(2, register().seq)
    assert core.core.state.owners == {"ns": 2000}


def test_owners_of_namespaces_that_are_gone_are_forgotten(core: Harness) -> None:
    state = core.core.state
    engine = core.register()
    state.owners |= {f"gone-{n}": 1000 for n in range(registration.KNOWN_NAMESPACES)}
    core.register(namespace="second")
    assert state.owners.keys() == {"ns", "second"}
    assert engine in state.engines


def test_admins_may_touch_what_is_not_theirs(make_core: Callable[..., Harness]) -> None:
    core = make_core(admins=frozenset({0, 3000}))
    core.connect()
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    for client, (uid, allowed) in enumerate([(3000, True), (0, True), (2000, False)], start=2):
        core.connect(client, uid=uid)
        show = Show(core.next_seq(), "ns", "a")
        core.ask(client, show)
        code = "" if not isinstance(found := core.final(client, show.seq), Failed) else found.code
        assert code == ("" if allowed else "not_permitted")


def test_engines_of_another_client_cannot_be_used(core: Harness) -> None:
    engine = core.register()
    core.connect(2)
    request = good_capture(core, engine)
    core.ask(2, request)
    assert core.failure(2, request.seq).code == "not_registered"


def test_too_many_clients_and_operations(make_core: Callable[..., Harness]) -> None:
    core = make_core(max_ops=2, max_clients=1)
    core.connect()
    engine = core.register()
    for name in "abc":
        last = core.capture(engine, name)
    assert core.failure(1, last).code == "too_many"
    core.perform(core.core.client_connected(2, 1, 1000, 1, core.at))
    hello = Hello(core.next_seq(), PROTOCOL_VERSION, b"")
    core.ask(2, hello)
    assert core.failure(2, hello.seq).code == "too_many"
    assert 2 in core.dropped
    core.finish_all()


def test_a_flood_of_clients_is_a_log_line_a_while(make_core: Callable[..., Harness]) -> None:
    core = make_core(max_clients=1)
    core.connect()

    def told() -> list[dict[str, object]]:
        lines = [effect for effect in core.effects if isinstance(effect, LogLine)]
        return [dict(line.fields) for line in lines if line.message == "too many clients"]

    for client in range(2, 22):
        core.perform(core.core.client_connected(client, 7, 1000, 1, core.at))
    assert told() == [{"client": 2, "pid": 7, "limit": 1, "count": 1}]
    core.tick(SURPLUS_TOLD_EVERY_S)
    core.perform(core.core.client_connected(22, 7, 1000, 1, core.at))
    assert told()[1:] == [{"client": 22, "pid": 7, "limit": 1, "count": 20}]


def test_blocks_that_cannot_locate_tokens_are_captured_to_the_last_full_one(core: Harness) -> None:
    paged = layout(rows=64, tokens_per_row=16)
    engine = core.register(layouts=[paged, paged])
    request = Capture(
        core.next_seq(), engine, "a", pack_tokens(range(40)), ((pack_rows([(9, 1), (3, 2)]),),), 0, "host"
    )
    core.ask(1, request)
    core.finish_all()
    assert core.final(1, request.seq).tokens == 32  # type: ignore[union-attr]
    few = Capture(core.next_seq(), engine, "b", pack_tokens(range(5)), ((pack_rows([(9, 1)]),),), 0, "host")
    core.ask(1, few)
    assert core.failure(1, few.seq).code == "bad_tokens"


def test_a_gpu_stage_without_an_event_cannot_be_ordered_by_one(make_core: Callable[..., Harness]) -> None:
    core = make_core(1, devices={"gpu": "GPU-1"})
    core.connect()
    one = layout()
    pool = CudaIpcPool(bytes(64), one.end_bytes, 0, one.end_bytes)
    register = Register(core.next_seq(), "ns", "e", FINGERPRINT, (Stage(0, "GPU-1", pool, one),))
    core.ask(1, register)
    engine = core.final(1, register.seq).engine_id  # type: ignore[union-attr]
    request = msgspec.structs.replace(good_capture(core, engine), ordered="event")
    core.ask(1, request)
    assert core.failure(1, request.seq).code == "bad_value"


def test_a_refused_registration_gives_its_descriptors_back(core: Harness) -> None:
    one = layout()
    stages = (Stage(0, "cpu:0", MemfdPool(11, one.end_bytes), one), Stage(1, "cpu:9", MemfdPool(12, 1), one))
    core.ask(1, Register(core.next_seq(), "ns", "e", FINGERPRINT, stages))
    assert [e.descriptor for e in core.effects if isinstance(e, CloseDescriptor)] == [11, 12]


def test_an_image_of_too_many_chunks_is_refused_before_anything_is_built(make_core: Callable[..., Harness]) -> None:
    core = make_core(1, chunk_tokens=1)
    core.connect()
    many = stage_layout((Plane(0, 8, 8, 40_000),), None, 1)
    engine = core.register(layouts=[many], stages=1)
    seq = core.capture(engine, tokens=range(32_769))
    assert core.failure(1, seq).code == "too_large"
    assert core.core.state.catalog.used_bytes == 0


def test_the_chunks_of_an_image_are_counted_before_its_rows_are_read(make_core: Callable[..., Harness]) -> None:
    core = make_core(1, chunk_tokens=1)
    core.connect()
    engine = core.register(layouts=[stage_layout((Plane(0, 8, 8, 40_000),), None, 1)], stages=1)
    request = msgspec.structs.replace(
        good_capture(core, engine), tokens=pack_tokens(range(32_769)), rows=((b"no runs",),)
    )
    core.ask(1, request)
    assert core.failure(1, request.seq).code == "too_large"


def test_runs_are_counted_for_every_kind_of_stage_before_any_is_read(
    make_core: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(2)
    core.connect()
    engine = core.register(layouts=[layout(), layout(rows=ROWS // 2)])
    monkeypatch.setattr("stratad.core.row_lists.RUN_LIMIT", 10)
    six = (pack_rows([(2 * n, 1) for n in range(6)]),)
    request = msgspec.structs.replace(good_capture(core, engine), tokens=pack_tokens(range(6)), rows=(six,))
    core.ask(1, request)
    failure = core.failure(1, request.seq)
    assert failure.code == "too_large"
    assert "12 runs" in failure.message
    monkeypatch.setattr("stratad.core.row_lists.RUN_LIMIT", 12)
    request = msgspec.structs.replace(request, seq=core.next_seq())
    core.ask(1, request)
    core.finish_all()
    assert core.final(1, request.seq).tokens == 6  # type: ignore[union-attr]


def test_runs_of_operations_in_flight_have_a_limit(core: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core.register()  # two stages of one kind: their rows are one list
    monkeypatch.setattr("stratad.core.queue.RUNS_IN_FLIGHT_LIMIT", 10)
    copy = SlotDirect(
        core.next_seq(),
        engine,
        3,
        ((pack_rows([(0, 1), (2, 1), (4, 1)]),),),
        ((pack_rows([(10, 1), (12, 1), (14, 1)]),),),
        0,
        1,
        "host",
    )
    core.ask(1, copy)
    other = msgspec.structs.replace(copy, seq=core.next_seq(), target_rows=((pack_rows([(20, 2), (30, 1)]),),))
    core.ask(1, other)
    failure = core.failure(1, other.seq)
    assert (failure.code, "6 runs of rows, this one has 5" in failure.message) == ("too_many", True)
    core.finish_all()
    again = msgspec.structs.replace(other, seq=core.next_seq())
    core.ask(1, again)
    core.finish_all()
    assert core.final(1, again.seq).tokens == 3  # type: ignore[union-attr]
    core.core.validate()


def test_no_more_rows_are_written_than_a_failure_can_name(make_core: Callable[..., Harness]) -> None:
    core = make_core(2, max_message_bytes=1024)
    core.connect()
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    full = 768 // 2 // 8  # runs of a list that both stages share

    def copy(runs: int) -> SlotDirect:
        apart = (pack_rows([(1000 + 2 * n, 1) for n in range(runs)]),)
        return SlotDirect(core.next_seq(), engine, runs, ((pack_rows([(0, runs)]),),), (apart,), 0, 1, "host")

    core.ask(1, refused := copy(full + 1))
    failure = core.failure(1, refused.seq)
    assert (failure.code, "784 bytes of runs" in failure.message) == ("too_large", True)
    core.ask(1, taken := copy(full))
    for worker in ("cpu:0", "cpu:1"):
        core.worker_gone(worker)
    failure = core.failure(1, taken.seq)
    assert len(encode(failure)) <= 1024 + 256  # what it says besides the rows is more than a quarter of so little
    assert [len(rows) for outcome in failure.stages for rows in outcome.rows_undefined] == [full * 8, full * 8]


def test_more_runs_than_rows_are_refused_unread(core: Harness) -> None:
    engine = core.register()
    request = msgspec.structs.replace(good_capture(core, engine), rows=((bytes(8 * 11),),))
    core.ask(1, request)
    failure = core.failure(1, request.seq)
    assert failure.code == "bad_rows"
    assert "11 runs" in failure.message


def test_a_restore_of_all_tokens_uses_the_first_of_the_rows(core: Harness) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    request = Restore(core.next_seq(), engine, "a", ((pack_rows([(100, 50)]),),), 0, "host")
    core.ask(1, request)
    (job,) = core.jobs("cpu:0")
    assert job.rows == (pack_rows([(100, 10)]),)
    beside = core.restore(engine, "a", rows=10, first_row=110)
    core.finish_all()
    assert core.final(1, request.seq).tokens == 10  # type: ignore[union-attr]
    assert core.final(1, beside).tokens == 10  # type: ignore[union-attr]


def test_stats_show_a_user_only_what_is_theirs(core: Harness) -> None:
    core.register(namespace="mine")
    core.connect(2, uid=2000)
    core.register(2, namespace="theirs")
    stats = Stats(core.next_seq())
    core.ask(2, stats)
    core.tick(1.0)
    assert [e.namespace for e in core.final(2, stats.seq).engines] == ["theirs"]  # type: ignore[union-attr]
    stats = Stats(core.next_seq())
    core.ask(1, stats)
    core.tick(1.0)
    assert {e.namespace for e in core.final(1, stats.seq).engines} == {"mine", "theirs"}  # type: ignore[union-attr]


def test_a_lifeline_without_a_hello_is_ended(core: Harness) -> None:
    core.perform(core.core.client_connected(2, 1, 1000, 1, core.at))
    core.tick(9.0)
    assert 2 not in core.dropped
    core.tick(2.0)
    assert core.dropped == {2}


def test_an_image_id_of_an_earlier_daemon_names_nothing(make_core: Callable[..., Harness]) -> None:
    ids = []
    for start_id in (b"a" * 16, b"b" * 16):
        core = make_core(1, start_id=start_id)
        core.connect()
        engine = core.register(stages=1)
        seq = core.capture(engine, tokens=range(10))
        core.finish_all()
        ids.append(core.final(1, seq).image_id)  # type: ignore[union-attr]
    assert abs(ids[0] - ids[1]) > 1_000_000
    stale = Restore(core.next_seq(), engine, "", ((pack_rows([(0, 10)]),),), 0, "host", image_id=ids[0])
    core.ask(1, stale)
    assert core.failure(1, stale.seq).code == "unknown_image"


def test_a_take_that_is_released_leaves_the_image(core: Harness) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    seq = core.restore(engine, "a", rows=10, take=True)
    core.finish_all()
    image_id = core.final(1, seq).image_id  # type: ignore[union-attr]
    release = Release(core.next_seq(), engine, image_id)
    assert core.ask(1, release) == [Done(release.seq, 1)]
    again = core.restore(engine, "a", rows=10, take=True)
    core.finish_all()
    assert core.final(1, again).image_id == image_id  # type: ignore[union-attr]
