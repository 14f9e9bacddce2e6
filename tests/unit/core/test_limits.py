"""What a client may not exceed: the numbers of its slots, and how many engines it has."""

from collections.abc import Callable, Sequence

import pytest

from ipc.messages import (
    SLOT_LIMIT,
    Capture,
    MemfdPool,
    Register,
    Registered,
    Request,
    Restore,
    Restored,
    SlotDirect,
    SlotDrop,
    SlotFrom,
    SlotTo,
    Stage,
    Unregister,
)
from shm.rows import pack_rows
from stratad.core import registration
from stratad.core.effects import CloseDescriptor
from tests.support.core_harness import FINGERPRINT, Harness, layout, pack_tokens

SOURCE, TARGET = (((pack_rows([(first, 10)]),),) for first in (0, 1000))


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    """A core with a client."""
    harness = make_core()
    harness.connect()
    return harness


def slot_requests(core: Harness, engine: int, slot: int) -> Sequence[Request]:
    """Each request that names a slot, with this one in one place."""
    seq = core.next_seq
    return (
        Capture(seq(), engine, "b", pack_tokens(range(10)), SOURCE, slot, "host"),
        Restore(seq(), engine, "a", TARGET, slot, "host"),
        SlotTo(seq(), engine, 10, SOURCE, slot, "host"),
        SlotFrom(seq(), engine, 0, TARGET, slot, "host"),
        SlotFrom(seq(), engine, slot, TARGET, 0, "host"),
        SlotDirect(seq(), engine, 10, SOURCE, TARGET, slot, 0, "host"),
        SlotDirect(seq(), engine, 10, SOURCE, TARGET, 0, slot, "host"),
        SlotDrop(seq(), engine, slot),
    )


@pytest.mark.parametrize("slot", [-1, SLOT_LIMIT, 1 << 40])
def test_a_slot_that_could_not_be_marked_is_refused(core: Harness, slot: int) -> None:
    engine = core.register()
    core.capture(engine, "a", range(10))
    core.finish_all()
    core.slot_copy(engine, "slot_to", tokens=10)
    core.finish_all()
    for request in slot_requests(core, engine, slot):
        core.ask(1, request)
        failure = core.failure(1, request.seq)
        assert (failure.code, f"0 to {SLOT_LIMIT - 1}" in failure.message) == ("bad_value", True), request
    assert not core.core.state.ops
    assert len(core.core.state.catalog.transits) == 1


def test_the_last_slot_is_one(core: Harness) -> None:
    engine = core.register()
    last = SLOT_LIMIT - 1
    core.capture(engine, "a", range(10), slot=last)
    core.slot_copy(engine, "slot_to", tokens=10, slot=last)
    core.finish_all()
    restored = core.restore(engine, "a", 10, first_row=500, slot=last)
    copied = core.slot_copy(engine, "slot_from", tokens=10, slot=last, target_slot=last)
    core.finish_all()
    assert [type(core.final(1, seq)) for seq in (restored, copied)] == [Restored, Restored]


def test_a_client_has_so_many_engines(core: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "ENGINE_LIMIT", 3)
    engines = [core.register() for _ in range(3)]
    one = layout()
    stages = (Stage(0, "cpu:0", MemfdPool(9, one.end_bytes), one),)

    def register(client: int) -> Register:
        request = Register(core.next_seq(), "other", "e", FINGERPRINT, stages)
        core.ask(client, request)
        return request

    refused = register(1)
    failure = core.failure(1, refused.seq)
    assert (failure.code, "at most 3 engines" in failure.message) == ("too_many", True)
    assert CloseDescriptor(1, 9) in core.effects
    assert len(core.core.state.engines) == 3
    core.connect(2)
    assert isinstance(core.final(2, register(2).seq), Registered)  # each client for itself
    core.ask(1, Unregister(core.next_seq(), engines[0]))
    core.tick()
    assert isinstance(core.final(1, register(1).seq), Registered)
