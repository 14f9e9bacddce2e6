"""What stratactl shows: tables, sizes, and the JSON keys that scripts read."""

import json
import re

import msgspec
import pytest

from ipc.messages import EXCHANGE_ROW_BYTES, PartInfo, ProcessMemory
from shm.extent import GRANULE_BYTES
from stratad.ctl import images
from stratad.ctl.output import human_age, human_bytes, table
from stratad.ctl.status import cpu_ranges, describe, status
from tests.support.ctl_fakes import DETAIL, IMAGE, STATS, FakeClient


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_human_bytes(size_bytes: int | None, text: str) -> None:
    assert human_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 m 0 s"), (3599, "59 m 59 s"), (3600, "1 h 0 m"), (90000, "1 d 1 h")],
)
def test_human_age(age_s: float, text: str) -> None:
    assert human_age(age_s) == text


def test_table_aligns_words_left_and_numbers_right() -> None:
    assert table(("name", "n"), [("a", "5"), ("bcdef", "12")]) == ["name    n", "a       5", "bcdef  12"]


def test_table_of_nothing_is_its_head() -> None:
    assert table(("name", "n"), []) == ["name  n"]


def test_a_name_cannot_write_to_the_terminal() -> None:
    line = table(("name",), [("\x1b[31mred\n",)])[1]
    assert line == "\\x1b[31mred\\x0a"


@pytest.mark.parametrize(("cpus", "text"), [((), "-"), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8"), ((2, 1), "1-2")])
def test_cpu_ranges(cpus: tuple[int, ...], text: str) -> None:
    assert cpu_ranges(cpus) == text


def test_status_puts_the_kernels_view_beside_the_daemons() -> None:
    answer = status(FakeClient(), {100: 41 << 20, 101: 2200 << 20, 102: 500 << 20}.get)
    processes = json.loads(json.dumps(answer.data))["processes"]
    assert [process["pid"] for process in processes] == [100, 101, 102]
    supervisor, worker, engine = processes
    assert supervisor["resident_bytes"] == 41 << 20
    assert supervisor["reported_rss_bytes"] == 40 << 20
    assert worker["resident_bytes"] == 2200 << 20
    assert worker["accounted_bytes"] == 2 << 30
    assert worker["shmem_bytes"] == 2 << 30
    assert engine["role"] == "engine an-engine"
    assert engine["reported_rss_bytes"] is None
    memory_lines = "\n".join(answer.lines)
    assert "2.1 GiB" in memory_lines
    assert "500.0 MiB" in memory_lines


def test_status_shows_what_cannot_be_seen_as_unknown() -> None:
    answer = status(FakeClient(), lambda _pid: None)
    assert all(process["resident_bytes"] is None for process in json.loads(json.dumps(answer.data))["processes"])


def test_status_names_a_dead_worker_without_a_process() -> None:
    dead = msgspec.structs.replace(STATS.workers[0], pid=0, state="failed", detail="no device memory")
    answer = describe(msgspec.structs.replace(STATS, workers=(dead,)), lambda _pid: 1)
    processes = json.loads(json.dumps(answer.data))["processes"]
    assert 0 not in [process["pid"] for process in processes]
    assert any("no device memory" in line for line in answer.lines)


def test_status_of_an_empty_daemon() -> None:
    empty = msgspec.structs.replace(STATS, workers=(), engines=(), ops=(), memory=())
    lines = describe(empty, lambda _pid: 1).lines
    assert {"workers: none", "engines: none", "operations in flight: none"} <= set(lines)


def test_status_json_holds_the_whole_reply() -> None:
    data = json.loads(json.dumps(describe(STATS, lambda _pid: 1).data))
    expected = set(STATS.__struct_fields__) - {"seq"} | {"processes", "places"}
    assert set(data) == expected
    assert data["workers"][0]["cpus"] == [0, 1, 2, 5]
    assert data["ops"][0]["conversation"] == "chat"


def test_status_shows_what_workers_hold() -> None:
    assert "cpu:0 holds streams 2" in describe(STATS, lambda _pid: 1).lines


def test_status_shows_what_engines_hold_between_calls() -> None:
    holding = msgspec.structs.replace(STATS.engines[0], leases={"take": 1, "put": 2}, unused_s=75.0)
    lines = "\n".join(describe(msgspec.structs.replace(STATS, engines=(holding,)), lambda _pid: 1).lines)
    assert f"put=2 take=1, unused {human_age(75.0)}" in lines


def test_one_process_is_listed_once() -> None:
    twice = (*STATS.memory, ProcessMemory(role="worker", pid=101, rss_bytes=1, anon_bytes=1, shmem_bytes=0))
    data = json.loads(json.dumps(describe(msgspec.structs.replace(STATS, memory=twice), lambda _pid: 1).data))
    pids = [process["pid"] for process in data["processes"]]
    assert len(pids) == len(set(pids))


def test_list_shows_flags_and_ages() -> None:
    damaged = msgspec.structs.replace(IMAGE, image_id=4, damaged=True, pinned=False, conversation="other")
    answer = images.list_images(FakeClient(images=(IMAGE, damaged)), "tenant", now_unix_s=1160.0)
    text = "\n".join(answer.lines)
    assert "pinned" in text
    assert "damaged" in text
    assert "1 m 0 s" in text
    listed = json.loads(json.dumps(answer.data))["images"]
    assert [image["image_id"] for image in listed] == [3, 4]
    assert listed[0]["stored_bytes"] == GRANULE_BYTES


def test_list_of_another_namespace_is_empty() -> None:
    answer = images.list_images(FakeClient(), "stranger", now_unix_s=0.0)
    assert answer.lines == ["no images"]
    assert answer.data == {"images": []}


def test_show_names_digest_and_place_of_every_chunk() -> None:
    answer = images.show(FakeClient(), "tenant", "chat", now_unix_s=1160.0)
    (chunk,) = json.loads(json.dumps(answer.data))["chunks"]
    assert chunk["digest"] == bytes(range(16)).hex()
    assert chunk["extents"] == [
        {"segment": "/stratad.default.cpu_0.0", "offset_bytes": GRANULE_BYTES, "length_bytes": GRANULE_BYTES}
    ]
    assert any(chunk["digest"] in line and "/dev/shm/stratad.default.cpu_0.0 +65536" in line for line in answer.lines)


def test_an_image_of_parts_is_marked_and_shown_part_by_part() -> None:
    image = msgspec.structs.replace(IMAGE, parts=3, chunks=3, tokens=0)
    row_bytes = EXCHANGE_ROW_BYTES
    chunks = tuple(
        msgspec.structs.replace(DETAIL.chunks[0], token_count=rows, length_bytes=rows * row_bytes)
        for rows in (256, 1, 2)
    )
    parts = (
        PartInfo("0.key", 257 * row_bytes - 9, "bf16 1x8"),
        PartInfo("nothing", 0),
        PartInfo("0.value", row_bytes + 1),
    )
    client = FakeClient(
        images=(image,), detail=msgspec.structs.replace(DETAIL, image=image, chunks=chunks, parts=parts)
    )
    listed = images.list_images(client, "tenant", now_unix_s=1160.0)
    assert any(line.rstrip().endswith("parts,pinned") for line in listed.lines)
    answer = images.show(client, "tenant", "chat", now_unix_s=1160.0)
    cells = [line.split() for line in answer.lines]
    assert ["part", "bytes", "note"] in cells
    assert ["0.key", "1.0", "MiB", "bf16", "1x8"] in cells
    assert ["nothing", "0", "B", "-"] in cells
    shown = [line[1:3] for line in cells if line[:1] == ["0"]]
    assert shown == [["0.key", "256"], ["0.key", "1"], ["0.value", "2"]]
    assert not any("rows 0" in line for line in answer.lines)
    data = json.loads(json.dumps(answer.data))
    assert data["parts"][0] == {"name": "0.key", "nbytes": 257 * row_bytes - 9, "meta": "bf16 1x8"}


@pytest.mark.parametrize(("restores", "text"), [(0, "restored 0 times"), (1, "restored once"), (2, "restored 2 times")])
def test_show_counts_restores_in_words(restores: int, text: str) -> None:
    client = FakeClient(detail=msgspec.structs.replace(DETAIL, image=msgspec.structs.replace(IMAGE, restores=restores)))
    lines = images.show(client, "tenant", "chat", now_unix_s=1160.0).lines
    assert any(line.endswith(text) for line in lines)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ((), ""),
        ((5,), "1 of 2 images of this name, each of another fingerprint; --image ID shows 5"),
        (
            tuple(range(20, 31)),
            "1 of 12 images of this name, each of another fingerprint; --image ID shows 20, 21, 22, ",
        ),
    ],
)
def test_show_says_that_a_name_has_more_images(others: tuple[int, ...], text: str) -> None:
    client = FakeClient(detail=msgspec.structs.replace(DETAIL, others=others))
    answer = images.show(client, "tenant", "chat", now_unix_s=1160.0)
    found = [line for line in answer.lines if " images of this name" in line]
    assert [line.startswith(text) for line in found] == ([True] if others else [])
    assert all(line.endswith("27, ...") for line in found if len(others) > 8)
    assert json.loads(json.dumps(answer.data))["others"] == list(others)


