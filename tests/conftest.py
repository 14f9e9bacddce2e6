"""Rules that hold for every test."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leaks import held_now, new_since
from tests.support.wait import wait_until

# On a busy host an example may take any time; that is no failure of what is tested.
settings.register_profile("stratad", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("stratad")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """After each test no new descriptor, child process, thread or segment may be left."""
    before = held_now()
    yield
    try:
        # What ends on its own in another thread or process gets a moment.
        wait_until(lambda: not new_since(before), timeout_s=2.0)
    except AssertionError:
        pytest.fail(f"the test left behind: {', '.join(new_since(before))}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means. One process where there is a GPU: the tests of the card measure what it has free. Each test
    starts processes of its own, so more than a few only get in each other's way.
    """
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), 4))


def pytest_configure() -> None:
    """A shell's background job has SIGINT ignored, and all its children inherit that: tests that interrupt must not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
