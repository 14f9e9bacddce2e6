"""A shuttle that could not be taken into use leaves no mapping and no name."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.messages import MakeShuttle, ShuttleFailed, ShuttleReady
from shm.extent import GRANULE_BYTES
from shm.shuttle import unlink
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
