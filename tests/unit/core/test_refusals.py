"""Bad requests: each a coded refusal that names what was wrong, and nothing is changed."""

from collections.abc import Callable

import msgspec
import pytest

from ipc.messages import Capture, Hello, Lookup, MemfdPool, Register, Restore, Show, Stage, Stats
from shm.layout import Plane, StageLayout
from shm.rows import pack_rows
from tests.support.core_harness import FINGERPRINT, ROWS, Harness, layout, pack_tokens


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    harness = make_core()
    harness.connect()
    return harness


def good_capture(core: Harness, engine: int) -> Capture:
    return Capture(core.next_seq(), engine, "a", pack_tokens(range(10)), (pack_rows([(0, 10)]),), 0, "host")


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
        ({"rows": (b"1234",)}, "bad_rows"),
        ({"rows": (pack_rows([(0, 10)]),) * 3}, "bad_rows"),
        ({"rows": (pack_rows([(0, 9)]),)}, "bad_rows"),
        ({"rows": (pack_rows([(0, 11)]),)}, "bad_rows"),
        ({"rows": (pack_rows([(ROWS - 9, 10)]),)}, "bad_rows"),
        ({"rows": (pack_rows([(0, 5), (4, 5)]),)}, "bad_rows"),
        ({"rows": (pack_rows([(5, 0)]),)}, "bad_rows"),
        ({"slot": -1}, "bad_value"),
        ({"ordered": ""}, "bad_value"),
        ({"ordered": "event"}, "bad_value"),
        ({"state_position": 10}, "bad_state"),
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
        ({"rows": (pack_rows([(0, 9)]),)}, "bad_rows"),
    ],
)
def test_restore(core: Harness, change: dict[str, object], code: str) -> None:
    engine = core.register()
    core.ask(1, good_capture(core, engine))
    core.finish_all()
    request = Restore(core.next_seq(), engine, "a", (pack_rows([(0, 10)]),), 0, "host")
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
    half = StageLayout((Plane(0, 512, 1024, ROWS), Plane(512, 512, 1024, ROWS)), None, 256)
    other = core.register(layouts=[layout(), half])
    failure = core.failure(1, core.restore(other, "a", rows=10))
    assert failure.code == "fingerprint_mismatch"
    assert list(failure.detail) == ["layout.planes.1"]


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
        ((Stage(0, "cpu:0", MemfdPool(1, ROWS * 1024), StageLayout((), None, 256)),), "bad_layout"),
        (
            (Stage(0, "cpu:0", MemfdPool(1, ROWS * 1024), msgspec.structs.replace(layout(), chunk_tokens=128)),),
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


@pytest.mark.parametrize("version", [-1, 0, 2, 9999])
def test_other_versions_are_refused_with_both_named(core: Harness, version: int) -> None:
    core.perform(core.core.client_connected(2, 1, 1000, 1, core.at))
    hello = Hello(core.next_seq(), version, b"")
    core.ask(2, hello)
    failure = core.failure(2, hello.seq)
    assert failure.code == "wrong_version"
    assert f"version 1, the client {version}" in failure.message


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
    assert 2 not in core.core.state.clients
    core.finish_all()


def test_blocks_that_cannot_locate_tokens_are_captured_to_the_last_full_one(core: Harness) -> None:
    paged = layout(rows=64, tokens_per_row=16)
    engine = core.register(layouts=[paged, paged])
    request = Capture(core.next_seq(), engine, "a", pack_tokens(range(40)), (pack_rows([(9, 1), (3, 2)]),), 0, "host")
    core.ask(1, request)
    core.finish_all()
    assert core.final(1, request.seq).tokens == 32  # type: ignore[union-attr]
    few = Capture(core.next_seq(), engine, "b", pack_tokens(range(5)), (pack_rows([(9, 1)]),), 0, "host")
    core.ask(1, few)
    assert core.failure(1, few.seq).code == "bad_tokens"
