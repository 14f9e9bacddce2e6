"""The GPU kernels, as CUDA C that NVRTC and HIPRTC compile at run time (neither needs a C compiler).

A slice is described by three tables in device memory, so that one launch handles all of it:

* planes (48 bytes each): ``base`` address of row 0, ``stride``, ``prefix`` (bytes of one row of all planes before),
  ``magic`` (what divides by ``row_bytes``, see `workers.slice_table`), ``row_bytes``, ``token_bytes``;
* chunks (64 bytes each): where the chunk lies in staging, its length, what divides by the bytes of one of its planes
  (0: they differ), where its rows begin in the row list, whole rows, live rows, tokens of the last live row (0: all),
  its planes, its first tile and its first block;
* the row list (u32).

Copies walk *tiles* of 64 KiB of a chunk in gathered order, a thread block each. Digests walk *columns*: the same 16 KiB
of several blocks of the digest, since all blocks have the same keys, and eight bytes of keys to each byte of data would
otherwise be what the kernel waits for. A column's keys (128 KiB) stay in the L1 cache while the thread block goes
through its blocks, two at a time; data goes past that cache. Threads walk in vectors of 16, 4 or 1 bytes, the largest
that divides every base, stride and row of the pool, so a vector never crosses a row.
"""

from typing import Final

TILE_BYTES: Final = 64 * 1024
COLUMN_BYTES: Final = 16 * 1024
THREADS: Final = 256
WIDTHS: Final = (16, 4, 1)
ROW_KERNELS: Final = ("digest_rows", "gather", "scatter", "copy_rows")
KERNELS: Final = (
    *(f"{name}_{width}" for name in ROW_KERNELS for width in WIDTHS),
    "digest_staging",
    "load_tables",
    "move",
)
MOVE_BYTES: Final = 16
# What `copy_rows` does: both in one launch, or each by itself.
COPY: Final = 1
COMPARE: Final = 2

SOURCE: Final = r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 65536u
#define BLOCK 1048576u
#define COLUMN 16384u
#define THREADS 256u
#define PARTS 2

struct Plane { u64 base, stride, prefix, magic; u32 row_bytes, token_bytes; u64 unused; };
struct Chunk {
  u64 staging, length, plane_magic;
  u32 first_row, row_count, live_rows, tail_tokens, first_plane, plane_count, first_tile, first_block;
  u64 unused;
};

// --- the machine -----------------------------------------------------------------------------------------------------

#ifndef REDUCE_ADD
#ifdef __HIP_PLATFORM_AMD__
#define SHUFFLE_XOR(value, by) __shfl_xor(value, by)
#else
#define SHUFFLE_XOR(value, by) __shfl_xor_sync(0xffffffffu, value, by)
#endif
// Four sums of every thread. Each step halves what a lane still has to pass on, so that it takes 8 exchanges, not 20.
__device__ static inline void reduce_add(u64* target, const u64* sums) {
  u32 lane = threadIdx.x & (warpSize - 1);
  bool odd = lane & 1, second = lane & 2;
  u64 first = (odd ? sums[2] : sums[0]) + SHUFFLE_XOR(odd ? sums[0] : sums[2], 1);
  u64 other = (odd ? sums[3] : sums[1]) + SHUFFLE_XOR(odd ? sums[1] : sums[3], 1);
  u64 value = (second ? other : first) + SHUFFLE_XOR(second ? first : other, 2);
  for (int by = 4; by < warpSize; by <<= 1) value += SHUFFLE_XOR(value, by);
  if (lane < 4) atomicAdd(target + 2 * (lane & 1) + (lane >> 1), value);
}
#define REDUCE_ADD(target, sums) reduce_add(target, sums)
#endif

#ifndef BEFORE_READ
#define BEFORE_READ(from)
#endif

// Past the L1 cache: data is read once there, and what is read again to be compared must not come from it.
__device__ static inline uint4 fresh(const uint4* from) {
  uint4 whole;
  BEFORE_READ(from);
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(whole.x), "=r"(whole.y), "=r"(whole.z), "=r"(whole.w) : "l"(from));
#else
  const volatile u32* words = (const volatile u32*)from;
  whole.x = words[0]; whole.y = words[1]; whole.z = words[2]; whole.w = words[3];
#endif
  return whole;
}
__device__ static inline u32 fresh(const u32* from) { BEFORE_READ(from); return *(const volatile u32*)from; }
__device__ static inline u32 fresh(const u8* from) { BEFORE_READ(from); return *(const volatile u8*)from; }

// --- where a byte of a chunk lies --------------------------------------------------------------------------------

