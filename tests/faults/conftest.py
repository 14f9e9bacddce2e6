"""A daemon that several tests of a module share."""

from collections.abc import Iterator

import pytest

from stratad.client import Client
from tests.support.daemon import DaemonProcess


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon with two `cpu` workers."""
    with DaemonProcess("cpu:2") as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """A client of the shared daemon."""
    with daemon.client() as connected:
        yield connected
