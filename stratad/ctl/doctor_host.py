"""Checks of the host: devices and kernel features.

Nothing here imports torch or opens a GPU in this process: a driver that hangs must not hang the doctor.
"""

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stratad.ctl.findings import Check, State

# nvidia-smi needs a second or two when no process keeps the driver loaded.
_NVIDIA_SMI_TIMEOUT_S: Final = 15.0
# A first import of torch from a cold disk was seen to take over ten seconds.
_TORCH_TIMEOUT_S: Final = 60.0
_GPU_LINE: Final = re.compile(r"^GPU (?P<index>\d+): (?P<name>.*) \(UUID: (?P<uuid>GPU-[0-9a-fA-F-]+)\)")
TORCH_FIX: Final = "install a torch build for this driver into the daemon's virtual environment"
_TORCH_PROBE: Final = "import torch; print(torch.__version__, torch.cuda.is_available(), torch.cuda.device_count())"


def devices(*, try_torch: bool, root: Path = Path("/")) -> Iterator[Check]:
    """GPUs that the kernel driver and nvidia-smi see; with `try_torch` also what torch sees."""
    from_driver = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    has_kfd = (root / "dev/kfd").exists()
    if not from_driver and not has_kfd:
        yield Check("devices", State.OK, "no GPU: the daemon runs cpu workers", data={"gpus": []})
        return
    if from_driver:
        yield _nvidia(len(from_driver))
    if has_kfd:
        usable = os.access(root / "dev/kfd", os.R_OK | os.W_OK)
        state = State.OK if usable else State.FAIL
        fix = "" if usable else "add the daemon's user to the groups render and video"
        yield Check("devices", state, f"/dev/kfd is {'usable' if usable else 'not accessible'} (ROCm)", fix)
    if try_torch:
        yield _torch()


def parse_gpu_list(text: str) -> list[dict[str, str]]:
    """GPUs in the output of ``nvidia-smi -L``."""
    return [match.groupdict() for line in text.splitlines() if (match := _GPU_LINE.match(line))]


def _nvidia(in_driver: int) -> Check:
    fix = "see that `nvidia-smi -L` works for this user; after a driver update the host may need a reboot"
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return Check("devices", State.WARN, f"{in_driver} GPUs in the driver, but no nvidia-smi to name them", fix)
    except subprocess.TimeoutExpired:
        return Check("devices", State.FAIL, f"nvidia-smi did not answer in {_NVIDIA_SMI_TIMEOUT_S:g} s", fix)
    gpus = parse_gpu_list(done.stdout)
    if not gpus:
        text = (done.stdout + done.stderr).strip().splitlines()
        return Check("devices", State.FAIL, f"nvidia-smi found no GPU: {text[0] if text else 'no output'}", fix)
    names = ", ".join(f"{gpu['index']}: {gpu['name']}" for gpu in gpus)
    return Check("devices", State.OK, f"{len(gpus)} GPUs ({names})", data={"gpus": [dict(gpu) for gpu in gpus]})


class TorchSight(NamedTuple):
    """What torch sees: its version and number of GPUs; `trouble` says why there are none, and is empty otherwise."""

    version: str
    gpus: int
    trouble: str


def torch_sees_gpus() -> TorchSight:
    """Ask torch for GPUs, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchSight("", 0, f"torch did not answer in {_TORCH_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()
        return TorchSight("", 0, last[-1] if last else f"torch ended with exit status {done.returncode}")
    version, available, count = done.stdout.split()[-3:]
    if available != "True":
        return TorchSight(version, 0, f"torch {version} sees no GPU")
    return TorchSight(version, int(count), "")


def _torch() -> Check:
    seen = torch_sees_gpus()
    if seen.trouble:
        return Check("torch", State.FAIL, seen.trouble, TORCH_FIX)
    return Check("torch", State.OK, f"torch {seen.version} sees {seen.gpus} GPUs")


def kernel() -> Iterator[Check]:
    """The kernel features that nothing can replace: pidfds and sealed memfds."""
    release = os.uname().release
    missing = [name for name, works in (("pidfd", _pidfd_works()), ("memfd seals", _seals_work())) if not works]
    if missing:
        fix = "run Linux 5.4 or newer, and let the sandbox or seccomp filter pass these calls"
        yield Check("kernel", State.FAIL, f"Linux {release} lacks {' and '.join(missing)}", fix)
    else:
        yield Check("kernel", State.OK, f"Linux {release}: pidfd and memfd seals work")


def _pidfd_works() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _seals_work() -> bool:
    try:
        fd = os.memfd_create("stratad.doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
    finally:
        os.close(fd)