// Exact for every offset below 2^32.
__device__ static inline u32 divided(u32 offset, u64 magic) {
  u64 low = (u64)offset * (u32)magic;
  u64 high = (u64)offset * (u32)(magic >> 32) + (low >> 32);
  return (u32)(high >> 32);
}

__device__ static inline const Chunk* chunk_of_tile(const Chunk* chunks, u32 count, u32 tile) {
  u32 low = 0, high = count - 1;
  if (high == 0) return chunks;
  // Most chunks of a slice have one size, so this is mostly the one.
  u32 guess = tile / chunks[1].first_tile;
  if (guess <= high && chunks[guess].first_tile <= tile && (guess == high || tile < chunks[guess + 1].first_tile))
    return chunks + guess;
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (chunks[middle].first_tile <= tile) low = middle; else high = middle - 1;
  }
  return chunks + low;
}

__device__ static inline const Chunk* chunk_of_block(const Chunk* chunks, u32 count, u32 block) {
  u32 low = 0, high = count - 1;
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (chunks[middle].first_block <= block) low = middle; else high = middle - 1;
  }
  return chunks + low;
}

// The plane of the last position that was asked for.
struct Cursor { u64 start, end, base, stride, magic; u32 row_bytes, token_bytes; };

__device__ static inline void begin(Cursor& at) { at.start = at.end = 0; }

__device__ static inline void move_to(Cursor& at, const Plane* planes, const Chunk* chunk, u64 position) {
  if (position >= at.start && position < at.end) return;
  const Plane* first = planes + chunk->first_plane;
  u32 low = 0;
  if (chunk->plane_magic) {
    low = divided((u32)position, chunk->plane_magic);
  } else {
    u32 high = chunk->plane_count - 1;
    while (low < high) {
      u32 middle = (low + high + 1) / 2;
      if (first[middle].prefix * chunk->row_count <= position) low = middle; else high = middle - 1;
    }
  }
  const Plane* plane = first + low;
  at.base = plane->base;
  at.stride = plane->stride;
  at.magic = plane->magic;
  at.row_bytes = plane->row_bytes;
  at.token_bytes = plane->token_bytes;
  at.start = plane->prefix * chunk->row_count;
  at.end = at.start + (u64)at.row_bytes * chunk->row_count;
}

// A vector in its row: `valid` bytes of it hold tokens.
struct Spot { u64 base, stride; u32 row, column, valid; };

template <int V>
__device__ static inline Spot spot_at(Cursor& at, const Plane* planes, const Chunk* chunk, u64 position) {
  move_to(at, planes, chunk, position);
  u32 offset = (u32)(position - at.start);
  Spot spot;
  spot.row = at.magic ? divided(offset, at.magic) : offset;
  spot.column = offset - spot.row * at.row_bytes;
  spot.base = at.base;
  spot.stride = at.stride;
  spot.valid = spot.row < chunk->live_rows ? V : 0;
  if (chunk->tail_tokens != 0 && spot.row + 1 == chunk->live_rows) {
    u32 limit = chunk->tail_tokens * at.token_bytes;
    u32 left = spot.column >= limit ? 0u : limit - spot.column;
    if (left < (u32)V) spot.valid = left;
  }
  return spot;
}

__device__ static inline u8* address_of(const Spot& spot, const Chunk* chunk, const u32* rows) {
  return (u8*)(spot.base + spot.stride * (u64)rows[chunk->first_row + spot.row] + spot.column);
}

// --- vectors of 16, 4 or 1 bytes, as up to four little-endian words ------------------------------------------------

template <int V> struct Vector { u32 words[V == 16 ? 4 : 1]; };
// How many vectors of a part a thread of a digest has under way. Copies have one and more threads instead.
template <int V> struct Unroll { static const int count = V == 1 ? 1 : 2; };

template <int V>
__device__ static inline Vector<V> load(const u8* from, u32 valid) {
  Vector<V> vector;
  if (valid < (u32)V) {
    // Only constants index the words, or they would lie in memory for everybody.
#pragma unroll
    for (u32 n = 0; n < (V == 16 ? 4u : 1u); ++n) {
      vector.words[n] = 0;
      for (u32 byte = 4 * n; byte < valid && byte < 4 * n + 4; ++byte)
        vector.words[n] |= fresh(from + byte) << (8 * (byte % 4));
    }
  } else if constexpr (V == 16) {
    uint4 whole = fresh((const uint4*)from);
    vector.words[0] = whole.x; vector.words[1] = whole.y; vector.words[2] = whole.z; vector.words[3] = whole.w;
  } else if constexpr (V == 4) {
    vector.words[0] = fresh((const u32*)from);
  } else {
    vector.words[0] = fresh(from);
  }
  return vector;
}

