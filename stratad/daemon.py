"""From a configuration to a running daemon, and back to nothing."""

import ctypes
import gc
import logging
import os
import shutil
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from ipc.lifeline import LifelineServer
from ipc.listening import listener, listens
from ipc.logs import fields
from ipc.messages import WorkerSpec
from ipc.rundir import OWNER_REACH, open_directory, prepare_directory
from ipc.server import RouterServer
from ipc.stream_server import StreamServer
from shm.digest_key import key_id
from shm.extent import GRANULE_BYTES
from shm.headroom import memory_headroom
from shm.janitor import list_segments, remove_segments
from shm.process import boot_id
from shm.shuttle import MOUNT
from stratad import topology
from stratad.access import Access, resolve_access, why_auto_is_nobody
from stratad.config import Config
from stratad.core.adoption import Legacy
from stratad.core.core import Core
from stratad.core.memory_tracks import MemorySettings
from stratad.core.records import Replayed, replay
from stratad.core.restarts import RestartPolicy
from stratad.core.state import Instant, Settings
from stratad.fault_points import DieAt, FaultPoints
from stratad.journal import Journal, JournalError, is_written, journal_path, read_journal, remove_journal
from stratad.keys import load_digest_key
from stratad.links import Endpoints
from stratad.lock import InstanceLock, InstanceLocked
from stratad.notify import Notifier
from stratad.open_files import raise_open_files
from stratad.paths import SocketPaths, socket_paths
from stratad.processes import Processes
from stratad.supervisor import Supervisor
from stratad.topology import DeviceSpec
from stratad.version import commit, package_hash
from stratad.watch import Watch

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER: Final = 36
DEFAULT_CPU_WORKERS: Final = 2
# `auto` takes this share of what the host and /dev/shm have left: enough to be of use, never the host's end.
AUTO_SHARE: Final = 0.25
LEAST_SHUTTLE_BYTES: Final = 2 * GRANULE_BYTES  # a header and a chunk
TEMPLATE_END_S: Final = 1.0
REACHED_POINTS: Final = "fault_points"  # in the state directory: those that were passed, one a line
# The kernel closes the files of a dead daemon one after another: that of its lock may be the first.
LAST_BREATH_S: Final = 1.0
# A step of the start: to free a dead daemon's arena, or to wake a driver that no process keeps loaded.
START_STEP_S: Final = 60.0


class ForeignKey(ValueError):
    """Images are there that were made under another digest key."""


def run(config: Config, notifier: Notifier) -> int:
    """Run the daemon until it is told to stop; returns its exit status. `notifier` is the way to the service manager.

    Raises:
        OSError, ValueError, InstanceLocked: it cannot start; the text says why.
    """
    # A full collection walks every chunk of the catalog and frees nothing: the core has no cycles.
    gc.disable()
    with ExitStack() as stack:
        lock = InstanceLock.take(config.daemon.instance)
        stack.callback(lambda: lock.release(unlink=not journal_path(config.daemon.instance).exists()))
        paths = socket_paths(Path(config.daemon.run_dir), config.daemon.instance)
        _refuse_served(config.daemon.instance, paths)
        key = load_digest_key(Path(config.daemon.state_dir))
        raise_open_files(config.limits.max_clients)
        notifier.starting("finding devices", START_STEP_S)
        devices = _devices(config)
        access = _access(config)
        settings = _settings(config, devices, access)
        endpoints = _listen(config, paths, access)
        stack.callback(_unlink_sockets, paths)
        notifier.starting("taking over from an earlier daemon", START_STEP_S)
        core = _take_over(settings, key, devices)
        journal = _open_journal(core, config.daemon.instance)
        stack.callback(journal.close)
        supervisor = Supervisor(
            core,
            endpoints,
            Processes(import_torch=any(not d.device.startswith("cpu:") for d in devices)),
            {d.worker: _spec(config, paths, key, d) for d in devices},
            access,
            watch=stack.enter_context(Watch.open()),
            journal=journal,
            lock=lock,
            stop_s=config.deadlines.stop_s,
            unread_s=config.deadlines.unread_s,
            notifier=notifier,
            points=_fault_points(config),
        )
        stack.callback(lambda: supervisor.close(TEMPLATE_END_S))
        _become_subreaper()
        log.info(
            "started",
            extra=fields(
                instance=config.daemon.instance,
                pid=os.getpid(),
                workers=len(devices),
                budget_bytes=settings.budget_bytes,
                run_dir=str(paths.directory),
                copies="side by side" if settings.parallel else "one stage after another",
                **({"because": config.parallel_note} if config.parallel_note else {}),
            ),
        )
        gc.collect()
        _give_memory_back()
        gc.freeze()
        supervisor.run()
        kept = len(core.state.catalog.images) if config.ram.keep else 0
        if not kept:
            remove_segments(config.daemon.instance)
            remove_journal(config.daemon.instance)
        log.info("stopped", extra=fields(images_kept=kept))
    return 0