def test_clear_says_that_there_was_nothing() -> None:
    assert images.clear(FakeClient(), "other").lines == [
        "nothing to drop: no image in namespace other but for pinned ones"
    ]
    free = msgspec.structs.replace(IMAGE, pinned=False)
    assert images.clear(FakeClient(images=(free,)), "tenant").lines == ["dropped 1 image"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, []),
        ({"testing.allow_faults": "true"}, ["testing: faults are allowed"]),
        (
            {"testing.allow_faults": "true", "testing.die_at": "SpawnWorker:after#2"},
            ["testing: faults are allowed, the daemon kills itself at SpawnWorker:after#2"],
        ),
    ],
)
def test_status_says_that_a_daemon_is_for_tests(settings: dict[str, str], said: list[str]) -> None:
    lines = describe(msgspec.structs.replace(STATS, settings=settings), lambda _: None).lines
    assert [line for line in lines if line.startswith("testing")] == said


def test_counts_are_in_the_answer() -> None:
    assert images.clear(FakeClient(), "tenant").data == {"count": 0}
    assert images.drop(FakeClient(), "tenant", "chat", force=True).data == {"count": 1}


def test_status_shows_declared_slots_and_a_rescue() -> None:
    (engine,) = STATS.engines
    clean = msgspec.structs.replace(engine, clean_slots=2, clean_tokens=1200)
    dying = msgspec.structs.replace(engine, engine_id=8, rescue="1 of 2 slots, 0 images")
    answer = describe(msgspec.structs.replace(STATS, engines=(clean, dying)), lambda _: None)
    at = next(n for n, line in enumerate(answer.lines) if "declared" in line)
    cells = [re.split(r"\s{2,}", line.strip()) for line in answer.lines[at : at + 3]]
    shown = [(row[cells[0].index("declared")], row[cells[0].index("rescue")]) for row in cells[1:]]
    assert shown == [("2 (1200 tokens)", "-"), ("-", "1 of 2 slots, 0 images")]
    assert [entry["clean_tokens"] for entry in answer.data["engines"]] == [1200, 0]  # type: ignore[index, union-attr, call-overload]
