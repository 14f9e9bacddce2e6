"""Every test of the core ends with a full recount."""

from collections.abc import Callable, Iterator

import pytest

from stratad.core.adoption import Legacy
from tests.support.core_harness import Harness


@pytest.fixture
def make_core() -> Iterator[Callable[..., Harness]]:
    """Makes cores; each is validated when the test ends."""
    made: list[Harness] = []

    def make(
        workers: int = 2, devices: dict[str, str] | None = None, legacy: Legacy | None = None, **changes: object
    ) -> Harness:
        harness = Harness.make(workers, devices, legacy, **changes)
        made.append(harness)
        return harness

    yield make
    for harness in made:
        harness.core.validate()
