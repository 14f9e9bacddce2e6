"""The limit of open files: raised as far as it goes, and a word where that is not far."""

import logging
import resource
from collections.abc import Iterator

import pytest

from stratad.open_files import OWN, PER_CLIENT, POOLS_PER_CLIENT, raise_open_files


@pytest.fixture(autouse=True)
def _soft_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_becomes_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = (hard - OWN) // (PER_CLIENT + POOLS_PER_CLIENT)
    with caplog.at_level(logging.WARNING):
        assert raise_open_files(enough) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert not caplog.records


def test_too_low_a_hard_limit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    clients = (hard - OWN) // (PER_CLIENT + POOLS_PER_CLIENT) + 1
    raise_open_files(clients)
    (record,) = caplog.records
    assert "LimitNOFILE" in record.message
