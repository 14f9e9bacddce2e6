"""What the journal holds: absolute records, each the whole truth about its subject, and what a list of them adds up to.

Reservations, reads and reference counts are not recorded: they end with the processes, or are counted again. A shuttle
speaks for itself (see `shm.header`). Everything here is written and read by daemons of one user on one host.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from ipc.messages import DIGEST_BYTES
from shm.extent import ChunkPlace, pack_places, unpack_places
from shm.rows import pack_numbers, unpack_numbers
from stratad.core.images import Chunk, ChunkKey, Image, ImagePart, Scope, Suspect


class RecordError(ValueError):
    """A record that contradicts itself."""


class StageRecord(msgspec.Struct, frozen=True):
    """The chunks of one stage. `groups` and `token_counts` are packed numbers, one a chunk; `places` as in
    `shm.extent`; `digests` has 16 bytes a chunk. `makers` are the (algorithm, key id) in use, `maker_of` the index of
    each chunk's among them, one byte a chunk.
    """

    groups: bytes
    token_counts: bytes
    places: bytes
    digests: bytes
    makers: tuple[tuple[str, bytes], ...]
    maker_of: bytes


class ImageRecord(msgspec.Struct, frozen=True, tag_field="t", tag="image"):
    """One published image, and what must be known to serve it: the owner of its namespace and the fields of its
    fingerprint. It replaces every earlier record of `image_id`, and ends the image `supersedes`. `damaged` lists the
    chunks that failed their digest as (stage, number). A `quarantined` one has killed workers, and would again.
    """

    image_id: int
    namespace: str
    owner: int
    fingerprint: str
    fields: dict[str, str]
    workers: tuple[str, ...]
    conversation: str
    tokens: bytes
    token_count: int
    positions: tuple[int, ...]
    points: tuple[int, ...] | None
    stages: tuple[StageRecord, ...]
    created_unix_s: float
    pinned: bool
    supersedes: int = 0
    damaged: tuple[tuple[int, int], ...] = ()
    parts: tuple[ImagePart, ...] | None = None
    quarantined: bool = False


class DropRecord(msgspec.Struct, frozen=True, tag_field="t", tag="drop"):
    """These images are no more."""

    image_ids: tuple[int, ...]


class WorkerRecord(msgspec.Struct, frozen=True, tag_field="t", tag="worker"):
    """The process that may write the arena of `worker` from now on. It replaces the earlier record of that worker: a
    next process is started only once the former is proven gone. The shuttles that it makes are numbered from
    `first_shuttle`.
    """

    worker: str
    pid: int
    start_ticks: int
    first_shuttle: int = 0


Record: TypeAlias = ImageRecord | DropRecord | WorkerRecord


class Replayed(NamedTuple):
    """What a journal says is there: images by id, oldest record first, and the latest process of each worker."""

    images: dict[int, ImageRecord]
    workers: dict[str, WorkerRecord]


def replay(records: Iterable[Record]) -> Replayed:
    """Add records up, in the order in which they were written."""
    images: dict[int, ImageRecord] = {}
    workers: dict[str, WorkerRecord] = {}
    for record in records:
        match record:
            case ImageRecord():
                images.pop(record.supersedes, None)
                images.pop(record.image_id, None)  # what is changed counts as used
                images[record.image_id] = record
            case DropRecord():
                for image_id in record.image_ids:
                    images.pop(image_id, None)
            case WorkerRecord():
                workers[record.worker] = record
    return Replayed(images, workers)


def subjects(record: Record) -> tuple[str, tuple[str, ...]]:
    """What a record is about ("": nothing that stays), and the subjects that it ends."""
    match record:
        case ImageRecord():
            return f"image {record.image_id}", (f"image {record.supersedes}",) if record.supersedes else ()
        case DropRecord():
            return "", tuple(f"image {image_id}" for image_id in record.image_ids)
        case WorkerRecord():
            return f"worker {record.worker}", ()


def image_record(
    image: Image, owner: int, fields: Mapping[str, str], *, supersedes: int = 0, pinned: bool | None = None
) -> ImageRecord:
    """The record of an image; `pinned` in place of what it is now."""
    return ImageRecord(
        image.image_id,
        image.scope.namespace,
        owner,
        image.scope.fingerprint,
        dict(fields),
        image.scope.workers,
        image.conversation,
        image.tokens,
        image.token_count,
        image.positions,
        image.points,
        tuple(_stage_record(chunks) for chunks in image.stages),
        image.created_unix_s,
        image.pinned if pinned is None else pinned,
        supersedes,
        tuple((s, n) for s, chunks in enumerate(image.stages) for n, chunk in enumerate(chunks) if chunk.damaged),
        image.parts,
        image.quarantined,
    )


def _stage_record(chunks: tuple[Chunk, ...]) -> StageRecord:
    keys = [chunk.key for chunk in chunks]
    makers = list(dict.fromkeys([(key.algorithm, key.key_id) for key in keys]))
    if len(makers) == 1:
        maker_of = bytes(len(keys))
    else:
        number = {maker: n for n, maker in enumerate(makers)}
        maker_of = bytes(number[key.algorithm, key.key_id] for key in keys)
    return StageRecord(
        pack_numbers([key.group for key in keys]),
        pack_numbers([key.token_count for key in keys]),
        pack_places([chunk.place for chunk in chunks]),
        b"".join([key.digest for key in keys]),
        tuple(makers),
        maker_of,
    )


def stage_chunks(record: ImageRecord, stage: int) -> list[tuple[ChunkKey, ChunkPlace]]:
    """The key and the place of each chunk of a stage, in order.

    Raises:
        RecordError: the record contradicts itself.
    """
    packed = record.stages[stage]
    try:
        groups, counts = unpack_numbers(packed.groups), unpack_numbers(packed.token_counts)
        places = unpack_places(packed.places)
        step = DIGEST_BYTES
        digests = [packed.digests[at : at + step] for at in range(0, len(packed.digests), step)]
        made_by = [packed.makers[number] for number in packed.maker_of]
        if len(record.workers) != len(record.stages) or len(packed.digests) % step:
            raise ValueError("lists of different lengths")
        return [
            (
                ChunkKey(
                    record.namespace,
                    record.fingerprint,
                    record.workers[stage],
                    stage,
                    group,
                    count,
                    place.length_bytes,
                    algorithm,
                    key_id,
                    digest,
                ),
                place,
            )
            for group, count, place, digest, (algorithm, key_id) in zip(
                groups, counts, places, digests, made_by, strict=True
            )
        ]
    except (ValueError, IndexError) as exc:
        raise RecordError(f"image {record.image_id}, stage {stage}: {exc}") from exc


def image_of(record: ImageRecord, stages: tuple[tuple[Chunk, ...], ...]) -> Image:
    """The image that a record describes, of chunks that the catalog has."""
    return Image(
        record.image_id,
        Scope(record.namespace, record.fingerprint, record.workers),
        record.conversation,
        record.tokens,
        record.token_count,
        record.positions,
        record.points,
        stages,
        created_unix_s=record.created_unix_s,
        used_unix_s=record.created_unix_s,
        pinned=record.pinned,
        parts=record.parts,
        suspect=Suspect(quarantined=True) if record.quarantined else None,
    )