def _open_journal(core: Core, instance: str) -> Journal:
    """A fresh journal in place of the earlier daemon's; then segments that only that one names can go."""
    journal = Journal(instance, core.records)
    try:
        journal.open()
    except JournalError as exc:
        log.error("the journal cannot be written: captures are refused until it can", extra=fields(why=str(exc)))
    removed = remove_segments(instance, core.segments)
    if removed:
        log.warning("removed segments of an earlier daemon", extra=fields(count=len(removed)))
    return journal


def _refuse_served(instance: str, paths: SocketPaths) -> None:
    """Whoever cleans up /dev/shm may take the lock's file away from under a daemon that serves on.

    Raises:
        InstanceLocked: somebody listens at this instance's sockets, or writes its journal.
    """
    if listens(paths.life, socket.SOCK_SEQPACKET):
        pid, _ = listener(paths.life, socket.SOCK_SEQPACKET) or ("?", -1)
        raise InstanceLocked(f"instance {instance!r} is served by another daemon (pid {pid}), which has lost its lock")
    until_s = time.monotonic() + LAST_BREATH_S
    while is_written(instance):
        if time.monotonic() > until_s:
            raise InstanceLocked(f"instance {instance!r} is served by another daemon, which has lost its lock")
        time.sleep(LAST_BREATH_S / 100)


def _take_over(settings: Settings, key: bytes, devices: list[DeviceSpec]) -> Core:
    """The core, with what an earlier daemon left. Of that nothing else may be kept: it is as large as the catalog.

    Raises:
        ForeignJournal, OSError: it cannot be told what was left.
    """
    legacy = _legacy(settings.instance, key, [d.worker for d in devices])
    now = Instant(time.monotonic(), time.time())
    return Core(settings, {d.worker: d.device for d in devices}, now, legacy)


def _legacy(instance: str, key: bytes, workers: list[str]) -> Legacy:
    """What an earlier daemon of this instance left in /dev/shm.

    Raises:
        ForeignJournal, OSError: it cannot be told.
        ForeignKey: it cannot be verified.
    """
    contents = read_journal(instance)
    if contents.unusable:
        log.warning("the journal of an earlier daemon is of no use", extra=fields(why=contents.unusable))
    if contents.damaged:
        log.error("records of the journal are damaged: they are skipped", extra=fields(count=contents.damaged))
    left = replay(contents.records)
    _refuse_foreign_key(left, key_id(key), instance)
    names = {worker.replace(":", "_"): worker for worker in workers}
    boot = boot_id()
    shuttles: dict[str, dict[int, int]] = {}
    for segment in list_segments(instance):
        header = segment.header
        if header is not None and segment.whole and header.boot_id == boot and header.worker in names:
            shuttles.setdefault(names[header.worker], {})[header.index] = header.shuttle_bytes
    return Legacy(left, shuttles, key_id(key), contents.same_pids)


def _refuse_foreign_key(left: Replayed, own: bytes, instance: str) -> None:
    """A start with another state directory, by mistake, must not cost what the right one would serve.

    Raises:
        ForeignKey: images are there that this digest key cannot verify.
    """
    foreign = sum(any(maker[1] != own for stage in r.stages for maker in stage.makers) for r in left.images.values())
    if foreign:
        raise ForeignKey(
            f"{foreign} of {len(left.images)} images in /dev/shm were made under another digest key: start with the "
            f"former --state-dir, or give them up with `stratactl --instance {instance} purge --yes`"
        )


def _access(config: Config) -> Access:
    access = config.access
    run_dir = Path(config.daemon.run_dir)
    found = resolve_access(access.admins, access.users, access.groups, run_dir)
    log.info("access", extra=fields(allowed=found.allowed_text))
    if why := why_auto_is_nobody(access.groups, run_dir):
        log.info("access.groups: auto means nobody", extra=fields(why=why))
    return found


