"""Headers and names of segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.header import HEADER_BYTES, ShuttleHeader, pack_header, segment_name, split_segment_name, unpack_header

HEADERS = st.builds(
    ShuttleHeader,
    st.from_regex(r"[a-z0-9_-]{1,32}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.integers(0, 10**9 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)


@given(HEADERS)
def test_headers_and_names_come_back(header: ShuttleHeader) -> None:
    assert unpack_header(pack_header(header) + b"later bytes") == header
    assert split_segment_name(header.segment) == (header.instance, header.worker, header.index)
    assert segment_name(header.instance, header.worker, header.index) == header.segment


@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen(header: ShuttleHeader, at: int, change: int) -> None:
    packed = bytearray(pack_header(header))
    packed[at] ^= change
    with pytest.raises(ValueError, match="header"):
        unpack_header(bytes(packed))


@given(st.binary(max_size=HEADER_BYTES - 1))
def test_cut_short(packed: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        unpack_header(packed)


def test_colons_of_workers() -> None:
    assert segment_name("default", "cpu:1", 0) == "/stratad.default.cpu_1.0"


@pytest.mark.parametrize(
    ("instance", "worker", "index"),
    [
        ("", "cpu_0", 0),
        ("A", "cpu_0", 0),
        ("a.b", "c", 0),
        ("a" * 33, "c", 0),
        ("a", "", 0),
        ("a", "../x", 0),
        ("a", "c", -1),
    ],
)
def test_names_that_cannot_be(instance: str, worker: str, index: int) -> None:
    with pytest.raises(ValueError, match="segment name"):
        segment_name(instance, worker, index)


@pytest.mark.parametrize(
    "name", ["/stratad.a.b", "/stratad.a.b.01", "/stratad.a.b.c.1", "/other.a.b.1", "/stratad.a.b.1x"]
)
def test_foreign_names(name: str) -> None:
    assert split_segment_name(name) is None
