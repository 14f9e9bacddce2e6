"""Checks of where the GPUs are: bus address, NUMA node, CPUs near each, whether its worker runs there, peer access."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from ipc.messages import StatsReply, WorkerInfo
from stratad import topology
from stratad.ctl.findings import Check, State
from stratad.ctl.output import JsonObject
from stratad.ctl.status import cpu_ranges

# The runtime wakes every card; a driver that hangs must not hang the doctor.
_PEERS_TIMEOUT_S: Final = 30.0
_PIN_FIX: Final = (
    "let the daemon use the CPUs near its GPUs (AllowedCPUs= or CPUAffinity= of the service, taskset, the cpuset of a "
    "container), and restart it"
)


class Peers(msgspec.Struct, frozen=True):
    """What `stratad.ctl.peer_access` prints."""

    uuids: list[str]
    peers: list[list[bool]]


class PeersUnknown(Exception):
    """The runtime could not be asked; says why."""


def topology_of(
    stats: StatsReply | None,
    find_gpus: Callable[[], Sequence[topology.Gpu]] = topology.find_gpus,
    ask_peers: "Callable[[], Peers] | None" = None,
) -> Iterator[Check]:
    """Where each GPU is, what is near it, and which of them can reach each other. `stats` is the daemon's, if one runs:
    then each of its workers must run on CPUs near its GPU.
    """
    gpus = find_gpus()
    workers = {worker.device: worker for worker in (stats.workers if stats is not None else ())}
    for gpu in gpus:
        yield _placed(gpu, workers.get(gpu.uuid))
    if len(gpus) > 1:
        yield _peer_access(ask_peers or ask_runtime)


def _placed(gpu: topology.Gpu, worker: WorkerInfo | None) -> Check:
    place = topology.place_of(gpu.pci)
    node = f"NUMA node {place.numa_node}" if place.numa_node >= 0 else "no NUMA node told"
    near = f"CPUs {cpu_ranges(place.cpus)} near it" if place.cpus else "no CPUs told to be near it"
    text = f"{gpu.uuid}: PCI {gpu.pci or 'address unknown'}, {node}, {near}"
    data: JsonObject = {"device": gpu.uuid, **place._asdict(), "cpus": list(place.cpus)}
    if worker is None or not worker.cpus:
        return Check("topology", State.OK, text, data=data)
    data["worker_cpus"] = list(worker.cpus)
    text += f"; worker {worker.worker} on CPUs {cpu_ranges(worker.cpus)}"
    if place.cpus and not set(worker.cpus) <= set(place.cpus):
        return Check("topology", State.WARN, f"{text}: it could not be pinned near its GPU", _PIN_FIX, data)
    return Check("topology", State.OK, text, data=data)


def _peer_access(ask: Callable[[], Peers]) -> Check:
    try:
        found = ask()
    except PeersUnknown as exc:
        fix = "see `stratactl doctor --torch`; nothing depends on it"
        return Check("peer access", State.WARN, f"the GPU runtime could not be asked: {exc}", fix)
    data: JsonObject = {"uuids": list(found.uuids), "peers": [list(row) for row in found.peers]}
    count = len(found.uuids)
    apart = [(a, b) for a in range(count) for b in range(count) if a != b and not found.peers[a][b]]
    # An image's stage stays on its card, so that no copy of ours goes from card to card.
    if not apart:
        return Check("peer access", State.OK, f"all {count} GPUs reach each other's memory", data=data)
    named = ", ".join(f"{found.uuids[a]} not {found.uuids[b]}" for a, b in apart[:4])
    more = f" and {len(apart) - 4} more pairs" if len(apart) > 4 else ""
    return Check("peer access", State.OK, f"{named}{more}: copies between them go through the host", data=data)


def ask_runtime() -> Peers:
    """Ask in a process of its own.

    Raises:
        PeersUnknown: it failed, or did not answer in time.
    """
    command = [sys.executable, "-P", "-m", "stratad.ctl.peer_access"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PEERS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PeersUnknown(f"no answer in {_PEERS_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()
        raise PeersUnknown(last[-1] if last else f"exit status {done.returncode}")
    try:
        return msgspec.convert(json.loads(done.stdout), Peers)
    except (ValueError, msgspec.ValidationError) as exc:
        raise PeersUnknown(f"its answer is no matrix: {exc}") from exc
