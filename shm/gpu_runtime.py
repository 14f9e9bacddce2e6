"""The GPU runtime's public calls by ctypes, the same for CUDA (libcudart, libcuda) and HIP (libamdhip64).

Both runtimes share their calls' names after the prefix (``cudaMalloc``, ``hipMalloc``) and their shapes. Every return
code is checked: a call either works or raises `GpuError`. Addresses, streams, events and modules are plain integers
here; whoever creates one destroys it. ctypes lets other threads run during each call.
"""

import ctypes
import re
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from typing import Final, NamedTuple, TypeAlias

from shm.gpu_batch import batch_copy
from shm.gpu_libraries import library_files, mapped_libraries

HANDLE_BYTES: Final = 64
NOT_READY: Final = 600
HOST_TO_DEVICE: Final = 1
DEVICE_TO_HOST: Final = 2
ANY_DIRECTION: Final = 4  # the runtime tells from the addresses
OUT_OF_MEMORY: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_EVENT_INTERPROCESS: Final = 4
_IPC_LAZY_PEER_ACCESS: Final = 1
_UUID_BYTES: Final = 16
# Below this many copies one call for all of them saves nothing.
_BATCH_FROM: Final = 4
# After one of these nothing in the process can use the device any more: uncorrectable memory, illegal address or
# instruction, launch failures, a context or driver that went away, and "unknown".
STICKY_CODES: Final = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999})


KernelArgument: TypeAlias = c_void_p | c_uint


class Lines(NamedTuple):
    """Lines that begin `pitch` bytes apart, the first one at `address`."""

    address: int
    pitch: int


class GpuError(Exception):
    """A call of the runtime failed.

    Attributes:
        call: its name. `code`: the runtime's number, `text`: the runtime's words.
        sticky: the device is of no more use to this process.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (error {code})")
        self.call = call
        self.code = code
        self.text = text
        self.sticky = code in STICKY_CODES


class GpuUnavailable(Exception):
    """No runtime library could be found or loaded."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, cudaIpcEventHandle_t and their HIP twins: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _UUID_BYTES),)


_RUNTIME_CALLS: Final[dict[str, list[object]]] = {
    "GetDeviceCount": [POINTER(c_int)],
    "SetDevice": [c_int],
    "DeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "Malloc": [POINTER(c_void_p), c_size_t],
    "Free": [c_void_p],
    "MemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "HostRegister": [c_void_p, c_size_t, c_uint],
    "HostUnregister": [c_void_p],
    "MemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "Memcpy2DAsync": [c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p],
    "StreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "StreamDestroy": [c_void_p],
    "StreamSynchronize": [c_void_p],
    "StreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "DeviceGetStreamPriorityRange": [POINTER(c_int), POINTER(c_int)],
    "EventCreateWithFlags": [POINTER(c_void_p), c_uint],
    "EventDestroy": [c_void_p],
    "EventRecord": [c_void_p, c_void_p],
    "EventQuery": [c_void_p],
    "EventSynchronize": [c_void_p],
    "EventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "IpcGetMemHandle": [POINTER(_Handle), c_void_p],
    "IpcOpenMemHandle": [POINTER(c_void_p), _Handle, c_uint],
    "IpcCloseMemHandle": [c_void_p],
    "IpcGetEventHandle": [POINTER(_Handle), c_void_p],
    "IpcOpenEventHandle": [POINTER(c_void_p), _Handle],
    "GetLastError": [],
}

