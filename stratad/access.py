"""Who may use the daemon besides root and its own user: users and groups by name, checked by the kernel's word.

Two gates stand one behind the other: file permissions of the run directory and its sockets (`Access.plan`), and the
credentials of each lifeline (`Access.why_not`), which alone decide. Three plans of permissions are enough:

=========  =================================  =============  =========  ====================================
plan       who is allowed                     <instance>/    life.sock  client.sock
=========  =================================  =============  =========  ====================================
owner      root and the daemon's user         0700           0600       0600
group      besides, one group                 0750, group    0660       0660
list       users, admins or several groups    0711           0666       0660 and an access control list
=========  =================================  =============  =========  ====================================

In the third anybody may ask at the lifeline, and is told why not; nobody else can reach ZeroMQ.
"""

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ipc.credentials import Credentials
from ipc.rundir import DIRECTORY_MODE, GROUP_REACH, OWNER_REACH, Reach

AUTO: Final = "auto"
# systemd gives the directory of a service its mode again at every start.
_OPENED_BY: Final = (
    "`chmod o+x` a directory made by hand; where it is a service's, set RuntimeDirectoryMode=0751 (`systemctl edit`)"
)
_ROOT: Final = 0
_LAST_ID: Final = 2**32 - 2  # the last one means "none"


class AccessError(ValueError):
    """A user or group that does not exist: names the setting and the name."""


class Plan(NamedTuple):
    """File permissions that let those in who are allowed."""

    directory_mode: int
    directory_gid: int
    life: Reach
    client: Reach


@dataclass(frozen=True)
class Access:
    """Who may use the daemon. `admins` may also touch others' images. Ids only: nothing is looked up any more."""

    own_uid: int
    admins: frozenset[int]
    users: frozenset[int]
    groups: frozenset[int]
    allowed_text: str = ""

    def why_not(self, peer: Credentials) -> str:
        """Why a peer is not served, and what would change that; empty: it is."""
        if peer.uid in self.admins or peer.uid in self.users:
            return ""
        if peer.gid in self.groups or not self.groups.isdisjoint(peer.groups):
            return ""
        return (
            f"uid {peer.uid} may not use this daemon: {self.allowed_text}; its administrator can add the user to "
            f"access.users, or one of its groups to access.groups"
        )

    def plan(self, own_groups: Iterable[int]) -> Plan:
        """The file permissions. `own_groups`: those that the daemon may give its files to."""
        named = (self.users | self.admins) - {_ROOT, self.own_uid}
        if not named and not self.groups:
            return Plan(0o700, -1, OWNER_REACH, OWNER_REACH)
        if not named and len(self.groups) == 1:
            (gid,) = self.groups
            if self.own_uid == _ROOT or gid in own_groups:
                reach = GROUP_REACH._replace(gid=gid)
                return Plan(DIRECTORY_MODE, gid, reach, reach)
        listed = Reach(GROUP_REACH.mode, uids=tuple(sorted(named)), gids=tuple(sorted(self.groups)))
        return Plan(0o711, -1, Reach(0o666), listed)

    def barred_by(self, run_dir: Path) -> str:
        """Why some of those who are allowed cannot pass through the run directory, which is not ours to change."""
        status = run_dir.stat()
        mode = stat.S_IMODE(status.st_mode)
        others = (self.users | self.admins) - {_ROOT, self.own_uid, status.st_uid}
        groups = self.groups - ({status.st_gid} if mode & stat.S_IXGRP else set())
        if mode & stat.S_IXOTH or not (others or groups):
            return ""
        return f"{run_dir} has mode {mode:04o}: who is not in its group {status.st_gid} cannot enter; {_OPENED_BY}"


def resolve_access(admins: Iterable[str], users: Iterable[str], groups: Iterable[str], run_dir: Path) -> Access:
    """The policy in ids. ``auto`` among `groups` stands for the group of the run directory (see `run_dir_group`).

    Raises:
        AccessError: there is no such user or group.
    """
    own_uid = os.geteuid()
    gids = {group_id(name) for name in groups if name != AUTO}
    if AUTO in groups and (gid := run_dir_group(run_dir)) is not None:
        gids.add(gid)
    found_users = frozenset(user_id("access.users", name) for name in users)
    found_admins = frozenset(user_id("access.admins", name) for name in admins) | {_ROOT, own_uid}
    names = [*map(_user_name, sorted(found_users | found_admins)), *(f"group {_group_name(g)}" for g in sorted(gids))]
    return Access(own_uid, found_admins, found_users, frozenset(gids), "allowed are " + ", ".join(names[:20]))


def run_dir_group(run_dir: Path) -> int | None:
    """The group that was given the run directory: it may enter, and others may at most pass where it may also list
    (0750, 2710, 0751, ...).

    A directory that the daemon made itself (0711) is none of that kind, and root's group is never meant.
    """
    try:
        status = run_dir.stat()
    except OSError:
        return None
    return None if status.st_gid == _ROOT or _not_given(status.st_mode) else status.st_gid


def why_auto_is_nobody(groups: Iterable[str], run_dir: Path) -> str:
    """Why ``auto`` among `groups` stands for nobody, although the run directory has a group that is not root's; else
    empty.
    """
    if AUTO not in groups:
        return ""
    try:
        status = run_dir.stat()
    except OSError:
        return ""
    why = _not_given(status.st_mode)
    if status.st_gid == _ROOT or not why:
        return ""
    return (
        f"{run_dir} has mode {stat.S_IMODE(status.st_mode):04o} and group {_group_name(status.st_gid)}, but {why}; "
        "with 0750 or 0751 the group is meant"
    )


def _not_given(mode: int) -> str:
    """Why a directory of this mode was not given to its group; empty: it was."""
    if not mode & stat.S_IXGRP:
        return "the group may not enter"
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return "others may do more than pass"
    if mode & stat.S_IXOTH and not mode & stat.S_IRGRP:
        return "the group may do no more than others"
    return ""


def check_names(admins: Iterable[str], users: Iterable[str], groups: Iterable[str]) -> None:
    """Refuse names that do not exist.

    Raises:
        AccessError: names the setting and the name.
    """
    for key, names in (("access.admins", admins), ("access.users", users)):
        for name in names:
            user_id(key, name)
    for name in groups:
        if name != AUTO:
            group_id(name)


def user_id(key: str, name: str) -> int:
    """The uid of a user; one given as a number needs no entry in the user database.

    Raises:
        AccessError: there is no such user.
    """
    if name.isdecimal() and name.isascii():
        return _checked(key, name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError) as exc:
        raise AccessError(f"{key}: there is no user {name!r} on this host") from exc


def group_id(name: str) -> int:
    """The gid of a group; one given as a number needs no entry in the group database.

    Raises:
        AccessError: there is no such group.
    """
    if name.isdecimal() and name.isascii():
        return _checked("access.groups", name)
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError) as exc:
        raise AccessError(f"access.groups: there is no group {name!r} on this host") from exc


def _checked(key: str, number: str) -> int:
    if len(number) > 10 or int(number) > _LAST_ID:
        raise AccessError(f"{key}: {number[:40]} is no id, expected 0 to {_LAST_ID}")
    return int(number)


@functools.cache
def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"uid {uid}"


@functools.cache
def _group_name(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} ({gid})"
    except KeyError:
        return str(gid)
