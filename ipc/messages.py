"""Every message of the wire, once.

Four closed unions: `Request` (client to daemon), `Reply` (daemon to client), `Command` (supervisor to worker) and
`Report` (worker to supervisor); `TemplateOrder` and `TemplateNews` run between supervisor and template. Each message is
a msgpack map whose key ``t`` names its type.

Rules of change for `Request` and `Reply` (the others run between processes of one installation): a new field has a
default, which means what was meant before there was the field; a field never changes its type or meaning; unknown
fields are ignored by the receiver; a new request may come, and a new reply that nobody gets who did not send a new
request or a new field. Anything else raises `PROTOCOL_VERSION`. What a version promised is held to by the tests.

Rows are packed as in `shm.rows`, places as in `shm.extent`, tokens and token positions as little-endian u32, digests as
16 bytes each. Where rows are named, each stage has one entry a group of its layout, in the order of their numbers (see
`shm.layout`): row groups list rows in token order, state groups one slot for each position.
Every request carries `seq`, chosen by the client, and gets exactly one final reply with the same `seq`; `Progress` may
come before it.
"""

from typing import Final, TypeAlias

import msgspec

from shm.layout import StageLayout

PROTOCOL_VERSION: Final = 2
DIGEST_BYTES: Final = 16
EXCHANGE_ROW_BYTES: Final = 4096
PART_NAME_CHARS: Final = 256
PART_META_CHARS: Final = 512
# Operations whose copies can be made to fail on order, and how (see `FaultArm`).
FAULT_OPS: Final = ("capture", "restore", "take", "slot_to", "slot_from", "slot_direct")
FAULT_KINDS: Final = ("error", "exception", "oom", "kill", "hang", "corrupt", "slow")
# An engine's slots are numbered below this: each of them can be marked, and the daemon keeps every mark.
SLOT_LIMIT: Final = 65_536
TOKEN_BYTES: Final = 4


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything on the wire."""


# --- values inside messages ------------------------------------------------------------------------------------------


class MemfdPool(msgspec.Struct, frozen=True, tag_field="t", tag="memfd"):
    """A pool of a `cpu` device: a memfd sealed against shrinking, sent over the lifeline under `descriptor` first."""

    descriptor: int
    pool_bytes: int


class CudaIpcPool(msgspec.Struct, frozen=True, tag_field="t", tag="cuda_ipc"):
    """A pool of a GPU: the IPC handle of the *allocation* (64 bytes), the pool's place in it, and the handle of the
    interprocess event that the engine records before each request (64 bytes, or empty: the engine synchronises).
    """

    handle: bytes
    allocation_bytes: int
    offset_bytes: int
    pool_bytes: int
    event_handle: bytes = b""


class Stage(msgspec.Struct, frozen=True):
    """One stage of an engine. `device` is ``cpu:K`` or the UUID of a GPU (``GPU-...``).

    The probe proves that both sides see the same memory: `probe_bytes` holds 16 bytes for each little-endian u64 of
    `probe_offsets`, read by the engine; the worker reads the same places and must find the same bytes.
    """

    index: int
    device: str
    pool: MemfdPool | CudaIpcPool
    layout: StageLayout
    probe_offsets: bytes = b""
    probe_bytes: bytes = b""


class StageOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one stage of an operation ended.

    `state` is ``done``, ``failed`` or ``untouched`` (its job never started). `rows_undefined` are the rows and slots of
    each group whose bytes the operation may have written and that must not be used (empty: none of any group).
    `moved_bytes` were copied, by the count of the worker's lane, and `skipped_bytes` not, since digests proved them to
    be there already: stored, or in the rows.

    The worker waited `event_s` for the engine's event and `queue_s` for its lane, which worked on it for `lane_s`:
    `digest_s` of it on digests, `verify_s` of these on proving bytes that were copied; and `copy_s` on copies,
    `gather_s` of these between rows and staging. What was digested, moved or not, is `digested_bytes`.
    """

    stage: int
    state: str
    code: str = ""
    message: str = ""
    rows_undefined: tuple[bytes, ...] = ()
    moved_bytes: int = 0
    digest_s: float = 0.0
    copy_s: float = 0.0
    lane_s: float = 0.0
    gather_s: float = 0.0
    verify_s: float = 0.0
    event_s: float = 0.0
    queue_s: float = 0.0
    digested_bytes: int = 0
    skipped_bytes: int = 0


class WorkerProcess(msgspec.Struct, frozen=True):
    """Which process serves a stage: enough for a client to prove later that it is gone."""

    stage: int
    worker: str
    pid: int
    start_ticks: int


class ImageInfo(msgspec.Struct, frozen=True):
    """One published image. `stored_bytes` counts whole granules, shared chunks in full; times are Unix seconds.
    `checkpoints` are the token positions of its states; `parts` says of how many parts it was put (0: captured).
    A `quarantined` one killed workers twice and is not served until an admin lifts that.
    """

    image_id: int
    namespace: str
    conversation: str
    tokens: int
    stages: int
    image_bytes: int
    stored_bytes: int
    exclusive_bytes: int
    chunks: int
    pinned: bool
    damaged: bool
    created_unix_s: float
    used_unix_s: float
    restores: int
    checkpoints: tuple[int, ...] = ()
    parts: int = 0
    quarantined: bool = False


class PartInfo(msgspec.Struct, frozen=True):
    """One part of an image that was put: its name, its bytes, and what its owner noted about it."""

    name: str
    nbytes: int
    meta: str = ""


