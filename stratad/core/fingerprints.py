"""Fingerprints: what must match for the bytes of an image to mean the same."""

import hashlib
from collections.abc import Mapping, Sequence

from ipc.messages import FINGERPRINT_REQUIRED
from shm.layout import RowGroup, StageLayout, StateGroup
from stratad.core.failures import Refusal

UNRESOLVED = frozenset({"", "auto", "none", "default", "unknown"})
FIELD_LIMIT = 64
TEXT_LIMIT = 1024


def check_fingerprint(fields: Mapping[str, str]) -> None:
    """Refuse a fingerprint with missing, unresolved or oversized fields.

    Raises:
        Refusal: ``fingerprint_missing`` or ``bad_value``, naming the field.
    """
    for name in FINGERPRINT_REQUIRED:
        if fields.get(name, "").strip().lower() in UNRESOLVED:
            raise Refusal(
                "fingerprint_missing",
                f"fingerprint field {name!r} must hold its resolved value, got {fields.get(name)!r}",
                detail={"field": name},
            )
    if len(fields) > FIELD_LIMIT:
        raise Refusal("bad_value", f"a fingerprint has at most {FIELD_LIMIT} fields, got {len(fields)}")
    for name, value in fields.items():
        if len(name) > TEXT_LIMIT or len(value) > TEXT_LIMIT:
            raise Refusal("bad_value", f"fingerprint field {name[:64]!r} is longer than {TEXT_LIMIT} characters")
        if name.startswith("layout."):
            raise Refusal("bad_value", f"fingerprint field {name!r}: names that start with 'layout.' are the daemon's")


def complete_fingerprint(
    fields: Mapping[str, str], layouts: Sequence[StageLayout], *, exchange: bool = False
) -> dict[str, str]:
    """The engine's fields and those that the daemon reads off the layouts: stages, chunk size, and of every stage its
    groups, their block sizes and windows, and their planes. Offsets, strides and row counts are left out: they may
    differ between two pools that hold the same bytes. Rows of an exchange mean nothing by themselves, so that what was
    put is never taken for a capture.
    """
    complete = dict(fields)
    if exchange:
        complete["layout.exchange"] = "parts"
    complete["layout.stages"] = str(len(layouts))
    complete["layout.chunk_tokens"] = ",".join(str(layout.chunk_tokens) for layout in layouts)
    for number, layout in enumerate(layouts):
        complete[f"layout.groups.{number}"] = _described([_described_rows(group) for group in layout.groups])
        complete[f"layout.states.{number}"] = _described(
            [f"{len(group.planes)} planes, {group.row_bytes} bytes, {_shape(group)}" for group in layout.states]
        )
    return complete


def _described(groups: Sequence[str]) -> str:
    """Groups in words; many are digested, since a field has a limit."""
    text = "; ".join(groups) or "none"
    return (
        text if len(text) <= TEXT_LIMIT else f"{len(groups)} groups, {hashlib.blake2b(text.encode()).hexdigest()[:32]}"
    )


def _described_rows(group: RowGroup) -> str:
    window = f", window {group.window_tokens}" if group.window_tokens else ""
    rows = f"{group.row_bytes} bytes a row of {group.tokens_per_row} tokens"
    return f"{len(group.planes)} planes, {rows}{window}, {_shape(group)}"


def _shape(group: RowGroup | StateGroup) -> str:
    shape = ";".join(f"{p.row_bytes}/{p.tokens_per_row}/{p.token_stride_bytes}" for p in group.planes)
    return hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()


def fingerprint_id(complete: Mapping[str, str]) -> str:
    """A name for a complete fingerprint: equal exactly when all fields are."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(complete):
        for text in (name, complete[name]):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def differing_fields(image: Mapping[str, str], engine: Mapping[str, str]) -> dict[str, str]:
    """The fields that differ, as ``image has X, engine has Y``."""
    return {
        name: f"image has {image.get(name)!r}, engine has {engine.get(name)!r}"
        for name in sorted(set(image) | set(engine))
        if image.get(name) != engine.get(name)
    }
