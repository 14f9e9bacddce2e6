"""Whatever the bytes: a message or `BadFrame`, and never much memory."""

import math
import struct
import tracemalloc
from typing import Final

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import codec
from ipc.codec import BadFrame, EncodeError, decode, decode_own, encode
from ipc.messages import (
    CancelJob,
    Capture,
    Command,
    Hello,
    JobDone,
    JobFailed,
    Lookup,
    Reply,
    Report,
    Request,
    Restore,
    Stats,
    StatsReply,
)
from tests.support.samples import decode_as, sample

CAPTURE: Final = Capture(
    seq=7, engine_id=1, conversation="c", tokens=b"\1\0\0\0", rows=((b"r" * 8,),), slot=2, ordered="host"
)

OUTCOMES: Final = {"message", "bad_frame", "bad_request", "unknown_op"}


def refused(frame: bytes, union: object = Request) -> BadFrame:
    """The `BadFrame` of a frame; anything else, a message too, fails the test."""
    with pytest.raises(BadFrame) as caught:
        decode_as(frame, union)
    assert caught.value.code in OUTCOMES - {"message"}
    assert len(caught.value.message) < 500
    return caught.value


def outcome(frame: bytes, union: object) -> str:
    """What a frame is; whatever else than `BadFrame` is raised fails the test."""
    try:
        decode_as(frame, union)
    except BadFrame as bad:
        return bad.code
    return "message"


@pytest.mark.parametrize("byte", range(256))
def test_single_bytes(byte: int) -> None:
    bad = refused(bytes([byte]))
    assert (bad.code, bad.seq) == ("bad_frame", -1)


def test_empty_frame() -> None:
    assert refused(b"").code == "bad_frame"


@pytest.mark.parametrize("message", [CAPTURE, sample(Restore), sample(Hello)])
def test_truncated_at_each_byte(message: Capture) -> None:
    frame = encode(message)
    for end in range(len(frame)):
        assert refused(frame[:end]).code == "bad_frame"


@pytest.mark.parametrize("tail", [b"\0", b"\xc0", b"\x80", encode(CAPTURE), b"\xc1"])
def test_trailing_data(tail: bytes) -> None:
    assert refused(encode(CAPTURE) + tail).code == "bad_frame"


