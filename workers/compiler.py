"""NVRTC and HIPRTC by ctypes: CUDA C in, device code out. Needs neither a GPU nor a C compiler."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Final

from shm.gpu_libraries import library_files

_CALLS: Final[dict[str, list[object]]] = {
    "CreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p],
    "CompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "DestroyProgram": [POINTER(c_void_p)],
    "GetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "GetProgramLog": [c_void_p, c_char_p],
}
# NVRTC: CUBIN for a real architecture. HIPRTC: its code object.
_CODE: Final = {"nvrtc": ("GetCUBINSize", "GetCUBIN"), "hiprtc": ("GetCodeSize", "GetCode")}


class CompilerUnavailable(Exception):
    """No run-time compiler was found, or it refused the kernels."""


class KernelCompiler:
    """One run-time compiler library."""

    def __init__(self, prefix: str, library: ctypes.CDLL) -> None:
        self.prefix: Final = prefix
        size_name, code_name = _CODE[prefix]
        shapes = {**_CALLS, size_name: [c_void_p, POINTER(c_size_t)], code_name: [c_void_p, c_char_p]}
        self._calls: dict[str, object] = {}
        for name, shape in shapes.items():
            function = getattr(library, f"{prefix}{name}")
            function.argtypes = shape
            function.restype = c_int
            self._calls[name] = function
        self._size_name, self._code_name = size_name, code_name

    @classmethod
    def load(cls, runtime_kind: str) -> "KernelCompiler":
        """The compiler that belongs to a runtime (``cuda`` or ``hip``).

        Raises:
            CompilerUnavailable: it is not here.
        """
        prefix = "nvrtc" if runtime_kind == "cuda" else "hiprtc"
        reasons: list[str] = []
        for name in library_files(prefix, ("13", "12", "7", "6", "5")):
            try:
                return cls(prefix, ctypes.CDLL(name))
            except (OSError, AttributeError) as exc:
                reasons.append(str(exc))
        raise CompilerUnavailable(f"no {prefix} library: {'; '.join(dict.fromkeys(reasons))}")

    def compile(self, source: str, options: list[str]) -> bytes:
        """Compile one source.

        Raises:
            CompilerUnavailable: with the compiler's own log.
        """
        program = c_void_p()
        self._call("CreateProgram", byref(program), source.encode(), b"kernels.cu", 0, None, None)
        try:
            given = (c_char_p * len(options))(*[option.encode() for option in options])
            code = self._try("CompileProgram", program, len(options), given)
            if code:
                raise CompilerUnavailable(f"{self.prefix} refused the kernels (error {code}): {self._log(program)}")
            size = c_size_t()
            self._call(self._size_name, program, byref(size))
            image = ctypes.create_string_buffer(size.value)
            self._call(self._code_name, program, image)
            return image.raw
        finally:
            self._try("DestroyProgram", byref(program))

    def _log(self, program: c_void_p) -> str:
        size = c_size_t()
        self._call("GetProgramLogSize", program, byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        self._call("GetProgramLog", program, text)
        return text.value.decode(errors="replace").strip()

    def _try(self, name: str, *arguments: object) -> int:
        code: int = self._calls[name](*arguments)  # type: ignore[operator]
        return code

    def _call(self, name: str, *arguments: object) -> None:
        code = self._try(name, *arguments)
        if code:
            raise CompilerUnavailable(f"{self.prefix}{name} failed (error {code})")
