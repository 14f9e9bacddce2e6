"""Several jobs on one lane: each ends as if it had been alone, whoever came in between."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from ipc.messages import CaptureJob, CopyJob, JobDone, JobFailed, RestoreJob
from shm.extent import ChunkPlace, pack_places
from shm.layout import Plane, StageLayout, StateGroup, layer_groups
from shm.rows import pack_numbers, pack_rows, unpack_rows
from tests.support.layouts import packed_rows
from tests.unit.workers.rig import NEVER, Rig, slot_layout
from workers.device import Copier, LaneKind
from workers.lanes import JobHooks, Lane, LaneHooks

# One chunk of 16 rows is one slice; a job of more than one chunk is large.
CHUNK_BYTES = 3 * 16 * 96
LAYOUT = slot_layout(rows=512)


@dataclass
class Turns:
    """One lane of a rig, served on this thread, and what came of it. `story` names who had each slice."""

    rig: Rig
    kind: LaneKind
    reports: dict[int, JobDone | JobFailed] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    on_slice: dict[int, Callable[[], None]] = field(default_factory=dict)  # what happens while the nth slice is taken
    slices: int = 0

    def __post_init__(self) -> None:
        hooks = LaneHooks(self.noted.append, self.moving.append)
        self.lane = Lane(self.kind, self.rig.device.copier(self.kind), hooks, CHUNK_BYTES)

    def add(self, job: CaptureJob | RestoreJob | CopyJob, engine: str = "a") -> None:
        number = job.job

        def stopped() -> bool:
            self.slices += 1
            self.on_slice.pop(self.slices, lambda: None)()
            return number in self.stopped

        def ended(report: JobDone | JobFailed) -> None:
            self.reports[number] = report
            self.ended.append(number)

        hooks = JobHooks(stopped, lambda: self.free.append(number))
        self.lane.add(self.rig.plan(job), hooks, engine, ended)

    def done(self, job: int) -> JobDone:
        report = self.reports[job]
        assert isinstance(report, JobDone), report
        return report

    def failed(self, job: int) -> JobFailed:
        report = self.reports[job]
        assert isinstance(report, JobFailed), report
        return report


class Images:
    """Images of runs of rows of one rig, captured before."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.original = rig.memory.tobytes()
        self.kept: dict[tuple[int, int], tuple[list[ChunkPlace], bytes]] = {}

    def capture_job(self, job: int, first: int, tokens: int) -> CaptureJob:
        places = self.rig.places(tokens)
        self.kept[first, tokens] = places, b""
        rows = packed_rows(LAYOUT, range(first, first + tokens))
        return CaptureJob(job, 1, rows, tokens, pack_places(places), False)

    def restore_job(self, job: int, first: int, tokens: int) -> RestoreJob:
        """Capture rows at once, and a job that brings them back."""
        places = self.rig.places(tokens)
        rows = range(first, first + tokens)
        done = self.rig.capture(rows, tokens, places)
        assert isinstance(done, JobDone)
        packed = packed_rows(LAYOUT, rows)
        self.kept[first, tokens] = places, done.digests
        return RestoreJob(job, 1, packed, tokens, tokens, pack_places(places), done.digests, ("xxh3-128",), False)

    def rows_are(self, first: int, tokens: int, *, restored: bool = True) -> bool:
        """Whether rows hold what they held at first, or (not `restored`) zeros."""
        memory = self.rig.memory.tobytes()
        for plane in LAYOUT.groups[0].planes:
            for row in range(first, first + tokens):
                start = plane.offset_bytes + row * plane.row_stride_bytes
                wanted = self.original[start : start + plane.row_bytes] if restored else bytes(plane.row_bytes)
                if memory[start : start + plane.row_bytes] != wanted:
                    return False
        return True


def noted(monkeypatch: pytest.MonkeyPatch, copier: Copier, call: str, note: Callable[[], None]) -> None:
    """Have `note` called before each call of a copier's method."""
    inner = getattr(copier, call)

    def outer(*arguments: object) -> object:
        note()
        return inner(*arguments)

    monkeypatch.setattr(copier, call, outer)


def make(**options: object) -> Rig:
    return Rig(LAYOUT, slice_bytes=1, shuttle_granules=200, **options)  # type: ignore[arg-type]


def test_a_small_restore_that_comes_later_ends_first_and_both_are_right() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        huge, small = images.restore_job(1, 0, 320), images.restore_job(2, 400, 16)
        rig.memory[:] = 0
        turns.on_slice[3] = lambda: turns.add(small, "b")
        turns.add(huge)
        turns.lane.serve()
        assert turns.ended == [2, 1]
        assert turns.noted == [1, 2, 0, 1, 0]
        assert images.rows_are(0, 320)
        assert images.rows_are(400, 16)
        assert (turns.done(1).moved_bytes, turns.done(2).moved_bytes) == (20 * CHUNK_BYTES, CHUNK_BYTES)
        assert images.rows_are(320, 80, restored=False)