template <int V>
__device__ static inline void store(u8* to, u32 valid, const Vector<V>& vector) {
  if (valid < (u32)V) {
#pragma unroll
    for (u32 n = 0; n < (V == 16 ? 4u : 1u); ++n)
      for (u32 byte = 4 * n; byte < valid && byte < 4 * n + 4; ++byte)
        to[byte] = (u8)(vector.words[n] >> (8 * (byte % 4)));
  } else if constexpr (V == 16) {
    uint4 whole;
    whole.x = vector.words[0]; whole.y = vector.words[1]; whole.z = vector.words[2]; whole.w = vector.words[3];
    *(uint4*)to = whole;
  } else if constexpr (V == 4) {
    *(u32*)to = vector.words[0];
  } else {
    *to = (u8)vector.words[0];
  }
}

// --- digests ---------------------------------------------------------------------------------------------------------

// The vector at `position` of a chunk: from its rows, or from staging.
template <int V>
struct Rows {
  const Plane* planes;
  const u32* rows;
  __device__ inline Vector<V> at(Cursor& cursor, const Chunk* chunk, u64 position) const {
    Spot spot = spot_at<V>(cursor, planes, chunk, position);
    return load<V>(spot.valid ? address_of(spot, chunk, rows) : 0, spot.valid);
  }
};

struct Staging {
  const u8* staging;
  __device__ inline Vector<16> at(Cursor&, const Chunk* chunk, u64 position) const {
    u64 left = chunk->length - position;
    return load<16>(staging + chunk->staging + position, left < 16 ? (u32)left : 16u);
  }
};

// The keys lie so that 32 threads with neighbouring vectors read neighbouring keys (see `workers.slice_table`): of 32
// vectors first all first halves of their first words' keys, then all second halves, then those of their second words.
// Words are multiplied with their keys; a single byte is its word's share, since the sum is linear.
template <int V>
__device__ static inline void accumulate(u64 (*sums)[4], const u64* keys, u32 position, const Vector<V>* vectors) {
#pragma unroll
  for (int n = 0; n < (V == 16 ? 4 : 1); ++n) {
    u32 word_at = (position >> 2) + n, vector_at = word_at >> 2;
    const ulonglong2* pair = (const ulonglong2*)keys + (vector_at >> 5) * 256 + (word_at & 3) * 64 + (vector_at & 31);
    ulonglong2 low = pair[0], high = pair[32];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      u64 word = vectors[part].words[n];
      if (V == 1) word <<= 8 * (position & 3u);
      sums[part][0] += low.x * word;
      sums[part][1] += low.y * word;
      sums[part][2] += high.x * word;
      sums[part][3] += high.y * word;
    }
  }
}

template <int V, typename From>
__device__ static inline void digest(const From& from, const Chunk* chunks, u32 chunk_count, const u64* keys, u64* all,
                                     u32 block_count, u32 groups, u32 group) {
  u32 first = blockIdx.x / groups * COLUMN;
  u32 block = blockIdx.x % groups * group;
  u32 last = block + group < block_count ? block + group : block_count;
  const Chunk* chunk = chunk_of_block(chunks, chunk_count, block);
  for (; block < last; block += PARTS) {
    const Chunk* owner[PARTS];
    Cursor cursor[PARTS];
    u64 start[PARTS];
    u32 size[PARTS];
    u64 sums[PARTS][4];
    u32 most = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      while (block + part < last && chunk + 1 < chunks + chunk_count && chunk[1].first_block <= block + part) ++chunk;
      owner[part] = chunk;
      begin(cursor[part]);
      start[part] = (u64)(block + part - chunk->first_block) * BLOCK + first;
      size[part] = 0;
      if (block + part < last && start[part] < chunk->length) {
        u64 left = chunk->length - start[part];
        size[part] = left < COLUMN ? (u32)left : COLUMN;
      }
      if (size[part] > most) most = size[part];
      sums[part][0] = sums[part][1] = sums[part][2] = sums[part][3] = 0;
    }
    for (u32 at = threadIdx.x * V; at < most; at += THREADS * V * Unroll<V>::count) {
      Vector<V> vectors[Unroll<V>::count][PARTS];
#pragma unroll
      for (int step = 0; step < Unroll<V>::count; ++step) {
        u32 offset = at + step * THREADS * V;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          if (offset < size[part]) vectors[step][part] = from.at(cursor[part], owner[part], start[part] + offset);
          else vectors[step][part] = load<V>(0, 0);
        }
      }
#pragma unroll
      for (int step = 0; step < Unroll<V>::count; ++step)
        accumulate<V>(sums, keys, first + at + step * THREADS * V, vectors[step]);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      if (size[part]) REDUCE_ADD(all + 4 * (u64)(block + part), sums[part]);
  }
}

