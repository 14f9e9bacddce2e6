"""Checks of the installation: where each package comes from, and which versions there are."""

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stratad.ctl.findings import Check, State
from stratad.ctl.output import JsonObject
from stratad.version import PACKAGES, commit, package_dir, package_hash

# Import names of what we stand on, with the name under which each is installed.
DEPENDENCIES: Final[dict[str, str]] = {
    "msgpack": "msgpack",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "posix_ipc": "posix-ipc",
    "psutil": "psutil",
    "xxhash": "xxhash",
    "zmq": "pyzmq",
}
_REQUIREMENT: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)$")
# What python takes for a module of a name: a script without a suffix, such as our own in a bin folder, is none.
_MODULE_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
_SHADOW_FIX: Final = (
    "give the daemon and the engine a virtual environment of their own, start them with `python -P`, "
    "and uninstall or move the foreign package"
)


def packages() -> Iterator[Check]:
    """Origins of our packages, foreign ones that could hide them, and the versions of what we stand on."""
    yield _own_origins()
    yield foreign(Path.cwd(), sys.path)
    yield dependencies()


def _own_origins() -> Check:
    origins = {name: str(path) if (path := package_dir(name)) else "" for name in PACKAGES}
    home = Path(origins["stratad"]).parent
    strangers = [name for name, path in origins.items() if not path or Path(path).parent != home]
    data: JsonObject = {"origins": dict(origins), "package_hash": package_hash(), "commit": commit()}
    if strangers:
        named = ", ".join(f"{name} from {origins[name] or 'nowhere'}" for name in strangers)
        return Check("origins", State.FAIL, f"stratad is in {home}, but {named}", _SHADOW_FIX, data)
    text = f"{', '.join(PACKAGES)} all in {home} (hash {package_hash()}, commit {commit()})"
    return Check("origins", State.OK, text, data=data)


def foreign(cwd: Path, search_path: Sequence[str]) -> Check:
    """Foreign packages that bear one of our names, on the import path or in the current folder."""
    found = sorted({str(path) for folder in (str(cwd), *search_path) for path in _strangers(Path(folder or cwd))})
    if not found:
        return Check("shadowing", State.OK, "no foreign package bears one of our names")
    return Check(
        "shadowing", State.WARN, f"these bear a name of ours: {', '.join(found)}", _SHADOW_FIX, {"foreign": found}
    )


def _strangers(folder: Path) -> Iterator[Path]:
    """What in `folder` could be imported under one of our names without being ours."""
    for name in PACKAGES:
        own = package_dir(name)
        package = folder / name
        if (package / "__init__.py").is_file() and (own is None or package.resolve() != own.resolve()):
            yield package
        for suffix in _MODULE_SUFFIXES:
            module = folder / f"{name}{suffix}"
            if module.is_file():
                yield module


def dependencies(needed: Mapping[str, str] = DEPENDENCIES, requirements: Iterable[str] | None = None) -> Check:
    """Whether what we stand on is there and new enough; `needed` maps import names to distributions."""
    minimums = minimum_versions(_requirements() if requirements is None else requirements)
    versions: dict[str, str] = {}
    origins: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for module, distribution in needed.items():
        spec = importlib.util.find_spec(module)
        if spec is None:
            wrong[distribution] = "is missing"
            continue
        origins[module] = spec.origin or ""
        versions[distribution] = _version(distribution)
        least = minimums.get(distribution, "")
        if least and versions[distribution] and _numbers(versions[distribution]) < _numbers(least):
            wrong[distribution] = f"{versions[distribution]} is older than {least}"
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    torch_version = _version("torch")
    if torch_version:
        versions["torch"] = torch_version
    data: JsonObject = {"versions": dict(versions), "module_origins": dict(origins)}
    if wrong:
        text = "; ".join(f"{distribution} {what}" for distribution, what in wrong.items())
        fix = (
            f"install {', '.join(wrong)}: in the checkout run `pip install -e .` with the pip of this virtual "
            "environment, or `bash tools/demo.sh`, which makes one"
        )
        return Check("versions", State.FAIL, text, fix, data)
    text = ", ".join(f"{name} {version or 'of unknown version'}" for name, version in versions.items())
    return Check("versions", State.OK, text, data=data)


def minimum_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Least versions out of plain ``name>=version`` requirements; extras are left out."""
    matches = (_REQUIREMENT.match(text.strip()) for text in requirements if ";" not in text)
    return {match["name"].lower(): match["version"] for match in matches if match}


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("stratad") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a checkout without an installation


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, enough to compare releases."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
