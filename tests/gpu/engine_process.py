"""An engine in a process of its own: a torch pool, exported by IPC, driven by JSON lines on standard input.

``{"op": "export"}``, ``{"op": "fill", "seed": n}``, ``{"op": "busy", "seconds": s}`` (kernels, then the event),
``{"op": "equal"}`` (the pool against its copy at the last fill), ``{"op": "read"}`` (the pool to a file), ``exit``.
"""

import json
import sys
import time
from pathlib import Path

import torch

from shm.gpu_runtime import GpuRuntime


def main(pool_bytes: int, path: str) -> None:
    """Serve until the end of standard input."""
    torch.cuda.set_device(0)
    pool = torch.zeros(pool_bytes, dtype=torch.uint8, device="cuda")
    copy = pool.clone()
    runtime = GpuRuntime.load()
    base, allocation_bytes = runtime.allocation_of(pool.data_ptr())
    event = runtime.event_create(interprocess=True)
    stream = torch.cuda.current_stream()
    pool.add_(1)  # a kernel's first launch waits for the whole device: not in the middle of "busy"
    torch.cuda.synchronize()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, object] = {}
        match order["op"]:
            case "export":
                answer = {
                    "handle": runtime.ipc_mem_handle(base).hex(),
                    "event": runtime.ipc_event_handle(event).hex(),
                    "allocation_bytes": allocation_bytes,
                    "offset_bytes": pool.data_ptr() - base,
                }
            case "fill":
                generator = torch.Generator(device="cuda").manual_seed(order["seed"])
                pool.copy_(torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8, device="cuda", generator=generator))
                if order.get("keep", True):
                    copy.copy_(pool)
                torch.cuda.synchronize()
            case "busy":
                torch.cuda._sleep(int(order["seconds"] * 1.5e9))  # type: ignore[no-untyped-call]
                pool.add_(1)
                copy.add_(1)
                runtime.event_record(event, stream.cuda_stream)
            case "equal":
                torch.cuda.synchronize()
                answer = {"equal": bool(torch.equal(pool, copy))}
            case "read":
                torch.cuda.synchronize()
                Path(path).write_bytes(pool.cpu().numpy().tobytes())
            case "exit":
                return
        print(json.dumps({**answer, "at_s": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
