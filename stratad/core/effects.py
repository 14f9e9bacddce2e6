"""Effects: what the core asks its shell to do. The shell performs them in order."""

from dataclasses import dataclass
from typing import TypeAlias

from ipc.messages import Command, Reply
from stratad.core.memory_tracks import Target
from stratad.core.records import Record


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Send a message to a client. An unreachable client is no error: its lifeline tells."""

    client: int
    message: Reply


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a command to the current process of a worker."""

    worker: str
    command: Command


@dataclass(frozen=True, slots=True)
class ForwardDescriptor:
    """Pass a memfd of a client on to a worker, over its lifeline, under the tag `worker_tag`.

    The shell keeps the client's descriptor until `CloseDescriptor`, since a worker started anew needs it once more.
    """

    client: int
    descriptor: int
    worker: str
    worker_tag: int


@dataclass(frozen=True, slots=True)
class CloseDescriptor:
    """A client's descriptor is needed no more."""

    client: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a process for the worker; its coming is told by `worker_forked`, its end by `worker_gone`."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL the worker's process; only `worker_gone` proves that it is gone."""

    worker: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Append:
    """Write records to the journal, all or none; `journaled` tells how it went, before any later effect and any other
    event.
    """

    serial: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class WatchFormer:
    """Tell by `former_gone` when this process of an earlier daemon, which served `worker`, is proven gone."""

    worker: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class KillFormer:
    """SIGKILL the process that `WatchFormer` named; its end still has to be proven."""

    worker: str


@dataclass(frozen=True, slots=True)
class UnlinkSegment:
    """Remove a shuttle's name from /dev/shm."""

    segment: str


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """Read what these processes have resident; told by `sampled`, in the same turn."""

    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class DropClient:
    """Close a client's lifeline; it has been told why."""

    client: int


@dataclass(frozen=True, slots=True)
class AwaitEnd:
    """Watch the process of a client that has gone; told by `process_ended`, perhaps in the same turn."""

    client: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class StopAwaiting:
    """The end of that process matters no more."""

    client: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line for the log. `fields` are printed as key=value."""

    level: str
    message: str
    fields: tuple[tuple[str, str | int | float], ...] = ()


Effect: TypeAlias = (
    ReplyTo
    | SendTo
    | ForwardDescriptor
    | CloseDescriptor
    | SpawnWorker
    | KillWorker
    | Append
    | WatchFormer
    | KillFormer
    | UnlinkSegment
    | SampleMemory
    | DropClient
    | AwaitEnd
    | StopAwaiting
    | LogLine
)
