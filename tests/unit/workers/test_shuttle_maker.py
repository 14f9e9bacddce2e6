"""A shuttle that could not be taken into use leaves no mapping and no name."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.extent import GRANULE_BYTES
from shm.header import ShuttleHeader
from shm.mapping import SharedMapping
from shm.process import boot_id
from shm.shuttle import Shuttle, unlink
from tests.unit.workers.rig import KEY
from workers.cpu_device import CpuDevice
from workers.device import DeviceFailure
from workers.digest import Digester
from workers.shuttle_maker import ShuttleMaker


class Refusing(CpuDevice):
    """Fails with `error` as long as there is one."""

    error: BaseException | None = None

    def add_shuttle(self, index: int, memory: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        return super().add_shuttle(index, memory)


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"/stratad.m{os.getpid()}.cpu0.0"
    yield name
    unlink(name)


def mapped(segment: str) -> bool:
    return segment in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), DeviceFailure("device_error", "no")])
def test_no_failure_leaves_anything(segment: str, error: Exception) -> None:
    device = Refusing(Digester(KEY), slice_bytes=1, link_bytes_per_s=0.0)
    maker = ShuttleMaker(device, lambda: False)
    order = MakeShuttle(0, segment, 4 * GRANULE_BYTES, False)
    device.error = error
    fails(maker, order, error)
    assert not mapped(segment)
    assert not Path(f"/dev/shm{segment}").exists()

    device.error = None
    assert isinstance(maker.make(order), ShuttleReady)
    device.close()
    maker.close()

    # The name of an adopted one is not ours to remove.
    device.error = error
    again = ShuttleMaker(device, lambda: False)
    fails(again, MakeShuttle(0, segment, 4 * GRANULE_BYTES, True), error)
    assert not mapped(segment)
    assert Path(f"/dev/shm{segment}").exists()


def fails(maker: ShuttleMaker, order: MakeShuttle, error: Exception) -> None:
    if isinstance(error, DeviceFailure):
        answer = maker.make(order)
        assert isinstance(answer, ShuttleFailed)
        assert answer.code == "device_error"
        return
    with pytest.raises(type(error)):
        maker.make(order)


@pytest.mark.parametrize(("wanted", "adopt"), [(True, False), (False, False), (True, True)])
def test_only_a_new_shuttle_is_put_into_huge_pages_and_only_if_wanted(
    segment: str, monkeypatch: pytest.MonkeyPatch, wanted: bool, adopt: bool
) -> None:
    collapsed: list[int] = []
    collapse = SharedMapping.collapse

    def noted(self: SharedMapping, step_bytes: int, on_step: Callable[[], bool]) -> int:
        collapsed.append(self.size_bytes)
        return collapse(self, step_bytes, on_step)

    monkeypatch.setattr(SharedMapping, "collapse", noted)
    size_bytes = 64 * GRANULE_BYTES
    if adopt:
        Shuttle.create(ShuttleHeader(f"m{os.getpid()}", "cpu0", 0, size_bytes, boot_id())).close()
    device = CpuDevice(Digester(KEY), slice_bytes=1, link_bytes_per_s=0.0)
    maker = ShuttleMaker(device, lambda: False, huge_pages=wanted)
    assert isinstance(maker.make(MakeShuttle(0, segment, size_bytes, adopt)), ShuttleReady)
    assert collapsed == ([size_bytes] if wanted and not adopt else [])
    device.close()
    maker.close()