class WorkerInfo(msgspec.Struct, frozen=True):
    """State of one worker as the supervisor sees it. `missing_bytes` of device memory keep it from starting (state
    ``no_memory``); after `deaths_in_row` deaths in a row it is started again in `starts_in_s`, or was given up. Of the
    `wanted_bytes` of shuttles that it is to have now, `mapped_bytes` are ready, and page-locked where it serves a GPU;
    the others are made and locked one after another in the background.
    """

    worker: str
    device: str
    state: str
    pid: int
    generation: int
    deaths: int
    cpus: tuple[int, ...]
    shuttles: int
    shuttle_bytes: int
    locked_bytes: int
    free_bytes: int
    used_bytes: int
    jobs: int
    digest_algorithm: str
    resources: dict[str, int]
    detail: str = ""
    mapped: int = 0
    digest_path: str = ""
    device_name: str = ""
    start_s: float = 0.0
    missing_bytes: int = 0
    deaths_in_row: int = 0
    starts_in_s: float = 0.0
    mapped_bytes: int = 0
    wanted_bytes: int = 0


class EngineInfo(msgspec.Struct, frozen=True):
    """One registered engine. `marks` counts slots by mark; `transits` are its transit images, of `transit_bytes` in
    whole granules. `leases` counts what it holds between two calls, by kind: ``put``, ``get``, ``transit``, ``take``;
    the one that was not used for longest was not for `unused_s`. Of `clean_slots` slots the contents are declared:
    `clean_tokens` tokens that would be rescued if the engine died now. `rescue` says how far the rescue of an engine
    that has died is; empty: there is none. `quarantined` names the conversations and slots whose copies killed workers
    twice: they are refused.
    """

    engine_id: int
    namespace: str
    engine: str
    pid: int
    uid: int
    stages: tuple[str, ...]
    fingerprint: str
    fingerprint_fields: dict[str, str]
    ops: int
    marks: dict[str, int]
    transits: int = 0
    transit_bytes: int = 0
    leases: dict[str, int] = {}
    unused_s: float = 0.0
    clean_slots: int = 0
    clean_tokens: int = 0
    rescue: str = ""
    quarantined: tuple[str, ...] = ()


class OpInfo(msgspec.Struct, frozen=True):
    """One operation in flight."""

    op_id: int
    kind: str
    state: str
    namespace: str
    conversation: str
    engine_id: int
    age_s: float
    stages_pending: tuple[int, ...]


class ProcessMemory(msgspec.Struct, frozen=True):
    """Resident memory of one process (psutil and /proc, bytes)."""

    role: str
    pid: int
    rss_bytes: int
    anon_bytes: int
    shmem_bytes: int


class MemoryTerm(msgspec.Struct, frozen=True):
    """One explained part of a process's resident memory. `part` is ``anon``, ``shmem`` or ``file``.

    `bytes` is what it explains: the least of `bound_bytes` and what is resident of that part. `basis` says what the
    bound is worth: ``counted`` (made and touched by us), ``at most`` (mapped or reserved, perhaps never touched),
    ``measured`` (read from the kernel) or ``estimate``.
    """

    name: str
    part: str
    bytes: int
    bound_bytes: int
    basis: str


class MemorySeries(msgspec.Struct, frozen=True):
    """Samples of one process, oldest first, thinned out to a limit; Unix seconds and bytes."""

    time_unix_s: tuple[float, ...]
    resident_bytes: tuple[int, ...]
    anon_bytes: tuple[int, ...]
    shmem_bytes: tuple[int, ...]
    explained_bytes: tuple[int, ...]


class MemoryProcess(msgspec.Struct, frozen=True):
    """One process at its last sample: resident = sum of `terms` + `residual_bytes`.

    `judged`: whether a residual above `tolerance_bytes` leads to a warning (not for engines, whose memory is their own
    business, nor before the baseline is known). First, least, most and slopes are over the `samples` that are kept; a
    slope is bytes an hour, None while they span too little time.
    """

    role: str
    name: str
    pid: int
    start_ticks: int
    age_s: float
    resident_bytes: int
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    terms: tuple[MemoryTerm, ...]
    residual_bytes: int
    tolerance_bytes: int
    judged: bool
    samples: int
    window_s: float
    first_bytes: int
    least_bytes: int
    most_bytes: int
    slope_bytes_per_hour: float | None
    residual_slope_bytes_per_hour: float | None
    series: MemorySeries


class FaultInfo(msgspec.Struct, frozen=True):
    """One armed fault: at the worker `worker` it waits for copy number `at`, counted from its arming, of operation `op`
    in stage `stage`.
    """

    fault: int
    op: str
    stage: int
    kind: str
    at: int
    worker: str


class TracedStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of one stage of an operation went: queue, way, event, turn, lane and publish add up to its time.

    It waited `queue_s` until its job was with its worker. `way_s` were the messages between supervisor and worker. The
    worker waited `event_s` for the engine's event and `turn_s` for its lane, where the job then was for `lane_s`. There
    `digest_s` went into digests of rows where they lie, `gather_s` into moving bytes between rows and staging, `link_s`
    over the link, `verify_s` into proving what was moved, and `rest_s` into the rest; on a GPU, and where a CPU worker
    has a second thread, these overlap and may be more than `lane_s` in sum. `publish_s` passed from its end to the
    reply. Of `asked_bytes` it moved some, skipped some that were there already, and digested some.
    """

    stage: int
    worker: str
    state: str
    code: str = ""
    asked_bytes: int = 0
    moved_bytes: int = 0
    skipped_bytes: int = 0
    digested_bytes: int = 0
    queue_s: float = 0.0
    way_s: float = 0.0
    event_s: float = 0.0
    turn_s: float = 0.0
    lane_s: float = 0.0
    digest_s: float = 0.0
    gather_s: float = 0.0
    link_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    publish_s: float = 0.0


class TracedOp(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation that has ended: it came at `began_unix_s`, and `total_s` later its reply was sent. Writing its
    record took `journal_s` of that. `code` says why it failed (empty: it did not).
    """

    op_id: int
    kind: str
    namespace: str
    conversation: str
    engine_id: int
    tokens: int
    code: str = ""
    began_unix_s: float = 0.0
    total_s: float = 0.0
    journal_s: float = 0.0
    stages: tuple[TracedStage, ...] = ()


