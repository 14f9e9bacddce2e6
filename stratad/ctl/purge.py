"""``stratactl purge``: what a daemon that does not run any more left in /dev/shm, and its removal."""

import time
from collections.abc import Mapping
from typing import Final

from shm.janitor import list_segments, remove_segments
from shm.process import is_gone
from stratad.core.records import WorkerRecord, replay
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, CommandError, JsonObject, human_bytes
from stratad.journal import ForeignJournal, is_written, read_journal, remove_journal
from stratad.lock import InstanceLock, InstanceLocked, lock_path

# A worker ends within a second of its daemon.
_END_S: Final = 2.0
_LOOK_S: Final = 0.02


def purge(instance: str, *, yes: bool) -> Answer:
    """Count what there is under the instance lock, and with `yes` remove it.

    Raises:
        CommandError: a daemon serves the instance, a worker of it still runs, or the files are another user's.
    """
    made = not lock_path(instance).exists()  # its owner decides who may serve the instance
    try:
        lock = InstanceLock.take(instance)
    except InstanceLocked as exc:
        raise CommandError(ExitCode.FAILED, "locked", str(exc), "stop that daemon first") from exc
    except OSError as exc:
        raise CommandError(ExitCode.FAILED, "not_permitted", str(exc), "run it as the daemon's user") from exc
    try:
        _refuse_served(instance)
        contents = read_journal(instance)
        left = replay(contents.records)
        segments = list_segments(instance)
        held_bytes = sum(segment.size_bytes for segment in segments)
        if yes:
            _await_end(left.workers)
            remove_segments(instance)
            remove_journal(instance)
    except (ForeignJournal, OSError) as exc:
        raise CommandError(ExitCode.FAILED, "not_permitted", str(exc), "run it as the daemon's user") from exc
    finally:
        lock.release(unlink=yes or made)
    what = f"instance {instance}: {len(left.images)} images in {len(segments)} segments of {human_bytes(held_bytes)}"
    data: JsonObject = {
        "images": len(left.images), "segments": len(segments), "segment_bytes": held_bytes, "removed": yes,
    }  # fmt: skip
    if not (left.images or segments):
        lines = [f"instance {instance}: nothing in /dev/shm"]
    else:
        lines = [f"removed of {what}"] if yes else [what, "with --yes they are removed"]
    return Answer(lines=lines, data=data)


def _refuse_served(instance: str) -> None:
    """Somebody may have removed the lock's file from under a daemon that lives.

    Raises:
        CommandError: its journal is written still.
    """
    until_s = time.monotonic() + _END_S
    while is_written(instance):
        if time.monotonic() > until_s:
            text = f"instance {instance!r} is served by a daemon that has lost its lock: its journal is written still"
            raise CommandError(ExitCode.FAILED, "locked", text, "stop that daemon first")
        time.sleep(_LOOK_S)


def _await_end(workers: Mapping[str, WorkerRecord]) -> None:
    """Workers that still write would go on doing so into memory that nobody can see any more.

    Raises:
        CommandError: one does not end.
    """
    until_s = time.monotonic() + _END_S
    for worker in workers.values():
        while not is_gone(worker.pid, worker.start_ticks):
            if time.monotonic() > until_s:
                raise CommandError(
                    ExitCode.FAILED,
                    "worker_alive",
                    f"worker {worker.worker} (pid {worker.pid}) of the daemon still runs",
                )
            time.sleep(_LOOK_S)
