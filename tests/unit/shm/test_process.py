"""Identity and death of real processes."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shm import process
from shm.process import boot_id, is_gone, open_pidfd, own_identity, pidfd_ended, start_ticks
from tests.support.wait import wait_until

LEADER_ENDS = """
import ctypes, threading
threading.Thread(target=lambda: input()).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
"""


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def test_own_identity_is_alive() -> None:
    assert own_identity().pid == os.getpid()
    assert not is_gone(*own_identity())


def test_a_child_lives_becomes_a_zombie_and_goes(child: "subprocess.Popen[bytes]") -> None:
    ticks = start_ticks(child.pid)
    assert ticks >= own_identity().start_ticks
    assert not is_gone(child.pid, ticks)
    pidfd = open_pidfd(child.pid, ticks)
    assert not os.get_inheritable(pidfd)
    assert not pidfd_ended(pidfd)
    child.kill()
    wait_until(lambda: pidfd_ended(pidfd))
    assert is_gone(child.pid, ticks)  # not reaped yet: a zombie
    assert start_ticks(child.pid) == ticks
    child.wait()
    assert is_gone(child.pid, ticks)
    os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        start_ticks(child.pid)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid, ticks)


def test_a_stopped_process_is_not_gone(child: "subprocess.Popen[bytes]") -> None:
    ticks = start_ticks(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert not is_gone(child.pid, ticks)


def test_a_later_process_under_the_same_pid(child: "subprocess.Popen[bytes]") -> None:
    earlier = start_ticks(child.pid) - 1
    assert is_gone(child.pid, earlier)
    with pytest.raises(ProcessLookupError, match="later"):
        open_pidfd(child.pid, earlier)


@pytest.mark.parametrize(("pid", "ticks"), [(0, 0), (0, 5), (-1, 5), (1, 0), pytest.param(os.getpid(), 0, id="own-0")])
def test_what_cannot_be_proved_is_not_gone(pid: int, ticks: int) -> None:
    assert not is_gone(pid, ticks)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the exit call is that of x86_64")
def test_a_dead_main_thread_does_not_make_a_process_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADER_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        wait_until(lambda: _state(child.pid) == "Z", what="the main thread is dead")
        ticks = start_ticks(child.pid)
        assert not is_gone(child.pid, ticks)
        child.kill()
        wait_until(lambda: is_gone(child.pid, ticks))


def test_the_number_of_a_thread_is_not_that_of_a_process() -> None:
    ready, end = threading.Event(), threading.Event()
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        ready.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        assert is_gone(numbers[0], own_identity().start_ticks - 1)
    finally:
        end.set()
        thread.join()


def test_a_name_full_of_brackets() -> None:
    libc = ctypes.CDLL(None)
    before = own_identity().start_ticks
    name = ctypes.create_string_buffer(16)
    libc.prctl(16, name)
    libc.prctl(15, b") R 1 (x) 7 )")
    try:
        assert own_identity().start_ticks == before
    finally:
        libc.prctl(15, name)


def test_no_pidfd_to_be_had_is_no_proof(monkeypatch: pytest.MonkeyPatch, child: "subprocess.Popen[bytes]") -> None:
    def full(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", full)
    assert not is_gone(child.pid, 1)


def test_proc_that_hides_the_process_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, child: "subprocess.Popen[bytes]"
) -> None:
    def hidden(pid: int) -> int:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(process, "start_ticks", hidden)
    assert not is_gone(child.pid, 5)
    child.kill()
    child.wait()
    assert is_gone(child.pid, 5)


def test_boot_id() -> None:
    assert len(boot_id()) == 16
    assert boot_id() == boot_id()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0]


def test_a_process_that_cannot_be_told_for_want_of_a_descriptor_costs_none(child: "subprocess.Popen[bytes]") -> None:
    ticks = start_ticks(child.pid)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest that is free: one more is allowed
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
    try:
        for _ in range(3):
            with pytest.raises(OSError, match="Too many open files"):
                open_pidfd(child.pid, ticks)
        os.close(os.dup(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
