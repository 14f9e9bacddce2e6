"""Default directories and socket names."""

from pathlib import Path

import pytest

from stratad.paths import PathError, default_run_dir, default_state_dir, find_run_dir, socket_paths


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/a"),
        ({"RUNTIME_DIRECTORY": "/run/a"}, 0, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/stratad"),
        ({}, 0, "/run/stratad"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/stratad"),
    ],
)
def test_run_dir(environ: dict[str, str], uid: int, expected: str) -> None:
    assert default_run_dir(environ, uid) == Path(expected)


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"TMPDIR": "/tmp", "HOME": "/home/x"}])
def test_no_run_dir_is_refused_not_guessed(environ: dict[str, str]) -> None:
    with pytest.raises(PathError, match="XDG_RUNTIME_DIR"):
        default_run_dir(environ, 7)


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, 7, "/var/lib/a"),
        ({"HOME": "/root"}, 0, "/var/lib/stratad"),
        ({"XDG_STATE_HOME": "/s", "HOME": "/home/x"}, 7, "/s/stratad"),
        ({"HOME": "/home/x"}, 7, "/home/x/.local/state/stratad"),
    ],
)
def test_state_dir(environ: dict[str, str], uid: int, expected: str) -> None:
    assert default_state_dir(environ, uid) == Path(expected)


def test_no_state_dir() -> None:
    with pytest.raises(PathError, match="HOME"):
        default_state_dir({}, 7)


def test_sockets() -> None:
    paths = socket_paths(Path("/run/stratad"), "default")
    assert paths.directory == Path("/run/stratad/default")
    assert {path.parent for path in (paths.client, paths.worker, paths.life)} == {paths.directory}
    assert (paths.client.name, paths.worker.name, paths.life.name) == ("client.sock", "worker.sock", "life.sock")


@pytest.mark.parametrize("instance", ["", ".", "..", "a/b", "../x", "A", "a.b", "x" * 33, "x\n"])
def test_names_that_would_leave_the_run_dir(instance: str) -> None:
    with pytest.raises(PathError):
        socket_paths(Path("/run/stratad"), instance)


def test_a_client_finds_its_users_own_daemon_then_that_of_the_system(tmp_path: Path) -> None:
    system, own = tmp_path / "system", tmp_path / "user/stratad"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "user"), "RUNTIME_DIRECTORY": "/run/engine"}
    assert find_run_dir(environ, 7, "one", system) == own  # a daemon may yet come
    system.mkdir()
    assert find_run_dir(environ, 7, "one", system) == system
    (own / "one").mkdir(parents=True)
    assert find_run_dir(environ, 7, "one", system) == system  # a folder is no daemon
    (own / "one/life.sock").touch()
    assert find_run_dir(environ, 7, "one", system) == own
    assert find_run_dir(environ, 7, "two", system) == system  # another instance
    assert find_run_dir(environ, 0, "one", system) == system


def test_a_client_without_a_runtime_directory(tmp_path: Path) -> None:
    system = tmp_path / "system"
    with pytest.raises(PathError, match="XDG_RUNTIME_DIR"):
        find_run_dir({"HOME": "/home/x"}, 7, "one", system)
    system.mkdir()
    assert find_run_dir({"HOME": "/home/x"}, 7, "one", system) == system
