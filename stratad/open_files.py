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
# Descriptors that no client is given: for the ZeroMQ connections of those who have just been let in, of those who come
# without leave until they are hung up on, and for workers that are started again. Of a high limit a share: the more
# there are, the faster they may come.
SPARE_LEAST: Final = 32
SPARE_SHARE: Final = 8
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
    enough_for = clients_served(hard)
    if enough_for < max_clients:
        log.warning(
            "the limit of open files is low for limits.max_clients with their pools: raise LimitNOFILE (ulimit -Hn)",
            extra=fields(limit=hard, enough_for_clients=enough_for, max_clients=max_clients),
        )
    return hard


def clients_served(limit: int) -> int:
    """For how many clients with all their pools a limit does."""
    return (limit - max(OWN, OWN - SPARE_LEAST + limit // SPARE_SHARE)) // (PER_CLIENT + POOLS_PER_CLIENT)


def spare_files() -> int:
    """How many descriptors no client is given."""
    return max(SPARE_LEAST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SPARE_SHARE)