@pytest.mark.parametrize("head", [b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"])
@pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1, 2**26])
@pytest.mark.parametrize("prefix", [b"", b"\x82\xa1t\xa5hello\xa5token"])
def test_huge_declared_lengths_are_refused_without_the_memory(head: bytes, length: int, prefix: bytes) -> None:
    tracemalloc.start()
    try:
        refused(prefix + head + struct.pack(">I", length) + b"x" * 10)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [10, 500, 2000, 1_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1t", b"\x81\xa1x"])
def test_deep_nesting(depth: int, opening: bytes) -> None:
    refused(opening * depth + b"\xc0")


@pytest.mark.parametrize("depth", [10, 500, 2000, 1_000_000])
def test_deep_nesting_in_a_field(depth: int) -> None:
    start = b"\x82\xa1t\xa5stats\xa3seq"
    refused(start + b"\x91" * depth + b"\x01")


@pytest.mark.parametrize(
    "extension",
    [
        b"\xc7\0\5",  # no bytes at all
        b"\xd4\5x",
        b"\xd6\xff\0\0\0\1",  # a timestamp
        b"\xd7\xff" + b"\0" * 8,
        b"\xc7\x0c\xff" + b"\0" * 12,
    ],
)
def test_extension_types(extension: bytes) -> None:
    assert refused(extension).code == "bad_frame"
    # Also where nobody would look at the value: in a field that is not known.
    assert refused(b"\x83\xa1t\xa5stats\xa3seq\x01\xa1x" + extension).code == "bad_frame"


@pytest.mark.parametrize("value", [None, 1, -1, 1.5, "text", b"bytes", [1], True])
def test_top_level_that_is_no_map(value: object) -> None:
    assert refused(msgpack.packb(value)).code == "bad_frame"


@pytest.mark.parametrize("key", [1, None, 1.5, True, (1,)])
def test_map_keys_that_are_no_text(key: object) -> None:
    assert refused(b"\x81" + msgpack.packb(key) + b"\x01").code == "bad_frame"


@pytest.mark.parametrize("fields", [{}, {"seq": 4}, {"t": 5, "seq": 4}, {"t": None, "seq": 4}, {"t": ["x"], "seq": 4}])
def test_no_type_name(fields: dict[str, object]) -> None:
    bad = refused(msgpack.packb(fields))
    assert (bad.code, bad.seq) == ("bad_frame", fields.get("seq", -1))


def test_unknown_type_keeps_its_seq() -> None:
    bad = refused(msgpack.packb({"t": "format_disk", "seq": 41}))
    assert (bad.code, bad.seq) == ("unknown_op", 41)
    assert "format_disk" in bad.message


def test_a_message_of_the_other_direction_is_unknown() -> None:
    assert refused(encode(Stats(seq=3)), Reply).code == "unknown_op"


@pytest.mark.parametrize(
    ("seq", "kept"),
    [(0, 0), (-5, -5), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (2**63, -1), (True, -1), (1.0, -1), ("1", -1)],
)
def test_which_seq_is_kept(seq: object, kept: int) -> None:
    assert refused(msgpack.packb({"t": "nonsense", "seq": seq})).seq == kept


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"engine_id": "1"}, "$.engine_id"),
        ({"engine_id": 1.0}, "$.engine_id"),
        ({"engine_id": True}, "$.engine_id"),
        ({"engine_id": None}, "$.engine_id"),
        ({"tokens": "AAAA"}, "$.tokens"),
        ({"rows": b"rrrr"}, "$.rows"),
        ({"rows": [[b"r"], 5]}, "$.rows[1]"),
        ({"rows": [[b"r"], [5]]}, "$.rows[1][0]"),
        ({"conversation": b"c"}, "$.conversation"),
        ({"deadline_s": math.nan}, "$.deadline_s"),
        ({"deadline_s": math.inf}, "$.deadline_s"),
        ({"deadline_s": -math.inf}, "$.deadline_s"),
        ({"deadline_s": "30"}, "$.deadline_s"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, object], path: str) -> None:
    fields = msgpack.unpackb(encode(CAPTURE)) | change
    bad = refused(msgpack.packb(fields))
    assert (bad.code, bad.seq) == ("bad_request", 7)
    assert path in bad.message


def test_missing_field_is_named() -> None:
    bad = refused(msgpack.packb({"t": "lookup", "seq": 9}))
    assert (bad.code, bad.seq) == ("bad_request", 9)
    assert "engine_id" in bad.message


def test_unknown_fields_are_ignored() -> None:
    frame = msgpack.packb({"t": "stats", "seq": 9, "since": 12, "more": {"a": [1, None]}})
    assert decode(frame, Request) == Stats(seq=9)


def test_bad_unicode() -> None:
    assert refused(b"\x81\xa1t\xa2\xff\xfe").code == "bad_frame"


def test_long_names_do_not_come_back_whole() -> None:
    assert len(refused(msgpack.packb({"t": "x" * 60_000})).message) < 500


def test_a_memoryview_is_a_frame() -> None:
    assert decode(memoryview(encode(CAPTURE)), Request) == CAPTURE


