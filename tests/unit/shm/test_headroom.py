"""Headroom out of made-up proc and sys trees."""

from pathlib import Path

import pytest

from shm.headroom import Headroom, memory_headroom, oom_kills

V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n"
UNLIMITED_V1 = "9223372036854771712"


class Tree:
    """A file system of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def v2(self, folder: str, limit: str, usage: int, *, cache: int = 0, shmem: int = 0) -> None:
        base = f"sys/fs/cgroup{folder}"
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.current", f"{usage}\n")
        self.write(
            f"{base}/memory.stat", f"file {cache + shmem}\nshmem {shmem}\ninactive_file {cache}\nactive_file 0\n"
        )

    def v1(self, folder: str, limit: str, usage: int, *, cache: int = 0) -> None:
        base = f"sys/fs/cgroup/memory{folder}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n")

    def read(self) -> tuple[int, str]:
        room = memory_headroom(self.root)
        return room.free_bytes, room.limited_by.removeprefix(f"{self.root}/")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_host_alone(tree: Tree) -> None:
    assert tree.read() == (8000 * 1024, "MemAvailable of the host")


def test_nothing_known(tmp_path: Path) -> None:
    assert memory_headroom(tmp_path) == Headroom(2**60, "nothing")


@pytest.mark.parametrize("version", [1, 2])
def test_limit_minus_usage_plus_cache(tree: Tree, version: int) -> None:
    if version == 2:
        tree.write("proc/self/cgroup", "0::/a/b\n")
        tree.write("proc/self/mountinfo", V2)
        tree.v2("/a/b", "1000", 700, cache=200, shmem=300)
        name = "sys/fs/cgroup/a/b/memory.max = 1000"
    else:
        tree.write("proc/self/cgroup", "4:memory:/a/b\n3:cpu:/x\n0::/\n")
        tree.write("proc/self/mountinfo", V1_CPU + V1)
        tree.v1("/a/b", "1000", 700, cache=200)
        name = "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes = 1000"
    assert tree.read() == (500, name)


def test_the_least_of_the_ancestors_counts(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b/c\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2("/a/b/c", "max", 10)
    tree.v2("/a/b", "5000", 4900)
    tree.v2("/a", "90000", 4900)
    assert tree.read() == (100, "sys/fs/cgroup/a/b/memory.max = 5000")
    tree.v2("/a", "4950", 4900)
    assert tree.read() == (50, "sys/fs/cgroup/a/memory.max = 4950")


def test_both_versions_at_once(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/m\n0::/u\n")
    tree.write("proc/self/mountinfo", V1 + "40 31 0:50 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    tree.v1("/m", "1000", 100)
    tree.write("sys/fs/cgroup/unified/u/memory.max", "800\n")
    tree.write("sys/fs/cgroup/unified/u/memory.current", "100\n")
    assert tree.read()[0] == 700


def test_over_the_limit_is_nothing(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2("/a", "1000", 5000)
    assert tree.read()[0] == 0


def test_no_limit_in_v1(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/a\n")
    tree.write("proc/self/mountinfo", V1)
    tree.v1("/a", UNLIMITED_V1, 5)
    tree.v1("", UNLIMITED_V1, 5)
    assert tree.read()[1] == "MemAvailable of the host"


@pytest.mark.parametrize(
    ("mount_root", "group", "folder"),
    [("/docker/x", "/docker/x/in", "/in"), ("/docker/x", "/docker/x", ""), ("/docker/x", "/", ""), ("/", "/../y", "")],
)
def test_inside_a_container(tree: Tree, mount_root: str, group: str, folder: str) -> None:
    tree.write("proc/self/cgroup", f"0::{group}\n")
    tree.write("proc/self/mountinfo", f"31 23 0:28 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    tree.v2(folder, "1000", 1)
    assert tree.read()[0] == 999


@pytest.mark.parametrize("text", ["", "nonsense", "-5", "1e3", "max"])
def test_unreadable_limits_do_not_count(tree: Tree, text: str) -> None:
    tree.write("proc/self/cgroup", "0::/a\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2("/a", text, 5)
    assert tree.read()[1] == "MemAvailable of the host"


def test_here() -> None:
    assert memory_headroom().free_bytes > 0


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_memory_are_those_of_the_innermost_cgroup(tree: Tree, version: int) -> None:
    assert oom_kills(tree.root) == 0
    tree.write("proc/self/mountinfo", V1 if version == 1 else V2)
    tree.write("proc/self/cgroup", "4:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    base, name = ("memory/", "oom_control") if version == 1 else ("", "events")
    tree.write(f"sys/fs/cgroup/{base}a/memory.{name}", "oom 7\noom_kill 7\n")
    tree.write(f"sys/fs/cgroup/{base}a/b/memory.{name}", "under_oom 0\noom_kill 3\n")
    assert oom_kills(tree.root) == 3
