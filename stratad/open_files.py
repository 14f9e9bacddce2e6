"""How many descriptors the daemon may have open."""

import logging
import resource
from typing import Final

from ipc.logs import fields

log = logging.getLogger(__name__)
# Of each client: its lifeline, its pidfd and its ZeroMQ connection; pools keep one descriptor a stage.
PER_CLIENT: Final = 3
POOLS_PER_CLIENT: Final = 8
# Sockets, pidfds, logs, libraries, accepting one too many to tell him so, and those that no client is given.
OWN: Final = 96
# For one client.
LEAST: Final = OWN + PER_CLIENT + POOLS_PER_CLIENT


def raise_open_files(max_clients: int) -> int:
    """Raise the soft limit to the hard one, which costs nothing; say if even that may be too little. Returns the limit.

    Workers inherit it. Whoever comes when no descriptor is left is refused; nobody who is there loses anything.

    Raises:
        ValueError: it does not do for one client.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST:
        raise ValueError(f"{hard} open files are allowed, at least {LEAST} are needed: raise LimitNOFILE (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = OWN + max_clients * (PER_CLIENT + POOLS_PER_CLIENT)
    if hard < needed:
        log.warning(
            "the limit of open files is low for limits.max_clients with their pools: raise LimitNOFILE (ulimit -Hn)",
            extra=fields(limit=hard, needed=needed, max_clients=max_clients),
        )
    return hard
