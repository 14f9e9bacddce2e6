"""What the core has written down, and what it does once that is done.

Theory of operation. What must outlive the daemon is recorded before anybody is told: an image is bound, its record is
appended, and only a good answer publishes it and lets the reply go; an end is recorded, and only then are the extents
free for others. The shell answers an `Append` at once, before it performs any later effect and before it tells the core
anything else, so nothing comes in between.

A journal that cannot be written costs captures and drops, which are refused with ``journal_unwritable``, and nothing
that is there: restores and lookups go on. The next try is allowed after `RETRY_S`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from stratad.core.effects import Append
from stratad.core.failures import Refusal
from stratad.core.images import Image
from stratad.core.records import DropRecord, ImageRecord, Record, WorkerRecord, image_record

if TYPE_CHECKING:
    from stratad.core.state import State, Worker

RETRY_S = 1.0
IDS_A_RECORD = 65_536  # longer lists could not be read back

Then: TypeAlias = Callable[["State"], None]
Otherwise: TypeAlias = Callable[["State", str], None]


def append(state: "State", records: Iterable[Record], then: Then, otherwise: Otherwise) -> None:
    """Have records written, all or none; the answer calls `then` or `otherwise`, which is told why not."""
    serial = state.number("append")
    state.appends[serial] = (then, otherwise)
    state.out.append(Append(serial, tuple(records)))


def answered(state: "State", serial: int, error: str) -> None:
    """An append was carried out, or not (`error` says why)."""
    then, otherwise = state.appends.pop(serial)
    if error:
        if not state.journal_error:
            state.log("error", "the journal cannot be written: captures and drops are refused", why=error)
        state.journal_error = error
        state.journal_again_s = state.now_s + RETRY_S
        state.journal_probe_s = state.now_s + RETRY_S
        state.wake_by(state.journal_probe_s)
        state.count("journal_failures")
        otherwise(state, error)
        return
    if state.journal_error:
        state.log("info", "the journal is written again")
        state.journal_error = ""
    then(state)


def try_again(state: "State") -> None:
    """Ask, after a failure, whether there is room again: perhaps nobody captures until the daemon says so."""
    if not state.journal_error or state.now_s < state.journal_probe_s:
        return
    again_s = state.journal_again_s

    def still_none(state: "State", _: str) -> None:
        state.journal_again_s = again_s  # whoever wants something recorded may try himself

    append(state, (), lambda _: None, still_none)


def check_writable(state: "State") -> None:
    """Refuse what would have to be recorded, shortly after that failed.

    Raises:
        Refusal: ``journal_unwritable``.
    """
    if state.journal_error and state.now_s < state.journal_again_s:
        raise unwritable(state.journal_error)


def unwritable(error: str) -> Refusal:
    """The refusal of whatever could not be recorded."""
    return Refusal("journal_unwritable", f"the journal cannot be written: {error}")


def publish(state: "State", image: Image, then: Then, otherwise: Otherwise) -> None:
    """Record a bound image, then publish it and go on; or unbind it and tell why."""
    scope = image.scope
    previous = state.catalog.find(scope.namespace, scope.fingerprint, image.conversation)
    record = image_record(
        image,
        state.owners.get(scope.namespace, state.settings.uid),
        state.fingerprint_fields.get(scope.fingerprint, {}),
        supersedes=previous.image_id if previous is not None else 0,
        pinned=previous is not None and previous.pinned,
    )

    def written(state: "State") -> None:
        state.catalog.publish(image)
        then(state)

    def not_written(state: "State", error: str) -> None:
        state.catalog.unbind(image)
        otherwise(state, error)

    append(state, [record], written, not_written)


def record_of(state: "State", image: Image, *, pinned: bool | None = None) -> ImageRecord:
    """The record of a published image; `pinned` in place of what it is now."""
    return image_record(
        image,
        state.owners.get(image.scope.namespace, state.settings.uid),
        state.fingerprint_fields.get(image.scope.fingerprint, {}),
        pinned=pinned,
    )


def record_again(state: "State", images: Iterable[Image], then: Then, otherwise: Otherwise, *, pinned: bool) -> None:
    """Record that images are pinned, or not any more."""
    append(
        state,
        [record_of(state, image, pinned=pinned) for image in images],
        then,
        otherwise,
    )


def record_flags(state: "State", images: Iterable[Image]) -> None:
    """Record which images are quarantined and which of their chunks are damaged, as far as it can be. Another daemon
    would find out by itself, but at the price of workers, and it might share a damaged chunk with a new image before.
    """
    listed = [image for image in images if state.catalog.images.get(image.image_id) is image]
    for image in listed:
        record_again(state, [image], lambda _: None, lambda _, __: None, pinned=image.pinned)


def drop(state: "State", images: Iterable[Image], then: Then, otherwise: Otherwise) -> None:
    """Record the end of images, then drop them and go on."""
    gone = list(images)

    def written(state: "State") -> None:
        for image in gone:
            if image.image_id in state.catalog.images:
                state.catalog.drop(image)
        then(state)

    ids = [image.image_id for image in gone]
    records = [DropRecord(tuple(ids[at : at + IDS_A_RECORD])) for at in range(0, len(ids), IDS_A_RECORD)]
    append(state, records, written, otherwise)


def evict(state: "State", images: Iterable[Image], then: Then) -> None:
    """Record the end of images that make room, then drop them. Where that fails nothing is dropped; whoever asked for
    the room looks again and is refused.
    """
    gone = list(images)

    def written(state: "State") -> None:
        state.catalog.evictions += len(gone)
        then(state)

    drop(state, gone, written, lambda state, _: then(state))


def record_worker(state: "State", worker: "Worker") -> None:
    """Record which process may write a worker's arena from now on. Until that is done nothing is captured there: the
    next daemon could not tell when the process is gone.
    """
    generation = worker.generation

    def written(state: "State") -> None:
        if worker.generation == generation:
            worker.recorded = True

    record = WorkerRecord(worker.name, worker.pid, worker.start_ticks, worker.first_shuttle)
    append(state, [record], written, lambda _state, _error: None)
