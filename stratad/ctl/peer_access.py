"""Which GPUs can reach each other's memory, asked of the GPU runtime in a process of its own:
``python -P -m stratad.ctl.peer_access`` prints ``{"uuids": [...], "peers": [[...], ...]}``.
"""

import json
import sys
from typing import Final

from shm.gpu_runtime import GpuError, GpuRuntime, GpuUnavailable

_FAILED: Final = 1


def main() -> int:
    """Ask and print; what is wrong goes to standard error."""
    try:
        runtime = GpuRuntime.load()
        count = runtime.device_count()
        uuids = [runtime.device_uuid(index) for index in range(count)]
        peers = [[a != b and runtime.can_access_peer(a, b) for b in range(count)] for a in range(count)]
    except (GpuError, GpuUnavailable) as exc:
        print(exc, file=sys.stderr)
        return _FAILED
    print(json.dumps({"uuids": uuids, "peers": peers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
