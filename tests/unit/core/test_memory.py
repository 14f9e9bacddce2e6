"""The memory monitor: rounds, what is explained, who is watched, and one warning an episode."""

import dataclasses
import os
import tracemalloc
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from ipc.codec import encode
from ipc.messages import (
    Captured,
    Clear,
    ClosePool,
    Memory,
    MemoryProcess,
    MemoryReply,
    PoolClosed,
    ShuttleReady,
    Stats,
    StatsReply,
    TakeCensus,
    Unregister,
)
from stratad.core.effects import Effect, LogLine, SampleMemory, SendTo, SpawnWorker
from stratad.core.memory import (
    BATCH,
    CHUNK_RECORD_BYTES,
    IMAGE_RECORD_BYTES,
    INDEX_ENTRY_BYTES,
    SUPERVISOR,
    TEMPLATE,
    YOUNG_S,
)
from stratad.core.memory_ring import series_bytes
from stratad.core.memory_tracks import (
    PROCESS_LIMIT,
    Claim,
    Episode,
    MemorySettings,
    Reading,
    Role,
    Target,
    Turn,
    explain,
)
from stratad.core.memory_view import PROCESS_BYTES
from tests.support.core_exchange import CoreExchange
from tests.support.core_harness import MIB, ROW_BYTES, ROWS, Harness

MakeCore = Callable[..., Harness]
SETTINGS = MemorySettings(sample_s=1.0, keep=50, residual_warn_bytes=16 * MIB, warn_after=3)
WORKER = (Role.WORKER, "cpu:0")
POOL_BYTES = ROW_BYTES * ROWS
UNEXPLAINED = "resident memory is not accounted for"


@pytest.fixture
def core(make_core: MakeCore) -> Harness:
    harness = make_core(memory=SETTINGS)
    harness.connect()
    return harness


def round_of(core: Harness, rounds: int = 1) -> None:
    """Let whole rounds of samples pass."""
    for _ in range(rounds):
        core.tick(SETTINGS.sample_s)
        while core.core.state.memory.pending:
            core.tick(0.02)


def hold(core: Harness, key: tuple[Role, str], *, anon: int = -1, shmem: int = -1, file: int = -1) -> None:
    """From now on the process is read with these sizes (-1: as before)."""
    last = core.core.state.memory.tracks[key].last
    assert last is not None
    core.memory[key] = last._replace(
        anon_bytes=last.anon_bytes if anon < 0 else anon,
        shmem_bytes=last.shmem_bytes if shmem < 0 else shmem,
        file_bytes=last.file_bytes if file < 0 else file,
    )


def ask(core: Harness, client: int = 1, *, limit: int = 0) -> MemoryReply:
    request = Memory(core.next_seq(), limit > 0, limit)
    core.ask(client, request)
    return cast("MemoryReply", core.final(client, request.seq))


def of(reply: MemoryReply, role: str, name: str = "") -> MemoryProcess:
    (found,) = [process for process in reply.processes if (process.role, process.name) == (role, name)]
    return found


def terms(process: MemoryProcess) -> dict[str, tuple[int, int]]:
    """Term by name and part: bytes and bound."""
    return {f"{term.name}/{term.part}": (term.bytes, term.bound_bytes) for term in process.terms}


def lines(core: Harness, message: str) -> list[dict[str, object]]:
    return [dict(e.fields) for e in core.effects if isinstance(e, LogLine) and e.message == message]


def asked_to_read(effects: list[Effect]) -> list[Target]:
    return [target for effect in effects if isinstance(effect, SampleMemory) for target in effect.targets]


# --- the parts ------------------------------------------------------------------------------------------------------


def test_a_claim_explains_no_more_than_is_there() -> None:
    reading = Reading(1, 1, anon_bytes=100, shmem_bytes=50, file_bytes=7)
    claims = [
        Claim("a", "shmem", 40, "counted"),
        Claim("b", "shmem", 40, "at most"),
        Claim("c", "shmem", 40, "at most"),
        Claim("d", "anon", 30, "measured"),
    ]
    assert [term.explained_bytes for term in explain(reading, claims)] == [40, 10, 0, 30]


