"""The public exceptions: each says whose fault it is, and carries the code that travels on the wire.

=================== ============================================== =====================================
exception           whose fault                                    what to do
=================== ============================================== =====================================
`UsageError`        the caller's                                   mend the call
`Busy`              nobody's: something is in the way for now      try later
`NoSpace`           the budget's                                   try later, or make it larger
`Damaged`           the image's bytes changed                      read the prompt again
`SourceChanged`     the engine wrote rows while they were captured order the capture after the last write
`Quarantined`       nobody's: copies of it killed workers twice    read the prompt again; an admin may lift it
`PeerGone`          another process died or hung                   try again
`Cancelled`         the caller wanted it                           nothing
`DeadlineExceeded`  time ran out; the operation may still run      see `rows_busy` of its ticket
`Lost`              the daemon died or the connection broke        register again (the client does)
`ProtocolError`     the peer broke the wire                        same versions on both sides
`InternalError`     ours                                           report it
=================== ============================================== =====================================
"""

from typing import Final

from ipc.messages import StageOutcome


class StratadError(Exception):
    """Base of all errors of the client.

    Attributes:
        code: the wire code, one of `CODES`.
        stage: lowest failing stage, -1 where no stage is to blame.
        stages: how every stage ended (empty where no job was started); after a failed restore each names the rows that
            are now undefined.
        detail: further named values, e.g. the fields of a fingerprint that differ.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        stage: int = -1,
        stages: tuple[StageOutcome, ...] = (),
        detail: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
        self.stage = stage
        self.stages = stages
        self.detail = detail or {}


class UsageError(StratadError):
    """The caller asked for something that cannot be."""


class Busy(StratadError):
    """Rows, image or worker are in use or not ready; the same call may work later."""


class NoSpace(StratadError):
    """The budget or the arena cannot hold the image."""


class Damaged(StratadError):
    """A chunk no longer has its digest. Nothing of it was written."""


class Quarantined(StratadError):
    """Copies of this image, conversation or slot killed workers twice. It is refused until an admin lifts that."""


class SourceChanged(StratadError):
    """The engine wrote to the rows during the capture. Nothing was published."""


class PeerGone(StratadError):
    """A worker or an engine process died, hung or lost its device."""


class Cancelled(StratadError):
    """The operation was cancelled between two slices."""


class DeadlineExceeded(StratadError):
    """The caller's waiting ended; the operation itself goes on until the worker answered."""


class Lost(StratadError):
    """The connection to the daemon was lost before a final reply came."""


class ProtocolError(StratadError):
    """The peer sent something that is no message of this version."""


class InternalError(StratadError):
    """A bug of stratad."""


CODES: Final[dict[str, type[StratadError]]] = {
    "bad_request": UsageError,
    "unknown_op": UsageError,
    "hello_first": UsageError,
    "not_registered": UsageError,
    "not_permitted": UsageError,
    "faults_off": UsageError,
    "bad_value": UsageError,
    "bad_layout": UsageError,
    "bad_rows": UsageError,
    "bad_tokens": UsageError,
    "bad_state": UsageError,
    "no_checkpoint": UsageError,
    "fingerprint_missing": UsageError,
    "fingerprint_mismatch": UsageError,
    "foreign_device": UsageError,
    "unshareable": UsageError,
    "event_unshareable": UsageError,
    "probe_failed": UsageError,
    "unknown_conversation": UsageError,
    "unknown_image": UsageError,
    "unknown_put": UsageError,
    "unknown_get": UsageError,
    "unknown_part": UsageError,
    "duplicate_part": UsageError,
    "part_incomplete": UsageError,
    "poisoned": UsageError,
    "pinned": UsageError,
    "arena_in_use": UsageError,
    "rows_busy": Busy,
    "image_busy": Busy,
    "worker_unavailable": Busy,
    "too_many": Busy,
    "stopping": Busy,
    "journal_unwritable": Busy,
    "no_space": NoSpace,
    "too_large": NoSpace,
    "damaged": Damaged,
    "quarantined": Quarantined,
    "source_changed": SourceChanged,
    "worker_died": PeerGone,
    "worker_hung": PeerGone,
    "engine_gone": PeerGone,
    "device_error": PeerGone,
    "out_of_memory": PeerGone,
    "cancelled": Cancelled,
    "deadline": DeadlineExceeded,
    "lost": Lost,
    "wrong_version": ProtocolError,
    "bad_frame": ProtocolError,
    "internal": InternalError,
}


def error_for(
    code: str,
    message: str,
    *,
    stage: int = -1,
    stages: tuple[StageOutcome, ...] = (),
    detail: dict[str, str] | None = None,
) -> StratadError:
    """The exception that belongs to a wire code; an unknown code (a newer daemon's) becomes a plain `StratadError`."""
    kind = CODES.get(code, StratadError)
    return kind(code, message, stage=stage, stages=stages, detail=detail)
