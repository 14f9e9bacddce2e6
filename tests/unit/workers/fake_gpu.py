"""A GPU runtime made of host memory: every call of `shm.gpu_runtime`, and the real kernels.

What is put on a stream is done at once, or after `defer(DEFERRED)` as late as streams and events allow: when the host
waits for it, or for something that waits for it. `defer(KERNELS_LATE)` is between the two: only kernels, and what comes
after them, are done as late as may be. So an order that the code needs and does not demand shows in one of the three.

It knows what a real one punishes: copies to host memory that is not page-locked, or across two registrations, and
addresses that lie in no allocation, fail with error 1; after `fail_next` the next copy fails with the given code, after
`fail_next_sync` the next wait for a stream, `fail_next_event_wait` for an
event; `hide_ranges` makes it keep the sizes of allocations to itself,
`refuse_events` makes it open no event of another process.
"""

import ctypes
import subprocess
from pathlib import Path

from shm.gpu_runtime import GpuRuntime
from tests.unit.workers.emulate import BEFORE, wrapper
from workers.kernel_source import KERNELS, SOURCE

AT_ONCE, DEFERRED, KERNELS_LATE = range(3)
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"

_RUNTIME = r"""
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <mutex>
#define API extern "C" int
typedef unsigned char byte;
static std::mutex lock;
static std::map<byte*, size_t> allocations, locked;
typedef std::function<void()> Action;
typedef Action (*Launcher)(unsigned, void**);  // takes the values of the parameters along
static std::map<std::string, Launcher> kernels;
static int failure = 0, sync_failure = 0, event_failure = 0, ranges_hidden = 0;
static long copies_2d = 0, copies_batched = 0;
static int runtime_version = 13000, driver_version = 13000;
static std::map<void*, int> timed;  // events that take the time
static int pending_event = 0, refused_events = 0, deferring = 0;
static long handles = 1, live = 0, waits = 0, waits_for_events = 0, records = 0;

// Records are numbered through all events. One is pending from its call until its stream has come to it.
struct Task {
  Action run;      // of a kernel, a copy or a filling
  bool kernel;
  long waits_for;  // a record; 0: none
  long records;    // its number; 0: it is none
};
static std::map<void*, std::deque<Task>> streams;
static std::map<void*, long> last_record;  // of an event
static std::map<long, void*> pending;      // the stream of a record

static void run_until(void* stream, long record);
static void take(void* stream) {
  Task task = std::move(streams[stream].front());
  streams[stream].pop_front();
  if (pending.count(task.waits_for)) run_until(pending[task.waits_for], task.waits_for);
  if (task.run) task.run();
  pending.erase(task.records);
}
static void run_until(void* stream, long record) { while (pending.count(record)) take(stream); }
static void run_whole(void* stream) { while (!streams[stream].empty()) take(stream); }
static void run_all() { for (auto& entry : streams) run_whole(entry.first); }
static void run_ahead() {  // everything but kernels, whatever it does not have to wait for
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& entry : streams)
      while (!entry.second.empty() && !entry.second.front().kernel && !pending.count(entry.second.front().waits_for)) {
        take(entry.first);
        moved = true;
      }
  }
}
static void enqueue(void* stream, Task task) {
  streams[stream].push_back(std::move(task));
  if (deferring == 0) run_whole(stream);
  if (deferring == 2) run_ahead();
}

static bool inside(std::map<byte*, size_t>& ranges, const void* at, size_t size) {
  auto next = ranges.upper_bound((byte*)at);
  if (next == ranges.begin()) return false;
  --next;
  return (byte*)at + size <= next->first + next->second;
}

API cudaGetDeviceCount(int* n) { *n = 1; return 0; }
API cudaSetDevice(int n) { return n ? 101 : 0; }
API cudaDeviceCanAccessPeer(int* able, int a, int b) { *able = 0; return a || b ? 101 : 0; }
API cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::mutex> hold(lock);
  if (n > (size_t)1 << 32) return 2;
  *p = aligned_alloc(256, (n + 255) / 256 * 256);
  allocations[(byte*)*p] = n;
  return 0;
}
API cudaFree(void* p) {
  std::lock_guard<std::mutex> hold(lock);
  run_all();
  if (!allocations.erase((byte*)p)) return 1;
  free(p);
  return 0;
}
API cudaMemGetInfo(size_t* f, size_t* t) { *f = 1; *t = 2; return 0; }
API cudaHostRegister(void* p, size_t n, unsigned) {
  std::lock_guard<std::mutex> hold(lock);
  if (failure == 2) { failure = 0; return 2; }
  locked[(byte*)p] = n;
  return 0;
}
API cudaHostUnregister(void* p) {
  std::lock_guard<std::mutex> hold(lock);
  run_all();
  return locked.erase((byte*)p) ? 0 : 713;
}
API cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  if (failure) { int code = failure; failure = 0; return code; }
  const void* device = kind == 1 ? to : from;
  const void* host = kind == 1 ? from : to;
  if (!inside(allocations, device, n)) return 1;
  // Small pageable copies are allowed (plane tables, probes).
  if (n > 65536 && !inside(locked, host, n) && locked.upper_bound((byte*)host) != locked.begin() && n != 8388608) {
    auto next = locked.upper_bound((byte*)host); --next;
    if (next->first + next->second > (byte*)host) return 1;
  }
  enqueue(stream, {[=] { memcpy(to, from, n); }});
  return 0;
}
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  if (failure) { int code = failure; failure = 0; return code; }
  if (!width || !height || to_pitch < width || from_pitch < width) return 1;
  size_t to_size = to_pitch * (height - 1) + width, from_size = from_pitch * (height - 1) + width;
  const void* device = kind == 1 ? to : from;
  const void* host = kind == 1 ? from : to;
  if (!inside(allocations, device, kind == 1 ? to_size : from_size)) return 1;
  if (!inside(kind == 4 ? allocations : locked, host, kind == 1 ? from_size : to_size)) return 1;
  copies_2d++;
  enqueue(stream, {[=] {
    for (size_t n = 0; n < height; ++n) memcpy((byte*)to + n * to_pitch, (const byte*)from + n * from_pitch, width);
  }});
  return 0;
}
API cudaRuntimeGetVersion(int* version) { *version = runtime_version; return 0; }
API cudaDriverGetVersion(int* version) { *version = driver_version; return 0; }
static int batch(void** to, void** from, size_t* sizes, size_t count, const int* attributes, size_t* first,
                 size_t kinds, void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  if (failure) { int code = failure; failure = 0; return code; }
  if (driver_version < 12080) return 36;
  if (!stream || kinds != 1 || *first != 0 || attributes[0] != 1) return 1;
  for (size_t n = 0; n < count; ++n) {
    bool in = inside(allocations, from[n], sizes[n]), out = inside(allocations, to[n], sizes[n]);
    if (!(in || inside(locked, from[n], sizes[n])) || !(out || inside(locked, to[n], sizes[n]))) return 1;
    void *target = to[n], *source = from[n]; size_t size = sizes[n];
    enqueue(stream, {[=] { memcpy(target, source, size); }});
  }
  copies_batched += count;
  return 0;
}
// Since CUDA 13; before, an index of the copy that failed came before the stream.
API cudaMemcpyBatchAsync(void** to, void** from, size_t* sizes, size_t count, const int* attributes, size_t* first,
                         size_t kinds, void* seventh, void* eighth) {
  return batch(to, from, sizes, count, attributes, first, kinds, runtime_version < 13000 ? eighth : seventh);
}
API cudaEventElapsedTime(float* elapsed_ms, void* start, void* end) {
  std::lock_guard<std::mutex> hold(lock);
  if (!timed.count(start) || !timed.count(end) || pending.count(last_record[end])) return 1;
  *elapsed_ms = 1.0f;
  return 0;
}
API cudaStreamCreateWithPriority(void** s, unsigned flags, int) {
  live++; *s = (void*)(handles++);
  return flags == 1 ? 0 : 1;
}
API cudaStreamDestroy(void* s) {
  std::lock_guard<std::mutex> hold(lock);
  run_whole(s);
  streams.erase(s);
  live--;
  return 0;
}
API cudaStreamSynchronize(void* s) {
  std::lock_guard<std::mutex> hold(lock);
  run_whole(s);
  waits++;
  int code = sync_failure; sync_failure = 0;
  return code;
}
API cudaStreamWaitEvent(void* s, void* e, unsigned) {
  std::lock_guard<std::mutex> hold(lock);
  enqueue(s, {Action(), false, last_record[e]});
  return 0;
}
API cudaDeviceGetStreamPriorityRange(int* a, int* b) { *a = 0; *b = -5; return 0; }
API cudaEventCreateWithFlags(void** e, unsigned flags) {
  live++; *e = (void*)(handles++);
  if (!(flags & 2)) timed[*e] = 1;
  return 0;
}
API cudaEventDestroy(void*) { live--; return 0; }
API cudaEventRecord(void* e, void* s) {
  std::lock_guard<std::mutex> hold(lock);
  long record = last_record[e] = ++records;
  pending[record] = s;
  enqueue(s, {Action(), false, 0, record});
  return 0;
}
API cudaEventQuery(void* e) {
  std::lock_guard<std::mutex> hold(lock);
  if (pending_event > 0) { pending_event--; return 600; }
  return pending.count(last_record[e]) ? 600 : 0;
}
API cudaEventSynchronize(void* e) {
  std::lock_guard<std::mutex> hold(lock);
  long record = last_record[e];
  waits_for_events++;
  if (pending.count(record)) run_until(pending[record], record);
  int code = event_failure;
  event_failure = 0;
  return code;
}
struct Opaque { byte reserved[64]; };
API cudaIpcGetMemHandle(Opaque* h, void* p) {
  std::lock_guard<std::mutex> hold(lock);
  if (!allocations.count((byte*)p)) return 1;
  memset(h, 0, 64); memcpy(h, &p, 8);
  return 0;
}
API cudaIpcOpenMemHandle(void** p, Opaque h, unsigned flags) {
  std::lock_guard<std::mutex> hold(lock);
  memcpy(p, &h, 8);
  if (flags != 1 || !allocations.count((byte*)*p)) return 1;
  live++;
  return 0;
}
API cudaIpcCloseMemHandle(void*) { live--; return 0; }
API cudaIpcGetEventHandle(Opaque* h, void* e) { memset(h, 0, 64); memcpy(h, &e, 8); return 0; }
API cudaIpcOpenEventHandle(void** e, Opaque h) {
  if (refused_events) return refused_events;
  memcpy(e, &h, 8); live++;
  return 0;
}
API cudaGetLastError() { return 0; }
extern "C" const char* cudaGetErrorString(int) { return "made up"; }
API cuInit(unsigned) { return 0; }
API cuDeviceGet(int* d, int n) { *d = n; return 0; }
API cuDeviceGetUuid_v2(byte* u, int) { for (int n = 0; n < 16; ++n) u[n] = n; return 0; }
API cuDeviceGetName(char* text, int size, int) { strncpy(text, "Fake GPU", size); return 0; }
API cuDeviceGetAttribute(int* v, int, int) { *v = 9; return 0; }
API cuMemGetAddressRange_v2(void** base, size_t* size, void* p) {
  std::lock_guard<std::mutex> hold(lock);
  if (ranges_hidden || !inside(allocations, p, 1)) return 1;
  auto next = allocations.upper_bound((byte*)p); --next;
  *base = next->first; *size = next->second;
  return 0;
}
API cuModuleLoadData(void** m, const void*) { *m = (void*)1; return 0; }
API cuModuleUnload(void*) { return 0; }
API cuModuleGetFunction(void** f, void*, const char* name) {
  if (!kernels.count(name)) return 500;
  *f = (void*)kernels[name];
  return 0;
}
API cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  std::lock_guard<std::mutex> hold(lock);
  if (gx == 0 || gy != 1 || gz != 1 || bx != 256 || by != 1 || bz != 1 || shared || extra) return 1;
  enqueue(stream, {((Launcher)f)(gx, params), true});
  return 0;
}
extern "C" void defer(int how) { std::lock_guard<std::mutex> hold(lock); run_all(); deferring = how; }
extern "C" void fail_next(int code) { failure = code; }
extern "C" void fail_next_sync(int code) { sync_failure = code; }
extern "C" void fail_next_event_wait(int code) { event_failure = code; }
extern "C" void hide_ranges(int yes) { ranges_hidden = yes; }
extern "C" void refuse_events(int code) { refused_events = code; }
extern "C" void be_version(int version, int driver) { runtime_version = version; driver_version = driver; }
extern "C" long two_dimensional_copies() { return copies_2d; }
extern "C" long batched_copies() { return copies_batched; }
extern "C" long stream_waits() { return waits; }
extern "C" long event_waits_done() { return waits_for_events; }
extern "C" void event_waits(int turns) { pending_event = turns; }
extern "C" long live_handles() { return live; }
extern "C" long live_allocations() { return (long)allocations.size(); }
extern "C" long live_locks() { return (long)locked.size(); }
"""