class TraceKind(msgspec.Struct, frozen=True, omit_defaults=True):
    """Operations of one kind: `count` ended well, `failed` did not. `times` holds four seconds by step (`total`, those
    of a `TracedStage` without ``_s``, and `journal`): p50, p90, p99 and the most, of those that ended well; of their
    stages the one that was done last counts.
    """

    kind: str
    count: int
    failed: int
    moved_bytes: int
    skipped_bytes: int
    digested_bytes: int
    times: dict[str, tuple[float, ...]] = {}


class MemoryArena(msgspec.Struct, frozen=True):
    """The arena of one worker: bytes of its shuttles, and of their granules in use and free."""

    worker: str
    reserved_bytes: int
    used_bytes: int
    free_bytes: int


class MemoryWarning(msgspec.Struct, frozen=True):
    """What is resident in a process and what is accounted for part: since when, and the numbers of the last sample."""

    process: str
    pid: int
    since_unix_s: float
    resident_bytes: int
    explained_bytes: int
    residual_bytes: int
    tolerance_bytes: int


# --- client to daemon ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection. `token` is what the lifeline handed out; nothing is served without it."""

    seq: int
    version: int
    token: bytes
    client: str = ""


class Register(Message, frozen=True, tag="register"):
    """Register an engine with all its stages (numbered 0..N-1).

    `fingerprint` holds what must match for bytes to mean the same; the keys of `FINGERPRINT_REQUIRED` must be there and
    resolved. The daemon adds what it can see itself: planes, block size, stage count.

    With `exchange` the one stage is an exchange segment: a `MemfdPool` with one row group of one plane, whose rows of
    `EXCHANGE_ROW_BYTES` lie side by side. Such an engine puts and gets; it has no slots, and captures nothing.
    """

    seq: int
    namespace: str
    engine: str
    fingerprint: dict[str, str]
    stages: tuple[Stage, ...]
    deadline_s: float = 30.0
    exchange: bool = False


FINGERPRINT_REQUIRED: Final = ("model", "revision", "dtype", "kv_format", "engine_build")


class Unregister(Message, frozen=True, tag="unregister"):
    """Close the engine's pools. Its images stay."""

    seq: int
    engine_id: int


class Capture(Message, frozen=True, tag="capture"):
    """Capture `tokens` out of `rows` (one entry for all stages, or one a stage) into an image of `conversation`.

    `slot` is the engine's own number of the slot, below `SLOT_LIMIT`, for marks. `positions` are the token positions of
    the states, ascending, none where no stage has any. `ordered` says what orders the copy after the engine's last
    write: ``host`` (the engine has synchronised) or ``event`` (the registered events were recorded).
    """

    seq: int
    engine_id: int
    conversation: str
    tokens: bytes
    rows: tuple[tuple[bytes, ...], ...]
    slot: int
    ordered: str
    positions: bytes = b""
    deadline_s: float = 30.0


class Restore(Message, frozen=True, tag="restore"):
    """Restore the first `tokens` tokens (-1: all) of an image into `rows`.

    The image is named by `image_id`, or by `conversation` when that is 0. Where stages have states, the image must have
    a checkpoint at `tokens`, and `rows` name one slot a state group for it. With `take` the image is held until
    `Acknowledge` gives it up. `ordered` says what proves that the rows are no longer read or written by the engine.
    `resident_tokens`: the rows of so many first tokens may hold the right bytes still, and where digests prove it they
    are left as they are (only where the daemon's `shuttle.reuse` is ``verified``).
    With `layered` the groups of each stage are restored one after the other, and `Progress` tells of each.
    """

    seq: int
    engine_id: int
    conversation: str
    rows: tuple[tuple[bytes, ...], ...]
    slot: int
    ordered: str
    image_id: int = 0
    tokens: int = -1
    take: bool = False
    deadline_s: float = 30.0
    resident_tokens: int = 0
    layered: bool = False


class SlotDirect(Message, frozen=True, tag="slot_direct"):
    """Copy the `tokens` tokens in `rows`, with the states at their end, to `target_rows` of the same engine, on the
    devices. `slot` and `target_slot` are the engine's numbers; a poisoned slot is not copied.
    """

    seq: int
    engine_id: int
    tokens: int
    rows: tuple[tuple[bytes, ...], ...]
    target_rows: tuple[tuple[bytes, ...], ...]
    slot: int
    target_slot: int
    ordered: str
    deadline_s: float = 30.0


class SlotTo(Message, frozen=True, tag="slot_to"):
    """First half of a slot copy through shuttles: capture all of `rows` into a transit image, which belongs to this
    engine and slot alone and takes the place of the slot's former one. It ends with the engine.
    """

    seq: int
    engine_id: int
    tokens: int
    rows: tuple[tuple[bytes, ...], ...]
    slot: int
    ordered: str
    deadline_s: float = 30.0


class SlotFrom(Message, frozen=True, tag="slot_from"):
    """Second half: restore the transit image of `source_slot` into `rows` of `slot`. With `keep` the transit image
    stays for further copies; a copy that failed always leaves it. `resident_tokens` as in `Restore`.
    """

    seq: int
    engine_id: int
    source_slot: int
    rows: tuple[tuple[bytes, ...], ...]
    slot: int
    ordered: str
    keep: bool = False
    deadline_s: float = 30.0
    resident_tokens: int = 0


class SlotDrop(Message, frozen=True, tag="slot_drop"):
    """Give up the transit image of a slot."""

    seq: int
    engine_id: int
    slot: int


class PutBegin(Message, frozen=True, tag="put_begin"):
    """Begin an image of `conversation` that is made of named parts. Answer: `PutBegun`.

    The image is found by `tokens`, as a whole only; without tokens by its name alone. Until `PutCommit` nobody sees it,
    and it ends with the engine.
    """

    seq: int
    engine_id: int
    conversation: str
    tokens: bytes = b""