def test_captures_in_turns_have_the_digests_that_they_have_alone() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.CAPTURE)
        jobs = [images.capture_job(n, 160 * n, 160) for n in range(3)]
        for number, job in enumerate(jobs):
            turns.add(job, f"engine {number}")
        turns.lane.serve()
        assert turns.ended == [0, 1, 2]
        assert turns.noted == [0, 1, 2, 0, 0, 1, 0, 2, 0]
        for number, job in enumerate(jobs):
            places, _ = images.kept[160 * number, 160]
            alone = rig.run(job)
            assert isinstance(alone, JobDone)
            assert turns.done(number).digests == alone.digests
            assert len(turns.done(number).digests) == 16 * len(places)


def test_each_capture_is_told_free_when_its_own_last_slice_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.CAPTURE)
        monkeypatch.setattr(type(rig.device.copier(LaneKind.CAPTURE)), "copies_behind", True)
        free: list[tuple[int, list[int]]] = []
        copier = rig.device.copier(LaneKind.CAPTURE)
        noted(monkeypatch, copier, "drain", lambda: free.append((turns.slices, list(turns.free))))
        turns.lane = Lane(LaneKind.CAPTURE, copier, LaneHooks(turns.noted.append, turns.moving.append), CHUNK_BYTES)
        turns.on_slice[3] = lambda: turns.add(images.capture_job(2, 400, 16), "b")
        turns.add(images.capture_job(1, 0, 320))
        turns.lane.serve()
        assert turns.free == [2, 1]
        # The small one's rows are free while the large one has most of its slices to go, and before it is drained.
        assert next(slices for slices, told in free if told == [2]) < 8
        assert next(slices for slices, told in free if told == [2, 1]) == 20


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_whatever_comes_in_between_every_restore_ends_right(seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    with make(seed=seed) as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=6))
        at, jobs = 0, list[tuple[int, int, RestoreJob]]()
        for number, chunks in enumerate(sizes, 1):
            jobs.append((at, 16 * chunks, images.restore_job(number, at, 16 * chunks)))
            at += 16 * chunks
        rig.memory[:] = 0
        for _, _, job in jobs[1:]:
            turns.on_slice[rng.randrange(1, 9)] = lambda job=job: turns.add(job, rng.choice("abc"))  # type: ignore[misc]
        turns.add(jobs[0][2])
        turns.lane.serve()
        for late in list(turns.on_slice.values()):
            late()
        turns.lane.serve()
        for first, tokens, job in jobs:
            if job.job in turns.reports:  # two may have wanted the same moment: then one never came
                assert turns.done(job.job).moved_bytes == tokens // 16 * CHUNK_BYTES
                assert images.rows_are(first, tokens)
            else:
                assert images.rows_are(first, tokens, restored=False)
        assert len(turns.ended) >= 2


def undefined(report: JobFailed) -> list[int]:
    return [r for first, count in unpack_rows(report.rows_undefined[0]) for r in range(first, first + count)]


def test_a_job_that_fails_in_its_turn_names_its_rows_and_leaves_the_others_alone() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        good, bad = images.restore_job(1, 0, 160), images.restore_job(2, 200, 160)
        places, _ = images.kept[200, 160]
        rig.shuttle[places[5].extents[0].offset_bytes] ^= 1
        rig.memory[:] = 0
        turns.add(bad, "b")
        turns.add(good, "a")
        turns.lane.serve()
        assert turns.done(1).moved_bytes == 10 * CHUNK_BYTES
        assert images.rows_are(0, 160)
        failed = turns.failed(2)
        assert (failed.code, failed.chunk, failed.sticky) == ("damaged", 5, False)
        assert undefined(failed) == list(range(200, 280))
        assert images.rows_are(280, 80, restored=False)


def test_a_job_that_rests_can_be_cancelled_and_names_what_it_had_written() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        first, second = images.restore_job(1, 0, 240), images.restore_job(2, 256, 240)
        rig.memory[:] = 0
        turns.on_slice[10] = lambda: turns.stopped.add(1)  # while the other one has its turn
        turns.add(first, "a")
        turns.add(second, "b")
        turns.lane.serve()
        failed = turns.failed(1)
        assert failed.code == "cancelled"
        rows = undefined(failed)
        assert rows == list(range(len(rows)))
        assert len(rows) // 16 in (8, 9)  # a turn, and the slice that had begun behind it
        assert failed.moved_bytes == len(rows) // 16 * CHUNK_BYTES
        assert images.rows_are(0, len(rows))
        assert images.rows_are(len(rows), 240 - len(rows), restored=False)
        assert images.rows_are(256, 240)


