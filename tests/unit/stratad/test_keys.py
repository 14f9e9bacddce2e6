"""The digest key is made once and never replaced."""

import os
import threading
from pathlib import Path

import pytest

from stratad.keys import KEY_BYTES, KEY_NAME, KeyFileError, load_digest_key


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state"


def test_made_once_and_read_afterwards(state_dir: Path) -> None:
    before = os.umask(0o777)
    try:
        # The parent is not ours to make under such a umask.
        state_dir.parent.mkdir()
        state_dir.parent.chmod(0o755)
        state_dir.mkdir()
        state_dir.chmod(0o700)
        key = load_digest_key(state_dir)
    finally:
        os.umask(before)
    assert len(key) == KEY_BYTES
    assert load_digest_key(state_dir) == key
    assert (state_dir / KEY_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state_dir.iterdir()] == [KEY_NAME]


def test_the_directory_is_made_for_us_alone(state_dir: Path) -> None:
    load_digest_key(state_dir)
    assert state_dir.stat().st_mode & 0o777 == 0o700


def test_keys_of_two_hosts_differ(tmp_path: Path) -> None:
    assert load_digest_key(tmp_path / "a") != load_digest_key(tmp_path / "b")


def test_many_at_once_agree(state_dir: Path) -> None:
    keys: list[bytes] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        keys.append(load_digest_key(state_dir))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert set(keys) == {load_digest_key(state_dir)}
    assert [path.name for path in state_dir.iterdir()] == [KEY_NAME]


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33, b"x" * 64])
def test_another_size_is_refused_and_kept(state_dir: Path, content: bytes) -> None:
    state_dir.mkdir(parents=True)
    path = state_dir / KEY_NAME
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=f"{len(content)} bytes"):
        load_digest_key(state_dir)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_read(state_dir: Path, mode: int) -> None:
    load_digest_key(state_dir)
    (state_dir / KEY_NAME).chmod(mode)
    with pytest.raises(KeyFileError, match="0600"):
        load_digest_key(state_dir)


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_write(state_dir: Path, mode: int) -> None:
    state_dir.mkdir(parents=True)
    state_dir.chmod(mode)
    with pytest.raises(KeyFileError, match="others may write"):
        load_digest_key(state_dir)


def test_foreign_owners(state_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    load_digest_key(state_dir)
    os.chown(state_dir / KEY_NAME, 65534, 65534)
    with pytest.raises(KeyFileError, match="uid"):
        load_digest_key(state_dir)
    os.chown(state_dir, 65534, 65534)
    with pytest.raises(KeyFileError, match="65534"):
        load_digest_key(state_dir)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_what_is_no_plain_file(state_dir: Path, tmp_path: Path, kind: str) -> None:
    state_dir.mkdir(parents=True)
    path = state_dir / KEY_NAME
    if kind == "symlink":
        (tmp_path / "key").write_bytes(b"x" * KEY_BYTES)
        (tmp_path / "key").chmod(0o600)
        path.symlink_to(tmp_path / "key")
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o600)
    with pytest.raises(KeyFileError):
        load_digest_key(state_dir)


def test_no_state_dir_to_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFileError, match="file/state"):
        load_digest_key(tmp_path / "file" / "state")


def test_a_failed_write_leaves_nothing(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space"):
        load_digest_key(state_dir)
    assert list(state_dir.iterdir()) == []
