"""Digests: the reference against its own definition in plain integers, and what must change them."""

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shm.digest_key import key_id
from tests.unit.workers.rig import KEY
from workers.digest import BLOCK_BYTES, MLH, XXH3, Bytes, Digester, xxh3_seed

DIGESTER = Digester(KEY)
OTHER = Digester(KEY[::-1])
M64 = 2**64


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def by_definition(data: bytes, key: bytes) -> bytes:
    """The construction of the module's text, word by word, in Python's integers."""

    def keys(label: bytes, rows: int) -> list[list[int]]:
        stream = hashlib.shake_256(label + key).digest((rows + 1) * 32)
        return [[int.from_bytes(stream[r * 32 + j * 8 :][:8], "little") for j in range(4)] for r in range(rows + 1)]

    first = keys(b"stratad/mlh-128/first", BLOCK_BYTES // 4) if len(data) > 4096 else keys_cached()
    second = keys(b"stratad/mlh-128/second", 2 + 4 * 8)
    block_words: list[int] = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        block += bytes(-len(block) % 4)
        sums = list(first[0])
        for at in range(0, len(block), 4):
            word = int.from_bytes(block[at : at + 4], "little")
            for j in range(4):
                sums[j] = (sums[j] + first[1 + at // 4][j] * word) % M64
        block_words += [total >> 32 for total in sums]
    words = [len(data) % 2**32, len(data) >> 32, *block_words]
    out = b""
    for j in range(4):
        total = second[0][j] + sum(second[1 + n][j] * word for n, word in enumerate(words))
        out += (total % M64 >> 32).to_bytes(4, "little")
    return out


def keys_cached() -> list[list[int]]:
    # SHAKE's output does not depend on how much of it is asked for: small inputs need the first keys only.
    stream = hashlib.shake_256(b"stratad/mlh-128/first" + KEY).digest(1025 * 32)
    return [[int.from_bytes(stream[r * 32 + j * 8 :][:8], "little") for j in range(4)] for r in range(1025)]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_mlh_is_its_definition(data: bytes) -> None:
    assert DIGESTER.digest(MLH, array(data)) == by_definition(data, KEY)


def test_mlh_known_answers() -> None:
    # Images on disk carry these digests: a change of the construction needs a new name.
    assert DIGESTER.digest(MLH, array(b"")).hex() == "2a04a7298bc67ce0115ff681ea827da8"
    assert DIGESTER.digest(MLH, array(bytes(range(251)) * 8500)).hex() == "f0384d0b6e53fb38f92547ddf21a566c"
    assert DIGESTER.digest(XXH3, array(bytes(range(251)))).hex() == "fcd628096667704aec4dc2ba7e3199c1"
    assert key_id(KEY).hex() == "4a20307c1d2ca8f1"
    assert xxh3_seed(KEY) == int("68364ee57bc3be91", 16)


@pytest.mark.parametrize("algorithm", [MLH, XXH3])
@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), bit=st.integers(0, 10**6))
def test_any_flipped_bit_changes_it(algorithm: str, data: bytes, bit: int) -> None:
    bit %= len(data) * 8
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert DIGESTER.digest(algorithm, array(data)) != DIGESTER.digest(algorithm, array(bytes(flipped)))


@pytest.mark.parametrize("algorithm", [MLH, XXH3])
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=100), zeros=st.integers(1, 70))
def test_appended_zeros_change_it(algorithm: str, data: bytes, zeros: int) -> None:
    assert DIGESTER.digest(algorithm, array(data)) != DIGESTER.digest(algorithm, array(data + bytes(zeros)))


@pytest.mark.parametrize("distance_bytes", [4, 64, BLOCK_BYTES])
def test_swapped_words_change_it(distance_bytes: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, BLOCK_BYTES + 4096, dtype=np.uint8)
    swapped = data.copy()
    swapped[0:4] = data[distance_bytes : distance_bytes + 4]
    swapped[distance_bytes : distance_bytes + 4] = data[0:4]
    assert DIGESTER.digest(MLH, data) != DIGESTER.digest(MLH, swapped)


def test_swapped_blocks_change_it() -> None:
    data = np.random.default_rng(4).integers(0, 256, 2 * BLOCK_BYTES, dtype=np.uint8)
    swapped = np.concatenate([data[BLOCK_BYTES:], data[:BLOCK_BYTES]])
    assert DIGESTER.digest(MLH, data) != DIGESTER.digest(MLH, swapped)


@pytest.mark.parametrize("algorithm", [MLH, XXH3])
def test_it_is_keyed(algorithm: str) -> None:
    assert DIGESTER.digest(algorithm, array(b"same")) != OTHER.digest(algorithm, array(b"same"))
    assert DIGESTER.key_id != OTHER.key_id
    assert DIGESTER.digest(algorithm, array(b"same")) == Digester(KEY).digest(algorithm, array(b"same"))


@pytest.mark.parametrize("algorithm", [MLH, XXH3])
def test_pieces_do_not_matter(algorithm: str) -> None:
    data = np.random.default_rng(5).integers(0, 256, 2 * BLOCK_BYTES + 77, dtype=np.uint8)
    hasher = DIGESTER.hasher(algorithm)
    at = 0
    for step in (1, 3, BLOCK_BYTES - 5, 17, BLOCK_BYTES, 61):
        hasher.update(data[at : at + step])
        at += step
    assert at == len(data)
    assert hasher.digest() == DIGESTER.digest(algorithm, data)


def test_every_top_and_low_bit_of_a_word_counts() -> None:
    base = np.zeros(64, np.uint8)
    seen = {DIGESTER.digest(MLH, base)}
    for bit in range(64 * 8):
        changed = base.copy()
        changed[bit // 8] = 1 << bit % 8
        seen.add(DIGESTER.digest(MLH, changed))
    assert len(seen) == 64 * 8 + 1


def test_sums_of_many_chunks_are_those_of_each() -> None:
    sums = np.random.default_rng(6).integers(0, 2**63, (5, 3, 4), dtype=np.uint64)
    assert DIGESTER.mlh.finish_many(sums, 3 * BLOCK_BYTES) == [DIGESTER.mlh.finish(s, 3 * BLOCK_BYTES) for s in sums]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="md5"):
        DIGESTER.hasher("md5")
