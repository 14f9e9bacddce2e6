"""``stratactl worker restart, reset``: what an admin orders of one worker."""

import msgspec

from ipc.messages import WorkerOrdered
from stratad.ctl.connection import DaemonClient
from stratad.ctl.output import Answer, JsonObject, printable


def restart(client: DaemonClient, worker: str) -> Answer:
    """End its process and start the next; images stay. Raises what the client raises."""
    return _ordered(client.restart_worker(worker))


def reset(client: DaemonClient, worker: str, *, force: bool) -> Answer:
    """The same with an empty arena. Raises what the client raises."""
    return _ordered(client.reset_worker(worker, force=force))


def _ordered(reply: WorkerOrdered) -> Answer:
    data: JsonObject = msgspec.to_builtins(reply)
    data.pop("t", None)
    data.pop("seq", None)
    data["images_dropped"] = reply.images_dropped
    line = f"worker {printable(reply.worker)} was {reply.was}: generation {reply.generation} follows"
    if reply.images_dropped:
        line += f", {reply.images_dropped} {'image' if reply.images_dropped == 1 else 'images'} dropped"
    return Answer(lines=[line, "`stratactl status` shows when it is ready"], data=data)
