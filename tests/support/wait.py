"""Waiting for something that another thread, process or the kernel does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 5.0, what: str = "") -> T:
    """Call `predicate` until it returns something true, and return that.

    Raises:
        AssertionError: it did not within `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    pause_s = 0.0005
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"{what or predicate} did not become true within {timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.02)
