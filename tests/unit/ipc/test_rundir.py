"""Which directories and paths are trusted."""

import os
import stat
from pathlib import Path

import pytest

from ipc.rundir import SOCKET_PATH_LIMIT_BYTES, RunDirError, check_socket_path, prepare_directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_made_with_the_right_mode_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        prepare_directory(tmp_path / "run" / "default")
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "run"), mode_of(tmp_path / "run/default")) == (0o711, 0o750)
    prepare_directory(tmp_path / "run" / "default")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_what_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    prepare_directory(tmp_path / "x")
    assert mode_of(tmp_path / "x") == mode


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o777, 0o1777])
def test_a_directory_that_others_may_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(RunDirError, match=f"{mode:04o}"):
        prepare_directory(tmp_path / "x")


@pytest.mark.parametrize(("mode", "trusted"), [(0o777, False), (0o770, False), (0o1777, True)])
def test_a_parent_that_others_may_write(tmp_path: Path, mode: int, trusted: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    if trusted:
        prepare_directory(tmp_path / "run/default")
    else:
        with pytest.raises(RunDirError, match="others may write"):
            prepare_directory(tmp_path / "run/default")
        assert not (tmp_path / "run/default").exists()


@pytest.mark.parametrize("where", ["run", "run/default"])
def test_a_foreign_owner(tmp_path: Path, where: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "run/default").mkdir(parents=True)
    os.chown(tmp_path / where, 65534, 65534)
    with pytest.raises(RunDirError, match="65534"):
        prepare_directory(tmp_path / "run/default")


@pytest.mark.parametrize("where", ["run", "run/default"])
def test_a_symlink(tmp_path: Path, where: str) -> None:
    (tmp_path / "real/default").mkdir(parents=True)
    link = tmp_path / where
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "real")
    with pytest.raises(RunDirError):
        prepare_directory(tmp_path / "run/default")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(RunDirError):
        prepare_directory(tmp_path / "x")


def test_no_parent(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="cannot be made"):
        prepare_directory(tmp_path / "a/b/c")


@pytest.mark.parametrize("filler", ["x", "ü"])
def test_the_length_of_a_path_counts_in_bytes(filler: str) -> None:
    room = SOCKET_PATH_LIMIT_BYTES - len("/tmp/")
    longest = Path("/tmp") / (filler * (room // len(filler.encode())))
    check_socket_path(longest)
    too_long = longest.with_name(longest.name + "xx")
    with pytest.raises(RunDirError, match=str(SOCKET_PATH_LIMIT_BYTES)) as caught:
        check_socket_path(too_long)
    assert str(len(os.fsencode(too_long))) in str(caught.value)


def test_a_relative_path() -> None:
    with pytest.raises(RunDirError, match="absolute"):
        check_socket_path(Path("run/x.sock"))
