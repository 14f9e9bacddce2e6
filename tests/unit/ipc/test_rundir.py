"""Which directories and paths are trusted."""

import os
import socket
import stat
import struct
from pathlib import Path

import pytest

from ipc.rundir import (
    SOCKET_PATH_LIMIT_BYTES,
    Reach,
    RunDirError,
    check_socket_path,
    open_directory,
    owner_only,
    prepare_directory,
    set_reach,
)


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


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_socket_is_its_owners_until_it_is_opened(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "x.sock"
    before = os.umask(umask)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            with owner_only():
                listener.bind(str(path))
            assert mode_of(path) == 0o600
            assert os.umask(umask) == umask
    finally:
        os.umask(before)
    set_reach(path, Reach(0o660))
    assert mode_of(path) == 0o660


def test_a_directory_is_opened_to_a_group(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "run/default")
    folder = tmp_path / "run/default"
    open_directory(folder, 0o711)
    assert mode_of(folder) == 0o711
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to any group")
    open_directory(folder, 0o750, 4242)
    assert (mode_of(folder), folder.stat().st_gid) == (0o750, 4242)
    open_directory(folder, 0o700)
    assert (mode_of(folder), folder.stat().st_gid) == (0o700, 4242)


def test_a_group_that_is_not_ours_to_give(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may give files to any group")
    with pytest.raises(RunDirError, match="4242"):
        open_directory(tmp_path, 0o750, 4242)


def test_an_access_list_names_users_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    if not set_reach(path, Reach(0o660, uids=(7, 3), gids=(9,))):
        assert mode_of(path) == 0o666
        pytest.skip("no access control lists on this file system: anybody may connect, and is asked at the lifeline")
    found = os.getxattr(path, "system.posix_acl_access")
    entries = [struct.unpack_from("<HHI", found, offset) for offset in range(4, len(found), 8)]
    assert [entry for entry in entries if entry[0] in (2, 8)] == [(2, 6, 3), (2, 6, 7), (8, 6, 9)]
    assert [entry[1] for entry in entries if entry[0] in (4, 32)] == [0, 0]  # neither our group nor others
