"""The GPU kernels, as CUDA C that NVRTC and HIPRTC compile at run time (neither needs a C compiler).

A slice is described by three tables in device memory, so that one launch handles all of it:

* planes (32 bytes each): ``base`` address of row 0, ``stride``, ``prefix`` (bytes of one row of all planes before),
  ``row_bytes``, ``token_bytes``;
* chunks (48 bytes each): where the chunk lies in staging, its length, where its rows begin in the row list, whole rows,
  live rows, tokens of the last live row (0: all), its planes, its first tile and its first block;
* the row list (u32).

A tile is 32 KiB of a chunk in gathered order and one thread block's work; 32 tiles are one block of the digest, so all
that a thread block sums up belongs to one set of four sums. Threads walk a tile in vectors of 16, 4 or 1 bytes, the
largest that divides every base, stride and row of the pool, so a vector never crosses a row.
"""

from typing import Final

TILE_BYTES: Final = 32 * 1024
THREADS: Final = 256
WIDTHS: Final = (16, 4, 1)
ROW_KERNELS: Final = ("digest_rows", "gather", "scatter")
KERNELS: Final = (*(f"{name}_{width}" for name in ROW_KERNELS for width in WIDTHS), "digest_staging", "move")
MOVE_BYTES: Final = 16

SOURCE: Final = r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 32768u
#define BLOCK 1048576u

struct Plane { u64 base, stride, prefix; u32 row_bytes, token_bytes; };
struct Chunk {
  u64 staging, length;
  u32 first_row, row_count, live_rows, tail_tokens, first_plane, plane_count, first_tile, first_block;
};

#ifndef REDUCE_ADD
#ifdef __HIP_PLATFORM_AMD__
#define SHUFFLE_DOWN(value, by) __shfl_down(value, by)
#else
#define SHUFFLE_DOWN(value, by) __shfl_down_sync(0xffffffffu, value, by)
#endif
__device__ static inline void reduce_add(u64* target, u64 value) {
  for (int by = warpSize / 2; by > 0; by >>= 1) value += SHUFFLE_DOWN(value, by);
  if ((threadIdx.x & (warpSize - 1)) == 0) atomicAdd(target, value);
}
#define REDUCE_ADD(target, value) reduce_add(target, value)
#endif

// --- where a byte of a chunk lies --------------------------------------------------------------------------------

__device__ static inline const Chunk* chunk_of(const Chunk* chunks, u32 count, u32 tile) {
  u32 low = 0, high = count - 1;
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (chunks[middle].first_tile <= tile) low = middle; else high = middle - 1;
  }
  return chunks + low;
}

struct Cursor { const Plane* plane; u64 start, end; };

__device__ static inline Cursor cursor_at(const Plane* planes, const Chunk* chunk, u64 position) {
  const Plane* first = planes + chunk->first_plane;
  u32 low = 0, high = chunk->plane_count - 1;
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (first[middle].prefix * chunk->row_count <= position) low = middle; else high = middle - 1;
  }
  Cursor at;
  at.plane = first + low;
  at.start = at.plane->prefix * chunk->row_count;
  at.end = at.start + (u64)at.plane->row_bytes * chunk->row_count;
  return at;
}

__device__ static inline void move_to(Cursor& at, const Chunk* chunk, u64 position) {
  while (position >= at.end) {
    at.plane += 1;
    at.start = at.end;
    at.end += (u64)at.plane->row_bytes * chunk->row_count;
  }
}

struct Spot { u8* address; u32 valid; };

template <int V>
__device__ static inline Spot spot_at(const Cursor& at, const Chunk* chunk, const u32* rows, u64 position) {
  u32 offset = (u32)(position - at.start);
  u32 row = offset / at.plane->row_bytes;
  u32 column = offset - row * at.plane->row_bytes;
  Spot spot;
  spot.valid = V;
  if (row >= chunk->live_rows) {
    spot.valid = 0;
    spot.address = 0;
    return spot;
  }
  if (chunk->tail_tokens != 0 && row + 1 == chunk->live_rows) {
    u32 limit = chunk->tail_tokens * at.plane->token_bytes;
    u32 left = column >= limit ? 0u : limit - column;
    if (left < (u32)V) spot.valid = left;
  }
  spot.address = (u8*)(at.plane->base + at.plane->stride * (u64)rows[chunk->first_row + row] + column);
  return spot;
}

// --- vectors of 16, 4 or 1 bytes, as up to four little-endian words ------------------------------------------------

template <int V>
__device__ static inline void load(const u8* from, u32 valid, u32* words) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if (valid < (u32)V) {
    for (u32 n = 0; n < valid; ++n) words[n / 4] |= (u32)from[n] << (8 * (n % 4));
  } else if (V == 16) {
    uint4 whole = *(const uint4*)from;
    words[0] = whole.x; words[1] = whole.y; words[2] = whole.z; words[3] = whole.w;
  } else if (V == 4) {
    words[0] = *(const u32*)from;
  } else {
    words[0] = *from;
  }
}

