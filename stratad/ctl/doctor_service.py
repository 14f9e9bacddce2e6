"""Checks of what systemd does with a daemon: the login sessions that take its shared memory, the unit it runs in."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from stratad.ctl.findings import Check, State

# The last uid of a system user where /etc/login.defs does not say: logind spares them.
_LAST_SYSTEM_UID: Final = 999
# Users that nobody logs in as either: nobody itself, and those that systemd makes up for a service (DynamicUser=).
_NOBODY_UID: Final = 65534
_DYNAMIC_UIDS: Final = range(61184, 65520)
_SYS_UID_MAX: Final = re.compile(r"^\s*SYS_UID_MAX\s+([0-9]+)", re.MULTILINE)


def user(uid: int, root: Path = Path("/")) -> Iterator[Check]:
    """Whether logind would delete the shuttles of a daemon of this user when the user logs out."""
    last_uid = last_system_uid(root)
    if uid <= last_uid or uid == _NOBODY_UID or uid in _DYNAMIC_UIDS:
        yield Check("user", State.OK, f"uid {uid} is a system user: no logout takes its shared memory")
    elif not (root / "run/systemd/users").is_dir():
        text = f"uid {uid} is a login user; logind, which could delete its shared memory, is not running"
        yield Check("user", State.OK, text)
    elif not removes_ipc(_logind_files(root)):
        yield Check("user", State.OK, f"uid {uid} is a login user; logind keeps its shared memory (RemoveIPC=no)")
    elif (root / "var/lib/systemd/linger" / _login_name(uid)).exists():
        yield Check("user", State.OK, f"uid {uid} is a login user that lingers: logind keeps its shared memory")
    else:
        yield Check(
            "user",
            State.WARN,
            f"uid {uid} is a login user: logind deletes its shared memory at its last logout (RemoveIPC)",
            f"run the daemon as a service (its user has a uid of at most {last_uid}), or `loginctl enable-linger "
            f"{_login_name(uid)}`, or set RemoveIPC=no in /etc/systemd/logind.conf and restart systemd-logind",
        )


def unit(pid: int | None, root: Path = Path("/")) -> Iterator[Check]:
    """The unit of systemd in which the daemon runs; `pid` is None where no daemon can be asked."""
    if pid is None:
        yield Check("service", State.OK, "no daemon to ask")
        return
    try:
        text = (root / f"proc/{pid}/cgroup").read_text()
    except OSError:
        yield Check("service", State.OK, "the daemon's cgroup cannot be seen: it lives in another pid namespace")
        return
    name = unit_of(text)
    if name.endswith(".service"):
        yield Check("service", State.OK, f"pid {pid} runs in {name}", data={"unit": name})
    elif name.startswith("session-"):
        what = f"pid {pid} runs in a login session ({name}), not in a service"
        yield Check("service", State.OK, what, data={"unit": name})
    else:
        yield Check("service", State.OK, f"pid {pid} runs in no service", data={"unit": name})


def unit_of(text: str) -> str:
    """The innermost service or scope in the text of /proc/<pid>/cgroup; empty where there is none."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers) or controllers == "name=systemd":
            found = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
            if found:
                return found[-1]
    return ""


def last_system_uid(root: Path) -> int:
    """The largest uid that systemd takes for a system user's."""
    try:
        found = _SYS_UID_MAX.search((root / "etc/login.defs").read_text())
    except (OSError, UnicodeDecodeError):
        found = None
    return _LAST_SYSTEM_UID if found is None else int(found[1])


def _login_name(uid: int) -> str:
    import pwd  # noqa: PLC0415 - may ask a directory service, so only where it matters

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _logind_files(root: Path) -> list[str]:
    """Texts of logind's settings, in the order in which later ones win."""
    own = root / "etc/systemd/logind.conf"
    paths = [own if own.exists() else root / "usr/lib/systemd/logind.conf"]
    folders = ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd")
    drop_ins = {path.name: path for folder in folders for path in sorted((root / folder).glob("logind.conf.d/*.conf"))}
    paths += [drop_ins[name] for name in sorted(drop_ins)]
    texts: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append(path.read_text())
    return texts


def removes_ipc(texts: Iterable[str]) -> bool:
    """The value of ``RemoveIPC=`` after all files; systemd's own default is yes."""
    value = "yes"
    for text in texts:
        for line in text.splitlines():
            key, equals, given = line.strip().partition("=")
            if equals and key.strip() == "RemoveIPC":
                value = given.strip().lower() or "yes"
    return value in ("yes", "true", "on", "1", "y", "t")