def test_an_episode_opens_and_closes_once_after_as_many_in_a_row() -> None:
    episode = Episode(after=3)
    above = [True, True, False, True, True, True, True, False, True, False, False, False, False, True, True, True]
    turns = [episode.judge(above=one, now_unix_s=float(n)) for n, one in enumerate(above)]
    assert [(n, turn) for n, turn in enumerate(turns) if turn is not Turn.NONE] == [
        (5, Turn.OPENED),
        (11, Turn.CLOSED),
        (15, Turn.OPENED),
    ]
    assert episode.since_unix_s == 13.0


# --- rounds ---------------------------------------------------------------------------------------------------------


def test_a_round_reads_every_process_a_few_at_a_time(make_core: MakeCore) -> None:
    core = make_core(7, memory=SETTINGS)
    core.connect()
    core.register(stages=1)
    core.effects.clear()
    core.tick(SETTINGS.sample_s)
    batches = [asked_to_read(core.effects)]
    while core.core.state.memory.pending:
        assert core.core.due_s <= core.now_s + 0.02
        core.effects.clear()
        core.tick(0.02)
        batches.append(asked_to_read(core.effects))
    assert [len(batch) for batch in batches] == [BATCH, BATCH, 2]
    keys = [target.key for batch in batches for target in batch]
    assert keys == [SUPERVISOR, TEMPLATE, *((Role.WORKER, f"cpu:{n}") for n in range(7)), (Role.ENGINE, "4001")]
    core.effects.clear()
    core.tick(SETTINGS.sample_s / 2)
    assert not asked_to_read(core.effects), "the next round is not due"


def test_the_core_wakes_for_the_next_round_and_no_more_when_it_stops(core: Harness) -> None:
    round_of(core)
    assert core.now_s < core.core.due_s <= core.now_s + SETTINGS.sample_s
    core.perform(core.core.stop(core.at))
    core.effects.clear()
    core.tick(10 * SETTINGS.sample_s)
    assert not asked_to_read(core.effects)
    assert core.core.due_s > core.now_s + 10 * SETTINGS.sample_s


SELDOM = dataclasses.replace(SETTINGS, sample_s=1000.0)


def test_a_young_daemon_that_is_asked_reads_its_processes_anew(make_core: MakeCore) -> None:
    core = make_core(memory=SELDOM)
    core.connect()
    core.tick(0.5)
    hold(core, TEMPLATE, anon=77 * MIB)
    assert of(ask(core), "template").anon_bytes == 10 * MIB, "the last round is young too"
    core.tick(2.0)
    assert of(ask(core), "template").anon_bytes == 77 * MIB
    assert of(ask(core), "template").samples == 2, "asked again at once: no third round"
    core.tick(YOUNG_S)
    hold(core, TEMPLATE, anon=99 * MIB)
    old = of(ask(core), "template")
    assert (old.anon_bytes, old.samples) == (77 * MIB, 2), "an old daemon keeps to its rounds"
    assert old.age_s == YOUNG_S


def test_who_asks_during_a_round_waits_for_its_end(make_core: MakeCore) -> None:
    core = make_core(7, memory=SELDOM)
    core.connect()
    core.connect(2)
    while core.core.state.memory.pending:
        core.tick(0.02)
    core.tick(2.0)
    first = Memory(core.next_seq(), False, 0)
    core.ask(1, first)
    assert core.answers(1, first.seq) == []
    gone = Memory(core.next_seq(), False, 0)
    core.ask(2, gone)
    core.perform(core.core.client_gone(2, core.at))
    while core.core.state.memory.pending:
        assert core.core.due_s <= core.now_s + 0.02
        core.tick(0.02)
    reply = cast("MemoryReply", core.final(1, first.seq))
    assert max(process.age_s for process in reply.processes) < 0.1
    assert core.answers(2, gone.seq) == []


