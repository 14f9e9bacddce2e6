"""Which copies fail on order, and what a lane makes of each fault."""

import msgspec
import pytest

from ipc.messages import FAULT_KINDS, FAULT_OPS, CaptureJob, CopyJob, JobDone, JobFailed, RestoreJob, WorkerSpec
from shm.extent import ChunkPlace, pack_places
from tests.support.layouts import packed_positions, packed_rows
from tests.unit.workers.rig import KEY, Rig, slot_layout
from workers.cpu_device import CpuDevice
from workers.device import LaneKind
from workers.devices import fault_book, make_device
from workers.digest import Digester
from workers.fault_orders import RESTORING, FaultBook
from workers.faulty import FaultyDevice

TOKENS = 64
ROWS = list(range(TOKENS))
TARGET = list(range(TOKENS, 2 * TOKENS))
LAYOUT = slot_layout(rows=2 * TOKENS)
SPEC = WorkerSpec("cpu:0", "cpu:0", 1, b"", "", "", (), KEY, 4096, 8192, 0, 0.0, 65536, "info")


def capture_job(op: str, stage: int, places: list[ChunkPlace]) -> CaptureJob:
    rows, positions = packed_rows(LAYOUT, ROWS, -1), packed_positions(TOKENS, -1)
    return CaptureJob(1, 1, rows, TOKENS, pack_places(places), False, positions, op=op, stage=stage)


def restore_job(op: str, stage: int, places: list[ChunkPlace], digests: bytes) -> RestoreJob:
    rows, positions = packed_rows(LAYOUT, TARGET, -1), packed_positions(TOKENS, -1)
    places_packed = pack_places(places)
    return RestoreJob(
        2, 1, rows, TOKENS, TOKENS, places_packed, digests, ("xxh3-128",), False, positions, op=op, stage=stage
    )


def copy_job(op: str, stage: int) -> CopyJob:
    positions = packed_positions(TOKENS, -1)
    return CopyJob(
        3,
        1,
        packed_rows(LAYOUT, ROWS, -1),
        packed_rows(LAYOUT, TARGET, -1),
        TOKENS,
        False,
        positions,
        op=op,
        stage=stage,
    )


