"""The configuration: every setting with its unit, its bound and its default, read once.

Flags go before the environment (``STRATAD_<SECTION>_<KEY>``, then the switches of `stratad.switches`), that before the
TOML file, that before the defaults.
Sizes may be written as ``"256MiB"``. This is the only module that reads arguments, environment or the file.
"""

import argparse
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias, get_args, get_origin

import msgspec
from msgspec import Meta

from ipc.rundir import RunDirError, check_socket_path
from shm.extent import GRANULE_BYTES
from shm.shuttle import MAX_SHUTTLE_BYTES
from stratad import __version__
from stratad.access import AUTO, AccessError, check_names
from stratad.config_text import MEANINGS, SIZE_FORM, exact_size, in_words
from stratad.devices import Devices, parse_devices
from stratad.fault_points import DieAt
from stratad.paths import PathError, default_run_dir, default_state_dir, socket_paths
from stratad.switches import SwitchError, serial_note, switched

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Budget: TypeAlias = Annotated[int, Meta(ge=1, le=2**50)] | Literal["auto"]
ShuttleSize: TypeAlias = Annotated[int, Meta(ge=2 * GRANULE_BYTES, le=MAX_SHUTTLE_BYTES, multiple_of=GRANULE_BYTES)]
Names: TypeAlias = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=1000)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]


class ConfigError(ValueError):
    """A setting that cannot be: names the key, the value, where it came from and the bound."""


class DaemonConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who and where the daemon is. The directories are absolute once loaded."""

    instance: Annotated[str, Meta(pattern=r"\A[a-z0-9_-]{1,32}\Z")] = "default"
    run_dir: str = "auto"
    state_dir: str = "auto"
    devices: Devices = Devices("auto")


class RamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arena. `budget_bytes` "auto" leaves the choice to the daemon's view of the host. With `keep` images survive a
    stop of the daemon in /dev/shm, for the next one; otherwise a stop frees everything.
    """

    budget_bytes: Budget = "auto"
    budget_images: Count = 100_000
    shuttle_bytes: ShuttleSize = 256 * MIB
    prefault: bool = False
    keep: bool = True
    # What a shuttle lacked (room, memory, descriptors) may be there again; nobody tells the daemon.
    grow_again_s: Seconds = 10.0
    # Worth their price where shuttles are page-locked: the end of such a process takes the kernel seconds without.
    huge_pages: Literal["auto", "on", "off"] = "auto"


class CopyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How stages are copied. `parallel` false is the serial baseline of the same build."""

    parallel: bool = True
    # Where others keep a GPU busy, kernels wait for their turn once a slice, so small slices leave the link idle.
    slice_bytes: Annotated[int, Meta(ge=64 * KIB, le=GIB)] = 128 * MIB
    staging_bytes: Annotated[int, Meta(ge=64 * KIB, le=4 * GIB)] = 128 * MIB
    direct_slice_bytes: Annotated[int, Meta(ge=64 * KIB, le=16 * GIB)] = GIB
    # Kernels gather and scatter whatever the layout at the link's rate, until a model has every multiprocessor.
    path: Literal["auto", "gather", "engine"] = "auto"
    stream_priority: Literal["high", "low"] = "high"
    # Jobs up to this size are done by the worker's loop itself: handing over to a lane would take longer.
    inline_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 256 * KIB
    # Jobs up to this size go before larger ones on their lane: about half a slice of a GPU, 0.6 ms of its link.
    small_bytes: Annotated[int, Meta(ge=0, le=GIB)] = 32 * MIB
    chunk_tokens: Annotated[int, Meta(ge=1, le=65536)] = 256
    trace: bool = False


class ShuttleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of the bytes in shuttles is used again. ``off``: every image stores all of its chunks. ``storage``: captures
    copy all bytes, and equal chunks are stored once. ``verified``: besides, what digests prove to be stored already, or
    to be in the rows of a restore, is not copied. Tokens alone never prove anything.
    """

    reuse: Literal["off", "storage", "verified"] = "storage"


class CpuDeviceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `cpu` devices. `link_bytes_per_s` simulates a link of that speed; 0 copies as fast as the memory."""

    link_bytes_per_s: Rate = 0.0


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What peers may ask for."""

    max_message_bytes: Annotated[int, Meta(ge=64 * KIB, le=GIB)] = 16 * MIB
    max_clients: Annotated[int, Meta(ge=1, le=65536)] = 256
    max_ops: Annotated[int, Meta(ge=1, le=10**6)] = 1024


class DeadlinesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When waiting ends. A job has `job_floor_s` plus its bytes over `link_floor_bytes_per_s`."""

    worker_boot_s: Seconds = 60.0
    # A worker tells after 0.05 s that a job only waits for its engine's event; until then it is taken for copying.
    job_floor_s: Annotated[float, Meta(ge=0.2, le=86400)] = 10.0
    # For a worker to map or unmap the next pool; a shuttle has this plus its bytes over the link's floor.
    order_s: Seconds = 30.0
    # SIGKILL takes effect in well under a second, also with a large arena to unmap. Who is still there after this long
    # hangs in the kernel or a driver.
    stuck_s: Seconds = 10.0
    link_floor_bytes_per_s: Annotated[float, Meta(ge=1e3, le=1e15)] = 200e6
    stop_s: Seconds = 10.0
    lease_s: Seconds = 60.0
    unread_s: Seconds = 60.0


class AccessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may use the daemon besides root and its own user, which are always admins. Names or ids."""

    users: Names = ()
    groups: Names = (AUTO,)
    admins: Names = ()


class RestartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers that die: the wait doubles from first to cap, and after so many deaths in a row the device is failed."""

    backoff_first_s: Seconds = 0.1
    backoff_cap_s: Seconds = 30.0
    give_up_after: Annotated[int, Meta(ge=1, le=1000)] = 8


class RescueConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What dead engines had marked clean."""

    max_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0


class MemoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory monitor. A process whose residual (what is resident and not explained) stays above
    `residual_warn_bytes` plus 5 % of its baseline for `warn_after` samples in a row is told in the log, once.
    """

    sample_s: Annotated[float, Meta(ge=0.05, le=86400)] = 5.0
    # A sample takes 40 bytes; at the bound that is 51 MB for the 64 processes that are watched at most.
    keep: Annotated[int, Meta(ge=2, le=20_000)] = 720
    residual_warn_bytes: Annotated[int, Meta(ge=MIB, le=2**50)] = 64 * MIB
    warn_after: Annotated[int, Meta(ge=1, le=10_000)] = 3


class TestingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For tests only. `worker_faults`: ``worker[#generation]/fault=when,...`` (see `workers.faulty`). With
    `allow_faults` admins may arm more of them at run time, and the supervisor kills itself at the fault point `die_at`
    (see `stratad.fault_points`).
    """

    worker_faults: Annotated[str, Meta(pattern=r"\A([A-Za-z0-9:-]+(#[0-9]+)?/[a-z_.]+=[^,=/]+(,(?!\Z)|\Z))*\Z")] = ""
    allow_faults: bool = False
    die_at: str = ""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings. `print_config` says that the caller only wants to see them, `parallel_note` why stages copy one
    after another, or side by side where a switch asked for the other (empty: nobody wonders).
    """

    daemon: DaemonConfig = DaemonConfig()
    access: AccessConfig = AccessConfig()
    ram: RamConfig = RamConfig()
    copy: CopyConfig = CopyConfig()
    shuttle: ShuttleConfig = ShuttleConfig()
    cpu_device: CpuDeviceConfig = CpuDeviceConfig()
    limits: LimitsConfig = LimitsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    restarts: RestartsConfig = RestartsConfig()
    rescue: RescueConfig = RescueConfig()
    memory: MemoryConfig = MemoryConfig()
    log: LogConfig = LogConfig()
    testing: TestingConfig = TestingConfig()
    print_config: bool = False
    parallel_note: str = ""


class _Given(NamedTuple):
    """A value and where it came from."""

    value: object
    source: str


_SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}
_KEYS: Final[dict[str, object]] = {
    f"{section}.{field.name}": field.type
    for section, kind in _SECTIONS.items()
    for field in msgspec.structs.fields(kind)
}
_FLAGS: Final = {
    "instance": "daemon.instance",
    "run_dir": "daemon.run_dir",
    "state_dir": "daemon.state_dir",
    "devices": "daemon.devices",
}
_FLAG_FORMS: Final = {
    "instance": ("NAME", "default: default"),
    "run_dir": ("DIR", "default: $RUNTIME_DIRECTORY, /run/stratad for root, else $XDG_RUNTIME_DIR/stratad"),
    "state_dir": (
        "DIR",
        "default: $STATE_DIRECTORY, /var/lib/stratad for root, $XDG_STATE_HOME/stratad, else ~/.local/state/stratad",
    ),
    "devices": ("auto|cpu:N|cuda:all|UUID,...", "default: auto"),
}
_EPILOG: Final = """\
Flags go before the environment (STRATAD_<SECTION>_<KEY>), that before the file, that before the defaults. Of the
environment also these are read, behind its own names: STRATA_STAGE_COPY_PARALLEL, STRATA_STAGE_COPY_TRACE,
STRATA_SLOT_SHUTTLE_REUSE, STRATA_PARK_ASYNC, STRATA_CKPT_ASYNC.