# name here -> (CUDA's driver, HIP). CUDA keeps these in libcuda, HIP in the one library.
_DRIVER_CALLS: Final[dict[str, tuple[str, str, list[object]]]] = {
    "Init": ("cuInit", "hipInit", [c_uint]),
    "DeviceGet": ("cuDeviceGet", "hipDeviceGet", [POINTER(c_int), c_int]),
    "DeviceGetUuid": ("cuDeviceGetUuid_v2", "hipDeviceGetUuid", [POINTER(_Uuid), c_int]),
    "DeviceGetName": ("cuDeviceGetName", "hipDeviceGetName", [ctypes.c_char_p, c_int, c_int]),
    "DeviceGetAttribute": ("cuDeviceGetAttribute", "hipDeviceGetAttribute", [POINTER(c_int), c_int, c_int]),
    "MemGetAddressRange": (
        "cuMemGetAddressRange_v2",
        "hipMemGetAddressRange",
        [POINTER(c_void_p), POINTER(c_size_t), c_void_p],
    ),
    "ModuleLoadData": ("cuModuleLoadData", "hipModuleLoadData", [POINTER(c_void_p), c_void_p]),
    "ModuleUnload": ("cuModuleUnload", "hipModuleUnload", [c_void_p]),
    "ModuleGetFunction": ("cuModuleGetFunction", "hipModuleGetFunction", [POINTER(c_void_p), c_void_p, c_char_p]),
    "LaunchKernel": (
        "cuLaunchKernel",
        "hipModuleLaunchKernel",
        [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    ),
}
_COMPUTE_MAJOR: Final = 75
_COMPUTE_MINOR: Final = 76


def _load(kind: str) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Runtime and driver library of ``cuda`` or ``hip``.

    Raises:
        GpuUnavailable: not found.
    """
    names = library_files("cudart", ("13", "12")) if kind == "cuda" else library_files("amdhip64", ("7", "6", "5"))
    reasons: list[str] = []
    for name in names:
        try:
            runtime = ctypes.CDLL(name)
            return runtime, ctypes.CDLL("libcuda.so.1") if kind == "cuda" else runtime
        except OSError as exc:
            reasons.append(str(exc))
    raise GpuUnavailable(f"no {kind} runtime library: {'; '.join(dict.fromkeys(reasons))}")


class GpuRuntime:
    """The calls of one runtime. Thread-safe; the current device is the calling thread's."""

    def __init__(self, kind: str, runtime: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        self.kind: Final = kind
        self._calls: dict[str, object] = {}
        self._batch = batch_copy(kind, runtime)
        self._error_string = getattr(runtime, f"{kind}GetErrorString")
        self._error_string.argtypes = [c_int]
        self._error_string.restype = c_char_p
        for name, shape in _RUNTIME_CALLS.items():
            self._bind(name, getattr(runtime, f"{kind}{name}"), shape)
        for name, (cuda_name, hip_name, shape) in _DRIVER_CALLS.items():
            symbol = cuda_name if kind == "cuda" else hip_name
            if name == "DeviceGetUuid" and not hasattr(driver, symbol):
                symbol = "cuDeviceGetUuid"
            self._bind(name, getattr(driver, symbol), shape)

    @property
    def copies_in_batches(self) -> bool:
        """Whether `memcpy_many_async` is one call."""
        return self._batch is not None

    @classmethod
    def load(cls) -> "GpuRuntime":
        """The runtime that torch has loaded in this process, else whichever the system has.

        Raises:
            GpuUnavailable: neither CUDA nor HIP is here.
        """
        kinds = ("hip", "cuda") if "libamdhip64" in mapped_libraries() else ("cuda", "hip")
        reasons: list[str] = []
        for kind in kinds:
            try:
                return cls(kind, *_load(kind))
            except (GpuUnavailable, AttributeError) as exc:
                reasons.append(str(exc))
        raise GpuUnavailable("; ".join(reasons))

    def _bind(self, name: str, function: "ctypes._NamedFuncPointer", shape: list[object]) -> None:
        function.argtypes = shape  # type: ignore[assignment]
        function.restype = c_int
        self._calls[name] = function

    def _try(self, name: str, *arguments: object) -> int:
        code: int = self._calls[name](*arguments)  # type: ignore[operator]
        return code

    def _call(self, name: str, *arguments: object) -> None:
        code = self._try(name, *arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> GpuError:
        # The runtime remembers its last error; a later, innocent call would be blamed for it.
        self._try("GetLastError")
        text = self._error_string(code)
        return GpuError(f"{self.kind}{name}", code, text.decode(errors="replace") if text else "unknown")

    # --- devices -----------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Devices that this process may see."""
        count = c_int()
        self._call("GetDeviceCount", byref(count))
        return count.value

    def set_device(self, index: int) -> None:
        """Make a device current on the calling thread (and create its primary context)."""
        self._call("SetDevice", index)

    def device_uuid(self, index: int) -> str:
        """UUID of a device as management tools print it (``GPU-...``, in a MIG slice ``MIG-...``)."""
        self._call("Init", 0)
        device, uuid = c_int(), _Uuid()
        self._call("DeviceGet", byref(device), index)
        self._call("DeviceGetUuid", byref(uuid), device)
        raw = bytes(uuid.bytes)
        if self.kind == "hip":
            return f"GPU-{raw.decode('ascii', errors='replace')}"
        text = raw.hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def find_device(self, uuid: str) -> int | None:
        """Index of the device with this UUID (compared without its ``GPU-`` or ``MIG-``), or None."""
        wanted = _bare(uuid)
        for index in range(self.device_count()):
            if _bare(self.device_uuid(index)) == wanted:
                return index
        return None

    def device_name(self, index: int) -> str:
        """Marketing name of a device."""
        text, device = ctypes.create_string_buffer(256), c_int()
        self._call("DeviceGet", byref(device), index)
        self._call("DeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def compute_capability(self, index: int) -> tuple[int, int]:
        """Major and minor compute capability (CUDA only)."""
        device, value = c_int(), c_int()
        self._call("DeviceGet", byref(device), index)
        found: list[int] = []
        for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
            self._call("DeviceGetAttribute", byref(value), attribute, device)
            found.append(value.value)
        return found[0], found[1]

    def can_access_peer(self, index: int, other: int) -> bool:
        """Whether one device can reach the memory of another by itself."""
        able = c_int()
        self._call("DeviceCanAccessPeer", byref(able), index, other)
        return bool(able.value)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self._call("MemGetInfo", byref(free), byref(total))
        return free.value, total.value

    # --- memory ------------------------------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        """Device memory; at least 256-byte aligned."""
        address = c_void_p()
        self._call("Malloc", byref(address), size_bytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Give device memory back; waits for the device."""
        self._call("Free", address)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Base address and size of the allocation that holds an address."""
        base, size = c_void_p(), c_size_t()
        self._call("MemGetAddressRange", byref(base), byref(size), address)
        return base.value or 0, size.value

    def host_register(self, address: int, size_bytes: int) -> None:
        """Page-lock a range of host memory."""
        self._call("HostRegister", address, size_bytes, 0)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        self._call("HostUnregister", address)

    def memcpy_async(self, target: int, source: int, size_bytes: int, direction: int, stream: int) -> None:
        """Copy on a stream; `direction` is one of the constants above."""
        self._call("MemcpyAsync", target, source, size_bytes, direction, stream)

    def memcpy_2d_async(
        self, target: Lines, source: Lines, width: int, height: int, *, direction: int, stream: int
    ) -> None:
        """Copy `height` lines of `width` bytes on a stream."""
        self._call("Memcpy2DAsync", *target, *source, width, height, direction, stream)

    def memcpy_many_async(self, copies: Sequence[tuple[int, int, int]], direction: int, stream: int) -> None:
        """Copy (target, source, bytes) each on a stream, in one call where the runtime has one for that. None may
        overlap another.
        """
        if len(copies) < _BATCH_FROM or self._batch is None:
            for target, source, size_bytes in copies:
                self._call("MemcpyAsync", target, source, size_bytes, direction, stream)
            return
        code = self._batch(copies, stream)
        if code:
            raise self._error("MemcpyBatchAsync", code)

    # --- streams -----------------------------------------------------------------------------------------------------

    def stream_create(self, *, urgent: bool) -> int:
        """A stream that does not wait for the default stream; `urgent` takes the highest priority, else the lowest."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("DeviceGetStreamPriorityRange", byref(least), byref(greatest))
        priority = greatest.value if urgent else least.value
        self._call("StreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, priority)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream."""
        self._call("StreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait for everything on a stream."""
        self._call("StreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let a stream wait for an event of *this* process. (Never for another's: if that process dies before the event
        is recorded, the stream hangs for ever and its process with it.)
        """
        self._call("StreamWaitEvent", stream, event, 0)

    # --- events ------------------------------------------------------------------------------------------------------

    def event_create(self, *, interprocess: bool = False, timing: bool = False) -> int:
        """An event; waiting for it sleeps. Time can be measured between two with `timing`, which makes them slower."""
        flags = _EVENT_INTERPROCESS if interprocess else _EVENT_BLOCKING_SYNC
        flags |= 0 if timing else _EVENT_DISABLE_TIMING
        event = c_void_p()
        self._call("EventCreateWithFlags", byref(event), flags)
        return event.value or 0

    def event_destroy(self, event: int) -> None:
        """Destroy an event, own or opened."""
        self._call("EventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Mark the present end of a stream."""
        self._call("EventRecord", event, stream)

    def event_done(self, event: int) -> bool:
        """Whether an event is complete; never waits."""
        return self._done("EventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Wait for an event of this process."""
        self._call("EventSynchronize", event)

    def elapsed_s(self, start: int, end: int) -> float:
        """Seconds between two complete events with timing."""
        elapsed_ms = c_float()
        self._call("EventElapsedTime", byref(elapsed_ms), start, end)
        return elapsed_ms.value / 1000

    def _done(self, name: str, subject: int) -> bool:
        code = self._try(name, subject)
        if code == NOT_READY:
            self._try("GetLastError")
            return False
        if code:
            raise self._error(name, code)
        return True

    # --- between processes -------------------------------------------------------------------------------------------

    def ipc_mem_handle(self, address: int) -> bytes:
        """Handle (64 bytes) of the allocation that begins at `address`."""
        handle = _Handle()
        self._call("IpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def ipc_open_mem(self, handle: bytes) -> int:
        """Map another process's allocation; its address here. Each handle may be open once in a process."""
        address = c_void_p()
        self._call("IpcOpenMemHandle", byref(address), _handle(handle), _IPC_LAZY_PEER_ACCESS)
        return address.value or 0

    def ipc_close_mem(self, address: int) -> None:
        """Unmap what `ipc_open_mem` mapped."""
        self._call("IpcCloseMemHandle", address)

    def ipc_event_handle(self, event: int) -> bytes:
        """Handle (64 bytes) of an interprocess event."""
        handle = _Handle()
        self._call("IpcGetEventHandle", byref(handle), event)
        return bytes(handle.reserved)

    def ipc_open_event(self, handle: bytes) -> int:
        """Another process's event, to be asked with `event_done` only."""
        event = c_void_p()
        self._call("IpcOpenEventHandle", byref(event), _handle(handle))
        return event.value or 0

    # --- kernels -----------------------------------------------------------------------------------------------------

    def module_load(self, image: bytes) -> int:
        """Load compiled kernels into the current context."""
        module = c_void_p()
        self._call("ModuleLoadData", byref(module), ctypes.cast(ctypes.create_string_buffer(image), c_void_p))
        return module.value or 0

    def module_unload(self, module: int) -> None:
        """Unload kernels."""
        self._call("ModuleUnload", module)

    def module_function(self, module: int, name: str) -> int:
        """A kernel by its (unmangled) name."""
        function = c_void_p()
        self._call("ModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(
        self, function: int, blocks: int, threads: int, stream: int, arguments: Sequence[KernelArgument]
    ) -> None:
        """Launch a kernel; `arguments` are ctypes values of exactly the kernel's parameter types."""
        pointers = (c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        self._call("LaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU-|MIG-)", "", uuid, flags=re.IGNORECASE).lower()


def _handle(raw: bytes) -> _Handle:
    if len(raw) != HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {HANDLE_BYTES} bytes, got {len(raw)}")
    return _Handle.from_buffer_copy(raw)
