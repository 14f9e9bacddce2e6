"""Who is allowed, which file permissions follow, and what a refused user is told."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from ipc.credentials import Credentials
from ipc.rundir import GROUP_REACH, OWNER_REACH, Reach
from stratad.access import Access, AccessError, check_names, resolve_access, run_dir_group, why_auto_is_nobody

OWN = 900


def access(*, admins: tuple[int, ...] = (), users: tuple[int, ...] = (), groups: tuple[int, ...] = ()) -> Access:
    return Access(OWN, frozenset({0, OWN, *admins}), frozenset(users), frozenset(groups), "allowed are some")


def peer(uid: int, gid: int = 5, groups: tuple[int, ...] = ()) -> Credentials:
    return Credentials(1, uid, gid, 1, groups)


@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        (peer(0), True),
        (peer(OWN), True),
        (peer(1), True),
        (peer(2), True),
        (peer(3), False),
        (peer(3, gid=70), True),
        (peer(3, groups=(1, 2, 70)), True),
        (peer(3, gid=1, groups=(2, 71)), False),
        (peer(70), False),  # an id of a group is no id of a user
        (peer(3, gid=2), False),
    ],
)
def test_why_not(who: Credentials, allowed: bool) -> None:
    policy = access(admins=(1,), users=(2,), groups=(70,))
    text = policy.why_not(who)
    assert (text == "") is allowed
    if not allowed:
        assert f"uid {who.uid}" in text
        assert "allowed are some" in text
        assert "access.users" in text


@pytest.mark.parametrize(
    ("policy", "directory", "life", "client"),
    [
        (access(), (0o700, -1), OWNER_REACH, OWNER_REACH),
        (access(users=(0, OWN)), (0o700, -1), OWNER_REACH, OWNER_REACH),
        (access(groups=(70,)), (0o750, 70), Reach(0o660, 70), Reach(0o660, 70)),
        (access(groups=(71,)), (0o711, -1), Reach(0o666), Reach(0o660, gids=(71,))),  # not ours to give
        (access(groups=(70, 60)), (0o711, -1), Reach(0o666), Reach(0o660, gids=(60, 70))),
        (access(users=(4, 3)), (0o711, -1), Reach(0o666), Reach(0o660, uids=(3, 4))),
        (access(admins=(9,), groups=(70,)), (0o711, -1), Reach(0o666), Reach(0o660, uids=(9,), gids=(70,))),
    ],
)
def test_plans(policy: Access, directory: tuple[int, int], life: Reach, client: Reach) -> None:
    assert policy.plan({70}) == (*directory, life, client)
    assert GROUP_REACH.mode == 0o660


def test_names_and_numbers(tmp_path: Path) -> None:
    user, group = pwd.getpwuid(0).pw_name, grp.getgrall()[-1]
    found = resolve_access([user], ["4000000000", "77"], [group.gr_name, "88"], tmp_path)
    assert found.admins == {0, os.geteuid()}
    assert found.users == {4000000000, 77}
    assert found.groups == {group.gr_gid, 88}
    assert "uid 77" in found.allowed_text
    assert group.gr_name in found.allowed_text


@pytest.mark.parametrize(
    ("names", "key", "name"),
    [
        ((["no-such-user"], [], []), "access.admins", "no-such-user"),
        (([], ["root", "no-such-user"], []), "access.users", "no-such-user"),
        (([], [], ["auto", "no-such-group"]), "access.groups", "no-such-group"),
        (([], ["4294967295"], []), "access.users", "4294967295"),
        (([], ["-1"], []), "access.users", "-1"),
        (([], ["nul\0l"], []), "access.users", "nul"),
        (([], ["²"], []), "access.users", "²"),
        (([], [], ["99999999999999999999"]), "access.groups", "9999"),
    ],
)
def test_who_does_not_exist(names: tuple[list[str], list[str], list[str]], key: str, name: str) -> None:
    with pytest.raises(AccessError, match=name) as caught:
        check_names(*names)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "gid", "counts"),
    [
        (0o750, 70, True),
        (0o2710, 70, True),
        (0o751, 70, True),  # others pass, for users who are named one by one
        (0o2751, 70, True),
        (0o754, 70, False),
        (0o753, 70, False),
        (0o755, 70, False),  # made under an ordinary umask: nobody meant this group
        (0o711, 70, False),  # as the daemon makes it
        (0o700, 70, False),
        (0o750, 0, False),
        (0o755, 0, False),
    ],
)
def test_the_group_of_a_run_directory(tmp_path: Path, mode: int, gid: int, counts: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to any group")
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, -1, gid)
    folder.chmod(mode)
    assert run_dir_group(folder) == (gid if counts else None)
    assert resolve_access([], [], ["auto"], folder).groups == ({gid} if counts else set())
    assert resolve_access([], [], [], folder).groups == set()
    assert resolve_access([], [], ["auto"], tmp_path / "none").groups == set()
    why = why_auto_is_nobody(["kv", "auto"], folder)
    assert (why == "") is (counts or gid == 0)
    assert f"mode {mode:04o}" in why or not why
    assert why_auto_is_nobody(["kv"], folder) == ""
    assert why_auto_is_nobody(["auto"], tmp_path / "none") == ""


def test_a_run_directory_that_keeps_allowed_users_out(tmp_path: Path) -> None:
    gid = tmp_path.stat().st_gid
    tmp_path.chmod(0o750)
    assert "chmod o+x" in access(users=(3,)).barred_by(tmp_path)
    assert "RuntimeDirectoryMode=0751" in access(users=(3,)).barred_by(tmp_path)
    assert "chmod o+x" in access(groups=(gid + 1,)).barred_by(tmp_path)
    assert access(groups=(gid,)).barred_by(tmp_path) == ""
    assert access().barred_by(tmp_path) == ""
    tmp_path.chmod(0o700)
    assert "chmod o+x" in access(groups=(gid,)).barred_by(tmp_path)
    tmp_path.chmod(0o711)
    assert access(users=(3,), groups=(gid + 1,)).barred_by(tmp_path) == ""
