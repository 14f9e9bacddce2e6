"""Entry of the worker side.

``python -P -m workers.main template --fd N [--import-torch]`` is the template process; it forks the workers. N is the
peer's end of the supervisor's SEQPACKET socket pair.
"""

import argparse
import os
import socket
import struct
import sys
import time

# Before numpy or torch: one thread a worker copies, a pool of them per library would only fight for its CPUs.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"


def main(arguments: list[str]) -> int:
    """Run the template; its exit status."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="workers.main")
    parser.add_argument("role", choices=["template"])
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--import-torch", action="store_true")
    options = parser.parse_args(arguments)
    channel = socket.socket(fileno=options.fd)
    channel.set_inheritable(False)

    from workers.process import die_with_parent  # noqa: PLC0415 - after the environment is set

    die_with_parent(_peer_pid(channel))
    if options.import_torch:
        import torch  # noqa: F401, PLC0415 - imported for the workers; nothing here may initialise a device

        from workers.precompile import precompile  # noqa: PLC0415

        precompile()
    from workers.template import run_template  # noqa: PLC0415

    return run_template(channel, time.monotonic() - start_s)


def _peer_pid(channel: socket.socket) -> int:
    """Who made the socket pair: the parent, unless it has died meanwhile."""
    packed = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", packed)[0]
    return pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
