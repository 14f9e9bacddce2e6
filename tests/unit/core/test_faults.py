"""Faults that an admin arms, through the core."""

from collections.abc import Callable

import pytest

from ipc.messages import (
    ArmFault,
    CaptureJob,
    CopyJob,
    DigestJob,
    DisarmFault,
    Done,
    FaultArm,
    FaultDisarm,
    FaultList,
    Faults,
    FaultStruck,
    RestoreJob,
)
from tests.support.core_harness import Harness

MakeCore = Callable[..., Harness]


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core(allow_faults=True)
    harness.connect()
    return harness


def arm(core: Harness, *, client: int = 1, **changes: object) -> int:
    """Ask for a fault; the number of the request."""
    values: dict[str, object] = {"op": "capture", "stage": 1, "kind": "kill", "at": 2, **changes}
    request = FaultArm(core.next_seq(), **values)  # type: ignore[arg-type]
    core.ask(client, request)
    return request.seq


def armed(core: Harness) -> list[int]:
    request = FaultList(core.next_seq())
    core.ask(1, request)
    reply = core.final(1, request.seq)
    assert isinstance(reply, Faults)
    return [info.fault for info in reply.faults]


def test_a_fault_goes_to_the_worker_that_serves_the_stage(core: Harness) -> None:
    core.register()
    reply = core.final(1, arm(core))
    assert isinstance(reply, Faults)
    (info,) = reply.faults
    assert (info.op, info.stage, info.kind, info.at, info.worker) == ("capture", 1, "kill", 2, "cpu:1")
    assert core.sent == {"cpu:1": [ArmFault(info.fault, "capture", 1, "kill", 2)]}
    assert armed(core) == [info.fault]


@pytest.mark.parametrize("request_type", [FaultArm, FaultList, FaultDisarm])
def test_nothing_can_be_armed_in_a_daemon_that_does_not_allow_it(
    make_core: MakeCore, request_type: type[FaultArm | FaultList | FaultDisarm]
) -> None:
    core = make_core()
    core.connect()
    core.register()
    seq = core.next_seq()
    request = FaultArm(seq, "capture", 0, "kill") if request_type is FaultArm else request_type(seq)  # type: ignore[call-arg]
    core.ask(1, request)
    assert core.failure(1, seq).code == "faults_off"
    assert core.sent == {}


def test_only_admins_arm_faults(core: Harness) -> None:
    core.register()
    core.connect(2, uid=2000)
    assert core.failure(2, arm(core, client=2)).code == "not_permitted"
    assert core.sent == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op": "put_part"}, "op must be one of"),
        ({"kind": "bang"}, "kind must be one of"),
        ({"at": 0}, "at must be 1 to"),
        ({"at": 1_000_001}, "at must be 1 to"),
        ({"stage": 2}, "stage 2 of the registered engines does not exist"),
        ({"stage": -1}, "stage -1 of the registered engines does not exist"),
        ({"engine_id": 99}, "stage 1 of engine 99 does not exist"),
    ],
)
def test_what_cannot_be_armed_is_refused(core: Harness, changes: dict[str, object], says: str) -> None:
    core.register()
    failure = core.failure(1, arm(core, **changes))  # type: ignore[arg-type]
    assert failure.code == "bad_value"
    assert says in failure.message
    assert core.sent == {}
    assert armed(core) == []


def test_without_an_engine_there_is_no_stage(core: Harness) -> None:
    assert core.failure(1, arm(core)).code == "bad_value"


def test_a_worker_that_is_not_ready_takes_no_fault(core: Harness) -> None:
    core.register()
    core.worker_gone("cpu:1")
    assert core.failure(1, arm(core)).code == "worker_unavailable"


def test_a_fault_that_has_struck_is_armed_no_more(core: Harness) -> None:
    core.register()
    arm(core)
    (number,) = armed(core)
    core.report("cpu:1", FaultStruck(number))
    assert armed(core) == []
    assert core.core.state.counters["faults_struck"] == 1
    core.report("cpu:1", FaultStruck(number))  # of one that was disarmed on its way
    assert core.core.state.counters["faults_struck"] == 1


def test_faults_end_with_their_worker(core: Harness) -> None:
    core.register()
    arm(core)
    arm(core, stage=0)
    _, other = armed(core)
    core.worker_gone("cpu:1")
    assert armed(core) == [other]


def test_faults_are_disarmed_one_by_one_or_all_at_once(core: Harness) -> None:
    core.register()
    for stage in (0, 1, 1):
        arm(core, stage=stage)
    first, second, third = armed(core)
    core.sent.clear()
    one = FaultDisarm(core.next_seq(), second)
    core.ask(1, one)
    assert core.final(1, one.seq) == Done(one.seq, 1)
    assert armed(core) == [first, third]
    again = FaultDisarm(core.next_seq(), second)
    core.ask(1, again)
    assert core.failure(1, again.seq).code == "bad_value"
    rest = FaultDisarm(core.next_seq())
    core.ask(1, rest)
    assert core.final(1, rest.seq) == Done(rest.seq, 2)
    assert core.sent == {"cpu:1": [DisarmFault(second), DisarmFault(third)], "cpu:0": [DisarmFault(first)]}


def test_jobs_say_what_they_are_part_of(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(10))
    core.slot_copy(engine, "slot_direct", first_row=100)
    core.slot_copy(engine, "slot_to", first_row=2000)
    found = [(type(job), job.op, job.stage) for job in core.jobs("cpu:1") if not isinstance(job, DigestJob)]
    assert found == [(CaptureJob, "capture", 1), (CopyJob, "slot_direct", 1), (CaptureJob, "slot_to", 1)]
    core.finish_all()
    core.restore(engine, "a", 10, first_row=3000)
    core.restore(engine, "a", 10, first_row=3100, take=True)
    jobs = [job for job in core.jobs("cpu:0") if not isinstance(job, DigestJob)]
    assert [(type(job), job.op, job.stage) for job in jobs] == [
        (RestoreJob, "restore", 0),
        (RestoreJob, "take", 0),
    ]
