"""The wire of this protocol version, byte for byte."""

from pathlib import Path
from typing import Final

import msgspec
import pytest

from ipc.codec import encode
from tests.support.golden import FOLDER, golden_path, read_golden
from tests.support.samples import decode_as, message_types, sample

MESSAGES: Final = [pytest.param(*entry, id=f"{entry[0]}.{entry[1]}") for entry in message_types()]


@pytest.mark.parametrize(("name", "tag", "union", "kind"), MESSAGES)
def test_every_message_has_a_golden_frame_that_reads_and_writes_the_same(
    name: str, tag: str, union: object, kind: type[msgspec.Struct]
) -> None:
    path = golden_path(name, tag)
    assert path.exists(), f"no golden frame: run `python -m tests.support.golden` and look at {path.name}"
    frame = read_golden(path)
    message = decode_as(frame, union)
    assert type(message) is kind
    assert encode(message) == frame


@pytest.mark.parametrize(("name", "tag", "union", "kind"), MESSAGES)
def test_a_message_comes_back_equal(name: str, tag: str, union: object, kind: type[msgspec.Struct]) -> None:
    message = sample(kind)
    assert decode_as(encode(message), union) == message


def test_no_golden_frame_is_left_of_a_message_that_is_gone() -> None:
    expected = {golden_path(name, tag).name for name, tag, _, _ in message_types()}
    assert {path.name for path in Path(FOLDER).iterdir()} == expected
