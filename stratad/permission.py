"""Who may reach a socket: file permissions on the way to it, said with path and group instead of an errno."""

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

_README_TEXT: Final = "(README, Who may use the daemon)"
ASK_TEXT: Final = f"or have the daemon's administrator name you in its access.users {_README_TEXT}"
_ROOT: Final = 0  # whose group nobody should join for this


class Barrier(NamedTuple):
    """What on the way to a socket we may not pass, and what would help."""

    what: str
    fix: str


def barrier(path: Path) -> Barrier | None:
    """The first folder on the way to a socket that we may not enter, or the socket that we may not write to.

    None where the way is free, or ends because something is not there.
    """
    for place in (*reversed(path.parents), path):
        needed = os.X_OK if place != path else os.R_OK | os.W_OK
        try:
            status = place.stat()
        except OSError:
            return None  # its parent let us look, so it is not there
        if not os.access(place, needed, effective_ids=True):
            return _barrier(place, status, is_socket=place == path)
    return None


def _barrier(place: Path, status: os.stat_result, *, is_socket: bool) -> Barrier:
    user, group = _user_name(status.st_uid), _group_name(status.st_gid)
    mode = stat.S_IMODE(status.st_mode)
    verb = "write to" if is_socket else "enter"
    what = f"uid {os.geteuid()} may not {verb} {place} (user {user}, group {group}, mode {mode:04o})"
    let_in = stat.S_IRGRP | stat.S_IWGRP if is_socket else stat.S_IXGRP
    if mode & let_in == let_in and status.st_gid != _ROOT:
        opened = "" if is_socket else f", or, if you are named in access.users, to open {place} {_README_TEXT}"
        return Barrier(what, f"permission: {_join_text(status.st_gid)}{opened}")
    return Barrier(what, f"permission: {place} is not for you: run as user {user}, {ASK_TEXT}")


def _join_text(gid: int) -> str:
    """What makes us a member of a group: a command where group and user have names to give it."""
    uid = os.geteuid()
    group, user = _group_name(gid).partition("/")[2], _user_name(uid).partition("/")[2]
    if group and user:
        return f"ask the administrator for `usermod -aG {group} {user}` (from your next login on)"
    return f"ask the administrator to let uid {uid} join group {gid} (from your next login on)"


def _user_name(uid: int) -> str:
    import pwd  # noqa: PLC0415 - may ask a directory service, so only where it matters

    try:
        return f"{uid}/{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    import grp  # noqa: PLC0415 - may ask a directory service, so only where it matters

    try:
        return f"{gid}/{grp.getgrgid(gid).gr_name}"
    except KeyError:
        return str(gid)