class PutPart(Message, frozen=True, tag="put_part"):
    """Store a part of a put, or a piece of it, out of `rows` of the exchange (packed runs). Answer: `PartStored`; then
    the rows are free again.

    The part has `nbytes` bytes in rows of `EXCHANGE_ROW_BYTES`; what its last row has beyond them is stored as it is. A
    piece begins at the part's row `first_row` and has as many rows as are given. Every piece begins, and every one but
    the last ends, at a multiple of the daemon's `chunk_tokens` rows. The piece at row 0 comes first; after a failure of
    any piece, and once none is under way, it begins the part anew. A part of no bytes has no rows.
    """

    seq: int
    engine_id: int
    put_id: int
    name: str
    nbytes: int
    rows: bytes
    meta: str = ""
    first_row: int = 0
    deadline_s: float = 30.0


class PutCommit(Message, frozen=True, tag="put_commit"):
    """Publish a put whose parts are all stored; it takes the place of the conversation's former image
    of this fingerprint. Answer:
    `Captured`.
    """

    seq: int
    engine_id: int
    put_id: int


class PutAbort(Message, frozen=True, tag="put_abort"):
    """Give a put up: what is being copied is stopped, what was stored is freed."""

    seq: int
    engine_id: int
    put_id: int


class GetBegin(Message, frozen=True, tag="get_begin"):
    """Hold an image that was put, by `image_id`, or by `conversation` when that is 0. Answer: `Parts`.

    The image is not evicted, and its bytes stay even if it is dropped, until `GetEnd` or the end of the engine.
    """

    seq: int
    engine_id: int
    conversation: str
    image_id: int = 0


class GetPart(Message, frozen=True, tag="get_part"):
    """Write part number `part` (by its place in `Parts`), from its row `first_row` on, to `rows` of the exchange
    (packed runs), every chunk verified before a byte of it is written. Answer: `PartLoaded`.

    A piece begins, and unless it is the last one ends, at a multiple of the daemon's `chunk_tokens` rows.
    """

    seq: int
    engine_id: int
    get_id: int
    part: int
    rows: bytes
    first_row: int = 0
    deadline_s: float = 30.0


class GetEnd(Message, frozen=True, tag="get_end"):
    """Let go of the image of a get."""

    seq: int
    engine_id: int
    get_id: int


class Acknowledge(Message, frozen=True, tag="acknowledge"):
    """The taker has its rows: give the image up."""

    seq: int
    engine_id: int
    image_id: int


class Release(Message, frozen=True, tag="release"):
    """The taker does not want the image after all: it stays, and may be taken again."""

    seq: int
    engine_id: int
    image_id: int


class Mark(Message, frozen=True, tag="mark"):
    """Mark a slot ``clean``, ``dirty`` or ``poisoned``; a poisoned slot is never captured. Answer: `Done`.

    With a `conversation` the mark (``clean``) declares what the slot's `rows` hold: these `tokens` of it, complete, and
    the states at their end. The workers digest that, as an operation like a capture; answer: `Marked`. From then on,
    until the slot is marked in any other way or something is copied into these rows, the conversation outlives the
    engine: see `Marked`.
    """

    seq: int
    engine_id: int
    slot: int
    mark: str
    conversation: str = ""
    tokens: bytes = b""
    rows: tuple[tuple[bytes, ...], ...] = ()
    ordered: str = "host"
    deadline_s: float = 30.0


class Announce(Message, frozen=True, tag="announce"):
    """An engine is about to allocate memory on `devices`, for `namespace` (either may be empty): rescues of dead
    engines there end at once. Answer: `Done`, with their number, once the memory of every dead engine there is
    unmapped.
    """

    seq: int
    namespace: str = ""
    devices: tuple[str, ...] = ()
    deadline_s: float = 30.0


class Lookup(Message, frozen=True, tag="lookup"):
    """Longest published prefix of `tokens` in the engine's namespace and fingerprint."""

    seq: int
    engine_id: int
    tokens: bytes


class Drop(Message, frozen=True, tag="drop"):
    """Drop the images of a conversation, or only `image_id` of them: all or, where one of them is pinned and there is
    no `force`, none. A conversation has one image a fingerprint.
    """

    seq: int
    namespace: str
    conversation: str
    force: bool = False
    image_id: int = 0


class Clear(Message, frozen=True, tag="clear"):
    """Drop every image of a namespace that is not pinned."""

    seq: int
    namespace: str


class Pin(Message, frozen=True, tag="pin"):
    """Pin (`pinned`) or unpin the images of a conversation, or only `image_id` of them; pinned ones are not evicted."""

    seq: int
    namespace: str
    conversation: str
    pinned: bool
    image_id: int = 0


class Lift(Message, frozen=True, tag="lift"):
    """Lift the quarantine of a conversation's images, or only of `image_id`, and of what engines copy under that name;
    without a `conversation` of everything in the namespace, slots too. For admins. Answer: `Done` with how many.
    """

    seq: int
    namespace: str
    conversation: str = ""
    image_id: int = 0


class RestartWorker(Message, frozen=True, tag="restart_worker"):
    """Kill a worker's process if there is one and start the next at once, whatever its deaths so far. For admins.
    Answer: `WorkerOrdered`.
    """

    seq: int
    worker: str


class ResetWorker(Message, frozen=True, tag="reset_worker"):
    """Like `RestartWorker`, but the next process begins with an empty arena: the shuttles are given back, and every
    image that lies in them is dropped. Refused with ``arena_in_use`` while there are any, unless with `force`.
    """

    seq: int
    worker: str
    force: bool = False


class Stats(Message, frozen=True, tag="stats"):
    """Everything `stratactl status` shows."""

    seq: int


