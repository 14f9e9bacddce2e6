"""The limit of open files: raised as far as it goes, and a word where that is not far."""

import logging
import resource
from collections.abc import Iterator

import pytest

from stratad.open_files import LEAST, SPARE_LEAST, clients_served, raise_open_files, spare_files


@pytest.fixture(autouse=True)
def _soft_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_becomes_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with caplog.at_level(logging.WARNING):
        assert raise_open_files(clients_served(hard)) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert not caplog.records


def test_too_low_a_hard_limit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    raise_open_files(clients_served(hard) + 1)
    (record,) = caplog.records
    assert "LimitNOFILE" in record.message


def test_what_no_client_is_given_grows_with_the_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    assert spare_files() == SPARE_LEAST
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert spare_files() == 128
    assert clients_served(LEAST) == 1
    assert clients_served(LEAST - 1) == 0
