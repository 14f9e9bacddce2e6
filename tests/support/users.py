"""Other users of this host, as real processes under their uids; needs root.

A client runs in a fork of the test process, which has imported everything already, so it needs no file of the checkout.
A daemon is executed, so it needs an interpreter and packages that its user can read: `runtime_for` finds or makes them.
"""

import ctypes
import grp  # noqa: F401 - a child may not be able to read it from where the interpreter is
import os
import pickle
import pwd  # noqa: F401 - as grp
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import stratad

WAIT_S = 30.0
PR_SET_DUMPABLE = 4
_PACKAGES = ("stratad", "workers", "ipc", "shm")
_DISTRIBUTIONS = ("pyzmq", "msgspec", "msgpack", "psutil", "posix-ipc", "xxhash", "numpy")
_PROBE = "import stratad.daemon, workers.main, workers.loop, workers.cpu_device"


class OtherUser:
    """A running process of another user, and a pipe to it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe

    def tell(self, what: object = None) -> None:
        """What its `Pipe.recv` returns next."""
        self._pipe.send(what)

    def hear(self) -> Any:
        """What it has sent next, or returned.

        Raises:
            AssertionError: it raised, said nothing in time, or ended.
        """
        if not self._pipe.poll(WAIT_S):
            raise AssertionError(f"process {self.pid} says nothing within {WAIT_S} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"process {self.pid} ended without a word") from None
        assert kind == "said", f"process {self.pid} of another user failed:\n{value}"
        return value


class Said:
    """The child's end: `send` and `recv` as of a connection."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, what: object) -> None:
        """Tell the test something."""
        self._pipe.send(("said", what))

    def recv(self) -> Any:
        """Wait for the test to say something."""
        if not self._pipe.poll(WAIT_S):
            raise AssertionError("the test says nothing")
        return self._pipe.recv()


@contextmanager
def other_user(
    uid: int, main: Callable[[Said], object], *, gid: int | None = None, groups: Sequence[int] = ()
) -> Iterator[OtherUser]:
    """Run `main` in a child process of another user; what it returns is the last that is heard of it."""
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        # The timer of the test's time limit is a thread; the child does not need it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(uid, uid if gid is None else gid, groups, main, theirs)
    theirs.close()
    try:
        yield OtherUser(pid, ours)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        ours.close()
        os.waitpid(pid, 0)


def run_as(uid: int, main: Callable[[], object], *, gid: int | None = None, groups: Sequence[int] = ()) -> Any:
    """What `main` returns in a process of another user."""
    with other_user(uid, lambda _: main(), gid=gid, groups=groups) as user:
        return user.hear()


def _child(uid: int, gid: int, groups: Sequence[int], main: Callable[[Said], object], pipe: Connection) -> None:
    try:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # A change of uid without an exec would leave /proc/self root's, and hide it from others for that reason.
        assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0
        said = ("said", main(Said(pipe)))
        pickle.dumps(said)
    except BaseException:  # noqa: BLE001 - whatever it was, the test is to see it
        said = ("failed", traceback.format_exc())
    try:
        pipe.send(said)
    finally:
        os._exit(0)


class Runtime(NamedTuple):
    """How another user starts Python with our packages: the interpreter, and what its environment needs."""

    python: str
    environ: Mapping[str, str]


@contextmanager
def runtime_for(uid: int, *, copy: bool = False) -> Iterator[Runtime]:
    """An interpreter and packages that `uid` can read: those at hand, or else (or with `copy`) copies of what a daemon
    on host memory needs. Skips, saying what was tried, where none of them can be run.
    """
    checkout = Path(stratad.__file__).parents[1]
    here = _runtime(sys.executable, checkout)
    if not copy and _works(uid, here):
        yield here
        return
    folder = Path(tempfile.mkdtemp(prefix="stratad-test-packages-"))
    try:
        _copy_packages(checkout, folder)
        yield _first_that_works(uid, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_that_works(uid: int, folder: Path) -> Runtime:
    """This interpreter (in a venv: with its packages), its base, another one of the same version, or a copy of the base
    in `folder`.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    tried = [sys.executable, os.path.realpath(sys.executable), f"/usr/bin/{name}", f"/usr/local/bin/{name}"]
    for python in tried:
        runtime = _runtime(python, folder)
        if _works(uid, runtime):
            return runtime
    home = folder / "home"
    unneeded = shutil.ignore_patterns("__pycache__", "site-packages", "test", "tests", "idlelib", "config-*", "*.a")
    shutil.copytree(Path(sys.base_prefix) / "lib" / name, home / "lib" / name, ignore=unneeded)
    for library in (Path(sys.base_prefix) / "lib").glob("libpython*.so*"):
        shutil.copy(library, home / "lib" / library.name)
    (home / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), home / "bin" / name)
    _let_everybody_read(folder)
    extra = {"PYTHONHOME": str(home), "LD_LIBRARY_PATH": str(home / "lib")}
    runtime = _runtime(str(home / "bin" / name), folder, extra)
    if not _works(uid, runtime):
        import pytest  # noqa: PLC0415 - tools that start daemons do without it

        pytest.skip(f"uid {uid} can run none of {', '.join(tried)} with a copy of the packages, nor a copy of Python")
    return runtime


def _runtime(python: str, packages: Path, extra: Mapping[str, str] | None = None) -> Runtime:
    return Runtime(python, {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1", **(extra or {})})


def _works(uid: int, runtime: Runtime) -> bool:
    command = [runtime.python, "-P", "-c", _PROBE]
    environ = {"PATH": os.environ.get("PATH", ""), **runtime.environ}
    try:
        return not subprocess.run(
            command, user=uid, group=uid, extra_groups=[], cwd="/", env=environ, capture_output=True, check=False
        ).returncode
    except OSError:
        return False


def _copy_packages(checkout: Path, folder: Path) -> None:
    for name in _PACKAGES:
        shutil.copytree(checkout / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _DISTRIBUTIONS:
        for file in metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), target)
    _let_everybody_read(folder)


def _let_everybody_read(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))


def passable(folder: Path) -> bool:
    """Whether everybody can get to a folder."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (folder, *folder.parents))