// --- copies ----------------------------------------------------------------------------------------------------------

#define TILE_BOUNDS                                                         \
  const Chunk* chunk = chunk_of_tile(chunks, chunk_count, blockIdx.x);      \
  u64 start = (u64)(blockIdx.x - chunk->first_tile) * TILE;                 \
  u64 left = chunk->length - start;                                         \
  u32 size = left < TILE ? (u32)left : TILE;                                \
  Cursor cursor;                                                            \
  begin(cursor);

template <int V>
__device__ static inline void gather(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                                     u8* staging) {
  TILE_BOUNDS
  Rows<V> from = {planes, rows};
  for (u32 at = threadIdx.x * V; at < size; at += THREADS * V)
    store<V>(staging + chunk->staging + start + at, V, from.at(cursor, chunk, start + at));
}

template <int V>
__device__ static inline void scatter(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                                      const u8* staging) {
  TILE_BOUNDS
  for (u32 at = threadIdx.x * V; at < size; at += THREADS * V) {
    Spot spot = spot_at<V>(cursor, planes, chunk, start + at);
    if (!spot.valid) continue;
    Vector<V> vector = load<V>(staging + chunk->staging + start + at, V);
    store<V>(address_of(spot, chunk, rows), spot.valid, vector);
  }
}

template <int V>
__device__ static inline u32 differs_of(const Vector<V>& one, const Vector<V>& other) {
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < (V == 16 ? 4 : 1); ++n) bits |= one.words[n] ^ other.words[n];
  return bits;
}

// From rows to other rows of the same pool. `what` is 1: copy; 2: compare the rows of both sides; 3: copy, and read
// each source again as soon as it is copied (it comes from the L2 cache then), to compare it with what was written. A
// difference sets its block's sum.
template <int V>
__device__ static inline void copy_rows(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                                        const u32* targets, u64* differs, u32 what) {
  TILE_BOUNDS
  u32 unequal = 0;
  for (u32 at = threadIdx.x * V; at < size; at += THREADS * V) {
    Spot spot = spot_at<V>(cursor, planes, chunk, start + at);
    if (!spot.valid) continue;
    const u8* source = address_of(spot, chunk, rows);
    u8* target = address_of(spot, chunk, targets);
    Vector<V> vector = load<V>(what & 1 ? source : target, spot.valid);
    if (what & 1) store<V>(target, spot.valid, vector);
    if (what & 2) unequal |= differs_of<V>(vector, load<V>(source, spot.valid));
  }
  if (unequal) differs[4 * (chunk->first_block + start / BLOCK)] = 1;
}

// --- entries ---------------------------------------------------------------------------------------------------------

#define KERNEL(bound) extern "C" __global__ void __launch_bounds__(256, bound)
#define ROW_KERNELS(V)                                                                                                \
  KERNEL(2) digest_rows_##V(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,               \
                            const u64* keys, u64* sums, u32 block_count, u32 groups, u32 group) {                     \
    Rows<V> from = {planes, rows};                                                                                    \
    digest<V>(from, chunks, chunk_count, keys, sums, block_count, groups, group);                                     \
  }                                                                                                                   \
  KERNEL(8) gather_##V(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows, u8* staging) {     \
    gather<V>(planes, chunks, chunk_count, rows, staging);                                                            \
  }                                                                                                                   \
  KERNEL(8) scatter_##V(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows, u8* staging) {    \
    scatter<V>(planes, chunks, chunk_count, rows, staging);                                                           \
  }                                                                                                                   \
  KERNEL(8) copy_rows_##V(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,                 \
                          const u32* targets, u64* differs, u32 what) {                                               \
    copy_rows<V>(planes, chunks, chunk_count, rows, targets, differs, what);                                          \
  }

ROW_KERNELS(16)
ROW_KERNELS(4)
ROW_KERNELS(1)

KERNEL(2) digest_staging(const Chunk* chunks, u32 chunk_count, const u64* keys, const u8* staging, u64* sums,
                         u32 block_count, u32 groups, u32 group) {
  Staging from = {staging};
  digest<16>(from, chunks, chunk_count, keys, sums, block_count, groups, group);
}

// Tables in and sums out, without the copy engines: there they would wait behind the bulk copies of other slices.
KERNEL(8) move(const uint4* from, uint4* to, u32 count) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = from[at];
}

// The same, and sums set to zero.
KERNEL(8) load_tables(const uint4* from, uint4* to, u32 count, uint4* sums, u32 sums_count) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = from[at];
  uint4 zero;
  zero.x = zero.y = zero.z = zero.w = 0;
  if (at < sums_count) sums[at] = zero;
}
"""