template <int V>
__device__ static inline void store(u8* to, u32 valid, const u32* words) {
  if (valid < (u32)V) {
    for (u32 n = 0; n < valid; ++n) to[n] = (u8)(words[n / 4] >> (8 * (n % 4)));
  } else if (V == 16) {
    uint4 whole;
    whole.x = words[0]; whole.y = words[1]; whole.z = words[2]; whole.w = words[3];
    *(uint4*)to = whole;
  } else if (V == 4) {
    *(u32*)to = words[0];
  } else {
    *to = (u8)words[0];
  }
}

// Words are multiplied with their keys; a single byte is its word's share, since the sum is linear.
template <int V>
__device__ static inline void accumulate(u64* sums, const u64* keys, u64 position, const u32* words) {
  u32 first = ((u32)position & (BLOCK - 1)) >> 2;
  int count = V == 16 ? 4 : 1;
#pragma unroll
  for (int n = 0; n < count; ++n) {
    u64 word = words[n];
    if (V == 1) word <<= 8 * ((u32)position & 3u);
    const ulonglong2* pair = (const ulonglong2*)(keys + 4 * (u64)(first + n));
    ulonglong2 low = pair[0], high = pair[1];
    sums[0] += low.x * word;
    sums[1] += low.y * word;
    sums[2] += high.x * word;
    sums[3] += high.y * word;
  }
}

__device__ static inline void add_sums(u64* all, const Chunk* chunk, u64 start, const u64* sums) {
  u64* target = all + 4 * (chunk->first_block + start / BLOCK);
  for (int n = 0; n < 4; ++n) REDUCE_ADD(target + n, sums[n]);
}

// --- kernels ---------------------------------------------------------------------------------------------------------

#define TILE_BOUNDS                                                     \
  const Chunk* chunk = chunk_of(chunks, chunk_count, blockIdx.x);       \
  u64 start = (u64)(blockIdx.x - chunk->first_tile) * TILE;             \
  u64 end = start + TILE < chunk->length ? start + TILE : chunk->length;

template <int V>
__device__ static void digest_rows(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                                   const u64* keys, u64* all) {
  TILE_BOUNDS
  u64 sums[4] = {0, 0, 0, 0};
  u32 words[4];
  u64 position = start + (u64)threadIdx.x * V;
  if (position < end) {
    Cursor at = cursor_at(planes, chunk, position);
    for (; position < end; position += (u64)blockDim.x * V) {
      move_to(at, chunk, position);
      Spot spot = spot_at<V>(at, chunk, rows, position);
      load<V>(spot.address, spot.valid, words);
      accumulate<V>(sums, keys, position, words);
    }
  }
  add_sums(all, chunk, start, sums);
}

template <int V>
__device__ static void gather(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                              u8* staging) {
  TILE_BOUNDS
  u32 words[4];
  u64 position = start + (u64)threadIdx.x * V;
  if (position >= end) return;
  Cursor at = cursor_at(planes, chunk, position);
  for (; position < end; position += (u64)blockDim.x * V) {
    move_to(at, chunk, position);
    Spot spot = spot_at<V>(at, chunk, rows, position);
    load<V>(spot.address, spot.valid, words);
    store<V>(staging + chunk->staging + position, V, words);
  }
}

template <int V>
__device__ static void scatter(const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows,
                               const u8* staging) {
  TILE_BOUNDS
  u32 words[4];
  u64 position = start + (u64)threadIdx.x * V;
  if (position >= end) return;
  Cursor at = cursor_at(planes, chunk, position);
  for (; position < end; position += (u64)blockDim.x * V) {
    move_to(at, chunk, position);
    Spot spot = spot_at<V>(at, chunk, rows, position);
    if (spot.valid == 0) continue;
    load<V>(staging + chunk->staging + position, V, words);
    store<V>(spot.address, spot.valid, words);
  }
}

#define ROW_KERNELS(V)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256) digest_rows_##V(                                               \
      const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows, const u64* keys, u64* sums) {    \
    digest_rows<V>(planes, chunks, chunk_count, rows, keys, sums);                                                 \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256) gather_##V(                                                    \
      const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows, u8* staging) {                   \
    gather<V>(planes, chunks, chunk_count, rows, staging);                                                         \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256) scatter_##V(                                                   \
      const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows, u8* staging) {                   \
    scatter<V>(planes, chunks, chunk_count, rows, staging);                                                        \
  }

ROW_KERNELS(16)
ROW_KERNELS(4)
ROW_KERNELS(1)

extern "C" __global__ void __launch_bounds__(256) digest_staging(
    const Chunk* chunks, u32 chunk_count, const u64* keys, const u8* staging, u64* all) {
  TILE_BOUNDS
  u64 sums[4] = {0, 0, 0, 0};
  u32 words[4];
  for (u64 position = start + (u64)threadIdx.x * 16; position < end; position += (u64)blockDim.x * 16) {
    u64 left = end - position;
    load<16>(staging + chunk->staging + position, left < 16 ? (u32)left : 16u, words);
    accumulate<16>(sums, keys, position, words);
  }
  add_sums(all, chunk, start, sums);
}

// Tables in and sums out, without the copy engines: there they would wait behind the bulk copies of other slices.
extern "C" __global__ void __launch_bounds__(256) move(const uint4* from, uint4* to, u32 count) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = from[at];
}
"""