def _listen(config: Config, paths: SocketPaths, access: Access) -> Endpoints:
    """Bind the sockets, open to those who are allowed; the lifelines' last, since clients come there first."""
    plan = access.plan({os.getegid(), *os.getgroups()})
    prepare_directory(paths.directory)
    open_directory(paths.directory, plan.directory_mode, plan.directory_gid)
    if barred := access.barred_by(paths.directory.parent):
        log.warning("some who are allowed cannot get to the sockets", extra=fields(why=barred))
    limit = config.limits.max_message_bytes
    return Endpoints(
        RouterServer.bind(paths.client, max_message_bytes=limit, reach=plan.client, tell_arrivals=True),
        # Ours alone: whoever came first under a worker's identity would lock the real one out.
        StreamServer.bind(paths.worker, max_message_bytes=limit, reach=OWNER_REACH),
        LifelineServer.listen(paths.life, plan.life),
    )


def _unlink_sockets(paths: SocketPaths) -> None:
    for path in (paths.client, paths.worker):
        path.unlink(missing_ok=True)


def _devices(config: Config) -> list[DeviceSpec]:
    """The devices to serve."""
    allowed = topology.allowed_cpus()
    wanted = config.daemon.devices
    if wanted.kind == "cpu":
        return topology.cpu_devices(wanted.cpu_count, allowed)
    gpus = topology.find_gpus()
    if wanted.kind == "auto" and not gpus:
        log.info("no GPU found: serving host memory", extra=fields(workers=DEFAULT_CPU_WORKERS))
        return topology.cpu_devices(DEFAULT_CPU_WORKERS, allowed)
    if not gpus:
        raise topology.TopologyError(f"devices = {wanted}, but no GPU was found")
    return topology.gpu_devices(wanted.uuids, gpus, allowed)


