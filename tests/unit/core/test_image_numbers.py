"""A conversation has one image a fingerprint: requests mean all of them, the latest, or one by its number."""

from collections.abc import Callable

import pytest

from ipc.messages import Captured, Done, Drop, ImageDetail, Pin, Request, Show
from tests.support.core_harness import FINGERPRINT, Harness

BUILDS = ("e1", "e2", "e3")


@pytest.fixture
def core(make_core: Callable[..., Harness]) -> Harness:
    """A core with a client."""
    harness = make_core()
    harness.connect()
    return harness


def capture_by_builds(core: Harness, namespace: str = "ns", conversation: str = "a") -> list[int]:
    """The numbers of a conversation's images, one of each build of an engine."""
    found: list[int] = []
    for build in BUILDS:
        engine = core.register(namespace=namespace, fingerprint={**FINGERPRINT, "engine_build": build})
        seq = core.capture(engine, conversation, range(10))
        core.finish_all()
        captured = core.final(1, seq)
        assert isinstance(captured, Captured)
        found.append(captured.image_id)
    return found


def show(core: Harness, image_id: int = 0) -> ImageDetail:
    """What `Show` says of the conversation."""
    request = Show(core.next_seq(), "ns", "a", image_id)
    core.ask(1, request)
    detail = core.final(1, request.seq)
    assert isinstance(detail, ImageDetail)
    return detail


def pinned(core: Harness) -> list[int]:
    """The numbers of all pinned images."""
    return [image.image_id for image in core.core.state.catalog.images.values() if image.pinned]


def test_show_means_the_latest_or_the_one_that_is_named(core: Harness) -> None:
    first, second, third = capture_by_builds(core)
    latest = show(core)
    assert (latest.image.image_id, latest.others) == (third, (first, second))
    named = show(core, first)
    assert (named.image.image_id, named.fingerprint["engine_build"], named.others) == (first, "e1", (second, third))


def test_pin_means_all_or_the_one_that_is_named(core: Harness) -> None:
    images = capture_by_builds(core)
    pin = Pin(core.next_seq(), "ns", "a", True, images[1])
    assert core.ask(1, pin) == [Done(pin.seq, 1)]
    assert pinned(core) == [images[1]]
    pin = Pin(core.next_seq(), "ns", "a", True)
    assert core.ask(1, pin) == [Done(pin.seq, 3)]
    assert pinned(core) == images
    core.ask(1, Pin(core.next_seq(), "ns", "a", False, images[2]))
    assert pinned(core) == images[:2]


def test_drop_means_all_or_the_one_that_is_named(core: Harness) -> None:
    first, second, third = capture_by_builds(core)
    core.ask(1, Pin(core.next_seq(), "ns", "a", True, second))
    drop = Drop(core.next_seq(), "ns", "a")
    core.ask(1, drop)
    assert core.failure(1, drop.seq).code == "pinned"
    assert set(core.core.state.catalog.images) == {first, second, third}
    drop = Drop(core.next_seq(), "ns", "a", image_id=first)  # another one being pinned is no hindrance
    assert core.ask(1, drop) == [Done(drop.seq, 1)]
    assert set(core.core.state.catalog.images) == {second, third}
    drop = Drop(core.next_seq(), "ns", "a", image_id=second)
    core.ask(1, drop)
    assert core.failure(1, drop.seq).code == "pinned"
    drop = Drop(core.next_seq(), "ns", "a", force=True)
    assert core.ask(1, drop) == [Done(drop.seq, 2)]


def test_a_number_of_another_name_is_refused(core: Harness) -> None:
    capture_by_builds(core)
    (other, *_) = capture_by_builds(core, conversation="b")
    (foreign, *_) = capture_by_builds(core, namespace="theirs")
    before = set(core.core.state.catalog.images)
    for image_id in (other, foreign, 999, -1):
        requests: tuple[Request, ...] = (
            Show(core.next_seq(), "ns", "a", image_id),
            Pin(core.next_seq(), "ns", "a", True, image_id),
            Drop(core.next_seq(), "ns", "a", True, image_id),
            Show(core.next_seq(), "ns", "none", image_id),
        )
        for request in requests:
            core.ask(1, request)
            assert core.failure(1, request.seq).code == "unknown_image", request
    assert (set(core.core.state.catalog.images), pinned(core)) == (before, [])