class Memory(Message, frozen=True, tag="memory"):
    """What every process of the daemon has resident and what of it is explained, at the last sample; with `history`
    also up to `limit` of its samples.
    """

    seq: int
    history: bool = False
    limit: int = 120


class ListImages(Message, frozen=True, tag="list"):
    """Published images of one namespace, or of all that the caller may see (empty name), in order of their id."""

    seq: int
    namespace: str = ""
    after_image_id: int = 0
    limit: int = 1000


class Show(Message, frozen=True, tag="show"):
    """The latest image of a conversation, or its image `image_id`, with its chunks."""

    seq: int
    namespace: str
    conversation: str
    image_id: int = 0


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop the operation of request `target_seq` between two slices; that request then gets its final reply."""

    seq: int
    target_seq: int


class Trace(Message, frozen=True, tag="trace"):
    """Up to `limit` of the operations that the trace keeps, of namespaces that the caller may see: the latest, or with
    `slowest` those that took longest; with `op` only those of this kind. Answer: `Traced`.
    """

    seq: int
    limit: int = 20
    op: str = ""
    slowest: bool = False


class SetTrace(Message, frozen=True, tag="set_trace"):
    """Switch the trace on, which empties it, or off, which keeps what there is. For admins. Answer: `Traced`, without
    operations.
    """

    seq: int
    on: bool


class FaultArm(Message, frozen=True, tag="fault_arm"):
    """Arm one fault: copy number `at` from now (1: the next slice) of operation `op` in stage `stage` fails in the way
    of `kind`. Answer: `Faults` with this one.

    It is armed at the worker that serves this stage of `engine_id`, or of every registered engine when that is 0; these
    must be one worker. Only an admin may, and only in a daemon that was started to allow it. A fault strikes once, and
    ends with the worker's process.
    """

    seq: int
    op: str
    stage: int
    kind: str
    at: int = 1
    engine_id: int = 0


class FaultList(Message, frozen=True, tag="fault_list"):
    """Armed faults that have not struck. Answer: `Faults`."""

    seq: int


class FaultDisarm(Message, frozen=True, tag="fault_disarm"):
    """Take back the armed fault `fault`, or all (0). Answer: `Done` with how many."""

    seq: int
    fault: int = 0


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The client closes on purpose."""

    seq: int


Request: TypeAlias = (
    Hello
    | Register
    | Unregister
    | Capture
    | Restore
    | SlotDirect
    | SlotTo
    | SlotFrom
    | SlotDrop
    | PutBegin
    | PutPart
    | PutCommit
    | PutAbort
    | GetBegin
    | GetPart
    | GetEnd
    | Acknowledge
    | Release
    | Mark
    | Announce
    | Lookup
    | Drop
    | Clear
    | Pin
    | Lift
    | RestartWorker
    | ResetWorker
    | Stats
    | Memory
    | ListImages
    | Show
    | Cancel
    | Trace
    | SetTrace
    | FaultArm
    | FaultList
    | FaultDisarm
    | Goodbye
)

# --- daemon to client ------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to `Hello`. A new `start_id` means a new daemon: register again."""

    seq: int
    version: int
    start_id: bytes
    pid: int
    instance: str
    package_hash: str
    commit: str
    max_message_bytes: int
    chunk_tokens: int
    parallel: bool
    admin: bool


class Registered(Message, frozen=True, tag="registered"):
    """The engine's number and the processes that serve its stages."""

    seq: int
    engine_id: int
    workers: tuple[WorkerProcess, ...]


class Done(Message, frozen=True, tag="done"):
    """Final reply of requests that return nothing but a count (of images dropped, for instance)."""

    seq: int
    count: int = 0


class WorkerOrdered(Message, frozen=True, tag="worker_ordered"):
    """Answer to `RestartWorker` and `ResetWorker`: the worker `was` in this state, `generation` will be the number of
    its next process, and `images_dropped` images lay in its arena.
    """

    seq: int
    worker: str
    was: str
    generation: int
    images_dropped: int = 0


class WorkersChanged(Message, frozen=True, tag="workers_changed"):
    """A worker of an engine was started again (`seq` is -1: no request asked for it). Sent before the new process gets
    any job of the engine, so that a client always knows whose death frees its rows.
    """

    seq: int
    engine_id: int
    workers: tuple[WorkerProcess, ...]


class Progress(Message, frozen=True, tag="progress"):
    """A ticket moved on: ``accepted`` or ``source_free``; or, of a layered restore, ``group``: all that it writes of
    `group` on `stage` is written. Sent only when the final reply is not due at once; the final reply of a capture
    implies the first two, that of a restore all groups.
    """

    seq: int
    state: str
    stage: int = -1
    group: int = -1


class Captured(Message, frozen=True, tag="captured"):
    """The image is published. `tokens` may be less than asked for where planes cannot locate tokens inside a block."""

    seq: int
    image_id: int
    tokens: int
    image_bytes: int
    new_bytes: int
    stages: tuple[StageOutcome, ...]


class Restored(Message, frozen=True, tag="restored"):
    """The rows hold the image's first `tokens` tokens, every chunk verified. `image_bytes` are those of the whole
    image, also where fewer tokens were asked for; what was moved of it, `stages` say.
    """

    seq: int
    image_id: int
    tokens: int
    image_bytes: int
    stages: tuple[StageOutcome, ...]


class Copied(Message, frozen=True, tag="copied"):
    """The target rows of a `SlotDirect` hold what the source's did; `copied_bytes` were copied on the devices."""

    seq: int
    tokens: int
    copied_bytes: int
    stages: tuple[StageOutcome, ...]


class Marked(Message, frozen=True, tag="marked"):
    """The contents of a clean slot are declared: if the engine dies, the daemon publishes the longest prefix of its
    first `tokens` tokens that still has the same bytes. `digested_bytes` were read for it: chunks that an earlier mark
    of the slot declared are not read again.
    """

    seq: int
    tokens: int
    digested_bytes: int
    stages: tuple[StageOutcome, ...]


