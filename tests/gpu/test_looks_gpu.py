"""Chunks that may be there already, on a real GPU: hinted captures and resident restores, all bytes compared."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from ipc.messages import CaptureJob, JobDone, RestoreJob  # noqa: E402
from shm.extent import pack_places  # noqa: E402
from shm.rows import pack_numbers  # noqa: E402
from tests.gpu.rig import MIB, GpuRig  # noqa: E402
from tests.gpu.test_cuda_device import LAYOUTS, model  # noqa: E402
from tests.support.layouts import packed_positions, packed_rows  # noqa: E402
from workers.digest import MLH  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def rig() -> Iterator[GpuRig]:
    with GpuRig(slice_bytes=2 * MIB) as made:
        yield made


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_only_what_digests_do_not_prove_is_moved(rig: GpuRig, name: str) -> None:
    layout, tokens, slot = LAYOUTS[name]
    random = np.random.default_rng(tokens)
    rows = random.permutation(layout.groups[0].rows).tolist()[: layout.groups[0].rows_for(tokens)]
    data = random.integers(0, 256, layout.end_bytes, dtype=np.uint8)
    pool = rig.own_pool(layout, data)
    rig._next = [65536]
    places = rig.places(layout, tokens, slot)
    packed, points = packed_rows(layout, rows, slot), packed_positions(tokens, slot)
    whole = CaptureJob(1, 1, packed, tokens, pack_places(places), False, points)
    first = rig.run(pool, whole)
    assert isinstance(first, JobDone), first
    lengths = [place.length_bytes for place in places]

    plane = layout.groups[0].planes[0]  # one byte of the first chunk
    data[plane.offset_bytes + rows[0] * plane.row_stride_bytes] ^= 0x20
    rig.write(pool, data)
    chunks = model(data, layout, rows, tokens, slot)
    hinted = list(range(len(places) - 1))
    staging = rig.device.resources()["staging_bytes"]
    job = msgspec.structs.replace(whole, places=pack_places(places[-1:]), hinted=pack_numbers(hinted))
    done = rig.run(pool, job)
    assert isinstance(done, JobDone), done
    assert done.digests == b"".join(rig.digester.digest(MLH, chunk) for chunk in chunks)
    assert (done.moved_bytes, done.digested_bytes) == (lengths[-1], sum(lengths))
    differing = [n for n in range(len(places)) if first.digests[16 * n :][:16] != done.digests[16 * n :][:16]]
    assert differing == [0]
    again = rig.run(pool, msgspec.structs.replace(whole, places=pack_places(places[:1]), chunks=pack_numbers([0])))
    assert isinstance(again, JobDone), again
    assert again.digests == done.digests[:16]
    assert np.array_equal(rig.stored(places[0]), chunks[0])

    damaged = data.copy()
    damaged[plane.offset_bytes + rows[-1] * plane.row_stride_bytes] ^= 0x04
    rig.write(pool, damaged)
    restore = RestoreJob(
        2, 1, packed, tokens, tokens, pack_places(places), done.digests, (MLH,), False, points, resident_tokens=tokens
    )
    back = rig.run(pool, restore)
    assert isinstance(back, JobDone), back
    assert np.array_equal(rig.read(pool), data)
    last = max(n for n, span in enumerate(layout.chunks(tokens)) if not span.is_state)
    assert (back.moved_bytes, back.skipped_bytes) == (lengths[last], sum(lengths) - lengths[last])
    assert rig.device.resources()["staging_bytes"] == staging
    pool.close()
