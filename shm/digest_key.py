"""The name of a digest key: what images carry of it."""

import hashlib


def key_id(digest_key: bytes) -> bytes:
    """Names a digest key without telling it (8 bytes)."""
    return hashlib.blake2b(digest_key, digest_size=8, person=b"stratad/keyid").digest()
