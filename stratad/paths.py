"""Where daemon and client meet: the run directory and the sockets in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shm.header import INSTANCE_PATTERN
from stratad.config_text import INSTANCE_FORM

# Where the daemon of the system keeps its sockets, which serves root and the members of its group.
SYSTEM_RUN_DIR: Final = Path("/run/stratad")
SYSTEM_STATE_DIR: Final = Path("/var/lib/stratad")


class PathError(ValueError):
    """A run directory or instance name that cannot be: says what to set."""


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """The sockets of one instance, all in `directory`."""

    directory: Path
    client: Path
    worker: Path
    life: Path


def socket_paths(run_dir: Path, instance: str) -> SocketPaths:
    """The sockets of `instance` under `run_dir`.

    Raises:
        PathError: the name is no instance name.
    """
    if not re.fullmatch(INSTANCE_PATTERN, instance):
        raise PathError(f"instance {instance!r}: expected {INSTANCE_FORM}")
    directory = run_dir / instance
    return SocketPaths(directory, directory / "client.sock", directory / "worker.sock", directory / "life.sock")


def default_run_dir(environ: Mapping[str, str], uid: int) -> Path:
    """The run directory of a daemon where none is configured. Never a folder that everybody may write to.

    Raises:
        PathError: the environment names none.
    """
    # systemd may name several, separated by colons; the first is ours.
    given = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if uid == 0:
        return SYSTEM_RUN_DIR
    user_dir = environ.get("XDG_RUNTIME_DIR", "")
    if user_dir:
        return Path(user_dir) / "stratad"
    raise PathError("there is no run directory: XDG_RUNTIME_DIR is not set; give --run-dir (daemon.run_dir)")


def find_run_dir(environ: Mapping[str, str], uid: int, instance: str, system: Path = SYSTEM_RUN_DIR) -> Path:
    """The run directory where a client looks for the daemon of `instance` when it is told none.

    That of the user's own daemon, ``$XDG_RUNTIME_DIR/stratad``, if its socket is there; else that of the system, if it
    is there; else the user's own, where a daemon may yet come. Root has the system's only. ``$RUNTIME_DIRECTORY`` says
    nothing here: in the unit of an engine it names a folder of the engine.

    Raises:
        PathError: the name is no instance name, or the environment names no folder and the system has none.
    """
    if uid == 0:
        return system
    user_dir = environ.get("XDG_RUNTIME_DIR", "")
    own = Path(user_dir) / "stratad" if user_dir else None
    if own is not None and (_is_there(socket_paths(own, instance).life) or not _is_there(system)):
        return own
    if _is_there(system):
        return system
    raise PathError(
        f"there is no run directory: no daemon of the system has made {system}, and XDG_RUNTIME_DIR is not set; "
        "give --run-dir"
    )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """The state directory where none is configured.

    Raises:
        PathError: the environment names none.
    """
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if uid == 0:
        return SYSTEM_STATE_DIR
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "stratad"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".local/state/stratad"
    raise PathError("there is no state directory: HOME is not set; give --state-dir (daemon.state_dir)")
