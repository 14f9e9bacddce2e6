"""An engine in a process of its own that captures a conversation, or restores it and compares.

Its bytes follow from the conversation's name alone, so that another process can tell whether they came back.
"""

import argparse
import random
from pathlib import Path

from stratad.client import Client, CpuPool, StagePool
from tests.support.engine import FINGERPRINT, slot_layout

LAYOUTS = (slot_layout(), slot_layout(planes=3))
TOKENS = 700


def main() -> None:
    """One operation; any difference is an exception."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["capture", "restore"])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--instance", default="default")
    parser.add_argument("--conversation", default="kept")
    options = parser.parse_args()
    contents = [random.Random(f"{options.conversation}{n}").randbytes(one.end_bytes) for n, one in enumerate(LAYOUTS)]
    pools = [CpuPool.allocate(layout.end_bytes) for layout in LAYOUTS]
    with Client.connect(run_dir=options.run_dir, instance=options.instance, deadline_s=10.0) as client:
        stages = [StagePool(f"cpu:{n}", layout, pools[n]) for n, layout in enumerate(LAYOUTS)]
        if options.what == "capture":
            for pool, content in zip(pools, contents, strict=True):
                pool.buffer[:] = content
        engine = client.register("keeper", "kept", FINGERPRINT, stages)
        if options.what == "capture":
            engine.capture(options.conversation, range(TOKENS), rows=range(TOKENS), slot=0).result()
        else:
            engine.restore(options.conversation, rows=range(TOKENS), slot=0).result()
            for layout, pool, content in zip(LAYOUTS, pools, contents, strict=True):
                for plane in layout.groups[0].planes:
                    for row in range(TOKENS):
                        at = plane.offset_bytes + row * plane.row_stride_bytes
                        assert pool.buffer[at : at + plane.row_bytes] == content[at : at + plane.row_bytes], (
                            plane,
                            row,
                        )
        engine.unregister()
    print("done")


if __name__ == "__main__":
    main()
