"""Which build this is."""

import tomllib
from pathlib import Path

import pytest

from stratad.version import PACKAGES, UNKNOWN, commit_of, hash_tree, package_dir, package_hash

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_tree(root: Path) -> Path:
    (root / "inner").mkdir(parents=True)
    (root / "a.py").write_text("a = 1\n")
    (root / "inner/b.py").write_text("b = 2\n")
    return root


def test_every_change_changes_the_hash(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "p")
    seen = {hash_tree({"p": tree})}
    (tree / "a.py").write_text("a = 2\n")
    seen.add(hash_tree({"p": tree}))
    (tree / "a.py").rename(tree / "c.py")
    seen.add(hash_tree({"p": tree}))
    (tree / "inner/d.py").write_text("")
    seen.add(hash_tree({"p": tree}))
    (tree / "c.py").unlink()
    seen.add(hash_tree({"p": tree}))
    assert len(seen) == 5


def test_a_file_cannot_look_like_two(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    (two / "a.py").write_text("1")
    (two / "b.py").write_text("2")
    one.mkdir()
    (one / "a.py").write_text("1p/b.py2")
    assert hash_tree({"p": one}) != hash_tree({"p": two})


def test_what_no_install_has_does_not_count(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "p")
    before = hash_tree({"p": tree})
    (tree / "WIRE.md").write_text("a document lies in the checkout only\n")
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__/a.cpython-311.pyc").write_bytes(b"\0")
    assert hash_tree({"p": tree}) == before


def test_the_same_files_elsewhere_have_the_same_hash(tmp_path: Path) -> None:
    assert hash_tree({"p": make_tree(tmp_path / "x")}) == hash_tree({"p": make_tree(tmp_path / "y")})


def test_every_folder_that_is_hashed_is_installed() -> None:
    home = package_dir("stratad")
    assert home is not None
    project = tomllib.loads((home.parent / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for package in PACKAGES for path in (home.parent / package).rglob("*.py")}
    hashed = {folder.relative_to(home.parent).as_posix().replace("/", ".") for folder in folders}
    assert hashed == set(project["tool"]["setuptools"]["packages"])


def test_our_own_hash_is_known() -> None:
    assert package_hash() != UNKNOWN
    assert len(bytes.fromhex(package_hash())) == 16


def test_package_dir_of_what_is_not_there() -> None:
    assert package_dir("no_such_package_at_all") is None
    assert package_dir("this") is None, "a single module is none of our packages"


def test_commit_of_a_detached_checkout(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(COMMIT + "\n")
    assert commit_of(tmp_path) == COMMIT


@pytest.mark.parametrize("packed", [False, True])
def test_commit_of_a_branch(tmp_path: Path, packed: bool) -> None:
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    if packed:
        (git / "packed-refs").write_text(
            f"# pack-refs with: peeled\n{'f' * 40} refs/heads/x\n{COMMIT} refs/heads/main\n"
        )
    else:
        (git / "refs/heads/main").write_text(COMMIT + "\n")
    assert commit_of(tmp_path) == COMMIT


def test_commit_of_a_work_tree(tmp_path: Path) -> None:
    git, tree = tmp_path / "main/.git", tmp_path / "tree"
    (git / "worktrees/tree").mkdir(parents=True)
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/side").write_text(COMMIT + "\n")
    (git / "worktrees/tree/HEAD").write_text("ref: refs/heads/side\n")
    (git / "worktrees/tree/commondir").write_text("../..\n")
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {git / 'worktrees/tree'}\n")
    assert commit_of(tree) == COMMIT


@pytest.mark.parametrize("head", ["", "garbage", "ref: refs/heads/unborn\n"])
def test_commit_that_cannot_be_told(tmp_path: Path, head: str) -> None:
    assert commit_of(tmp_path) == UNKNOWN
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(head)
    assert commit_of(tmp_path) == UNKNOWN