def test_a_daemon_that_stops_answers_who_waits_for_a_round(make_core: MakeCore) -> None:
    core = make_core(7, memory=SELDOM)
    core.connect()
    while core.core.state.memory.pending:
        core.tick(0.02)
    core.tick(2.0)
    asked = Memory(core.next_seq(), False, 0)
    core.ask(1, asked)
    core.perform(core.core.stop(core.at))
    core.tick(0.02)
    assert isinstance(core.final(1, asked.seq), MemoryReply)
    assert isinstance(ask(core), MemoryReply)


def test_the_ring_keeps_what_the_setting_says(core: Harness) -> None:
    round_of(core, SETTINGS.keep + 20)
    reply = ask(core, limit=1000)
    worker = of(reply, "worker", "cpu:0")
    assert worker.samples == len(worker.series.time_unix_s) == SETTINGS.keep
    assert reply.samples_bytes == len(reply.processes) * series_bytes(SETTINGS.keep)
    assert reply.samples_bound_bytes == PROCESS_LIMIT * series_bytes(SETTINGS.keep)
    assert worker.series.time_unix_s[-1] == pytest.approx(1e9 + core.now_s, abs=1.0)
    assert list(worker.series.time_unix_s) == sorted(worker.series.time_unix_s)


def test_a_worker_that_does_not_answer_is_asked_for_its_count_once(core: Harness) -> None:
    round_of(core)
    core.auto = False
    core.effects.clear()
    round_of(core, 5)
    asked = [e.worker for e in core.effects if isinstance(e, SendTo) and isinstance(e.command, TakeCensus)]
    assert asked == ["cpu:0", "cpu:1"]


def test_a_worker_started_anew_is_asked_again(core: Harness) -> None:
    round_of(core)
    core.auto = False
    round_of(core)
    core.auto = True
    core.worker_gone("cpu:0")
    core.tick(0.2)
    core.effects.clear()
    round_of(core)
    asked = [e.worker for e in core.effects if isinstance(e, SendTo) and isinstance(e.command, TakeCensus)]
    assert asked == ["cpu:0"], "the other one still owes an answer"


# --- what is explained ----------------------------------------------------------------------------------------------


def test_a_workers_memory_is_explained_term_by_term(core: Harness) -> None:
    round_of(core, 2)
    base = of(ask(core), "worker", "cpu:0")
    assert terms(base)["baseline/anon"] == (10 * MIB, 10 * MIB)
    assert terms(base)["shuttles/shmem"] == (0, 2 * MIB), "read before the shuttle was made, so nothing is there"
    assert base.residual_bytes == 0

    core.register(stages=2)
    hold(core, WORKER, anon=15 * MIB, shmem=9 * MIB, file=3 * MIB)
    round_of(core, 2)
    worker = of(ask(core), "worker", "cpu:0")
    assert terms(worker) == {
        "shuttles/shmem": (2 * MIB, 2 * MIB),
        "pools/shmem": (POOL_BYTES, POOL_BYTES),
        "baseline/anon": (10 * MIB, 10 * MIB),
        "staging/anon": (2 * MIB, 2 * MIB),
        "files/file": (3 * MIB, 3 * MIB),
    }
    assert worker.residual_bytes == (15 - 10 - 2) * MIB + 9 * MIB - 2 * MIB - POOL_BYTES
    assert worker.residual_bytes + sum(term.bytes for term in worker.terms) == worker.resident_bytes
    bases = {term.name: term.basis for term in worker.terms}
    assert bases == {
        "shuttles": "counted",
        "pools": "at most",
        "baseline": "measured",
        "staging": "at most",
        "files": "measured",
    }


def test_a_pool_explains_only_what_was_touched_of_it(core: Harness) -> None:
    core.register(stages=2)
    hold(core, WORKER, shmem=2 * MIB + 4096)
    round_of(core)
    assert terms(of(ask(core), "worker", "cpu:0"))["pools/shmem"] == (4096, POOL_BYTES)


