"""What a worker process does to itself before it serves: dies with its parent, names itself, picks its CPUs."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import Final, NoReturn

from ipc.lifeline import LifelineError
from ipc.logs import setup_logs
from ipc.messages import BootFailed, WorkerSpec
from ipc.stream import LinkError
from workers import exit_codes
from workers.device import DeviceFailure
from workers.devices import fault_book, make_device
from workers.digest import Digester
from workers.loop import Worker, boot_failed, connect

_log: Final = logging.getLogger(__name__)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_NAME_CHARS: Final = 15
_SWITCH_S: Final = 0.0005
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_libc.prctl.restype = ctypes.c_int


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent's forking thread ends; end at once where the parent is gone already.

    `parent_pid` 0 stands for a parent in another pid namespace, which cannot be checked.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if parent_pid and os.getppid() != parent_pid:
        os._exit(exit_codes.SUPERVISOR_LOST)


def set_process_name(name: str) -> None:
    """The name that ps shows; the kernel keeps 15 characters."""
    text = ctypes.create_string_buffer(name[:_NAME_CHARS].encode())
    _libc.prctl(_PR_SET_NAME, ctypes.addressof(text), 0, 0, 0)


def pin_cpus(wanted: tuple[int, ...]) -> None:
    """Run on the wanted CPUs as far as they are allowed; on all allowed ones where none is."""
    allowed = os.sched_getaffinity(0)
    chosen = allowed & set(wanted)
    if wanted and not chosen:
        _log.warning("none of the wanted cpus is allowed wanted=%s allowed=%s", sorted(wanted), sorted(allowed))
    os.sched_setaffinity(0, chosen or allowed)


def run_worker(spec: WorkerSpec, born_s: float) -> int:
    """Serve as the worker of a spec until the end; the exit status. `born_s` is the monotonic time of its birth."""
    setup_logs(spec.log_level, "json" if spec.log_format == "json" else "text", worker=spec.worker, pid=os.getpid())
    # A lane in the middle of many small copies must not keep the loop waiting for the usual 5 ms.
    sys.setswitchinterval(_SWITCH_S)
    set_process_name(f"strata-{spec.worker}")
    pin_cpus(spec.cpus)
    # A batch process does not preempt when it wakes up: the supervisor gets all jobs of an operation out before one
    # of its workers takes its CPU (four stages of 64 KiB on two cores: 1.21 ms without it, 1.00 ms with it).
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _leave_signals_to_the_supervisor()
    try:
        lifeline, link = connect(spec)
    except (LifelineError, LinkError) as exc:
        _log.error("the supervisor does not answer error=%s", exc)
        return exit_codes.SUPERVISOR_LOST
    digester = Digester(spec.digest_key)
    try:
        faults = fault_book(spec)
        device = make_device(spec, digester, faults)
        device.bind_thread()
        worker = Worker(spec, device, digester, lifeline, link, faults=faults)
        device.self_test()
    except (DeviceFailure, ValueError, OSError) as exc:
        _log.error("the device cannot be used device=%s error=%s", spec.device, exc)
        return boot_failed(_reason(exc), lifeline, link)
    worker.start(born_s)
    status = worker.run()
    if status == exit_codes.STOPPED:
        worker.close()
    else:
        # Lanes may hang in the device: nothing is waited for, only the last report leaves.
        link.close()
    return status


def _reason(exc: DeviceFailure | ValueError | OSError) -> BootFailed:
    if isinstance(exc, DeviceFailure):
        return BootFailed(exc.code, exc.message, exc.wanted_bytes, exc.free_bytes)
    return BootFailed("device_error", str(exc))


def _leave_signals_to_the_supervisor() -> None:
    """A stop that is sent to every process of the service is the supervisor's to carry out: a worker that ended by
    itself would fail jobs that are on their way to it. The end of its lifeline ends it, whatever became of the others.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def run_and_exit(spec: WorkerSpec, born_s: float) -> NoReturn:
    """`run_worker`, then end without running what the parent registered for its own exit."""
    status = exit_codes.INTERNAL
    try:
        status = run_worker(spec, born_s)
    except Exception:  # noqa: BLE001 - the last line of defence: the status tells the supervisor
        _log.exception("the worker ends worker=%s", spec.worker)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