class PutBegun(Message, frozen=True, tag="put_begun"):
    """The number of the put, in the daemon that gave it."""

    seq: int
    put_id: int


class PartStored(Message, frozen=True, tag="part_stored"):
    """The piece is copied and digested; its rows of the exchange are free."""

    seq: int
    stored_bytes: int
    stages: tuple[StageOutcome, ...]


class Parts(Message, frozen=True, tag="parts"):
    """An image is held for a get: its tokens and its parts, in the order in which they were begun."""

    seq: int
    get_id: int
    image_id: int
    conversation: str
    tokens: bytes
    parts: tuple[PartInfo, ...]


class PartLoaded(Message, frozen=True, tag="part_loaded"):
    """The rows of the exchange hold the piece, every chunk verified."""

    seq: int
    loaded_bytes: int
    stages: tuple[StageOutcome, ...]


class Found(Message, frozen=True, tag="found"):
    """Answer to `Lookup`: `match` is ``hit`` or ``miss``. The image can be restored to the first `tokens` of the asked
    tokens.
    """

    seq: int
    match: str
    image_id: int = 0
    conversation: str = ""
    tokens: int = 0
    image_tokens: int = 0


class StatsReply(Message, frozen=True, tag="stats_reply"):
    """State of the daemon at one instant. `counters` are totals since start; sizes are bytes. `journal_bytes` is what
    the journal takes of /dev/shm, `journal_error` why it cannot be written.
    """

    seq: int
    instance: str
    pid: int
    uptime_s: float
    health: str
    workers: tuple[WorkerInfo, ...]
    engines: tuple[EngineInfo, ...]
    ops: tuple[OpInfo, ...]
    images: int
    chunks: int
    budget_bytes: int
    budget_images: int
    published_bytes: int
    staged_bytes: int
    free_bytes: int
    memory: tuple[ProcessMemory, ...]
    counters: dict[str, int]
    settings: dict[str, str]
    memory_warnings: tuple[MemoryWarning, ...] = ()
    journal_bytes: int = 0
    journal_error: str = ""


class MemoryReply(Message, frozen=True, tag="memory_reply"):
    """Answer to `Memory`. `keep` samples a process are kept, taken every `sample_s`; they take `samples_bytes` now and
    `samples_bound_bytes` at most. `unwatched` processes were too many to be sampled or to be sent. The last round of
    samples took the supervisor `round_s`, and one wake-up of it never more than `longest_s`. `journal_bytes` of
    /dev/shm are the journal's: no process has them mapped, they are resident all the same.
    """

    seq: int
    now_unix_s: float
    sample_s: float
    keep: int
    samples_bytes: int
    samples_bound_bytes: int
    unwatched: int
    round_s: float
    longest_s: float
    processes: tuple[MemoryProcess, ...]
    arenas: tuple[MemoryArena, ...]
    warnings: tuple[MemoryWarning, ...]
    journal_bytes: int = 0


class Traced(Message, frozen=True, tag="traced"):
    """Answer to `Trace` and `SetTrace`: whether it is `on` and since when, how many operations are `kept` and how many
    were `forgotten` since to make room; what it takes and may take; percentiles by kind, of the latest thousand that
    were asked for; and the operations: the latest last, or the slowest first.
    """

    seq: int
    on: bool
    since_unix_s: float
    kept: int
    forgotten: int
    held_bytes: int
    bound_bytes: int
    kinds: tuple[TraceKind, ...]
    ops: tuple[TracedOp, ...]


class Images(Message, frozen=True, tag="images"):
    """Answer to `ListImages`; `more` says that the limit cut it."""

    seq: int
    images: tuple[ImageInfo, ...]
    more: bool


class ImageDetail(Message, frozen=True, tag="image"):
    """Answer to `Show`: the image, its fingerprint, and for each chunk its stage, kind, rows, place and digest. The
    chunks of an image that was put are those of its `parts`, one part after the other.
    `others` are the numbers of the conversation's other images, which are of other fingerprints.
    """

    seq: int
    image: ImageInfo
    fingerprint: dict[str, str]
    chunks: tuple["ChunkInfo", ...]
    parts: tuple[PartInfo, ...] = ()
    others: tuple[int, ...] = ()


class ChunkInfo(msgspec.Struct, frozen=True):
    """One chunk of an image: of the rows of `group`, or (`is_state`) its state. `extents` are packed as one place (see
    `shm.extent`); `segments` names the shuttles.
    """

    stage: int
    group: int
    is_state: bool
    token_count: int
    length_bytes: int
    references: int
    algorithm: str
    digest: bytes
    extents: bytes
    segments: tuple[str, ...]


class Faults(Message, frozen=True, tag="faults"):
    """Armed faults that have not struck, and how often each fault point of the daemon was passed since its start."""

    seq: int
    faults: tuple[FaultInfo, ...]
    points: dict[str, int] = {}


class Failed(Message, frozen=True, tag="failed"):
    """Final reply of a request that failed. `code` is one of `stratad.errors`; `stage` is the lowest failing one (-1:
    none). `seq` is -1 where the request could not be read at all.
    """

    seq: int
    code: str
    message: str
    stage: int = -1
    stages: tuple[StageOutcome, ...] = ()
    start_id: bytes = b""
    detail: dict[str, str] = {}


Reply: TypeAlias = (
    Welcome
    | Registered
    | WorkersChanged
    | Done
    | WorkerOrdered
    | Progress
    | Captured
    | Restored
    | Copied
    | Marked
    | PutBegun
    | PartStored
    | Parts
    | PartLoaded
    | Found
    | StatsReply
    | MemoryReply
    | Traced
    | Images
    | ImageDetail
    | Faults
    | Failed
)

