"""The GPU kernels on the CPU: their very source, compiled as C++ with every thread run after the other.

``change_at_read(address, number)`` is an engine that writes meanwhile: the byte there is inverted right before a kernel
reads it for the so-manieth time.
"""

import ctypes
import subprocess
from pathlib import Path
from typing import Final

from workers.kernel_source import KERNELS, SOURCE, THREADS

BEFORE: Final = r"""
#include <cstddef>
#define __device__
#define __global__
#define __launch_bounds__(...)
struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim;
struct uint4 { unsigned int x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
#define REDUCE_ADD(target, sums) (add_four(target, sums))
static void add_four(unsigned long long* to, const unsigned long long* of) {
  for (int n = 0; n < 4; ++n) to[n] += of[n];
}
static unsigned char* changing = 0;
static long reads_left = 0;
extern "C" void change_at_read(unsigned char* at, long number) { changing = at; reads_left = number; }
static void before_read(unsigned char* from, size_t size) {
  if (!changing || changing < from || changing >= from + size || --reads_left) return;
  *changing ^= 0xff;
  changing = 0;
}
#define BEFORE_READ(from) before_read((unsigned char*)(from), sizeof(*(from)))
"""


def wrapper(kernel: str) -> str:
    """A function ``run_<kernel>(blocks, arguments...)`` that runs all threads of a kernel."""
    shares = "u32 blocks_, u32 groups, u32 group"
    rows = "const Plane* planes, const Chunk* chunks, u32 chunk_count, const u32* rows"
    if kernel.startswith("digest_rows"):
        shape = f"{rows}, const u64* keys, u64* sums, {shares}"
        names = "planes, chunks, chunk_count, rows, keys, sums, blocks_, groups, group"
    elif kernel.startswith("copy_rows"):
        shape = f"{rows}, const u32* targets, u64* differs, u32 what"
        names = "planes, chunks, chunk_count, rows, targets, differs, what"
    elif kernel == "digest_staging":
        shape = "const Chunk* chunks, u32 chunk_count, const u64* keys, const u8* staging, u64* sums, " + shares
        names = "chunks, chunk_count, keys, staging, sums, blocks_, groups, group"
    elif kernel == "load_tables":
        shape = "const uint4* from, uint4* to, u32 count, uint4* sums, u32 sums_count"
        names = "from, to, count, sums, sums_count"
    elif kernel == "move":
        shape, names = "const uint4* from, uint4* to, u32 count", "from, to, count"
    else:
        shape, names = f"{rows}, u8* staging", "planes, chunks, chunk_count, rows, staging"
    return f"""
extern "C" void run_{kernel}(u32 blocks, {shape}) {{
  blockDim.x = {THREADS};
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < {THREADS}; ++threadIdx.x) {kernel}({names});
}}
"""


def build(directory: Path, compiler: str) -> ctypes.CDLL:
    """Compile and load all kernels as functions ``run_<kernel>(tiles, arguments...)``."""
    source = directory / "kernels.cpp"
    source.write_text(BEFORE + SOURCE + "".join(wrapper(kernel) for kernel in KERNELS))
    library = directory / "kernels.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(library))