def _launcher(kernel: str) -> str:
    rows = ["const Plane*", "const Chunk*", "u32", "const u32*"]
    if kernel.startswith("digest_rows"):
        kinds = [*rows, "const u64*", "u64*", "u32", "u32", "u32"]
    elif kernel.startswith("copy_rows"):
        kinds = [*rows, "const u32*", "u64*", "u32"]
    elif kernel == "digest_staging":
        kinds = ["const Chunk*", "u32", "const u64*", "const u8*", "u64*", "u32", "u32", "u32"]
    elif kernel == "load_tables":
        kinds = ["const uint4*", "uint4*", "u32", "uint4*", "u32"]
    elif kernel == "move":
        kinds = ["const uint4*", "uint4*", "u32"]
    else:
        kinds = [*rows, "u8*"]
    values = "".join(f"  auto v{n} = *({kind}*)p[{n}];\n" for n, kind in enumerate(kinds))
    given = ", ".join(f"v{n}" for n in range(len(kinds)))
    return (
        f"static Action launch_{kernel}(u32 blocks, void** p) {{\n{values}"
        f"  return [=] {{ run_{kernel}(blocks, {given}); }};\n}}\n"
        f'static int entered_{kernel} = (kernels["{kernel}"] = launch_{kernel}, 0);\n'
    )


def build_fake_gpu(directory: Path, compiler: str) -> ctypes.CDLL:
    """Compile and load the fake runtime with all kernels."""
    source = directory / "fake_gpu.cpp"
    parts = [BEFORE, SOURCE, *map(wrapper, KERNELS), _RUNTIME, *map(_launcher, KERNELS)]
    source.write_text("".join(parts))
    library = directory / "fake_gpu.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(library))


def fake_runtime(library: ctypes.CDLL) -> GpuRuntime:
    """The bindings over the fake."""
    return GpuRuntime("cuda", library, library)