def test_a_job_that_has_not_begun_is_given_back_and_one_that_has_is_not() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        taken: list[bool] = []
        jobs = [images.restore_job(number, 64 * number, 64) for number in range(3)]
        rig.memory[:] = 0
        turns.on_slice[2] = lambda: taken.extend(turns.lane.withdraw(number) for number in (0, 2, 2, 9))
        for job in jobs:
            turns.add(job)
        turns.lane.serve()
        assert taken == [False, True, False, False]
        assert turns.ended == [0, 1]
        assert images.rows_are(64, 64)
        assert images.rows_are(128, 64, restored=False)


def test_after_a_sticky_report_nothing_is_touched() -> None:
    with make(faults={"restore.copy_sticky": "3"}) as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        first, second = images.restore_job(1, 0, 64), images.restore_job(2, 64, 64)
        rig.memory[:] = 0
        turns.add(first)
        turns.add(second)
        turns.lane.serve()
        turns.lane.serve()
        assert turns.ended == [1]
        assert turns.failed(1).sticky
        assert images.rows_are(64, 64, restored=False)


def test_what_was_under_way_is_waited_for_before_another_job_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a failure of the one would be found in the turn of the other."""
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        copier = rig.device.copier(LaneKind.RESTORE)
        happened: list[str] = []
        for call, what in (("begin_restore", "begin"), ("scatter_restore", "complete"), ("drain", "drain")):
            noted(monkeypatch, copier, call, partial(happened.append, what))
        turns.lane = Lane(
            LaneKind.RESTORE, copier, LaneHooks(lambda job: happened.append(f"job {job}"), print), CHUNK_BYTES
        )
        for number in (1, 2):
            turns.add(images.restore_job(number, 160 * number, 160), f"engine {number}")
        turns.lane.serve()
        changes = [at for at, what in enumerate(happened) if what in ("job 1", "job 2")]
        assert len(changes) == 4
        for at in changes[1:]:
            before = [what for what in happened[:at] if what != "job 0"]
            assert before.count("begin") == before.count("complete")
            assert before[-1] == "drain"


def test_that_a_lane_goes_on_is_told_only_where_several_jobs_are_there() -> None:
    with make(faults={"slow_copy_s": "0.02"}) as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        alone = images.restore_job(1, 0, 160)
        turns.add(alone)
        turns.lane.serve()
        assert turns.moving == []
        for number in (2, 3):
            turns.add(images.restore_job(number, 160 * (number - 1), 160), f"engine {number}")
        turns.lane.serve()
        assert set(turns.moving) <= {2, 3}
        assert 2 <= len(turns.moving) <= 20  # 0.4 s in all, every 0.05 s at most


def test_the_time_of_a_job_is_that_of_its_own_turns() -> None:
    with make(faults={"slow_copy_s": "0.01"}) as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.CAPTURE)
        for number in (1, 2):
            turns.add(images.capture_job(number, 240 * (number - 1), 240), f"engine {number}")
        turns.add(images.capture_job(3, 480, 16), "engine 3")
        turns.lane.serve()
        total_s = sum(turns.done(number).lane_s for number in (1, 2, 3))
        assert total_s >= 31 * 0.01
        for number, slices in ((1, 15), (2, 15), (3, 1)):
            done = turns.done(number)
            assert slices * 0.01 <= done.lane_s <= total_s - (31 - slices) * 0.01
            assert done.digest_s + done.copy_s <= done.lane_s


def test_jobs_may_be_added_from_another_thread_while_the_lane_runs() -> None:
    with make() as rig:
        images, turns = Images(rig), Turns(rig, LaneKind.RESTORE)
        jobs = [images.restore_job(number, 16 * number, 16) for number in range(30)]
        rig.memory[:] = 0

        def add_all() -> None:
            for job in jobs:
                turns.lane.add(rig.plan(job), NEVER, job.job % 3, lambda _, n=job.job: turns.ended.append(n))  # type: ignore[misc]

        adder = threading.Thread(target=add_all)
        adder.start()
        while adder.is_alive():
            turns.lane.serve()
        adder.join()
        turns.lane.serve()
        assert sorted(turns.ended) == list(range(30))
        assert images.rows_are(0, 480)


# --- layered restores -------------------------------------------------------------------------------------------------


def layered_rig(groups: int, **options: object) -> tuple[Rig, StageLayout]:
    planes = tuple(Plane(n * 128 * 256, 96, 128, 256) for n in range(6))
    state = Plane(6 * 128 * 256, 48, 64, 4)
    layout = StageLayout(layer_groups(planes, groups, 2), (StateGroup((state,)),), 16)
    return Rig(layout, shuttle_granules=300, **options), layout  # type: ignore[arg-type]


def group_offsets(layout: StageLayout, group: int, rows: range) -> list[tuple[int, int]]:
    return [
        (plane.offset_bytes + row * plane.row_stride_bytes, plane.row_bytes)
        for plane in layout.all_groups[group].planes
        for row in (rows if group < len(layout.groups) else range(2, 3))
    ]


@pytest.mark.parametrize("slice_bytes", [1, 6000, 1 << 20])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_each_group_of_a_layered_restore_is_there_when_it_is_told_and_the_next_is_not_begun(
    groups: int, slice_bytes: int
) -> None:
    rig, layout = layered_rig(groups, slice_bytes=slice_bytes)
    with rig:
        rows = range(100)
        packed = (*(pack_rows([(0, 100)]) for _ in range(groups)), pack_rows([(2, 1)]))
        places = rig.places(100, state_slot=2)
        capture = CaptureJob(1, 1, packed, 100, pack_places(places), False, pack_numbers((100,)))
        done = rig.run(capture)
        assert isinstance(done, JobDone)
        original = rig.memory.tobytes()
        rig.memory[:] = 0
        told: list[int] = []

        def group_done(group: int) -> None:
            told.append(group)
            memory = rig.memory.tobytes()
            for number in range(groups + 1):
                for at, size in group_offsets(layout, number, rows):
                    wanted = original[at : at + size] if number in told else bytes(size)
                    assert memory[at : at + size] == wanted, (group, number, at)

        restore = RestoreJob(
            2, 1, packed, 100, 100, pack_places(places), done.digests, ("xxh3-128",), False, pack_numbers((100,)),
            layered=True,
        )  # fmt: skip
        report = rig.run(restore, JobHooks(lambda: False, lambda: None, group_done))
        assert isinstance(report, JobDone)
        assert told == list(range(groups + 1))
        plain = msgspec.structs.replace(restore, layered=False)
        assert isinstance(rig.run(plain, JobHooks(lambda: False, lambda: None, told.append)), JobDone)
        assert len(told) == groups + 1


def test_a_layered_restore_that_fails_after_a_group_names_all_that_it_wrote() -> None:
    rig, _ = layered_rig(3, slice_bytes=1)
    with rig:
        packed = (*(pack_rows([(0, 64)]) for _ in range(3)), b"")
        places = [rig.place(span.length_bytes) for span in rig.layout.chunks(64)]
        done = rig.run(CaptureJob(1, 1, packed, 64, pack_places(places), False))
        assert isinstance(done, JobDone)
        rig.shuttle[places[5].extents[0].offset_bytes] ^= 1  # the second chunk of group 1
        told: list[int] = []
        job = RestoreJob(2, 1, packed, 64, 64, pack_places(places), done.digests, ("xxh3-128",), False, layered=True)
        failed = rig.run(job, JobHooks(lambda: False, lambda: None, told.append))
        assert isinstance(failed, JobFailed)
        assert (failed.code, failed.chunk, told) == ("damaged", 5, [0])
        assert [unpack_rows(rows) for rows in failed.rows_undefined] == [((0, 64),), ((0, 16),), (), ()]


def test_a_layered_restore_may_rest_at_any_slice() -> None:
    rig, layout = layered_rig(3, slice_bytes=1)
    with rig:
        turns = Turns(rig, LaneKind.RESTORE)
        original = rig.memory.tobytes()
        told: list[tuple[int, int]] = []
        jobs = []
        for number in (1, 2):
            packed = (*(pack_rows([(128 * (number - 1), 128)]) for _ in range(3)), b"")
            places = [rig.place(span.length_bytes) for span in layout.chunks(128)]
            done = rig.run(CaptureJob(number, 1, packed, 128, pack_places(places), False))
            assert isinstance(done, JobDone)
            jobs.append(
                RestoreJob(
                    number, 1, packed, 128, 128, pack_places(places), done.digests, ("xxh3-128",), False, layered=True
                )
            )
        rig.memory[:] = 0
        for job in jobs:
            hooks = JobHooks(lambda: False, lambda: None, lambda group, n=job.job: told.append((n, group)))  # type: ignore[misc]
            turns.lane.add(rig.plan(job), hooks, job.job, lambda report: turns.ended.append(report.job))
        turns.lane.serve()
        assert turns.ended == [1, 2]
        assert [group for number, group in told if number == 1] == [0, 1, 2]
        assert [group for number, group in told if number == 2] == [0, 1, 2]
        assert told.index((2, 0)) < told.index((1, 2))
        for group in range(3):
            for at, size in group_offsets(layout, group, range(256)):
                assert rig.memory[at : at + size].tobytes() == original[at : at + size]