def test_a_pool_explains_until_it_is_unmapped(core: Harness) -> None:
    engine = core.register(stages=2)
    hold(core, WORKER, shmem=2 * MIB + POOL_BYTES)
    core.auto = False
    core.ask(1, Unregister(core.next_seq(), engine))
    round_of(core)
    assert terms(of(ask(core), "worker", "cpu:0"))["pools/shmem"] == (POOL_BYTES, POOL_BYTES)
    for worker in ("cpu:0", "cpu:1"):
        for command in core.sent[worker]:
            if isinstance(command, ClosePool):
                core.report(worker, PoolClosed(command.pool))
    core.auto = True
    round_of(core)
    assert terms(of(ask(core), "worker", "cpu:0"))["pools/shmem"] == (0, 0)


def test_a_shuttle_in_the_making_explains_at_most_its_size(make_core: MakeCore) -> None:
    core = make_core(1, memory=SETTINGS)
    core.auto = False
    core.worker_gone("cpu:0")
    core.tick(1.0)
    core.ready("cpu:0")
    core.memory[WORKER] = Reading(1000, 5, 10 * MIB, MIB, MIB)
    core.connect()
    round_of(core)
    making = {"shuttle in the making/shmem": (MIB, 2 * MIB)}
    assert making.items() <= terms(of(ask(core), "worker", "cpu:0")).items()
    core.report("cpu:0", ShuttleReady(0, False, 0.0))
    round_of(core)
    assert "shuttle in the making/shmem" not in terms(of(ask(core), "worker", "cpu:0"))


def test_the_baseline_is_read_before_the_worker_is_given_anything(make_core: MakeCore) -> None:
    core = make_core(1, memory=SETTINGS)
    kinds = [
        type(effect.command).__name__ if isinstance(effect, SendTo) else type(effect).__name__
        for effect in core.effects
        if not isinstance(effect, LogLine)
    ]
    assert kinds.index("SampleMemory", kinds.index("SpawnWorker")) < kinds.index("MakeShuttle")


def test_a_gpu_worker_keeps_its_drivers_shared_memory_as_baseline_and_has_no_staging_here(make_core: MakeCore) -> None:
    core = Harness(make_core(1, {"gpu": "GPU-1"}, memory=SETTINGS).core)
    core.generations["gpu"] = 1
    core.worker_gone("gpu")
    core.memory[Role.WORKER, "gpu"] = Reading(1000, 5, 300 * MIB, 40 * MIB, MIB)
    core.tick(1.0)
    core.connect()
    hold(core, (Role.WORKER, "gpu"), shmem=42 * MIB)
    round_of(core)
    gpu = of(ask(core), "worker", "gpu")
    assert terms(gpu)["baseline/shmem"] == (40 * MIB, 40 * MIB)
    assert "staging/anon" not in terms(gpu)
    assert gpu.residual_bytes == 0


def test_the_supervisors_records_are_explained(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(600))
    core.finish_all()
    hold(core, SUPERVISOR, anon=20 * MIB)
    round_of(core, 2)
    found = terms(of(ask(core), "supervisor"))
    assert found["tokens/anon"] == (2400, 2400)
    chunks = len(core.core.state.catalog.chunks)
    assert found["catalog/anon"] == (chunks * 600 + 1000, chunks * 600 + 1000)
    index = 3 * INDEX_ENTRY_BYTES  # an image and two workers
    assert found["journal index/anon"] == (index, index)
    assert found["samples/anon"][1] == 5 * series_bytes(SETTINGS.keep)


def test_the_tokens_of_open_puts_are_explained_once(core: Harness) -> None:
    exchange = CoreExchange.register(core)
    exchange.put_whole("published", {"x": 0}, range(100))
    puts = [exchange.begin(name, range(600)) for name in ("committed", "given up", "open")]
    hold(core, SUPERVISOR, anon=20 * MIB)
    round_of(core)
    assert terms(of(ask(core), "supervisor"))["tokens/anon"] == (400 + 3 * 2400, 400 + 3 * 2400)
    exchange.put(puts[0], "x", 0)
    assert isinstance(exchange.commit(puts[0]), Captured)
    exchange.abort(puts[1])
    round_of(core)
    found = terms(of(ask(core), "supervisor"))
    assert found["tokens/anon"] == (400 + 2 * 2400, 400 + 2 * 2400)
    # Tokens of one less, an image more, with its record and where that lies in the journal.
    left = 2400 - 1000 - INDEX_ENTRY_BYTES
    assert found["dropped records/anon"] == (left, left)