def _settings(config: Config, devices: list[DeviceSpec], access: Access) -> Settings:
    budget_bytes, source = _budget(config.ram.budget_bytes)
    arena_bytes = budget_bytes // len(devices)
    shuttle_bytes = min(config.ram.shuttle_bytes, arena_bytes // GRANULE_BYTES * GRANULE_BYTES)
    if shuttle_bytes < LEAST_SHUTTLE_BYTES:
        raise ValueError(
            f"ram.budget_bytes = {budget_bytes} ({source}) leaves {arena_bytes} bytes to each of {len(devices)} "
            f"devices, a shuttle needs at least {LEAST_SHUTTLE_BYTES}"
        )
    if shuttle_bytes < config.ram.shuttle_bytes:
        log.warning(
            "shuttles are smaller than configured, so that the arenas stay within the budget",
            extra=fields(shuttle_bytes=shuttle_bytes, budget_bytes=budget_bytes),
        )
    restarts = config.restarts
    return Settings(
        instance=config.daemon.instance,
        uid=os.geteuid(),
        pid=os.getpid(),
        start_id=os.urandom(16),
        package_hash=package_hash(),
        commit=commit(),
        parallel=config.copy.parallel,
        chunk_tokens=config.copy.chunk_tokens,
        budget_bytes=budget_bytes,
        budget_images=config.ram.budget_images,
        shuttle_bytes=shuttle_bytes,
        arena_bytes=arena_bytes,
        prefault=config.ram.prefault,
        max_message_bytes=config.limits.max_message_bytes,
        max_clients=config.limits.max_clients,
        max_ops=config.limits.max_ops,
        boot_s=config.deadlines.worker_boot_s,
        job_floor_s=config.deadlines.job_floor_s,
        link_floor_bytes_per_s=config.deadlines.link_floor_bytes_per_s,
        grow_again_s=config.ram.grow_again_s,
        lease_s=config.deadlines.lease_s,
        order_s=config.deadlines.order_s,
        stuck_s=config.deadlines.stuck_s,
        restarts=RestartPolicy(restarts.backoff_first_s, restarts.backoff_cap_s, restarts.give_up_after),
        rescue_max_s=config.rescue.max_s,
        memory=MemorySettings(
            config.memory.sample_s, config.memory.keep, config.memory.residual_warn_bytes, config.memory.warn_after
        ),
        reuse=config.shuttle.reuse,
        admins=access.admins,
        allow_faults=config.testing.allow_faults,
        trace=config.copy.trace,
        shown=(
            ("copy.parallel", str(config.copy.parallel).lower()),
            *((("copy.parallel_note", config.parallel_note),) if config.parallel_note else ()),
            ("copy.trace", str(config.copy.trace).lower()),
            ("shuttle.reuse", config.shuttle.reuse),
            ("copy.chunk_tokens", str(config.copy.chunk_tokens)),
            ("access", access.allowed_text),
            ("ram.budget_source", source),
            ("ram.shuttle_bytes", str(shuttle_bytes)),
            ("ram.arena_bytes_per_worker", str(arena_bytes)),
            ("cpu_device.link_bytes_per_s", str(config.cpu_device.link_bytes_per_s)),
            *((("testing.allow_faults", "true"),) if config.testing.allow_faults else ()),
            *((("testing.die_at", config.testing.die_at),) if config.testing.die_at else ()),
        ),
    )


def _budget(wanted: int | Literal["auto"]) -> tuple[int, str]:
    """The bytes for images, and where that number comes from."""
    if wanted != "auto":
        _warn_of_budget(wanted)
        return wanted, "configuration"
    headroom = memory_headroom()
    free_bytes = shutil.disk_usage(MOUNT).free
    bound = headroom.limited_by if headroom.free_bytes <= free_bytes else str(MOUNT)
    least_bytes = min(headroom.free_bytes, free_bytes)
    budget_bytes = int(least_bytes * AUTO_SHARE)
    source = f"a quarter of the {least_bytes} bytes free under {bound}"
    log.info("memory budget", extra=fields(budget_bytes=budget_bytes, source=source))
    return budget_bytes, source


def _warn_of_budget(budget_bytes: int) -> None:
    """Say at the start what captures would meet later: more was allowed than there is."""
    headroom, free_bytes = memory_headroom(), shutil.disk_usage(MOUNT).free
    if budget_bytes > min(headroom.free_bytes, free_bytes):
        log.warning(
            "the budget is larger than what there is now",
            extra=fields(
                budget_bytes=budget_bytes,
                memory_free_bytes=headroom.free_bytes,
                limited_by=headroom.limited_by,
                shm_free_bytes=free_bytes,
            ),
        )


def _spec(config: Config, paths: SocketPaths, key: bytes, device: DeviceSpec) -> WorkerSpec:
    return WorkerSpec(
        worker=device.worker,
        device=device.device,
        generation=0,
        token=b"",
        worker_socket=str(paths.worker),
        life_socket=str(paths.life),
        cpus=device.cpus,
        digest_key=key,
        slice_bytes=config.copy.slice_bytes,
        staging_bytes=config.copy.staging_bytes,
        direct_slice_bytes=config.copy.direct_slice_bytes,
        copy_path=config.copy.path,
        urgent_streams=config.copy.stream_priority == "high",
        inline_bytes=config.copy.inline_bytes,
        small_bytes=config.copy.small_bytes,
        link_bytes_per_s=config.cpu_device.link_bytes_per_s,
        max_message_bytes=config.limits.max_message_bytes,
        log_level=config.log.level,
        log_format=config.log.format,
        faults=_faults(config.testing.worker_faults, device.worker),
        allow_faults=config.testing.allow_faults,
        huge_pages=_huge_pages(config, device),
    )


def _huge_pages(config: Config, device: DeviceSpec) -> bool:
    wanted = config.ram.huge_pages
    return wanted == "on" or (wanted == "auto" and not device.device.startswith("cpu:"))


def _fault_points(config: Config) -> FaultPoints | None:
    """The points at which this daemon may be made to die; None in one that is no test."""
    testing = config.testing
    if not testing.allow_faults:
        return None
    log.warning("faults may be ordered: this daemon is for tests", extra=fields(die_at=testing.die_at or "-"))
    die_at = DieAt.parse(testing.die_at) if testing.die_at else None
    return FaultPoints(die_at, Path(config.daemon.state_dir) / REACHED_POINTS)


def _faults(orders: str, worker: str) -> dict[str, str]:
    """The faults ordered for a worker; ``fault#generation`` where they concern one generation only."""
    found: dict[str, str] = {}
    for order in filter(None, orders.split(",")):
        target, _, fault = order.partition("/")
        name, _, generation = target.partition("#")
        key, _, when = fault.partition("=")
        if name == worker:
            found[f"{key}#{generation}" if generation else key] = when
    return found


def _give_memory_back() -> None:
    """What the start needed for a moment, above all to read a journal: the allocator would keep as much for good."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _become_subreaper() -> None:
    """Workers whose template dies become children of the supervisor, so their end can be seen and their status read."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
