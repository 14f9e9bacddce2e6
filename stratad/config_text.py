"""What the configuration says to people: the meaning of every setting, and bounds in words."""

import re
from typing import Final

INSTANCE_FORM: Final = "1 to 32 of a-z 0-9 _ -"
# One line each, with the unit: `stratad --print-config` shows it above the setting.
MEANINGS: Final[dict[str, str]] = {
    "daemon.instance": f"name of this daemon on the host, {INSTANCE_FORM}",
    "daemon.run_dir": "absolute path of the directory that holds <instance>/ with the sockets",
    "daemon.state_dir": "absolute path of the directory with the digest key, which outlives the daemon",
    "daemon.devices": 'devices to serve: "auto" (every GPU, else cpu workers), "cpu:N", "cuda:all" or UUIDs',
    "access.users": "users, by name or uid, whose processes may be engines and use stratactl for their own images",
    "access.groups": 'groups, by name or gid, whose members may too; "auto": the group of the run directory, if that '
    "lets its group in, lets others at most pass and the group is not root's (0750 or 0751, say)",
    "access.admins": "users, by name or uid, who may also see and drop others' images; root and our own user always",
    "ram.budget_bytes": 'bytes that images may take in shared memory; "auto": a quarter of what is free',
    "ram.budget_images": "images held at most",
    "ram.shuttle_bytes": "bytes of one shared-memory segment, a multiple of 64 KiB",
    "ram.prefault": "make all shuttles at the start instead of when they are needed (true or false)",
    "ram.grow_again_s": "seconds until a shuttle that lacked room, memory or descriptors is tried again",
    "ram.huge_pages": "have the kernel put new shuttles into pages of 2 MiB: on, off, or auto (those of GPUs)",
    "ram.keep": "images outlive a stop of the daemon in /dev/shm; false: a stop frees everything (true or false)",
    "copy.parallel": "copy stages side by side, captures beside restores; false: one after another (true or false)",
    "copy.slice_bytes": "bytes at most that a lane copies before it looks for a cancellation",
    "copy.staging_bytes": "bytes of each of a GPU lane's two staging buffers, at least copy.slice_bytes",
    "copy.direct_slice_bytes": "bytes at most that a GPU copies from rows to rows before it looks for a cancellation",
    "copy.path": "what moves rows of a GPU: gather (kernels), engine (its copy engines) or auto (by the pieces' size)",
    "copy.stream_priority": "a GPU runs our kernels before (high) or after (low) the engine's: high or low",
    "copy.inline_bytes": "bytes up to which a job is copied by the worker's loop itself, without a lane",
    "copy.small_bytes": "bytes up to which a job goes before larger ones of its lane, between two slices of theirs",
    "copy.chunk_tokens": "tokens of one chunk: the unit of digest, sharing and allocation",
    "copy.trace": "record where the time of operations goes, see `stratactl trace` (true or false)",
    "shuttle.reuse": "off: nothing; storage: equal chunks are stored once; verified: what digests prove is not copied",
    "cpu_device.link_bytes_per_s": "bytes a second of a simulated link of the cpu devices; 0: as fast as the memory",
    "limits.max_message_bytes": "bytes of the longest message that a client may send",
    "limits.max_clients": "clients connected at once",
    "limits.max_ops": "operations in flight at once",
    "deadlines.worker_boot_s": "seconds that a worker may take to start",
    "deadlines.order_s": "seconds a worker may take for the next pool; for a shuttle besides the time for its bytes",
    "deadlines.stuck_s": "seconds from SIGKILL until a worker that is not gone counts as stuck",
    "deadlines.job_floor_s": "seconds that every job may take, beside the time for its bytes",
    "deadlines.link_floor_bytes_per_s": "bytes a second: a job that copies slower than this is taken for hung",
    "deadlines.stop_s": "seconds for operations in flight to end when the daemon stops",
    "deadlines.lease_s": "seconds without use after which a put, get, transit image or take ends if others need it",
    "deadlines.unread_s": "seconds after which a client that does not read what the daemon sends is dropped",
    "restarts.backoff_first_s": "seconds before a worker that died is started again; doubles with each death in a row",
    "restarts.backoff_cap_s": "seconds of the longest wait before a restart, at least restarts.backoff_first_s",
    "restarts.give_up_after": "deaths in a row after which a worker is not started again",
    "rescue.max_s": "seconds that a dead engine's memory stays mapped at most to rescue its clean slots; 0: no rescue",
    "memory.sample_s": "seconds between two samples of what every process has resident",
    "memory.keep": "samples that are kept of each process",
    "memory.residual_warn_bytes": "bytes, beside 5 % of its baseline, that a process may hold unexplained",
    "memory.warn_after": "samples in a row above that before a warning, and below it before the all-clear",
    "log.level": "least severity that is logged: debug, info, warning or error",
    "log.format": "form of a log line: text or json",
    "testing.worker_faults": "for tests only: faults of workers, worker[#generation]/fault=when,...",
    "testing.allow_faults": "for tests only: admins may arm faults in running workers (true or false)",
    "testing.die_at": "for tests only: fault point at which the daemon kills itself, as SendTo.CaptureJob:before#2",
}
_FORMS: Final = {
    "daemon.instance": INSTANCE_FORM,
    "testing.worker_faults": "worker[#generation]/fault=when, separated by commas",
}
_BOUND: Final = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) ([0-9.e+]+)")
_BOUND_WORDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_MULTIPLE: Final = re.compile(r"Expected `int` that's a multiple of ([0-9]+)")
_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_TYPE_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
}
_SIZES: Final = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
SIZE_FORM: Final = f'bytes as a whole number, or a size such as "256MiB" (units: B, {", ".join(reversed(_SIZES))})'


def exact_size(size_bytes: int) -> str:
    """A size in its largest whole unit: ``64 KiB``, ``65537 B``."""
    for unit, unit_bytes in _SIZES.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes} {unit}"
    return f"{size_bytes} B"


def in_words(key: str, complaint: str) -> str:
    """A validator's complaint about the value of `key`, as a person would say it; an unknown one as it is."""
    if bound := _BOUND.fullmatch(complaint):
        return f"must be {_BOUND_WORDS[bound[1]]} {_number(key, bound[2])}"
    if multiple := _MULTIPLE.fullmatch(complaint):
        return f"must be a multiple of {_number(key, multiple[1])}"
    if "matching regex" in complaint and key in _FORMS:
        return f"expected {_FORMS[key]}"
    if types := _TYPE.fullmatch(complaint):
        expected = SIZE_FORM if key.endswith("_bytes") else _TYPE_WORDS.get(types[1], types[1])
        if key.endswith("_bytes") and "str" in types[1]:
            expected += ', or "auto"'
        return f"expected {expected}, got {_TYPE_WORDS.get(types[2], types[2])}"
    return complaint


def _number(key: str, text: str) -> str:
    return exact_size(int(text)) if key.endswith("_bytes") else f"{float(text):.15g}"