@pytest.mark.parametrize(("images", "tokens"), [(400, 200), (100, 4000)], ids=["small", "large"])
def test_the_estimate_of_a_record_is_near_what_one_takes(make_core: MakeCore, images: int, tokens: int) -> None:
    core = make_core(
        1, memory=SETTINGS, budget_bytes=2**40, budget_images=10**6, shuttle_bytes=2**30, arena_bytes=2**38
    )
    core.connect()
    engine = core.register(stages=1)
    core.content = lambda _stage, _chunk: os.urandom(16)
    catalog = core.core.state.catalog

    def publish(first: int, count: int) -> None:
        for number in range(first, first + count):
            core.capture(engine, f"conversation {number}", [number] * tokens)
            core.finish_all()
            core.replies.clear()
            core.effects.clear()
            core.records.clear()

    publish(0, 10)
    chunks, token_bytes = len(catalog.chunks), catalog.token_bytes
    tracemalloc.start()
    try:
        publish(10, images)
        took_bytes = tracemalloc.get_traced_memory()[0] - (catalog.token_bytes - token_bytes)
    finally:
        tracemalloc.stop()
    estimate = (len(catalog.chunks) - chunks) * CHUNK_RECORD_BYTES + images * IMAGE_RECORD_BYTES
    assert 0.7 < took_bytes / estimate < 1.4


def test_dropped_records_explain_what_the_allocator_keeps(core: Harness) -> None:
    engine = core.register()
    core.capture(engine, "a", range(600))
    core.finish_all()
    round_of(core, 2)
    assert terms(of(ask(core), "supervisor"))["dropped records/anon"] == (0, 0)
    chunks = len(core.core.state.catalog.chunks)
    core.ask(1, Clear(core.next_seq(), "ns"))
    hold(core, SUPERVISOR, anon=20 * MIB)
    round_of(core)
    held = chunks * 600 + 1000 + 2400 + INDEX_ENTRY_BYTES
    assert terms(of(ask(core), "supervisor"))["dropped records/anon"] == (held, held)


def test_the_template_has_no_baseline_before_it_has_settled(core: Harness) -> None:
    core.memory[TEMPLATE] = Reading(901, 3, MIB, 0, MIB, settled=False)
    round_of(core, 2)
    template = of(ask(core), "template")
    assert not template.judged
    assert template.residual_bytes == MIB
    core.memory[TEMPLATE] = Reading(901, 3, 50 * MIB, 0, MIB)
    round_of(core)
    template = of(ask(core), "template")
    assert template.judged
    assert template.residual_bytes == 0
    assert template.tolerance_bytes == SETTINGS.residual_warn_bytes + int(50 * MIB * 0.05)


def test_an_engine_is_shown_and_not_judged(core: Harness) -> None:
    core.register(stages=2)
    core.memory[Role.ENGINE, "4001"] = Reading(4001, 7, 900 * MIB, 100 * MIB, MIB)
    round_of(core, 10)
    engine = of(ask(core), "engine", "engine")
    assert not engine.judged
    assert terms(engine)["pools/shmem"] == (2 * POOL_BYTES, 2 * POOL_BYTES)
    assert engine.residual_bytes == 1000 * MIB - 2 * POOL_BYTES
    assert not lines(core, UNEXPLAINED)


# --- who is watched -------------------------------------------------------------------------------------------------


def test_an_engine_that_vanished_is_forgotten(core: Harness) -> None:
    core.register()
    round_of(core)
    assert (Role.ENGINE, "4001") in core.core.state.memory.tracks
    core.memory[Role.ENGINE, "4001"] = None
    round_of(core)
    assert [process.role for process in ask(core).processes] == ["supervisor", "template", "worker", "worker"]