# --- supervisor to worker --------------------------------------------------------------------------------------------


class MakeShuttle(Message, frozen=True, tag="make_shuttle"):
    """Create (or with `adopt` attach) a shuttle, reserve it, map it, page-lock it. Answer: `ShuttleReady` or
    `ShuttleFailed`.
    """

    index: int
    segment: str
    shuttle_bytes: int
    adopt: bool


class OpenPool(Message, frozen=True, tag="open_pool"):
    """Map an engine's pool and prove it by the stage's probe. A memfd comes over the worker's lifeline under
    `descriptor` first. `engine_pid` and `engine_start_ticks` let the worker see that the engine is alive; engines take
    turns on its lanes by their number, `engine_id`.
    """

    pool: int
    stage: Stage
    engine_pid: int
    engine_start_ticks: int
    engine_id: int = 0


class ClosePool(Message, frozen=True, tag="close_pool"):
    """Unmap a pool once no job uses it. Answer: `PoolClosed`."""

    pool: int


class CaptureJob(Message, frozen=True, tag="capture_job"):
    """Copy rows of a pool into places. The chunks are `layout.chunks(tokens, positions)`, in that order, one place
    each. `poll_event` asks the worker to poll the pool's event before it starts. `op` and `stage` say what the job is
    part of, for ordered faults.

    Where `chunks` numbers some (packed, ascending), the job has only those. Those that `hinted` numbers (so packed) are
    expected to be stored already: they have no place, and are only digested where they lie.
    """

    job: int
    pool: int
    rows: tuple[bytes, ...]
    tokens: int
    places: bytes
    poll_event: bool
    positions: bytes = b""
    event_wait_s: float = 30.0
    op: str = ""
    stage: int = -1
    hinted: bytes = b""
    chunks: bytes = b""


class RestoreJob(Message, frozen=True, tag="restore_job"):
    """Verify places against `digests` and copy them into rows of a pool.

    The chunks are those of the whole image (`image_tokens`, `positions`); only the first `tokens`, and the states at
    that position, are written. `algorithms` names the digest algorithm of each chunk in order, or a single one for all.
    Chunks within the first `resident_tokens` tokens are digested where they are to go, and skipped if they are there.
    With `layered` no slice holds chunks of two groups, and `GroupRestored` tells of each group.
    """

    job: int
    pool: int
    rows: tuple[bytes, ...]
    image_tokens: int
    tokens: int
    places: bytes
    digests: bytes
    algorithms: tuple[str, ...]
    poll_event: bool
    positions: bytes = b""
    event_wait_s: float = 30.0
    op: str = ""
    stage: int = -1
    resident_tokens: int = 0
    layered: bool = False


class CopyJob(Message, frozen=True, tag="copy_job"):
    """Copy the chunks `layout.chunks(tokens, positions)` from `rows` of a pool to `target_rows` of it."""

    job: int
    pool: int
    rows: tuple[bytes, ...]
    target_rows: tuple[bytes, ...]
    tokens: int
    poll_event: bool
    positions: bytes = b""
    event_wait_s: float = 30.0
    op: str = ""
    stage: int = -1


class DigestJob(Message, frozen=True, tag="digest_job"):
    """Digest chunks of a pool where they lie: of `layout.chunks(tokens, positions)` those that `chunks` numbers
    (packed, ascending), in that order.
    """

    job: int
    pool: int
    rows: tuple[bytes, ...]
    tokens: int
    chunks: bytes
    poll_event: bool
    positions: bytes = b""
    event_wait_s: float = 30.0


class CancelJob(Message, frozen=True, tag="cancel_job"):
    """Stop a job between two slices; it then ends with `JobFailed` and code ``cancelled``."""

    job: int


class ArmFault(Message, frozen=True, tag="arm_fault"):
    """Have copy number `at` from now of operation `op` in stage `stage` fail in the way of `kind`."""

    fault: int
    op: str
    stage: int
    kind: str
    at: int


class DisarmFault(Message, frozen=True, tag="disarm_fault"):
    """Forget an armed fault."""

    fault: int


class TraceCopies(Message, frozen=True, tag="trace_copies"):
    """Measure the times of copies on the device itself (`on`), or only by what its host waits for, which costs
    nothing. What is being copied now is measured either way.
    """

    on: bool


class TakeCensus(Message, frozen=True, tag="take_census"):
    """Ask for the worker's counters."""

    census: int


class StopWorker(Message, frozen=True, tag="stop_worker"):
    """Finish the current copies, then exit with status 0."""


Command: TypeAlias = (
    MakeShuttle
    | OpenPool
    | ClosePool
    | CaptureJob
    | RestoreJob
    | CopyJob
    | DigestJob
    | CancelJob
    | ArmFault
    | DisarmFault
    | TraceCopies
    | TakeCensus
    | StopWorker
)
CopyCommand: TypeAlias = CaptureJob | RestoreJob | CopyJob | DigestJob

# --- worker to supervisor --------------------------------------------------------------------------------------------


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """First message of a worker. `token` is the secret of its spec."""

    worker: str
    generation: int
    token: bytes
    pid: int
    version: int


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """The device works and every kernel gave its known answer. `start_s` counts from the fork."""

    device: str
    device_name: str
    digest_algorithm: str
    key_id: bytes
    digest_path: str
    cpus: tuple[int, ...]
    start_s: float
    device_bytes: int = 0


class BootFailed(Message, frozen=True, tag="boot_failed"):
    """The device cannot be used; the worker waits for `StopWorker` and ends. With code ``out_of_memory`` it needed
    `wanted_bytes` of device memory, of which `free_bytes` were free (0: it could not find out).
    """

    code: str
    message: str
    wanted_bytes: int = 0
    free_bytes: int = 0


