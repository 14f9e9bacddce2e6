"""Slot copies on GPUs (one stage a card where there are several) that fail: the target's rows are named, the source is
untouched, and the daemon serves on.
"""

from typing import TYPE_CHECKING

import pytest

from shm.layout import Plane
from shm.rows import unpack_rows
from stratad.client import Engine, StagePool
from stratad.errors import StratadError
from tests.support.client_rig import FINGERPRINT
from tests.support.daemon import DaemonProcess
from tests.support.layouts import stage_layout
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
from tests.gpu.cards import all_cards, card_of  # noqa: E402 - needs torch

ROWS, ROW_BYTES, PLANES, TOKENS = 4096, 4096, 16, 1500
# 64 MiB a slice: a slot of 1,500 tokens is two of them on each stage.
LAYOUT = stage_layout([Plane(n * ROWS * ROW_BYTES, ROW_BYTES, ROW_BYTES, ROWS) for n in range(PLANES)])
SETTINGS = {"ram.budget_bytes": "8GiB", "ram.shuttle_bytes": "256MiB"}
SOURCE, TARGET = range(10, 10 + TOKENS), range(2000, 2000 + TOKENS)


def rows_of(pool: "Tensor", rows: range) -> "Tensor":
    return pool.view(PLANES, ROWS, ROW_BYTES)[:, rows.start : rows.stop]


def copy(engine: Engine, kind: str) -> None:
    if kind == "direct":
        engine.slot_direct(TOKENS, SOURCE, TARGET, slot=0, target_slot=1).result()
        return
    engine.slot_to(TOKENS, SOURCE, slot=0).result()
    engine.slot_from(0, TARGET, slot=1).result()


@pytest.fixture(scope="module")
def worker() -> str:
    """Name of the first card's worker."""
    with DaemonProcess(all_cards(), SETTINGS) as daemon, daemon.client(60.0) as client:
        return client.stats().workers[0].worker


CASES = [("direct", f"capture.{fault}") for fault in ("flip_source", "copy_error", "copy_kill")]
CASES += [("host", fault) for fault in ("capture.flip_source", "restore.copy_error", "restore.copy_kill")]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_a_slot_copy_fails_and_the_next_one_is_right(worker: str, kind: str, fault: str) -> None:
    pools = [
        torch.randint(0, 256, (PLANES * ROWS * ROW_BYTES,), dtype=torch.uint8, device=card_of(stage))
        for stage in range(2)
    ]
    with DaemonProcess(all_cards(), SETTINGS, {f"{worker}#1/{fault}": "2"}) as daemon, daemon.client(60.0) as client:
        stages = [StagePool(str(pool.device), LAYOUT, pool) for pool in pools]
        engine = client.register("e", "n", FINGERPRINT, stages)
        before = [pool.clone() for pool in pools]
        with pytest.raises(StratadError) as caught:
            copy(engine, kind)
        for stage, (pool, old) in enumerate(zip(pools, before, strict=True)):
            if fault.endswith("flip_source"):
                assert caught.value.code == "source_changed"
            else:
                assert torch.equal(rows_of(pool, SOURCE), rows_of(old, SOURCE))
            outcome = caught.value.stages[stage]
            named = {
                row
                for packed in outcome.rows_undefined
                for first, count in unpack_rows(packed)
                for row in range(first, first + count)
            }
            assert named <= set(TARGET)
            if outcome.state != "done":
                kept = [row for row in TARGET if row not in named]
                planes, old_planes = pool.view(PLANES, ROWS, ROW_BYTES), old.view(PLANES, ROWS, ROW_BYTES)
                assert torch.equal(planes[:, kept], old_planes[:, kept])
        wait_until(lambda: client.stats().health == "ok", 30)
        copy(engine, kind)
        for pool in pools:
            assert torch.equal(rows_of(pool, TARGET), rows_of(pool, SOURCE))
        engine.unregister()
        wait_until(lambda: client.stats().published_bytes == client.stats().staged_bytes == 0)