def test_an_engine_that_has_left_is_forgotten_at_the_next_round(core: Harness) -> None:
    core.connect(2)
    core.register(2)
    round_of(core)
    core.perform(core.core.client_gone(2, core.at))
    round_of(core)
    assert (Role.ENGINE, "4002") not in core.core.state.memory.tracks


def test_a_reused_pid_is_not_taken_for_the_process(core: Harness) -> None:
    core.register()
    round_of(core)
    core.memory[Role.ENGINE, "4001"] = Reading(4001, 8, 5 * MIB, 0, MIB)  # another start
    round_of(core)
    assert (Role.ENGINE, "4001") not in core.core.state.memory.tracks


def test_the_late_news_of_a_former_worker_does_not_touch_the_present_one(core: Harness) -> None:
    round_of(core)
    former = Target(Role.WORKER, "cpu:0", 999, 4)
    core.perform(core.core.sampled([(former, None), (former, Reading(999, 3, MIB, 0, 0))], core.at))
    assert of(ask(core), "worker", "cpu:0").pid == 1000


def test_a_template_started_anew_begins_a_new_series(core: Harness) -> None:
    round_of(core, 5)
    assert of(ask(core), "template").samples >= 5
    core.memory[TEMPLATE] = Reading(900, 2, 5 * MIB, 0, MIB)  # the same pid, another start
    round_of(core)
    template = of(ask(core), "template")
    assert (template.samples, template.start_ticks) == (1, 2)
    assert terms(template)["baseline/anon"] == (5 * MIB, 5 * MIB)


def test_a_worker_started_anew_gets_a_baseline_of_its_own(core: Harness) -> None:
    round_of(core, 3)
    core.worker_gone("cpu:0")
    assert WORKER not in core.core.state.memory.tracks
    core.memory[WORKER] = Reading(1000, 5, 33 * MIB, 0, MIB)
    core.tick(0.2)
    assert any(isinstance(effect, SpawnWorker) and effect.generation == 2 for effect in core.effects)
    worker = of(ask(core), "worker", "cpu:0")
    assert terms(worker)["baseline/anon"] == (33 * MIB, 33 * MIB)
    assert worker.samples == 1


def test_engines_beyond_the_limit_are_counted_only(make_core: MakeCore) -> None:
    core = make_core(1, memory=SETTINGS, max_clients=PROCESS_LIMIT + 8)
    for client in range(1, PROCESS_LIMIT + 6):
        core.connect(client)
        core.register(client, stages=1)
    round_of(core)
    reply = ask(core)
    assert len(core.core.state.memory.tracks) == PROCESS_LIMIT
    assert [process.role for process in reply.processes[:3]] == ["supervisor", "template", "worker"]
    assert reply.unwatched == PROCESS_LIMIT + 5 - (PROCESS_LIMIT - 3)


def test_a_worker_that_comes_late_finds_its_place_kept(make_core: MakeCore) -> None:
    core = make_core(1, memory=SETTINGS, max_clients=PROCESS_LIMIT + 8)
    for client in range(1, PROCESS_LIMIT + 6):
        core.connect(client)
        core.register(client, stages=1)
    core.auto = False
    core.worker_gone("cpu:0")
    round_of(core)
    core.auto = True
    core.ready("cpu:0")
    assert WORKER in core.core.state.memory.tracks
    core.core.validate()


def test_others_engines_are_not_shown(core: Harness) -> None:
    core.register(namespace="of-the-admin")
    core.connect(2, uid=2000)
    core.register(2, namespace="mine")
    core.connect(3, uid=3000)
    round_of(core)
    everybody = {"supervisor", "template", "worker"}
    assert {(p.role, p.pid) for p in ask(core, 1).processes if p.role == "engine"} == {
        ("engine", 4001),
        ("engine", 4002),
    }
    assert [p.pid for p in ask(core, 2).processes if p.role == "engine"] == [4002]
    assert {p.role for p in ask(core, 3).processes} == everybody


