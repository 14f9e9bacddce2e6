"""Which build this is: the hash of the installed source files, and the commit where they lie in a checkout.

A client and a daemon of different builds may disagree about anything, so the handshake carries both values and
`stratactl` refuses a daemon whose hash differs from its own.
"""

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Final

PACKAGES: Final = ("stratad", "workers", "ipc", "shm")
UNKNOWN: Final = "unknown"
_COMMIT_HEX_DIGITS: Final = 40


def package_dir(package: str) -> Path | None:
    """The folder that `import package` would take, found without importing it; None where there is none.

    A foreign single-file module of the same name counts as none: it cannot be ours.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def hash_tree(roots: dict[str, Path]) -> str:
    """Hash of every ``.py`` file below the named folders: 32 hex digits over names, lengths and contents.

    Nothing else is installed with the packages, so a checkout and a copy installed from it have the same hash, and
    documents, compiled files and what an editor leaves do not change it.

    Raises:
        OSError: a file could not be read.
    """
    state = hashlib.blake2b(digest_size=16, person=b"stratad/pkg")
    for name in sorted(roots):
        root = roots[name]
        files = (path for path in root.rglob("*.py") if path.is_file())
        for path in sorted(files):
            content = path.read_bytes()
            state.update(f"{name}/{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            state.update(content)
    return state.hexdigest()


@functools.cache
def package_hash() -> str:
    """Hash over the source files of the four packages as they lay on disk at the first call.

    The daemon calls it at its start: later edits of the files do not change what runs, nor this value.
    """
    roots = {package: path for package in PACKAGES if (path := package_dir(package)) is not None}
    try:
        return hash_tree(roots)
    except OSError:
        return UNKNOWN


@functools.cache
def commit() -> str:
    """Commit (40 hex digits) of the checkout that holds the package, or ``unknown`` for an installed copy."""
    here = package_dir("stratad")
    return UNKNOWN if here is None else commit_of(here.parent)


def commit_of(checkout: Path) -> str:
    """Commit of a checkout, read from its ``.git`` without running git; ``unknown`` where that cannot be read.

    Only `checkout` itself is looked at, never its parents: a package installed into a virtual environment inside some
    checkout does not belong to that checkout's commit.
    """
    try:
        git_dir = _git_dir(checkout)
        head = (git_dir / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return _checked(head)
        return _checked(_resolve(git_dir, head.removeprefix("ref: ")))
    except (OSError, UnicodeDecodeError):
        return UNKNOWN


def _git_dir(checkout: Path) -> Path:
    """``.git`` itself, or the folder that a work tree's ``.git`` file points to."""
    dot_git = checkout / ".git"
    if dot_git.is_file():
        return checkout / dot_git.read_text().strip().removeprefix("gitdir: ")
    return dot_git


def _resolve(git_dir: Path, ref: str) -> str:
    """Value of a ref, loose or packed; work trees keep their refs in the common folder."""
    common = git_dir
    if (git_dir / "commondir").is_file():
        common = git_dir / (git_dir / "commondir").read_text().strip()
    for folder in (git_dir, common):
        if (folder / ref).is_file():
            return (folder / ref).read_text().strip()
    for line in (common / "packed-refs").read_text().splitlines():
        value, _, name = line.partition(" ")
        if name == ref:
            return value
    return ""


def _checked(value: str) -> str:
    """`value` where it looks like a commit."""
    if len(value) == _COMMIT_HEX_DIGITS and all(digit in "0123456789abcdef" for digit in value):
        return value
    return UNKNOWN
