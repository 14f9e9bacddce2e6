"""How fast parts go through an exchange on a `cpu` device, beside a plain copy of the same bytes.

From a checkout: ``python tools/exchange_speed.py [--mib 1024] [--parts 32] [--exchange-mib 64] [--rounds 3]``. It
starts a daemon of its own, checks every byte that comes back, and prints one JSON object last; speeds in bytes/s.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stratad.bench.daemon import PrivateDaemon
from stratad.client import Exchange

FINGERPRINT = {"model": "speed", "revision": "1", "dtype": "u8", "kv_format": "parts", "engine_build": "tool"}
MIB = 1 << 20


def seconds(action: Callable[[], object]) -> float:
    """How long an action takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def rounds(exchange: Exchange, options: argparse.Namespace) -> list[dict[str, float]]:
    """Put, get and copy the same bytes; new bytes in every round, so that nothing is shared with the round before."""
    part_bytes = options.mib * MIB // options.parts
    source = np.empty((options.parts, part_bytes), np.uint8)
    target = np.zeros_like(source)
    total = source.nbytes
    shown: list[dict[str, float]] = []
    for number in range(options.rounds):
        source[:] = np.random.default_rng(number).integers(0, 256, source.shape, dtype=np.uint8)
        target[:] = 0
        copied = total / seconds(lambda: np.copyto(target, source))
        target[:] = 0

        def put() -> None:
            with exchange.put("speed") as parts:
                for part in range(options.parts):
                    parts.add(f"{part}", source[part])

        def get() -> None:
            with exchange.get("speed") as parts:
                for part in range(options.parts):
                    parts.read_into(f"{part}", target[part])

        put_s, get_s = seconds(put), seconds(get)
        if not np.array_equal(source, target):
            raise SystemExit(f"round {number}: what came back is not what was put")
        exchange.client.drop("speed", "speed")
        speeds = {"copy": copied, "put": total / put_s, "get": total / get_s}
        shown.append(speeds)
        print("  ".join(f"{name} {speed / 1e9:6.2f} GB/s" for name, speed in speeds.items()), flush=True)
    return shown


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("mib", 1024), ("parts", 32), ("exchange-mib", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    settings = {"daemon.devices": "cpu:1", "ram.budget_bytes": f"{options.mib + 256}MiB", "ram.prefault": "true"}
    with PrivateDaemon.start(settings) as daemon:
        client, _ = daemon.connect()
        with client, client.exchange("cpu:0", "speed", FINGERPRINT, options.exchange_mib * MIB) as exchange:
            shown = rounds(exchange, options)
    print(json.dumps({"bytes": options.mib * MIB, "parts": options.parts, "rounds": shown}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