class Rounds:
    """Runs jobs of any operation over one pool, whose image was captured before any fault."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.places = rig.places(TOKENS)
        done = rig.capture(ROWS, TOKENS, self.places)
        assert isinstance(done, JobDone)
        self._digests = done.digests

    def run(self, op: str, stage: int = 1) -> JobDone | JobFailed:
        if op == "slot_direct":
            return self._rig.run(copy_job(op, stage))
        if op in RESTORING:
            return self._rig.run(restore_job(op, stage, self.places, self._digests))
        return self._rig.run(capture_job(op, stage, self.places))


def code_of(report: JobDone | JobFailed) -> str:
    return report.code if isinstance(report, JobFailed) else ""


@pytest.mark.parametrize("op", FAULT_OPS)
@pytest.mark.parametrize(
    ("kind", "code"),
    [("error", "device_error"), ("exception", "internal"), ("oom", "out_of_memory"), ("slow", ""), ("corrupt", "*")],
)
def test_an_armed_fault_strikes_one_copy_of_its_operation_and_stage(op: str, kind: str, code: str) -> None:
    if code == "*":
        code = "damaged" if op in RESTORING else "source_changed"
    with Rig(LAYOUT, slice_bytes=1, faults={}) as rig:
        rounds = Rounds(rig)
        struck: list[int] = []
        rig.book.on_strike = struck.append
        source = rig.memory.tobytes()
        rig.book.arm(7, op, 1, kind, 3)
        other = next(o for o in FAULT_OPS if o != op)
        assert code_of(rounds.run(other)) == ""
        assert code_of(rounds.run(op, stage=0)) == ""
        assert struck == []
        report = rounds.run(op)
        assert struck == [7]
        assert code_of(report) == code
        if isinstance(report, JobFailed):
            assert not report.sticky
            assert kind != "corrupt" or report.chunk == 2
        if kind == "corrupt" and op not in RESTORING:
            assert sum(a != b for a, b in zip(source, rig.memory.tobytes(), strict=True)) >= 1
        elif kind != "corrupt":
            assert code_of(rounds.run(op)) == ""  # once is once
        assert struck == [7]


def test_copies_are_counted_from_the_arming_over_jobs() -> None:
    with Rig(LAYOUT, slice_bytes=1, faults={}) as rig:
        rounds = Rounds(rig)
        assert code_of(rounds.run("capture")) == ""
        rig.book.arm(1, "capture", 1, "error", 6)  # four slices a job
        assert code_of(rounds.run("capture")) == ""
        assert code_of(rounds.run("capture")) == "device_error"


def test_a_copy_that_was_only_begun_is_counted_again() -> None:
    """The slice after a failing one has begun already: it is no copy yet."""
    with Rig(LAYOUT, slice_bytes=1, faults={}) as rig:
        rounds = Rounds(rig)
        rig.book.arm(1, "capture", 1, "error", 2)
        rig.book.arm(2, "capture", 1, "oom", 3)
        assert code_of(rounds.run("capture")) == "device_error"
        assert code_of(rounds.run("capture")) == "out_of_memory"


def test_a_fault_that_strikes_as_a_copy_begins_has_struck() -> None:
    with Rig(LAYOUT, slice_bytes=1, faults={"restore.flip_shuttle": "2"}) as rig:
        rounds = Rounds(rig)
        reports = [rounds.run("restore") for _ in range(3)]
        assert [report.chunk for report in reports if isinstance(report, JobFailed)] == [
            1,
            1,
            1,
        ]  # the byte stays wrong


def test_a_disarmed_fault_does_not_strike() -> None:
    with Rig(LAYOUT, slice_bytes=1, faults={}) as rig:
        rounds = Rounds(rig)
        rig.book.arm(1, "take", 1, "error", 1)
        rig.book.arm(2, "take", 1, "oom", 1)
        rig.book.disarm(1)
        assert code_of(rounds.run("take")) == "out_of_memory"


def test_a_byte_that_flips_in_a_shuttle_is_never_restored() -> None:
    with Rig(LAYOUT, slice_bytes=1, faults={}) as rig:
        rounds = Rounds(rig)
        before = [rig.stored(place) for place in rounds.places]
        rig.book.arm(1, "restore", 1, "corrupt", 2)
        first, second = rounds.run("restore"), rounds.run("restore")
        assert code_of(first) == code_of(second) == "damaged"  # the image stays damaged
        differ = [n for n, place in enumerate(rounds.places) if rig.stored(place) != before[n]]
        assert differ == [1]


def test_every_kind_that_can_be_armed_is_one_of_the_books() -> None:
    book = FaultBook({})
    for op in FAULT_OPS:
        for kind in FAULT_KINDS:
            book.arm(1, op, 0, kind, 1)
            lane = LaneKind.RESTORE if op in RESTORING else LaneKind.CAPTURE
            (hit,) = book.begin(lane, op, 0)
            assert hit.order.strikes(hit.copy)
            assert (hit.order.fault in ("flip_shuttle", "flip_source")) == (kind == "corrupt")
            book.disarm(1)


@pytest.mark.parametrize("orders", [{"copy_eror": "1"}, {"capture.copy_error": "x"}])
def test_orders_that_cannot_be_are_refused(orders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"unknown faults|invalid literal"):
        FaultBook(orders)


@pytest.mark.parametrize(
    ("changes", "wrapped"), [({}, False), ({"allow_faults": True}, True), ({"faults": {"copy_error": "9"}}, True)]
)
def test_a_device_is_wrapped_only_where_there_may_be_faults(changes: dict[str, object], wrapped: bool) -> None:
    spec = msgspec.structs.replace(SPEC, **changes)
    device = make_device(spec, Digester(KEY), fault_book(spec))
    assert isinstance(device, FaultyDevice if wrapped else CpuDevice)
    device.close()
