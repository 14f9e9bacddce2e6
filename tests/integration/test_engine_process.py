"""The engine process: driven line by line, killed by pid, and never left behind."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stratad.bench.engine_wire import (
    Bye,
    Encode,
    Encoded,
    Generate,
    Generated,
    Park,
    Parked,
    Prefill,
    Prefilled,
    Quit,
)
from stratad.bench.engines import EngineError, EngineOptions, EngineProcess
from tests.support.wait import wait_until

OPTIONS = EngineOptions(model="random:tiny")
LOAD_S = 50.0
CALL_S = 20.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One that was started where somebody else's package has the name of one of ours."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "shm").mkdir()
    (folder / "shm" / "__init__.py").write_text("raise RuntimeError('a stranger')\n")
    with contextlib.chdir(folder):
        started = EngineProcess.start(OPTIONS, folder / "log")
    with started as process:
        ready = process.ready(LOAD_S)
        assert ready.pid == process.pid
        assert (ready.device, ready.layers, ready.token_bytes) == ("cpu", 4, 4 * 2 * 2 * 16 * 2)
        yield process


def test_the_current_directory_is_not_searched_for_our_packages(engine: EngineProcess) -> None:
    folder = Path(psutil.Process(engine.pid).cwd())
    assert (folder / "shm" / "__init__.py").exists()
    assert engine.call(Encode("some words. ", "a?", 20), Encoded, CALL_S).tokens


def test_a_conversation_is_read_and_goes_on(engine: EngineProcess) -> None:
    prompt = engine.call(Encode("some words. ", "and a question?", 100), Encoded, CALL_S).tokens
    assert len(prompt) == 100
    assert bytes(prompt).endswith(b"and a question?")
    whole = engine.call(Prefill("a", prompt), Prefilled, CALL_S)
    all_at_once = engine.call(Generate("a", 8), Generated, CALL_S)
    engine.call(Prefill("a", prompt), Prefilled, CALL_S)
    first, second = (engine.call(Generate("a", 4), Generated, CALL_S) for _ in range(2))
    assert whole.next_token == all_at_once.tokens[0]
    assert first.tokens + second.tokens == all_at_once.tokens
    assert second.next_token == all_at_once.next_token
    assert first.logits_sha256 != second.logits_sha256


def test_a_slot_holds_one_conversation(engine: EngineProcess) -> None:
    engine.call(Prefill("a", [1, 2, 3]), Prefilled, CALL_S)
    engine.call(Prefill("b", [4, 5, 6]), Prefilled, CALL_S)
    with pytest.raises(EngineError, match="no slot holds") as caught:
        engine.call(Generate("a", 1), Generated, CALL_S)
    assert caught.value.code == "unknown_conversation"
    engine.call(Prefill("c", [7], slot=1), Prefilled, CALL_S)
    engine.call(Generate("b", 1), Generated, CALL_S)


def test_wrong_orders_are_answered_and_survived(engine: EngineProcess) -> None:
    for order in (Park("nobody"), Encode("", "", 5), Prefill("a", []), Prefill("a", [10**6])):
        with pytest.raises(EngineError):
            engine.call(order, Parked, CALL_S)
    engine.call(Prefill("a", [1]), Prefilled, CALL_S)
    with pytest.raises(EngineError, match="without a daemon"):
        engine.call(Park("a"), Parked, CALL_S)
    with pytest.raises(EngineError, match="expected Bye"):
        engine.call(Generate("a", 1), Bye, CALL_S)


def test_killed_and_quit_engines_say_how_they_ended(tmp_path: Path) -> None:
    with (
        EngineProcess.start(OPTIONS, tmp_path / "one") as killed,
        EngineProcess.start(OPTIONS, tmp_path / "two") as left,
    ):
        with pytest.raises(EngineError, match="in time"):
            killed.ready(0.01)
        assert killed.kill() == -9
        assert killed.kill() == -9
        with pytest.raises(psutil.NoSuchProcess):
            psutil.Process(killed.pid)
        left.ready(LOAD_S)
        assert left.quit() == 0


def test_a_model_that_cannot_be_had_ends_it_with_words(tmp_path: Path) -> None:
    with EngineProcess.start(EngineOptions(model="random:huge"), tmp_path / "log") as engine:
        with pytest.raises(EngineError, match="no random shape 'huge'"):
            engine.ready(LOAD_S)
        with pytest.raises(EngineError, match="exit code 1") as caught:
            engine.call(Quit(), Bye, CALL_S)
        assert caught.value.code == "died"


_DRIVER = """
import sys, time
from pathlib import Path
from stratad.bench.engines import EngineOptions, EngineProcess
engine = EngineProcess.start(EngineOptions(model="random:tiny"), Path(sys.argv[1]))
engine.ready(50.0)
print(engine.pid, flush=True)
time.sleep(60.0)
"""


def test_an_engine_ends_with_its_driver(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    engine = psutil.Process(pid)
    os.kill(driver.pid, 9)
    driver.wait(10.0)
    driver.stdout.close()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, timeout_s=10.0)
