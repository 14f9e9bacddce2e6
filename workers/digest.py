"""Keyed 128-bit digests of a chunk's bytes in gathered order.

``xxh3-128`` is XXH3 with a 64-bit seed; CPUs compute it. ``mlh-128`` is a strongly universal multilinear hash that maps
well on GPUs; this module holds its reference in numpy. All arithmetic is modulo 2^64, words are little-endian u32:

* The bytes are cut into blocks of 1 MiB; the last one is padded with zeros to whole words.
* Block b with words w_0, w_1, ...: for each of four sums j, ``S[b][j] = C1[j] + sum(K1[i][j] * w_i)``, and of that only
  the high 32 bits count: ``B[b][j] = S[b][j] >> 32``. The low bits of such a sum are weak (a flipped top bit of a
  64-bit word would go unseen half of the time), the high ones collide with probability 2^-32 a sum.
* Second level: ``T[j] = C2[j] + K2[0][j] * (L mod 2^32) + K2[1][j] * (L >> 32) + sum(K2[2 + 4b + i][j] * B[b][i])``
  with L the length in bytes, so appended zeros count. The digest is ``T[0..3] >> 32`` as four little-endian words.

Keys come from the host's 256-bit seed by SHAKE-256, first C then K of each level, word by word, four sums a word.
"""

import hashlib
from typing import Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from ipc.messages import DIGEST_BYTES
from shm.digest_key import key_id

XXH3: Final = "xxh3-128"
MLH: Final = "mlh-128"
SEED_BYTES: Final = 32
BLOCK_BYTES: Final = 1024 * 1024
WORD_BYTES: Final = 4
SUMS: Final = 4
BLOCK_WORDS: Final = BLOCK_BYTES // WORD_BYTES
# 4 GiB a chunk: far above any chunk, and the second level's keys stay at 0.5 MiB.
MAX_BLOCKS: Final = 4096

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]


class Hasher(Protocol):
    """What takes a chunk's bytes piece by piece."""

    def update(self, data: Bytes, /) -> None:
        """Take the next bytes (one contiguous dimension)."""
        ...

    def digest(self) -> bytes:
        """The digest of everything taken so far, 16 bytes."""
        ...


def xxh3_seed(digest_key: bytes) -> int:
    """The 64-bit seed of ``xxh3-128`` under a digest key."""
    made = hashlib.blake2b(key=digest_key, digest_size=8, person=b"stratad/xxh3").digest()
    return int.from_bytes(made, "little")


class MlhKeys:
    """Keys of ``mlh-128``. `first` has shape (BLOCK_WORDS, 4), `second` (2 + 4 * MAX_BLOCKS, 4); the constants have
    shape (4,). 8.5 MiB in all, made in some 30 ms, so they are made when first needed.
    """

    def __init__(self, digest_key: bytes) -> None:
        self.first_constant, self.first = _expand(b"stratad/mlh-128/first", digest_key, BLOCK_WORDS)
        self.second_constant, self.second = _expand(b"stratad/mlh-128/second", digest_key, 2 + SUMS * MAX_BLOCKS)

    def finish(self, sums: Words, length_bytes: int) -> bytes:
        """The digest from the block sums without their constant, shape (blocks, 4)."""
        return self.finish_many(sums[None], length_bytes)[0]

    def finish_many(self, sums: Words, length_bytes: int) -> list[bytes]:
        """The digests of chunks of one length from their block sums, shape (chunks, blocks, 4)."""
        words = np.empty((len(sums), 2 + SUMS * sums.shape[1]), np.uint64)
        words[:, 0] = length_bytes & 0xFFFFFFFF
        words[:, 1] = length_bytes >> 32
        words[:, 2:] = ((sums + self.first_constant) >> np.uint64(32)).reshape(len(sums), -1)
        total = self.second_constant + np.einsum("cw,wj->cj", words, self.second[: words.shape[1]])
        packed: bytes = (total >> np.uint64(32)).astype("<u4").tobytes()
        return [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]

    def block_sum(self, block: Bytes) -> Words:
        """Sums of one block (at most 1 MiB) without the constant, shape (4,)."""
        whole = len(block) // WORD_BYTES * WORD_BYTES
        words = np.frombuffer(block[:whole], "<u4").astype(np.uint64)
        total: Words = np.einsum("ij,i->j", self.first[: len(words)], words)
        if whole < len(block):
            last = int.from_bytes(block[whole:].tobytes(), "little")
            total += self.first[len(words)] * np.uint64(last)
        return total


def _expand(label: bytes, digest_key: bytes, rows: int) -> tuple[Words, Words]:
    stream = hashlib.shake_256(label + digest_key).digest((rows + 1) * SUMS * 8)
    keys = np.frombuffer(stream, "<u8").astype(np.uint64).reshape(rows + 1, SUMS)
    return keys[0].copy(), np.ascontiguousarray(keys[1:])


class MlhHasher:
    """Reference of ``mlh-128``: keeps at most one block of bytes."""

    def __init__(self, keys: MlhKeys) -> None:
        self._keys = keys
        self._sums: list[Words] = []
        self._block = np.empty(BLOCK_BYTES, np.uint8)
        self._filled = 0
        self._length_bytes = 0

    def update(self, data: Bytes) -> None:
        """See `Hasher`."""
        at = 0
        while at < len(data):
            take = min(len(data) - at, BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + take] = data[at : at + take]
            at += take
            self._filled += take
            self._length_bytes += take
            if self._filled == BLOCK_BYTES:
                self._sums.append(self._keys.block_sum(self._block))
                self._filled = 0

    def digest(self) -> bytes:
        """See `Hasher`."""
        sums = [*self._sums, self._keys.block_sum(self._block[: self._filled])] if self._filled else self._sums
        return self._keys.finish(np.array(sums, np.uint64).reshape(-1, SUMS), self._length_bytes)


class Digester:
    """Makes hashers of both algorithms under one digest key."""

    def __init__(self, digest_key: bytes) -> None:
        self._digest_key = digest_key
        self._seed = xxh3_seed(digest_key)
        self._mlh: MlhKeys | None = None
        self.key_id = key_id(digest_key)

    @property
    def mlh(self) -> MlhKeys:
        """The keys of ``mlh-128``."""
        if self._mlh is None:
            self._mlh = MlhKeys(self._digest_key)
        return self._mlh

    def hasher(self, algorithm: str) -> Hasher:
        """A fresh hasher.

        Raises:
            ValueError: the algorithm is unknown.
        """
        if algorithm == XXH3:
            return cast("Hasher", xxhash.xxh3_128(seed=self._seed))
        if algorithm == MLH:
            return MlhHasher(self.mlh)
        raise ValueError(f"unknown digest algorithm {algorithm!r}, known are {XXH3!r} and {MLH!r}")

    @staticmethod
    def plain_xxh3(data: bytes) -> bytes:
        """XXH3-128 with seed 0, for known answers."""
        return xxhash.xxh3_128(data).digest()

    def digest(self, algorithm: str, data: Bytes) -> bytes:
        """The digest of one contiguous run of bytes."""
        hasher = self.hasher(algorithm)
        hasher.update(data)
        return hasher.digest()
