"""``stratactl list, show, drop, pin, clear``: the published images."""

from collections.abc import Sequence
from typing import Final

import msgspec

from ipc.messages import ChunkInfo, ImageDetail, ImageInfo
from shm.extent import unpack_places
from stratad.ctl.connection import DaemonClient
from stratad.ctl.output import Answer, JsonObject, human_age, human_bytes, printable, table

_OTHERS_SHOWN: Final = 8


def list_images(client: DaemonClient, namespace: str, now_unix_s: float) -> Answer:
    """All images of one namespace, or of every one that the caller may see. Raises what the client raises."""
    images = client.list_images(namespace)
    data: JsonObject = {"images": [msgspec.to_builtins(image) for image in images]}
    if not images:
        return Answer(lines=["no images"], data=data)
    return Answer(lines=_image_table(images, now_unix_s), data=data)


def _image_table(images: Sequence[ImageInfo], now_unix_s: float) -> list[str]:
    head = ("image", "namespace", "conversation", "tokens", "stages", "bytes", "stored", "used", "restores", "flags")
    rows = (
        (
            str(image.image_id),
            image.namespace,
            image.conversation,
            str(image.tokens),
            str(image.stages),
            human_bytes(image.image_bytes),
            human_bytes(image.stored_bytes),
            human_age(now_unix_s - image.used_unix_s),
            str(image.restores),
            _flags(image),
        )
        for image in images
    )
    return table(head, rows)


def _flags(image: ImageInfo) -> str:
    flags = (
        ("parts", image.parts > 0),
        ("pinned", image.pinned),
        ("damaged", image.damaged),
        ("quarantined", image.quarantined),
    )
    return ",".join(name for name, on in flags if on)


def show(client: DaemonClient, namespace: str, conversation: str, now_unix_s: float, *, image_id: int = 0) -> Answer:
    """The latest image of a conversation, or `image_id`, with its fingerprint and chunks. Raises what the client
    raises.
    """
    detail = client.show(namespace, conversation, image_id=image_id)
    return Answer(lines=_detail_lines(detail, now_unix_s), data=_detail_data(detail))


def _detail_lines(detail: ImageDetail, now_unix_s: float) -> list[str]:
    from shm.shuttle import MOUNT  # noqa: PLC0415 - `stratactl status` must not load it

    image = detail.image
    flags = _flags(image)
    lines = [
        f"image {image.image_id}: {printable(image.namespace)} / {printable(image.conversation)}"
        + (f" ({flags})" if flags else ""),
        *_others_lines(detail.others),
        f"tokens {image.tokens}, stages {image.stages}, "
        + (f"parts {image.parts}, " if image.parts else "")
        + f"chunks {image.chunks}, "
        f"{human_bytes(image.image_bytes)} in {human_bytes(image.stored_bytes)} "
        f"({human_bytes(image.exclusive_bytes)} of its own)",
        *([f"states at tokens {', '.join(map(str, image.checkpoints))}"] if image.checkpoints else []),
        f"{'put' if image.parts else 'captured'} {human_age(now_unix_s - image.created_unix_s)} ago, "
        f"used {human_age(now_unix_s - image.used_unix_s)} ago, "
        f"{'got' if image.parts else 'restored'} {'once' if image.restores == 1 else f'{image.restores} times'}",
        "fingerprint:",
        *(f"  {printable(key)} = {printable(value)}" for key, value in sorted(detail.fingerprint.items())),
        "",
    ]
    if detail.parts:
        parts = ((part.name, human_bytes(part.nbytes), part.meta or "-") for part in detail.parts)
        lines += [*table(("part", "bytes", "note"), parts), ""]
    owners = _owners(detail)
    rows = (
        (
            str(chunk.stage),
            owners[number] if owners else f"{'state' if chunk.is_state else 'rows'} {chunk.group}",
            str(chunk.token_count),
            human_bytes(chunk.length_bytes),
            str(chunk.references),
            chunk.algorithm,
            chunk.digest.hex(),
            ", ".join(f"{MOUNT}/{str(e['segment']).lstrip('/')} +{e['offset_bytes']}" for e in _extents(chunk)),
        )
        for number, chunk in enumerate(detail.chunks)
    )
    of, count = ("part", "rows") if owners else ("group", "tokens")
    return lines + table(("stage", of, count, "bytes", "references", "algorithm", "digest", "place"), rows)