@pytest.mark.parametrize(("workers", "engines"), [(8, 49), (60, 0)])
def test_a_reply_fits_the_smallest_frame(make_core: MakeCore, workers: int, engines: int) -> None:
    limit = 64 * 1024
    core = make_core(workers, memory=SETTINGS, max_clients=PROCESS_LIMIT + 8, max_message_bytes=limit)
    for client in range(1, PROCESS_LIMIT + 6):
        core.connect(client)
        engine = core.register(client, stages=1)
        core.core.state.engines[engine].name = "\U0001f600" * 200
    round_of(core)
    for number in range(workers):
        hold(core, (Role.WORKER, f"cpu:{number}"), anon=2**44, shmem=2**44)
    round_of(core, SETTINGS.keep)
    reply = ask(core, limit=10_000)
    assert len(reply.warnings) == workers
    shown = [process.role for process in reply.processes]
    assert shown.count("engine") == engines
    assert shown[:10] == ["supervisor", "template"] + ["worker"] * 8
    assert reply.unwatched == 2 + workers + PROCESS_LIMIT + 5 - len(shown)
    assert max(len(msgspec.msgpack.encode(process)) for process in ask(core).processes) <= PROCESS_BYTES
    assert limit // 2 < len(encode(reply)) <= limit
    core.core.state.settings = dataclasses.replace(core.core.state.settings, max_message_bytes=16 * MIB)
    whole = ask(core, limit=10_000)
    assert all(len(process.series.time_unix_s) == process.samples for process in whole.processes)


# --- warnings -------------------------------------------------------------------------------------------------------


def test_one_warning_an_episode_and_an_all_clear(core: Harness) -> None:
    round_of(core, 2)
    hold(core, WORKER, anon=100 * MIB)
    round_of(core, SETTINGS.warn_after - 1)
    assert not lines(core, UNEXPLAINED)
    round_of(core, 20)
    (warning,) = lines(core, UNEXPLAINED)
    assert warning["process"] == "worker cpu:0"
    assert warning["pid"] == 1000
    residual = cast("int", warning["residual_bytes"])
    assert residual == (100 - 10 - 2) * MIB
    assert warning["resident_bytes"] == cast("int", warning["explained_bytes"]) + residual
    assert str(warning["since"]).startswith("2001-09-09T01:4")

    reply = ask(core)
    (told,) = reply.warnings
    assert (told.process, told.pid, told.residual_bytes) == ("worker cpu:0", 1000, residual)
    assert told.since_unix_s < reply.now_unix_s - 20 * SETTINGS.sample_s
    request = Stats(core.next_seq())
    core.ask(1, request)
    stats = cast("StatsReply", core.final(1, request.seq))
    assert stats.memory_warnings == reply.warnings
    assert stats.health == "ok"
    assert stats.counters["memory_warnings"] == 1

    hold(core, WORKER, anon=20 * MIB)
    round_of(core, 20)
    assert len(lines(core, UNEXPLAINED)) == 1
    (again,) = lines(core, "resident memory is accounted for again")
    assert again["process"] == "worker cpu:0"
    assert not ask(core).warnings


def test_a_residual_within_the_tolerance_is_no_news(core: Harness) -> None:
    round_of(core)
    tolerance = of(ask(core), "worker", "cpu:0").tolerance_bytes
    assert tolerance == SETTINGS.residual_warn_bytes + int(10 * MIB * 0.05)
    hold(core, WORKER, anon=12 * MIB + tolerance)
    round_of(core, 10)
    assert of(ask(core), "worker", "cpu:0").residual_bytes == tolerance
    assert not lines(core, UNEXPLAINED)
    hold(core, WORKER, anon=12 * MIB + tolerance + 4096)
    round_of(core, 10)
    assert len(lines(core, UNEXPLAINED)) == 1


def test_a_warning_ends_with_its_process(core: Harness) -> None:
    round_of(core)
    hold(core, WORKER, anon=100 * MIB)
    round_of(core, 5)
    assert len(ask(core).warnings) == 1
    core.memory.clear()
    core.worker_gone("cpu:0")
    assert len(lines(core, "memory warning ends with its process")) == 1
    assert not ask(core).warnings