exit codes:
  0  stopped
  1  cannot start
  2  bad configuration
  3  the instance is served by another daemon, or belongs to another user
"""
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS: Final = {None: 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_ENVIRON_PREFIX: Final = "STRATAD_"


def setting_names() -> tuple[str, ...]:
    """Every setting, ``section.key``."""
    return tuple(_KEYS)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration of a daemon; `argv` is without the program's name. ``--help`` and misspelt flags exit.

    Raises:
        ConfigError: an unknown key, a bad value, an unreadable file, or no directory to run in.
    """
    arguments = _parser().parse_args(argv)
    given: dict[str, _Given] = {}
    if arguments.config is not None:
        given.update(_from_file(Path(arguments.config)))
    in_file = given.get("copy.parallel")
    given.update(_from_switches(environ))
    given.update(_from_environ(environ))
    given.update(_from_flags(arguments))
    try:
        if given.get("daemon.run_dir", _Given("auto", "")).value == "auto":
            given["daemon.run_dir"] = _Given(str(default_run_dir(environ, os.geteuid())), "the default")
        if given.get("daemon.state_dir", _Given("auto", "")).value == "auto":
            given["daemon.state_dir"] = _Given(str(default_state_dir(environ, os.geteuid())), "the default")
    except PathError as exc:
        raise ConfigError(str(exc)) from exc
    sections: dict[str, dict[str, object]] = {section: {} for section in _SECTIONS}
    for key, entry in given.items():
        section, _, name = key.partition(".")
        sections[section][name] = _convert(key, entry)
    built = {section: kind(**sections[section]) for section, kind in _SECTIONS.items()}
    config = msgspec.structs.replace(Config(), **built, print_config=bool(arguments.print_config))
    others = f"copy.parallel = true ({in_file.source})" if in_file is not None and in_file.value is True else ""
    source = given.get("copy.parallel", _Given(True, "the default")).source
    note = serial_note(environ, source, parallel=config.copy.parallel, others=others)
    config = msgspec.structs.replace(config, parallel_note=note)
    _check_together(config)
    return config


def render_config(config: Config) -> str:
    """The configuration as a TOML file that reads back as the same, with the meaning of every setting above it."""
    lines: list[str] = []
    for section in _SECTIONS:
        lines.append(f"[{section}]")
        values = getattr(config, section)
        for field in msgspec.structs.fields(values):
            value = getattr(values, field.name)
            lines.append(f"# {MEANINGS[f'{section}.{field.name}']}")
            lines.append(f"{field.name} = {_toml(value)}{_remark(field.name, value)}")
        lines.append("")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stratad",
        description="The daemon that parks and restores the K/V of engines on this host. Runs until SIGTERM or SIGINT.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stratad {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with the settings (default: none)")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help='one setting, may be given often; sizes also as "256MiB" (default: none)',
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting with its meaning as TOML, then exit"
    )
    for flag, key in _FLAGS.items():
        metavar, default = _FLAG_FORMS[flag]
        text = f"{MEANINGS[key]}; short for --set {key}=... ({default})"
        parser.add_argument(f"--{flag.replace('_', '-')}", dest=flag, metavar=metavar, help=text)
    return parser


def _from_file(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"the configuration file {path} cannot be read: {exc}") from exc
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} = {table!r} stands outside a section{_hint(section)}")
        for name, value in table.items():
            yield _known(f"{section}.{name}", str(path)), _Given(value, str(path))


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    names = {_ENVIRON_PREFIX + key.replace(".", "_").upper(): key for key in _KEYS}
    for name, value in environ.items():
        if not name.startswith(_ENVIRON_PREFIX):
            continue
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise ConfigError(f"the environment sets {name}, which is no setting; the nearest is {near[0]}")
        yield names[name], _Given(value, f"environment {name}")


