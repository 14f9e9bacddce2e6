"""How devices are spelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratad.devices import MAX_CPU_WORKERS, Devices, parse_devices

ONE = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-00000000-0000-4000-8000-000000000001"
MIG = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"
OLD_MIG = f"MIG-{ONE}/1/0"
AMD = "GPU-0123456789abcdef"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", Devices("auto")),
        ("cpu:1", Devices("cpu", cpu_count=1)),
        (f"cpu:{MAX_CPU_WORKERS}", Devices("cpu", cpu_count=MAX_CPU_WORKERS)),
        ("cuda:all", Devices("cuda")),
        (ONE, Devices("uuids", uuids=(ONE,))),
        (f"{ONE}, {MIG}", Devices("uuids", uuids=(ONE, MIG))),
        ([ONE, OTHER, AMD, OLD_MIG], Devices("uuids", uuids=(ONE, OTHER, AMD, OLD_MIG))),
        (["cpu:4"], Devices("cpu", cpu_count=4)),
    ],
)
def test_spellings(value: str | list[object], expected: Devices) -> None:
    assert parse_devices(value) == expected
    assert parse_devices(str(expected)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "no device"),
        ([], "no device is named"),
        (",", "no device"),
        (f"{ONE},", "no device"),
        ("-1", "index"),
        ("0", "index"),
        ("cuda:0", "index"),
        ("0,1", "index"),
        ([0], "index"),
        ("cpu", "no device"),
        ("cpu:", "no device"),
        ("cpu:0", "got 0"),
        ("cpu:-1", "got -1"),
        (f"cpu:{MAX_CPU_WORKERS + 1}", "1 to"),
        ("cpu:2,cpu:3", "no device"),
        ("auto,cpu:2", "no device"),
        (f"cuda:all,{ONE}", "no device"),
        ("all", "no device"),
        ("GPU-", "no device"),
        (ONE[:-1], "no device"),
        (ONE + "0", "no device"),
        (f"{ONE},{OTHER},{ONE}", "twice"),
        (f"{ONE},{ONE.upper()}", "twice"),
        (f"{ONE}\n{OTHER}", "no device"),
    ],
)
def test_what_is_refused(value: str | list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(value)


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    try:
        devices = parse_devices(text)
    except ValueError:
        return
    assert parse_devices(str(devices)) == devices
