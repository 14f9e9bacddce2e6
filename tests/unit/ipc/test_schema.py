"""The rules of change: what this version of the protocol promised, it keeps."""

import pytest

from tests.support.schema import broken_promises, read_schema, schema, schema_path


def test_this_version_keeps_what_it_promised() -> None:
    assert schema_path().exists(), "a new version: run `python -m tests.support.schema`"
    assert broken_promises(read_schema(), schema()) == [], "raise PROTOCOL_VERSION, or do it otherwise"


PROMISED = {
    "request.hello": "map",
    "request.hello.seq": "int required",
    "request.hello.client": "str default",
    "Plane": "array",
    "Plane.0:offset": "int required",
}


@pytest.mark.parametrize(
    ("name", "what", "kept"),
    [
        ("request.hello.client", "", False),
        ("request.hello.client", "bin default", False),
        ("request.hello.client", "str required", False),
        ("request.hello", "", False),
        ("Plane.0:offset", "", False),
        ("request.hello.more", "int required", False),
        ("request.hello.more", "int default", True),
        ("Plane.1:more", "int default", True),
        ("request.other", "map", True),
        ("request.other.seq", "int required", True),
    ],
)
def test_what_needs_another_version(name: str, what: str, kept: bool) -> None:
    now = {**PROMISED, "request.other": "map", name: what}
    if not what:
        del now[name]
    assert (broken_promises(PROMISED, now) == []) is kept