def test_large_binary_passes() -> None:
    message = Lookup(seq=1, engine_id=1, tokens=b"t" * 8_000_000)
    assert decode(encode(message), Request) == message


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\xc0", b"\xa2ab"])
def test_a_frame_of_many_small_things_is_refused(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nested, so that each array stays below its own limit: only their sum is too much.
    monkeypatch.setattr(codec, "MAX_ITEMS", 45_000)
    monkeypatch.setattr(codec, "SMALL_FRAME_BYTES", 100)
    inner = b"\xdd" + struct.pack(">I", 10_000) + item * 10_000
    frame = b"\x83\xa1t\xa5stats\xa3seq\x01\xa1x" + b"\x95" + inner * 5
    assert "items" in refused(frame).message
    assert decode(b"\x83\xa1t\xa5stats\xa3seq\x01\xa1x" + b"\x92" + inner * 2, Request) == Stats(seq=1)


def test_what_maps_hold_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ITEMS", 45_000)
    monkeypatch.setattr(codec, "SMALL_FRAME_BYTES", 100)
    inner = b"\xdd" + struct.pack(">I", 10_000) + b"\x81\xa1a\xc0" * 10_000
    assert "items" in refused(b"\x83\xa1t\xa5stats\xa3seq\x01\xa1x" + b"\x92" + inner * 2).message


def test_what_a_frame_may_become_stays_moderate() -> None:
    assert codec.MAX_ITEMS <= 2**21  # 72 bytes each at worst
    assert codec.SMALL_FRAME_BYTES <= 2**16


@pytest.mark.parametrize("count", [codec.MAX_ARRAY_ITEMS + 1])
def test_one_long_array(count: int) -> None:
    frame = b"\x83\xa1t\xa5stats\xa3seq\x01\xa1x\xdd" + struct.pack(">I", count) + b"\xc0" * count
    assert "max_array_len" in refused(frame).message


@given(st.binary(max_size=200))
def test_any_bytes(frame: bytes) -> None:
    for union in (Request, Reply, Report):
        assert outcome(frame, union) in OUTCOMES


@given(st.data())
def test_changed_bytes(data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(st.sampled_from([CAPTURE, sample(Restore), sample(Hello)]))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert outcome(bytes(frame), Request) in OUTCOMES


_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
_VALUES = _LEAVES | st.lists(_LEAVES, max_size=3) | st.dictionaries(st.sampled_from("abc"), _LEAVES, max_size=2)
_NAMES = st.sampled_from(["seq", "stages", "fingerprint", "rows", "tokens", "namespace", "engine", "version"])


@given(
    st.sampled_from(["hello", "register", "capture", "restore", "list", "nonsense"]),
    st.dictionaries(_NAMES, _VALUES, max_size=4),
)
def test_any_fields(tag: str, fields: dict[str, object]) -> None:
    assert outcome(msgpack.packb({"t": tag, **fields}), Request) in OUTCOMES


@pytest.mark.parametrize("seq", [2**64, -(2**63) - 1, 10**40])
def test_integers_over_64_bits_cannot_be_sent(seq: int) -> None:
    with pytest.raises(EncodeError, match="Stats"):
        encode(Stats(seq=seq))


@pytest.mark.parametrize("seq", [2**64 - 1, -(2**63)])
def test_integers_of_64_bits_can(seq: int) -> None:
    assert decode(encode(Stats(seq=seq)), Request) == Stats(seq=seq)


@pytest.mark.parametrize("value", [object(), "\ud800", {1, object()}])
def test_what_cannot_be_encoded(value: object) -> None:
    with pytest.raises(EncodeError):
        encode(Stats(seq=value))  # type: ignore[arg-type]


def test_defaults_are_left_out() -> None:
    assert b"deadline_s" not in encode(CAPTURE)
    assert b"digests" not in encode(JobDone(job=1, moved_bytes=1, digest_s=0.0, copy_s=0.0))


def test_counts_of_any_size_travel() -> None:
    stats = sample(StatsReply)
    assert decode(encode(stats), Reply) == stats


def test_our_own_processes_messages_are_read_in_one_step() -> None:
    """The same frames, whichever way they are read."""
    for report in (JobDone(7, 65536, 0.1, 0.2, b"d" * 16), JobFailed(8, "damaged", "chunk 3", 3, (b"12345678",))):
        assert decode_own(encode(report), Report) == decode(encode(report), Report) == report
    assert decode_own(encode(CancelJob(3)), Command) == CancelJob(3)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({"t": "no such"}),
        encode(CancelJob(3)),
        encode(JobDone(7, 1, 0.0, 0.0))[:-1],
    ],
)
def test_what_is_no_message_of_our_own_is_a_bad_frame(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_own(frame, Report)
