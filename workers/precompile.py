"""Compiling the GPU kernels ahead, in the template, so that its workers need not."""

import ctypes
import logging
import os
from ctypes import c_uint, c_void_p
from typing import Final, NoReturn, cast

import msgpack

from workers.compiler import CompilerUnavailable
from workers.gpu_kernels import compiled, remember
from workers.process import die_with_parent

_log: Final = logging.getLogger(__name__)


def precompile() -> None:
    """In the template: compile for the GPUs of this host.

    It is done in a child of its own, because the libraries that it takes (NVML, NVRTC) may initialise the driver, and a
    process that was forked after that cannot use a device.
    """
    template_pid = os.getpid()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        die_with_parent(template_pid)
        _compile_into(writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        packed = pipe.read()
    os.waitpid(pid, 0)
    if packed:
        remember("cuda", msgpack.unpackb(packed))


def _compile_into(writer: int) -> NoReturn:
    try:
        packed = cast("bytes", msgpack.packb({name: compiled("cuda", name) for name in _nvml_architectures()}))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(packed)
    except (OSError, AttributeError, CompilerUnavailable) as exc:
        _log.info("kernels not compiled ahead reason=%s", exc)
    finally:
        os._exit(0)


def _nvml_architectures() -> set[str]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    nvml.nvmlDeviceGetCount_v2.argtypes = [ctypes.POINTER(c_uint)]
    nvml.nvmlDeviceGetHandleByIndex_v2.argtypes = [c_uint, ctypes.POINTER(c_void_p)]
    number = ctypes.POINTER(ctypes.c_int)
    nvml.nvmlDeviceGetCudaComputeCapability.argtypes = [c_void_p, number, number]
    if nvml.nvmlInit_v2():
        return set()
    try:
        count, found = c_uint(), set[str]()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, major, minor = c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            if not nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
                found.add(f"sm_{major.value}{minor.value}")
        return found
    finally:
        nvml.nvmlShutdown()