def _owners(detail: ImageDetail) -> list[str]:
    """Of an image that was put, the name of the part that each chunk belongs to; of another one nothing."""
    names: list[str] = []
    for part in detail.parts:
        left_bytes = part.nbytes  # whole rows are stored, so the last chunk holds a little more
        while left_bytes > 0 and len(names) < len(detail.chunks):
            left_bytes -= detail.chunks[len(names)].length_bytes
            names.append(part.name)
    return names if len(names) == len(detail.chunks) else []


def _others_lines(others: Sequence[int]) -> list[str]:
    """That a conversation has other images, which are of other fingerprints, and how to see them."""
    if not others:
        return []
    numbers = ", ".join(map(str, others[:_OTHERS_SHOWN])) + (", ..." if len(others) > _OTHERS_SHOWN else "")
    return [f"1 of {len(others) + 1} images of this name, each of another fingerprint; --image ID shows {numbers}"]


def _extents(chunk: ChunkInfo) -> list[dict[str, str | int]]:
    """Where a chunk lies: the names in `segments` belong to the extents in order, or to all of them."""
    extents = [extent for place in unpack_places(chunk.extents) for extent in place.extents]
    names = chunk.segments
    return [
        {
            "segment": names[number] if number < len(names) else (names[-1] if names else str(extent.shuttle)),
            "offset_bytes": extent.offset_bytes,
            "length_bytes": extent.length_bytes,
        }
        for number, extent in enumerate(extents)
    ]


def _detail_data(detail: ImageDetail) -> JsonObject:
    return {
        "image": msgspec.to_builtins(detail.image),
        "others": list(detail.others),
        "fingerprint": dict(detail.fingerprint),
        "parts": [msgspec.to_builtins(part) for part in detail.parts],
        "chunks": [
            {
                "stage": chunk.stage,
                "group": chunk.group,
                "is_state": chunk.is_state,
                "token_count": chunk.token_count,
                "length_bytes": chunk.length_bytes,
                "references": chunk.references,
                "algorithm": chunk.algorithm,
                "digest": chunk.digest.hex(),
                "extents": [dict(extent) for extent in _extents(chunk)],
            }
            for chunk in detail.chunks
        ],
    }


def drop(client: DaemonClient, namespace: str, conversation: str, *, force: bool, image_id: int = 0) -> Answer:
    """Drop the images of a conversation, or `image_id` of them. Raises what the client raises."""
    count = client.drop(namespace, conversation, force=force, image_id=image_id)
    return _counted("dropped", count)


def clear(client: DaemonClient, namespace: str) -> Answer:
    """Drop every image of a namespace that is not pinned. Raises what the client raises."""
    count = client.clear(namespace)
    if not count:
        return Answer(
            lines=[f"nothing to drop: no image in namespace {printable(namespace)} but for pinned ones"],
            data={"count": 0},
        )
    return _counted("dropped", count)


def pin(client: DaemonClient, namespace: str, conversation: str, *, pinned: bool, image_id: int = 0) -> Answer:
    """Pin or unpin the images of a conversation, or `image_id` of them. Raises what the client raises."""
    client.pin(namespace, conversation, pinned=pinned, image_id=image_id)
    word = "pinned" if pinned else "unpinned"
    what = f"image {image_id} of " if image_id else ""
    return Answer(lines=[f"{word} {what}{printable(namespace)} / {printable(conversation)}"], data={"pinned": pinned})


def lift(client: DaemonClient, namespace: str, conversation: str, *, image_id: int = 0) -> Answer:
    """Lift the quarantine of a conversation, of `image_id` of it, or of a whole namespace. Raises what the client
    raises.
    """
    count = client.lift(namespace, conversation, image_id=image_id)
    if not count:
        where = f"image {image_id} of " if image_id else ""
        where += (
            f"{printable(namespace)} / {printable(conversation)}"
            if conversation
            else f"namespace {printable(namespace)}"
        )
        return Answer(lines=[f"nothing is quarantined in {where}"], data={"count": 0})
    return Answer(lines=[f"lifted {count} {'quarantine' if count == 1 else 'quarantines'}"], data={"count": count})


def _counted(verb: str, count: int) -> Answer:
    return Answer(lines=[f"{verb} {count} {'image' if count == 1 else 'images'}"], data={"count": count})
