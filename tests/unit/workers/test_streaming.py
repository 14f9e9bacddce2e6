"""The environment of processes that copy."""

import pytest

from workers.streaming import with_streaming

MINE = "glibc.cpu.x86_non_temporal_threshold"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, f"{MINE}=0xc000"),
        ({"GLIBC_TUNABLES": ""}, f"{MINE}=0xc000"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, f"glibc.malloc.arena_max=1:{MINE}=0xc000"),
        ({"GLIBC_TUNABLES": f"{MINE}=0x100000"}, f"{MINE}=0x100000"),
    ],
)
def test_a_threshold_is_added_unless_somebody_chose_one(given: dict[str, str], wanted: str) -> None:
    assert with_streaming({**given, "HOME": "/x"}) == {"HOME": "/x", "GLIBC_TUNABLES": wanted}
