"""Images through the real daemon: what was captured comes back byte for byte, and nothing else is touched."""

import random

import pytest

from shm.extent import unpack_places
from shm.layout import StageLayout
from shm.shuttle import MOUNT
from stratad.client import Client
from stratad.errors import Damaged, UsageError
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, paged_layout, slot_layout
from tests.support.layouts import state_bytes

LAYOUTS = {
    "slot": (slot_layout(), slot_layout(planes=3, row_bytes=160)),
    "paged": (paged_layout(), paged_layout(planes=2, token_bytes=80)),
    "state": (slot_layout(state_bytes=5000), slot_layout()),
}


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("shape", list(LAYOUTS))
def test_round_trip(client: Client, shape: str, tokens: int) -> None:
    layouts = LAYOUTS[shape]
    with FakeEngine(client, layouts, seed=tokens) as engine:
        limit, per_row = layouts[0].groups[0].rows, layouts[0].groups[0].tokens_per_row
        count = -(-tokens // per_row)
        if per_row == 1:
            rows, target = list(range(7, 7 + count)), list(range(1000, 1000 + count))
        else:
            blocks = random.Random(tokens).sample(range(limit), 2 * count if 2 * count <= limit else limit)
            rows, target = blocks[:count], blocks[-count:]
        expected = engine.contents(rows, tokens)
        state = (
            bytes(engine.pools[0].buffer[layouts[0].states[0].planes[0].offset_bytes :][:5000])
            if layouts[0].states
            else b""
        )
        captured = engine.capture("a", range(tokens), rows, slot=0)
        assert captured.tokens == tokens
        engine.fill()
        before = engine.everything()
        engine.restore("a", target, slot=2)
        assert engine.contents(target, tokens) == expected
        if state:
            at = layouts[0].states[0].planes[0].offset_bytes + 2 * 5000
            assert bytes(engine.pools[0].buffer[at : at + 5000]) == state
        assert untouched(engine, before, target, tokens, state_slot=2 if state else -1)
        client.clear("ns")


def untouched(engine: FakeEngine, before: list[bytes], rows: list[int] | range, tokens: int, state_slot: int) -> bool:
    """Whether every byte but those of the tokens in `rows` (and of the state slot) is as it was."""
    for layout, pool, old in zip(engine.layouts, engine.pools, before, strict=True):
        now = bytearray(pool.buffer)
        for plane in layout.groups[0].planes:
            size = plane.row_bytes // plane.tokens_per_row
            for token in range(tokens):
                row, inside = rows[token // plane.tokens_per_row], token % plane.tokens_per_row
                at = plane.offset_bytes + row * plane.row_stride_bytes + inside * size
                now[at : at + size] = old[at : at + size]
        for at in state_bytes(layout, state_slot) if state_slot >= 0 else ():
            now[at] = old[at]
        if bytes(now) != old:
            return False
    return True


def test_a_shorter_prefix(client: Client) -> None:
    with FakeEngine(client, LAYOUTS["slot"]) as engine:
        expected = engine.contents(range(600), 600)
        engine.capture("a", range(600), range(600))
        engine.fill()
        before = engine.everything()
        engine.restore("a", range(1000, 1300), tokens=300)
        assert engine.contents(range(1000, 1300), 300) == [[plane[: len(plane) // 2] for plane in s] for s in expected]
        assert untouched(engine, before, range(1000, 1300), 300, -1)
        client.clear("ns")


def plane_spans(layout: StageLayout, tokens: int) -> list[tuple[int, int]]:
    """Where each plane's bytes lie in the first chunk, in gathered order."""
    spans: list[tuple[int, int]] = []
    at = 0
    group = layout.groups[0]
    rows = min(group.rows_for(tokens), layout.chunk_tokens // group.tokens_per_row)
    for plane in group.planes:
        spans.append((at, rows * plane.row_bytes))
        at += rows * plane.row_bytes
    return spans


@pytest.mark.parametrize("plane", range(4))
def test_a_flipped_bit_of_any_plane_is_damage(client: Client, plane: int) -> None:
    layouts = LAYOUTS["slot"]
    stage = 0
    with FakeEngine(client, layouts, seed=plane) as engine:
        engine.capture("a", range(300), range(300))
        detail = client.show("ns", "a")
        chunk = next(c for c in detail.chunks if c.stage == stage)
        start, length = plane_spans(layouts[stage], 300)[plane]
        offset = random.Random(plane).randrange(start, start + length)
        (place,) = unpack_places(chunk.extents)
        for extent, segment in zip(place.extents, chunk.segments, strict=True):
            if offset < extent.length_bytes:
                flip_bit(segment, extent.offset_bytes + offset, bit=plane)
                break
            offset -= extent.length_bytes
        engine.fill()
        before = engine.everything()
        with pytest.raises(Damaged) as caught:
            engine.restore("a", range(1000, 1300))
        assert caught.value.stage == stage
        assert engine.everything()[stage] == before[stage]
        outcomes = {o.stage: o for o in caught.value.stages}
        assert outcomes[stage].rows_undefined == ()
        assert client.show("ns", "a").image.damaged
        assert engine.engine.lookup(range(300)) is None
        with pytest.raises(Damaged):
            engine.restore("a", range(1000, 1300))
        expected = engine.contents(range(300), 300)
        engine.capture("a", range(300), range(300))
        engine.restore("a", range(1000, 1300))
        assert engine.contents(range(1000, 1300), 300) == expected
        client.clear("ns")


def flip_bit(segment: str, offset: int, bit: int) -> None:
    with (MOUNT / segment.lstrip("/")).open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))


def test_lookup_goes_by_the_tokens(client: Client) -> None:
    with FakeEngine(client, LAYOUTS["slot"]) as engine:
        engine.capture("long", range(700), range(700))
        engine.capture("short", range(100), range(100))
        match = engine.engine.lookup([*range(650), 9, 9])
        assert match is not None
        assert (match.conversation, match.tokens) == ("long", 650)
        assert engine.engine.lookup([5]) is None
        client.clear("ns")


def test_take_gives_the_image_up(client: Client) -> None:
    with FakeEngine(client, LAYOUTS["slot"]) as engine:
        expected = engine.contents(range(50), 50)
        engine.capture("a", range(50), range(50))
        engine.fill()
        engine.engine.take("a", rows=range(50), slot=0).result()
        assert engine.contents(range(50), 50) == expected
        with pytest.raises(UsageError) as caught:
            engine.restore("a", range(50))
        assert caught.value.code == "unknown_conversation"
        assert client.stats().published_bytes == 0


def test_a_source_that_changes_is_never_published() -> None:
    with (
        DaemonProcess("cpu:2", faults={"cpu:1#1/flip_source": "1"}) as daemon,
        daemon.client() as client,
        FakeEngine(client, LAYOUTS["slot"]) as engine,
    ):
        with pytest.raises(Exception, match="source_changed") as caught:
            engine.capture("a", range(300), range(300))
        assert caught.value.stage == 1  # type: ignore[attr-defined]
        stats = client.stats()
        assert stats.images == 0
        assert stats.published_bytes == stats.staged_bytes == 0
        engine.capture("a", range(300), range(300))
        expected = engine.contents(range(300), 300)
        engine.fill()
        engine.restore("a", range(300))
        assert engine.contents(range(300), 300) == expected


def test_a_daemon_that_was_not_started_for_it_arms_no_fault(client: Client) -> None:
    with FakeEngine(client, LAYOUTS["slot"]):
        with pytest.raises(UsageError, match="faults_off"):
            client.arm_fault("capture", 0, "kill")
        with pytest.raises(UsageError, match="faults_off"):
            client.faults()
        with pytest.raises(UsageError, match="faults_off"):
            client.disarm_fault()
