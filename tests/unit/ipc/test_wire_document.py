"""WIRE.md says what the code does: its tables, codes and examples are read out of it and compared."""

import json
import re
from pathlib import Path
from typing import Final, NamedTuple, get_args, get_type_hints

import msgpack
import msgspec
import pytest

import ipc.lifeline
import ipc.messages
from ipc.codec import encode
from ipc.messages import FINGERPRINT_REQUIRED, PROTOCOL_VERSION, SLOT_LIMIT, Hello, Reply, Request
from stratad.core.registration import ENGINE_LIMIT
from stratad.errors import CODES
from tests.support.samples import decode_as
from tests.support.schema import type_name

TEXT: Final = Path(ipc.messages.__file__).with_name("WIRE.md").read_text(encoding="utf-8")
UNIONS: Final = {"request": Request, "reply": Reply}
MESSAGES: Final = [
    pytest.param(kind, section, id=f"{section}.{kind.__struct_config__.tag}")
    for section, union in (("Requests", Request), ("Replies", Reply))
    for kind in get_args(union)
]


class Example(NamedTuple):
    """An example: what kind of frame, the message in words, and its bytes."""

    kind: str
    message: object
    frame: bytes


def chapter(title: str) -> str:
    """The text under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"WIRE.md has no chapter {title}"
    return found[1]


def headings(title: str) -> list[str]:
    return re.findall(r"^#### (.+)$", chapter(title), re.MULTILINE)


def table(title: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the fourth level, without the last column, which is for people."""
    found = re.search(rf"^#### {re.escape(heading)}\n(.*?)(?=^#### |\Z)", chapter(title), re.MULTILINE | re.DOTALL)
    assert found, f"WIRE.md, {title}: no {heading}"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", found[1], re.MULTILINE)
    return [list(row) for row in rows]


def default_name(field: msgspec.structs.FieldInfo) -> str:
    """How WIRE.md writes a default."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return f"`h'{value.hex()}'`" if isinstance(value, bytes) else f"`{json.dumps(value)}`"


def expected_table(kind: type[msgspec.Struct]) -> list[list[str]]:
    hints = get_type_hints(kind)
    return [[field.name, type_name(hints[field.name]), default_name(field)] for field in msgspec.structs.fields(kind)]


def value_structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct that is reached from a message of a client, but no message: by the heading it should have."""
    found: dict[str, type[msgspec.Struct]] = {}
    seen: set[object] = set()

    def visit(kind: object) -> None:
        if kind in seen:
            return
        seen.add(kind)
        for argument in get_args(kind):
            visit(argument)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not issubclass(kind, ipc.messages.Message):
                form = "array" if kind.__struct_config__.array_like else "map"
                found[f"{kind.__name__} ({form})"] = kind
            for hint in get_type_hints(kind).values():
                visit(hint)

    visit(Request)
    visit(Reply)
    return found


def examples() -> list[Example]:
    """Every pair of a message in diagnostic notation and the hex of its frame."""
    found = re.findall(r"```diag (\w+)\n(.*?)```\n```hex\n(.*?)```", TEXT, re.DOTALL)
    return [Example(kind, diagnostic(message), bytes.fromhex(frame)) for kind, message, frame in found]


def diagnostic(text: str) -> object:
    """JSON in which ``h'..'`` is a bin."""
    marked = json.loads(re.sub(r"h'([0-9a-f]*)'", r'"\\u0000\1"', text.replace("\n", " ")))

    def unmark(value: object) -> object:
        if isinstance(value, str) and value.startswith("\0"):
            return bytes.fromhex(value[1:])
        if isinstance(value, list):
            return [unmark(item) for item in value]
        if isinstance(value, dict):
            return {key: unmark(item) for key, item in value.items()}
        return value

    return unmark(marked)


@pytest.mark.parametrize(("kind", "title"), MESSAGES)
def test_the_table_of_a_message_is_its_fields(kind: type[msgspec.Struct], title: str) -> None:
    assert table(title, f"`{kind.__struct_config__.tag}`") == expected_table(kind)


def test_no_message_is_told_of_that_is_none() -> None:
    for title, union in (("Requests", Request), ("Replies", Reply)):
        assert sorted(headings(title)) == sorted(f"`{kind.__struct_config__.tag}`" for kind in get_args(union))


def test_the_table_of_a_value_is_its_fields_in_their_order() -> None:
    structs = value_structs()
    assert sorted(headings("Values")) == sorted(structs)
    for heading, kind in structs.items():
        assert table("Values", heading) == expected_table(kind), heading
        tag = kind.__struct_config__.tag
        assert tag is None or f"#### {heading}\n\nIts key `t` is `{tag}`." in TEXT


def test_the_codes_are_those_of_the_errors() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", chapter("Errors"), re.MULTILINE)) == sorted(CODES)


def test_there_are_examples_of_a_whole_session() -> None:
    shown = [
        example.message["t"] for example in examples() if isinstance(example.message, dict) if "t" in example.message
    ]
    session = "hello welcome register registered capture progress captured lookup found restore failed"
    assert shown == session.split()


@pytest.mark.parametrize("example", [pytest.param(e, id=f"{n}.{e.kind}") for n, e in enumerate(examples())])
def test_an_example_is_what_the_codec_writes(example: Example) -> None:
    assert msgpack.unpackb(example.frame) == example.message
    if example.kind == "packet":
        assert example.frame == msgpack.packb(example.message)
        return
    message = decode_as(example.frame, UNIONS[example.kind])
    assert encode(message) == example.frame


def test_the_example_of_a_greeting_is_of_this_version() -> None:
    packet, hello = examples()[:2]
    message = decode_as(hello.frame, Request)
    assert isinstance(message, Hello)
    assert message.version == PROTOCOL_VERSION
    assert isinstance(packet.message, dict)
    assert message.token == packet.message["token"]
    assert f"Version {PROTOCOL_VERSION} of the protocol" in TEXT
    assert f"hello(version={PROTOCOL_VERSION}, token)" in TEXT


def test_the_numbers_of_the_text_are_those_of_the_code() -> None:
    assert all(f"`{name}`" in chapter("A session") for name in FINGERPRINT_REQUIRED)
    assert f"At most {ipc.lifeline.MAX_STASHED} descriptors are taken in ahead" in TEXT
    assert f"more than {ENGINE_LIMIT} engines of this client" in chapter("Errors")
    slots = re.findall(r"^\| `(?:source_|target_)?slot` \| .*$", chapter("Requests"), re.MULTILINE)
    assert len(slots) == 9
    assert all(f"0 to {SLOT_LIMIT - 1}" in row for row in slots)
    (tag,) = re.findall(r"packet of tag 1 has the bytes `([0-9a-f]+)`", TEXT)
    assert bytes.fromhex(tag) == (1).to_bytes(8, "little")


def test_every_link_inside_the_document_leads_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert links
    assert links <= anchors, links - anchors
