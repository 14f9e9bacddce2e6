"""Where devices are, by a /sys of our own; what doctor and status make of it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stratad import topology
from stratad.ctl import doctor_topology
from stratad.ctl.doctor_topology import Peers, PeersUnknown, topology_of
from stratad.ctl.findings import Check, State
from stratad.ctl.status import describe
from stratad.topology import Gpu, Place
from tests.support.ctl_fakes import STATS, WORKER

ONE = Gpu("GPU-00000000-0000-0000-0000-000000000001", "0000:0a:00.0")
TWO = Gpu("GPU-00000000-0000-0000-0000-000000000002", "0000:8a:00.0")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs on two NUMA nodes."""
    for gpu, node, cpus in ((ONE, "0", "0-3"), (TWO, "1", "4-7")):
        folder = tmp_path / "sys" / gpu.pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{cpus}\n")
        listed = tmp_path / "proc" / gpu.pci.upper()
        listed.mkdir(parents=True)
        (listed / "information").write_text(f"Model: \t X\nGPU UUID: \t {gpu.uuid}\n")
    monkeypatch.setattr(topology, "PCI_DEVICES", tmp_path / "sys")
    monkeypatch.setattr(topology, "PROC_NVIDIA", tmp_path / "proc")
    return tmp_path


@pytest.mark.usefixtures("host")
def test_a_device_is_where_the_kernel_says() -> None:
    assert topology.place_of(TWO.pci) == Place(TWO.pci, 1, (4, 5, 6, 7))
    assert topology.listed_gpus() == [ONE, TWO]
    assert topology.near_cpus(TWO.pci, range(6)) == (4, 5)
    assert topology.near_cpus(TWO.pci, range(3)) == (0, 1, 2), "none is near: all that are allowed"
    assert topology.gpu_devices([TWO.uuid], [ONE, TWO], range(8))[0].cpus == (4, 5, 6, 7)


@pytest.mark.parametrize(("node", "cpus"), [("-1", ""), ("x", "7-x"), (None, None)])
def test_a_kernel_that_does_not_say(host: Path, node: str | None, cpus: str | None) -> None:
    for name, text in (("numa_node", node), ("local_cpulist", cpus)):
        path = host / "sys" / ONE.pci / name
        path.unlink() if text is None else path.write_text(text)
    assert topology.place_of(ONE.pci) == Place(ONE.pci, -1, ())
    assert topology.place_of("") == Place("", -1, ())
    assert topology.near_cpus(ONE.pci, range(3)) == (0, 1, 2)


def _peers(*rows: Sequence[bool]) -> Peers:
    return Peers([ONE.uuid, TWO.uuid], [list(row) for row in rows])


def _checks(cpus: tuple[int, ...], peers: Peers) -> list[Check]:
    worker = msgspec.structs.replace(WORKER, worker="GPU-2", device=TWO.uuid, cpus=cpus)
    stats = msgspec.structs.replace(STATS, workers=(worker,))
    return list(topology_of(stats, lambda: [ONE, TWO], lambda: peers))


@pytest.mark.usefixtures("host")
def test_doctor_says_where_each_device_is() -> None:
    one, two, peers = _checks((4, 5), _peers((False, True), (True, False)))
    assert (one.state, two.state, peers.state) == (State.OK, State.OK, State.OK)
    assert f"{ONE.uuid}: PCI 0000:0a:00.0, NUMA node 0, CPUs 0-3 near it" in one.what
    assert "worker GPU-2 on CPUs 4-5" in two.what
    assert two.as_json()["numa_node"] == 1
    assert two.as_json()["worker_cpus"] == [4, 5]
    assert "all 2 GPUs reach each other" in peers.what
    assert peers.as_json()["peers"] == [[False, True], [True, False]]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cpus", [(0, 1), (3, 4)])
def test_doctor_warns_of_a_worker_that_is_not_near_its_gpu(cpus: tuple[int, ...]) -> None:
    _, two, _ = _checks(cpus, _peers((False, True), (True, False)))
    assert two.state is State.WARN
    assert "could not be pinned" in two.what
    assert "cpuset" in two.fix


@pytest.mark.usefixtures("host")
def test_doctor_names_cards_that_do_not_reach_each_other() -> None:
    *_, peers = _checks((4,), _peers((False, False), (True, False)))
    assert peers.state is State.OK
    assert f"{ONE.uuid} not {TWO.uuid}: copies" in peers.what


@pytest.mark.usefixtures("host")
def test_no_daemon_and_no_runtime() -> None:
    def fails() -> Peers:
        raise PeersUnknown("no cuda runtime library")

    one, two, peers = topology_of(None, lambda: [ONE, TWO], fails)
    assert (one.state, two.state, peers.state) == (State.OK, State.OK, State.WARN)
    assert "no cuda runtime library" in peers.what
    assert [check.name for check in topology_of(None, lambda: [ONE], fails)] == ["topology"]
    assert list(topology_of(None, list, fails)) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; sys.exit('no runtime here')", "no runtime here"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("print('nothing')", "no matrix"),
        ("print('{}')", "no matrix"),
        ("import time; time.sleep(60)", "no answer"),
    ],
)
def test_a_child_that_asks_the_runtime_in_vain(code: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def other(_command: Sequence[str], **keywords: object) -> "subprocess.CompletedProcess[str]":
        return run([sys.executable, "-c", code], **keywords)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", other)
    monkeypatch.setattr(doctor_topology, "_PEERS_TIMEOUT_S", 0.5)
    with pytest.raises(PeersUnknown, match=text):
        doctor_topology.ask_runtime()


@pytest.mark.usefixtures("host")
def test_status_shows_the_places_of_the_gpus_it_serves() -> None:
    workers = (msgspec.structs.replace(WORKER, device=TWO.uuid), msgspec.structs.replace(WORKER, device="cpu:0"))
    answer = describe(msgspec.structs.replace(STATS, workers=workers), lambda _: None)
    assert answer.data["places"] == {TWO.uuid: {"pci": TWO.pci, "numa_node": 1, "cpus": (4, 5, 6, 7)}}
    (line,) = [line for line in answer.lines if line.startswith(TWO.uuid)]
    assert line.split() == [TWO.uuid, TWO.pci, "1", "4-7"]