def _from_switches(environ: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    try:
        for key, value, variable in switched(environ):
            yield key, _Given(value, f"environment {variable}")
    except SwitchError as exc:
        raise ConfigError(str(exc)) from exc


def _from_flags(arguments: argparse.Namespace) -> Iterator[tuple[str, _Given]]:
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected SECTION.KEY=VALUE")
        yield _known(key.strip(), "--set"), _Given(value.strip(), f"--set {key.strip()}")
    for flag, key in _FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            yield key, _Given(value, f"--{flag.replace('_', '-')}")


def _known(key: str, source: str) -> str:
    if key not in _KEYS:
        raise ConfigError(f"{source}: there is no setting {key}{_hint(key)}")
    return key


def _hint(key: str) -> str:
    # A right name in the wrong section is nearer than any spelling.
    name = key.rpartition(".")[2]
    same_name = [known for known in _KEYS if known.endswith(f".{name}")]
    near = same_name or difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)
    return f"; the nearest is {near[0]}"


def _convert(key: str, given: _Given) -> object:
    """The typed value of one setting.

    Raises:
        ConfigError: names key, value, source and bound.
    """
    value = given.value
    try:
        if key == "daemon.devices":
            if not isinstance(value, str | list):
                raise ValueError(f"expected text or a list, got {type(value).__name__}")
            return parse_devices(value)
        if isinstance(value, str) and key.endswith("_bytes") and value != "auto":
            size = _SIZE.fullmatch(value.strip())
            if size is None:
                raise ValueError(f"expected {SIZE_FORM}")
            value = int(size[1]) * _UNITS[size[2]]
        choices = get_args(_KEYS[key]) if get_origin(_KEYS[key]) is Literal else ()
        if choices and value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        if key.startswith("access."):
            value = _names(value)
        # Flags and environment are text: "8", "true". A file has types, so there "8" stays wrong.
        from_text = given.source.startswith(("--", "environment "))
        converted = msgspec.convert(value, _KEYS[key], strict=not from_text)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("expected a finite number")
        if key in ("daemon.run_dir", "daemon.state_dir") and not Path(str(converted)).is_absolute():
            raise ValueError("expected an absolute path")
    except ValueError as exc:  # msgspec's ValidationError is one
        raise ConfigError(f"{key} = {given.value!r} ({given.source}): {in_words(key, str(exc))}") from exc
    return converted


def _names(value: object) -> object:
    """Names and ids as a list of texts: text has them separated by commas or is a TOML list, which may hold numbers."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = tomllib.loads(f"names = {value}")["names"]
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")] if value.strip() else []
    if isinstance(value, list):
        return [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in value]
    return value


def _check_together(config: Config) -> None:
    """Bounds between settings."""
    copy, restarts = config.copy, config.restarts
    if copy.staging_bytes < copy.slice_bytes:
        raise ConfigError(
            f"copy.staging_bytes = {copy.staging_bytes} must be at least copy.slice_bytes = {copy.slice_bytes}"
        )
    if restarts.backoff_cap_s < restarts.backoff_first_s:
        raise ConfigError(
            f"restarts.backoff_cap_s = {restarts.backoff_cap_s} must be at least "
            f"restarts.backoff_first_s = {restarts.backoff_first_s}"
        )
    _check_die_at(config.testing)
    try:
        check_names(config.access.admins, config.access.users, config.access.groups)
    except AccessError as exc:
        raise ConfigError(str(exc)) from exc
    try:
        check_socket_path(socket_paths(Path(config.daemon.run_dir), config.daemon.instance).client)
    except RunDirError as exc:
        raise ConfigError(f"daemon.run_dir = {config.daemon.run_dir!r}: {exc}") from exc


def _check_die_at(testing: TestingConfig) -> None:
    if not testing.die_at:
        return
    if not testing.allow_faults:
        raise ConfigError(f"testing.die_at = {testing.die_at!r} needs testing.allow_faults = true")
    try:
        DieAt.parse(testing.die_at)
    except ValueError as exc:
        raise ConfigError(f"testing.die_at = {testing.die_at!r}: {exc}") from exc


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # A TOML basic string is a JSON string.
    return msgspec.json.encode(str(value)).decode()


def _remark(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes") and value >= KIB:
        return f"  # {exact_size(value)}"
    return ""