class ShuttleReady(Message, frozen=True, tag="shuttle_ready"):
    """A shuttle may be used. `locked` says that it is page-locked (always so on GPUs, never on `cpu`)."""

    index: int
    locked: bool
    make_s: float


class ShuttleFailed(Message, frozen=True, tag="shuttle_failed"):
    """A shuttle could not be had: which limit, what was wanted, what there was."""

    index: int
    code: str
    message: str
    wanted_bytes: int
    free_bytes: int


class PoolOpened(Message, frozen=True, tag="pool_opened"):
    """The pool is mapped and its probe agreed."""

    pool: int


class PoolFailed(Message, frozen=True, tag="pool_failed"):
    """The pool could not be used."""

    pool: int
    code: str
    message: str


class PoolClosed(Message, frozen=True, tag="pool_closed"):
    """The mapping is gone."""

    pool: int


class SourceFree(Message, frozen=True, tag="source_free"):
    """A capture no longer reads the rows, although the copy has not ended."""

    job: int


class EventAwaited(Message, frozen=True, tag="event_awaited"):
    """A job waits for its engine's event, which was not reached at once; or, after that was said, it is `reached`. The
    time of its copy begins then.
    """

    job: int
    reached: bool = False


class GroupRestored(Message, frozen=True, tag="group_restored"):
    """All that a layered restore writes of one group is written, although others are not. Not told of short jobs."""

    job: int
    group: int


class LaneMoving(Message, frozen=True, tag="lane_moving"):
    """A lane that has several jobs goes on: it has just copied of this one. Told every 50 ms at most."""

    job: int


class JobDone(Message, frozen=True, tag="job_done"):
    """A job ended well; its lane has copied `moved_bytes` (of a `DigestJob`: read), and a restore has left
    `skipped_bytes` as they are. `digests` holds those of all chunks of a capture, or those that were asked for, in
    chunk order; `lane_s` is the time that its lane gave it, in which that waited `digest_s` and `copy_s` for the device
    (on `cpu`: worked). `algorithm` made the digests, where it is not the worker's own (a pool in host memory on a GPU's
    worker). The other times are those of a `StageOutcome`.
    """

    job: int
    moved_bytes: int
    digest_s: float
    copy_s: float
    digests: bytes = b""
    lane_s: float = 0.0
    algorithm: str = ""
    gather_s: float = 0.0
    verify_s: float = 0.0
    event_s: float = 0.0
    queue_s: float = 0.0
    digested_bytes: int = 0
    skipped_bytes: int = 0


class JobFailed(Message, frozen=True, tag="job_failed"):
    """A job failed. `chunk` is the number of the offending chunk or -1. `rows_undefined` are the rows and slots of each
    group that a restore or copy has written already, or partly (empty: none). `sticky` says that the device is of no
    more use: the worker exits after this message. The times are those of a `StageOutcome`, up to the failure.
    """

    job: int
    code: str
    message: str
    chunk: int = -1
    rows_undefined: tuple[bytes, ...] = ()
    sticky: bool = False
    moved_bytes: int = 0
    digest_s: float = 0.0
    copy_s: float = 0.0
    lane_s: float = 0.0
    gather_s: float = 0.0
    verify_s: float = 0.0
    event_s: float = 0.0
    queue_s: float = 0.0


class FaultStruck(Message, frozen=True, tag="fault_struck"):
    """An armed fault strikes now (one that kills the process may not get to say so)."""

    fault: int


class Census(Message, frozen=True, tag="census"):
    """Counters of a worker: streams, events, staging_bytes, registrations, pools, jobs_done, ..."""

    census: int
    resources: dict[str, int]


Report: TypeAlias = (
    WorkerHello
    | WorkerReady
    | BootFailed
    | ShuttleReady
    | ShuttleFailed
    | PoolOpened
    | PoolFailed
    | PoolClosed
    | SourceFree
    | EventAwaited
    | GroupRestored
    | LaneMoving
    | JobDone
    | JobFailed
    | FaultStruck
    | Census
)

# --- supervisor and template -----------------------------------------------------------------------------------------


class WorkerSpec(Message, frozen=True, tag="fork"):
    """Order to the template: fork one worker. Everything a worker is told at birth.

    `identity` is the name on the worker socket; it holds a secret, so that nobody else can speak as this worker.
    `digest_key` is the host's 256-bit seed; it never leaves the daemon's processes and is never logged. `faults` is
    empty except in tests (see `workers.faulty`); with `allow_faults` more may be armed later. `copy_path` is a value of
    `workers.device.CopyPath`.
    """

    worker: str
    device: str
    generation: int
    token: bytes
    worker_socket: str
    life_socket: str
    cpus: tuple[int, ...]
    digest_key: bytes
    slice_bytes: int
    staging_bytes: int
    inline_bytes: int
    link_bytes_per_s: float
    max_message_bytes: int
    log_level: str
    log_format: str = "text"
    identity: bytes = b""
    faults: dict[str, str] = {}
    allow_faults: bool = False
    small_bytes: int = 32 * 1024 * 1024
    huge_pages: bool = False
    direct_slice_bytes: int = 1 << 30
    copy_path: str = "auto"
    urgent_streams: bool = True


TemplateOrder: TypeAlias = WorkerSpec


class Forked(Message, frozen=True, tag="forked"):
    """The template forked a worker; its pidfd travels with this message."""

    worker: str
    generation: int
    pid: int


class Exited(Message, frozen=True, tag="exited"):
    """A worker was reaped: exit status, or minus the signal's number."""

    pid: int
    status: int


class ForkFailed(Message, frozen=True, tag="fork_failed"):
    """An order that could not be carried out (the limit of processes, say): there is no process and will be none."""

    worker: str
    generation: int
    message: str


class TemplateReady(Message, frozen=True, tag="template_ready"):
    """The template has imported what workers need."""

    import_s: float


TemplateNews: TypeAlias = Forked | ForkFailed | Exited | TemplateReady
