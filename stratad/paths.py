"""Where daemon and client meet: the run directory and the sockets in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shm.header import INSTANCE_PATTERN
from stratad.config_text import INSTANCE_FORM


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
    """The run directory where none is configured. Never a folder that everybody may write to.

    Raises:
        PathError: the environment names none.
    """
    # systemd may name several, separated by colons; the first is ours.
    given = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if uid == 0:
        return Path("/run/stratad")
    user_dir = environ.get("XDG_RUNTIME_DIR", "")
    if user_dir:
        return Path(user_dir) / "stratad"
    raise PathError("there is no run directory: XDG_RUNTIME_DIR is not set; give --run-dir (daemon.run_dir)")


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """The state directory where none is configured.

    Raises:
        PathError: the environment names none.
    """
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if uid == 0:
        return Path("/var/lib/stratad")
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "stratad"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".local/state/stratad"
    raise PathError("there is no state directory: HOME is not set; give --state-dir (daemon.state_dir)")
